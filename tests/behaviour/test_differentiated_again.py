"""Promise: a forward may be differentiated several times, and gradients may be differentiated.

Several times: inside one backward, as implicit layers do. Gradients: penalties, through units that
update their inputs in place or hide them. The reference is the plain model on every rank's data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.behaviour.test_memory import recording
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import random_numbers
from tests.kit.parity import assert_same, assert_same_gradients, assert_sharded, make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow

WIDTH = 5  # no number of ranks here divides it
Loss = Callable[[nn.Module, Tensor], Tensor]


def data(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=random_numbers(rank)).requires_grad_()


def compare(
    build: Callable[[], nn.Module],
    loss_of: Loss,
    units: Callable[[Any], list[nn.Module]] = lambda model: [*model.children(), model],
    **kwargs: Any,
) -> nn.Module:
    """Take two steps of a sharded model and of a plain one; return the sharded one."""
    torch.manual_seed(0)
    model = build()
    reference = copy.deepcopy(model)
    shard_each(*units(model), mesh=make_mesh(), **kwargs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
    for _ in range(2):
        inputs = [data(rank) for rank in range(dist.get_world_size())]
        sum(loss_of(reference, x) / len(inputs) for x in inputs).backward()
        own = data(dist.get_rank())
        loss_of(model, own).backward()
        assert_sharded(model)
        assert_same_gradients(model, reference, 1e-5)
        expected = inputs[dist.get_rank()].grad
        assert (own.grad is None) == (expected is None)
        if own.grad is not None and expected is not None:
            assert_same(own.grad, expected * len(inputs), "gradient of the input", 1e-5)
        advance(*optimizers)
    return model


# --- several times in one backward ----------------------------------------------------------------


class Cell(nn.Module):
    """What an implicit layer finds a fixed point of."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(WIDTH, WIDTH)
        self.input = nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.state(z) + self.input(x))


class Solve(torch.autograd.Function):
    """Iterate on the gradient of a forward; ``tensors`` are its input and its output."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tensors: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        ctx.tensors = tensors
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return iterate(*ctx.tensors, grad), None


def iterate(entered: Tensor, left: Tensor, grad: Tensor, times: int = 4) -> Tensor:
    solution = grad
    for _ in range(times):
        (step,) = torch.autograd.grad(left, entered, solution, retain_graph=True)
        solution = grad + 0.5 * step
    return solution


class Implicit(nn.Module):
    """A deep equilibrium model: its backward solves for a fixed point, too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.cell = Cell()
        self.head = nn.Linear(WIDTH, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                z = self.cell(z, x)
        if self.how == "one forward":
            entered = z.requires_grad_()
            left = self.cell(entered, x)
            z = left * 1.0
        else:
            z = self.cell(z, x)
            entered = z.detach().clone().requires_grad_()
            left = self.cell(entered, x)
        if self.how == "function":
            z = Solve.apply(z, (entered, left))
        else:
            z.register_hook(lambda grad: iterate(entered, left, grad))
        return self.head(z)


@pytest.mark.parametrize("how", ["hook", "function", "one forward"])
@ranks(2)
def test_a_forward_is_differentiated_many_times_inside_a_backward(how: str) -> None:
    compare(lambda: Implicit(how), lambda model, x: model(x).square().mean())


@ranks(3)
def test_so_is_one_of_a_root_inside_the_backward_of_another() -> None:
    torch.manual_seed(0)
    plain = Implicit("hook")
    model = copy.deepcopy(plain)
    for unit in (model.cell, model.head):  # each is a root: what contains them is no unit
        fsdp2.fully_shard(unit, mesh=make_mesh())
    x = data(0)  # the same on every rank, for what no unit holds
    for made in (plain, model):
        made(x).square().mean().backward()
    for name in ("cell", "head"):
        assert_same_gradients(getattr(model, name), getattr(plain, name), 1e-5)


class SolvesAtItsEnd(nn.Module):
    """Returns what its inner unit returned, with a hook that comes before those of any unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = self.cell(x * self.gain)
        entered = z.detach().requires_grad_()
        left = self.cell(entered)
        z.register_hook(lambda grad: iterate(entered, left, grad))
        return z


@pytest.mark.parametrize("conditional", [False, True])
@ranks(2)
def test_a_solver_may_run_before_a_backward_reaches_its_root(conditional: bool) -> None:
    torch.manual_seed(0)
    model = SolvesAtItsEnd()
    reference = copy.deepcopy(model)
    fsdp2.fully_shard(model.cell, mesh=make_mesh(), conditional=conditional)
    fsdp2.fully_shard(model, mesh=make_mesh())
    for made in (model, reference):
        loss = made(data(0)).square().mean()
        for again in (True, False):
            loss.backward(retain_graph=again)
    assert_same_gradients(model, reference, 1e-5)


@ranks(2)
def test_a_solver_in_backward_reduces_once() -> None:
    """What it differentiates again is gathered again, and reduced with the rest."""
    torch.manual_seed(0)
    model = Implicit("hook")
    shard_each(model.before, model.cell, model.head, model, mesh=make_mesh())
    model(data(0)).square().mean().backward()
    with recording() as seen:
        model(data(0)).square().mean().backward()
    kinds = [(event.kind, event.phase) for event in seen if event.fqn == "cell"]
    assert kinds.count(("reduce", "backward")) == 1
    assert kinds.count(("unshard", "backward")) == 5  # four of the solver, one of the rest


class Ends(nn.Module):
    """Ends in the layer that its hook solves for, and holds no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.cell = Cell()

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.before(x)
        z = self.cell(x, x)
        entered = z.detach().requires_grad_()
        left = self.cell(entered, x.detach())
        z.register_hook(lambda grad: iterate(entered, left, grad, times))
        return z.square().mean()


@ranks(2)
def test_a_solver_runs_as_often_as_its_rank_needs_if_parameters_stay_whole() -> None:
    """The backward around it ends once, on all ranks, wherever it meets the first unit."""
    torch.manual_seed(0)
    model = Ends()
    reference = copy.deepcopy(model)
    shard_each(model.before, model.cell, model, mesh=make_mesh(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        for rank in range(dist.get_world_size()):
            (reference(data(rank), 1 + rank) / dist.get_world_size()).backward()
        loss = model(data(dist.get_rank()), 1 + dist.get_rank())
        with recording() as seen:
            loss.backward()
        assert [event.kind for event in seen].count("reduce") == 2
        assert_same_gradients(model, reference, 1e-5)


# --- gradients of gradients -----------------------------------------------------------------------


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x * 1).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


class Box:
    """Holds a tensor where nobody looks."""

    __slots__ = ("_of",)

    def __init__(self, tensor: Tensor) -> None:
        self._of = lambda: tensor

    @property
    def tensor(self) -> Tensor:
        return self._of()


class Layer(nn.Module):
    """Linear, after what a case does to the input."""

    def __init__(self, inside: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inside = inside

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(nn.functional.linear(self.inside(x), self.weight)) * self.scale


class Around(nn.Module):
    """A unit around another whose input has the same base."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


def rows_of_base(x: Tensor) -> Tensor:
    """Update the caller's tensor through a view that is not the input."""
    (x if x._base is None else x._base)[:2].mul_(0.5)
    return x


INPUTS: dict[str, Callable[[Any], Tensor]] = {
    "updated": lambda x: x.mul_(0.5),
    "updated twice": lambda x: x.mul_(0.5).add_(0.25),
    "updated by rows": lambda x: x[1:].mul_(0.5).sum() + x,
    "base updated": rows_of_base,
    "read, then updated": lambda x: x * 3.0 + x.mul_(0.5),
    "boxed": lambda box: box.tensor,
}


class Boxing(nn.Sequential):
    """Hides the input of each module."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(Box(x))
        return x


@pytest.mark.parametrize("kind", ["alone", "row", "nested", slow("tied")])
@pytest.mark.parametrize("name", INPUTS)
@ranks(2)
def test_a_penalty_goes_through_inputs_that_are_updated_or_hidden(name: str, kind: str) -> None:
    def build() -> nn.Module:
        layers: list[Any] = [Layer(INPUTS[name]) for _ in range(1 if kind == "alone" else 3)]
        if kind == "nested":
            layers = [Around(layer) for layer in layers]
        if kind == "tied":
            layers[1].weight = layers[0].weight
        return (Boxing if name == "boxed" else nn.Sequential)(*layers)

    def units(model: Any) -> list[nn.Module]:
        if kind == "nested":
            return [*(layer.inner for layer in model), *model, model]
        return [model] if kind == "tied" else [*model, model]

    compare(build, penalty, units)


@ranks(2)
def test_a_unit_is_resharded_between_a_penaltys_backwards() -> None:
    """Only what the first backward ends in stays whole: it is where the second begins."""
    torch.manual_seed(0)
    model = Boxing(*(Layer(INPUTS["boxed"]) for _ in range(4)))
    shard_each(*model, model, mesh=make_mesh())
    x = data(0)
    penalty(model, x).backward()
    with recording() as seen:
        loss = penalty(model, x)
        whole = [layer for layer in model if unit_of(layer).is_unsharded]
        loss.backward()
    assert len(whole) <= 1
    gathers = [event.fqn for event in seen if event.kind == "unshard"]
    assert gathers.count("2") == 3  # a forward and two backwards
