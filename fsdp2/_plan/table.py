"""A plan as a table that fits 100 columns.

Owns the text. It must not know how a plan is found.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp2._base.sizes import nbytes_text
from fsdp2._plan.values import GroupPlan, StepPlan
from fsdp2._plan.verdict import place_before

MOST_NAMES = 3
"""So many names of equal groups are in a row."""


def headline(mesh: Sequence[int], groups: Sequence[GroupPlan]) -> str:
    """Return how many parameters are over how many ranks."""
    total = sum(group.numel for group in groups)
    shape = " x ".join(str(size) for size in mesh)
    return f"{count(total)} parameters over {math.prod(mesh):,} ranks ({shape})"


def replicas(mesh: Sequence[int]) -> Iterator[str]:
    """Say who shares the model, where not all ranks do."""
    if len(mesh) == 2 and mesh[0] > 1:
        every = math.prod(mesh)
        yield (
            f"{mesh[1]:,} ranks share the model, in {mesh[0]:,} replicas; mesh={every} (--mesh "
            f"{every}): all {every:,} share it"
        )


def lines(
    mesh: Sequence[int], rank: int, groups: Sequence[GroupPlan], step: StepPlan | None
) -> Iterator[str]:
    """Yield a table that fits 100 columns: equal groups that follow each other are one row."""
    yield f"{headline(mesh, groups)}, as on rank {rank}"
    yield from replicas(mesh)
    yield ""
    heads = ("parameters", "whole", "shard", "padding", "gathered", "reduced")
    yield f"{'unit':<34}" + "".join(f"{head:>11}" for head in heads)
    for name, group in rows(groups):
        cells = (
            count(group.numel),
            nbytes_text(group.whole_nbytes),
            nbytes_text(group.shard_nbytes),
            nbytes_text(group.padding_nbytes),
            nbytes_text(group.gather_nbytes),
            nbytes_text(group.reduce_nbytes),
        )
        yield f"{_cut(name, 34):<34}" + "".join(f"{cell:>11}" for cell in cells)
    shards = sum(group.shard_nbytes for group in groups)
    grads = sum(group.grad_nbytes for group in groups)
    yield ""
    yield f"a rank keeps {nbytes_text(shards)} of parameters and {nbytes_text(grads)} of gradients"
    if step is not None:
        yield from _step_lines(step, mesh)


def _step_lines(step: StepPlan, mesh: Sequence[int]) -> Iterator[str]:
    if step.optimizer_nbytes:
        yield f"and {nbytes_text(step.optimizer_nbytes)} of optimizer state"
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sizes = [one.nbytes for one in step.collectives if one.kind == kind]
        if sizes:
            yield f"{kind}: {len(sizes)} a step, {nbytes_text(sum(sizes))}"
    top = max(step.memory, key=lambda point: point.peak_nbytes)
    start = nbytes_text(step.start_nbytes)
    place = place_before(top.label)
    yield f"peak {nbytes_text(step.highest_nbytes)} at {place}, of which {start} at start"
    if step.host_nbytes:
        yield f"{nbytes_text(step.host_nbytes)} of the host's memory"
    if step.seconds is not None:
        waiting = step.waiting_seconds / step.seconds if step.seconds else 0.0
        yield f"a step takes {seconds_text(step.seconds)}; compute waits {waiting:.1%} of it"
        if step.tokens_per_second is not None:
            rate, every = step.tokens_per_second, step.tokens_per_second * math.prod(mesh)
            yield f"{rate_text(rate)} a rank, {rate_text(every)} in all; MFU {step.mfu or 0.0:.1%}"


def rows(groups: Sequence[GroupPlan]) -> Iterator[tuple[str, GroupPlan]]:
    """Yield names and sizes: equal groups that follow each other are one."""
    for _, same in itertools.groupby(groups, lambda one: replace(one, name="", alone=())):
        alike = list(same)
        yield _joined([one.name or "<root>" for one in alike]), alike[0]


def _joined(names: Sequence[str]) -> str:
    """Return names that differ in numbers as the first and how many; others side by side."""
    if len(names) > 1 and len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        return f"{names[0]} ({len(names)} times)"
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[:MOST_NAMES])}, ... ({len(names)})"
    return ", ".join(names)


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"...{text[-(width - 4) :]}"


def rate_text(tokens: float) -> str:
    """Return tokens a second with four digits at most."""
    digits = f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.4g}"
    return f"{digits} tokens/s"


def seconds_text(seconds: float) -> str:
    """Return a time with the unit that fits it."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} us"


def count(number: int) -> str:
    """Return a number with the prefix that fits it."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)
