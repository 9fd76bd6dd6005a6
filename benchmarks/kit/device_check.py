"""Is the clock right? It is compared with others, and delays are planted in what it plays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import fsdp2
from benchmarks.kit import device as _device
from benchmarks.kit import noop
from benchmarks.kit.device import COLLECTIVE, COMPUTE, KERNEL, LABEL, Played, play
from benchmarks.kit.limits import sharded_bytes_sent
from benchmarks.kit.link import Link, LinkGroup, VirtualClock
from benchmarks.kit.llama import SEQUENCE, SHAPES, Block, Decoder, Variant
from benchmarks.kit.llama import build as build_llama
from benchmarks.kit.llama import make_step as make_llama_step
from benchmarks.kit.models import MEDIUM, OURS, build, make_input, make_step, prepare_step
from benchmarks.kit.report import Figure, Measured
from fsdp2._tools.plan import step as _plan_step
from fsdp2._tools.plan.costs import Costs, sustained
from fsdp2._tools.plan.hardware import HARDWARE

MACHINE = HARDWARE["h100-nvlink-ib"]
MOST_OFF = {"off": 0.01, "step off": 0.02, "peak off": 0.02}
DEPTH = 4
RATIOS, RANKS, WARMUP = (0.45, 1.2, 2.8), 8, 8
SIZE = dataclasses.replace(MEDIUM, depth=12)
PLANNED = {
    "8B, 8 ranks, 4k": ("8B", (8,), 4096, Variant()),
    "8B, 64 ranks, 4k, bf16 reduced, fast": (
        *("8B", (64,), 4096),
        Variant(reduce=torch.bfloat16, preset="fast"),
    ),
    "8B, 64 ranks, 4k, low": ("8B", (64,), 4096, Variant(preset="low")),
    "8B, 8 x 8 ranks, 16k, fused loss": ("8B", (8, 8), 16384, Variant(fused_loss=True)),
    "8B, 8 ranks, 4k, experts": ("8B", (8,), 4096, Variant(experts=True)),
    "70B, 512 ranks, 4k": ("70B", (512,), 4096, Variant()),
}
"""Shape, mesh, tokens and variant of each step that a plan predicts."""
MS = 1e-3
CLOSE = 1e-9  # seconds


class LinkCosts(Costs):
    """The costs of `bench link`: products take operations, and bytes their time on one link."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__(MACHINE)
        object.__setattr__(self, "bandwidth", bandwidth)

    def kernel(self, nbytes: float, operations: float = 0.0, dtype: Any = None) -> float:
        return operations

    def copy(self, nbytes: float) -> float:
        return 0.0

    def collective(  # type: ignore[override]  # of a link, no more counts
        self, kind: str, nbytes: int, ranks: int, *others: Any
    ) -> float:
        return nbytes * (ranks - 1) / ranks / self.bandwidth  # type: ignore[attr-defined]


def compare_with_link() -> list[Figure]:
    """Play the same program on both clocks, with embedding and head as units.

    Without these units the programs differ: on a host the parts of a root are reduced early. So do
    torch's: without streams nothing of its own overlaps.
    """
    libraries = ("plain", OURS)
    least = sharded_bytes_sent(SIZE, RANKS, split_root=True)
    times: dict[tuple[str, float], float] = {}
    clock = VirtualClock()
    link = Link(clock)
    with noop.ranks(RANKS, partial(LinkGroup, link=link)) as (_, mesh), clock:
        steps = {name: prepare_step(name, SIZE, mesh, split_root=True) for name in libraries}
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        compute = _time(steps["plain"], link)
        for ratio in RATIOS:
            link.bandwidth = least / (ratio * compute)
            for name, step in steps.items():
                times[name, ratio] = _time(step, link)
    figures = []
    with _device.ranks((RANKS,)) as mesh:
        for name in libraries:
            model = build(name, SIZE, mesh, bf16=False, split_root=True)
            step = make_step(model, make_input(name, SIZE, bf16=False, device="sim"))
            for _ in range(WARMUP):
                step()
            steps_traced = _device.trace(step)
            for ratio in RATIOS:
                costs = LinkCosts(least / (ratio * compute))
                took = play(steps_traced, costs, {}, host=False).seconds
                case = f"link, communication/compute {ratio}"
                figures.append(Figure(case, name, "off", took / times[name, ratio] - 1))
    return figures


def _time(step: Callable[[], None], link: Link) -> float:
    link.wait_until_idle()
    start = link.clock.now()
    step()
    link.wait_until_idle()
    return link.clock.now() - start


@dataclasses.dataclass(frozen=True)
class Planted:
    """A delay at a place of the trace, and by how much the step has to be longer, in seconds."""

    what: str
    place: int
    seconds: float
    expected: float

    def delay(self, place: int) -> float:
        return self.seconds if place == self.place else 0.0


def plant(steps: list[tuple[Any, ...]], base: Played) -> list[Planted]:
    """Choose nine places, by a reading of the schedule that they are planted in."""
    label = ""
    labels = []
    for step in steps:
        label = step[1] if step[0] == LABEL else label
        labels.append(label)

    def places(kind: int, phase: str, *names: str) -> list[int]:
        return [
            place
            for place, step in enumerate(steps)
            if step[0] == kind
            and labels[place] == phase
            and (not names or step[1] in names)
            and (kind != KERNEL or step[2] == COMPUTE)
        ]

    products = {phase: places(KERNEL, phase, "aten::mm") for phase in ("forward", "backward")}
    gathers = places(COLLECTIVE, "forward")
    scatters = places(COLLECTIVE, "backward", "reduce_scatter")
    hidden, exposed = gathers[-1], gathers[0]
    slack = _slack(base, hidden)
    early = scatters[0]
    (turn,) = (place for place, step in enumerate(steps) if step[:2] == (LABEL, "backward"))
    return [
        Planted("first product", products["forward"][0], MS, MS),
        Planted("product in forward", products["forward"][9], MS, MS),
        Planted("product in backward", products["backward"][20], MS, MS),
        Planted("last kernel of backward", places(KERNEL, "backward")[-1], MS, MS),
        Planted("first gather", exposed, MS, MS),
        Planted("gather that is hidden, a little", hidden, slack / 2, 0.0),
        Planted("gather that is hidden, by more", hidden, slack + MS, MS),
        Planted("reduction that is hidden", early, MS / 4, 0.0),
        Planted("last reduction", max(scatters, key=lambda p: base.at(p).end), MS, MS),
        Planted("host, when backward begins", turn, base.seconds, _late_host(base, turn, labels)),
    ]


def _slack(base: Played, place: int) -> float:
    """Return how much longer a gather may take until the kernel that unpacks it waits."""
    end = base.at(place).end
    return min(r.start for r in base.ran if r.start >= end and "split" in r.name) - end


def _late_host(base: Played, turn: int, labels: list[str]) -> float:
    """Return by how much a step is longer whose backward is issued a whole step late."""
    first = min(base.at(p).start for p in base.numbers if labels[p] == "backward")
    return base.seconds - first


def play_delays() -> list[Figure]:
    """Plant delays; return by how much each step differs from what was expected, in seconds."""
    costs = Costs(sustained(MACHINE))
    shape, tokens = SHAPES["8B"], 4096
    figures = []
    with _device.ranks((RANKS,)) as mesh:
        model = build_llama(OURS, shape, 4, mesh, Variant())
        say = _device.simulator().label
        step = make_llama_step(model, shape, tokens, torch.device("sim"), say)
        for _ in range(WARMUP):
            step()
        steps = _device.trace(step)
    base = play(steps, costs, {}, host=False)
    for planted in plant(steps, base):
        found = play(steps, costs, {}, host=False, delays=planted.delay)
        more = found.seconds - base.seconds
        figures.append(Figure("planted", planted.what, "off ms", (more - planted.expected) / MS))
        if planted.place in base.numbers:
            before, after = base.at(planted.place), found.at(planted.place)
            longer = (after.end - after.start) - (before.end - before.start)
            figures.append(
                Figure("planted", planted.what, "seen ms off", (longer - planted.seconds) / MS)
            )
            moved = [
                one.name
                for one, other in zip(_by_number(base), _by_number(found), strict=True)
                if one.start < before.start and abs(one.start - other.start) > CLOSE
            ]
            figures.append(Figure("planted", planted.what, "moved before it", len(moved)))
    straggling = play(steps, Costs(costs.machine, straggler=MS), {}, host=False)
    late = min(r.start for r in straggling.ran if r.group >= 0)
    first = min(r.start for r in base.ran if r.group >= 0)
    figures.append(Figure("planted", "other ranks", "seen ms off", (late - first - MS) / MS))
    return figures


def _by_number(played: Played) -> list[Any]:
    return sorted(played.ran, key=lambda ran: ran.number)


def compare_with_plans() -> list[Figure]:
    """Let `fsdp2.plan` predict steps that the clock plays: on fake tensors, without the device."""
    machine = sustained(MACHINE)
    figures = []
    for title, (name, mesh, tokens, variant) in PLANNED.items():
        shape = SHAPES[name]
        loaded = _device.simulator()
        with _device.ranks(mesh) as ranks:
            model = build_llama(OURS, shape, DEPTH, ranks, variant)
            step = make_llama_step(model, shape, tokens, torch.device("sim"), loaded.label)
            steps, peak = _device.steady(model, step, WARMUP)
            strides = {}
            if len(mesh) == 2:
                strides[_device.group_number(ranks.get_group("replicate"))] = mesh[1]
        took = play(steps, Costs(machine), strides).seconds
        with torch.device("meta"):
            planned_model = Decoder(
                shape, DEPTH, experts=variant.experts, fused_loss=variant.fused_loss
            )
        length = min(tokens, SEQUENCE)
        # the simulated device has no kernels of its own: it norms as a host does
        with mock.patch.object(_plan_step, "kernels_of_a_device", contextlib.nullcontext):
            plan = fsdp2.plan(
                planned_model,
                mesh=mesh,
                rank=0,
                batch=torch.zeros(tokens // length, length, dtype=torch.int64),
                loss=lambda loss: loss,
                policy={Block},
                mp_policy=fsdp2.MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=variant.reduce
                ),
                memory=variant.preset,
                hardware=machine,
            )
        planned = plan.step
        assert planned is not None
        assert planned.seconds is not None
        # what was measured began before gradients were given back
        start = planned.start_nbytes + sum(group.grad_nbytes for group in plan.groups)
        found = planned.peak_nbytes - start
        figures += [
            Figure("plan", title, "step off", planned.seconds / took - 1),
            Figure("plan", title, "peak off", found / peak - 1),
        ]
    return figures


def check() -> Measured:
    """Check the clock; fails if it is off."""
    _device.simulator()
    figures = [*compare_with_link(), *play_delays(), *compare_with_plans()]
    failed = any(abs(f.value) > MOST_OFF.get(f.quantity, 1e-6) for f in figures)
    return Measured(figures, {"ranks": RANKS}, failed=failed, suffix="-check")
