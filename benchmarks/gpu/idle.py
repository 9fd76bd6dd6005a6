"""Where compute's stream is idle in a steady step of 8B blocks, and what each gap waits for.

A gap lies between two kernels of compute's stream. It is the *host's* if the later kernel was
launched after the earlier one had ended; *a collective's* if one in another stream ended inside;
*a copy's* likewise; else it is between kernels that were both queued. Times in us of one step;
links take what the planner says of 8 ranks of H100.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows
from benchmarks.gpu._steps import BLOCKS_8B, LIBRARIES, emulated, make_step, size_of, warm_up
from benchmarks.kit.models import Size
from fsdp2._tools.plan.costs import Costs, sustained
from fsdp2._tools.plan.hardware import HARDWARE

RANKS = 8
LEAST_US = 3.0  # from one kernel to the next that is queued it takes one or two
WAITS = "cudaStreamSynchronize|cudaDeviceSynchronize|cudaMalloc|cudaFree|cudaEventSynchronize"


def gaps_of(events: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Return the cause, length and next kernel of each gap of compute's stream."""
    work = [event for event in events if event.get("cat") in _machine.ON_DEVICE]
    streams: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in work:
        streams[event["tid"]].append(event)
    if not streams:
        return []
    products = "matrix products"
    compute = max(
        streams,
        key=lambda one: sum(
            e["dur"] for e in streams[one] if _machine.kind_of(e["name"]) == products
        ),
    )
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    mine = sorted(streams.pop(compute), key=lambda event: event["ts"])
    others = [event for stream in streams.values() for event in stream]
    found = []
    end = mine[0]["ts"] + mine[0]["dur"]
    for event in mine[1:]:
        start = event["ts"]
        if start - end >= LEAST_US:
            found.append((_cause(end, start, event, launches, others), start - end, event["name"]))
        end = max(end, start + event["dur"])
    return found


def _cause(
    began: float,
    ended: float,
    event: dict[str, Any],
    launches: dict[Any, dict[str, Any]],
    others: list[dict[str, Any]],
) -> str:
    launch = launches.get(event.get("args", {}).get("correlation"))
    if launch is not None and launch["ts"] + launch["dur"] > began:
        return "the host launched late"
    inside = [one for one in others if began < one["ts"] + one["dur"] <= ended + 1]
    if not inside:
        return "both were queued"
    last = max(inside, key=lambda one: one["ts"] + one["dur"])
    return f"waits for {_machine.kind_of(last['name'])}"


def find(library: str, size: Size, link: float) -> list[dict[str, Any]]:
    with emulated(RANKS, link) as mesh:
        step = warm_up(make_step(library, size, mesh))
        took = statistics.median(_machine.time_once(step).device_ms for _ in range(3))
        events = _machine.profiled(step)
    gaps = gaps_of(events)
    waits = sum(event.get("name") in WAITS.split("|") for event in events)
    rows = [{"cause": "step", "us": took * 1e3, "host waits": waits}]
    by_cause: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for cause, length, name in gaps:
        by_cause[cause].append((length, name))
    for cause, ones in sorted(by_cause.items(), key=lambda item: -sum(one for one, _ in item[1])):
        longest, name = max(ones)
        rows.append(
            {
                "cause": cause,
                "gaps": len(ones),
                "us": sum(one for one, _ in ones),
                "longest": longest,
                "before": name[:60],
            }
        )
    _machine.empty()
    return rows


def link_us(size: Size) -> float:
    """Return what a gather of one block takes over the links of 8 H100."""
    nbytes = 2 * size.block_numel
    return 1e6 * Costs(sustained(HARDWARE["h100-nvlink-ib"])).collective(
        "all_gather", nbytes, RANKS, 1
    )


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    size = size_of(BLOCKS_8B)
    for link in (0.0, link_us(size)):
        for library in LIBRARIES[2:] if _machine.REHEARSES else reversed(LIBRARIES):
            what = f"{library}, {link:.0f} us a collective"
            rows.ask("", what, lambda one=library, us=link: find(one, size, us), 6.0)  # type: ignore[misc]
    rows.end()


if __name__ == "__main__":
    main()
