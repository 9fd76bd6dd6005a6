"""One save on one rank: what it copies and writes, and on the first rank how it ends.

Owns the order of these. It must not know who waits for whom (``_save``, ``_background``).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fsdp2.checkpoint._contents import Contents, Piece
from fsdp2.checkpoint._place import SERIES, give_name, keep_newest, require_written
from fsdp2.checkpoint._publish import Workspace
from fsdp2.checkpoint._room import Room
from fsdp2.checkpoint._saved import METADATA
from fsdp2.checkpoint._writing import RANK, REPORT, Progress, write_metadata, write_part


@dataclass
class Saving:
    """A save as one rank does it.

    Attributes:
        place: the folder that the checkpoint takes.
        workspace: the folder that it is written to.
        keep_last: how many of its series stay; None: it belongs to none.
        copied: tells when a device has made the copies that are written.
    """

    place: Path
    workspace: Workspace
    contents: Contents
    pieces: list[Piece]
    keep_last: int | None
    progress: Progress = field(default_factory=Progress)
    copied: torch.Event | None = None

    def __post_init__(self) -> None:
        self.progress.nbytes = sum(piece.nbytes for piece in self.pieces)

    def copy(self, room: Room) -> None:
        """Let what is written be a copy of what is there now."""
        self.pieces, self.copied = room.copies(self.pieces)

    def write(self) -> None:
        """Write this rank's part."""
        if self.copied is not None:
            self.copied.synchronize()
        write_part(self.workspace.path, self.contents, self.pieces, self.progress)
        self.pieces = []

    def finish(self) -> None:
        """On the first rank, when all have written: give the checkpoint its name."""
        folder = self.workspace.path
        sizes = write_metadata(folder, len(self.contents.ranks), self.contents.writers())
        require_written(folder, sizes)
        for entry in folder.iterdir():  # reports, and what ranks hold locked
            if entry.name.startswith((REPORT, RANK)):
                entry.unlink()
        if self.keep_last is not None:
            (folder / SERIES).touch()
        give_name(self.workspace, self.place)
        if self.keep_last is not None:
            keep_newest(self.place, self.keep_last, self.workspace.token)

    def give_up(self) -> None:
        """On the first rank: leave nothing of the save.

        The metadata goes first: who sees it in a workspace that lost its name takes it for named.
        """
        with contextlib.suppress(OSError):
            (self.workspace.path / METADATA).unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            self.workspace.remove()
