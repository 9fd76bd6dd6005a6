"""Rules that detect problems in units and settings. Each rule reports a figure and a change to
make, and plans again with that change to predict the gain."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import Shard

from fsdp2._core.base.errors import FSDPError
from fsdp2._core.base.names import nbytes_text, seconds_text
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._tools.pages.content import Advice
from fsdp2._tools.plan.budget import MEMORY, search_of
from fsdp2._tools.plan.hardware import flops_of, seconds_of
from fsdp2._tools.plan.setup import Prediction
from fsdp2._tools.plan.values import ParamPlan

TINY_NBYTES = 1 << 20
"""If no hardware is given, a gather with fewer bytes is small."""
LATENCY_SHARE = 0.5
"""If hardware is given, a gather is small if latency is more than this share of its time."""
HUGE_SHARE, HUGE_TIMES = 0.4, 4
"""A unit is huge if it is at least this share of the model and this multiple of the median unit."""
PADDED_SHARE = 0.05
"""Padding is reported if it is at least this share of all shards."""
EMBEDDING_SHARE = 0.25
"""An embedding is reported if it is at least this share of its unit."""
GAIN_SHARE = 0.03
"""A gain is reported if it is more than this share of a step's time."""


def advise(plan: Prediction, budget: int | None) -> Iterator[Advice]:
    yield from _does_not_fit(plan, budget)
    if not plan.is_sharded:  # the units of a sharded model cannot be changed
        yield from _tiny_units(plan)
        yield from _huge_unit(plan)
        yield from _embedding_in_a_unit(plan)
        yield from _padding(plan)
        yield from _precision(plan)
        yield from _replicas(plan, budget)
    yield from _memory_setting(plan, budget)


def _does_not_fit(plan: Prediction, budget: int | None) -> Iterator[Advice]:
    step = plan.step
    if step is None or budget is None or _fits(plan, budget):
        return
    top = max(step.memory, key=lambda point: point.peak_nbytes)
    kind, most = max(zip(step.kinds, top.peak_by_kind, strict=True), key=lambda item: item[1])
    best = search_of(plan, budget).run()[0]
    peak = nbytes_text(best.peak_nbytes)
    change, gain = best.code, f"peak {peak}"
    if not best.fits:
        change = "more ranks, or smaller units"
        gain = f"the best setting tried takes {peak} ({best.code})"
    yield Advice(
        "memory",
        "the step",
        f"does not fit: it takes {nbytes_text(step.highest_nbytes)}, including {nbytes_text(most)} "
        f"of {kind}; the budget is {nbytes_text(budget)}",
        change,
        gain,
    )


def _tiny_units(plan: Prediction) -> Iterator[Advice]:
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
        f"{nbytes_text(max(one.gather_nbytes for one in tiny))} per gather, in "
        f"{_collectives(plan)}",
        f"policy={_names(blocks)}",
        _gain(plan, other, f"{_collectives(plan)} become {_collectives(other)}"),
    )


def _huge_unit(plan: Prediction) -> Iterator[Advice]:
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
        f"gathers {nbytes_text(largest.whole_nbytes)} together, "
        f"{largest.whole_nbytes / total:.0%} of the model",
        f"policy={_names(policy)}",
        _gain(plan, other, _largest_becomes(plan, other)),
    )


def _embedding_in_a_unit(plan: Prediction) -> Iterator[Advice]:
    for group in plan.groups:
        module = _module_of(plan.model, group.name)
        if module is None or module is plan.model or isinstance(module, nn.Embedding):
            continue
        own = {param.name: param for param in group.params}
        for name, part in module.named_modules():
            if not isinstance(part, nn.Embedding):
                continue
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
                f"{group.name}, and is unsharded while the unit runs",
                f"policy={_names(policy)}",
                _gain(plan, other, _largest_becomes(plan, other)),
            )


def _padding(plan: Prediction) -> Iterator[Advice]:
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
        change, gain = "shard over fewer ranks, with replicas: mesh=(replicas, ranks)", ""
    else:
        change = f"shard_placement_fn=lambda param: Shard({better[worst.name]}) for this parameter"
        before, after = (sum(g.padding_nbytes for g in one.groups) for one in (plan, other))
        gain = _gain(plan, other, f"padding {_becomes(before, after)}")
    yield Advice(
        "memory",
        worst.name,
        f"{worst.shape[worst.dim or 0]} rows over {ranks} ranks: "
        f"{nbytes_text(worst.padding_nbytes)} of padding added to {nbytes_text(worst.nbytes)}; "
        f"{lost / total:.0%} of all shards is padding",
        change,
        gain,
    )


def _precision(plan: Prediction) -> Iterator[Advice]:
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
            "compute and gather in float32, although bfloat16 is faster on this machine",
            "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
            _gain(plan, other),
        )


def _replicas(plan: Prediction, budget: int | None) -> Iterator[Advice]:
    machine = plan.hardware
    if machine is None or plan.step is None or len(plan.mesh) != 1:
        return
    ranks, near = plan.mesh[0], machine.ranks_per_node
    if ranks <= near or ranks % near:
        return
    other = _tried(plan, mesh=(ranks // near, near))
    # replicas need more memory
    if other is not None and _fits(other, budget) and _saves(plan, other):
        yield Advice(
            "slow",
            "the mesh",
            f"all-gathers over the shard axis of {ranks} ranks cross node boundaries",
            f"mesh=({ranks // near}, {near}): shard within a node, replicate across nodes",
            _gain(plan, other),
        )


def _memory_setting(plan: Prediction, budget: int | None) -> Iterator[Advice]:
    step = plan.step
    if step is None or step.seconds is None:
        return
    others = {memory: plan.changed(memory=memory) for memory in MEMORY}
    fitting = {name: one for name, one in others.items() if _fits(one, budget)}
    if not fitting:
        return
    memory, other = min(fitting.items(), key=lambda item: item[1].step_for("advice").seconds or 0.0)
    if _saves(plan, other):
        yield Advice(
            "slow",
            "the step",
            f"compute waits {step.waiting_seconds / step.seconds:.0%} of the time",
            f"model.set_memory({memory!r})",
            _gain(plan, other),
        )


def repeated_blocks(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of the outermost modules that a container repeats."""
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
    """Return a policy's classes plus additional ones, or None if the policy has no classes."""
    if policy is None:
        return set(classes)
    if isinstance(policy, set | frozenset | list | tuple):
        return set(policy) | classes
    return None


def _better_dim(param: ParamPlan, ranks: int) -> int | None:
    """Return a dim along which sharding needs less than half of the current padding, or None."""

    def padding(dim: int) -> float:
        rows = param.shape[dim]
        return (-(-rows // ranks) * ranks - rows) / max(rows, 1)

    if not param.shape:
        return None
    best = min(range(len(param.shape)), key=padding)
    is_better = best != param.dim and padding(best) < padding(param.dim or 0) / 2
    return best if is_better else None


def _placement(model: nn.Module, dims: dict[str, int]) -> Callable[[nn.Parameter], Shard | None]:
    """Return a ``shard_placement_fn`` that matches shapes, because copies have new parameters."""
    shapes = {tuple(param.shape): dims[n] for n, param in model.named_parameters() if n in dims}

    def place(param: nn.Parameter) -> Shard | None:
        dim = shapes.get(tuple(param.shape))
        return None if dim is None else Shard(dim)

    return place


def _is_tiny(nbytes: int, plan: Prediction) -> bool:
    machine, ranks = plan.hardware, plan.mesh[-1]
    if machine is None:
        return nbytes < TINY_NBYTES
    took, latency = (seconds_of(machine, "all_gather", sent, ranks, 1) for sent in (nbytes, 1))
    return latency > LATENCY_SHARE * took


def _tried(plan: Prediction, **changes: Any) -> Prediction | None:
    """Return a plan with other settings, or None if the model fails with them: for example, a
    module cannot be a unit if its parameters are read outside of it."""
    try:
        return plan.changed(**changes)
    except FSDPError:
        return None


def _fits(plan: Prediction, budget: int | None) -> bool:
    return budget is None or plan.step_for("advice").highest_nbytes <= budget


def _saves(plan: Prediction, other: Prediction) -> bool:
    before, after = (one.step_for("advice").seconds for one in (plan, other))
    return before is not None and after is not None and after < (1 - GAIN_SHARE) * before


def _gain(plan: Prediction, other: Prediction, first: str = "") -> str:
    parts = [first] if first else []
    if plan.step is not None and other.step is not None:
        one, two = plan.step, other.step
        parts.append(f"peak {_becomes(one.highest_nbytes, two.highest_nbytes)}")
        if one.seconds is not None and two.seconds is not None:
            times = seconds_text(one.seconds), seconds_text(two.seconds)
            parts.append("a step of {} becomes {}".format(*times))
    return ", ".join(parts)


def _becomes(before: int, after: int) -> str:
    return f"{nbytes_text(before)} becomes {nbytes_text(after)}"


def _collectives(plan: Prediction) -> str:
    if plan.step is None:
        return f"{len(plan.groups)} units"
    return f"{len(plan.step.collectives)} collectives a step"


def _largest_becomes(plan: Prediction, other: Prediction) -> str:
    before, after = (max(g.whole_nbytes for g in one.groups) for one in (plan, other))
    return f"{nbytes_text(before)} gathered together become {nbytes_text(after)}"


def _names(classes: Sequence[type[nn.Module]] | set[type[nn.Module]]) -> str:
    return "{" + ", ".join(sorted(one.__name__ for one in classes)) + "}"
