"""What a checkpoint of the example says about its run, and what must be equal to go on from it.

Checkpoints lie in a folder as `step-<n>/`, which `fsdp2.checkpoint` writes, finds and checks.
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
    optimizer: str

    def as_extra(self) -> dict[str, Any]:
        """Return it as plain data, which `load_latest` returns without being told to trust it."""
        return asdict(self)

    @staticmethod
    def of_extra(extra: Any) -> Manifest:
        """Return what was saved.

        Raises:
            TypeError: the checkpoint is not one of this program.
        """
        return Manifest(**extra)

    def differences(self, other: Manifest) -> Iterator[Difference]:
        """Yield what keeps `other` from going on here; a position may differ."""
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
    """Return what the newest checkpoint says, or None where there is none.

    It needs no other rank: into a module without parameters it loads nothing but `extra`.
    """
    extra = checkpoint.load_latest(folder, nn.Identity(), strict=False)
    return None if extra is None else Manifest.of_extra(extra)


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"
