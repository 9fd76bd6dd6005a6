"""Promise: what a unit leaves outside of its output is trained, or an error; never freed memory.

A loss on an attribute, in a list of the caller's, or where nobody looks; what is computed after the
output; the unit's own weight. The reference is the plain model, on the same data on every rank.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.base.torch_autograd import packing_hooks
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import shard_each
from tests.kit.meshes import random_numbers
from tests.kit.parity import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    make_mesh,
)
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

WIDTH = 5
ELSEWHERE: list[Tensor] = []
"""Where no library looks for an output."""


def data() -> Tensor:
    return torch.randn(3, WIDTH, generator=random_numbers(1))


def compare(
    build: Callable[[], Any],
    units: Callable[[Any], list[nn.Module]] = lambda model: [*model.children(), model],
    loss_of: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    **kwargs: Any,
) -> Any:
    """Take three steps of a sharded model and of a plain one; return the sharded one."""
    torch.manual_seed(0)
    model = build()
    reference = copy.deepcopy(model)
    shard_each(*units(model), mesh=make_mesh(), **kwargs)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, reference)]
    for _ in range(3):
        for made, _optimizer in pairs:
            loss_of(made, data()).backward()
        assert_sharded(model)
        assert_same_gradients(model, reference, 1e-5)
        for made, optimizer in pairs:
            optimizer.step()
            made.zero_grad()
    assert_same_parameters(model, reference, 1e-5)
    return model


class InSlots:
    __slots__ = ("_InSlots__loss",)

    def __init__(self, loss: Tensor) -> None:
        self.__loss = loss

    def get(self) -> Tensor:
        return self.__loss


def yielded(loss: Tensor) -> Iterator[Tensor]:
    return (part * 1.0 for part in [loss])


class Leaves(nn.Module):
    """Leaves its loss somewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hide, self.find = WAYS[how]
        self.loss: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.hide(self, self.layer(x).square().mean())

    def taken(self, output: Any) -> Tensor:
        return self.find(self, output)


WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Any], Tensor]]] = {
    "attribute": (
        lambda module, loss: setattr(module, "loss", {"main": [loss]}),
        lambda module, _: module.loss["main"][0],
    ),
    "slots": (lambda _, loss: InSlots(loss), lambda _, output: output.get()),
    "closure": (lambda _, loss: lambda: loss, lambda _, output: output()),
    "default": (lambda _, loss: lambda kept=loss: kept, lambda _, output: output()),
    "generator": (lambda _, loss: yielded(loss), lambda _, output: next(output)),
    "elsewhere": (lambda _, loss: ELSEWHERE.append(loss), lambda *_: ELSEWHERE.pop()),
}
"""How a loss is left somewhere, and found there again."""
PLACES = [place for place in WAYS if place != "elsewhere"]


@pytest.mark.parametrize("how", PLACES)
@ranks(2)
def test_a_root_trains_from_a_loss_that_it_hides(how: str) -> None:
    compare(lambda: Leaves(how), lambda m: [m], lambda m, x: m.taken(m(x)))


class Uses(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Leaves(how)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.taken(self.inner(self.before(x).tanh()))


@pytest.mark.parametrize(
    ("how", "reshard"),
    with_slow(
        itertools.product([*PLACES, "elsewhere"], [None, False, 2]),
        [("attribute", None), ("elsewhere", None), ("elsewhere", 2)],
    ),
)
@ranks(4)
def test_so_does_a_unit_inside_of_another(how: str, reshard: Any) -> None:
    compare(lambda: Uses(how), reshard_after_forward=reshard)


@ranks(2)
def test_gradients_that_nobody_reduces_are_an_error() -> None:
    model = fsdp2.fully_shard(Leaves("elsewhere"), mesh=make_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor().clone() for p in model.parameters()]
    model(data())
    ELSEWHERE.pop().backward()
    with pytest.raises(fsdp2.StateError, match="<root>: a backward left gradients"):
        optimizer.step()
    with pytest.raises(fsdp2.StateError, match="Return the tensors"):
        model(data())
    model.zero_grad()
    model(data())  # no backward came: nothing is lost
    ELSEWHERE.clear()
    model(data())
    ELSEWHERE.clear()
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), old)


# --- after the output -----------------------------------------------------------------------------


class Expert(nn.Module):
    """Computes its auxiliary loss after its output, with a weight of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.where = where
        self.extra: Tensor | None = None

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = self.layer(x).tanh()
        extra = self.gate(y).softmax(-1).square().mean()
        if self.where == "attribute":
            self.extra = extra
        elif self.where != "nowhere":
            (losses if self.where == "argument" else ELSEWHERE).append(extra)
        return y


class Experts(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second = Expert(where), Expert(where)

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.second(self.first(x, losses), losses)
        if self.first.where == "attribute":
            losses = [self.first.extra, self.second.extra]  # type: ignore[list-item]  # set
        elif self.first.where == "elsewhere":
            losses = [ELSEWHERE.pop(), ELSEWHERE.pop()]
        return sum(losses, x.square().mean())


@pytest.mark.parametrize("where", ["attribute", "argument", "elsewhere", "nowhere"])
@pytest.mark.parametrize("reshard", with_slow([None, True, 2], [None, 2]))
@ranks(4)
def test_a_loss_that_is_computed_after_the_output(where: str, reshard: Any) -> None:
    compare(lambda: Experts(where), reshard_after_forward=reshard)


class Router(nn.Module):
    """Keeps a loss of its own, computed before what the unit around it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses = [self.gate(x.tanh()).softmax(-1).square().mean()]
        return self.layer(x)


class Routed(nn.Module):
    """Two units in a row, each with such a module inside, which is a conditional unit or none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Router(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def own_losses(model: Any) -> Tensor:
    return sum(loss for block in model.blocks for loss in block[1].losses)  # type: ignore[no-any-return]  # of tensors


def alone(model: Any, x: Tensor) -> Tensor:
    """The output has no part in the loss."""
    model(x)
    return own_losses(model)


def first(model: Any, x: Tensor) -> Tensor:
    """A backward from the losses comes before the one from the output."""
    loss = model(x)
    own_losses(model).backward(retain_graph=True)
    return loss


def last(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward(retain_graph=True)
    return own_losses(model)


@pytest.mark.parametrize("order", [alone, first, last])
@pytest.mark.parametrize("conditional", [None, False, True])
@ranks(2)
def test_a_loss_that_is_computed_before_the_output(order: Any, conditional: bool | None) -> None:
    def units(model: Any) -> list[nn.Module]:
        for block in model.blocks if conditional is not None else ():
            fsdp2.fully_shard(block[1], mesh=make_mesh(), conditional=conditional)
        return [*model.blocks, model]

    compare(Routed, loss_of=order, units=units)


def summed(model: Any, x: Tensor) -> Tensor:
    """Two forwards, then one backward."""
    return model(x) + model(0.5 * x)


def evaluated(model: Any, x: Tensor) -> Tensor:
    """An evaluation comes between forward and backward."""
    loss = model(x)
    with torch.no_grad():
        model(x)
    return loss


@pytest.mark.parametrize("between", [summed, evaluated])
@pytest.mark.parametrize("where", ["attribute", "elsewhere"])
@ranks(2)
def test_so_does_one_that_waits_while_more_forwards_run(where: str, between: Any) -> None:
    compare(lambda: Experts(where), loss_of=between)


@ranks(2)
def test_only_what_may_be_read_before_a_gather_keeps_its_memory() -> None:
    """While the first graph lives, for one unit of a class; on the wire nothing changes."""
    torch.manual_seed(0)
    for where, keeps in (("attribute", False), ("elsewhere", True)):
        model = Experts(where)
        shard_each(model.first, model.second, model, mesh=make_mesh())
        first, second = (unit_of(unit).own_groups[0] for unit in (model.first, model.second))
        loss = model(data())
        assert not first.is_unsharded
        assert has_memory(first) is keeps
        assert not has_memory(second)
        loss.backward()
        del loss
        assert not has_memory(first)
        for _ in range(2):
            loss = model(data())
            assert not has_memory(first)
            loss.backward()
            assert not has_memory(first)


def has_memory(group: Any) -> bool:
    return group.buffers.whole_memory.untyped_storage().nbytes() > 0


class Solves(nn.Module):
    """An implicit layer: a hook on its output differentiates what is computed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x).tanh()
        start = found.detach().requires_grad_()
        again = self.layer(start).tanh()

        def solve(gradient: Tensor) -> Tensor:
            solved = gradient
            for _ in range(2):
                (back,) = torch.autograd.grad(again, start, solved, retain_graph=True)
                solved = gradient + 0.5 * back
            return solved

        if found.requires_grad:
            found.register_hook(solve)
        return found


class Runs(torch.autograd.Function):
    """Runs a function in its forward: this node is older than the function's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            ctx.start = x.detach().requires_grad_()
            ctx.found = function(ctx.start)
        return ctx.found.detach()  # type: ignore[no-any-return]  # of a context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one output
        torch.autograd.backward(ctx.found, gradient)
        return ctx.start.grad, None


class Wrapped(nn.Module):
    """Its loss lies on an attribute, and is made by such a function."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.found: Any = None

    def forward(self, x: Tensor) -> None:
        self.found = Runs.apply(x * self.gain, lambda y: self.layer(y).tanh())


def found_on(model: Any, x: Tensor) -> Tensor:
    model(x)
    return model.found.square().mean()  # type: ignore[no-any-return]  # a tensor


@pytest.mark.parametrize("conditional", [False, True])
@ranks(2)
def test_an_attribute_made_by_a_function_that_runs_a_unit(conditional: bool) -> None:
    def units(model: Any) -> list[nn.Module]:
        fsdp2.fully_shard(model.layer, mesh=make_mesh(), conditional=conditional)
        return [model]

    compare(Wrapped, loss_of=found_on, units=units)


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Solves(), Solves()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def retained(model: Any, x: Tensor) -> Tensor:
    """One graph, two backwards."""
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    return loss


def reversed_order(model: Any, x: Tensor) -> Tensor:
    """Two graphs, and the younger one goes first."""
    loss = model(x).sum()
    model(0.5 * x).sum().backward()
    return loss


def offloaded(model: Any, x: Tensor) -> Tensor:
    """Hooks of the user's on saved tensors, which ours must not hide."""
    with torch.autograd.graph.save_on_cpu():
        return model(x).sum()


def recomputed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).sum()


RUNS = [retained, reversed_order, offloaded, recomputed]


@pytest.mark.parametrize(
    ("run", "root"),
    with_slow(
        itertools.product(RUNS, [Solver, Solves]), [(retained, Solver), (reversed_order, Solves)]
    ),
)
@ranks(2)
def test_what_a_hook_on_the_output_differentiates(run: Any, root: Any) -> None:
    compare(root, lambda m: [m] if root is Solves else [*m.children(), m], loss_of=run)


class Logs(nn.Linear):
    """Logs what it returns, with operations that autograd records after it."""

    norm = 0.0
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.norm = (y * self.weight[0]).norm().item()
        if self.fails:
            raise ArithmeticError
        return y


@ranks(2)
def test_a_log_keeps_memory_of_one_unit_in_its_first_forward_only() -> None:
    model = nn.Sequential(*[Logs(WIDTH, WIDTH) for _ in range(3)])
    shard_each(*model, model, mesh=make_mesh())
    groups = [unit_of(layer).own_groups[0] for layer in model]
    for kept in ([True, False, False], [False] * 3):
        output = model(data())
        assert [has_memory(group) for group in groups] == kept
        del output
        assert not any(has_memory(group) for group in groups)
    model[1].fails = True
    with pytest.raises(ArithmeticError):
        model(data())
    assert packing_hooks(False) is None  # nodes of other models save as they did before


@ranks(2)
def test_a_graph_that_is_dropped_is_so_at_once_however_its_nodes_saved() -> None:
    """The root stays whole while its graph lives, and no longer: no cycle waits for a collector."""
    model = fsdp2.fully_shard(Logs(WIDTH, WIDTH), mesh=make_mesh())
    for _ in range(3):  # from the second forward on its nodes save by hooks
        output = model(data())
        assert not isinstance(model.weight, DTensor)
        del output
        assert isinstance(model.weight, DTensor)


# --- memory of parameters -------------------------------------------------------------------------


class Gives(nn.Module):
    """Returns its own weight, or a view of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.how = how

    def forward(self) -> Any:
        return GIVEN[self.how](self)


GIVEN: dict[str, Callable[[Any], Any]] = {
    "weight": lambda module: module.weight,
    "view": lambda module: {"a": [module.weight.t()[1:]]},
    "detached": lambda module: module.weight.detach(),
    "frozen": lambda module: (module.frozen, module.weight.sum()),
    "data": lambda module: module.weight.data.view(-1),
}


class Takes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.gives = Gives(how)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = self.gives()
        x = self.layer(x)
        if self.gives.how == "view":
            given = given["a"][0]
        elif self.gives.how == "frozen":
            given, total = given
            x = x * total
        return (x @ given.reshape(-1, WIDTH).t()).square().mean()


@pytest.mark.parametrize(
    ("how", "reshard"),
    with_slow(itertools.product(GIVEN, [None, False, True]), [(how, None) for how in GIVEN]),
)
@ranks(2)
def test_a_unit_may_return_its_own_weight(how: str, reshard: Any) -> None:
    model = compare(lambda: Takes(how), reshard_after_forward=reshard)
    with torch.no_grad():
        expected = model.gives.frozen if how == "frozen" else model.gives.weight
        given = model.gives()
        whole = expected.full_tensor()
    if how in ("weight", "detached"):
        assert torch.equal(given, whole)  # its memory is its own: the unit has given up the rest


class InASet(nn.Linear):
    """Returns its weight where nothing can take its place."""

    def forward(self, x: Tensor) -> Any:
        return {self.weight}, super().forward(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InASet(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own, x = self.inner(x)
        return (x * own.pop().sum()).square().mean()


@ranks(2)
def test_a_weight_in_an_object_is_an_error_unless_it_stays_whole() -> None:
    model = Around()
    shard_each(model.inner, model, mesh=make_mesh())
    with pytest.raises(
        fsdp2.UnsupportedError, match="inner: its forward returned one of its parameters"
    ):
        model(data())
    compare(Around, reshard_after_forward=False)
