"""Promise: damage to a file of a checkpoint is an error, and after it nothing was changed.

Bits are flipped, blocks zeroed and files cut, at places drawn from a seed, in every kind of file.
A load may succeed only if all that it loaded is what was saved, bit for bit: there are bytes that
carry no value (the padding of a header).
"""

from __future__ import annotations

import collections
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint import _files
from tests.kit.models import seeded
from tests.kit.slow import slow

pytest.importorskip("safetensors")

EXTRA = {"step": 3, "rng": torch.arange(64, dtype=torch.uint8), "names": ["a", "b"]}


def flip(content: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def zero(content: bytes, draw: random.Random) -> bytes:
    """Zero up to 512 bytes, some of which were not."""
    while True:
        start, count = draw.randrange(len(content)), draw.randrange(1, 513)
        damaged = content[:start] + bytes(len(content[start : start + count]))
        damaged += content[start + count :]
        if damaged != content:
            return damaged


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


@dataclass
class Run:
    """A model and its optimizer after a step, and what was loaded beside."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    extra: Any = None

    def bits(self) -> dict[str, Any]:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for number, fields in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number}.{key}": value for key, value in fields.items()}
        found = {k: v.detach().numpy().tobytes() for k, v in tensors.items()}
        groups = [{**group, "params": 0} for group in self.optimizer.param_groups]
        return {**found, "groups": repr(groups), "extra": repr(self.extra)}


def made(seed: int) -> Run:
    model = seeded(lambda: nn.Sequential(nn.Linear(29, 13), nn.Linear(13, 29)), seed)
    model.register_buffer("count", torch.full((3,), seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(2, 29)).sum().backward()
    optimizer.step()
    return Run(model, optimizer)


def save_sharded(folder: Path, run: Run) -> None:
    checkpoint.save(folder, run.model, run.optimizer, extra=EXTRA)
    run.extra = EXTRA


def load_sharded(folder: Path, run: Run) -> None:
    run.extra = checkpoint.load(folder, run.model, run.optimizer)


@dataclass(frozen=True)
class Kind:
    """A kind of file: who writes and reads it, its name, and which part of it is meant."""

    save: Callable[[Path, Run], None]
    load: Callable[[Path, Run], None]
    file: str
    entry: str = ""


def safetensors_of(max_file_bytes: int, file: str) -> Kind:
    return Kind(
        lambda to, run: checkpoint.save_safetensors(to, run.model, max_file_bytes=max_file_bytes),
        lambda folder, run: checkpoint.load_safetensors(folder, run.model),
        file,
    )


KINDS = {
    "data": Kind(save_sharded, load_sharded, "__0_0.distcp"),
    "extra": Kind(save_sharded, load_sharded, "__0_0.distcp", "fsdp2_extra"),
    "metadata": Kind(save_sharded, load_sharded, ".metadata"),
    "safetensors": safetensors_of(10**9, "model.safetensors"),
    "one of several": safetensors_of(1000, "model-00001-of-*.safetensors"),
    "index": safetensors_of(1000, "model.safetensors.index.json"),
}


def damaged_content(
    content: bytes, kind: Kind, folder: Path, harm: Callable[..., bytes], draw: random.Random
) -> bytes:
    if not kind.entry or harm is cut:
        return harm(content, draw)
    entries = _files.read(folder, verify=True, trust=False).entries
    (part,) = next(entry.parts for entry in entries if entry.key == kind.entry)
    end = part.offset + part.length
    return content[: part.offset] + harm(content[part.offset : end], draw) + content[end:]


def outcomes(
    folder: Path, kind: Kind, harm: Callable[..., bytes], count: int, seed: int
) -> collections.Counter[str]:
    """Damage a file `count` times, each time anew, and say what became of each load."""
    found: collections.Counter[str] = collections.Counter()
    draw = random.Random(seed)
    source, target = made(1), made(2)
    kind.save(folder, source)
    (path,) = folder.glob(kind.file)
    content = path.read_bytes()
    before = target.bits()
    for number in range(count):
        damaged = damaged_content(content, kind, folder, harm, draw)
        path.write_bytes(damaged)
        try:
            kind.load(folder, target)
        except (fsdp2.ConfigError, fsdp2.StateError):
            found["refused"] += 1
            assert target.bits() == before, f"number {number}: changed, and then refused"
        else:
            fresh = made(2)
            path.write_bytes(content)
            kind.load(folder, fresh)
            assert target.bits() == fresh.bits(), f"number {number}: loaded silently"
            found["the same"] += 1
            target = made(2)
        path.write_bytes(content)
    return found


@pytest.mark.parametrize("count", [4, slow(40)])
@pytest.mark.parametrize("harm", [flip, zero, cut])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error(
    tmp_path: Path, kind: str, harm: Callable[..., bytes], count: int
) -> None:
    found = outcomes(tmp_path / "saved", KINDS[kind], harm, count, seed=count)
    assert found.total() == count
    # the keys "fsdp2" and "format" of a header, spaces of an index
    most = max(1, count // 5) if kind in ("safetensors", "one of several", "index") else 0
    assert found["the same"] <= most, found


def test_without_verifying_values_are_not_looked_at(tmp_path: Path) -> None:
    """`verify=False` reads what is there: the test above would fail without sums."""
    source, target = made(1), made(2)
    for save, load, name in (
        (checkpoint.save, checkpoint.load, "__0_0.distcp"),
        (checkpoint.save_safetensors, checkpoint.load_safetensors, "model.safetensors"),
    ):
        folder = tmp_path / name
        save(folder, source.model)  # type: ignore[operator]  # two functions of the same arguments
        content = bytearray((folder / name).read_bytes())
        weight = source.model.get_parameter("0.weight").detach().numpy().tobytes()
        content[content.index(weight) + 1] ^= 1
        (folder / name).write_bytes(content)
        with pytest.raises(fsdp2.StateError, match="checksum"):
            load(folder, target.model)  # type: ignore[operator]  # as above
        load(folder, target.model, verify=False)  # type: ignore[operator]  # as above
        here, there = (run.model.get_parameter("0.weight") for run in (target, source))
        assert (here != there).sum() == 1
        shutil.rmtree(folder)
