"""Sharded checkpoints on disk, replaced only by whole ones.

A folder of checkpoints holds `step-<n>/` with the shards and `manifest.json`, and the file
`latest`, which names the one to resume from. A save goes to `.partial-step-<n>` first. Only when
all ranks have written it is it renamed, then `latest` replaced, then older ones deleted: whatever
moment a save is cut short at, `latest` names a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

LATEST = "latest"
PARTIAL_PREFIX = ".partial-"
NAME = re.compile(r"step-\d{8}(\.\d+)?")


@dataclass(frozen=True)
class Manifest:
    """Where a run stood, and what must be equal for another run to go on from there.

    There is no state of random generators: the initial weights, the batch of a step and the sample
    are functions of the seed and the step, and the model draws nothing while it trains.
    """

    step: int
    bytes_seen: int
    size: str
    sequence_length: int
    batch_size: int
    seed: int
    corpus_fingerprint: str
    optimizer: str = "adamw"

    def differences(self, other: Manifest) -> Iterator[Difference]:
        """Yield what keeps `other` from going on here; a position may differ."""
        for name in (
            *("size", "sequence_length", "batch_size", "seed", "corpus_fingerprint", "optimizer"),
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield Difference(name, mine, theirs)


@dataclass(frozen=True)
class Difference:
    name: str
    saved: object
    asked: object


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    manifest: Manifest


def read_latest(folder: Path) -> SavedCheckpoint | None:
    """Return the checkpoint that `latest` names, or None where there is none."""
    try:
        path = folder / (folder / LATEST).read_text().strip()
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        return None
    return SavedCheckpoint(path, Manifest(**manifest))


def save(folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer) -> Path:
    """Write a checkpoint from all ranks together and make it the latest; return its folder."""
    is_first = dist.get_rank() == 0
    name = _free_name(folder, manifest.step)
    partial = folder / f"{PARTIAL_PREFIX}{name}"
    if is_first:
        for leftover in folder.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover)
    dist.barrier()  # no rank writes before the leftovers of an earlier, cut-short save are gone
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if is_first:
        _write_synced(partial / "manifest.json", json.dumps(asdict(manifest), indent=2))
        publish(folder, name)
    dist.barrier()  # when save returns, on any rank, the checkpoint is there
    return folder / name


def publish(folder: Path, name: str) -> None:
    """Turn the whole `.partial-<name>` into the latest checkpoint and delete the ones before it."""
    os.rename(folder / f"{PARTIAL_PREFIX}{name}", folder / name)
    _sync_folder(folder)
    pointer = folder / f"{LATEST}.new"
    _write_synced(pointer, name + "\n")
    os.replace(pointer, folder / LATEST)
    _sync_folder(folder)
    for older in folder.iterdir():
        if NAME.fullmatch(older.name) and older.name != name:
            shutil.rmtree(older)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill model and optimizer from a checkpoint, whatever the mesh that it was written on."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _free_name(folder: Path, step: int) -> str:
    """Return the name for `step`, numbered if an earlier run's checkpoint of that step is there.

    All ranks must agree, so rank 0 looks.
    """
    name = [f"step-{step:08d}"]
    if dist.get_rank() == 0:
        attempt = 0
        while (folder / name[0]).exists():
            attempt += 1
            name[0] = f"step-{step:08d}.{attempt}"
    dist.broadcast_object_list(name)
    return name[0]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
