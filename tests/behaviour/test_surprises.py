"""Promise: what users do around a step, on purpose or not, changes nothing silently.

Each case was once found to train wrong, here or elsewhere; the reference is the plain model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.base.containers import visit_tensors
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import random_numbers
from tests.kit.parity import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    make_mesh,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = x.tanh()
        return x


def build(
    make: Callable[[], Any] = Net,
    units: Callable[[Any], list[Any]] = lambda model: [*model.blocks, model],
    mesh: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return a sharded model (blocks, then the root) and its plain twin."""
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    shard_each(*units(model), mesh=mesh or make_mesh(), **kwargs)
    return model, reference


def batch(seed: int) -> Tensor:
    """The same on every rank, so the mean over ranks is each rank's own gradient."""
    return torch.randn(3, WIDTH, generator=random_numbers(seed))


def compare(model: nn.Module, reference: nn.Module) -> None:
    assert_sharded(model)
    assert_same_gradients(model, reference)
    assert_same_parameters(model, reference)


def train(model: nn.Module, reference: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        for module in (model, reference):
            module(batch(seed)).square().sum().backward()
        compare(model, reference)
        for module in (model, reference):
            torch.optim.SGD(module.parameters(), lr=0.05).step()
            module.zero_grad()
        compare(model, reference)


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@ranks(2)
def test_one_rank_alone_keeps_a_loss(rank: int, reshard_after_forward: bool | None) -> None:
    """When a graph dies must not decide what a rank reduces, or when."""
    model, reference = build(reshard_after_forward=reshard_after_forward)
    kept = []
    for seed in range(3):
        validation = model(batch(seed + 100)).sum()  # with gradients, but no backward
        if rank == 0:
            kept.append(validation)
        del validation
        train(model, reference, seed)
    assert len(kept) == (3 if rank == 0 else 0)


@ranks(2)
def test_checkpointed_units_still_reshard_in_later_steps() -> None:
    model, reference = build()
    model.checkpoints = True
    for seed in range(3):
        output = model(batch(seed))
        assert isinstance(model.blocks[0].weight, DTensor), "whole after forward"
        output.square().sum().backward()
        reference(batch(seed)).square().sum().backward()
        compare(model, reference)
        with torch.no_grad():
            model(batch(seed))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for module in (model, reference):
            torch.optim.SGD(module.parameters(), lr=0.05).step()
            module.zero_grad()


@ranks(2)
def test_an_exception_that_the_model_catches() -> None:
    model, reference = build()

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].register_forward_hook(fail, prepend=True)
    forward = Net.forward

    def careful(self: Net, x: Tensor) -> Tensor:
        x = self.inp(x)
        try:
            return self.blocks[1](x)
        except ZeroDivisionError:
            return self.blocks[0](x)

    type(model).forward = careful  # type: ignore[method-assign]
    try:
        model(batch(0)).sum().backward()
        assert isinstance(model.blocks[1].weight, DTensor)
    finally:
        type(model).forward = forward  # type: ignore[method-assign]
        handle.remove()
    model.zero_grad()
    train(model, reference, 0, 1)


@ranks(2)
def test_a_group_of_which_only_one_module_runs() -> None:
    model, reference = build(units=lambda m: [[*m.blocks], m])
    model.blocks, both = model.blocks[:1], model.blocks
    reference.blocks = reference.blocks[:1]
    for seed in range(2):
        with torch.no_grad():
            model(batch(seed))
        assert all(isinstance(p, DTensor) for p in both.parameters())
        train(model, reference, seed)


@ranks(2)
def test_functional_call_inside_a_checkpoint() -> None:
    model, reference = build()
    for module in (model, reference):
        values = {name: param * 0.5 for name, param in module.named_parameters()}

        def run(x: Tensor, module: nn.Module = module, values: Any = values) -> Any:
            return torch.func.functional_call(module, values, (x,))

        checkpoint(run, batch(0), use_reentrant=False).square().sum().backward()
    compare(model, reference)


@ranks(2)
def test_zero_grad_between_forward_and_backward() -> None:
    model, reference = build()
    for seed in range(3):
        for module in (model, reference):
            loss = module(batch(seed)).square().sum()
            module.zero_grad()
            loss.backward()
        compare(model, reference)


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@ranks(2)
def test_a_step_after_a_forward_that_kept_parameters(reshard_after_forward: bool | None) -> None:
    """Parameters that stay whole must not outlive the values that they were gathered from."""
    model, reference = build(reshard_after_forward=reshard_after_forward)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    for seed in range(2):
        for module, optimizer in zip((model, reference), optimizers, strict=True):
            module(batch(seed)).square().sum().backward()
            module(batch(seed + 10)).sum()  # with gradients, but no backward
            with torch.no_grad():
                module(batch(seed + 20))
            advance(optimizer)
        torch.testing.assert_close(model(batch(7)), reference(batch(7)), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_freezing_while_parameters_are_whole() -> None:
    model, reference = build()
    for module in (model, reference):
        module(batch(0)).sum()  # no backward: the root's parameters stay whole
        module.inp.requires_grad_(False)
    train_output = [m(batch(1)).square().sum().backward() for m in (model, reference)]
    assert train_output == [None, None]
    model.reshard()
    compare(model, reference)
    for module in (model, reference):
        module.inp.requires_grad_(True)
        module.zero_grad()
    train(model, reference, 2)


@ranks(2)
def test_freezing_what_was_made_whole_by_hand() -> None:
    """What is said of a whole parameter is said of its shard."""
    model, reference = build()
    model.unshard()
    for module in (model, reference):
        module.inp.requires_grad_(False)
    model.reshard()
    train_output = [m(batch(1)).square().sum().backward() for m in (model, reference)]
    assert train_output == [None, None]
    compare(model, reference)
    assert not any(parameter.requires_grad for parameter in model.inp.parameters())


@ranks(2)
def test_values_swapped_between_forward_and_backward() -> None:
    """Averaged weights for an evaluation, then back, while a graph waits for its backward."""
    model, reference = build()
    train(model, reference, 0)
    loss = model(batch(1)).square().sum()
    own = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict({k: v * 0.5 for k, v in own.items()}, assign=True)
    with torch.no_grad():
        model(batch(2))
    model.load_state_dict(own, assign=True)
    loss.backward()
    reference(batch(1)).square().sum().backward()
    compare(model, reference)


class Forces(nn.Module):
    """The derivative of a unit's energy, inside a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = (self.energy(x) * self.scale).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force * self.scale


@ranks(2)
def test_gradients_of_inputs_inside_a_forward() -> None:
    model, reference = build(Forces, lambda m: [m.energy, m])
    train(model, reference, 0, 1)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": norm, "linear": nn.Linear(WIDTH, WIDTH)}) for _ in range(3)
        )
        self.units = nn.ModuleList(nn.Sequential(b["norm"], b["linear"]) for b in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


@ranks(2)
def test_one_module_inside_three_units() -> None:
    model, reference = build(Shared, lambda m: [*m.units, m])
    train(model, reference, 0, 1)


@ranks(4)
def test_a_partial_reduction_is_not_forgotten() -> None:
    """Reduced over shards with one head, then over replicas with the other."""
    heads, reference = build(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        lambda m: [*m, m],
        make_mesh(2, 2),
    )
    heads(batch(0))
    heads.zero_grad()
    heads.set_requires_all_reduce(False)
    heads[0](batch(1)).square().sum().backward()
    heads.set_requires_all_reduce(True)
    heads[1](batch(2)).square().sum().backward()
    reference[0](batch(1)).square().sum().backward()
    reference[1](batch(2)).square().sum().backward()
    compare(heads, reference)


@ranks(2)
def test_a_handle_that_is_waited_for_too_late() -> None:
    model, reference = build()
    model(batch(0))
    model.blocks[0].reshard()
    handle = model.blocks[0].unshard(async_op=True)
    train(model, reference, 1)
    handle.wait()
    assert isinstance(model.blocks[0].weight, DTensor)
    train(model, reference, 2)


class Batch(dict[str, Tensor]):
    pass


@ranks(1)
def test_inputs_of_the_caller_stay_as_they_are() -> None:
    class Reader(nn.Linear):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given["x"])

    model = Reader(WIDTH, WIDTH)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy)
    given = Batch(x=batch(0))
    assert model(given).dtype is torch.bfloat16
    assert given["x"].dtype is torch.float32


@dataclass
class Memory:
    x: Any
    found: Any = None


class Fills(nn.Linear):
    """Puts what it computes into its argument, and returns nothing."""

    def forward(self, given: Any, *, fails: bool = False) -> None:
        inner = given[0] if isinstance(given, tuple) else given
        if isinstance(inner, Memory):
            inner.found = super().forward(inner.x)
        elif isinstance(inner, list):
            inner.insert(0, super().forward(inner[-1]))
            inner.insert(0, "moved")
        else:
            inner["found"] = [super().forward(inner["x"])]
        if fails:
            raise ValueError("on purpose")


class FillsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fills(WIDTH, WIDTH) for _ in range(2))

    def forward(self, given: Any) -> None:
        for layer in self.layers:
            layer(given)


FILLED: dict[str, Any] = {
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "dict of a class": lambda x: Batch(x=x),
    "dataclass": Memory,
    "in a tuple": lambda x: ([x], x),
}


def filled(given: Any) -> list[Tensor]:
    """Return the tensors in an argument after a forward."""
    found: list[Tensor] = []
    visit_tensors(found.append, given)
    return found


@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@ranks(2)
def test_what_a_unit_puts_into_its_argument(kind: str, param_dtype: torch.dtype | None) -> None:
    """It reaches the caller, gradients come in through it, and the caller's tensors stay."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=torch.float32)
    model, reference = build(FillsTwice, lambda m: [*m.layers, m], mp_policy=policy)
    rtol = 2e-2 if param_dtype else None
    for _ in range(2):
        losses = []
        for each in (model, reference):
            x = torch.ones(2, WIDTH, requires_grad=True)
            given = FILLED[kind](x)
            each(given)
            found = filled(given)
            assert any(tensor is x for tensor in found), "the caller's tensor is gone"
            assert all(tensor.dtype is torch.float32 for tensor in found)
            losses.append(torch.stack(found).square().mean())
            losses[-1].backward()
        assert_same(losses[0], losses[1], "loss", rtol)
        assert_same_gradients(model, reference, rtol)


@ranks(1)
def test_a_forward_that_raises_gives_the_argument_back() -> None:
    model = Fills(WIDTH, WIDTH)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy)
    x = batch(0)
    given = {"x": x}
    with pytest.raises(ValueError, match="on purpose"):
        model(given, fails=True)
    assert given["x"] is x
    assert len(given) == 2


@ranks(1)
def test_a_class_that_cannot_have_a_subclass_is_refused_first() -> None:
    class Strict(nn.Linear):
        def __init_subclass__(cls, *, key: int) -> None:
            pass

    model = Strict(WIDTH, WIDTH)
    with pytest.raises(fsdp2.ConfigError, match="Strict"):
        fsdp2.fully_shard(model, mesh=make_mesh())
    assert type(model) is Strict
    assert not isinstance(model.weight, DTensor)
    with pytest.raises(fsdp2.ConfigError, match="shard_placement_fn"):
        fsdp2.fully_shard(nn.Linear(2, 2), mesh=make_mesh(), shard_placement_fn=3)  # type: ignore[arg-type]


class CastsItsRouter(nn.Module):
    """A mixture of experts' habit: the router computes in fp32, whatever the policy says."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        self.router.to(torch.float32)
        return self.router(hidden.float())


@pytest.mark.parametrize("reshard_after_forward", [None, True])
@ranks(2)
def test_a_forward_that_casts_its_own_parameters(reshard_after_forward: bool | None) -> None:
    """It computes with what it cast, gets gradients, and sees new values in the next step."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    model, reference = build(CastsItsRouter, lambda m: [m], **how)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    losses = []
    for step in range(4):
        x = batch(step)
        pair = [m(x).square().mean() for m in (model, reference)]
        for loss in pair:
            loss.backward()
        torch.testing.assert_close(pair[0].detach(), pair[1].detach(), rtol=1e-2, atol=1e-3)
        losses.append(pair[1].item())
        advance(*optimizers)
    assert losses[-1] < losses[0] / 2, "the steps must show in what the router computes"


@ranks(1, slow(2))
def test_many_units_inside_each_other() -> None:
    """As deep as torch's own goes: what we add to the stack is one frame a unit."""

    class Nest(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = Nest(depth - 1) if depth else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x * self.scale)
            return y

    model = Nest(150)
    for module in reversed(list(model.modules())):
        if isinstance(module, Nest):
            fsdp2.fully_shard(module)
    model(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), torch.full((3,), 2.0))


# --- writes that count no version -----------------------------------------------------------------


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def by_vector(params: list[Tensor]) -> None:
    parts = [local(param).data for param in params]
    vector_to_parameters(2 * parameters_to_vector(parts), parts)


WRITES: dict[str, Callable[[list[Any]], object]] = {
    "data": lambda params: [p.data.mul_(2) for p in params],
    "foreach": lambda params: torch._foreach_mul_(params, 2.0),
    "foreach on data": lambda params: torch._foreach_mul_([p.data for p in params], 2.0),
    "local data": lambda params: [local(p).data.mul_(2) for p in params],
    "numpy": lambda params: [np.multiply(a, 2, out=a) for a in arrays_of(params)],
    "vector": by_vector,
    "average": lambda params: get_ema_multi_avg_fn(0.5)(params, [3 * p for p in params], 1),
}


def arrays_of(params: list[Tensor]) -> list[Any]:
    return [local(param).detach().numpy() for param in params]


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("holds", [False, True])
@ranks(2)
def test_a_forward_uses_what_was_written_since_the_last_one(way: str, holds: bool) -> None:
    """Nobody counts these writes. ``holds``: the graph of the first forward lives on."""
    model, reference = build()
    for made in (model, reference):
        params = list(made.parameters())
        output = made(batch(0))
        held = output if holds else None
        del output
        with torch.no_grad():
            WRITES[way](params)
        del held
    for _ in range(2):
        assert_close(model(batch(1)), reference(batch(1)))
        assert_close(model(batch(1)).sum(), reference(batch(1)).sum())
    for made in (model, reference):
        made(batch(1)).square().mean().backward()
    compare(model, reference)


@pytest.mark.parametrize("kept", with_slow([None, False, 2], [False]))
@ranks(4)
def test_values_that_were_only_evaluated_are_gone_afterwards(kept: Any) -> None:
    """An average is put in for an evaluation, and the old values are written back."""
    model, reference = build(reshard_after_forward=kept)
    outputs = []
    for made in (model, reference):
        made(batch(0)).square().mean().backward()
        params = [local(p) for p in made.parameters()]
        before = [p.detach().clone() for p in params]
        for p in params:
            p.data.mul_(0.5)
        with torch.no_grad():
            outputs.append(made(batch(1)))
        for p, old in zip(params, before, strict=True):
            p.data.copy_(old)
        outputs.append(made(batch(2)))
    assert_close(outputs[0], outputs[2])
    assert_close(outputs[1], outputs[3])


# --- writes of a forward to its own parameters ----------------------------------------------------


class Clamps(nn.Module):
    """Writes to its weights in forward: a clamp, a renormalization, a codebook that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH, max_norm=0.7)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(13, WIDTH), requires_grad=False)

    def forward(self, index: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
            self.codes.mul_(0.9).add_(self.linear.weight.mean())
        x = self.linear(self.embed(index))
        return x + self.codes[index]


class ClampsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Clamps(), Clamps()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, index: Tensor, recomputes: bool = False) -> Tensor:
        with torch.no_grad():
            self.scale.add_(0.125)
        total = torch.zeros(len(index), WIDTH)
        for part in self.parts:
            y = checkpoint(part, index, use_reentrant=False) if recomputes else part(index)
            total = total + y * self.scale
        return total


@pytest.mark.parametrize(
    ("reshard", "precision", "recomputes"),
    [
        (None, None, False),
        (False, None, False),
        (2, None, False),
        (None, torch.bfloat16, False),
        (None, None, True),
    ],
)
@ranks(4)
def test_a_forward_may_write_to_its_parameters(
    reshard: Any, precision: torch.dtype | None, recomputes: bool
) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=precision)
    how: dict[str, Any] = {"reshard_after_forward": reshard, "mp_policy": policy}
    model, reference = build(ClampsTwice, lambda m: [*m.parts, m], **how)
    index = torch.tensor([1, 2, 3, 5])
    for made in (model, reference):
        optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            made(index, recomputes).square().mean().backward()
            advance(optimizer)
        with torch.no_grad():
            made(index)  # what an evaluation writes stays, too
    assert_same_parameters(model, reference, None if precision is None else 0.02)


@ranks(2)
def test_a_write_to_one_whole_parameter_leaves_the_shards_of_others() -> None:
    """An optimizer's list holds shards, and may write to them while parameters are whole."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    fsdp2.fully_shard(model, mesh=make_mesh())
    shards = dict(model.named_parameters())
    before = {name: param.full_tensor().clone() for name, param in shards.items()}
    model.unshard()
    with torch.no_grad():
        model.weight.mul_(2)
        shards["bias"].mul_(3)
    model.reshard()
    assert_close(model.weight.full_tensor(), 2 * before["weight"])
    assert_close(model.bias.full_tensor(), 3 * before["bias"])


@ranks(2)
def test_a_forward_that_raises_takes_its_writes_with_it() -> None:
    class Raises(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            if self.fails:
                raise ValueError("too late")
            return super().forward(x)

    torch.manual_seed(0)
    model = Raises(WIDTH, WIDTH)
    fsdp2.fully_shard(model, mesh=make_mesh())
    model(batch(0)).sum().backward()
    before = model.weight.full_tensor().clone()
    model.fails = True
    with pytest.raises(ValueError, match="too late"):
        model(batch(0))
    assert torch.equal(model.weight.full_tensor(), before)


# --- gradients that wait --------------------------------------------------------------------------


@ranks(2)
def test_a_step_tells_of_gradients_that_wait_at_another_root() -> None:
    """Two roots, a backward without sync through both, then one with sync through the first."""
    roots, reference = build(lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), list)
    optimizer = torch.optim.SGD(roots.parameters(), lr=0.1)
    with fsdp2.no_sync(roots):
        (roots[0](batch(0)).sum() + roots[1](batch(1)).square().sum()).backward()
    roots[0](batch(2)).sum().backward()
    before = roots[1].weight.full_tensor().clone()
    with pytest.warns(UserWarning, match=r"SGD: .*gradients were accumulated without sync"):
        optimizer.step()
    assert torch.equal(roots[1].weight.full_tensor(), before)  # said, and not hidden
    roots[1](batch(3)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    (reference[1](batch(1)).square().sum() + reference[1](batch(3)).sum()).backward()
    assert_close(roots[1].weight.grad.full_tensor(), reference[1].weight.grad)


# --- what the engine writes to --------------------------------------------------------------------


@ranks(2)
def test_a_gradient_of_which_somebody_keeps_the_storage_stays() -> None:
    model, _ = build()
    model(batch(0)).square().mean().backward()
    gradient = local(model.inp.weight.grad)
    storage, values = gradient.untyped_storage(), gradient.clone()
    del gradient
    model.zero_grad()
    for seed in (1, 2):
        model(batch(seed)).square().mean().backward()
        model.zero_grad()
    kept = torch.empty(0).set_(storage)[: values.numel()]  # its rows come first in the buffer
    assert torch.equal(kept, values.flatten())


@ranks(2)
def test_saved_tensors_may_be_mutated_around_a_step() -> None:
    """What the engine does to its own memory is no mutation of the user's."""
    model, reference = build(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))),
        lambda m: [*m, m],
    )
    for made in (model, reference):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                x = torch.ones(2, 64, requires_grad=True) * 1
                output = made(x)
                x.mul_(3)
                output.square().sum().backward()
            advance(optimizer)
    assert_same_parameters(model, reference)
