"""What `fsdp2.plan` says of a step, beside what ranks and a link do.

    python -m benchmarks.device.plan                 all cases
    python -m benchmarks.device.plan --models moe    some models

*Memory*: the most bytes above the start of a step by the allocator's own events, on gloo ranks; the
least of three steps, because a thread of the backend may hold on to a tensor for a moment.
*Events*: how many differ in kind, unit, phase, bytes or place. *Time*: a step of the engine on a
virtual clock and one serial link of 8 ranks (see `link`), whose bytes take 0.45 to 2.8 times as
long as compute, beside the plan for a machine of these rates.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import fsdp2
from benchmarks.kit import noop
from benchmarks.kit.link import Link, LinkGroup, VirtualClock
from benchmarks.kit.plan_models import CASES, Case
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.step.link import time_step
from benchmarks.step.peak import DONE, FORWARD_DONE, STARTED, read
from fsdp2._core.base import events, torch_flops, torch_modes

WARM_UP, MEASURED = 2, 3
LINK_WARM_UP = 4
"""On a link ranks are out of step at first: what they learn of each other takes a step longer."""
LINK_RANKS = 8
BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOAD = fsdp2.CPUOffloadPolicy()
SETTINGS: dict[str, dict[str, Any]] = {
    **{
        f"{name}, {memory}": {"memory": memory, **policy}
        for name, policy in (("fp32", {}), ("bf16", {"mp_policy": BF16}))
        for memory in ("low", "balanced", "fast")
    },
    "offload": {"offload_policy": OFFLOAD},
}
MESHES = ((2,), (4,), (2, 2))


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    for model in arguments.models:
        for shape in MESHES:
            ranks = torch.Size(shape).numel()
            found = run_on_ranks(_compare_all, ranks, model, shape)[0]
            for setting, (planned, measured, differ) in found.items():
                case = f"{model}, {' x '.join(map(str, shape))} ranks"
                figures += [
                    Figure(case, setting, "planned peak, MB", planned / 1e6),
                    Figure(case, setting, "measured peak, MB", measured / 1e6),
                    Figure(case, setting, "off, %", 100 * (planned / measured - 1)),
                    Figure(case, setting, "events that differ", differ),
                ]
        figures += _compare_times(model)
    return Measured(figures, {"models": arguments.models})


def _compare_all(rank: int, ranks: int, model: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return planned and measured peak, and how many events differ, by setting."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return {
        setting: _compare(CASES[model], mesh, shape, rank, given)
        for setting, given in SETTINGS.items()
    }


def _compare(
    case: Case, mesh: Any, shape: tuple[int, ...], rank: int, given: dict[str, Any]
) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model, batch = case.build(), case.make_batch()
    plan = fsdp2.plan(model, mesh=shape, policy=case.units, batch=batch, rank=rank, **given)
    kwargs = dict(given)
    memory = kwargs.pop("memory", None)
    fsdp2.wrap.shard_model(model, case.units, mesh=mesh, **kwargs)
    if memory is not None:
        model.set_memory(memory)
    seen, peak = measure_step(model, batch, lambda loss: loss)
    assert plan.step is not None
    planned = plan.step.events
    differ = sum(one != other for one, other in zip(planned, seen, strict=False))
    return (
        plan.step.peak_nbytes - plan.step.start_nbytes,
        peak,
        differ + abs(len(planned) - len(seen)),
    )


def measure_step(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_of: Callable[[Any], torch.Tensor],
    micro_batches: int = 1,
) -> tuple[list[events.Event], int]:
    """Run steps; return the last one's events, and the least peak above a step's start.

    All micro-batches of a step but the last run without gradient sync.
    """
    seen: list[events.Event] = []
    peaks = []
    for number in range(WARM_UP + MEASURED):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model.zero_grad()
            gc.collect()
            seen.clear()
            with record_function(STARTED):
                pass
            for left in reversed(range(micro_batches)):
                if micro_batches > 1:
                    model.set_requires_gradient_sync(left == 0)  # type: ignore[operator]
                with events.listen(seen.append):
                    loss = loss_of(model(*batch))
                    with record_function(FORWARD_DONE):
                        pass
                    loss.backward()
                del loss
            with record_function(DONE):
                pass
        if number >= WARM_UP:
            peaks.append(read(profiler).highest)
    return seen, min(peaks)


class ProductClock(VirtualClock):
    """Time in operations of all products that torch counts; what they read takes none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        count = torch_flops.FLOPS.get(func.overloadpacket)
        if count is not None:
            self.advance(count(*args, **(kwargs or {}), out_val=made))
        return made


def _compare_times(name: str) -> list[Figure]:
    """Return planned and measured time of a step on one link, in operations."""
    case = CASES[name]
    figures = []
    for setting in ("fp32, low", "fp32, balanced", "fp32, fast", "bf16, balanced"):
        given = SETTINGS[setting]
        for ratio in (0.45, 1.2, 2.8):
            clock = ProductClock()
            link = Link(clock)
            with noop.ranks(LINK_RANKS, partial(LinkGroup, link=link)) as (_, mesh), clock:
                measured, planned = _time(case, mesh, link, given, ratio)
            row = f"{name}, link, communication/compute {ratio}"
            figures += [
                Figure(row, setting, "planned step, Mflop", planned / 1e6),
                Figure(row, setting, "measured step, Mflop", measured / 1e6),
                Figure(row, setting, "off, %", 100 * (planned / measured - 1)),
            ]
    return figures


def _time(
    case: Case, mesh: Any, link: Link, given: dict[str, Any], ratio: float
) -> tuple[float, float]:
    torch.manual_seed(0)
    model, batch = case.build(), case.make_batch()
    plain = case.build()

    def step(one: nn.Module) -> None:
        one.zero_grad()
        one(*batch).backward()

    kwargs = dict(given)
    memory = kwargs.pop("memory")
    fsdp2.wrap.shard_model(plain, case.units, mesh=mesh, **kwargs)
    plain.set_memory(memory)
    for _ in range(LINK_WARM_UP):
        step(plain)
    sent, compute = link.nbytes, time_step(partial(step, plain), link)
    link.bandwidth = (link.nbytes - sent) / (ratio * compute)
    measured = time_step(partial(step, plain), link)
    machine = fsdp2.plans.Hardware(
        "one link",
        {torch.float32: 1.0},
        memory_bandwidth=float("inf"),
        near=link.bandwidth,
        far=link.bandwidth,
        device_type="cpu",
    )
    with torch_modes.hidden_from_modes():
        plan = fsdp2.plan(
            model, mesh=LINK_RANKS, policy=case.units, batch=batch, hardware=machine, **given
        )
    assert plan.step is not None
    assert plan.step.seconds is not None
    return measured, plan.step.seconds


if __name__ == "__main__":
    parser = make_parser("plan", __doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(CASES))
    run("plan", __doc__, measure, parser)
