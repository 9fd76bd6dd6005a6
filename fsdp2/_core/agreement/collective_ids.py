"""The stamps of one group: which of its collectives carry one, and when they get their numbers.

Owns the choice, and what the stamps have in common. It must not know how a collective travels: the
owners of buffers tell each stamp (``Stamp.register``). See [Note: agreement] in ``agreement``.
"""

from __future__ import annotations

import weakref

import torch

from fsdp2._core.agreement.stamp import ReductionStamps, Stamp
from fsdp2._core.base import torch_modes
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.mesh import DataMesh, MeshAxis


class CollectiveIds:
    """The stamps of a group. Who gives up on one of them gives up on all."""

    def __init__(self, data: DataMesh, device: torch.device) -> None:
        self._device = device
        self.fqn: str | None = None  # None: no numbers yet, see enroll
        self.gather = self.make(data.shard, "gather")  # None: ranks see nothing of each other there
        self.gather_smaller: Stamp | None = None  # between forward and backward
        self.reductions = ReductionStamps()
        self.renew_reductions(data)

    @property
    def all(self) -> list[Stamp]:
        stamps = [self.gather, self.gather_smaller, *self.reductions.all]
        return [stamp for stamp in stamps if stamp is not None]

    @property
    def looks(self) -> list[LateLook]:
        """What looks later at what the group sends; nothing does on a CPU."""
        return [stamp.look for stamp in self.all if stamp.look is not None]

    @property
    def broken(self) -> str | None:
        """Why nothing can be sent any more; None if all is well."""
        return next((stamp.broken for stamp in self.all if stamp.broken is not None), None)

    def covers(self, axis: MeshAxis) -> bool:
        """True if ranks can see what others send over an axis."""
        is_sent = self._device.type != "meta" and torch_modes.has_real_memory()
        return is_sent and axis.size > 1 and axis.is_real

    def make(self, axis: MeshAxis, kind: str) -> Stamp | None:
        """Return a stamp for one of the group's collectives; None if the axis has none."""
        if not self.covers(axis):
            return None
        stamp = Stamp(axis, kind, weakref.WeakMethod(self._beside), self._device)
        if self.fqn is not None:
            stamp.enroll(self.fqn)
        return stamp

    def _beside(self) -> list[Stamp]:
        return self.all

    def renew_reductions(self, data: DataMesh) -> None:
        """Number the group's reductions over the axes of ``data`` from now on."""
        for stamp in self.reductions.all:
            stamp.retire()
        again = "all_reduce" if data.layers is None else "reduce_outer"
        made = [self.make(data.scattered, "reduce"), self.make(data.summed, again)]
        self.reductions = ReductionStamps([stamp for stamp in made if stamp is not None])

    def enroll(self, fqn: str) -> None:
        """Take numbers, which every rank does in the same order, and a name for errors."""
        self.fqn = fqn
        for stamp in self.all:
            stamp.enroll(fqn)
