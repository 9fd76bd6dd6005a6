"""Where one variant's host cost goes, a block and step: C functions, ops, Python functions.

Everything is a difference between two depths, like the figures of `benchmarks.step.host`, so that
the rows add up to its table.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.host_run import Outcome, run_workers
from benchmarks.kit.host_worker import Request, make_label
from benchmarks.kit.report import to_table

PROFILED_STEPS = 100
NAME_WIDTH = 110
# Functions whose callees' instructions say something: bindings, ops, Python hooks in autograd.
# The interpreter's own functions are nested in themselves at every level and would say nothing.
_ENTRY = re.compile(
    r"THP\w+_\w+\(|at::_ops::\w+::call\(|cpp_function::initialize<|PyNode::apply|_call_hooks\("
    r"|call_tensor_pre_hooks|operator\(\)\(.*PyFunction|Engine::execute\("
)


def profile(
    library: str, precision: str, folder: Path, top: int, settings: Mapping[str, Any]
) -> str:
    """Return the tables of one variant as Markdown."""
    shared = {**settings, "precisions": [precision]}
    both = ["plain", library]
    requests = [
        Request(**{**shared, "mode": "count", "libraries": both}),
        Request(**{**shared, "mode": "ops", "libraries": both}),
        Request(**{**shared, "mode": "profile", "libraries": [library], "steps": PROFILED_STEPS}),
    ]
    outcomes = run_workers(requests, folder)
    for outcome in outcomes:
        if outcome.error:
            raise SystemExit(f"{outcome.request}:\n{outcome.error}")
    counted, ops, python = outcomes
    title = f"{library}, {precision}, a block and step"
    return "\n\n".join(
        [
            f"## C functions, own instructions: {title}",
            _show_instructions(counted, library, top, with_callees=False),
            f"## Ways from Python into torch, instructions with their callees: {title}",
            _show_instructions(counted, library, top, with_callees=True),
            f"## Ops dispatched: {title}",
            _show_ops(ops, library, top),
            f"## Python functions (cProfile inflates times; calls are exact): {title}",
            _show_python(python, library, top),
        ]
    )


def _subtract(
    deep: Mapping[str, float], shallow: Mapping[str, float], divisor: float
) -> dict[str, float]:
    """Return `(deep - shallow) / divisor` for every name in either."""
    names = {**deep, **shallow}
    return {name: (deep.get(name, 0) - shallow.get(name, 0)) / divisor for name in names}


def _pick(outcome: Outcome, library: str, table: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """Return the deep entry, the shallow entry and the blocks between them."""
    (precision,), (shallow, deep) = outcome.request.precisions, outcome.request.depths
    label = {depth: make_label(library, precision, depth) for depth in (shallow, deep)}
    return table[label[deep]], table[label[shallow]], deep - shallow


def _show_instructions(outcome: Outcome, library: str, top: int, *, with_callees: bool) -> str:
    def per_block(library: str) -> dict[str, float]:
        deep, shallow, blocks = _pick(outcome, library, outcome.dumps)
        read = [_read_functions(dump, with_callees=with_callees) for dump in (deep, shallow)]
        return _subtract(read[0], read[1], blocks * outcome.request.steps)

    base = per_block("plain")
    over = _subtract(per_block(library), base, 1)
    names = sorted(over, key=lambda name: -over[name])[:top]
    rows = [(name, f"{over[name]:,.0f}", f"{base.get(name, 0):,.0f}") for name in names]
    if not with_callees:
        rows.insert(0, ("all", f"{sum(over.values()):,.0f}", f"{sum(base.values()):,.0f}"))
    return to_table(("function", "over plain", "plain"), rows)


def _read_functions(dump: Path, *, with_callees: bool) -> dict[str, float]:
    """Return the instructions of each C function in a dump: its own, or of `_ENTRY` with callees.

    Callgrind appends 'N to a function that runs inside itself. Own costs are summed over these
    levels; with callees the outer level already holds the inner ones.
    """
    command = ["callgrind_annotate", "--threshold=100", "--auto=no", str(dump)]
    if with_callees:
        command.insert(1, "--inclusive=yes")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"\s*([\d,]+) \(\s*[\d.]+%\)\s+[^:]*:(.+?)(?: \[(.*)\])?$", line)
        if match is None:
            continue
        name, level = re.fullmatch(r"(.*?)('\d+)?", match[2]).groups()  # type: ignore[union-attr]  # always matches
        if with_callees and (level or not _ENTRY.search(name)):
            continue
        name = name[:NAME_WIDTH].replace("|", "/")
        if match[3] and not with_callees:
            name += f" [{Path(match[3]).name}]"
        functions[f"`{name}`"] = functions.get(f"`{name}`", 0) + int(match[1].replace(",", ""))
    return functions


def _show_ops(outcome: Outcome, library: str, top: int) -> str:
    def per_block(library: str) -> dict[str, float]:
        deep, shallow, blocks = _pick(outcome, library, outcome.results)
        return _subtract(deep["ops"], shallow["ops"], blocks)

    base = per_block("plain")
    over = _subtract(per_block(library), base, 1)
    names = sorted((name for name in over if over[name]), key=lambda name: -over[name])
    rows = [(f"`{name}`", f"{over[name]:.1f}", f"{base.get(name, 0):.1f}") for name in names[:top]]
    return to_table(
        ("op", "over plain", "plain"), [("all", f"{sum(over.values()):.1f}", ""), *rows]
    )


def _show_python(outcome: Outcome, library: str, top: int) -> str:
    deep, shallow, blocks = _pick(outcome, library, outcome.results)
    calls, own, cumulative = (
        _subtract({k: v[i] for k, v in deep.items()}, {k: v[i] for k, v in shallow.items()}, blocks)
        for i in range(3)
    )
    names: Sequence[str] = sorted(own, key=lambda name: -own[name])
    rows = [
        (
            f"`{name}`",
            f"{calls[name]:.1f}",
            f"{own[name] * 1e6:.1f}",
            f"{cumulative[name] * 1e6:.1f}",
        )
        for name in names[:top]
    ]
    total = ("all", f"{sum(calls.values()):.1f}", f"{sum(own.values()) * 1e6:.1f}", "")
    return to_table(("function", "calls", "own us", "with callees us"), [total, *rows])
