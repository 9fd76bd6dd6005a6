"""Steps that are captured once and replayed: `fsdp2.graphed` beside eager steps on the host."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.checkpoint._save import Saving
from tests.kit.models import WIDTH, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import ADAMW, ROWS, STACK, Training, training
from tests.sim.scenarios.state import held_back, shared_folder

STEPS = 20
WARMUP = 3
COUNTED = 2e-4
"""Adam's bias corrections are in fp32 where steps are counted on the device, else in fp64."""
COARSE = 2e-2  # for sums in bf16


def loss(model: Any, x: Tensor) -> Tensor:
    return loss_of(model(x))


class Eager:
    """The same step on the host, which has no graphs."""

    def __init__(self, model: Any, optim: Any, max_norm: float | None) -> None:
        self.model, self.optim, self.max_norm, self.loss = model, optim, max_norm, loss

    def __call__(self, *batch: Tensor) -> Tensor:
        found = self.accumulate(*batch, is_last=True)
        if self.optim is not None:
            if self.max_norm is not None:
                fsdp2.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optim.step()
            self.optim.zero_grad()
        return found

    def accumulate(self, *batch: Tensor, is_last: bool = False) -> Tensor:
        self.model.set_requires_gradient_sync(is_last)
        found = self.loss(self.model, *batch)
        found.backward()
        return found.detach()


class Recorded:
    """A step, its losses, and why each of its steps was eager."""

    def __init__(self, world: World, run: Training, optim: Any, max_norm: float | None) -> None:
        self.world = world
        self.step: Any = Eager(run.model, optim, max_norm)
        if world.is_simulated:
            self.step = fsdp2.graphed(run.model, optim, loss=loss, max_norm=max_norm, warmup=WARMUP)
        self.losses: list[Tensor] = []
        self.reasons: list[str] = []

    def take(self, *batch: Tensor) -> None:
        self.losses.append(self.step(*batch))
        if self.world.is_simulated:
            self.reasons.append(self.step.why_eager)

    def check(self, replays: int, captures: int = 1) -> None:
        """Check how many steps were replays, of how many graphs."""
        if self.world.is_simulated:
            found = self.step.replays, self.step.captures
            assert found == (replays, captures), (found, self.reasons)

    def told(self, *reasons: str) -> None:
        """Check why the steps behind the last warm-up were eager; "" is a replay."""
        if self.world.is_simulated:
            found = self.reasons[WARMUP:]
            pairs = zip(found, reasons, strict=True)
            assert all(bool(one) == bool(other) and other in one for one, other in pairs), found

    def waited(self, first: int, *reasons: str) -> None:
        """Check why steps from one on were eager, and that the same graph is replayed again."""
        if self.world.is_simulated:
            found = self.reasons[first : first + len(reasons)]
            assert all(map(operator.contains, found, reasons)), self.reasons
            assert (self.reasons[-2:], self.step.captures) == (["", ""], 1), self.reasons

    def values(self, run: Training) -> Values:
        return run.values(losses=torch.stack(self.losses))


def recorded(world: World, run: Training, max_norm: float | None = None) -> Recorded:
    return Recorded(world, run, run.optim, max_norm)


def trained(
    world: World,
    make: Callable[[], nn.Module] = STACK,
    *,
    max_norm: float | None = None,
    microbatches: int = 1,
    steps: int = STEPS,
    captures: int = 1,
    each: Callable[[Training], Any] = lambda run: None,
    **kwargs: Any,
) -> Values:
    """Train for some steps, of which all but the first are replays."""
    run = training(world, make, steps=steps, microbatches=microbatches, **kwargs)
    taken = recorded(world, run, max_norm)
    for index in run.steps(unsteady=WARMUP + 1):
        first = index * microbatches
        for micro in range(microbatches - 1):
            taken.step.accumulate(run.inputs[first + micro])
        taken.take(run.inputs[first + microbatches - 1])
        each(run)
    taken.check((steps - WARMUP) * microbatches, captures)
    return taken.values(run)


@scenario(2)
def captured(world: World) -> Values:
    return trained(world)


@scenario(2, tolerance=COARSE)
def captured_in_bf16(world: World) -> Values:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return trained(world, mp_policy=policy, max_norm=0.5)


@scenario(2, tolerance=COUNTED)
def captured_with_adamw_and_clipping(world: World) -> Values:
    return trained(world, optimizer=ADAMW, max_norm=0.5)


@scenario(2, slow=True, tolerance=COUNTED)
def captured_with_lists_of_tensors(world: World) -> Values:
    """The kernels that step many parameters at once, which are a GPU's default."""
    make = functools.partial(ADAMW, foreach=True) if world.is_simulated else ADAMW
    return trained(world, optimizer=make, max_norm=0.5)


@scenario(4, slow=True)
def captured_on_replicas(world: World) -> Values:
    return trained(world, mesh=(2, 2), max_norm=0.5)


@scenario(2, slow=True)
def captured_on_replicas_alone(world: World) -> Values:
    return trained(world, mesh=(2, 1))


@scenario(3, slow=True)
def captured_on_three_ranks(world: World) -> Values:
    return trained(world, Odd)


class Odd(nn.Module):
    """Rows that three ranks cannot share evenly, one row, a scalar, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 13)
        self.blocks = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 1)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(29), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x * self.frozen.sum() / 29


@scenario(2)
def captured_micro_batches(world: World) -> Values:
    """The first, those between and the last are a graph each."""
    return trained(world, microbatches=3, captures=3, steps=9)


@scenario(2, slow=True, tolerance=COARSE)
def captured_micro_batches_in_bf16(world: World) -> Values:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return trained(world, microbatches=4, captures=3, steps=9, mp_policy=policy)


@scenario(2, slow=True)
def captured_and_kept_after_forward(world: World) -> Values:
    return trained(world, reshard_after_forward=False)


@scenario(2, tolerance=COUNTED)
def captured_with_a_schedule(world: World) -> Values:
    """A rate that changes in each step is no reason to leave the graph."""

    def lower(run: Training) -> None:
        for group in run.optim.param_groups:
            group["lr"] *= 0.8

    return trained(world, optimizer=ADAMW, each=lower, steps=12)


@scenario(2)
def captured_with_dropout(world: World) -> Values:
    """Replays draw the numbers that eager steps would have drawn."""

    def make() -> nn.Module:
        model: Any = STACK()
        for block in model.blocks:
            block.register_forward_hook(lambda _m, _i, out: nn.functional.dropout(out, 0.25))
        return model

    return trained(world, make, steps=10)


@scenario(2)
def captured_gradients(world: World) -> Values:
    """Without an optimizer a step leaves gradients, at one address; the caller steps."""
    run = training(world, steps=10)
    taken = Recorded(world, run, None, None)
    for index in run.steps(unsteady=WARMUP + 1):
        taken.take(run.inputs[index])
        run.optim.step()
        if not world.is_simulated or index % 2:  # the next step clears them, too
            run.optim.zero_grad()
    taken.check(10 - WARMUP)
    return taken.values(run)


# What leaves a graph.


@scenario(2)
def a_graph_is_left_for_other_shapes(world: World) -> Values:
    """A shape gets a graph of its own, and the first one stays."""
    run = training(world, steps=14)
    taken = recorded(world, run)
    for index in run.steps(unsteady=14):
        is_short = index % 3 == 2
        taken.take(run.inputs[index][: 2 if is_short else ROWS])
    taken.check(8, 2)
    return taken.values(run)


@scenario(2)
def a_graph_is_left_for_another_loss(world: World) -> Values:
    run = training(world, steps=10)
    taken = recorded(world, run)
    for index in run.steps(unsteady=10):
        if index == 5:
            taken.step.loss = lambda model, x: 2 * loss(model, x)
        taken.take(run.inputs[index])
    taken.told("", "", *["warm-up"] * 3, "", "")
    return taken.values(run)


@scenario(2)
def a_graph_is_left_for_evaluation_mode(world: World) -> Values:
    run = training(world, steps=7)
    taken = recorded(world, run)
    for index in run.steps(unsteady=7):
        run.model.train(index != 5)
        taken.take(run.inputs[index])
    taken.told("", "", "warm-up", "")
    return taken.values(run)


@scenario(2)
def a_graph_is_left_for_a_setting(world: World) -> Values:
    run = training(world, steps=8)
    taken = recorded(world, run)
    for index in run.steps(unsteady=8):
        if index == 5:
            run.model.set_gradient_divide_factor(4.0)
        taken.take(run.inputs[index])
    taken.told("", "", "a setting", "", "")
    taken.check(4, 2)
    return taken.values(run)


def loads(world: World) -> tuple[Training, Recorded]:
    """Load an optimizer's state, which then lies elsewhere; what was saved is older by a step."""
    run = training(world, steps=9, optimizer=ADAMW)
    taken = recorded(world, run)
    saved: dict[str, Any] = {}
    for index in run.steps(unsteady=9):
        if index == 5:
            saved = copy.deepcopy(run.optim.state_dict())
        if index == 6:
            run.optim.load_state_dict(saved)
        taken.take(run.inputs[index])
    return run, taken


@scenario(2, tolerance=COUNTED)
def a_graph_is_left_for_a_loaded_optimizer(world: World) -> Values:
    run, taken = loads(world)
    taken.told("", "", "", "state was replaced", "", "")
    return taken.values(run)


@scenario(2)
def a_graph_is_left_for_a_frozen_parameter(world: World) -> Values:
    run = training(world, steps=11)
    taken = recorded(world, run)
    for index in run.steps(unsteady=11):
        if index == 5:
            run.model.blocks[1].requires_grad_(False)
        taken.take(run.inputs[index])
    taken.told("", "", "frozen", "a setting", "different collectives", "", "", "")
    return taken.values(run)


@scenario(2)
def a_graph_is_left_for_a_replaced_buffer(world: World) -> Values:
    def make() -> nn.Module:
        model: Any = STACK()
        model.register_buffer("factor", torch.ones(()))
        model.register_forward_hook(lambda module, _i, out: out * module.factor)
        return model

    run = training(world, make, steps=8)
    taken = recorded(world, run)
    for index in run.steps(unsteady=8):
        if index == 5:
            run.model.factor = torch.full((), 0.5, device=world.device)
        taken.take(run.inputs[index])
    taken.told("", "", "a buffer", "", "")
    return taken.values(run)


@scenario(2)
def a_graph_waits_while_parameters_are_whole(world: World) -> Values:
    """A summon, an unshard by hand and an evaluation leave the graph as it is."""
    run = training(world, steps=16)
    taken = recorded(world, run)
    for index in run.steps(unsteady=16):
        if index == 5:
            with fsdp2.summon_full_params(run.model), torch.no_grad():
                run.model.blocks[0].up.weight.mul_(0.5)
        if index == 6:
            run.model.blocks[1].unshard()
        if index == 8:
            with torch.no_grad():
                run.model(run.inputs[0])
        taken.take(run.inputs[index])
    waits = (*["different collectives"] * 2, "different collectives")
    taken.waited(6, "are unsharded", *waits)
    return taken.values(run)


@scenario(2)
def a_graph_stays_over_a_save(world: World) -> Values:
    """What was saved between replays is loaded into another model, and back into this one."""
    run, other = training(world, steps=10), training(world, steps=10)
    taken = recorded(world, run)
    with shared_folder() as folder:
        for index in run.steps(unsteady=10):
            if index == 6:
                fsdp2.checkpoint.save(folder / "saved", run.model, run.optim)
                fsdp2.checkpoint.load(folder / "saved", other.model, other.optim)
            if index == 8:
                fsdp2.checkpoint.load(folder / "saved", run.model)
            taken.take(run.inputs[index])
    taken.told(*[""] * 7)
    return taken.values(run) | other.values(saved=shards(other.model))


@scenario(2, tolerance=COUNTED, may_wait="the thread that writes waits for the copies")
def a_save_in_the_background_is_not_overtaken(world: World) -> Values:
    """Copies begin before a replay, and end beside it: its update waits for them.

    The event of ``set_post_optim_event`` is waited for outside of a capture, too.
    """
    run, other = training(world, steps=8, optimizer=ADAMW), training(world, optimizer=ADAMW)
    taken = recorded(world, run)
    with shared_folder() as folder:
        for index in run.steps(unsteady=8):
            if world.is_simulated:
                run.model.set_post_optim_event(torch.accelerator.current_stream().record_event())
            if index < 5:
                taken.take(run.inputs[index])
                continue
            with held_back(Saving, "write") as go_on:
                save = fsdp2.checkpoint.save
                handle = save(folder / "saved", run.model, run.optim, background=True)
                wanted = shards(run.model)
                taken.take(run.inputs[index])
                go_on.set()
                handle.wait()
            fsdp2.checkpoint.load(folder / "saved", other.model, other.optim)
            assert torch.equal(wanted, shards(other.model))
    taken.told(*[""] * 5)
    return taken.values(run)


def shards(model: nn.Module) -> Tensor:
    return torch.cat([param.to_local().detach().flatten() for param in model.parameters()])  # type: ignore[attr-defined]


@scenario(2)
def a_graph_waits_for_recovery(world: World) -> Values:
    """A forward that raises outside of the step, and one that raises inside."""
    run = training(world, steps=16)
    taken = recorded(world, run)
    wrong = world.tensor(3, WIDTH + 1)
    for index in run.steps(unsteady=16):
        if index == 5:
            raised(lambda: run.model(wrong))
        if index == 7:
            raised(lambda: taken.step(wrong))
        taken.take(run.inputs[index])
    if world.is_simulated:  # ranks ask each other for a while, as after any failed step
        failed = [place for place, why in enumerate(taken.reasons) if "failed" in why]
        assert (failed, taken.reasons[-2:], taken.step.captures) == ([5, 7], ["", ""], 1)
    return taken.values(run)


def raised(work: Callable[[], Any]) -> None:
    try:
        work()
    except RuntimeError:
        return
    raise AssertionError("it did not raise")


@scenario(2)
def a_capture_that_fails(world: World) -> Values:
    """A loss that reads a value on the host cannot be captured; such steps stay eager."""
    run = training(world, steps=9)
    taken = recorded(world, run)
    reads = [True]

    def reading(model: Any, x: Tensor) -> Tensor:
        found = loss(model, x)
        if reads[0]:
            assert found.item() == found.item()
        return found

    taken.step.loss = reading
    for index in run.steps(unsteady=9):
        reads[0] = index < 5
        taken.take(run.inputs[index])
    taken.told(*["capturing failed"] * 2, "", "", "", "")
    return taken.values(run)


@scenario(2)
def a_capture_that_fails_in_backward(world: World) -> Values:
    """Gathers and reductions were captured by then, and never run."""
    run = training(world, steps=9)
    taken = recorded(world, run)
    reads = [True]

    def look(gradient: Tensor) -> None:
        if reads[0]:
            assert gradient.sum().item() is not None

    run.model.blocks[0].register_forward_hook(lambda _m, _i, out: out.register_hook(look) and None)
    for index in run.steps(unsteady=9):
        reads[0] = index < 5
        taken.take(run.inputs[index])
    taken.told(*["capturing failed"] * 2, "", "", "", "")
    return taken.values(run)
