"""What the hosts of `tests.kit.hosts` train: a small model, saved after every step.

    torchrun ... -m tests.kit.hosts_program FOLDER STEPS TIMEOUT_S [CUT_IN]

The batch of a step is the same for any number of ranks, so losses do not depend on who trains. In
the middle of step CUT_IN each rank says that it is there, and waits until the link is cut; once.
What happens is appended to FOLDER/events as JSON lines. Clocks of one machine's namespaces agree.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint

ROWS = 8
RATE = 0.05
HOST = os.environ.get("FSDP2_TEST_HOST", socket.gethostname())


def say(folder: Path, kind: str, **what: Any) -> None:
    """Append an event; one write each, so that lines of several processes do not mix."""
    told = {"event": kind, "host": HOST, "at": time.monotonic(), **what}
    with (folder / "events").open("a") as events:
        events.write(json.dumps(told) + "\n")


def newest(folder: Path) -> Path | None:
    """Return the last checkpoint; a save is published whole, under its name."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    return found[-1] if found else None


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


def build(middle: nn.Module | None = None) -> nn.Sequential:
    between = middle or nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), between, nn.Linear(16, 16), nn.Linear(16, 4))


class InTheMiddle(nn.Module):
    """Wait in a backward, between two units, until the link is cut."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.is_armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_armed:
            x.register_hook(self._wait)
        return x

    def _wait(self, grad: torch.Tensor) -> None:
        say(self.folder, "in the middle", rank=dist.get_rank())
        while not (self.folder / "is-cut").exists():
            time.sleep(0.02)


def main(folder: Path, steps: int, timeout_s: float, cut_in: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    middle = InTheMiddle(folder)
    model = build(middle)
    for unit in (model[0], model[3], model[4], model):
        fsdp2.fully_shard(unit)
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=RATE)
    start, last = 0, newest(folder)
    if last is not None:
        start = checkpoint.load(last, model, optimizer)["step"]
    say(folder, "starts", rank=rank, ranks=size, step=start)
    for step in range(start, steps):
        mine = batch_of(step).chunk(size)[rank]
        middle.is_armed = step == cut_in and not (folder / "is-cut").exists()
        optimizer.zero_grad()
        loss = model(mine).square().sum() * size / ROWS  # gradients are means over ranks
        loss.backward()
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        say(folder, "step", rank=rank, ranks=size, step=step, loss=total.item())
        checkpoint.save(folder / f"step-{step + 1}", model, optimizer, extra={"step": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    into = Path(sys.argv[1])
    try:
        main(into, int(sys.argv[2]), float(sys.argv[3]), int((sys.argv[4:] or ["-1"])[0]))
    except Exception as error:
        say(into, "error", name=type(error).__name__, text=str(error), rank=os.environ["RANK"])
        raise
