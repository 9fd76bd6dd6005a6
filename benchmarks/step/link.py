"""Time of a step when collectives go over one serial link beside the compute.

    python -m benchmarks.step.link            on a virtual clock: deterministic
    python -m benchmarks.step.link --wall     on the wall clock: compute is real, the link sleeps

Bandwidth is chosen so that the least communication (`_limits`) takes 0.45, 1.2 and 2.8 times the
plain model's compute. A step ends when the link is idle. The virtual clock moves by the model's
matrix products, and by waiting; what a library does on the host is free there, so the figure is
how well its order of operations overlaps. `sent / limit` is what it sent over the least (DDP's own
least is two thirds of that), `step / limit` the time over max(compute, communication),
`step / torch` over torch's FSDP2 with its defaults on the same grouping. On the wall clock a figure
is the median of per-round ratios (with quartiles), the order of variants rotated.

`fsdp2.compile` runs on the virtual clock only: the code that inductor emits, in its order, with its
own products of matrices moving the clock and its collectives on the same link; other kernels are
stubs, which take no time there anyway. Without a link its step has to take the plain model's time.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.kit import noop
from benchmarks.kit.limits import sharded_bytes_sent
from benchmarks.kit.link import Link, LinkGroup, VirtualClock, WallClock
from benchmarks.kit.models import (
    GROUPINGS,
    MEDIUM,
    OURS,
    Size,
    build,
    make_input,
    make_step,
    prepare_step,
)
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run
from benchmarks.kit.rounds import rotate, spread
from tests.kit.emitted import stubbed_kernels

RATIOS = (0.45, 1.2, 2.8)
RANKS = 8
WARMUP = 3
VIRTUAL = dataclasses.replace(MEDIUM, depth=12)
WALL = dataclasses.replace(MEDIUM, tokens=64)
COMPILED = "fsdp2.compile"
Steps = dict[str, Callable[[], None]]


def measure(arguments: argparse.Namespace) -> Measured:
    size = WALL if arguments.wall else VIRTUAL
    clock = WallClock() if arguments.wall else VirtualClock()
    link = Link(clock)
    figures: list[Figure] = []
    with noop.ranks(RANKS, partial(LinkGroup, link=link)) as (_, mesh), clock:
        for grouping in GROUPINGS:
            steps: Steps = {}
            split = {"split_root": grouping != "default"}
            for library in arguments.libraries:
                if grouping != "default" and library in ("ddp", "fsdp1"):
                    continue
                steps[library] = prepare_step(library, size, mesh, **split)
            if OURS in arguments.libraries and isinstance(clock, VirtualClock):
                steps[COMPILED] = prepare_compiled(size, mesh, clock, **split)
            link.bandwidth = None
            for step in steps.values():
                for _ in range(WARMUP):
                    step()
            check_compute(steps, link)
            least = sharded_bytes_sent(size, RANKS, **split)
            compute = _median_compute(steps["plain"], link, arguments.rounds)
            for ratio in RATIOS:
                link.bandwidth = least / (ratio * compute)
                case = f"{grouping}, communication/compute {ratio}"
                limit = max(1.0, ratio) * compute
                if arguments.wall:
                    figures += _time_rounds(case, steps, link, ratio, arguments.rounds)
                else:
                    figures += _time_once(case, steps, link, limit, least)
    torch._dynamo.reset()  # nobody else shall run stubs
    settings = {"numel": size.numel, "world_size": RANKS, "rounds": arguments.rounds}
    return Measured(figures, settings, suffix="-wall" if arguments.wall else "")


def prepare_compiled(
    size: Size, mesh: DeviceMesh, clock: VirtualClock, **split: bool
) -> Callable[[], None]:
    """Return a step of the compiled model on the virtual clock; it compiles when it runs first."""
    import fsdp2

    model = fsdp2.compile(build(OURS, size, mesh, bf16=False, **split), fullgraph=True)
    step = make_step(model, make_input(OURS, size, bf16=False))

    def run_emitted() -> None:
        with stubbed_kernels(), clock.sees_emitted_products():
            step()

    return run_emitted


def check_compute(steps: Steps, link: Link) -> None:
    """Raise if the compiled model's products do not take the time that the plain model's do."""
    if COMPILED in steps:
        found, expected = (time_step(steps[name], link) for name in (COMPILED, "plain"))
        if not math.isclose(found, expected):
            raise RuntimeError(f"products took {found}, expected {expected}: some are not seen")


def time_step(step: Callable[[], None], link: Link) -> float:
    """Run a step from an idle link to an idle link; return the clock's time."""
    link.wait_until_idle()
    start = link.clock.now()
    step()
    link.wait_until_idle()
    return link.clock.now() - start


def _median_compute(plain: Callable[[], None], link: Link, rounds: int) -> float:
    return statistics.median(time_step(plain, link) for _ in range(rounds))


def _time_once(case: str, steps: Steps, link: Link, limit: float, least: float) -> list[Figure]:
    times, sent = {}, {}
    for library, step in steps.items():
        before = link.nbytes
        times[library] = time_step(step, link)
        sent[library] = (link.nbytes - before) / least
    figures = []
    for library, took in times.items():
        is_gated = gated(library) or library == COMPILED
        figures.append(Figure(case, library, "sent / limit", sent[library], is_gated))
        figures.append(Figure(case, library, "step / limit", took / limit, is_gated))
        if "torch" in times and library != "plain":
            figures.append(Figure(case, library, "step / torch", took / times["torch"]))
    return figures


def _time_rounds(case: str, steps: Steps, link: Link, ratio: float, rounds: int) -> list[Figure]:
    times = rotate(rounds, {name: partial(time_step, step, link) for name, step in steps.items()})
    # Both parts of the limit follow the plain model's time in the same round: the load on the
    # machine slows compute, and the link was set for the plain model's median.
    plain = times["plain"]
    compute = statistics.median(plain)
    limits = [max(own, ratio * compute) for own in plain]
    figures = []
    for library, took in times.items():
        figures.append(Figure(case, library, "step / limit", *spread(took, limits)))
        if "torch" in times and library != "plain":
            figures.append(Figure(case, library, "step / torch", *spread(took, times["torch"])))
    return figures


if __name__ == "__main__":
    parser = make_parser("link", __doc__)
    parser.add_argument("--wall", action="store_true", help="real time instead of a virtual clock")
    parser.add_argument("--rounds", type=int, default=9, help="rounds on the wall clock")
    run("link", __doc__, measure, parser)
