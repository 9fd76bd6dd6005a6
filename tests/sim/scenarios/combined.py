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
from tests.sim.scenarios._training import Training, learn, training
from tests.sim.scenarios.comms import all_units, halve
from tests.sim.scenarios.failures import in_backward, in_forward
from tests.sim.scenarios.recomputation import Recomputed

WAITS = "combinations are about order; what may wait is said where each is alone"

Settings = Callable[[World], dict[str, Any]]


def on_model(name: str, *args: Any) -> Settings:
    return lambda world: {"set_up": lambda model: getattr(model, name)(*args)}


def hooked(world: World) -> dict[str, Any]:
    given = {"stream": world.stream(own=True)} if world.is_simulated else {}

    def set_up(model: Any) -> None:
        for unit in all_units(model):
            unit.set_all_reduce_hook(halve, **given)

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return {"set_up": set_up, "mp_policy": policy}


SETTINGS: dict[str, tuple[int, Settings]] = {
    "little_memory": (2, on_model("set_memory", "low")),
    "much_memory": (2, on_model("set_memory", "fast")),
    "no_copies": (2, on_model("set_copy_free_min_bytes", 1)),
    "kept_storage": (2, on_model("set_keep_unsharded_storage", True)),
    "kept_whole": (2, lambda world: {"reshard_after_forward": False}),
    "offload": (2, lambda world: {"offload_policy": CPUOffloadPolicy()}),
    "fp64_sums": (2, lambda world: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "hook_in_a_stream": (2, hooked),
    "replicas": (4, lambda world: {"mesh": world.mesh(2, 2)}),
    "smaller_mesh": (4, lambda world: {"reshard_after_forward": 2}),
    "one_rank": (1, lambda world: {}),
}


def each_step(step_of: Callable[[Training, int], Any]) -> Callable[..., Values]:
    """Make a program of what happens in a step."""

    def program(world: World, **kwargs: Any) -> Values:
        run = training(world, microbatches=2, **kwargs)
        for step in run.steps():
            step_of(run, step)
            run.update()
        return run.values()

    return program


def on_a_side_stream(world: World, **kwargs: Any) -> Values:
    run = training(world, **kwargs)
    side = world.stream(own=True)
    for step in run.steps():
        side.wait_stream(world.current_stream)
        with side:
            learn(run.model, run.inputs[step])
        world.current_stream.wait_stream(side)
        run.update()
    return run.values()


def warmed_up_elsewhere(world: World, **kwargs: Any) -> Values:
    run = training(world, microbatches=2, **kwargs)
    side = world.stream()
    for step in run.steps():
        if step < 2:
            side.wait_stream(world.current_stream)
            with side:
                learn(run.model, run.inputs[step])
            world.current_stream.wait_stream(side)
        for index in range(2):
            run.model.set_requires_gradient_sync(index == 1)
            learn(run.model, run.inputs[2 * step + index])
        run.update()
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
        learn(run.model, run.inputs[2 * step])
        learn(run.model, run.inputs[2 * step + 1])
        run.update()
    return run.values()


def accumulated_steps(run: Training, step: int) -> None:
    for index in range(2):
        run.model.set_requires_gradient_sync(index == 1)
        learn(run.model, run.inputs[2 * step + index])


def partial_sums(run: Training, step: int) -> None:
    for index in range(2):
        run.model.set_requires_all_reduce(index == 1)
        learn(run.model, run.inputs[2 * step + index])


def retained(run: Training, step: int) -> None:
    loss = loss_of(run.model(run.inputs[step]))
    loss.backward(retain_graph=True)
    with torch.no_grad():
        run.model(run.inputs[step])
    loss.backward()


def interleaved(run: Training, step: int) -> None:
    first, second = (loss_of(run.model(run.inputs[2 * step + index])) for index in range(2))
    first.backward()
    second.backward()


def early(run: Training, step: int) -> None:
    for block in run.model.blocks:
        block.unshard(async_op=True)
    run.model.blocks[0].reshard()
    learn(run.model, run.inputs[step])


def failing_steps(run: Training, step: int) -> None:
    (in_forward if step % 2 else in_backward)(run.model, run.inputs[step])
    run.model.zero_grad()
    learn(run.model, run.inputs[step])


def dropped(run: Training, step: int) -> None:
    """A gradient is read and cleared, and the same forward goes on."""
    learn(run.model, run.inputs[2 * step])
    run.optim.zero_grad()
    learn(run.model, run.inputs[2 * step + 1])


def recomputing(use_reentrant: bool) -> Callable[..., Values]:
    def program(world: World, **kwargs: Any) -> Values:
        run = training(world, lambda: Recomputed(use_reentrant), **kwargs)
        for step in run.steps():
            learn(run.model, run.inputs[step])
            run.update()
        return run.values()

    return program


PROGRAMS: dict[str, Callable[..., Values]] = {
    "side_stream": on_a_side_stream,
    "warm_up": warmed_up_elsewhere,
    "branches": branches,
    "accumulated": each_step(accumulated_steps),
    "partial_sums": each_step(partial_sums),
    "retained": each_step(retained),
    "interleaved": each_step(interleaved),
    "early": each_step(early),
    "failing": each_step(failing_steps),
    "dropped": each_step(dropped),
    "recomputed": recomputing(False),
    "recomputed_reentrant": recomputing(True),
}


def combine(name: str, program: Callable[..., Values], ranks: int, settings: Settings) -> None:
    @functools.wraps(program)
    def combined(world: World) -> Values:
        return program(world, **settings(world))

    combined.__name__ = name
    scenario(ranks, slow=True, may_wait=WAITS, tolerance=5e-6)(combined)


for _setting, (_ranks, _settings) in SETTINGS.items():
    for _name, _program in PROGRAMS.items():
        combine(f"{_name}_with_{_setting}", _program, _ranks, _settings)
