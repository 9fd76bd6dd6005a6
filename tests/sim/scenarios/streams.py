"""Streams and events of the user's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from tests.kit.models import WIDTH, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import Training, each_step, learn, sets, train, training
from tests.sim.scenarios.memory import AGREES, LONG, LargeRoot


@scenario(2)
def forward_and_backward_on_a_side_stream(world: World) -> Values:
    """The optimizer runs there, too."""
    run = training(world)
    side = world.stream()
    with world.beside(side):
        for step in run.steps():
            run.train(step)
    return run.values()


def on_a_side_stream(world: World, **kwargs: Any) -> Values:
    """Forward and backward on a side stream, the optimizer on the default one."""
    run = training(world, **kwargs)
    side = world.stream(own=True)
    for step in run.steps():
        with world.beside(side):
            run.learn(step)
        run.update()
    return run.values()


@scenario(2, slow=True)
def side_stream_and_default_stream(world: World) -> Values:
    return on_a_side_stream(world)


@scenario(2)
def forward_on_a_side_stream_alone(world: World) -> Values:
    """Autograd runs backward on the streams of forward; the call of backward is elsewhere."""
    run = training(world)
    side = world.stream()
    for step in run.steps():
        with world.beside(side):
            loss = loss_of(run.model(run.inputs[step]))
        loss.backward()
        run.update()
    return run.values()


@scenario(2)
def warm_up_on_a_side_stream(world: World) -> Values:
    """As before a capture of graphs: the first steps run beside, the others do not."""
    run = training(world, steps=5)
    side = world.stream()
    with world.beside(side):
        for step in range(2):
            run.train(step)
    for step in run.steps():
        run.train(step)
    return run.values()


@scenario(2, slow=True)
def evaluation_on_another_stream(world: World) -> Values:
    run = training(world)
    seen = {}
    side = world.stream()
    for step in run.steps():
        run.train(step)
        side.wait_stream(world.current_stream)
        with side, torch.no_grad():
            seen[f"output {step}"] = run.model(run.inputs[step])
        world.current_stream.wait_stream(side)
    return run.values(**seen)


def optimizer_elsewhere(world: World, own: bool, **kwargs: Any) -> Values:
    """The optimizer runs beside the next forward, whose gathers alone wait for it."""
    run = training(world, **kwargs)
    side = world.stream(own=own)
    for step in run.steps():
        run.learn(step)
        side.wait_stream(world.current_stream)
        with side:
            run.optim.step()
            event = world.event(own=own)
            event.record(side if world.is_simulated else None)
        run.model.set_post_optim_event(event)
        run.optim.zero_grad()
    world.current_stream.wait_stream(side)
    return run.values()


@scenario(2)
def post_optim_event(world: World) -> Values:
    return optimizer_elsewhere(world, own=False)


@scenario(2)
def post_optim_event_of_the_devices_class(world: World) -> Values:
    return optimizer_elsewhere(world, own=True)


@scenario(2, slow=True)
def post_optim_event_and_much_memory(world: World) -> Values:
    return optimizer_elsewhere(world, own=True, set_up=sets(memory="fast"))


@each_step(slow=True)
def event_of_the_compute_stream(run: Training, step: int) -> None:
    """The idiomatic use: what the optimizer was given, and nothing behind it, is waited for."""
    run.learn(step)
    run.optim.step()
    event = run.world.event(own=True)
    event.record()
    run.model.set_post_optim_event(event)
    run.optim.zero_grad()


@scenario(2)
def batches_copied_beside(world: World) -> Values:
    """The next batch is copied from pinned memory by a stream of the user's."""
    run = training(world)
    host = [x.to("cpu") for x in run.inputs]
    if world.is_simulated:
        host = [x.pin_memory() for x in host]
    side = world.stream()

    def fetch(step: int) -> Any:
        with side:
            batch = host[step].to(world.device, non_blocking=True)
            event = world.event()
            event.record(side if world.is_simulated else None)
        return batch, event

    coming = fetch(0)
    kept = []
    for step in run.steps():
        batch, event = coming
        kept.append(batch)
        if step + 1 < len(host):
            coming = fetch(step + 1)
        world.current_stream.wait_event(event)
        learn(run.model, batch)
        run.update()
    return run.values()


@scenario(2)
def gradients_read_beside(world: World) -> Values:
    """A stream of the user's reads sharded gradients while the next forward begins."""
    run = training(world)
    side = world.stream()
    sums = {}
    for step in run.steps():
        run.learn(step)
        with world.beside(side):
            grads = [p.grad.to_local().square().sum() for p in run.model.parameters()]
            sums[f"{step}"] = torch.stack(grads)
        run.update()
    return run.values(**sums)


@scenario(2)
def two_streams_in_one_forward(world: World) -> Values:
    """Branches of a model run beside each other; autograd goes back through both streams."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            side = sides[0]
            side.wait_stream(world.current_stream)
            with side:
                left = self.left(x)
            right = self.right(x)
            world.current_stream.wait_stream(side)
            return self.out(left + right)

    sides = [world.stream()]
    return train(
        world, Branches, units=lambda model: [model.left, model.right], reshard_after_forward=True
    )


@scenario(2)
def gradients_recorded_on_a_stream(world: World) -> Values:
    """A stream of the user's reads gradients that are dropped: ``record_stream`` says so.

    Both forwards come first, so that no forward gives the memory back between the backwards.
    """
    run = training(world, microbatches=2)
    side = world.stream()
    sums = {}
    for step in run.steps():
        losses = [loss_of(run.model(run.inputs[2 * step + index])) for index in range(2)]
        for index, loss in enumerate(losses):
            loss.backward()
            side.wait_stream(world.current_stream)
            grads = [param.grad.to_local() for param in run.model.parameters()]
            with side:
                sums[f"{step} {index}"] = torch.stack([grad.square().sum() for grad in grads])
            if world.is_simulated:
                for grad in grads:
                    grad.record_stream(side)
            del grads
            if index == 0:
                run.optim.zero_grad()
        run.update()
    world.current_stream.wait_stream(side)
    return run.values(**sums)


@scenario(2, tolerance=LONG, may_wait=AGREES)
def parts_warmed_up_on_a_side_stream(world: World) -> Values:
    """Nodes that accumulate gradients are made in the stream of the first forward.

    Ranks learn there when gradients of the parts are complete; later two backwards add up.
    """
    run = training(
        world,
        LargeRoot,
        steps=5,
        microbatches=2,
        set_up=sets(memory="low"),  # parts are reduced early
    )
    side = world.stream()

    with world.beside(side):
        for step in range(2):
            run.train(step)
    for step in run.steps():
        run.accumulate(step, "set_requires_gradient_sync")
    return run.values()


@scenario(2, slow=True)
def warmed_up_without_resharding(world: World) -> Values:
    """Parameters stay whole from the side stream to the other one."""
    run = training(world, steps=7, reshard_after_forward=False, microbatches=2)
    side = world.stream()
    with world.beside(side):
        run.train(0)
        with torch.no_grad():
            run.model(run.inputs[0])
    for step in run.steps(unsteady=5):  # turns of microbatches are learnt
        run.accumulate(step, "set_requires_gradient_sync")
    return run.values()
