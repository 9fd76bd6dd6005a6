"""What is wrong with a choice of units and settings, each with its number and a way out.

Owns the rules. Each looks at a plan and tries its way out by planning again, so that what it says
is gained is predicted like all else. It must not know how a plan is made.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.tensor import Shard

from fsdp2._core.base.errors import FSDPError
from fsdp2._core.base.names import nbytes_text
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._tools.pages.content import Advice
from fsdp2._tools.plan.budget import Suggestion
from fsdp2._tools.plan.hardware import Hardware, bandwidth_of, flops_of, seconds_of
from fsdp2._tools.plan.table import seconds_text
from fsdp2._tools.plan.values import GroupPlan, ParamPlan, StepPlan

TINY_NBYTES = 1 << 20
"""A gather of fewer bytes is called small if no hardware says how long one takes."""
LATENCY_SHARE = 0.5
"""A gather is small if so much of its time is latency."""
HUGE_SHARE, HUGE_TIMES = 0.4, 4
"""A unit is huge if it has so much of the model, and so many times what units mostly have."""
PADDED_SHARE = 0.05
"""Padding is told from this part of a shard on."""
EMBEDDING_SHARE = 0.25
"""An embedding is told from this part of its unit on."""
GAIN_SHARE = 0.03
"""Time is worth a word from here on."""


class Planned(Protocol):
    """A plan, as far as rules look at it."""

    @property
    def mesh(self) -> tuple[int, ...]: ...

    @property
    def groups(self) -> tuple[GroupPlan, ...]: ...

    @property
    def step(self) -> StepPlan | None: ...

    @property
    def hardware(self) -> Hardware | None: ...

    @property
    def policy(self) -> Any: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def is_sharded(self) -> bool: ...

    def changed(self, **changes: Any) -> Planned: ...

    def suggest(self, budget: int) -> list[Suggestion]: ...


def advise(plan: Planned, budget: int | None) -> Iterator[Advice]:
    """Yield what is to be done, the most urgent first."""
    yield from _does_not_fit(plan, budget)
    if not plan.is_sharded:  # units of a sharded model cannot be tried in another way
        yield from _tiny_units(plan)
        yield from _huge_unit(plan)
        yield from _embedding_in_a_unit(plan)
        yield from _padding(plan)
        yield from _precision(plan)
        yield from _replicas(plan, budget)
    yield from _memory_setting(plan, budget)


# Rules.


def _does_not_fit(plan: Planned, budget: int | None) -> Iterator[Advice]:
    step = plan.step
    if step is None or budget is None or step.highest_nbytes <= budget:
        return
    top = max(step.memory, key=lambda point: point.peak_nbytes)
    kind, most = max(zip(step.kinds, top.peak_by_kind, strict=True), key=lambda item: item[1])
    tried = plan.suggest(budget)
    best = tried[0]
    change = best.code if best.fits else "more ranks, or smaller units"
    gain = (
        f"peak {nbytes_text(best.peak_nbytes)}"
        if best.fits
        else f"the best that was tried takes {nbytes_text(best.peak_nbytes)} ({best.code})"
    )
    yield Advice(
        "memory",
        "the step",
        f"does not fit: it takes {nbytes_text(step.highest_nbytes)} of {nbytes_text(budget)}, of "
        f"which {nbytes_text(most)} are {kind}",
        change,
        gain,
    )


def _tiny_units(plan: Planned) -> Iterator[Advice]:
    gathered = [group for group in plan.groups if group.gather_nbytes]
    tiny = [group for group in gathered if _is_tiny(group.gather_nbytes, plan)]
    blocks = repeated_blocks(plan.model)
    if len(tiny) < 4 or 2 * len(tiny) < len(gathered) or not blocks:
        return
    other = _tried(plan, policy=blocks)
    if other is None or len(other.groups) >= len(plan.groups):
        return
    yield Advice(
        "slow",
        f"{len(tiny)} units, the first {tiny[0].name or '<root>'}",
        "too small for the link: at most "
        f"{nbytes_text(max(one.gather_nbytes for one in tiny))} are gathered, in "
        f"{_collectives(plan)}",
        f"policy={_names(blocks)}",
        _gain(plan, other, f"{_collectives(plan)} become {_collectives(other)}"),
    )


def _huge_unit(plan: Planned) -> Iterator[Advice]:
    sizes = [group.whole_nbytes for group in plan.groups]
    total, largest = sum(sizes), max(plan.groups, key=lambda group: group.whole_nbytes)
    others = [group.whole_nbytes for group in plan.groups if group is not largest]
    usual = statistics.median(others) if others else 0
    if largest.whole_nbytes < max(HUGE_SHARE * total, HUGE_TIMES * usual) or total == 0:
        return
    blocks = repeated_blocks(_module_of(plan.model, largest.name) or plan.model)
    policy = _joined(plan.policy, blocks)
    if not blocks or policy is None:
        return
    other = _tried(plan, policy=policy)
    if other is None or len(other.groups) <= len(plan.groups):
        return
    yield Advice(
        "memory",
        largest.name or "<root>",
        f"gathers {nbytes_text(largest.whole_nbytes)} at once, "
        f"{largest.whole_nbytes / total:.0%} of the model",
        f"policy={_names(policy)}",
        _gain(plan, other, _largest_becomes(plan, other)),
    )


def _embedding_in_a_unit(plan: Planned) -> Iterator[Advice]:
    for group in plan.groups:
        module = _module_of(plan.model, group.name)
        if module is None or module is plan.model or isinstance(module, nn.Embedding):
            continue
        inside = [
            (name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)
        ]
        own = {param.name: param for param in group.params}
        for name, part in inside:
            full = f"{group.name}.{name}.weight"
            share = own[full].nbytes / max(group.whole_nbytes, 1) if full in own else 0.0
            policy = _joined(plan.policy, {type(part)})
            if share < EMBEDDING_SHARE or len(own) == 1 or policy is None:
                continue
            other = _tried(plan, policy=policy)
            if other is None:
                continue
            yield Advice(
                "memory",
                f"{group.name}.{name}",
                f"an embedding of {nbytes_text(own[full].nbytes)} is {share:.0%} of the unit "
                f"{group.name}, and is whole as long as that runs",
                f"policy={_names(policy)}",
                _gain(plan, other, _largest_becomes(plan, other)),
            )


def _padding(plan: Planned) -> Iterator[Advice]:
    ranks = plan.mesh[-1]
    padded = [
        param
        for group in plan.groups
        for param in group.params
        if param.padding_nbytes > PADDED_SHARE * (param.nbytes + param.padding_nbytes)
    ]
    total = sum(group.shard_nbytes for group in plan.groups) * ranks
    lost = sum(param.padding_nbytes for param in padded)
    if not total or lost < PADDED_SHARE * total:
        return
    worst = max(padded, key=lambda param: param.padding_nbytes)
    better = {param.name: dim for param in padded if (dim := _better_dim(param, ranks)) is not None}
    other = _tried(plan, shard_placement_fn=_placement(plan.model, better))
    if worst.name not in better or other is None:
        change, gain = "fewer ranks to shard over, and replicas of them: mesh=(replicas, ranks)", ""
    else:
        change = f"shard_placement_fn=lambda param: Shard({better[worst.name]}) for it"
        before, after = (sum(g.padding_nbytes for g in one.groups) for one in (plan, other))
        gain = _gain(plan, other, f"padding {nbytes_text(before)} becomes {nbytes_text(after)}")
    yield Advice(
        "memory",
        worst.name,
        f"{worst.shape[worst.dim or 0]} rows over {ranks} ranks: "
        f"{nbytes_text(worst.padding_nbytes)} of padding to {nbytes_text(worst.nbytes)}; "
        f"{lost / total:.0%} of all shards are padding",
        change,
        gain,
    )


def _precision(plan: Planned) -> Iterator[Advice]:
    machine, step = plan.hardware, plan.step
    dtypes = {dtype for group in plan.groups for dtype in group.dtypes}
    if machine is None or step is None or dtypes != {torch.float32}:
        return
    if flops_of(machine, torch.bfloat16) < 2 * flops_of(machine, torch.float32):
        return
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    other = _tried(plan, mp_policy=policy)
    if other is not None and _saves(plan, other):
        yield Advice(
            "slow",
            "all units",
            "compute and gather in float32, the slower dtype of this machine",
            "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
            _gain(plan, other),
        )


def _replicas(plan: Planned, budget: int | None) -> Iterator[Advice]:
    machine = plan.hardware
    if machine is None or plan.step is None or len(plan.mesh) != 1:
        return
    ranks, near = plan.mesh[0], machine.ranks_per_node
    if ranks <= near or ranks % near:
        return
    other = _tried(plan, mesh=(ranks // near, near))
    if other is None or (budget is not None and _step_of(other).highest_nbytes > budget):
        return  # replicas keep more
    if _saves(plan, other):
        yield Advice(
            "slow",
            "the mesh",
            f"{ranks} ranks in one shard axis gather between nodes",
            f"mesh=({ranks // near}, {near}): shard inside a node, replicate between nodes",
            _gain(plan, other),
        )


def _memory_setting(plan: Planned, budget: int | None) -> Iterator[Advice]:
    step = plan.step
    if step is None or step.seconds is None:
        return
    found: list[tuple[float, str, Planned]] = []
    for memory in ("fast", "balanced", "low"):
        other = plan.changed(memory=memory)
        one = _step_of(other)
        if one.seconds is not None and (budget is None or one.highest_nbytes <= budget):
            found.append((one.seconds, memory, other))
    if not found:
        return
    _, memory, other = min(found, key=lambda item: item[0])
    if _saves(plan, other):
        yield Advice(
            "slow",
            "the step",
            f"compute waits {step.waiting_seconds / step.seconds:.0%} of it",
            f"model.set_memory({memory!r})",
            _gain(plan, other),
        )


# What rules look at.


def repeated_blocks(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of a container's modules that come again and again, outermost first."""
    found: Counter[type[nn.Module]] = Counter()

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList | nn.Sequential) and _is_block(child, module):
                found[type(child)] += sum(param.numel() for param in child.parameters())
            else:
                walk(child)

    walk(model)
    most = max(found.values(), default=0)
    return {kind for kind, numel in found.items() if 4 * numel >= most > 0}


def _is_block(child: nn.Module, container: nn.Module) -> bool:
    alike = [one for one in container.children() if type(one) is type(child)]
    return len(alike) > 1 and any(True for _ in child.children())


def _module_of(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _joined(policy: Any, classes: set[type[nn.Module]]) -> set[type[nn.Module]] | None:
    """Return a policy's classes and more; None if it picks in another way."""
    if policy is None:
        return set(classes)
    if isinstance(policy, set | frozenset | list | tuple):
        return set(policy) | classes
    return None


def _better_dim(param: ParamPlan, ranks: int) -> int | None:
    """Return a dim along which a parameter is padded by less than half as much."""

    def padding(dim: int) -> float:
        rows = param.shape[dim]
        return (-(-rows // ranks) * ranks - rows) / max(rows, 1)

    if not param.shape:
        return None
    best = min(range(len(param.shape)), key=padding)
    is_better = best != param.dim and padding(best) < padding(param.dim or 0) / 2
    return best if is_better else None


def _placement(model: nn.Module, dims: dict[str, int]) -> Callable[[nn.Parameter], Shard | None]:
    """Return a ``shard_placement_fn``: it is given parameters of a copy, so it goes by shape."""
    shapes = {tuple(param.shape): dims[n] for n, param in model.named_parameters() if n in dims}

    def place(param: nn.Parameter) -> Shard | None:
        dim = shapes.get(tuple(param.shape))
        return None if dim is None else Shard(dim)

    return place


def _is_tiny(nbytes: int, plan: Planned) -> bool:
    machine, ranks = plan.hardware, plan.mesh[-1]
    if machine is None:
        return nbytes < TINY_NBYTES
    took = seconds_of(machine, "all_gather", nbytes, ranks, 1)
    moving = nbytes * (ranks - 1) / ranks / bandwidth_of(machine, ranks, 1)
    return took > 0 and (took - moving) / took > LATENCY_SHARE


# How gains are told.


def _tried(plan: Planned, **changes: Any) -> Planned | None:
    """Return a plan with other settings; None if the model does not run with them.

    A model may read a parameter outside of the module that has it: then that cannot be a unit.
    """
    try:
        return plan.changed(**changes)
    except FSDPError:
        return None


def _step_of(plan: Planned) -> StepPlan:
    assert plan.step is not None  # a batch was given
    return plan.step


def _saves(plan: Planned, other: Planned) -> bool:
    before, after = _step_of(plan).seconds, _step_of(other).seconds
    return before is not None and after is not None and after < (1 - GAIN_SHARE) * before


def _gain(plan: Planned, other: Planned, first: str = "") -> str:
    parts = [first] if first else []
    if plan.step is not None and other.step is not None:
        one, two = plan.step, other.step
        parts.append(
            f"peak {nbytes_text(one.highest_nbytes)} becomes {nbytes_text(two.highest_nbytes)}"
        )
        if one.seconds is not None and two.seconds is not None:
            parts.append(
                f"a step of {seconds_text(one.seconds)} becomes {seconds_text(two.seconds)}"
            )
    return ", ".join(parts)


def _collectives(plan: Planned) -> str:
    if plan.step is None:
        return f"{len(plan.groups)} units"
    return f"{len(plan.step.collectives)} collectives a step"


def _largest_becomes(plan: Planned, other: Planned) -> str:
    before, after = (max(g.whole_nbytes for g in one.groups) for one in (plan, other))
    return f"{nbytes_text(before)} gathered at once become {nbytes_text(after)}"


def _names(classes: Sequence[type[nn.Module]] | set[type[nn.Module]]) -> str:
    return "{" + ", ".join(sorted(one.__name__ for one in classes)) + "}"
