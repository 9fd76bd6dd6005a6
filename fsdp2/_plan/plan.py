"""``plan``: what becomes a unit, what each rank holds and sends, and how much memory a step takes.

Owns the answer, as plain values and as a table. The engine itself is run, on ranks and tensors that
are not there. Only the room for the numbers that real ranks send along is added here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._base import events, torch_dtensor, torch_modes
from fsdp2._base.arguments import (
    check_count,
    check_function,
    check_module,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._base.containers import map_tensors, visit_tensors
from fsdp2._base.errors import ConfigError, FSDPError
from fsdp2._comm.operation_ids import STAMP_NUMEL
from fsdp2._engine.between_steps import units_below
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.layout import GatherLayout
from fsdp2._plan.imagined import Nowhere, make_mesh, without_memory
from fsdp2._plan.watch import MemoryWatch
from fsdp2.wrap import WrapPolicy, shard_model

MAX_RANKS = 1 << 20
OPTIMIZER = "a class or function that makes an optimizer of parameters, or None"
STEPS = 2
"""What is predicted is the last of so many: in the first one the engine learns."""


@dataclass(frozen=True)
class GroupPlan:
    """Parameters that are gathered and reduced together.

    ``name``: full name of the unit, or of the large part of a root that is a group of its own. All
    sizes in bytes. ``shard_nbytes``: of the shards that this rank keeps, with their padding;
    ``padding_nbytes``: what padding adds over all ranks of the shard axis; ``whole_nbytes``: of the
    unsharded parameters; ``gather_nbytes``: what a rank has when it has gathered;
    ``reduce_nbytes``: what it gives to a reduce-scatter; ``all_reduce_nbytes``: to the all-reduce
    over the replicate axis; ``grad_nbytes``: of its sharded gradients. ``parameters`` and
    ``numel``: how many there are, and elements in them, whole.
    """

    name: str
    parameters: int
    numel: int
    dtypes: tuple[torch.dtype, ...]
    shard_nbytes: int
    padding_nbytes: int
    whole_nbytes: int
    gather_nbytes: int
    reduce_nbytes: int
    all_reduce_nbytes: int
    grad_nbytes: int


@dataclass(frozen=True)
class Collective:
    """One collective of a step: ``phase`` is forward or backward, ``kind`` as torch calls it."""

    phase: str
    kind: str
    unit: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes that are alive on a rank after an event of the engine, and the most since the last."""

    event: events.Event
    nbytes: int
    peak_nbytes: int


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in a step, in order, and the memory that it takes.

    ``start_nbytes``: before the forward, gradients cleared, with the optimizer's state if an
    optimizer was given. ``peak_nbytes``: the most in forward and backward, all included.
    """

    collectives: tuple[Collective, ...]
    events: tuple[events.Event, ...]
    memory: tuple[MemoryPoint, ...]
    start_nbytes: int
    peak_nbytes: int
    optimizer_nbytes: int


@dataclass(frozen=True)
class Plan:
    """What ``plan`` found. ``print`` it for a table; ``step`` is None without a batch."""

    mesh: tuple[int, ...]
    rank: int
    groups: tuple[GroupPlan, ...]
    step: StepPlan | None

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan(
    model: nn.Module,
    *,
    mesh: int | Sequence[int],
    policy: WrapPolicy | None = None,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    memory: str | int | None = None,
    rank: int = 0,
    **fully_shard_kwargs: Any,
) -> Plan:
    """Tell what sharding a model over ranks gives, without ranks, a process group, or memory.

    The engine runs on tensors that have shapes and no values, over ranks that only have numbers:
    what it would gather, reduce, keep and free is what it does there.

    Args:
        model: as before ``fully_shard``, on any device (``meta`` too). It is not changed.
        mesh: ranks to shard over, or ``(replicate, shard)``. Up to 2**20 ranks.
        policy: what becomes a unit below the root; as ``fsdp2.wrap.shard_model`` takes it. None:
            nothing.
        batch: what one rank's forward is given: a tensor, a tuple of arguments, or a dict of
            keywords; of tensors only shapes and dtypes count. None: no step is predicted.
        loss: makes a scalar of the output. None: its ``loss``, or the mean of all its tensors.
        optimizer: makes an optimizer of parameters, as ``torch.optim.AdamW`` does; its state is
            counted from its first step on.
        memory: what ``set_memory`` is given.
        rank: whose shards and memory are told. The first rank has the most.
        fully_shard_kwargs: as ``mp_policy``, ``offload_policy``, ``reshard_after_forward``.

    Returns:
        A ``Plan``: groups, and for a step its collectives, events and memory, in order.

    Raises:
        ConfigError: an argument cannot be used; what ``shard_model`` raises.
        UnsupportedError: the model is sharded, or tensor-parallel.

    Memory counts tensors: an allocator's rounding, libraries' work space and what a device's
    streams hold back come on top. Ranks are those of a CPU mesh.
    """
    check_module("plan", "model", model)
    check_function("plan", "loss", loss, "a function of the output or None")
    if optimizer is not None and not callable(optimizer):
        raise wrong_type("plan", "optimizer", OPTIMIZER, optimizer)
    shape = _check_mesh(mesh)
    ranks = math.prod(shape)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < ranks:
        raise wrong_type("plan", "rank", f"one of {ranks} ranks, from 0 on", rank)
    imagined = make_mesh(shape, rank)
    with torch_modes.without_memory():
        copied = without_memory(model)
        choice = policy if policy is not None else _nothing_below
        shard_model(copied, choice, **{"mesh": imagined, **fully_shard_kwargs})
        units = units_below(copied)
        groups = [group for unit in units for group in unit.own_groups]
        for group in groups:
            group.wire = Nowhere()
        if memory is not None:
            copied.set_memory(memory)  # type: ignore[operator]  # sharded now
        step = None
        if batch is not None:
            step = _predict(copied, groups, _arguments(batch), loss or mean_of, optimizer)
        for group in groups:
            group.inspect()
        return Plan(shape, rank, tuple(_describe(group) for group in groups), step)


def _nothing_below(module: nn.Module) -> bool:
    return False


def _check_mesh(mesh: object) -> tuple[int, ...]:
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) not in (1, 2):
        raise wrong_type("plan", "mesh", "a number of ranks, or (replicate, shard)", mesh)
    shape = tuple(check_count("plan", "mesh", size) for size in sizes)
    if not 0 < math.prod(shape) <= MAX_RANKS:
        raise wrong_value("plan", "mesh", f"of 1 to {MAX_RANKS} ranks", mesh)
    return shape


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and keywords, with fake tensors in place of real ones."""
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise wrong_type(
            "plan", "batch", "a tensor, a tuple of arguments or a dict of keywords", batch
        )
    faked = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"), batch)
    if isinstance(faked, Mapping):
        return (), dict(faked)
    return (faked if isinstance(faked, tuple) else (faked,)), {}


def mean_of(output: Any) -> Tensor:
    """Return an output's ``loss``, or the mean of all floating-point tensors in it."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    means: list[Tensor] = []

    def take(tensor: Tensor) -> None:
        if tensor.requires_grad:
            means.append(tensor.float().mean())

    visit_tensors(take, output)
    if not means:
        raise ConfigError(
            "plan: the model's output has no tensor with a gradient. Pass loss, a function that "
            "makes a scalar of the output."
        )
    return torch.stack(means).sum()


# A step.


def _predict(
    model: nn.Module,
    groups: Sequence[ParamGroup],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    loss: Callable[[Any], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> StepPlan:
    seen: list[events.Event] = []
    points: list[MemoryPoint] = []
    highest = 0

    def see_memory(nbytes: int) -> None:
        nonlocal highest
        highest = max(highest, nbytes)

    def see_event(event: events.Event) -> None:
        nonlocal highest
        seen.append(event)
        points.append(MemoryPoint(event, watch.nbytes, highest))
        highest = watch.nbytes

    watch = MemoryWatch(see_memory)
    states: list[Tensor] = []
    args, kwargs = arguments
    with watch.following_resizes():
        for tensor in _kept(model, groups):
            watch.see(tensor)
        made = None if optimizer is None else _make(optimizer, model)
        for number in range(STEPS):
            model.zero_grad()
            seen.clear()
            points.clear()
            start = highest = watch.nbytes
            with watch, events.listen(see_event):
                _run(model, args, kwargs, loss)
            if made is not None and number == 0:
                made.step()  # unwatched: how a DTensor's operations are planned is not memory
                found = [state for kept in made.state.values() for state in kept.values()]
                visit_tensors(lambda one: states.append(torch_dtensor.local_part(one)), found)
                for state in states:
                    watch.see(state)
        peak = max([highest, *(point.peak_nbytes for point in points)])
    sizes = {group.fqn: _describe(group) for group in groups}
    exact = tuple(_with_stamps(event, sizes) for event in seen)
    return StepPlan(
        collectives=tuple(_collectives(exact, sizes)),
        events=exact,
        memory=tuple(replace(p, event=e) for p, e in zip(points, exact, strict=True)),
        start_nbytes=start,
        peak_nbytes=peak,
        optimizer_nbytes=sum(state.nbytes for state in states),
    )


def _make(
    optimizer: Callable[..., torch.optim.Optimizer], model: nn.Module
) -> torch.optim.Optimizer:
    try:
        made = optimizer(model.parameters())
    except Exception as error:
        raise ConfigError(
            f"plan: expected optimizer to be {OPTIMIZER}, found {described(optimizer)}, which "
            f"raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise wrong_type("plan", "optimizer", OPTIMIZER, optimizer)
    return made


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]
) -> None:
    try:
        loss(model(*args, **kwargs)).backward()
    except FSDPError:
        raise
    except Exception as error:
        raise ConfigError(
            "plan: a step of the model failed on this batch, with tensors that have no values "
            f"({type(error).__name__}: {error}). Pass what one rank's forward is given: a tensor, "
            "a tuple of arguments or a dict of keywords."
        ) from error


def _kept(model: nn.Module, groups: Sequence[ParamGroup]) -> Iterator[Tensor]:
    """Yield what a rank holds between steps: shards, parameters of nobody, and buffers."""
    for group in groups:
        group.inspect()
        for param in group.params:
            yield torch_dtensor.local_part(param.sharded)
    yield from model.buffers()
    sharded = {param.sharded for group in groups for param in group.params}
    yield from (param for param in model.parameters() if param not in sharded)


def _with_stamps(event: events.Event, sizes: Mapping[str, GroupPlan]) -> events.Event:
    """Return an event with the bytes that real ranks have: they send numbers along."""
    group = sizes.get(event.fqn)
    if group is None or not event.nbytes:
        return event
    nbytes = {
        "unshard": group.gather_nbytes,
        "reduce": group.reduce_nbytes,
        "reshard": group.whole_nbytes,
    }
    return replace(event, nbytes=nbytes.get(event.kind, event.nbytes))


def _collectives(
    seen: Sequence[events.Event], sizes: Mapping[str, GroupPlan]
) -> Iterator[Collective]:
    for event in seen:
        if event.kind == "unshard":
            yield Collective(event.phase, "all_gather", event.fqn, event.nbytes)
        elif event.kind == "reduce":
            yield Collective(event.phase, "reduce_scatter", event.fqn, event.nbytes)
            if (nbytes := sizes[event.fqn].all_reduce_nbytes) > 0:
                yield Collective(event.phase, "all_reduce", event.fqn, nbytes)


def _describe(group: ParamGroup) -> GroupPlan:
    """Read a group's own layouts, with room for what ranks tell each other."""
    buffer = group.home_buffer
    assert buffer is not None  # it was looked at
    layout, size = buffer.layout, group.data.shard.size
    smaller = group.post_forward.mesh
    others = () if smaller is None else (smaller.shard.size,)
    item = layout.stamp_item if size > 1 else None
    zero_copy = group.wire.zero_copy_nbytes
    sent = GatherLayout.plan([*layout.items, item], size, others, zero_copy) if item else layout
    axes = [axis for axis in (group.data.shard, group.data.replicate) if axis.size > 1]
    planned = group.reducer.plan()
    reduced = replace(planned.layout, numel=planned.layout.numel + len(axes) * STAMP_NUMEL)
    padding = (
        (one.shard.padded_numel * size - one.shard.numel) * one.storage_dtype.itemsize
        for one in layout.items
        if one.shard.dim is not None
    )
    has_members = bool(planned.members)
    return GroupPlan(
        name=group.fqn,
        parameters=len(group.params),
        numel=sum(one.shard.numel for one in layout.items),
        dtypes=tuple(dict.fromkeys(item.storage_dtype for item in layout.items)),
        shard_nbytes=sum(
            item.shard.padded_numel * item.storage_dtype.itemsize for item in layout.items
        ),
        padding_nbytes=sum(padding),
        whole_nbytes=sent.full_nbytes,
        gather_nbytes=sent.gather_nbytes * size if size > 1 else 0,
        reduce_nbytes=reduced.nbytes if has_members else 0,
        all_reduce_nbytes=(
            reduced.numel * reduced.dtype.itemsize
            if has_members and group.data.replicate.size > 1
            else 0
        ),
        grad_nbytes=sum(
            torch_dtensor.local_part(param.sharded).numel()
            * param.kept_dtype(reduced.dtype).itemsize
            for param in group.params
            if param.trainable
        ),
    )


# The table.


def _lines(found: Plan) -> Iterator[str]:
    """Yield a table that fits 100 columns: equal groups that follow each other are one row."""
    total = sum(group.numel for group in found.groups)
    mesh = " x ".join(str(size) for size in found.mesh)
    yield f"{_count(total)} parameters over {found.ranks:,} ranks ({mesh}), as on rank {found.rank}"
    yield ""
    heads = ("parameters", "whole", "shard", "padding", "gathered", "reduced")
    yield f"{'unit':<34}" + "".join(f"{head:>11}" for head in heads)
    for name, group, times in _rows(found.groups):
        cells = (
            _count(group.numel),
            _bytes(group.whole_nbytes),
            _bytes(group.shard_nbytes),
            _bytes(group.padding_nbytes),
            _bytes(group.gather_nbytes),
            _bytes(group.reduce_nbytes),
        )
        shown = name if times == 1 else f"{name} ({times} times)"
        yield f"{_cut(shown, 34):<34}" + "".join(f"{cell:>11}" for cell in cells)
    shards = sum(group.shard_nbytes for group in found.groups)
    grads = sum(group.grad_nbytes for group in found.groups)
    yield ""
    yield f"a rank keeps {_bytes(shards)} of parameters and {_bytes(grads)} of gradients"
    if found.step is not None:
        yield from _step_lines(found.step)


def _step_lines(step: StepPlan) -> Iterator[str]:
    if step.optimizer_nbytes:
        yield f"and {_bytes(step.optimizer_nbytes)} of optimizer state"
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sizes = [one.nbytes for one in step.collectives if one.kind == kind]
        if sizes:
            yield f"{kind}: {len(sizes)} a step, {_bytes(sum(sizes))}"
    top = max(step.memory, key=lambda point: point.peak_nbytes, default=None)
    where = f", before {top.event}" if top is not None else ""
    yield f"peak {_bytes(step.peak_nbytes)}, of which {_bytes(step.start_nbytes)} at start{where}"


def _rows(groups: Sequence[GroupPlan]) -> Iterator[tuple[str, GroupPlan, int]]:
    first, times = None, 0
    for group in groups:
        if first is not None and replace(group, name=first.name) == first:
            times += 1
            continue
        if first is not None:
            yield first.name or "<root>", first, times
        first, times = group, 1
    if first is not None:
        yield first.name or "<root>", first, times


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"...{text[-(width - 4) :]}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)


def _bytes(nbytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
