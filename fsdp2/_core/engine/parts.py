"""Large parts of roots: when each is reduced, and which of them backward need not gather.

Owns what the ranks know of each part, the tiny collective by which they agree, and when a part is
reduced and freed. It must not know hooks: the runtime tells it where a forward or a backward is.

A *part* is a group of its own for the parameters of one large submodule (an embedding, a head) of a
unit that contains other units.

[Note: reduced early]
The gradient of a head is complete long before the root's backward is over. When exactly is seen on
each rank by looking at ``grad`` at every *event* of a backward. An event is a point in the order of
collectives, so it has the same number on every rank. At the end of a backward the ranks take the
maximum of what they saw, and in later ones a part is reduced, and released, at that event,
whatever is there: reduce is constant. A rank whose backward took another way may have a gradient
that came later. It says so in the same exchange, all ranks reduce the part once more, and from then
on later. So the event decides about memory and overlap; never about the result. Where no exchange
follows (on a device, once all is known) nothing is reduced early, and a part counts as any group.

[Note: read by nobody]
The same exchange carries whether something on a rank still referred to a part's parameters after
forward (see [Note: released early] in ``early_release``). If nothing did on any rank, later
forwards release the part early. A rank where this changes keeps its memory for that step, and says
so; from then on the part is gathered, or kept, as others are.

A part may be read past its modules: a fused loss takes the head's weight and never calls the head.
References tell nothing then, so after a few such forwards the part counts as read. Else ranks would
ask each other for ever, and on a device the host waits for each answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from fsdp2._core.agreement.agreement import STAMP_NUMEL
from fsdp2._core.agreement.stamp import Stamp
from fsdp2._core.base import torch_autograd, torch_compiler, torch_modes
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import Streams, Wire
from fsdp2._core.params.early_release import Readers
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.registration import GATHERING

UNREAD, UNKNOWN, READ = 0, 1, 2
UNSEEN = 3
"""Forwards that do not run a part's modules, after which it counts as read in some other way."""
FACTS = 3
"""What a rank says of a part: the event of its last gradient, if that was late, if it is read."""


class PartHook:
    """Sees a part's modules run: an object, so that copies of them copy it."""

    def __init__(self, readers: Readers) -> None:
        self.readers = readers

    @torch_compiler.eager_unless_inlined
    def __call__(self, _module: torch.nn.Module, _args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or torch_autograd.graph_task_id() != -1:
            return
        self.readers.is_called = True
        if torch_autograd.packing_hooks(False) is not None:
            self.readers.is_recomputed = True
        if not torch.is_grad_enabled():
            self.readers.ran_without_grad = True


class Part:
    """What the runtime knows of one part. Everything in ``agreed_*`` is the same on every rank."""

    def __init__(self, group: ParamGroup, unit: Any) -> None:
        self.group = group
        self.unit = unit  # the ``tree.Unit`` whose group it is
        self.agreed_event = 0
        self.agreed_reads = UNKNOWN
        self.reads = UNKNOWN
        self.is_reduced = False
        self._last_event = 0
        self._present = 0
        self._is_pending = False
        self._unseen = 0  # forwards in which its modules did not run

    def begin(self) -> None:
        """A backward begins."""
        self.is_reduced = False
        self._last_event = 0
        self._is_pending = self.group.reducer.has_local_gradients
        self._present = 0

    def count_gradients(self, event: int) -> None:
        """See whether another gradient has come since the last event."""
        present = 0
        for param in self.group.params:
            if param.unsharded is not None and param.unsharded.grad is not None:
                present += 1
        if present != self._present:
            self._present, self._last_event = present, event

    def note_reduced(self) -> None:
        self.is_reduced, self._present = True, 0

    def note_reads(self) -> None:
        """A forward with gradients is over: see whether its backward will read the parameters."""
        group = self.group
        found = UNKNOWN
        if group.early.readers is not None and group.early.readers.is_called:
            found = UNREAD if group.is_unread() else READ
        else:
            self._unseen += 1
            if self._unseen >= UNSEEN:
                found = READ
        self.reads = found if self.reads == UNKNOWN else max(self.reads, found)

    @property
    def facts(self) -> list[float]:
        is_late = self.is_reduced and self._present > 0
        event = 0 if self._is_pending and not is_late else self._last_event
        return [float(event), float(is_late), float(self.reads)]

    def learn(self, event: float, reads: float) -> None:
        """Take over what the ranks found together."""
        self.agreed_event = max(self.agreed_event, int(event))
        if self.agreed_reads != READ and reads != UNKNOWN:
            self.agreed_reads = int(reads)
        self.reads = UNKNOWN


class Parts:
    """The parts of a tree of units."""

    def __init__(self, parts: Sequence[Part], tree: Any) -> None:
        self._tree = tree  # the ``tree.Runtime`` whose parts they are
        self._of = {part.group: part for part in parts}
        meshes = dict.fromkeys(part.group.data for part in parts)
        self._exchanges = [
            PartExchange(data, [part for part in parts if part.group.data == data])
            for data in meshes
        ]
        self._event = 0
        self.is_off = False

    def enroll(self, fqn: str) -> None:
        """Take numbers for the collectives. Ranks call it in the same order."""
        for exchange in self._exchanges:
            exchange.enroll(fqn)

    @property
    def can_agree(self) -> bool:
        """True if ranks can tell each other: not where tensors are fake, and ranks are not."""
        return torch_modes.has_real_memory() or all(e.is_imagined for e in self._exchanges)

    @property
    def all_sync(self) -> bool:
        return all(part.group.settings.reduce_grads for part in self._of.values())

    @property
    def are_known(self) -> bool:
        """True if it is known of every part whether backward reads it."""
        return all(part.agreed_reads != UNKNOWN for part in self._of.values())

    def note_reduced(self, group: ParamGroup) -> None:
        part = self._of.get(group)
        if part is not None:
            part.note_reduced()

    def end_forward(self, unit: Any, with_grad: bool) -> None:
        """A unit's forward is over: release early what its backward reads nowhere."""
        for group in unit.own_groups:
            if group.early.readers is not None:
                self._end_forward_of(group, with_grad)

    def _end_forward_of(self, group: ParamGroup, with_grad: bool) -> None:
        """See who reads a part after a forward; release it early if nobody does."""
        part, settings = self._of.get(group), group.settings
        readers = group.early.readers
        assert readers is not None
        readers.is_recomputed |= with_grad and readers.ran_without_grad
        if part is not None and with_grad and part.agreed_reads != READ:
            part.note_reads()
            keeps = settings.reshard_after_forward is False or settings.overlap.keeps_parts
            is_unread = part.agreed_reads == UNREAD and not self.is_off  # on every rank
            if is_unread and not keeps and not group.stays:
                group.release_early(skips_backward=True)
        readers.ran_without_grad = False

    def begin(self) -> None:
        """A backward begins."""
        self._event = 0
        for part in self._of.values():
            part.begin()

    def pass_event(self) -> None:
        """Every rank is at this point of its backward: reduce the parts that are complete here."""
        self._event += 1
        due = []
        for part in self._of.values():
            part.count_gradients(self._event)
            if not part.is_reduced and 0 < part.agreed_event <= self._event:
                due.append(part)
        if not due or self._is_idle or not self._agrees:
            return
        for part in due:
            if part.unit.calls.open or part.group.reducer.unreduced.is_owed:
                self._release_early(part)
                self._tree.reduce_group(part.group)

    def _release_early(self, part: Part) -> None:
        """Free a part whose gradients are in, unless something here still needs it."""
        group, settings = part.group, part.group.settings
        keeps = settings.overlap.keeps_parts or group.stays
        if not keeps and not part.unit.calls.running and group.state is not GATHERING:
            group.release_early(skips_backward=False)

    @property
    def _is_idle(self) -> bool:
        """True in a backward in which no part is reduced early."""
        return self.is_off or self._tree.backward.with_graph or not self.all_sync

    @property
    def _agrees(self) -> bool:
        """True if ranks tell each other of late gradients: on a device this is waited for."""
        tree = self._tree
        return bool(tree.context.streams.async_op or tree.root.settings.overlap.synchronizes)

    @property
    def _will_agree(self) -> bool:
        """True if ranks exchange what they know of the parts at the end of this backward."""
        return not self._is_idle and (self._agrees or not self.are_known) and self.can_agree

    def tells_of_more(self, group: ParamGroup) -> bool:
        """True of a part that this backward reduced, if an exchange tells what came later."""
        part = self._of.get(group)
        return part is not None and part.is_reduced and self._will_agree

    def end(self) -> None:
        """End a backward: learn what all ranks know, reduce again what was late somewhere.

        With gradient sync it is collective over the meshes of all parts.
        """
        if self._will_agree:
            self._event += 1
            for part in self._of.values():
                part.count_gradients(self._event)
            late = [p for e in self._exchanges for p in e.run(self._tree.context.streams)]
            for part in late:
                self._tree.reduce_group(part.group)
        self.forget()

    def forget(self) -> None:
        """The backward is over, or an exception ended the step."""
        for part in self._of.values():
            part.is_reduced = False


class PartExchange:
    """How the ranks of one mesh take the maximum of what they know of its parts."""

    def __init__(self, data: DataMesh, parts: Sequence[Part]) -> None:
        self._parts = parts
        axes = [axis for axis in (data.shard, data.replicate) if axis.size > 1]
        self.is_imagined = any(axis.is_imagined for axis in axes)
        self._axes = [] if self.is_imagined else axes  # imagined ranks know what this one knows
        self._wire = Wire()
        self._stamps: dict[MeshAxis, Stamp] = {}

    def enroll(self, fqn: str) -> None:
        """Take numbers for the exchange over each axis. Ranks call it in the same order."""
        for axis in self._axes:
            if self._parts[0].group.ids.covers(axis):
                device = self._parts[0].group.residence.compute
                stamp = Stamp(axis, "all_reduce", weakref.WeakMethod(self._beside), device)
                stamp.enroll(f"{fqn or '<root>'}, what its parts need")
                numel = FACTS * len(self._parts)
                fp32, numels = torch.float32, [numel + STAMP_NUMEL]
                stamp.register(self._wire, numels, fp32, fp32, numel, ReduceOp.MAX)
                self._stamps[axis] = stamp

    def _beside(self) -> Iterable[Stamp]:
        return self._stamps.values()

    def run(self, streams: Streams) -> list[Part]:
        """Take the maximum over every axis; return the parts that were reduced too early."""
        found = [fact for part in self._parts for fact in part.facts]
        for axis in self._axes:
            found = self._join(found, axis, streams)
        late = []
        for part, start in zip(self._parts, range(0, len(found), FACTS), strict=True):
            event, is_late, reads = found[start : start + FACTS]
            part.learn(event, reads)
            if is_late:
                late.append(part)
        return late

    def _join(self, facts: list[float], axis: MeshAxis, streams: Streams) -> list[float]:
        stamp, numel = self._stamps.get(axis), len(facts)
        code = [] if stamp is None else stamp.code
        joined = torch.tensor(
            [*facts, *code], dtype=torch.float32, device=self._parts[0].group.residence.compute
        )
        if stamp is not None:
            stamp.before()
        with torch_modes.hidden_from_modes():
            work = self._wire.all_reduce(joined, ReduceOp.MAX, axis, streams.async_op)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                if stamp is not None:
                    raise stamp.failed(error) from error
                raise
        values: list[float] = joined.tolist()
        if stamp is not None and stamp.is_checked and values[numel:] != code:
            stamp.check_sum(joined[numel:])
        return values[:numel]
