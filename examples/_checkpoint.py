"""The manifest of the example's checkpoints: the settings that must match to resume a run.

Checkpoints are stored as `step-<n>/` in a folder; `fsdp2.checkpoint` writes, finds and checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2 import checkpoint

MUST_AGREE = ("size", "sequence_length", "batch_size", "seed", "corpus_fingerprint", "optimizer")


@dataclass(frozen=True)
class Manifest:
    """The position of a run, and the settings that must match to resume it.

    Contains no random generator state: the initial weights, the batch of a step and the sample
    depend only on the seed and the step, and training draws no random numbers.
    """

    step: int
    bytes_seen: int
    size: str
    sequence_length: int
    batch_size: int
    seed: int
    corpus_fingerprint: str
    optimizer: str

    def as_extra(self) -> dict[str, Any]:
        """Return the manifest as plain data, which `load_latest` loads without `trust=True`."""
        return asdict(self)

    @staticmethod
    def of_extra(extra: Any) -> Manifest:
        """Return the saved manifest.

        Raises:
            TypeError: the checkpoint is not from this program.
        """
        return Manifest(**extra)

    def differences(self, other: Manifest) -> Iterator[Difference]:
        """Yield the differences that prevent `other` from resuming; the position may differ."""
        for name in MUST_AGREE:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield Difference(name, mine, theirs)


@dataclass(frozen=True)
class Difference:
    name: str
    saved: object
    asked: object


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint, or None if there is none.

    Not collective: for a module without parameters, only `extra` is loaded.
    """
    extra = checkpoint.load_latest(folder, nn.Identity(), strict=False)
    return None if extra is None else Manifest.of_extra(extra)


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"
