"""A captured step beside an eager one, on the clock of the simulated device: host and step.

    scripts/bench graph

What an eager step gives the device is played twice: behind a host that takes the time that
`fsdp2/_tools/plan/costs.py` says, and behind one that takes none, as a graph does, which the host
launches at once. `host ms` of a captured step is what `fsdp2.graphed` itself does around a replay:
its checks, the copy of the batch, the look at other ranks. The step is the longer of the two. Ranks
are 8, in bf16 with fp32 reduction, without an optimizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.device.device import MACHINE
from benchmarks.kit import device, llama, models
from benchmarks.kit.report import Figure, Measured, make_parser, run
from fsdp2._tools.plan.costs import Costs, sustained

RANKS, WARMUP, TOKENS = 8, 8, 4096
SMALL = models.Size(depth=32, width=256, hidden=768, vocabulary=4096, tokens=64)
BLOCKS = 4
Loss = Callable[[nn.Module, Tensor], Tensor]


def sums(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).sum()
    return found


def is_output(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def make_small(mesh: DeviceMesh) -> tuple[Any, Tensor, Loss]:
    model = models.build("fsdp2", SMALL, mesh, bf16=True)
    return model, models.make_input("fsdp2", SMALL, bf16=True, device="sim"), sums


def make_8b(mesh: DeviceMesh, experts: bool = False) -> tuple[Any, Tensor, Loss]:
    variant = llama.Variant(experts=experts)
    model: Any = llama.build("fsdp2", llama.SHAPES["8B"], BLOCKS, mesh, variant)
    if experts:  # or the host looks in each step how many ranks used each expert
        model.set_reduce_scatter_unused_params(True)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="sim")
    return model, tokens, is_output


CASES: dict[str, Callable[[DeviceMesh], tuple[Any, Tensor, Loss]]] = {
    "32 small blocks": make_small,
    "four 8B blocks": make_8b,
    "four 8B blocks of experts": lambda mesh: make_8b(mesh, experts=True),
}


def measure_case(name: str, costs: Costs) -> list[Figure]:
    with device.ranks((RANKS,)) as mesh:
        model, batch, loss = CASES[name](mesh)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss(model, batch).backward()

        steps, _ = device.steady(model, step, WARMUP)
        eager = device.play(steps, costs, {})
        alone = device.play(steps, costs, {}, host=False)
        captured = fsdp2.graphed(model, loss=loss)
        for _ in range(WARMUP):
            captured(batch)
        assert not captured.why_eager, captured.why_eager
        replay = device.play(device.trace(lambda: captured(batch)), costs, {})
    values = {
        "eager": (eager.seconds, eager.host),
        "captured": (max(alone.seconds, replay.host), replay.host),
    }
    figures = []
    for way, (seconds, host) in values.items():
        figures.append(Figure(name, way, "step ms", seconds * 1e3, False))
        figures.append(Figure(name, way, "host ms", host * 1e3, False))
    return figures


def measure(arguments: argparse.Namespace) -> Measured:
    costs = Costs(sustained(MACHINE))
    figures = [figure for name in CASES for figure in measure_case(name, costs)]
    notes = ["on a simulated device: no kernel ran, time is a model's"]
    return Measured(figures, {"machine": MACHINE.name, "ranks": RANKS}, notes)


if __name__ == "__main__":
    run("graph", __doc__, measure, make_parser("graph", __doc__))
