"""``Run`` and ``StepPlan`` determine which parameters of a param group are updated as one tensor.

Optimizer state has two forms: per parameter (for users and checkpoints) and per run (for steps).

[Note: runs]
A group's shards are adjacent, with padding, in the group's shard buffer; its gradients are in a
gradient buffer in the same order. Adjacent parameters whose gradients are adjacent too, and whose
scalar states (``step``) agree, form a *run*. A run is updated as one tensor, including padding,
whose values are unused. A parameter without such neighbours is a separate run with its own shape.

A plan holds references to parameters, shards and states, but never to a gradient, its local tensor
or its storage (see [Note: reused gradients]); weak references identify the gradients that were
already checked. A plan is valid while every gradient has the address that its run expects.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.base.errors import carrying, named
from fsdp2._core.params import packing
from fsdp2._core.params.param import OwnerMark, Span
from fsdp2._core.params.reduce import GradientBuffer
from fsdp2.optim._wrapped import State, Table

Granule = Callable[[Tensor], int]
"""Returns the byte alignment for a run to continue after a local tensor, or 0 if it must end."""

get_grad = attrgetter("grad")
referent = methodcaller("__call__")


def placed_part(param: Tensor, value: Tensor, what: str) -> Tensor:
    """Return the local part of a gradient or a state, placed like its parameter. Collective."""
    if (
        isinstance(value, DTensor)
        and isinstance(param, DTensor)
        and not torch_dealt.are_same(value.placements, param.placements)
    ):
        with named(what), carrying():
            value = torch_dealt.redistribute(value, value.device_mesh, param.placements)
    torch_dealt.adopt(value)
    return torch_dtensor.local_part(value)


@dataclass(frozen=True, eq=False)
class Member:
    """A sharded parameter: its shard, the shard's span, and its entry in the table of states."""

    param: DTensor
    local: Tensor
    span: Span | None
    entry: State

    @staticmethod
    def of(param: DTensor, table: Table) -> Member:
        local = torch_dtensor.local_tensor(param)
        owner = OwnerMark.owner_of(param)
        span = None
        if owner is not None and owner.local is local and not local.is_meta:
            span = owner.span
        return Member(param, local, span, table.get(param, {}))

    @property
    def begin(self) -> int:
        return 0 if self.span is None else self.span.start

    @property
    def sort_key(self) -> tuple[int, int]:
        return 0 if self.span is None else self.span.flat.data_ptr(), self.begin

    def local_gradient(self) -> Tensor:
        grad = self.param.grad
        assert grad is not None
        return placed_part(self.param, grad, "step of an optimizer: a gradient placed differently")

    def part(self, value: DTensor) -> Tensor:
        return placed_part(self.param, value, "step of an optimizer: a state placed differently")


class Run:
    """Members updated as one tensor. ``starts``: offsets in elements (0 for empty members)."""

    def __init__(self, members: Sequence[Member], known: set[int]) -> None:
        self.members = members
        self.is_flat = len(members) > 1
        self.filled = [i for i, member in enumerate(members) if member.local.numel()]
        if not self.is_flat:
            (member,) = members
            local = member.local.detach()
            # states of 0-dim tensors could not be distinguished from counters
            self.tensor = local if local.dim() else local.view(1)
            self.starts = [0]
            self.state = dict(member.entry)
            for key, value in member.entry.items():
                if isinstance(value, DTensor):
                    self.state[key] = member.part(value).view(self.tensor.shape)
            return
        self._lay_out()
        self.state = {key: self._join(key, known) for key in members[0].entry}

    def _lay_out(self) -> None:
        members = self.members
        if not self.filled:
            self.tensor = members[0].local.new_empty(0)
            self.starts = [0] * len(members)
            return
        first, last = members[self.filled[0]], members[self.filled[-1]]
        assert first.span is not None
        begin, dtype = first.begin, first.local.dtype
        self.starts = [
            (one.begin - begin) // dtype.itemsize if one.local.numel() else 0 for one in members
        ]
        numel = self.starts[self.filled[-1]] + last.local.numel()
        self.tensor = packing.typed(first.span.flat, begin, numel, dtype).detach()

    def _join(self, key: str, known: set[int]) -> Any:
        """Join the members' states named ``key``. ``known``: storage addresses of joined states."""
        values = [member.entry[key] for member in self.members]
        if not isinstance(values[0], Tensor):
            return values[0]
        if not isinstance(values[0], DTensor):
            return values[0].clone()
        parts = [m.part(value) for m, value in zip(self.members, values, strict=True)]
        if not self.filled:
            return parts[0].new_empty(0)
        first = parts[self.filled[0]]
        storage = first.untyped_storage().data_ptr()
        if storage in known and self.lie_alike(parts):
            return first.as_strided(self.tensor.shape, (1,))
        joined = first.new_zeros(self.tensor.shape)
        for index, part in enumerate(parts):
            target = self.part(joined, index)
            target.copy_(part)
            # drop the table's reference to the old memory
            self.members[index].entry[key] = self._wrap(target, index)
        return joined

    def lie_alike(self, tensors: Sequence[Tensor]) -> bool:
        if not self.filled:
            return True
        first = tensors[self.filled[0]]
        base, itemsize = first.data_ptr(), first.dtype.itemsize
        storage = first.untyped_storage().data_ptr()
        return all(
            tensors[i].is_contiguous()
            and tensors[i].dtype is first.dtype
            and tensors[i].data_ptr() == base + self.starts[i] * itemsize
            and tensors[i].untyped_storage().data_ptr() == storage
            for i in self.filled
        )

    def part(self, value: Tensor, index: int) -> Tensor:
        local = self.members[index].local
        if not self.is_flat:
            return value.view(local.shape)
        start = self.starts[index]
        return value[start : start + local.numel()].view(local.shape)

    def _wrap(self, part: Tensor, index: int) -> DTensor:
        member = self.members[index]
        like = None
        if part.storage_offset():
            local = member.local
            is_alike = (part.dtype, part.device) == (local.dtype, local.device)
            like = local if is_alike else torch.empty_like(part)
        return torch_dtensor.new_dtensor(
            part, torch_dtensor.spec_like(member.param, part.dtype), like=like
        )

    def has_parts(self) -> bool:
        """Return True if every tensor state is a plain tensor, 0-dim or of the run's shape."""
        return all(
            type(value) is Tensor and (not value.dim() or value.shape == self.tensor.shape)
            for value in self.state.values()
            if isinstance(value, Tensor)
        )

    def publish(self, table: Table) -> None:
        assert not self.is_flat or self.has_parts(), "a state that cannot be split was joined"
        for index, member in enumerate(self.members):
            entry = table[member.param]
            for key in [key for key in entry if key not in self.state]:
                del entry[key]
            for key, value in self.state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == self.tensor.shape:
                    part, old = self.part(value, index), entry.get(key)
                    if not _is_same(part, old):
                        entry[key] = self._wrap(part, index)
                else:
                    is_shared = self.is_flat and isinstance(value, Tensor)
                    entry[key] = value.clone() if is_shared else value


def _is_same(part: Tensor, old: Any) -> bool:
    local = torch_dtensor.local_tensor(old) if isinstance(old, DTensor) else None
    if type(local) is not Tensor or type(part) is not Tensor:
        return False
    return (
        local.data_ptr() == part.data_ptr()
        and local.dtype is part.dtype
        and local.shape == part.shape
        and local.numel() > 0
    )


class _Seen:
    """Checked gradients, identified as long as they are alive."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._refs = list(map(weakref.ref, grads))
        self._are_ours = all(GradientBuffer.holding(grad) is not None for grad in grads)
        self._joined: list[weakref.ref[Tensor]] = []  # gradients owned by our buffers

    def are(self, grads: Sequence[Tensor]) -> bool:
        if len(grads) != len(self._refs) or any(map(is_, grads, repeat(None))):
            return False
        return all(map(is_, map(referent, self._refs), grads))

    def join(self, firsts: Sequence[Tensor], runs: Sequence[Tensor]) -> list[Tensor]:
        """Return a view of each run's gradient, from the run's first nonempty member on."""
        joined = list(map(referent, self._joined))
        if joined and not any(map(is_, joined, repeat(None))):  # else one of our buffers was freed
            return joined
        joined = []
        for first, run in zip(firsts, runs, strict=True):
            buffer, numel = GradientBuffer.holding(first), run.numel()
            if not numel:
                joined.append(run.new_empty(0))
            elif buffer is None:
                joined.append(torch_dtensor.local_tensor(first).as_strided((numel,), (1,)))
            else:
                joined.append(buffer.lend(first, numel))
        if self._are_ours and all(run.numel() for run in runs):
            self._joined = list(map(weakref.ref, joined))
        return joined


class StepPlan:
    """The runs of one param group, valid while the same parameters have gradients."""

    def __init__(
        self, params: Sequence[Tensor], table: Table, granule: Granule, known: set[int]
    ) -> None:
        self.params = list(params)
        self.idle = [p for p in params if p.grad is None]
        self.plain = [p for p in params if p.grad is not None and not isinstance(p, DTensor)]
        members = [
            Member.of(p, table) for p in params if p.grad is not None and isinstance(p, DTensor)
        ]
        chains = _chain(sorted(members, key=lambda member: member.sort_key), granule)
        runs = [Run(chain, known) for chain in chains]
        self.flat = [run for run in runs if run.is_flat]
        self.single = [run for run in runs if not run.is_flat]
        self.runs = self.flat + self.single
        members = [member for run in self.runs for member in run.members]
        self._stepped: list[DTensor] = [member.param for member in members]
        self._locals = [member.local for member in members]
        self._flat_count = sum(len(run.members) for run in self.flat)
        firsts = [run.members[(run.filled or [0])[0]] for run in self.flat]
        self._firsts = [members.index(member) for member in firsts]
        self._flat_tensors = [run.tensor for run in self.flat]
        self._seen = _Seen([])
        # written through views: autograd and the sharded module read the version counters
        self.written: list[Tensor] = [*self._stepped, *self._locals[: self._flat_count]]
        self.targets: list[Tensor] = [*(run.tensor for run in self.runs), *self.plain]

    def gradients(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the gradient of each run, in order, or None if the plan is no longer valid."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return None
        if not all(map(is_, map(get_grad, self.idle), repeat(None))):
            return None
        if any(map(is_, map(get_grad, self.plain), repeat(None))):
            return None
        with (
            torch_dtensor.DisableTorchFunctionSubclass()
        ):  # access through DTensor costs four times as much
            grads = list(map(get_grad, self._stepped))
        if not all(map(is_, map(torch_dtensor.local_tensor, self._stepped), self._locals)):
            return None
        if not self._seen.are(grads):
            if any(map(is_, grads, repeat(None))) or not self._lie_as_shards(grads):
                return None
            self._seen = _Seen(grads)
        firsts = [grads[first] for first in self._firsts]
        joined = self._seen.join(firsts, self._flat_tensors)
        parts = map(torch_dtensor.local_tensor, grads[self._flat_count :])
        return joined + [part if part.dim() else part.view(1) for part in parts]

    def _lie_as_shards(self, grads: Sequence[Any]) -> bool:
        for grad, param in zip(grads, self._stepped, strict=True):
            if not isinstance(grad, DTensor) or grad.placements != param.placements:
                return False
        parts = map(torch_dtensor.local_tensor, grads)
        for run in self.flat:
            own = list(itertools.islice(parts, len(run.members)))
            if not run.lie_alike(own) or own[0].dtype is not run.tensor.dtype:
                return False
        return True

    def loose_gradients(self) -> list[Tensor]:
        assert not self.flat
        grads = [run.members[0].local_gradient() for run in self.single]
        return [grad if grad.dim() else grad.view(1) for grad in grads]

    def storages(self) -> set[int]:
        values = [value for run in self.flat for value in run.state.values()]
        return {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}

    def publish(self, table: Table) -> None:
        for run in self.runs:
            if run.state:
                run.publish(table)


def _chain(members: Iterable[Member], granule: Granule) -> list[list[Member]]:
    chains: list[list[Member]] = []
    signature: list[Any] | None = None  # of the last member; None: no member may follow
    last: tuple[int, int] | None = None  # the chain's gradients: storage, and address at byte 0
    for member in members:
        grad, local, span = member.local_gradient(), member.local, member.span
        fits = (
            span is not None
            and grad.is_contiguous()
            and grad.dtype is local.dtype
            and grad.shape == local.shape
        )
        mine = _signature(member) if fits else None
        if span is None or mine is None:
            chains.append([member])
            signature = None
            continue
        at = None
        if local.numel():
            at = grad.untyped_storage().data_ptr(), grad.data_ptr() - span.start
        if (
            mine == signature
            and _follows(chains[-1][-1], member, granule)
            and (at is None or last is None or at == last)
        ):
            chains[-1].append(member)
        else:
            chains.append([member])
            last = None
        signature, last = mine, at or last
    return chains


def _follows(previous: Member, member: Member, granule: Granule) -> bool:
    """Return True if ``member`` directly follows ``previous``, and one kernel may update both."""
    before, span = previous.span, member.span
    if before is None or span is None or before.flat is not span.flat:
        return False
    if before.start + before.nbytes != span.start or previous.local.dtype != member.local.dtype:
        return False
    step = granule(previous.local)
    return step != 0 and before.nbytes % step == 0 and previous.local.nbytes % step == 0


def _signature(member: Member) -> list[Any] | None:
    """Return the values that must be equal in a run, or None if they cannot be compared."""
    items: list[Any] = []
    for key, value in member.entry.items():
        if isinstance(value, DTensor):
            part = member.part(value)
            if type(part) is not Tensor:  # a quantised state wraps other tensors
                return None
            if part.shape != member.local.shape or not part.is_contiguous():
                return None
            items.append((key, "part", part.dtype))
        elif isinstance(value, Tensor):
            if value.dim():
                return None
            items.append((key, "counter", value.dtype, value.device, value.item()))
        elif value is None or isinstance(value, bool | int | float):
            items.append((key, "value", value))
        else:
            return None
    return items
