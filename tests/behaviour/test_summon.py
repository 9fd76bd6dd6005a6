"""Promise: inside `summon_full_params` a sharded model has the parameters of one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from tests.kit.in_turn import shard_each
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES, HIDDEN, WIDTH, seeded
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_sharded,
    bits,
    make_mesh,
    names_of,
    sharded,
    whole,
)
from tests.kit.pool import ranks


def assert_whole(model: nn.Module, reference: nn.Module) -> None:
    expected = names_of(reference)
    found = names_of(model)
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert type(parameter) is nn.Parameter, name
        assert parameter.requires_grad is expected[name].requires_grad, name
        assert torch.equal(bits(parameter), bits(expected[name])), name


def assert_restored(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Assert that the very same sharded parameters are registered."""
    now = names_of(model)
    assert all(now[name] is parameter for name, parameter in before.items())
    assert all(isinstance(parameter, DTensor) for parameter in now.values())


def both(name: str, *mesh: int) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and a plain one."""
    case = CASES[name]
    return sharded(case, mesh=make_mesh(*mesh)), seeded(case.build)


def assert_refused(model: nn.Module, error: type[Exception], match: str, **kwargs: Any) -> None:
    with pytest.raises(error, match=match), fsdp2.summon_full_params(model, **kwargs):
        pass


@pytest.mark.parametrize("name", ["stack", "tied_lm", "scalars", "mixed_dtypes"])
@ranks(3)
def test_parameters_are_whole_and_come_back(name: str) -> None:
    model, reference = both(name)
    before = names_of(model)
    with fsdp2.summon_full_params(model):
        assert_whole(model, reference)
        model.state_dict()
        model.load_state_dict(model.state_dict())
        assert_whole(model, reference)
    assert_restored(model, before)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@ranks(4)
def test_writes_persist_if_writeback_says_so(mesh: tuple[int, ...]) -> None:
    model, reference = both("stack", *mesh)
    before = names_of(model)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
            module.bias = nn.Parameter(torch.arange(float(module.bias.numel())))

    with fsdp2.summon_full_params(model, writeback=False), torch.no_grad():
        model.apply(fill)
        assert model.out.weight.unique().tolist() == [3.0]
    assert_restored(model, before)
    with fsdp2.summon_full_params(model, writeback=False):
        assert_whole(model, reference)
    with fsdp2.summon_full_params(model):
        model.apply(fill)
    reference.apply(fill)
    assert_restored(model, before)
    with fsdp2.summon_full_params(model, writeback=False):
        assert_whole(model, reference)


@ranks(2)
def test_training_goes_on_with_what_was_written() -> None:
    """A root that stayed whole after its forward gathers what was written."""
    pair = Pair("stack")
    pair.train(steps=1)
    with fsdp2.summon_full_params(pair.model), torch.no_grad():
        pair.model.out.weight.mul_(0.5)
        pair.model.blocks[0].up.weight.zero_()
    with torch.no_grad():
        pair.reference.out.weight.mul_(0.5)
        pair.reference.blocks[0].up.weight.zero_()
    pair.train(steps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(2)
def test_gradients_are_whole_and_written_back(dtype: torch.dtype) -> None:
    """Those in low precision stay so."""
    torch.manual_seed(0)
    model, plain = (seeded(lambda: nn.Linear(WIDTH, HIDDEN)) for _ in range(2))
    policy = fsdp2.MixedPrecisionPolicy(dtype, dtype, keep_low_precision_grads=True)
    fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy)
    x = torch.randn(3, WIDTH)
    model(x).sum().backward()
    plain.to(dtype)(x.to(dtype)).sum().backward()
    with fsdp2.summon_full_params(model, with_grads=True):
        assert_same(model.weight.grad, plain.weight.grad, "weight.grad")
        model.weight.grad.mul_(2)
        model.bias.grad = None
    assert isinstance(model.weight.grad, DTensor)
    assert_same(model.weight.grad, plain.weight.grad * 2, "weight.grad")
    assert model.bias.grad is None
    with fsdp2.summon_full_params(model, with_grads=True, writeback=False):
        assert model.bias.grad is None
        model.weight.grad.zero_()
    assert_same(model.weight.grad, plain.weight.grad * 2, "weight.grad")
    with fsdp2.summon_full_params(model, with_grads=True):
        model.bias.grad = torch.ones(HIDDEN, dtype=dtype)
    assert_same(model.bias.grad, torch.ones(HIDDEN, dtype=dtype), "bias.grad")
    with fsdp2.summon_full_params(model):
        assert model.weight.grad is None
    assert model.weight.grad is not None


@ranks(4)
def test_tensor_parallel_parameters_are_whole() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model, plain = seeded(lambda: nn.Linear(WIDTH, 14)), seeded(lambda: nn.Linear(WIDTH, 14))
    model.weight = nn.Parameter(
        distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(0)])
    )
    fsdp2.fully_shard(model, mesh=mesh["data"])
    with fsdp2.summon_full_params(model), torch.no_grad():
        assert_whole(model, plain)
        model.weight.copy_(model.weight.flip(0))
    assert torch.equal(
        dict(fsdp2.full_params(model, max_bytes=10**5))["weight"], plain.weight.detach().flip(0)
    )


@ranks(2)
def test_rank_0_only(rank: int) -> None:
    model, reference = both("stack")
    before = names_of(model)
    with fsdp2.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        if rank == 0:
            assert_whole(model, reference)
        else:
            assert_restored(model, before)
        assert_refused(model, fsdp2.StateError, "is nested in another context for the same")
    assert_restored(model, before)


@ranks(2)
def test_nested_and_not_recursive() -> None:
    model, reference = both("stack")
    before = names_of(model)
    with fsdp2.summon_full_params(model, recurse=False):
        assert type(model.out.weight) is nn.Parameter
        assert isinstance(model.blocks[0].up.weight, DTensor)
    assert_restored(model, before)
    with fsdp2.summon_full_params(model.out):  # no unit, inside of one
        assert torch.equal(model.out.weight, reference.out.weight)
        assert isinstance(model.inp.weight, DTensor)
    with fsdp2.summon_full_params(model.blocks, recurse=True):
        assert type(model.blocks[1].up.weight) is nn.Parameter
    assert_restored(model, before)
    with fsdp2.summon_full_params(model, writeback=False), torch.no_grad():
        with fsdp2.summon_full_params(model.blocks[0]):
            model.blocks[0].up.weight.fill_(4)
            model.out.weight.fill_(4)
        assert_whole(model.blocks[1], reference.blocks[1])
    assert_restored(model, before)
    assert whole(model.blocks[0].up.weight).unique().tolist() == [4.0]
    assert torch.equal(whole(model.out.weight), reference.out.weight)


@ranks(2)
def test_whole_modules_are_copied_and_pickled() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN)))
    reference = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN)))
    fsdp2.fully_shard(model, mesh=make_mesh())
    with fsdp2.summon_full_params(model):
        copies = [copy.deepcopy(model[1]), pickle.loads(pickle.dumps(model[1]))]
    for made in copies:
        assert_same(made.weight, reference[1].weight, "weight")
        fsdp2.fully_shard(made, mesh=make_mesh())
        with fsdp2.summon_full_params(made):
            made.weight.detach().zero_()
        assert not whole(made.weight).any()
    assert_same(model[1].weight, reference[1].weight, "weight")


@ranks(2)
def test_refusals() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard_each(model[0], model, mesh=make_mesh())
    before = names_of(model)
    message = "rank0_only=True with writeback=True"
    assert_refused(model, fsdp2.ConfigError, message, rank0_only=True)
    assert_refused(model, fsdp2.ConfigError, "recurse", recurse=1)
    inside: list[str] = []

    def summon(what: str) -> None:
        assert_refused(model, fsdp2.StateError, r"inside a (forward|backward)")
        inside.append(what)

    handle = model[0].register_forward_hook(lambda *_: summon("forward"))
    x = model(torch.ones(2, WIDTH, requires_grad=True))
    x.register_hook(lambda grad: summon("backward"))
    x.sum().backward()
    handle.remove()
    assert sorted(set(inside)) == ["backward", "forward"]
    with fsdp2.summon_full_params(model):
        for call in (model, model[0]):
            with pytest.raises(fsdp2.StateError, match="inside summon_full_params"):
                call(torch.ones(1, WIDTH))
        with pytest.raises(fsdp2.StateError, match="inside summon_full_params"):
            model[0].unshard()
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fsdp2.fully_shard(inner, mesh=make_mesh())
    refused = pytest.raises(fsdp2.StateError, match=r"weight: fully_shard .* inside summon_full")
    with fsdp2.summon_full_params(inner), refused:
        fsdp2.fully_shard(inner[0], mesh=make_mesh())
    assert_restored(model, before)
    values = {name: whole(p).clone() for name, p in before.items()}

    def spoil(change: Any) -> None:
        with torch.no_grad(), fsdp2.summon_full_params(model):
            model[1].bias.zero_()
            change()

    def reshape() -> None:
        model[0].weight = nn.Parameter(torch.ones(2))

    def remove() -> None:
        model[0].weight = None

    def distribute() -> None:
        whole_now = model[0].weight.detach().clone()
        model[0].weight = nn.Parameter(distribute_tensor(whole_now, make_mesh(), [Shard(0)]))

    for change, message in (
        (reshape, r"0.weight now has shape \(2,\)"),
        (remove, "was removed"),
        (distribute, "is now a DTensor"),
    ):
        with pytest.raises(fsdp2.StateError, match=message):
            spoil(change)
        assert_restored(model, before)
        for name, value in values.items():
            assert torch.equal(whole(before[name]), value)

    def fail() -> None:
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        spoil(fail)
    assert_restored(model, before)
    loss: Tensor = model(torch.ones(1, WIDTH)).sum()
    loss.backward()


@ranks(2)
def test_a_tie_to_a_module_outside_holds_inside() -> None:
    """Whole parameters of a part of the model are registered wherever they are tied to."""
    model, reference = both("tied_lm")
    tied = [names for names in _names_of_ties(reference) if len(names) > 1]
    assert tied
    for names in tied:
        for name in names:
            holder, _, own = name.rpartition(".")
            with fsdp2.summon_full_params(model.get_submodule(holder)):
                whole_one = getattr(model.get_submodule(holder), own)
                assert not isinstance(whole_one, DTensor)
                for other in names:
                    assert names_of(model)[other] is whole_one, other
    assert_sharded(model)


def _names_of_ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in names_of(model).items():
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())
