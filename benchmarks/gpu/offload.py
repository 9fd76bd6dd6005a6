"""States and activations on the host: step and peak, with and without, steps in a row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.device import offload
from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows
from benchmarks.gpu._steps import llama

NAMES = (
    "checkpoint",
    "checkpoint, states",
    "checkpoint, states, 8 GB",
    "checkpoint, offload",
    "checkpoint, offload, states",
    "none",
    "offload all",
)
TOKENS = (32,) if _machine.REHEARSES else (8192, 4096)
ROUNDS = 2 if _machine.REHEARSES else 5


def copies_of(step: Callable[[], None]) -> dict[str, float]:
    """Return how long a step copies each way, and how much of it beside a kernel."""
    events = [e for e in _machine.profiled(step) if e.get("cat") in _machine.ON_DEVICE]
    spans = {
        name: [(e["ts"], e["ts"] + e["dur"]) for e in events if way in e["name"]]
        for name, way in (("in", "Pinned -> Device"), ("out", "Device -> Pinned"))
    }
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "kernel"]
    found = {}
    for name, ones in spans.items():
        both = sum(
            max(0.0, min(end, its_end) - max(start, its_start))
            for start, end in ones
            for its_start, its_end in kernels
        )
        found[f"{name}, ms"] = sum(end - start for start, end in ones) / 1e3
        found[f"{name} beside kernels, ms"] = both / 1e3
    return found


def measure(variant: offload.Variant, tokens: int) -> dict[str, Any]:
    machine = offload.Machine()
    figures = offload.measure_variant(variant, llama(8), tokens, ROUNDS, machine, copies_of)
    _machine.empty()
    return {figure.quantity: figure.value for figure in figures}


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    variants = {variant.name: variant for variant in offload.VARIANTS}
    steps: dict[tuple[int, str], float] = {}
    with _machine.one_rank():
        for tokens in TOKENS:
            for name in NAMES:
                ask = functools.partial(measure, variants[name], tokens)
                found = rows.ask("", f"{name}, {tokens} tokens", ask, 4.0)
                if found:
                    steps[tokens, name] = found["step ms"]
    first = TOKENS[0]
    rows.end(
        ", ".join(
            f"{name}: {steps[first, name]:.0f} ms" for name in NAMES if (first, name) in steps
        )
    )


if __name__ == "__main__":
    main()
