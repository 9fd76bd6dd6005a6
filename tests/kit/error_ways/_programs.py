"""What most ways need: a small model, a batch, a step, and a folder that both ranks see."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2

WIDTH = 4


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def build(**kwargs: Any) -> Any:
    """Return a sharded model: each layer, and the whole."""
    torch.manual_seed(0)
    model = Net()
    for layer in model:
        fsdp2.fully_shard(layer, **kwargs)
    return fsdp2.fully_shard(model, **kwargs)


def x() -> Tensor:
    return torch.ones(2, WIDTH)


def train(model: nn.Module, *args: Any) -> None:
    """Run one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*(args or (x(),))).sum().backward()
    optimizer.step()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x()).sum().backward()
    optimizer.step()
    return optimizer


MADE: list[Path] = []


def shared_folder() -> Path:
    """Return an empty folder that both ranks see, until the test ends."""
    found = [tempfile.mkdtemp(prefix="ways-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found, src=0)
    MADE.append(Path(found[0]))
    return MADE[-1]


@contextlib.contextmanager
def full_disk(most_nbytes: int = 200) -> Iterator[None]:
    """Let the system refuse to write more than this to a file, as a full disk or a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
