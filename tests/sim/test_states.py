"""Promise: an optimizer whose states are on the host computes what it computes without, to the bit.

On the simulated device, which checks the order of copies too. ``scenarios/states`` has longer runs.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2._core.base.torch_dtensor import local_part
from fsdp2.optim import _offload
from tests.kit import sim
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.pool import RunOnRanks, make_request
from tests.sim.test_scenarios import simulator

__all__ = ["simulator"]  # a fixture

Make = Callable[..., Any]
STEPS = 4
MAKES: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "adamw_foreach": functools.partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "sgd_without_states": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "local_adamw": functools.partial(fsdp2.optim.local, torch.optim.AdamW),
    "local_fused": functools.partial(fsdp2.optim.local, torch.optim.AdamW, fused=True),
    "local_sgd": functools.partial(fsdp2.optim.local, torch.optim.SGD, momentum=0.9),
}
MODELS = ["stack", "few_rows", "scalars", "partly_frozen", "tied_within", "non_contiguous"]


def model_of(case: Any) -> Any:
    model = seeded(case.build, 1).to("sim")
    shard_each(*case.units(model))
    return fsdp2.fully_shard(model)


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Return two param groups, so that units have parameters in both."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": params[::2], "lr": 0.02}, {"params": params[1::2], "weight_decay": 0.1}]


def run(make: str, case: str, rank: int) -> None:
    chosen, found = CASES[case], {}
    batches = [chosen.batch(3) for _ in range(STEPS)]
    for offloads in (False, True):
        model = model_of(chosen)
        optim = MAKES[make](groups_of(model), lr=0.01)
        if offloads:
            assert fsdp2.optim.offload_states(optim) is optim
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
        seen: list[int] = []
        optim.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        for step in range(STEPS):
            batch = batches[step]
            loss_of(model(*batch.args, **batch.kwargs)).backward()
            optim.step()
            schedule.step()
            optim.zero_grad()
            if step == 1:
                optim.load_state_dict(copy.deepcopy(optim.state_dict()))
        assert len(seen) == STEPS
        state = optim.state_dict()
        found[offloads] = state["param_groups"], [*_tensors(model), *_states(state)]
    (groups, left), (own, right) = found[False], found[True]
    assert groups == own
    assert len(left) == len(right)
    for place, pair in enumerate(zip(left, right, strict=True)):
        if make == "local_fused":  # this device's kernels are a CPU's: they round by position
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(*pair), place
    gc.collect()
    sim.check()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [local_part(p).detach().cpu() for p in model.parameters()]


def _states(state: dict[str, Any]) -> list[Tensor]:
    entries = [entry[key] for entry in state["state"].values() for key in sorted(entry)]
    return [local_part(value).cpu() for value in entries if isinstance(value, Tensor)]


def small(make: str, case: str, rank: int) -> None:
    with mock.patch.object(_offload, "LEAST_NBYTES", 1):
        run(make, case, rank)


small.body = small  # type: ignore[attr-defined]  # what a rank looks for


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.usefixtures("simulator")
def test_steps_are_equal_bit_for_bit(
    make: str, size: int, run_on_ranks: RunOnRanks, request: pytest.FixtureRequest
) -> None:
    case = MODELS[(list(MAKES).index(make) + size) % len(MODELS)]
    given = {"make": make, "case": case}
    run_on_ranks(make_request(small, request.node.nodeid, size, given, device="sim"))


Body = Callable[[], None]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


def run_body(name: str, rank: int) -> None:
    with mock.patch.object(_offload, "LEAST_NBYTES", 1):
        BODIES[name]()
    gc.collect()
    sim.check()


run_body.body = run_body  # type: ignore[attr-defined]  # what a rank looks for


def deep(count: int = 6, width: int = 32) -> Any:
    return seeded(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]), 1)


def step(model: Any, optim: Any) -> None:
    model(torch.ones(2, 32, device="sim")).square().mean().backward()
    advance(optim)


@body
def the_peak_is_that_of_a_few_units() -> None:
    """Of 24 layers' states at most three are on the device, and none between steps."""
    peaks, kept = {}, {}
    for offloads in (False, True):
        gc.collect()
        before = sim.load().counts()[2]
        model = deep(24).to("sim")
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        if offloads:
            fsdp2.optim.offload_states(optim)
        for _ in range(2):
            step(model, optim)
        gc.collect()
        parameters = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
        kept[offloads] = sim.load().counts()[2] - before - parameters
        sim.load().reset_peak()
        step(model, optim)
        peaks[offloads] = sim.load().counts()[3] - before
        del model, optim
    layer = 2 * 32 * 33 * 4  # the states of one
    assert kept[False] > 22 * layer
    assert kept[True] < layer
    assert peaks[False] - peaks[True] > 20 * layer


@body
def a_copy_of_an_optimizer_has_memory_of_its_own() -> None:
    for make in (torch.optim.AdamW, functools.partial(fsdp2.optim.local, torch.optim.AdamW)):
        model = deep().to("sim")
        optim = fsdp2.optim.offload_states(make(model.parameters()), max_bytes=1 << 20)
        step(model, optim)
        both = copy.deepcopy((model, optim))
        loaded = pickle.loads(pickle.dumps((model, optim)))
        for copied, its in (both, loaded):
            assert type(its) is type(optim)
            assert its._most == optim._most == 1 << 20
            assert isinstance(its, torch.optim.AdamW)
            step(copied, its)
        step(model, optim)
        for left, right in zip(model.parameters(), both[0].parameters(), strict=True):
            assert torch.equal(left, right)
        old = optim.state[model[0].weight]["exp_avg"]
        new = both[1].state[both[0][0].weight]["exp_avg"]
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


@body
def parameters_that_come_later_step_too() -> None:
    models = deep().to("sim"), deep().to("sim")
    optims = [torch.optim.AdamW(model[:3].parameters()) for model in models]
    fsdp2.optim.offload_states(optims[1])
    for model, optim in zip(models, optims, strict=True):
        step(model, optim)
        optim.add_param_group({"params": list(model[3:].parameters()), "lr": 0.1})
        for _ in range(2):
            step(model, optim)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left, right)


@body
def a_step_that_fails_leaves_states_that_go_on() -> None:
    models = deep().to("sim"), deep().to("sim")
    optims = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    fsdp2.optim.offload_states(optims[1])
    for model, optim in zip(models, optims, strict=True):
        step(model, optim)
        optim.param_groups[0]["lr"] = "much"
        with pytest.raises(TypeError):
            step(model, optim)
        model.zero_grad()
        optim.param_groups[0]["lr"] = 0.1
        optim.state.clear()
        step(model, optim)
        step(model, optim)
    for left, right in zip(*(list(model.parameters()) for model in models), strict=True):
        assert left.shape == right.shape
        assert torch.isfinite(right).all()


@body
def a_closure_is_called_once() -> None:
    model = deep().to("sim")
    optim = fsdp2.optim.offload_states(torch.optim.AdamW(model.parameters()))
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        loss: Tensor = model(torch.ones(2, 32, device="sim")).square().mean()
        loss.backward()
        return loss

    assert optim.step(closure).item() > 0
    assert len(calls) == 1


ADAMWS: tuple[Make, ...] = (torch.optim.AdamW, MAKES["local_adamw"])


def equal(models: tuple[Any, Any]) -> None:
    for left, right in zip(*map(_tensors, models), strict=True):
        assert torch.equal(left, right)


@body
def a_scheduler_may_be_there_before() -> None:
    for make in ADAMWS:
        models = deep().to("sim"), deep().to("sim")
        optims = [make(model.parameters()) for model in models]
        schedules = [torch.optim.lr_scheduler.StepLR(optim, 1) for optim in optims]
        fsdp2.optim.offload_states(optims[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler looks whether there was a step
            for model, optim, schedule in zip(models, optims, schedules, strict=True):
                for _ in range(3):
                    step(model, optim)
                    schedule.step()
        equal(models)
        assert sum(batch.nbytes for batch in optims[1]._batches) > 0


@body
def states_that_somebody_replaced() -> None:
    """By tensors on the host, made of those that are there, and by tensors on the device."""
    for make, most in itertools.product(ADAMWS, (None, 1 << 20)):
        models = deep().to("sim"), deep().to("sim")
        optims = [make(model.parameters()) for model in models]
        fsdp2.optim.offload_states(optims[1], max_bytes=most)
        for model, optim in zip(models, optims, strict=True):
            for like in (lambda state, _: state, lambda _, param: param):
                step(model, optim)
                for param, entry in optim.state.items():
                    entry["exp_avg"] = torch.zeros_like(like(entry["exp_avg"], param))
                step(model, optim)
        equal(models)


@body
def parameters_that_leave_their_param_group() -> None:
    for make, most in itertools.product(ADAMWS, (None, 1 << 20)):
        models = deep().to("sim"), deep().to("sim")
        parts = [(model[:2].parameters(), model[2:].parameters()) for model in models]
        optims = [make([{"params": a, "lr": 0.5}, {"params": b}]) for a, b in parts]
        fsdp2.optim.offload_states(optims[1], max_bytes=most)
        for model, optim in zip(models, optims, strict=True):
            step(model, optim)
            first, second = optim.param_groups
            second["params"].append(first["params"].pop())
            step(model, optim)
            second["params"].pop()
            step(model, optim)
            del optim.param_groups[0]
            step(model, optim)
        equal(models)


@body
def one_unit_is_with_the_host_anyway() -> None:
    """Its parameters step on the host; those of its neighbours do not, however small they are."""

    def build() -> Any:
        model = deep().to("sim")
        fsdp2.fully_shard(model[0], offload_policy=fsdp2.CPUOffloadPolicy())
        for layer in model[1:]:
            fsdp2.fully_shard(layer)
        return fsdp2.fully_shard(model)

    for make, least in itertools.product(ADAMWS, (1, 1 << 25)):
        with mock.patch.object(_offload, "LEAST_NBYTES", least):
            models = build(), build()
            optims = [make(model.parameters()) for model in models]
            fsdp2.optim.offload_states(optims[1])
            for model, optim in zip(models, optims, strict=True):
                for _ in range(3):
                    step(model, optim)
            equal(models)


@body
def what_came_first_steps_first() -> None:
    """Else all would wait for the last copy before the first one could leave."""
    model = deep().to("sim")
    optim = fsdp2.optim.offload_states(torch.optim.AdamW(model.parameters()), max_bytes=40_000)
    step(model, optim)
    came: list[Any] = []
    bring, step_batch = type(optim)._bring, type(optim)._step_batch

    def noting(self: Any, batch: Any) -> None:
        came.append(batch)
        bring(self, batch)

    stepped: list[Any] = []

    def stepping(self: Any, batch: Any, *args: Any) -> Any:
        stepped.append(batch)
        return step_batch(self, batch, *args)

    with (
        mock.patch.object(type(optim), "_bring", noting),
        mock.patch.object(type(optim), "_step_batch", stepping),
    ):
        step(model, optim)
    assert 2 < len(optim._batches) == len(stepped)
    ahead = [batch for batch in came if batch in stepped[:4]]
    assert stepped[:4] == ahead[:4]
    assert stepped[0].params[0] is not model[0].weight


@body
def an_optimizer_that_is_dropped_before_its_step() -> None:
    """Its states were on their way: nobody has their memory before they have come."""
    for _ in range(3):
        model = deep().to("sim")
        optim = fsdp2.optim.offload_states(torch.optim.AdamW(model.parameters()), max_bytes=1 << 20)
        step(model, optim)
        model(torch.ones(2, 32, device="sim")).square().mean().backward()
        assert any(batch.event is not None for batch in optim._batches)
        del optim
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("simulator")
def test_states(name: str, run_on_ranks: RunOnRanks, request: pytest.FixtureRequest) -> None:
    run_on_ranks(make_request(run_body, request.node.nodeid, 1, {"name": name}, device="sim"))
