"""Sharded gradients are reused while nobody else holds them, and never under somebody's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import GradientBuffer, accumulate
from tests.unit._loopback import LoopbackGroup, fake_process_group, local_of, reduced


@pytest.fixture(autouse=True, scope="module")
def _meshes() -> Iterator[None]:
    with fake_process_group(4):
        yield


def by_columns(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[1].double()
    return model


CASES: dict[str, Callable[[], LoopbackGroup]] = {
    "fp32": lambda: LoopbackGroup(nn.Linear(4, 5), 2),
    "one rank": lambda: LoopbackGroup(nn.Linear(4, 5), 1),
    "replicas": lambda: LoopbackGroup(nn.Linear(4, 5), 2, replicate=2),
    "off dim 0": lambda: LoopbackGroup(nn.Linear(4, 5), 2, placement_fn=by_columns),
    "two dtypes": lambda: LoopbackGroup(mixed(), 2),
    "bf16": lambda: LoopbackGroup(
        nn.Linear(4, 5), 2, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
}
KINDS = pytest.mark.parametrize("case", CASES)


def whole_gradients(ranks: LoopbackGroup, value: float) -> None:
    """Gather parameters, and leave gradients of `value` in them."""
    ranks.gather()
    for module in ranks.modules:
        for param in module.parameters():
            param.grad = torch.full_like(param, value)
    ranks.reshard()


def backward(ranks: LoopbackGroup, value: float) -> None:
    """Do what a backward does in which every gradient is `value`."""
    whole_gradients(ranks, value)
    ranks.reduce()


def gradients(ranks: LoopbackGroup) -> list[DTensor]:
    return [param.grad for module in ranks.modules for param in module.parameters()]


def zero_grad(ranks: LoopbackGroup) -> None:
    for module in ranks.modules:
        module.zero_grad()


def pointers(ranks: LoopbackGroup) -> list[int]:
    return [local_of(grad).data_ptr() for grad in gradients(ranks)]


def assert_all(tensors: list[Any], value: float) -> None:
    for tensor in tensors:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        assert local.eq(value).all()


@KINDS
def test_gradients_that_nobody_holds_are_reused(case: str) -> None:
    ranks = CASES[case]()
    backward(ranks, 1.0)
    first, ids = pointers(ranks), [id(grad) for grad in gradients(ranks)]
    zero_grad(ranks)
    backward(ranks, 2.0)
    assert_all(gradients(ranks), 2.0)
    if case != "one rank":
        assert pointers(ranks) == first
    assert [id(grad) for grad in gradients(ranks)] == ids


@torch.no_grad()
def without_grad(grad: DTensor) -> Tensor:
    """Return the local tensor: without gradients `to_local` makes no view of it."""
    return grad.to_local()


def saved_by_autograd(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor).requires_grad_() * tensor


HOLDS: dict[str, Callable[[DTensor], Any]] = {
    "the gradient": lambda grad: grad,
    "its local tensor": lambda grad: grad.to_local(),
    "its local tensor itself": without_grad,
    "a view of it": lambda grad: grad.to_local().flatten()[1:],
    "a detached view": lambda grad: grad.detach(),
    "an alias by set_": lambda grad: torch.empty(0).to(grad.dtype).set_(grad.to_local()),
    "an array": lambda grad: (
        grad.to_local().float().numpy() if grad.dtype is torch.bfloat16 else grad.to_local().numpy()
    ),
    "a dlpack capsule": lambda grad: torch.utils.dlpack.to_dlpack(grad.to_local()),
    "autograd": saved_by_autograd,
    "autograd, its local tensor": lambda grad: saved_by_autograd(grad.to_local()),
    "autograd, its local tensor itself": lambda grad: saved_by_autograd(without_grad(grad)),
}


def values_of(held: Any) -> Tensor:
    if isinstance(held, Tensor):
        if held.grad_fn is not None:
            leaf = held.grad_fn.next_functions[0][0].variable
            (leaf_grad,) = torch.autograd.grad(held, leaf, torch.ones_like(held))
            return values_of(leaf_grad)
        return local_of(held) if isinstance(held, DTensor) else held
    if type(held).__name__ == "PyCapsule":
        return torch.from_dlpack(held)
    return torch.from_numpy(held)


def release(ranks: LoopbackGroup) -> list[bool]:
    """Do what a forward does to gradients on a device; say where memory was given back."""
    done = []
    for group in ranks.groups:
        buffer = group.reducer._buffer
        assert buffer is not None
        done.append(buffer.is_free)
        if buffer.is_free:
            buffer.release()
            assert all(storage.nbytes() == 0 for storage in buffer._storages)
    return done


@KINDS
def test_gradients_come_back_to_memory_that_was_released(case: str) -> None:
    ranks = CASES[case]()
    backward(ranks, 1.0)
    ids = [id(grad) for grad in gradients(ranks)]
    for value in (2.0, 3.0):
        zero_grad(ranks)
        assert all(release(ranks))
        backward(ranks, value)
        assert_all(gradients(ranks), value)
        assert [id(grad) for grad in gradients(ranks)] == ids
        holding = GradientBuffer.holding(ranks.parameters(0)[0].grad)
        assert holding is ranks.groups[0].reducer._buffer


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("hold", HOLDS)
@KINDS
def test_what_a_user_holds_keeps_its_values(case: str, hold: str, releases: bool) -> None:
    ranks = CASES[case]()
    for _ in range(2):
        backward(ranks, 1.0)
        zero_grad(ranks)
    backward(ranks, 1.0)
    held = [HOLDS[hold](grad) for grad in gradients(ranks)]
    zero_grad(ranks)
    if releases:
        assert not any(release(ranks))
    backward(ranks, 2.0)
    assert_all(gradients(ranks), 2.0)
    assert_all([values_of(h) for h in held], 1.0)


@KINDS
def test_gradients_that_were_not_cleared_add_up(case: str) -> None:
    ranks = CASES[case]()
    for _ in range(3):
        backward(ranks, 1.0)
    assert_all(gradients(ranks), 3.0)
    zero_grad(ranks)
    backward(ranks, 1.0)
    assert_all(gradients(ranks), 1.0)


def test_one_gradient_held_of_several_is_enough() -> None:
    ranks = CASES["fp32"]()
    backward(ranks, 1.0)
    kept = ranks.modules[0].bias.grad
    zero_grad(ranks)
    backward(ranks, 2.0)
    assert_all([kept], 1.0)
    assert_all(gradients(ranks), 2.0)


def test_two_reductions_of_one_group_in_flight() -> None:
    ranks = CASES["fp32"]()
    started = []
    for value in (1.0, 2.0):
        whole_gradients(ranks, value)
        started.append(ranks.each(reduced))
        for reduction in started[-1]:
            reduction.start()
    for reductions in started:
        for reduction in reductions:
            reduction.advance()
            reduction.finish()
            reduction.wait()
    assert_all(gradients(ranks), 3.0)


def test_gradients_of_a_discarded_step_do_not_come_back() -> None:
    ranks = CASES["fp32"]()
    backward(ranks, 1.0)
    zero_grad(ranks)
    ranks.gather()
    for module in ranks.modules:
        module.weight.grad = torch.ones(5, 4)
    started = ranks.each(reduced)
    for reduction in started:
        reduction.start()
    for reduction in started:
        reduction.wait()
    ranks.each(lambda group: group.reducer.discard())
    ranks.reshard()
    assert gradients(ranks) == [None] * 4
    backward(ranks, 2.0)
    assert_all(gradients(ranks), 2.0)


def test_gradients_can_be_copied_and_pickled_as_any_tensor(tmp_path: Any) -> None:
    ranks = CASES["fp32"]()
    backward(ranks, 1.0)
    for grad in gradients(ranks):
        local = local_of(grad)
        torch.save(local.clone(), tmp_path / "grad")
        assert torch.equal(torch.load(tmp_path / "grad"), local)
        assert torch.equal(grad.clone().to_local(), local)
        assert grad.is_contiguous()


# --- what autograd does to a leaf -----------------------------------------------------------------


def test_hooks_run_in_autograds_order() -> None:
    param = nn.Parameter(torch.zeros(2))
    seen: list[str] = []
    param.register_hook(lambda grad: seen.append("hook"))
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(
        lambda p: seen.append(f"accumulated {p.grad.tolist()}")
    )
    accumulate([param], [torch.ones(2)])
    accumulate([param], [torch.ones(2)])
    assert seen == ["hook", "accumulated [2.0, 2.0]", "hook", "accumulated [4.0, 4.0]"]


def test_a_hook_that_clears_the_gradient() -> None:
    """What an optimizer step inside backward does."""
    ranks = CASES["fp32"]()
    stepped: list[float] = []

    def step(param: Tensor) -> None:
        stepped.append(local_of(param.grad).flatten()[0].item())
        param.grad = None

    for param in ranks.parameters(0):
        param.register_post_accumulate_grad_hook(step)
    backward(ranks, 1.0)
    backward(ranks, 2.0)
    assert stepped == [1.0, 1.0, 2.0, 2.0]
    assert all(param.grad is None for param in ranks.parameters(0))


def test_a_hook_of_the_user_on_the_sharded_parameter_changes_the_gradient() -> None:
    ranks = CASES["fp32"]()
    for param in ranks.parameters(0):
        param.register_hook(lambda grad: grad * 10.0)
    backward(ranks, 1.0)
    assert_all([p.grad for p in ranks.parameters(0)], 10.0)
    assert_all([p.grad for p in ranks.parameters(1)], 1.0)


def test_freezing_between_steps_plans_again() -> None:
    ranks = CASES["fp32"]()
    backward(ranks, 1.0)
    zero_grad(ranks)
    for module in ranks.modules:
        module.weight.requires_grad_(False)
    ranks.each(ParamGroup.inspect)
    ranks.gather()
    for module in ranks.modules:
        module.bias.grad = torch.full((5,), 2.0)
    ranks.reduce()
    ranks.reshard()
    assert_all([module.bias.grad for module in ranks.modules], 2.0)
    assert all(module.weight.grad is None for module in ranks.modules)
