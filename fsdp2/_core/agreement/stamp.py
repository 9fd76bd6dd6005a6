"""Stamps: numbers that collectives send after their data, and that receivers check.

Contains the agreement code that runs in every step; see [Note: agreement] in ``agreement``. Issues
no collectives: the owners of the buffers issue them, and call ``Stamp.register``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.agreement.agreement import (
    GATHER_STAMP_NUMEL,
    HOST,
    NAMES,
    NUMBER_BITS,
    STAMP_NUMEL,
    Agreement,
    NamedShape,
    Operation,
    Over,
    Signature,
    agreement_of,
    fields_of,
    number_of_digits,
    stamp_of,
)
from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import Wire

NO_NUMBER = -2


@dataclass(eq=False)
class Stamp:
    """The number of one operation of a param group; also checks the numbers received. ``group``
    returns all stamps of the group, because a rank that gives up reports this in all of them."""

    axis: MeshAxis
    kind: str
    group: weakref.ref[Callable[[], Iterable[Stamp]]] | None = None
    device: torch.device = HOST  # the device of the operation's buffers
    seen: Tensor | None = None  # device memory for the stamps of all ranks
    number: int = NO_NUMBER
    name: str = ""
    tensors: tuple[NamedShape, ...] = ()
    operation: Operation | None = None  # as registered

    def __post_init__(self) -> None:
        self.agreement = agreement_of(self.axis)
        self.code = [0.0] * (GATHER_STAMP_NUMEL if self.kind == "gather" else STAMP_NUMEL)
        # for a gather: the row to send and its length, rows received, bytes expected from each rank
        self._row = torch.empty(0, dtype=torch.float32, device=HOST)
        self._width = 0
        self._landed = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._expected = b""
        self._dtype = torch.uint8
        self.agreement.members.add(self)

    def beside(self) -> Iterable[Stamp]:
        """Return all stamps of the group, or none if the group was deleted."""
        stamps = None if self.group is None else self.group()
        return () if stamps is None else stamps()

    def enroll(self, fqn: str) -> None:
        """Number and name the operation. All ranks must call this in the same order."""
        self.name = f"{fqn or '<root>'} ({NAMES[self.kind]})"
        self.number = self.agreement.number(self.name)
        self.code = stamp_of(self.kind, self.number)

    def update_signature(self, signature: Signature) -> bool:
        """Add the operation's traits to its number; return True if the number has changed."""
        before = self.number
        if before != NO_NUMBER:
            own = before % (1 << NUMBER_BITS)
            self.agreement.tensors[own] = self.tensors = signature.tensors
            self.number = own | signature.bits << NUMBER_BITS
            self.code = stamp_of(self.kind, self.number)
        return self.number != before

    def register(
        self,
        wire: Wire,
        numels: Sequence[int],
        dtype: torch.dtype,
        seen_as: torch.dtype,
        start: int,
        reduction: Any = None,
        pieces: tuple[int, ...] = (),
    ) -> None:
        if self.number == NO_NUMBER:
            return
        self.operation = Operation(
            self.number,
            self.kind,
            tuple(numels),
            dtype,
            seen_as,
            start,
            weakref.ref(wire),
            Over(self.axis),
            reduction,
            wire.is_custom,
            self.device,
            pieces,
        )
        self.agreement.operations[self.number] = self.operation

    def before(self) -> None:
        """Raise StateError unless every rank is about to issue this operation."""
        agreement, number = self.agreement, self.number
        recent = agreement.recent
        if agreement.predicted.get(recent) == number:  # certain: no check is needed
            agreement.recent = (*recent[1:], number)
        elif number != NO_NUMBER:
            if number not in agreement.operations:
                self._come_back()
            agreement.before(number, self.device)

    def _come_back(self) -> None:
        """Register the operation again if it was dropped as idle."""
        if self.operation is not None and self.operation.number == self.number:
            own = fields_of(self.number)[0]
            self.agreement.names[own] = self.name
            self.agreement.tensors[own] = self.tensors
            self.agreement.operations[self.number] = self.operation

    @property
    def is_checked(self) -> bool:
        return self.number != NO_NUMBER and not self.agreement.is_silent

    # Stamps of gathers.

    def expect(self, dtype: torch.dtype, numel: int) -> None:
        """Set the row that ranks send and expect: the current number, zero-padded to ``numel``."""
        row = torch.zeros(numel, dtype=torch.float32, device=HOST)
        row[: len(self.code)] = torch.tensor(self.code, dtype=torch.float32, device=HOST)
        self._row, self._dtype, self._width = row, dtype, numel
        self._expected = bytes(row.to(dtype).view(torch.uint8).tolist())
        if self.seen is not None:
            self._look_late()

    def write(self, row: Tensor) -> None:
        """Write the number into the row ``[numel]`` that this rank sends."""
        if self._row.device != row.device:
            self._row = self._row.to(row.device)  # only once: the host waits for this copy
        row.copy_(self._row)

    def landing(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory for all ranks' rows. On a CPU, all stamps of an axis share this memory."""
        if device.type not in ("cpu", "meta"):
            return self._look_late().view(torch.uint8)
        landed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if type(landed) is Tensor and landed.is_cpu:  # not a fake tensor
            landed = self.agreement.landed.setdefault(nbytes, landed)
        self._landed = landed
        return landed

    def arrived(self) -> None:
        """Compare the stamps received in a gather. On a device, they are compared later."""
        if self.seen is not None:
            return
        expected = self._expected * self.axis.size  # not cached: large if there are many ranks
        # string_at takes a fifth of the instructions of torch.equal
        if string_at(self._landed.data_ptr(), len(expected)) != expected:
            self.check(self._landed.view(self._dtype).view(self.axis.size, -1))

    def _look_late(self) -> Tensor:
        """Return device memory ``[W, numel]`` for a gather's stamps, which are checked later."""
        shape = self.axis.size, self._width
        # copied synchronously from the host, because gathers may be in flight in a lane
        row = torch.zeros(self._width, dtype=self._dtype, device=HOST)
        row[: len(self.code)] = torch.tensor(self.code, dtype=torch.float32, device=HOST)
        if self.seen is None or (self.seen.dtype, self.seen.shape) != (self._dtype, shape):
            self.seen = torch.empty(shape, dtype=self._dtype, device=self.device)
        self.seen.copy_(row.expand(shape))  # the expected content, until a gather overwrites it
        self.agreement.look_late().add(self, self._expected, self.axis.size)
        return self.seen

    def check(self, seen: Tensor) -> None:
        """Check a gather's stamps ``[W, n]``, some of which differ from this stamp."""
        if self.is_checked:
            numbers = [number_of_digits(row) for row in seen[:, :GATHER_STAMP_NUMEL].tolist()]
            self.agreement.compare(self.number, numbers, self.axis)

    def check_sum(self, seen: Tensor, number: int | None = None) -> None:
        """Check a sum of stamps ``[n]`` that differs from the expected one. Pass as
        ``number`` the stamp's number at the time of the reduction, if it has changed since."""
        if self.is_checked:
            known = self.number if number is None else number
            self.agreement.compare_sum(known, seen.tolist(), self.axis)

    def silence(self, is_silent: bool) -> bool:
        """Disable or enable checks on the process group; return True if they had been disabled."""
        before, self.agreement.is_silent = self.agreement.is_silent, is_silent
        return before

    def failed(self, error: Exception) -> StateError:
        return self.agreement.lose(self.number, error)


class ReductionStamps:
    """Stamps of a group's reduce-scatter and all-reduce; none if ranks exchange no real data."""

    def __init__(self, stamps: Sequence[Stamp] = ()) -> None:
        self.all = tuple(stamps)
        self.numel = len(self.all) * STAMP_NUMEL  # number of elements, after the gradient counts
        # convert errors raised by the reduce-scatter and by the all-reduce
        self.failed = self.all[0].failed if self.all else None
        self.failed_sum = self.all[-1].failed if self.all else None
        self._joined = b""  # the expected sum of all ranks' stamps, as bytes
        self._at = 0  # byte offset of the stamps
        self._sum = (0, torch.float32)  # elements and dtype of the reduced data

    @property
    def codes(self) -> list[float]:
        return [value for stamp in self.all for value in stamp.code]

    def number(self, signature_of: Callable[[bool], Signature]) -> bool:
        """Add traits, ``signature_of(is_reduce)``, to all numbers; return True if any changed."""
        changed = [
            stamp.update_signature(signature_of(stamp.kind == "reduce")) for stamp in self.all
        ]
        return any(changed)

    def expect(
        self,
        codes: Sequence[float],
        ranks: float,
        dtype: torch.dtype,
        numel: int,
    ) -> None:
        """Set the expected sum of codes over ``ranks``, at the end of reduced data ``[numel]``."""
        joined = torch.tensor([code * ranks for code in codes], dtype=dtype, device=HOST)
        self._joined = bytes(joined.view(torch.uint8).tolist())
        self._at, self._sum = (numel - self.numel) * dtype.itemsize, (numel, dtype)

    def register(
        self,
        wire: Wire,
        scattered: Sequence[int],
        sent_as: torch.dtype,
        reduction: Any,
        pieces: tuple[int, ...] = (),
    ) -> None:
        """Register how reductions are sent. ``scattered``: for each collective of a reduce-scatter,
        the elements per rank, in dtype ``sent_as``; the first collective ends with the stamps. An
        all-reduce sends the ``numel`` elements set by ``expect``. ``pieces``: see ``Operation``."""
        numel, dtype = self._sum
        for position, stamp in enumerate(self.all):
            start = position * STAMP_NUMEL - self.numel
            if stamp.kind == "reduce":
                at = scattered[0] + start
                stamp.register(wire, scattered, sent_as, dtype, at, reduction, pieces)
            else:
                stamp.register(wire, [numel], dtype, dtype, numel + start, reduction)

    def erase(self, partial: Tensor) -> None:
        """Zero the stamps at the end of saved sums ``[..., numel]``: later stamps may differ."""
        if self.all:
            partial[..., -self.numel :] = 0

    def before(self) -> None:
        if self.all:
            self.all[0].before()

    def before_sum(self) -> None:
        if self.all:
            self.all[-1].before()

    def arrived(self, reduced: Tensor) -> None:
        """Compare the stamps at the end of reduced data ``[numel]``. Skip data on a device."""
        if not self.all or not reduced.is_cpu:
            return
        joined = self._joined
        if string_at(reduced.data_ptr() + self._at, len(joined)) == joined:
            return
        seen = reduced[-self.numel :]
        if self.all[0].is_checked:
            for position, stamp in enumerate(self.all):
                # other bytes may be valid too, if several backwards were summed
                stamp.check_sum(seen[position * STAMP_NUMEL : (position + 1) * STAMP_NUMEL])

    def arrived_late(self, reduced: Tensor) -> None:
        """On a device, check the sum over replicas later: gather stamps do not cover replicas."""
        if self.all and not reduced.is_cpu:
            last = self.all[-1]
            last.agreement.look_late().see_sum(last, last.number, reduced[-STAMP_NUMEL:])


class CollectiveIds:
    """The stamps of a group's collectives, and their numbering."""

    def __init__(self, data: DataMesh, device: torch.device) -> None:
        self._device = device
        self.fqn: str | None = None  # None until ``enroll`` numbers the stamps
        self.gather = self.make(data.shard, "gather")  # None if the axis is not covered
        self.gather_smaller: Stamp | None = None  # over the smaller mesh, after forward
        self.reductions = ReductionStamps()
        self.renew_reductions(data)

    @property
    def all(self) -> list[Stamp]:
        stamps = [self.gather, self.gather_smaller, *self.reductions.all]
        return [stamp for stamp in stamps if stamp is not None]

    @property
    def agreements(self) -> list[Agreement]:
        """The agreements of all axes over which the group communicates."""
        return [stamp.agreement for stamp in self.all]

    @property
    def broken(self) -> str | None:
        return next((one.broken for one in self.agreements if one.broken is not None), None)

    def covers(self, axis: MeshAxis) -> bool:
        """Return True if ranks exchange real data over an axis."""
        is_sent = self._device.type != "meta" and torch_dtensor.has_real_memory()
        return is_sent and axis.size > 1 and axis.is_real

    def make(self, axis: MeshAxis, kind: str) -> Stamp | None:
        """Return a stamp for a collective of the group; None if the axis is not covered."""
        if not self.covers(axis):
            return None
        stamp = Stamp(axis, kind, weakref.WeakMethod(self._beside), self._device)
        if self.fqn is not None:
            stamp.enroll(self.fqn)
        return stamp

    def _beside(self) -> list[Stamp]:
        return self.all

    def renew_reductions(self, data: DataMesh) -> None:
        """Give new numbers to the group's reductions over the axes of ``data``."""
        for stamp in self.reductions.all:
            stamp.agreement.retire(stamp.number)
        again = "all_reduce" if data.layers is None else "reduce_outer"
        made = [self.make(data.scattered, "reduce"), self.make(data.summed, again)]
        self.reductions = ReductionStamps([stamp for stamp in made if stamp is not None])

    def enroll(self, fqn: str) -> None:
        """Number all stamps, and name them for errors. Ranks must call this in the same order."""
        self.fqn = fqn
        for stamp in self.all:
            stamp.enroll(fqn)
