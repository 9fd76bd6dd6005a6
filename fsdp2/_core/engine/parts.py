"""Large parts of roots: when to reduce each part, and which parts need no gather in backward.

A *part* is a separate group for the parameters of one large submodule (an embedding, a head) of a
unit that contains other units. This module stores each rank's facts about its parts, combines these
facts in a small collective, and decides when to reduce and free a part. It registers no hooks: the
runtime reports the progress of a forward or backward.

[Note: reduced early]
The gradient of a head is complete long before the root's backward ends. To find out when, each rank
checks ``grad`` at every *event* of a backward. An event is a point in the order of collectives, and
has the same number on every rank. When a backward ends, the ranks exchange the event of a part's
last gradient, and take the maximum. Later backwards reduce and release the part at that event even
if a gradient is missing, because all ranks must reduce at the same point. If a rank's backward
takes another path, a gradient may arrive later. The exchange reports this; all ranks then reduce
the part again, and use a later event from then on. The event thus affects memory and overlap, never
the result. If ranks do not exchange facts in every backward, no part is reduced early. On a device,
by default, ranks stop exchanging facts once all facts are known.

[Note: not read in backward]
The same exchange reports whether a part's parameters were still referenced after forward (see
[Note: released early] in ``buffers``). If no rank found a reference, later forwards release the
part early. If a rank later finds a reference, it keeps the memory for that step and reports the
reference. From then on, the part is gathered, or kept, like other groups.

Backward may read a part whose modules were not called: for example, a fused loss uses the head's
weight but does not call the head. References are inconclusive in this case, so the part counts as
read after a few such forwards. Otherwise ranks would repeat the exchange in every step, and on a
device, each exchange blocks the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from fsdp2._core.agreement.agreement import STAMP_NUMEL
from fsdp2._core.agreement.stamp import Stamp
from fsdp2._core.base import torch_autograd, torch_compiler, torch_dtensor, torch_modes
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import Wire
from fsdp2._core.params.buffers import Readers
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.registration import GATHERING

UNREAD, UNKNOWN, READ = 0, 1, 2
UNSEEN = 3  # a part counts as read after this many forwards that do not call its modules
FACTS = 3
"""Facts of a part: event and lateness of its last gradient, and whether backward reads the part."""


class PartHook:
    """Detects calls of a part's modules. An object, not a closure, so that deepcopy copies it."""

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


@dataclass(eq=False)
class Part:
    """State of one part in the runtime. All ``agreed_*`` fields are the same on every rank."""

    group: ParamGroup
    unit: Any  # the ``tree.Unit`` that owns the group
    agreed_event: int = 0
    agreed_reads: int = UNKNOWN
    reads: int = UNKNOWN
    is_reduced: bool = False
    _last_event: int = 0
    present: int = 0
    _is_pending: bool = False
    _unseen: int = 0  # number of forwards that did not call the part's modules

    def begin(self) -> None:
        self.is_reduced = False
        self._last_event = 0
        self._is_pending = self.group.reducer.has_local_gradients
        self.present = 0

    def count_gradients(self, event: int) -> None:
        """Record the event if a gradient has arrived since the previous event."""
        present = 0
        for param in self.group.params:
            if param.unsharded is not None and param.unsharded.grad is not None:
                present += 1
        if present != self.present:
            self.present, self._last_event = present, event

    def note_reads(self) -> None:
        """After a forward in grad mode, determine whether its backward reads the parameters."""
        group = self.group
        found = UNKNOWN
        if group.early.readers is not None and group.early.readers.is_called:
            is_unread = group.early.is_unread(group.buffers.full, group.registration)
            found = UNREAD if is_unread else READ
        else:
            self._unseen += 1
            if self._unseen >= UNSEEN:
                found = READ
        self.reads = found if self.reads == UNKNOWN else max(self.reads, found)

    @property
    def facts(self) -> list[float]:
        is_late = self.is_reduced and self.present > 0
        event = 0 if self._is_pending and not is_late else self._last_event
        return [float(event), float(is_late), float(self.reads)]

    def learn(self, event: float, reads: float) -> None:
        self.agreed_event = max(self.agreed_event, int(event))
        if self.agreed_reads != READ and reads != UNKNOWN:
            self.agreed_reads = int(reads)
        self.reads = UNKNOWN


class Parts:
    def __init__(self, parts: Sequence[Part], tree: Any) -> None:
        self._tree = tree  # the ``tree.Runtime`` that owns the parts
        self._of = {part.group: part for part in parts}
        self._exchanges = [
            PartExchange(data, [part for part in parts if part.group.data == data], tree)
            for data in dict.fromkeys(part.group.data for part in parts)
        ]
        self._event = 0
        self.is_off = False

    @property
    def are_known(self) -> bool:
        return all(part.agreed_reads != UNKNOWN for part in self._of.values())

    def note_reduced(self, group: ParamGroup) -> None:
        part = self._of.get(group)
        if part is not None:
            part.is_reduced, part.present = True, 0

    def end_forward(self, unit: Any, with_grad: bool) -> None:
        """After a unit's forward, release the parts that no rank reads in backward."""
        for group in unit.own_groups:
            part, settings, readers = self._of.get(group), group.settings, group.early.readers
            if readers is None:
                continue
            readers.is_recomputed |= with_grad and readers.ran_without_grad
            if part is not None and with_grad and part.agreed_reads != READ:
                part.note_reads()
                keeps = settings.reshard_after_forward is False or settings.overlap.keeps_parts
                is_unread = part.agreed_reads == UNREAD and not self.is_off  # on every rank
                if is_unread and not keeps and not group.stays:
                    group.release_early(skips_backward=True)
            readers.ran_without_grad = False

    def begin(self) -> None:
        self._event = 0
        for part in self._of.values():
            part.begin()

    def pass_event(self) -> None:
        """Process an event of a backward: reduce the parts that are due at this event."""
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
        """Free a part whose gradients have arrived, unless this rank still needs it."""
        group, settings = part.group, part.group.settings
        keeps = settings.overlap.keeps_parts or group.stays
        if not keeps and not part.unit.calls.running and group.state is not GATHERING:
            group.release_early(skips_backward=False)

    @property
    def _is_idle(self) -> bool:
        syncs = all(part.group.settings.reduce_grads for part in self._of.values())
        return self.is_off or self._tree.backward.with_graph or not syncs

    @property
    def _agrees(self) -> bool:
        """Return True if ranks report late gradients. On a device, reporting blocks the host."""
        tree = self._tree
        return bool(tree.context.streams.async_op or tree.root.settings.overlap.synchronizes)

    @property
    def _will_agree(self) -> bool:
        """Return True if ranks exchange their facts at the end of this backward."""
        if self._is_idle or (self.are_known and not self._agrees):
            return False
        # real ranks with fake tensors cannot exchange facts
        return torch_dtensor.has_real_memory() or all(e.is_imagined for e in self._exchanges)

    def tells_of_more(self, group: ParamGroup) -> bool:
        """Return True for a reduced part whose late gradients will be reported in an exchange."""
        part = self._of.get(group)
        return part is not None and part.is_reduced and self._will_agree

    def end(self) -> None:
        """End a backward: exchange facts; reduce a part again if a gradient was late on any rank.
        With gradient sync, this is collective over the meshes of all parts."""
        if self._will_agree:
            self._event += 1
            for part in self._of.values():
                part.count_gradients(self._event)
            late = [p for e in self._exchanges for p in e.run()]
            for part in late:
                self._tree.reduce_group(part.group)
        self.forget()

    def forget(self) -> None:
        for part in self._of.values():
            part.is_reduced = False


class PartExchange:
    """All-reduces the facts about parts over one mesh, with MAX. All ranks must create them in the
    same order, which numbers them over each axis."""

    def __init__(self, data: DataMesh, parts: Sequence[Part], tree: Any) -> None:
        self._parts = parts
        self._tree = tree  # the ``tree.Runtime`` that owns the parts
        self._device = parts[0].group.residence.compute
        axes = [axis for axis in (data.shard, data.replicate) if axis.size > 1]
        self.is_imagined = any(axis.is_imagined for axis in axes)
        self._axes = [] if self.is_imagined else axes  # simulated ranks have the same facts
        self._wire = Wire()
        self._stamps: dict[MeshAxis, Stamp] = {}
        for axis in self._axes:
            if self._parts[0].group.ids.covers(axis):
                stamp = Stamp(axis, "all_reduce", weakref.WeakMethod(self._beside), self._device)
                stamp.enroll(f"{tree.root.fqn or '<root>'}, exchange of metadata on its parts")
                numel = FACTS * len(self._parts)
                fp32, numels = torch.float32, [numel + STAMP_NUMEL]
                stamp.register(self._wire, numels, fp32, fp32, numel, ReduceOp.MAX)
                self._stamps[axis] = stamp

    def _beside(self) -> Iterable[Stamp]:
        return self._stamps.values()

    def run(self) -> list[Part]:
        """All-reduce the facts over every axis; return the parts that were reduced too early."""
        found = [fact for part in self._parts for fact in part.facts]
        for axis in self._axes:
            found = self._join(found, axis)
        late = []
        for part, start in zip(self._parts, range(0, len(found), FACTS), strict=True):
            event, is_late, reads = found[start : start + FACTS]
            part.learn(event, reads)
            if is_late:
                late.append(part)
        return late

    def _join(self, facts: list[float], axis: MeshAxis) -> list[float]:
        stamp, numel, streams = self._stamps.get(axis), len(facts), self._tree.context.streams
        code = [] if stamp is None else stamp.code
        joined = torch.tensor([*facts, *code], dtype=torch.float32, device=self._device)
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
