"""The contents of a plan as plain values: groups, collectives, memory, time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fsdp2._core.agreement.agreement import GATHER_STAMP_NUMEL, STAMP_NUMEL
from fsdp2._core.base import events, torch_dtensor
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.params.buffers import ShardBuffer
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import GatherItem, GatherLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._tools.pages.content import COMPUTE, Span


@dataclass(frozen=True)
class ParamPlan:
    """One unsharded parameter of a group.

    ``dim`` is the dim along which it is sharded, or None if every rank stores it in full. ``owner``
    is the index of the only rank that stores it (``Whole``), or None if the parameter is divided.
    ``nbytes`` is its size in bytes, without padding, in the dtype of the shards.
    ``padding_nbytes`` is the total padding over all ranks of the shard axis, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    nbytes: int
    padding_nbytes: int
    owner: int | None = None


@dataclass(frozen=True)
class GroupPlan:
    """Parameters that are gathered and reduced together. Sizes are in bytes, on one rank unless
    stated otherwise.

    - ``name``: full name of the unit, or of the large part of a root that is a separate group.
    - ``parameters``, ``numel``: number of unsharded parameters, and number of their elements.
    - ``dtypes``: dtypes of the shards.
    - ``shard_nbytes``: the shards on this rank, with their padding.
    - ``padding_nbytes``: the total padding over all ranks of the shard axis.
    - ``whole_nbytes``: the unsharded parameters in the compute dtype, including alignment.
    - ``gather_nbytes``: the output of the all-gather.
    - ``regather_nbytes``: the output of the all-gather in backward, which may use fewer ranks.
    - ``reduce_nbytes``: the input of the reduce-scatter.
    - ``all_reduce_nbytes``: the input of the all-reduce over the replicate axis.
    - ``outer_nbytes``: the input of the reduce-scatter over the outer dim (``shard_outer``).
    - ``grad_nbytes``: the sharded gradients.
    - ``alone``: names of the parameters with separate collectives.
    - ``params``: the description of each parameter.
    """

    name: str
    parameters: int
    numel: int
    dtypes: tuple[torch.dtype, ...]
    shard_nbytes: int
    padding_nbytes: int
    whole_nbytes: int
    gather_nbytes: int
    regather_nbytes: int
    reduce_nbytes: int
    all_reduce_nbytes: int
    grad_nbytes: int
    outer_nbytes: int = 0
    alone: tuple[str, ...] = ()
    params: tuple[ParamPlan, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    ``phase`` is ``forward`` or ``backward``. ``kind`` is ``all_gather``, ``reduce_scatter`` or
    ``all_reduce``. ``unit`` is the name of its group. ``nbytes`` is the size of the larger of its
    two buffers: the output of a gather, or the input of a reduction. ``ranks`` is the number of
    participating ranks, and ``stride`` the distance between their global ranks.
    """

    phase: str
    kind: str
    unit: str
    nbytes: int
    ranks: int = field(default=0, compare=False)
    stride: int = field(default=1, compare=False)


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes allocated on a rank after an event, and the peak since the previous point.

    ``label`` names the event. ``time`` is in seconds from the step's start, or 0 without hardware.
    ``nbytes`` is the current size, ``peak_nbytes`` the peak since the previous point. ``by_kind``
    and ``peak_by_kind`` divide these sizes by purpose, in the order of ``StepPlan.kinds``.
    """

    label: str
    time: float
    nbytes: int
    peak_nbytes: int
    by_kind: tuple[int, ...]
    peak_by_kind: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """The collectives, events, memory and time of one rank's step.

    ``collectives``, ``events`` and ``memory`` are in the order of the step. ``kinds`` names the
    purposes of memory. All sizes are bytes:

    - ``start_nbytes``: before the forward, including the optimizer's state if an optimizer was
      given. Gradients are cleared. The memory of cleared gradients is counted on a CPU, where the
      next gradients reuse it, but not on a device, where it is freed when the forward begins.
    - ``peak_nbytes``: the peak of all memory in forward and backward.
    - ``optimizer_nbytes``, ``optimizer_peak_nbytes``: the optimizer's state, and the peak in its
      step (0 without an optimizer).
    - ``host_nbytes``: host memory for offloaded activations and states.

    ``seconds`` is the duration of the complete step, and ``spans`` its timeline; without hardware,
    ``seconds`` is None and ``spans`` is empty. ``product_seconds`` is the time of the matmuls in
    forward and backward, except recomputed ones, at the machine's peak (even if the machine was
    ``scaled``), or 0 without hardware. ``tokens`` is the number of tokens in one rank's batch: the
    number of elements of its first integer tensor, or 0 if there is none.
    """

    kinds: tuple[str, ...]
    collectives: tuple[Collective, ...]
    events: tuple[events.Event, ...]
    memory: tuple[MemoryPoint, ...]
    start_nbytes: int
    peak_nbytes: int
    optimizer_nbytes: int
    optimizer_peak_nbytes: int = 0
    host_nbytes: int = 0
    seconds: float | None = None
    spans: tuple[Span, ...] = field(default=(), repr=False)
    product_seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on one rank, or None without hardware or tokens."""
        return self.tokens / self.seconds if self.seconds and self.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, relative to the machine's peak, or None without hardware."""
        return self.product_seconds / self.seconds if self.seconds else None

    @property
    def highest_nbytes(self) -> int:
        """The peak of the complete step, including the optimizer."""
        return max(self.peak_nbytes, self.optimizer_peak_nbytes)

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which compute waits for links, or 0 without hardware."""
        return sum(s.end - s.begin for s in self.spans if s.lane == COMPUTE and s.cause)

    @property
    def waits(self) -> dict[str, float]:
        """Seconds for which compute waits, by cause; longest first."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE and span.cause:
                found[span.cause] = found.get(span.cause, 0.0) + span.end - span.begin
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _as_sent(group: ParamGroup, buffer: ShardBuffer) -> GatherLayout:
    """Return the layout of a buffer with the agreement stamps that real ranks send."""
    layout, smaller = buffer.layout, group.buffers.post_forward.mesh
    if buffer.tail is not None:
        return layout
    others = () if smaller is None else (smaller.shard.size,)
    how = others, group.buffers.rule, layout.rank, layout.trims
    return GatherLayout.plan(layout.items, layout.size, *how, tail_numel=GATHER_STAMP_NUMEL)


def describe(group: ParamGroup) -> GroupPlan:
    """Describe a group from the engine's layouts, with space for agreement stamps."""
    buffer = group.buffers.home
    assert buffer is not None  # set by ``inspect``
    layout = buffer.layout
    sent = _as_sent(group, buffer)
    again = _as_sent(group, group.buffers.post_forward.buffer or buffer)
    axes = [axis for axis in (group.data.scattered, group.data.summed) if axis.size > 1]
    planned = group.reducer.plan()
    tail_numel = len(planned.members) + len(axes) * STAMP_NUMEL
    reduced = planned.layout.with_tail(tail_numel, ROW_NBYTES)
    items = layout.items[: len(group.params)]  # stamps may follow
    params = tuple(map(_describe_param, group.params, items))
    row_nbytes = reduced.numel * reduced.dtype.itemsize if planned.members else 0
    return GroupPlan(
        name=group.fqn,
        parameters=len(group.params),
        numel=sum(one.shard.numel for one in items),
        dtypes=tuple(dict.fromkeys(one.storage_dtype for one in items)),
        shard_nbytes=sum(
            one.shard.kept_numel(layout.rank) * one.storage_dtype.itemsize for one in items
        ),
        padding_nbytes=sum(param.padding_nbytes for param in params),
        whole_nbytes=sent.full_nbytes,
        gather_nbytes=_gathered(sent),
        regather_nbytes=_gathered(again),
        reduce_nbytes=reduced.nbytes if planned.members else 0,
        all_reduce_nbytes=row_nbytes if group.data.replicate.size > 1 else 0,
        outer_nbytes=0 if group.data.layers is None else group.data.rows_between * row_nbytes,
        grad_nbytes=sum(
            torch_dtensor.local_part(param.sharded).numel()
            * param.kept_dtype(reduced.dtype).itemsize
            for param in group.params
            if param.trainable
        ),
        alone=tuple(group.params[index].fqn for index in layout.zero_copy),
        params=params,
    )


def _gathered(layout: GatherLayout) -> int:
    """Return the total number of bytes that all ranks send."""
    if layout.size == 1:
        return 0
    return sum(layout.landing.pieces) or layout.gather_nbytes * layout.size


def _describe_param(param: FSDPParam, item: GatherItem) -> ParamPlan:
    shard, itemsize = item.shard, item.storage_dtype.itemsize
    padded = shard.padded_numel * shard.size if shard.is_even else 0
    return ParamPlan(
        name=param.fqn,
        shape=shard.shape,
        dtype=item.storage_dtype,
        dim=shard.dim,
        nbytes=shard.numel * itemsize,
        padding_nbytes=max(padded - shard.numel, 0) * itemsize,
        owner=shard.owner,
    )
