"""Every program with every setting: what two things do together that neither does alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.kit.models import WIDTH, Block, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import Training, sets, train, training
from tests.sim.scenarios.comms import all_units, halve
from tests.sim.scenarios.failures import in_backward, in_forward
from tests.sim.scenarios.recomputation import Recomputed
from tests.sim.scenarios.streams import on_a_side_stream

WAITS = "combinations are about order; what may wait is said where each is alone"


def hooked(world: World) -> dict[str, Any]:
    given = {"stream": world.stream(own=True)} if world.is_simulated else {}

    def set_up(model: Any) -> None:
        for unit in all_units(model):
            unit.set_all_reduce_hook(halve, **given)

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return {"set_up": set_up, "mp_policy": policy}


SETTINGS: dict[str, tuple[int, Any]] = {
    "little_memory": (2, {"set_up": sets(memory="low")}),
    "much_memory": (2, {"set_up": sets(memory="fast")}),
    "no_copies": (2, {"set_up": sets(copy_free_min_bytes=1)}),
    "kept_storage": (2, {"set_up": sets(keep_unsharded_storage=True)}),
    "kept_whole": (2, {"reshard_after_forward": False}),
    "offload": (2, {"offload_policy": CPUOffloadPolicy()}),
    "fp64_sums": (2, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "hook_in_a_stream": (2, hooked),
    "replicas": (4, {"mesh": (2, 2)}),
    "smaller_mesh": (4, {"reshard_after_forward": 2}),
    "one_rank": (1, {}),
}
"""The ranks, and the arguments of `training`, or what makes them of a world."""


def steps_of(step_of: Callable[[Training, int], Any]) -> Callable[..., Values]:
    """Make a program of steps of two microbatches."""

    def program(world: World, **kwargs: Any) -> Values:
        run = training(world, microbatches=2, **kwargs)
        for step in run.steps():
            step_of(run, step)
        return run.values()

    return program


def warmed_up_elsewhere(world: World, **kwargs: Any) -> Values:
    run = training(world, microbatches=2, **kwargs)
    side = world.stream()
    for step in run.steps():
        if step < 2:
            with world.beside(side):
                run.learn(step)
        run.accumulate(step, "set_requires_gradient_sync")
    return run.values()


class Branches(nn.Module):
    """Two blocks beside each other, one of them in a stream of the user's."""

    side: Any = None
    world: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.side.wait_stream(self.world.current_stream)
        with self.side:
            left = self.blocks[0](x)
        right = self.blocks[1](x)
        self.world.current_stream.wait_stream(self.side)
        return self.blocks[2](left + right)


def branches(world: World, **kwargs: Any) -> Values:
    run = training(world, Branches, microbatches=2, **kwargs)
    run.model.world, run.model.side = world, world.stream()
    for step in run.steps():
        run.learn(2 * step)
        run.train(2 * step + 1)
    return run.values()


def retained(run: Training, step: int) -> None:
    loss = loss_of(run.model(run.inputs[step]))
    loss.backward(retain_graph=True)
    with torch.no_grad():
        run.model(run.inputs[step])
    loss.backward()
    run.update()


def interleaved(run: Training, step: int) -> None:
    first, second = (loss_of(run.model(run.inputs[2 * step + index])) for index in range(2))
    first.backward()
    second.backward()
    run.update()


def early(run: Training, step: int) -> None:
    for block in run.model.blocks:
        block.unshard(async_op=True)
    run.model.blocks[0].reshard()
    run.train(step)


def failing_steps(run: Training, step: int) -> None:
    (in_forward if step % 2 else in_backward)(run.model, run.inputs[step])
    run.model.zero_grad()
    run.train(step)


def dropped(run: Training, step: int) -> None:
    """A gradient is read and cleared, and the same forward goes on."""
    run.learn(2 * step)
    run.optim.zero_grad()
    run.train(2 * step + 1)


PROGRAMS: dict[str, Callable[..., Values]] = {
    "side_stream": on_a_side_stream,
    "warm_up": warmed_up_elsewhere,
    "branches": branches,
    "accumulated": steps_of(lambda run, step: run.accumulate(step, "set_requires_gradient_sync")),
    "partial_sums": steps_of(lambda run, step: run.accumulate(step, "set_requires_all_reduce")),
    "retained": steps_of(retained),
    "interleaved": steps_of(interleaved),
    "early": steps_of(early),
    "failing": steps_of(failing_steps),
    "dropped": steps_of(dropped),
    "recomputed": functools.partial(train, make=lambda: Recomputed(False)),
    "recomputed_reentrant": functools.partial(train, make=lambda: Recomputed(True)),
}


def combine(name: str, program: Callable[..., Values], ranks: int, settings: Any) -> None:
    @functools.wraps(program)
    def combined(world: World) -> Values:
        return program(world, **(settings(world) if callable(settings) else settings))

    combined.__name__ = name
    scenario(ranks, slow=True, may_wait=WAITS, tolerance=5e-6)(combined)


for _setting, (_ranks, _settings) in SETTINGS.items():
    for _name, _program in PROGRAMS.items():
        combine(f"{_name}_with_{_setting}", _program, _ranks, _settings)
