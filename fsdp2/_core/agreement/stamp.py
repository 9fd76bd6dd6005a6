"""The numbers that collectives carry behind their data, and the look at those that came back.

Owns what a steady step does for agreement: see that this operation is the predicted one, write the
number, compare. It must not know how a collective travels: the owners of buffers tell each stamp
(``Stamp.register``). Everything else is in ``agreement``; its [Note: agreement] says how it works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.agreement.agreement import (
    GATHER_STAMP_NUMEL,
    GAVE_UP,
    HOST,
    NAMES,
    NUMBER_BITS,
    STAMP_NUMEL,
    Follower,
    NamedShape,
    Operation,
    Over,
    Signature,
    agreement_of,
    fields_of,
    number_of_digits,
    stamp_of,
)
from fsdp2._core.base import torch_modes
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import Wire

NO_NUMBER = -2


class Stamp:
    """The number of one operation of one group, and the check of those that came back.

    ``group`` is a weak reference to a function that returns all stamps of the param group, because
    a rank that gives up on one operation says so on all of them.
    """

    def __init__(
        self,
        axis: MeshAxis,
        kind: str,
        group: weakref.ref[Callable[[], Iterable[Stamp]]] | None = None,
        device: torch.device = HOST,
    ) -> None:
        self.axis = axis
        self.kind = kind
        self.device = device  # whose memory it is in
        self.seen: Tensor | None = None  # where a device leaves the stamps of all ranks, as bytes
        self._agreement = agreement_of(axis)
        self.number = NO_NUMBER
        self.name = ""
        self.tensors: tuple[NamedShape, ...] = ()
        self.operation: Operation | None = None  # as it was registered
        self.code = [0.0] * len(stamp_of(kind, NO_NUMBER))
        self._group = group
        # Of a gather: the row that this rank sends, where it is sent from, and its length; what
        # came of all ranks, as bytes, and what should have come.
        self._row = torch.empty(0, dtype=torch.float32, device=HOST)
        self._width = 0
        self._landed = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._expected = b""  # of each rank
        self._dtype = torch.uint8
        self._agreement.members.add(self)

    def beside(self) -> Iterable[Stamp]:
        """Return all stamps of the group, as long as it lives."""
        stamps = None if self._group is None else self._group()
        return () if stamps is None else stamps()

    def enroll(self, fqn: str) -> None:
        """Take a number, and a name for errors. Ranks enroll the same operations in one order."""
        self.name = f"{fqn or '<root>'} ({NAMES[self.kind]})"
        self.number = self._agreement.number(self.name)
        self.code = stamp_of(self.kind, self.number)

    def update_signature(self, signature: Signature) -> bool:
        """Number the operation by its traits, too; return whether the number is another one."""
        before = self.number
        if before != NO_NUMBER:
            own = before % (1 << NUMBER_BITS)
            self._agreement.tensors[own] = self.tensors = signature.tensors
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
        """Say how the operation travels; see ``Operation``."""
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
        self._agreement.register(self.operation)

    def before(self) -> None:
        """Make sure that every rank is about to issue this operation. See [Note: agreement]."""
        agreement, number = self._agreement, self.number
        recent = agreement.recent
        if agreement.predicted.get(recent) == number:  # what is certain takes no other call
            agreement.recent = (*recent[1:], number)
        elif number != NO_NUMBER:
            if not agreement.knows(number):
                self._come_back()
            agreement.before(number, self.device)

    def _come_back(self) -> None:
        """Make the operation known again, if it was idle for so long that it was forgotten."""
        if self.operation is not None and self.operation.number == self.number:
            own = fields_of(self.number)[0]
            self._agreement.names[own] = self.name
            self._agreement.tensors[own] = self.tensors
            self._agreement.register(self.operation)

    def retire(self) -> None:
        """No rank issues this operation again."""
        self._agreement.retire(self.number)

    @property
    def is_checked(self) -> bool:
        return self.number != NO_NUMBER and not self._agreement.is_silent

    # Behind the data of a gather.

    @property
    def numel(self) -> int:
        """Elements of the row that a rank sends in a gather."""
        return GATHER_STAMP_NUMEL

    def expect(self, dtype: torch.dtype, numel: int) -> None:
        """Send and expect the number that this has now, in rows of ``numel`` elements of a dtype.

        Behind the number they are 0.
        """
        row = torch.zeros(numel, dtype=torch.float32, device=HOST)
        row[: len(self.code)] = torch.tensor(self.code, dtype=torch.float32, device=HOST)
        self._row, self._dtype, self._width = row, dtype, numel
        self._expected = bytes(row.to(dtype).view(torch.uint8).tolist())
        if self.seen is not None:
            self._look_late()

    def write(self, row: Tensor) -> None:
        """Put the number into the row ``[numel]`` that this rank sends."""
        if self._row.device != row.device:
            self._row = self._row.to(row.device)  # kept, because the host waits for this copy
        row.copy_(self._row)

    def landing(self, nbytes: int, device: torch.device) -> Tensor:
        """Return the bytes where the rows of all ranks land.

        On a host all stamps over an axis have the same: each looks at once.
        """
        if device.type not in ("cpu", "meta"):
            return self._look_late().view(torch.uint8)
        landed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if type(landed) is Tensor and landed.is_cpu:  # real memory, no estimate's
            landed = self._agreement.landed.setdefault(nbytes, landed)
        self._landed = landed
        return landed

    def arrived(self) -> None:
        """Compare what a gather brought; on a device, somebody does later.

        Raises:
            StateError: another rank gathered something else.
        """
        if self.seen is not None:
            return
        expected = self._expected * self.axis.size  # made here: of many ranks it is large
        # a fifth of the instructions of torch.equal
        if string_at(self._landed.data_ptr(), len(expected)) != expected:
            self.check(self._landed.view(self._dtype).view(self.axis.size, -1))

    def _look_late(self) -> Tensor:
        """Return where a device's gather leaves the stamps ``[W, numel]``; look at it later."""
        shape = self.axis.size, self._width
        # from the host, which waits until it is there: gathers may be under way in a lane
        row = torch.zeros(self._width, dtype=self._dtype, device=HOST)
        row[: len(self.code)] = torch.tensor(self.code, dtype=torch.float32, device=HOST)
        if self.seen is None or (self.seen.dtype, self.seen.shape) != (self._dtype, shape):
            self.seen = torch.empty(shape, dtype=self._dtype, device=self.device)
        self.seen.copy_(row.expand(shape))  # until a gather brings others
        self._agreement.look_late().add(self, self._expected, self.axis.size)
        return self.seen

    def check(self, seen: Tensor) -> None:
        """Look at the stamps ``[W, n]`` that came with a gather and are not all this one's."""
        if not self.is_checked:
            return
        numbers = [number_of_digits(row) for row in seen[:, : self.numel].tolist()]
        self._agreement.compare(self.number, numbers, self.axis)

    def check_sum(self, seen: Tensor, number: int | None = None) -> None:
        """Look at the sum of the stamps ``[n]`` of a reduction, which is not this one's.

        ``number``: what this one's was, if it has changed since.
        """
        if self.is_checked:
            known = self.number if number is None else number
            self._agreement.compare_sum(known, seen.tolist(), self.axis)

    @property
    def look(self) -> LateLook | None:
        """What looks later at the stamps over the axis; None: nothing has to."""
        return self._agreement.late

    def see_sum(self, total: Tensor) -> None:
        """Look at the sum of the stamps of a device's reduction later: the last one of a step."""
        self._agreement.look_late().see_sum(self, self.number, total)

    def silence(self, is_silent: bool) -> bool:
        """Switch checks of the process group off (or on); return whether they were off before."""
        before, self._agreement.is_silent = self._agreement.is_silent, is_silent
        return before

    @property
    def broken(self) -> str | None:
        """Why nothing can be sent any more; None if all is well."""
        return self._agreement.broken

    def failed(self, error: Exception) -> StateError:
        """Return the error for a collective that failed."""
        return self._agreement.lose(self.number, error)

    def give_up(self, why: str, word: int = GAVE_UP) -> Follower | None:
        """Let ranks that wait for this one know that it does not go on."""
        return self._agreement.give_up(why, word)


class ReductionStamps:
    """What a group's reductions carry: the stamp of the reduce-scatter, and of the all-reduce.

    Each is there if ranks see what others send over its axis.
    """

    def __init__(self, stamps: Sequence[Stamp] = ()) -> None:
        self.all = tuple(stamps)
        self.numel = len(self.all) * STAMP_NUMEL  # elements, behind the counts of gradients
        # what makes the error of a reduce-scatter, and of an all-reduce, that failed
        self.failed = self.all[0].failed if self.all else None
        self.failed_sum = self.all[-1].failed if self.all else None
        self._joined = b""  # the bytes that the stamps of all ranks add up to
        self._at = 0  # where these begin, in bytes
        self._sum = (0, torch.float32)  # elements and dtype of what is reduced

    @property
    def codes(self) -> list[float]:
        """The elements ``[numel]`` that this rank sends."""
        return [value for stamp in self.all for value in stamp.code]

    def number(self, signature_of: Callable[[bool], Signature]) -> bool:
        """Number reductions by how they travel; return whether some number is another one now.

        ``signature_of`` gets True for the reduce-scatter, False for the all-reduce.
        """
        is_reduce = [stamp.kind == "reduce" for stamp in self.all]
        signatures = map(signature_of, is_reduce)
        pairs = zip(self.all, signatures, strict=True)
        changed = [stamp.update_signature(signature) for stamp, signature in pairs]  # all of them
        return any(changed)

    def expect(self, codes: Sequence[float], ranks: float, dtype: torch.dtype, numel: int) -> None:
        """Expect the sum of the codes of so many ranks, at the end of ``[numel]``."""
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
        """Say how reductions travel: a reduce-scatter in parts, an all-reduce in one.

        ``scattered`` are elements of ``sent_as`` that each rank gets, the first of which end with
        these; what an all-reduce sums was said by ``expect``. ``pieces``: see ``Operation``.
        """
        numel, dtype = self._sum
        for position, stamp in enumerate(self.all):
            start = position * STAMP_NUMEL - self.numel
            if stamp.kind == "reduce":
                at = scattered[0] + start
                stamp.register(wire, scattered, sent_as, dtype, at, reduction, pieces)
            else:
                stamp.register(wire, [numel], dtype, dtype, numel + start, reduction)

    def erase(self, partial: Tensor) -> None:
        """Drop the numbers behind kept sums ``[..., numel]``: the next ones have others."""
        if self.all:
            partial[..., -self.numel :] = 0

    def before(self) -> None:
        """A reduce-scatter is about to be issued."""
        if self.all:
            self.all[0].before()

    def before_sum(self) -> None:
        """An all-reduce over replicas is about to be issued."""
        if self.all:
            self.all[-1].before()

    def arrived(self, reduced: Tensor) -> None:
        """Compare the end of what was reduced, ``[numel]``.

        On a device nobody does: the stamps of its gathers tell the same, a step later.

        Raises:
            StateError: another rank reduced something else.
        """
        if not self.all or not reduced.is_cpu:
            return
        joined = self._joined
        if string_at(reduced.data_ptr() + self._at, len(joined)) == joined:
            return
        seen = reduced[-self.numel :]
        if self.all[0].is_checked:
            for position, stamp in enumerate(self.all):
                # Other bytes may still be right: those of a sum over several backwards.
                stamp.check_sum(seen[position * STAMP_NUMEL : (position + 1) * STAMP_NUMEL])

    def arrived_late(self, reduced: Tensor) -> None:
        """Let a device look later at the sum over replicas, of which gathers tell nothing."""
        if self.all and not reduced.is_cpu:
            self.all[-1].see_sum(reduced[-STAMP_NUMEL:])


# The stamps of one group: which of its collectives carry one, and when they get their numbers.


class CollectiveIds:
    """The stamps of a group. A rank that gives up on one operation gives up on all."""

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
