"""Promise: ranks may use different parameters of a unit, whatever its inputs and outputs are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.kit.in_turn import advance, shard_each
from tests.kit.local_sgd import LocalSGD
from tests.kit.models import loss_of, seeded
from tests.kit.parity import assert_same_gradients, assert_same_parameters, make_mesh
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow

WIDTH = 13


class InPlace(nn.Module):
    """Updates its input in place, so that no post-backward is reached; may leave its weight out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(29, WIDTH))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x.mul_(1.5)
        return x + torch.tanh(x @ self.weight.T).mean(-1, keepdim=True) if use else x * 1


class Returns(nn.Module):
    """Its output is its input on a rank that does not use its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.child(x) if use else x


class Detaches(Returns):
    """Its output needs no gradient on a rank that does not use its child."""

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.child(x) if use else x.detach()


class Chain(nn.Module):
    """Units in a row: those in `makes`, then one that every rank uses whole."""

    def __init__(self, makes: list[Callable[[], nn.Module]], embeds: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if embeds else nn.Identity()
        self.units = nn.ModuleList(make() for make in makes)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, uses: list[bool]) -> Tensor:
        x = self.embed(x)
        for unit, use in zip(self.units, uses, strict=True):
            x = unit(x, use)
        return self.last(x)


def train(
    makes: list[Callable[[], nn.Module]],
    uses_on: Callable[[int, int], list[bool]],
    *,
    embeds: bool,
    memory: str | None = None,
    conditional: bool = False,
    **kwargs: Any,
) -> None:
    """Train beside the unsharded model; `uses_on(rank, step)` says which units a rank uses."""
    reference, model = (seeded(lambda: Chain(makes, embeds)).double() for _ in range(2))
    mesh = kwargs.pop("mesh", None) or make_mesh()
    for unit in model.units:
        if conditional:
            fsdp2.fully_shard(unit.child, mesh=mesh, conditional=True)
        fsdp2.fully_shard(unit, mesh=mesh, **kwargs)
    fsdp2.fully_shard(model.last, mesh=mesh, **kwargs)
    fsdp2.fully_shard(model, mesh=mesh, **kwargs)
    if memory is not None:
        model.set_memory(memory)
    optimizers = [LocalSGD(m.parameters(), lr=0.1) for m in (model, reference)]
    count, own = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        parts = torch.randn(3 * count, WIDTH, dtype=torch.double).chunk(count)
        losses = [
            loss_of(reference(part.clone(), uses_on(rank, step))) for rank, part in enumerate(parts)
        ]
        torch.stack(losses).mean().backward()
        loss = loss_of(model(parts[own].clone(), uses_on(own, step)))
        torch.testing.assert_close(loss, losses[own], rtol=1e-10, atol=0)
        loss.backward()
        assert_same_gradients(model, reference, 1e-10)
        advance(*optimizers)
    assert_same_parameters(model, reference, 1e-10)


def one_rank(who: int) -> Callable[[int, int], list[bool]]:
    """One rank leaves everything out, from the second step on."""
    return lambda rank, step: [step == 0 or rank != who] * 2


def mixed(rank: int, step: int) -> list[bool]:
    return [(rank + step) % 2 == 0, (rank + step) % 3 != 0]


@products(
    [(InPlace, False), (Returns, True), (Detaches, True)],
    kind=[InPlace, Returns, Detaches],
    embeds=[True, False],
)
@ranks(2, slow(3))
def test_a_rank_that_leaves_out_a_unit(kind: type[nn.Module], embeds: bool) -> None:
    for who in (0, 1):
        train([kind, kind], one_rank(who), embeds=embeds)
    train([kind, kind], mixed, embeds=embeds)


@pytest.mark.parametrize("embeds", with_slow([True, False], [True]))
@ranks(slow(2), 3)
def test_a_conditional_child_that_a_rank_leaves_out(embeds: bool) -> None:
    for kind in (Returns, Detaches):
        train([kind, kind], one_rank(1), embeds=embeds, conditional=True)


@pytest.mark.parametrize("memory", ["low", "fast"])
@pytest.mark.parametrize("kind", [InPlace, Returns, Detaches])
@ranks(slow(2), slow(3))
def test_with_other_memory(kind: type[nn.Module], memory: str) -> None:
    for embeds in (True, False):
        for uses in (one_rank(0), one_rank(1), mixed):
            train([kind, kind], uses, embeds=embeds, memory=memory)


@pytest.mark.parametrize("kind", [InPlace, Returns, Detaches])
@ranks(slow(4))
def test_on_a_replicate_axis(kind: type[nn.Module]) -> None:
    for choice in (None, False):
        train([kind, kind], mixed, embeds=True, mesh=make_mesh(2, 2), reshard_after_forward=choice)


# --- graphs that are cut inside of nested units ---------------------------------------------------


class Cuts(nn.Module):
    """Calls units; detaches the outputs of those whose letters are in `cut`."""

    recomputes = False

    def add(self, name: str, unit: nn.Module, x: Tensor, cut: str, *args: str) -> Tensor:
        if self.recomputes and not args:
            y = checkpoint(unit, x, use_reentrant=False)
        else:
            y = unit(x, *args)
        return x + torch.tanh(y.detach() if name in cut else y)


class Outer(Cuts):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in "abc")

    def forward(self, x: Tensor, cut: str) -> Tensor:
        for name in "abc":
            x = self.add(name, getattr(self, name), x, cut)
        return x


class Nest(Cuts):
    """Units inside of a unit, and a tower whose input needs no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tower = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer = Outer()
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, cut: str) -> Tensor:
        y = self.add("f", self.first, x, cut)
        y = self.add("o", self.outer, y, cut, cut)
        return self.last(y + self.add("t", self.tower, x, cut))


CUTS = ["c", "b", "o", "f", "t", "ac", "abc", "to", "ft", "fot"]


def shard_nest(model: Any, kind: str, mesh: Any, **kwargs: Any) -> None:
    outer = model.outer
    inner = [[outer.a, outer.b], outer.c] if kind == "list" else [outer.a, outer.b, outer.c]
    shard_each(*inner, outer, model.tower, model.first, model, mesh=mesh, **kwargs)


def train_nest(kind: str, how: str, cuts: list[str], *, mesh: Any = None, **kwargs: Any) -> None:
    reference, model = (seeded(Nest).double() for _ in range(2))
    for module in model.modules():
        module.recomputes = how == "recompute"
    shard_nest(model, kind, mesh or make_mesh(), **kwargs)
    optimizers = [LocalSGD(m.parameters(), lr=0.1) for m in (model, reference)]
    count, own = dist.get_world_size(), dist.get_rank()
    for step, cut in enumerate(cuts):
        who = step % count
        expected, losses = [], []
        for call in range(2 if how in ("sum", "each", "unsynced") else 1):
            parts = torch.randn(3 * count, WIDTH, dtype=torch.double).chunk(count)
            ways = [cut if (rank == who) is (call == 0) else "" for rank in range(count)]
            each = [loss_of(reference(p, way)) for p, way in zip(parts, ways, strict=True)]
            expected.append(torch.stack(each).mean())
            losses.append(loss_of(model(parts[own], ways[own])))
        if how == "sum":
            expected, losses = [torch.stack(expected).sum()], [torch.stack(losses).sum()]
        for index, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
            if how == "unsynced":
                model.set_requires_gradient_sync(index > 0)
            for again in (True, False) if how == "retain" else (False,):
                loss.backward(retain_graph=again)
                wanted.backward(retain_graph=again)
        assert_same_gradients(model, reference, 1e-10)
        advance(*optimizers)
    assert_same_parameters(model, reference, 1e-10)


@pytest.mark.parametrize(
    "how", with_slow(["once", "sum", "each", "retain", "unsynced", "recompute"], default=["sum"])
)
@pytest.mark.parametrize("kind", with_slow(["units", "list"], default=["units"]))
@ranks(2, 3)
def test_a_graph_that_one_rank_cuts_inside_of_units(kind: str, how: str) -> None:
    train_nest(kind, how, CUTS)


@pytest.mark.parametrize("how", ["once", "sum"])
@pytest.mark.parametrize("choice", [True, False, 2])
@ranks(slow(4))
def test_a_cut_graph_on_a_replicate_axis(choice: bool | int, how: str) -> None:
    train_nest("units", how, CUTS, mesh=make_mesh(2, 2), reshard_after_forward=choice)


class EnteredFirst(nn.Module):
    """A unit that is entered before any is left, and whose input may need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses_body: bool) -> Tensor:
        return x + self.inner(self.body(x) if uses_body else x * 1)


class BeginsWithIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = EnteredFirst(), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, uses_body: bool) -> Tensor:
        return self.last(self.first(x, uses_body))


@pytest.mark.parametrize("differs", ["body", "input"])
@pytest.mark.parametrize("choice", with_slow([True, False], default=[True]))
@ranks(2, slow(3))
def test_a_sum_of_forwards_that_one_rank_begins_otherwise(choice: bool, differs: str) -> None:
    """A gradient leaves the units that were entered first on one rank, and ends there on others."""
    reference, model = (seeded(BeginsWithIt).double() for _ in range(2))
    shard_each(model.first.inner, model.first, model, reshard_after_forward=choice)
    count, own = dist.get_world_size(), dist.get_rank()
    for calls in itertools.product([True, False], repeat=3):  # does rank 0 differ in this call?
        sums = []
        for trained, its_ranks in ((reference, range(count)), (model, [own])):
            torch.manual_seed(0)
            xs = torch.randn(3, count, 2, WIDTH, dtype=torch.double)
            losses = []
            for is_other, parts in zip(calls, xs, strict=True):
                for rank in its_ranks:
                    is_here = is_other and rank == 0
                    x = parts[rank].clone().requires_grad_(is_here and differs == "input")
                    y = trained(x, not (is_here and differs == "body"))
                    losses.append(loss_of(y) / len(its_ranks))
            sums.append(torch.stack(losses).sum())
            sums[-1].backward()
        assert_same_gradients(model, reference, 1e-10)
        for module in (model, reference):
            module.zero_grad()


@ranks(2)
def test_outputs_that_no_rank_uses_have_no_gradient() -> None:
    """As in a plain model: None, not zeros; and each first backward moves what the forward did."""
    model: Any = seeded(Nest).double()
    shard_nest(model, "units", make_mesh())
    loss_of(model(torch.randn(3, WIDTH, dtype=torch.double), "o")).backward()
    assert all(p.grad is None for p in model.outer.parameters())
    assert all(p.grad is not None for p in model.last.parameters())
