"""A training step on the clock of the simulated device: Llama's shapes, up to 512 ranks.

    scripts/bench device                         the whole table, in four minutes
    scripts/bench device --cases "8B, 8 ranks"   those whose names contain this
    scripts/bench device --pages FOLDER          a page with the timeline of each library, a case
    scripts/bench device --check                 the clock itself: delays that are planted in it

No kernel runs: shapes are computed, streams and events are the simulated device's, and time is what
`fsdp2/_tools/plan/costs.py` says, for an H100 with NVLink inside nodes of 8 and InfiniBand between
them. So figures repeat exactly, and compare orders of operations; they are no promise about a
cluster. One process is rank 0 of many that all do the same.

Steps of 4 and of 8 blocks are played, and a line through both gives the whole model's. `least` is
the longer of the plain model's compute and of the communication that no order avoids: all blocks
gathered twice and reduced once, embedding and head gathered once and reduced once. `exposed` is
time in which a collective runs and no kernel beside it, in forward and in backward. `waits` are
those of the host for the device, in a steady step. `host` is when the host has issued everything.
`peak` is above what is allocated when the step starts; `whole peak`, of steps with an
optimizer, has that in it. Such a step's time is that of two less that of one.

`on the host` keeps there what blocks save for backward (`fsdp2.offload_activations`): with
`checkpoint` their inputs, else all that every block or every fourth block saves.

`torch` has blocks and a root as units, as `fsdp2` has; `torch tuned` and `fsdp2 split` have
embedding and head as units, and `torch tuned` has prefetch lists and asynchronous gathers, too.

`--check` compares the clock with `scripts/bench link` on what both can play, and plants ten delays
in a step: each has to show where it was planted, move nothing before it, and make the step longer
by what a reading of the schedule says.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.kit import device
from benchmarks.kit.device import COMPUTE, Played
from benchmarks.kit.device_check import check
from benchmarks.kit.llama import SHAPES, Shape, Variant, build, make_step
from benchmarks.kit.report import Figure, Measured, make_parser, run
from fsdp2._tools.pages.content import COMPUTE as COMPUTE_LANE
from fsdp2._tools.pages.content import GATHER as GATHER_LANE
from fsdp2._tools.pages.content import REDUCE as REDUCE_LANE
from fsdp2._tools.pages.content import Page, Span, TimeLine
from fsdp2._tools.pages.page import write_page
from fsdp2._tools.plan.costs import Costs, sustained
from fsdp2._tools.plan.device_clock import Ran
from fsdp2._tools.plan.hardware import HARDWARE

BF16 = torch.bfloat16
MACHINE = HARDWARE["h100-nvlink-ib"]
DEPTHS = (4, 8)
JOINED_S = 5e-6  # kernels so near to each other are drawn as one
WARMUP = 8
"""Steps before one is steady: after three the parts of a root are known, and then ranks learn anew
in which order they send."""
VARIANTS = ("plain", "ddp", "torch", "torch tuned", "fsdp2", "fsdp2 split")


@dataclass(frozen=True)
class Case:
    """One row of the table for each library. ``mesh``: replicas and ranks that shard."""

    shape: Shape
    mesh: tuple[int, ...]
    tokens: int
    variant: Variant = field(default_factory=Variant)
    what: str = ""

    @property
    def name(self) -> str:
        ranks = " x ".join(map(str, self.mesh))
        more = f", {self.what}" if self.what else ""
        return f"{self.shape.name}, {ranks} ranks, {self.tokens // 1024}k{more}"


def all_cases() -> Iterator[Case]:
    for shape in SHAPES.values():
        for ranks in (8, 64, 512):
            for tokens in (1024, 4096, 16384):
                yield Case(shape, (ranks,), tokens)
    for shape in SHAPES.values():
        yield Case(shape, (64,), 4096, Variant(reduce=BF16), "bf16 reduced")
        for replicas in (8, 64):
            yield Case(shape, (replicas, 8), 4096, what="nodes replicate")
    small = SHAPES["8B"]
    for preset in ("low", "fast"):
        yield Case(small, (64,), 4096, Variant(preset=preset), preset)
    yield Case(small, (8,), 4096, Variant(offload=True), "offload")
    yield Case(small, (8,), 4096, Variant(fused_loss=True), "fused loss")
    yield Case(small, (8,), 4096, Variant(experts=True), "experts")
    again = Variant(checkpoint=True)
    yield Case(small, (8,), 4096, again, "checkpoint")
    yield Case(small, (8,), 4096, replace(again, away=1), "checkpoint, on the host")
    yield Case(small, (8,), 4096, Variant(away=4), "a fourth on the host")
    yield Case(small, (8,), 4096, Variant(away=1), "all on the host")
    for where in ("device", "host", "9000000000"):
        name = f"host, {int(where) // 10**9} GB at a time" if where.isdigit() else where
        stepped = replace(again, optimizer=where)
        yield Case(small, (8,), 16384, stepped, f"checkpoint, AdamW on the {name}")


@dataclass(frozen=True)
class Numbers:
    """Of one step, or of a line through two."""

    step: float
    busy: float
    forward: float
    backward: float
    launches: float
    waits: float
    host: float
    peak: float
    whole: float  # the peak, with what is there when the step starts

    def along(self, deeper: Numbers, depths: tuple[int, int], blocks: int) -> Numbers:
        """Return what so many blocks take, by a line through two depths."""
        share = (blocks - depths[0]) / (depths[1] - depths[0])
        pairs = zip(vars(self).values(), vars(deeper).values(), strict=True)
        return Numbers(*(low + share * (high - low) for low, high in pairs))


def exposed(ran: Sequence[Ran]) -> tuple[float, float]:
    """Return the time in which a collective runs and no kernel of compute, by phase."""
    kernels = sorted((r.start, r.end) for r in ran if r.stream == COMPUTE and r.group < 0)
    ends = [r.end for r in ran if r.stream == COMPUTE and r.label == "forward"]
    turn = max(ends, default=0.0)
    found = [0.0, 0.0]
    reached = 0.0
    for start, end in sorted((r.start, r.end) for r in ran if r.group >= 0):
        start = max(start, reached)
        if end <= start:
            continue
        reached = end
        for begin, stop in _gaps(kernels, start, end):
            cut = min(max(turn, begin), stop)
            found[0] += cut - begin
            found[1] += stop - cut
    return found[0], found[1]


def _gaps(
    busy: Sequence[tuple[float, float]], start: float, end: float
) -> Iterator[tuple[float, float]]:
    """Yield the parts of an interval in which nothing of ``busy``, sorted, goes on."""
    for begin, stop in busy:
        if stop <= start:
            continue
        if begin >= end:
            break
        if begin > start:
            yield start, begin
        start = max(start, stop)
    if start < end:
        yield start, end


def numbers_of(played: Played, peak: int, whole: int) -> Numbers:
    forward, backward = exposed(played.ran)
    busy = sum(r.end - r.start for r in played.ran if r.stream == COMPUTE and r.group < 0)
    return Numbers(
        played.seconds,
        busy,
        forward,
        backward,
        played.launches,
        len(played.waits),
        played.host,
        peak,
        whole,
    )


def play_case(
    case: Case, library: str, depth: int, mesh: DeviceMesh, costs: Costs
) -> tuple[Played, int, int]:
    """Play a steady step; return it, and the most bytes above its start, and in all."""
    loaded = device.simulator()
    gc.collect()
    kept = loaded.counts()[2]  # of other cases
    model = build(library, case.shape, depth, mesh, case.variant)
    optimizer = case.variant.optimizer if library != "plain" else ""
    step = make_step(model, case.shape, case.tokens, torch.device("sim"), loaded.label, optimizer)
    steps, peak = device.steady(model, step, WARMUP)
    whole = loaded.counts()[3] - kept
    strides = {}
    if len(case.mesh) == 2:
        strides[device.group_number(mesh.get_group("replicate"))] = case.mesh[1]
    played = device.play(steps, costs, strides)
    if optimizer:  # what a step leaves to the next one is beside that

        def twice() -> None:
            step()
            step()

        both = device.play(device.trace(twice), costs, strides)
        played = replace(played, seconds=both.seconds - played.seconds)
    return played, peak, whole


def write_time_lines(case: Case, played: dict[str, Played], folder: Path) -> None:
    """Draw what ran when in steps of a few blocks: a page that a browser shows."""
    lines = tuple(
        TimeLine(name, (COMPUTE_LANE, GATHER_LANE, REDUCE_LANE), tuple(_spans_of(one)))
        for name, one in played.items()
    )
    page = Page(
        title=case.name,
        subtitle=f"steps of {DEPTHS[0]} blocks on a simulated device, a model of {MACHINE.name}",
        time_lines=lines,
        notes=("No kernel ran: times are those of a table of costs.",),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / f"{re.sub('[^0-9a-z]+', '-', case.name.lower())}.html", page)


def _spans_of(played: Played) -> Iterator[Span]:
    """Join kernels of compute that follow each other, and leave tiny ones of other streams out."""
    kernels = sorted((r for r in played.ran if r.stream == COMPUTE), key=lambda r: r.start)
    begin, end, label, count = 0.0, 0.0, "", 0
    for one in [*kernels, None]:
        if one is not None and one.label == label and one.start - end < JOINED_S:
            end, count = one.end, count + 1
            continue
        if count:
            yield Span(COMPUTE_LANE, f"{label}, {count} kernels", begin, end)
        if one is not None:
            begin, end, label, count = one.start, one.end, one.label, 1
    for ran in played.ran:
        if ran.group >= 0:
            lane = GATHER_LANE if "gather" in ran.name else REDUCE_LANE
            yield Span(lane, f"{ran.label}, {ran.name}", ran.start, ran.end, ran.nbytes)


def least_communication(case: Case, costs: Costs) -> float:
    """Return the time of what every step has to send, over the link that is busy for longest."""
    shape, reduce = case.shape, case.variant.reduce.itemsize
    blocks = shape.blocks * _block_numel(case)
    ranks = case.mesh[-1]
    gathered = BF16.itemsize * (2 * blocks + shape.root_numel)
    reduced = reduce * (blocks + shape.root_numel)
    sharing = costs.collective("all_gather", gathered + reduced, ranks, 1)
    if len(case.mesh) == 1:
        return sharing
    part = reduced // ranks
    return max(sharing, costs.collective("all_reduce", part, case.mesh[0], ranks))


def _block_numel(case: Case) -> int:
    if not case.variant.experts:
        return case.shape.block_numel
    with torch.device("meta"):
        from benchmarks.kit.llama import Block

        return sum(p.numel() for p in Block(case.shape, experts=True).parameters())


def measure_case(
    case: Case, libraries: Sequence[str], costs: Costs, pages: Path | None
) -> list[Figure]:
    found: dict[str, Numbers] = {}
    shallow: dict[str, Played] = {}
    with device.ranks(case.mesh) as mesh:
        for library in libraries:
            both = [play_case(case, library, depth, mesh, costs) for depth in DEPTHS]
            shallow[library] = both[0][0]
            low, high = (numbers_of(*one) for one in both)
            found[library] = low.along(high, DEPTHS, case.shape.blocks)
    if pages is not None:
        write_time_lines(case, shallow, pages)
    least = max(found["plain"].busy, least_communication(case, costs))
    tuned = found.get("torch tuned")
    figures = []
    for library, numbers in found.items():
        if library == "plain":
            continue
        row: dict[str, tuple[float, bool]] = {
            "step ms": (numbers.step * 1e3, False),
            "step / least": (numbers.step / least, True),
            "exposed forward ms": (numbers.forward * 1e3, False),
            "exposed backward ms": (numbers.backward * 1e3, False),
            "launches": (numbers.launches, True),
            "waits": (numbers.waits, True),
            "host ms": (numbers.host * 1e3, False),
            "peak GB": (numbers.peak / 1e9, True),
        }
        if case.variant.optimizer:
            row["whole peak GB"] = (numbers.whole / 1e9, True)
        if tuned is not None:
            row["step / tuned"] = (numbers.step / tuned.step, False)
        is_ours = library.startswith("fsdp2")
        figures += [
            Figure(case.name, library, quantity, value, is_gated and is_ours)
            for quantity, (value, is_gated) in row.items()
        ]
    return figures


def _variants_of(case: Case, libraries: Sequence[str]) -> list[str]:
    """Return the variants of chosen libraries that a case has: DDP replicates, and keeps all."""
    plain = Case(case.shape, case.mesh, case.tokens) == case and len(case.mesh) == 1
    return [
        name
        for name in VARIANTS
        if name.removesuffix(" split") in libraries
        and (name != "ddp" or plain)
        and (
            not (case.variant.away or case.variant.optimizer)
            or name in ("plain", "fsdp2", "fsdp2 split")
        )
    ]


def measure(arguments: argparse.Namespace) -> Measured:
    if arguments.check:
        return check()
    costs = Costs(sustained(MACHINE), straggler=arguments.straggler_us * 1e-6)
    figures: list[Figure] = []
    for case in all_cases():
        if not arguments.cases or any(part in case.name for part in arguments.cases):
            libraries = _variants_of(case, arguments.libraries)
            figures += measure_case(case, libraries, costs, arguments.pages)
    settings = {
        "machine": MACHINE.name,
        "depths": list(DEPTHS),
        "straggler us": arguments.straggler_us,
    }
    return Measured(figures, settings, ["on a simulated device: no kernel ran, time is a model's"])


if __name__ == "__main__":
    parser = make_parser("device", __doc__)
    parser.add_argument("--cases", nargs="*", help="parts of the names of cases; all, if not given")
    parser.add_argument("--pages", type=Path, help="a folder for pages with timelines")
    parser.add_argument("--check", action="store_true", help="check the clock instead")
    parser.add_argument("--straggler-us", type=float, default=0.0, help="how late other ranks are")
    run("device", __doc__, measure, parser)
