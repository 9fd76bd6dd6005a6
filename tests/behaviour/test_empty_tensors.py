"""Promise: a tensor without elements is saved and loaded as any other, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint import _contents
from tests.kit.in_turn import advance
from tests.kit.models import seeded
from tests.kit.parity import make_mesh, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow

SHAPES = {"rows": (0, 4), "columns": (4, 0), "inner": (3, 0, 2), "vector": (0,)}


class Hollow(nn.Module):
    """Parameters and buffers with a dim of size 0, beside one that has elements."""

    def __init__(self, full: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5) if full else nn.Identity()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
            self.register_buffer(f"{name}_buffer", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() + sum(getattr(self, name).sum() for name in SHAPES)


def made(seed: int, steps: int = 1, full: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: Hollow(full), seed)
    fsdp2.fully_shard(model, mesh=make_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((2, 3), 0.5 + step)).backward()
        advance(optimizer)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    return checkpoint.full_state(model, optimizer, rank0_only=False)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def without_empty(contents: Any) -> Any:
    """Return what a save listed before tensors without elements were saved."""
    common = [c for c in contents.common if not isinstance(c.value, Tensor) or c.value.numel()]
    return _contents.Contents(common, contents.rest, contents.ranks, contents.number)


WAYS = ("save", "background", "neighbours", "older", "dcp reads", "dcp writes", "full", "sharded",
        "local")  # fmt: skip


@pytest.mark.parametrize("full", [True, slow(False)])
@pytest.mark.parametrize("way", ["save", *map(slow, WAYS[1:])])
@ranks(2, slow(3))
def test_a_state_with_empty_tensors_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, full: bool
) -> None:
    source, target = made(1, full=full), made(2, steps=0, full=full)
    before, place = state_of(*source), tmp_path / "run" / "one"
    extra = {"average": source[0].rows.detach(), "plain": torch.zeros(2, 0)}
    if way == "neighbours":
        copies = checkpoint.NeighbourCopies("hollow", memory=tmp_path, distance=1)
        copies.save(*source, extra=extra)
        copies.wait()
        found = checkpoint.load_latest(place.parent, *target, copies=copies)
        copies.remove()
    elif way == "dcp writes":
        model, optim = get_state_dict(*source)
        state = {"model": model, "optimizer": optim, "extra": extra}
        dcp.save(state, checkpoint_id=place)
        found = checkpoint.load(place, *target)
    elif way == "dcp reads":
        checkpoint.save(place, *source)
        model, optim = get_state_dict(*target)
        dcp.load({"model": model, "optimizer": optim}, checkpoint_id=place)
        set_state_dict(*target, model_state_dict=model, optim_state_dict=optim)
        found = extra
    elif way in ("full", "sharded", "local"):
        getattr(checkpoint, f"load_{way}_state")(
            target[0], getattr(checkpoint, f"{way}_state")(*source), target[1]
        )
        found = extra
    else:
        with monkeypatch.context() as patched:
            if way == "older":
                of = _contents.Contents.of
                older = staticmethod(lambda *args: without_empty(of(*args)))
                patched.setattr(_contents.Contents, "of", older)
                extra.pop("average")
            handle = checkpoint.save(place, *source, extra=extra, background=way == "background")
        if handle is not None:
            handle.wait()
        found = checkpoint.load_latest(place.parent, *target)
    after = state_of(*target)
    assert_same(after["model"], before["model"])
    if way != "older":
        assert_same(after["optimizer"]["state"], before["optimizer"]["state"])
        shapes = {name: tuple(value.shape) for name, value in found.items()}
        assert shapes == {"average": (0, 4), "plain": (2, 0)}
    target[0](torch.ones(2, 3)).backward()
    target[1].step()


@ranks(slow(2))
def test_safetensors_have_empty_tensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    source, target = made(1)[0], made(2)[0]
    checkpoint.save_safetensors(tmp_path, source)
    checkpoint.load_safetensors(tmp_path, target)
    assert_same(state_of(target)["model"], state_of(source)["model"])
    for name, shape in SHAPES.items():
        assert tuple(whole(getattr(target, name)).shape) == shape
