"""Promise: activations go to the host and come back, whatever happens to the graph.

On one rank of the simulated device, mostly with a model that is not sharded: the order of copies is
checked in every test. Training on several ranks is in ``scenarios/activations.py``.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.api.activations import ATTRIBUTE
from tests.kit import sim
from tests.kit.models import WIDTH, Block, Stack, seeded
from tests.kit.pool import RunOnRanks, make_request
from tests.sim.test_scenarios import simulator

__all__ = ["simulator"]  # a fixture

Body = Callable[[], None]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


def run(name: str) -> None:
    BODIES[name]()
    gc.collect()
    sim.check()


run.body = run  # type: ignore[attr-defined]  # what a rank looks for


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("simulator")
def test_activations(name: str, run_on_ranks: RunOnRanks, request: pytest.FixtureRequest) -> None:
    run_on_ranks(make_request(run, request.node.nodeid, 1, {"name": name}, device="sim"))


def make(count: int = 4) -> Any:
    return seeded(lambda: Stack(count=count), 3).to("sim")


def pair(**kwargs: Any) -> tuple[Any, Any]:
    """Return a model, and one of the same values whose activations are offloaded."""
    models = make(), make()
    kwargs.setdefault("min_bytes", 1)
    names = fsdp2.offload_activations(models[1], {Block}, **kwargs)
    assert names == [f"blocks.{place}" for place in range(4)]
    return models


def batch(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator("cpu").manual_seed(rows)).to("sim")


def away(model: Any) -> Any:
    return vars(model)[ATTRIBUTE]


def equal(models: tuple[Any, Any]) -> None:
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left.grad, right.grad)


def learn(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


def fail(*_: Any) -> None:
    raise ArithmeticError


@body
def gradients_are_equal_bit_for_bit() -> None:
    models = pair()
    for model in models:
        for rows in (3, 1, 13, 3):
            learn(model, batch(rows))
    equal(models)
    assert away(models[1]).memory.nbytes > 0


@body
def a_batch_without_rows() -> None:
    models = pair()
    for model in models:
        learn(model, batch(0).reshape(0, WIDTH))
    equal(models)


@body
def parameters_and_their_views_and_casts_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("table", torch.rand(4, 32))

        def forward(self, x: Tensor) -> Tensor:
            h = F.linear(x * self.table, self.weight.t())
            return (
                F.linear(h, self.weight[:, :16].repeat(1, 1).view(32, 16).T).tanh()
                @ (self.weight[:16])
            )

    model = nn.Sequential(Tied(), Tied()).to("sim")
    fsdp2.offload_activations(model, {Tied}, keep_last=0, min_bytes=1)
    x = torch.randn(4, 32).to("sim").requires_grad_()
    loss = model(x).sum()
    found = [each() for group in away(model)._groups.values() for each in group.storages]
    leaving = {each.saved.untyped_storage().data_ptr() for each in found if each.saved is not None}
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert leaving
    assert not owned & leaving
    loss.backward()


@body
def small_tensors_stay() -> None:
    _, model = pair(min_bytes=1 << 20)
    learn(model, batch())
    assert away(model).memory.nbytes == 0


@body
def a_small_part_of_a_large_storage_stays() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return out

    model = nn.Sequential(Picks()).to("sim")
    fsdp2.offload_activations(model, {Picks}, keep_last=0, min_bytes=1)
    everything = torch.randn(100, WIDTH).to("sim")
    learn(model, everything[:3])
    assert away(model).memory.nbytes == 0
    learn(model, everything[:50])
    assert away(model).memory.nbytes > 0


@body
def nothing_is_copied_without_gradients() -> None:
    _, model = pair()
    with torch.no_grad():
        model(batch())
    model.eval()
    with torch.inference_mode():
        model(batch())
    assert away(model).memory.nbytes == 0


@body
def a_forward_that_fails_leaves_nothing_behind() -> None:
    models = pair()
    for model in models:
        handle = model.blocks[2].mid.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch())
        handle.remove()
        assert not away(models[1])._running.calls
        learn(model, batch())
    equal(models)


@body
def a_hook_that_fails_before_a_forward_leaves_nothing_behind() -> None:
    models = pair()
    for model in models:
        handle = model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch())
        handle.remove()
        learn(model, batch())
    equal(models)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@body
def a_forward_that_is_interrupted_leaves_nothing_behind() -> None:
    """Torch runs no hook behind it; hooks of the user's that are inside of ours then stay."""
    models = pair()
    for model in models:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.blocks[2].mid.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        handle.remove()
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, packed=packed: packed.append(tensor) or tensor,  # type: ignore[misc]
            lambda tensor: tensor,
        ):
            learn(model, batch())
        assert packed
        learn(model, batch())
    equal(models)
    assert not away(models[1])._running.calls
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@body
def several_threads_have_calls_of_their_own() -> None:
    """One leaves a block while the other one is in the next."""
    models = pair()
    batches = [batch(rows) for rows in (3, 5)]
    meet = threading.Barrier(2, timeout=60)
    left: list[Any] = []

    def wait(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        is_first, in_last = len(output) == 3, module is models[1].blocks[2].norm
        if is_first or in_last:
            meet.wait()
        if in_last and not is_first:
            meet.wait()

    def train(x: Tensor) -> None:
        loss = models[1](x).square().mean()
        left.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
        meet.wait()
        loss.backward()

    handles = [models[1].blocks[n].norm.register_forward_hook(wait) for n in (1, 2)]
    threads = [threading.Thread(target=train, args=(x,)) for x in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    assert left == [None, None]
    for x in batches:
        learn(models[0], x)
    for own, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(own.grad, right.grad)


@body
def shorter_batches_use_the_memory_of_the_longest() -> None:
    model = make()
    fsdp2.offload_activations(model, {Block}, keep_last=0, min_bytes=1)
    for rows in range(100, 1600, 100):  # each one is longer than all before
        learn(model, batch(rows))
    longest = away(model).memory.nbytes
    for rows in (150, 1500, 420, 77, 980):
        learn(model, batch(rows))
    assert away(model).memory.nbytes == longest
    other = make()
    fsdp2.offload_activations(other, {Block}, keep_last=0, min_bytes=1)
    learn(other, batch(1500))
    assert longest < 2 * away(other).memory.nbytes


@body
def a_backward_that_fails_leaves_nothing_behind() -> None:
    models = pair()
    for model in models:
        handles: list[Any] = []
        handles.append(
            model.blocks[1].register_forward_hook(
                lambda m, a, out: out.register_hook(fail) and None
            )
        )
        with pytest.raises(ArithmeticError):
            learn(model, batch())
        handles[0].remove()
        model.zero_grad()
        learn(model, batch())
    equal(models)


@body
def a_graph_that_stays_is_read_again() -> None:
    models = pair()
    for model in models:
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    equal(models)


@body
def gradients_of_gradients() -> None:
    models = pair()
    for model in models:
        x = batch().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
    equal(models)


@body
def two_graphs_in_turns() -> None:
    models = pair()
    for model in models:
        first, second = model(batch()).square().mean(), model(batch(5)).square().mean()
        first.backward()
        second.backward()
    equal(models)


@body
def a_graph_that_is_dropped_gives_memory_back() -> None:
    _, model = pair()
    for _ in range(3):
        model(batch())
        learn(model, batch())
    known = away(model).memory.nbytes
    for _ in range(3):
        model(batch())
        learn(model, batch())
    assert away(model).memory.nbytes == known


@body
def what_was_written_after_it_was_saved_is_an_error() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).exp()
            out = h * 2.0
            h.add_(1.0)
            return out

    model = nn.Sequential(Writes(), Writes()).to("sim")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        learn(model, batch())
    fsdp2.offload_activations(model, {Writes}, keep_last=0, min_bytes=1)
    with pytest.raises(fsdp2.StateError, match="modified in place") as caught:
        learn(model, batch())
    assert caught.value.code == "FS324"
    gc.collect()
    sim.finish()
    sim.load().forget()  # the copy and the write race, which is why it is an error


@body
def a_module_inside_of_a_checkpoint_is_told_once() -> None:
    class Recomputes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    model = seeded(Recomputes, 3).to("sim")
    fsdp2.offload_activations(model, {Block}, min_bytes=1)
    with pytest.warns(UserWarning, match="FS325"):
        learn(model, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, batch())
    assert away(model).memory.nbytes == 0


@body
def a_copy_of_a_model_has_memory_of_its_own() -> None:
    models = pair()
    learn(models[1], batch())
    models[1].zero_grad()
    for copied in (copy.deepcopy(models[1]), pickle.loads(pickle.dumps(models[1]))):
        assert away(copied) is not away(models[1])
        assert away(copied).model is copied
        learn(copied, batch())
        assert away(copied).memory.nbytes > 0
        assert not away(copied)._leaving or away(models[1])._leaving is not away(copied)._leaving
        models[0].zero_grad()
        learn(models[0], batch())
        equal((models[0], copied))


@body
def a_later_call_replaces_an_earlier_one() -> None:
    _, model = pair()
    assert fsdp2.offload_activations(model, {nn.LayerNorm}) == [
        f"blocks.{place}.norm" for place in range(4)
    ]
    assert not model.blocks[0]._forward_hooks
    assert fsdp2.offload_activations(model, lambda module: False) == []
    assert ATTRIBUTE not in vars(model)
    learn(model, batch())


@body
def the_peak_does_not_grow_with_the_depth() -> None:
    peaks = {}
    for depth in (4, 12):
        for keeps in (True, False):
            model = make(depth)
            if not keeps:
                fsdp2.offload_activations(model, {Block}, min_bytes=1)
            x = batch(1000)
            learn(model, x)
            model.zero_grad()
            gc.collect()
            before = sim.load().counts()[2]
            sim.load().reset_peak()
            learn(model, x)
            peaks[depth, keeps] = sim.load().counts()[3] - before
    of_a_block = (peaks[12, True] - peaks[4, True]) / 8
    more = peaks[12, False] - peaks[4, False]
    assert more < 0.1 * of_a_block * 8  # gradients of more blocks
    assert peaks[12, False] < 5 * of_a_block
