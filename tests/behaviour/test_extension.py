"""Promise: a tensor subclass may say itself what is gathered for it (the all-gather extension)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from tests.kit.collectives import Gather
from tests.kit.extensions import (
    MIDDLES,
    RELEASE,
    SEEN,
    WIDTH,
    Apart,
    Bare,
    BareToPad,
    Dense,
    Half,
    Int8Weight,
    Opaque,
    PaddedInt8Weight,
    Scaled,
    apart,
    compare,
    make,
    make_even,
    make_weight,
    refused,
    set_methods,
    shard,
    step,
    train,
    values_of,
)
from tests.kit.in_turn import advance
from tests.kit.meshes import DEVICE
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow


@pytest.mark.parametrize("reshard_after_forward", with_slow([True, False], [True]))
@ranks(slow(2), 3)
def test_a_quantized_subclass_trains_as_in_one_process(reshard_after_forward: bool) -> None:
    """Int8 weights of even, uneven, one-row and empty shards train as they do unsharded."""
    model = shard(make(), reshard_after_forward=reshard_after_forward)
    local = model[0].up._local_tensor
    assert isinstance(local, Int8Weight)
    assert local.shape == make()[0].up.chunk(dist.get_world_size())[dist.get_rank()].shape
    train(model, make())


@ranks(2)
def test_torchs_own_fully_shard_gives_the_same() -> None:
    """The same subclass trains to the same codes under torch's fully_shard (even shapes)."""
    even = (12, 2)
    ours, theirs = shard(make_even(even)), shard(make_even(even), torch_fsdp)
    train_to_the_same_codes(ours, theirs)


def train_to_the_same_codes(*models: Any) -> None:
    """Train models of two libraries, and compare the tensors that they hold bit for bit."""
    for model in models:
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            model(torch.randn(5, WIDTH + 1)).square().mean().backward()
            advance(optimizer)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert mine.placements == other.placements
        a, b = mine._local_tensor, other._local_tensor
        assert type(a) is type(b)
        for name in ("codes", "scales") if isinstance(b, Bare) else ("data",):
            assert torch.equal(getattr(a, name), getattr(b, name))


@ranks(slow(2), 3)
def test_inputs_that_the_extension_padded_keep_their_padding() -> None:
    """A subclass that pads its inputs itself, as torch demands, gets padded outputs and is cut."""
    model = shard(make(kind=PaddedInt8Weight))
    train(model, make(kind=PaddedInt8Weight), steps=2)


def agree(model: Any, reference: Any) -> None:
    """Assert that outputs are the same, also after a backward."""
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(model(x), reference(x))
        model(x).sum().backward()


@ranks(2, 3)
def test_an_input_that_is_not_rows() -> None:
    """A scale of one element a rank arrives as one element for each rank, empty shards too."""
    agree(shard(make(kind=Scaled)), make(kind=Int8Weight))


@ranks(4)
def test_a_replicate_axis() -> None:
    """On a 2-D mesh the extension is given the shard mesh, and gradients are those of all ranks."""
    model = shard(make(), mesh=make_mesh(2, 2))
    train(model, make(), steps=2)
    assert SEEN["mesh"].mesh_dim_names == ("shard",)
    assert SEEN["mesh"].size() == 2


@ranks(1)
def test_a_mesh_of_one_rank() -> None:
    """One rank gathers nothing and trains the same."""
    train(shard(make()), make())


@ranks(2)
def test_what_the_extension_is_told() -> None:
    """Pre gets the whole size and stride, the module and the policy; post gets param_dtype."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make((13,)), mp_policy=policy)
    for _ in range(2):
        model(torch.randn(4, WIDTH)).sum().backward()
    size, stride, module, found = SEEN["outer"]
    assert (size, stride) in (((13, WIDTH), (WIDTH, 1)), ((WIDTH, 13), (13, 1)))
    assert issubclass(module, Dense)
    assert found == policy
    assert SEEN["param_dtype"] is torch.bfloat16
    assert model[0].up.grad.dtype is torch.float32
    model.unshard()
    model[0].unshard()
    assert model[0].up.dtype is torch.bfloat16
    assert isinstance(model[0].up, Int8Weight)


@ranks(2)
def test_accumulation_without_sync() -> None:
    """Gradients of two backwards, the first without sync, are those of one backward of both."""
    for policy in (None, torch.float64):
        mp_policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=policy)
        model, reference = shard(make(), mp_policy=mp_policy), make()
        batches = [torch.randn(4, WIDTH) for _ in range(2)]
        for index, x in enumerate(batches):
            model.set_requires_gradient_sync(index == 1)
            model(x).square().mean().backward()
            reference(x).square().mean().backward()
        compare(model, reference, grads=True, exact=True)


@ranks(2)
def test_a_group_of_extended_parameters_only() -> None:
    """A group may hold extended parameters and nothing else."""
    only = nn.Sequential(nn.Linear(WIDTH, 5, bias=False))
    torch.manual_seed(2)
    only[0].weight = nn.Parameter(make_weight(Int8Weight, 5, WIDTH))
    expected = copy.deepcopy(only)
    agree(fsdp2.fully_shard(only, mesh=make_mesh()), expected)


def check(model: Any, reference: Any, loss_of: Callable[[Any], Tensor]) -> None:
    """Differentiate a loss of both models, and compare the gradients to the last bit."""
    for each in (model, reference):
        loss_of(each).backward()
    compare(model, reference, grads=True, exact=True)


@ranks(2)
def test_several_forwards_before_one_backward() -> None:
    """What autograd saved of an extended parameter is valid after it was gathered again."""
    model, reference = shard(make()), make()
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    check(model, reference, lambda m: m(x).square().mean() + m(y).square().mean())


@ranks(2)
def test_the_first_forward_in_inference_mode() -> None:
    """A model that was evaluated in inference mode first trains afterwards."""
    model = shard(make())
    with torch.inference_mode():
        model(torch.randn(4, WIDTH))
    train(model, make(), steps=2)


@ranks(2)
def test_tied_extended_parameters() -> None:
    """An extended parameter with two names is gathered once and stays one object under both."""
    models = []
    for _ in range(2):
        model = make((13, 13))
        model[1].up = model[0].up
        models.append(model)
    model = shard(models[0])
    assert model[0].up is model[1].up
    x = torch.randn(4, WIDTH)
    check(model, models[1], lambda m: m(x).square().mean())


@ranks(4)
def test_beside_tensor_parallel() -> None:
    """A tensor-parallel parameter whose local tensor is extended is gathered by the extension."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = make_weight(Int8Weight, 14, WIDTH)
    assert isinstance(whole, Int8Weight)
    own = Int8Weight.quantize(whole.values().chunk(2)[mesh.get_local_rank("tp")])
    module = nn.Linear(WIDTH, 14, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(own, mesh["tp"], [Shard(0)]))
    fsdp2.fully_shard(module, mesh=mesh["dp"])
    given = torch.zeros(WIDTH)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        given += x.sum(dim=0)
        found = module(DTensor.from_local(x, mesh["tp"], [Replicate()]))
        torch.testing.assert_close(found.full_tensor(), F.linear(x, whole.values()))
        found.sum().backward()
    grad = module.weight.grad
    torch.testing.assert_close(grad.full_tensor(), given.expand(14, WIDTH))


class Bf16Gather(torch.Tensor):
    """A subclass that wraps nothing, with the methods on its class."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(Tensor).bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is not None:
            return None
        return outputs[0], tuple(outputs)


@ranks(2, 3)
def test_a_subclass_that_wraps_nothing() -> None:
    """A subclass with the methods on its class is extended; its gradients come as post computes."""
    module = nn.Linear(WIDTH, 13)
    torch.manual_seed(0)
    whole = torch.randn(13, WIDTH)
    module.weight = nn.Parameter(whole.as_subclass(Bf16Gather))  # type: ignore[arg-type]
    module.bias = None
    fsdp2.fully_shard(module, mesh=make_mesh())
    assert type(module.weight._local_tensor) is Bf16Gather  # type: ignore[operator]
    for _ in range(2):
        x = torch.randn(4, WIDTH).bfloat16()
        found = module(x)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, F.linear(x, whole.bfloat16()))
        found.float().sum().backward()
    assert module.weight.grad.dtype is torch.float32


@ranks(2)
def test_activation_checkpointing() -> None:
    """Extended parameters that are gathered again for a recomputed forward have their values."""
    model, reference = make(), make()
    for index, block in enumerate(model):
        model[index] = checkpoint_wrapper(fsdp2.fully_shard(block, mesh=make_mesh()))
    fsdp2.fully_shard(model, mesh=make_mesh())
    x = torch.randn(4, WIDTH)
    for m in (model, reference):
        for _ in range(2):
            m(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@ranks(2)
def test_a_custom_all_gather() -> None:
    """A custom all-gather carries extended parameters too, as bytes."""
    model, custom = shard(make()), Gather()
    for block in model:
        block.set_custom_all_gather(custom)
    train(model, make(), steps=2)
    assert {dtype for _, dtype in custom.given} == {torch.uint8}


# --- an all-gather extension may be methods, set on plain tensors or on a bare subclass. ---


# Methods on a plain tensor.


class Rounded(Dense):
    """Compute with parameters rounded to bf16, as after a gather in bf16, in one process."""

    def __init__(self, middle: int) -> None:
        super().__init__(middle, None)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (p + (p.bfloat16().float() - p).detach() for p in (self.up, self.down))
        return x + F.linear(F.relu(F.linear(x, up, self.bias)), down)


@pytest.mark.parametrize("reshard_after_forward", with_slow([True, False], [False]))
@ranks(slow(2), 3)
def test_methods_set_on_the_local_tensors(reshard_after_forward: bool) -> None:
    """Methods that were set on local tensors before the first forward are used from then on."""
    torch.manual_seed(0)
    reference = nn.Sequential(*(Rounded(middle) for middle in MIDDLES))
    model = shard(make(kind=None), reshard_after_forward=reshard_after_forward)
    for block in model:
        for param in (block.up, block.down):
            set_methods(param)
    held = list(model.parameters())
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        parts = torch.randn(12, WIDTH).chunk(size)
        model(parts[rank]).square().mean().backward()
        torch.stack([reference(part).square().mean() for part in parts]).mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-4)
        advance(*optimizers)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-3, atol=1e-4)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


def plain_with_methods(**kwargs: Any) -> Any:
    """Return a model whose first parameter got the methods after it was sharded."""
    model = shard(make((13,), kind=None), **kwargs)
    set_methods(model[0].up)
    return model


def gathered_once() -> Tensor:
    """Return what the methods gather of that parameter."""
    value: Tensor = make((13,), kind=None)[0].up.bfloat16().float()
    return value


@ranks(2)
def test_methods_that_a_copy_lost() -> None:
    """A copy without the methods is refused by name, and works once it has them again."""
    model = plain_with_methods()
    step(model)
    model.double()
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH).double())
    set_methods(model[0].up)
    model(torch.randn(4, WIDTH).double()).sum().backward()
    assert model[0].up.grad.dtype is torch.float64


@ranks(2)
def test_a_copy_of_methods_works_on_the_copy() -> None:
    """After a deepcopy, methods that were bound to a local tensor gather the copy's values."""
    model = plain_with_methods()
    step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].up.fill_(2)
    other[0].unshard()
    assert torch.equal(other[0].up, torch.full((13, WIDTH), 2.0))
    model[0].unshard()
    torch.testing.assert_close(model[0].up, gathered_once())


# Methods on a subclass that has none.


def extend(model: Any, how: str = "method") -> Any:
    """Set the methods on the local tensors of all shards of `Bare`, as torch's own takes them."""
    for param in model.parameters():
        local = param._local_tensor
        has_codes = isinstance(local, Bare)
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if has_codes else ():
            function = getattr(PaddedInt8Weight if how == "padded" else Int8Weight, name)
            bound = partial(function, local) if how == "partial" else MethodType(function, local)
            setattr(local, name, bound)
    return model


@pytest.mark.parametrize(
    ("how", "reshard_after_forward"), [("method", True), ("partial", False), ("padded", None)]
)
@ranks(slow(2), 3)
def test_a_subclass_gets_its_extension_after_sharding(
    how: str, reshard_after_forward: bool | None
) -> None:
    """Even, uneven, one-row and empty shards of a bare subclass train as in one process."""
    kind = BareToPad if how == "padded" else Bare
    model = shard(make(kind=kind), reshard_after_forward=reshard_after_forward)
    assert type(model[0].up._local_tensor) is kind
    train(extend(model, how), make(kind=kind))
    assert type(model[0].up._local_tensor) is kind


@ranks(4)
def test_a_bare_subclass_on_a_replicate_axis() -> None:
    train(extend(shard(make(kind=Bare), mesh=make_mesh(2, 2))), make(kind=Bare), steps=2)


@pytest.mark.parametrize("how", ["method", "partial"])
@ranks(2, 4)
def test_torchs_own_takes_a_bare_subclass_too(how: str, world_size: int) -> None:
    """Both train to the same codes, on two ranks and on 2 x 2.

    Rows are even: of uneven shards torch makes new local tensors, without the methods.
    """
    sizes = (2, 2) if world_size == 4 else (2,)
    ours, theirs = (
        extend(shard(make_even((12, 2), Bare), library, mesh=make_mesh(*sizes)), how)
        for library in (fsdp2, torch_fsdp)
    )
    train_to_the_same_codes(ours, theirs)


@pytest.mark.parametrize("where", ["everywhere", "one rank", "half"])
@ranks(2, slow(3))
def test_a_subclass_that_has_no_extension_when_it_is_gathered(where: str, rank: int) -> None:
    """Every rank says so with the full name, at the first unshard; later it works."""
    model = shard(make(kind=Bare))
    assert [type(p._local_tensor) for p in model[0].parameters()] == [Bare, Bare, Tensor]
    if where == "half" or (where == "one rank" and rank > 0):
        extend(model)
    if where == "half" and rank == 0:
        del model[0].up._local_tensor.fsdp_post_all_gather
    lacking = {"everywhere": "on rank 0, 1", "one rank": "on rank 0,", "half": "failed on rank 0"}
    for call in (lambda: model(torch.randn(4, WIDTH)), model[0].unshard):
        with refused(fsdp2.StateError, "0.up: ", lacking[where]):
            call()
        assert isinstance(model[0].up, DTensor)
    train(extend(model), make(kind=Bare), steps=2)


@ranks(4)
def test_a_subclass_that_has_no_extension_on_one_replica(rank: int) -> None:
    model = shard(make((13,), kind=Bare), mesh=make_mesh(2, 2))
    if rank < 2:
        extend(model)
    with refused(fsdp2.StateError, "0.up", "extension" if rank >= 2 else "another replica"):
        model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("how", ["method", "partial"])
@ranks(2)
def test_copies_and_states_of_a_bare_subclass(how: str) -> None:
    """A deepcopy carries the methods, bound to its own; a state loads; a cast loses them."""
    model = extend(shard(make(kind=Bare)), how)
    for _ in range(2):  # before the first step, and after it
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.fill_(2)
        other[0].unshard()
        assert other[0].up.values().unique().tolist() == [2.0]
        other[0].reshard()
        other.load_state_dict(model.state_dict())
        x = torch.ones(2, WIDTH)
        assert torch.equal(other(x), model(x))
        step(model)
        model.zero_grad()
    model.double()
    with refused(fsdp2.StateError, "0.up", "again after each copy"):
        model(torch.randn(4, WIDTH).double())
    extend(model, how)(torch.randn(4, WIDTH).double()).sum().backward()
    assert model[0].up.grad.dtype is torch.float64


@ranks(2)
def test_optimizers_and_averages_of_a_bare_subclass() -> None:
    """They may be made before it has an extension."""
    model = shard(make(kind=Bare))
    optimizer = fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1)
    average = fsdp2.optim.EMA(model, 0.5)
    before = values_of(model[0].up).clone()
    step(extend(model))
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update()
    assert not torch.equal(values_of(model[0].up), before)


@pytest.mark.parametrize("extended", [False, True])
@ranks(2)
def test_whole_values_of_a_bare_subclass_are_refused_by_name(
    extended: bool, tmp_path: Path
) -> None:
    def new() -> Any:
        model = shard(make(kind=Bare))
        return extend(model) if extended else model

    def summon(model: Any) -> None:
        with fsdp2.summon_full_params(model):
            raise AssertionError

    calls: list[Callable[[Any], Any]] = [
        summon,
        lambda model: list(fsdp2.full_params(model, max_bytes=10**6)),
        fsdp2.checkpoint.full_state,
        fsdp2.checkpoint.local_state,
        lambda model: fsdp2.checkpoint.save_safetensors(tmp_path / "s", model),
        fsdp2.compile,
    ]
    for call in calls:
        with refused(fsdp2.UnsupportedError, "0.up"):
            call(new())
    with torch.device("meta"):
        model = shard(make(kind=Bare))
    with refused(fsdp2.UnsupportedError, "0.up", "to_empty"):
        fsdp2.materialize(model, DEVICE, init=lambda module: None)
    assert type(model[0].up._local_tensor) is Bare
    model.to_empty(device=DEVICE)
    extend(model).load_state_dict(new().state_dict())
    step(model)


# --- states, copies and casts know parameters with an all-gather extension. ---


@ranks(slow(2), 3)
def test_state_dict_shows_the_subclass_and_loads_by_copy_and_by_assignment() -> None:
    """A state dict holds DTensors around the subclass, and loads into another model, both ways."""
    source = shard(make())
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(2)
    state = source.state_dict()
    assert isinstance(state["0.up"], DTensor)
    assert isinstance(state["0.up"]._local_tensor, Int8Weight)
    expected = source(torch.ones(2, WIDTH))
    for assign in (False, True):
        model = shard(make())
        step(model)
        model.load_state_dict(state if not assign else copy.deepcopy(state), assign=assign)
        assert torch.equal(model(torch.ones(2, WIDTH)), expected)
        step(model)
        assert model[0].up.grad is not None


@ranks(2)
def test_our_checkpoints_refuse_what_they_could_not_load(tmp_path: Path) -> None:
    """A tensor that wraps others is refused by `save`: torch would write it, we not read it."""
    model = shard(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(fsdp2.UnsupportedError, "up", "Int8Weight", "torch.distributed.checkpoint"):
        fsdp2.checkpoint.save(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_a_whole_subclass_parameter_assigned_later() -> None:
    """A whole parameter put in the place of a sharded one is sharded through the subclass."""
    model, other = shard(make()), make()
    step(model)
    model.zero_grad()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(3)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), other(x))
    assert isinstance(model[0].up, DTensor)
    assert isinstance(model[0].up._local_tensor, Int8Weight)
    plain = make(kind=None)
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model.load_state_dict(plain.state_dict(), assign=True)


@ranks(2)
def test_parameters_that_become_extended_later() -> None:
    """Quantized weights assigned to a model that was sharded plain are extended from then on."""
    model, other = shard(make(kind=None)), make()
    step(model)
    model.zero_grad()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    train(model, other, steps=2)


@ranks(2)
def test_copies() -> None:
    """A deepcopy of a sharded model trains like the original."""
    model = shard(make())
    step(model)
    model.zero_grad()
    train(copy.deepcopy(model), make(), steps=2)


@ranks(2)
def test_another_dtype() -> None:
    """After .to(dtype) the outer dtype, the gathered one and the gradients' are the new one."""
    model, reference = shard(make()), make()
    step(model)
    model.zero_grad()
    model.double()
    reference.double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    check(model, reference, lambda m: m(x).square().mean())
    assert model[0].up.dtype is torch.float64


@ranks(2, slow(3))
def test_from_the_meta_device() -> None:
    """A subclass on meta is sharded there, and trains once it has memory and values."""
    with torch.device("meta"):
        model = make()
    assert model[0].up.is_meta
    shard(model)
    assert isinstance(model[0].up._local_tensor, Int8Weight)
    assert model[0].up._local_tensor.codes.is_meta
    model.to_empty(device=DEVICE)
    model.load_state_dict(shard(make()).state_dict())
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(model(x), make()(x))
    step(model)


@ranks(2)
def test_frozen_extended_parameters() -> None:
    """Frozen quantized weights are gathered and get no gradients."""
    model = make()
    for block in model:
        block.up.requires_grad_(False)
    shard(model)
    step(model)
    assert model[0].up.grad is None
    assert model[0].down.grad is not None


# --- extended parameters cost no collective of their own, and their memory is freed. ---


@pytest.mark.parametrize("kind", with_slow([Int8Weight, PaddedInt8Weight], [PaddedInt8Weight]))
@ranks(slow(2), 3)
def test_one_all_gather_for_each_unshard(kind: type[Int8Weight]) -> None:
    """A group's flat parameters and all inputs of its extended ones travel in one all-gather."""
    model = shard(make(kind=kind))
    for _ in range(3):
        with CommDebugMode() as comm:
            loss = model(torch.randn(4, WIDTH)).sum()
        assert comm.get_total_counts() == len(MIDDLES)
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 2 * len(MIDDLES)


@ranks(2)
def test_memory_is_freed() -> None:
    """Resharding frees outputs and inner tensors; the unsharded parameter stays one object."""
    model = shard(make((13,)))
    block = model[0]
    objects = set()
    for _ in range(3):
        block.unshard()
        up = block.up
        assert isinstance(up, Int8Weight)
        assert isinstance(up, nn.Parameter)
        objects.add(id(up))
        storages = [t.untyped_storage() for t in (up.codes, up.scales)]
        assert [s.nbytes() for s in storages] == [13 * WIDTH, 13 * 4]
        assert torch.equal(up.values(), make((13,))[0].up.values())
        block.reshard()
        assert [s.nbytes() for s in storages] == [0, 0]
        assert isinstance(block.up, DTensor)
    assert len(objects) == 1


@ranks(2)
def test_memory_of_what_post_made_is_freed() -> None:
    """A tensor that post computed and named as inner is freed and made anew, in place."""
    model = plain_with_methods()
    for _ in range(2):
        model[0].unshard()
        whole = model[0].up
        assert whole.dtype is torch.float32
        torch.testing.assert_close(whole, gathered_once())
        model[0].reshard()
        assert whole.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("answer", [None, False, True])
@ranks(2, slow(3))
def test_memory_of_gathered_tensors_is_freed_if_the_extension_says_so(answer: Any) -> None:
    """With True it is gone as soon as the parameter is made, else when it is resharded."""
    kind = apart(answer)
    block = shard(make((13,), kind=kind))[0]
    expected = make((13,))[0].up.values()
    objects = set()
    for _ in range(3):
        Apart.gathered.clear()
        block.unshard()
        objects.add(id(block.up))
        torch.testing.assert_close(block.up.data, expected, rtol=0, atol=0)
        own = block.up.untyped_storage()
        assert own.nbytes() == 13 * WIDTH * 4
        found = [storage.nbytes() for pair in Apart.gathered.values() for storage in pair]
        full = [13 * WIDTH, 13 * 4, 13 * WIDTH, WIDTH * 4]
        assert found == ([0] * 4 if answer else full)
        block.reshard()
        found = [storage.nbytes() for pair in Apart.gathered.values() for storage in pair]
        assert found == [0] * 4
        assert own.nbytes() == 0
    assert len(objects) == 1
    assert kind.asked == (0 if answer is None else 2), "once for each parameter"


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2, slow(3))
def test_training_while_gathered_tensors_are_freed(reshard_after_forward: bool) -> None:
    """Gradients and steps are those of one process, whether backward gathers again or not."""
    train(shard(make(kind=apart(True)), reshard_after_forward=reshard_after_forward), make())


@ranks(2)
def test_torchs_own_trains_the_same_while_gathered_tensors_are_freed() -> None:
    """The same class under torch's fully_shard (older ones do not ask): the same codes."""
    kind = apart(True)
    ours, theirs = (shard(make_even((12, 2), kind), lib) for lib in (fsdp2, torch_fsdp))
    train_to_the_same_codes(ours, theirs)


# --- what an all-gather extension may not do is an error, the same one on every rank. ---


@ranks(2)
def test_tensors_that_stand_in_for_extended_parameters() -> None:
    """In functional_call a whole tensor may stand in; a DTensor is refused by name."""
    model, reference = shard(make((13,))), make((13,))
    x = torch.randn(4, WIDTH)
    whole = {"0.up": torch.randn(13, WIDTH)}
    found = torch.func.functional_call(model, whole, (x,))
    torch.testing.assert_close(found, torch.func.functional_call(reference, whole, (x,)))
    with refused(fsdp2.UnsupportedError, "up", "extension"):
        torch.func.functional_call(model, {"0.up": model[0].up.detach()}, (x,))


@ranks(2)
def test_what_is_refused_when_sharding() -> None:
    """A class with one of the two methods, or that cannot be split, or another dim: by name."""
    for kind, word in ((Half, "fsdp_post_all_gather"), (Opaque, "cannot be sharded")):
        with refused(fsdp2.ConfigError, "up", word):
            fsdp2.fully_shard(make(kind=kind)[0], mesh=make_mesh())
    for kind in (Int8Weight, Bare):
        model = make(kind=kind)
        with refused(fsdp2.ConfigError, "up", "dim 0"):
            fsdp2.fully_shard(
                model[0], mesh=make_mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1)
            )
        assert type(model[0]) is Dense
        assert isinstance(model[0].up, kind)


@ranks(2)
def test_what_is_refused_about_memory_of_gathered_tensors() -> None:
    """An answer that is no bool, the method alone, and a True that is not true: by name."""
    alone = type("Alone", (torch.Tensor,), {RELEASE: lambda self: True})
    bare = type("AloneAndBare", (Bare,), {RELEASE: lambda self: True})
    model = make((13,), kind=None)
    model[0].up = nn.Parameter(model[0].up.data.as_subclass(alone))
    for refused_model, words in (
        (model, ("fsdp_pre_all_gather", "fsdp_post_all_gather")),
        (make((13,), kind=bare), ("fsdp_pre_all_gather", "fsdp_post_all_gather")),
        (make((13,), kind=apart(1)), ("returned 1", "int")),
    ):
        with refused(fsdp2.ConfigError, "up", RELEASE, *words):
            fsdp2.fully_shard(refused_model[0], mesh=make_mesh())
        assert type(refused_model[0]) is Dense
        assert not isinstance(refused_model[0].up, DTensor)
    aliases = type("Aliases", (Int8Weight,), {RELEASE: lambda self: True})
    model = shard(make((13,), kind=aliases))
    for _ in range(2):
        with refused(fsdp2.StateError, "up", RELEASE, "shares memory"):
            model(torch.randn(4, WIDTH))
        assert isinstance(model[0].up, DTensor)


@ranks(2)
def test_methods_set_later_are_asked_about_memory_too(rank: int) -> None:
    """At the first gather; what one rank answers wrongly is raised on all."""
    for answers in ((True, True), (True, "yes")):
        model = plain_with_methods()
        local = model[0].up._local_tensor
        setattr(local, RELEASE, lambda found=answers[rank]: found)
        watched = mock.Mock(wraps=local.fsdp_post_all_gather)
        local.fsdp_post_all_gather = watched
        if answers[1] is True:
            for _ in range(2):
                model[0].unshard()
                seen = [tensor for call in watched.call_args_list for tensor in call.args[0]]
                assert {tensor.untyped_storage().nbytes() for tensor in seen} == {0}
                torch.testing.assert_close(model[0].up, gathered_once())
                model[0].reshard()
        else:
            with refused(fsdp2.StateError, "up", "rank 1" if rank == 0 else RELEASE):
                model[0].unshard()


@ranks(4)
def test_an_int_for_reshard_after_forward() -> None:
    """An extended parameter cannot wait on a smaller mesh, and the error names it."""
    model = make()
    with refused(fsdp2.ConfigError, "up", "reshard_after_forward"):
        fsdp2.fully_shard(model[0], mesh=make_mesh(), reshard_after_forward=2)
    assert type(model[0]) is Dense
    plain = fsdp2.fully_shard(make(kind=None)[0], mesh=make_mesh(), reshard_after_forward=2)
    set_methods(plain.up)
    with refused(fsdp2.ConfigError, "up", "reshard_after_forward"):
        plain(torch.randn(2, WIDTH))


@pytest.mark.parametrize("what", ["raises", "shape", "count", "result", "subclass"])
@ranks(2, 3)
def test_an_extension_that_fails_on_one_rank_at_first(what: str, rank: int) -> None:
    """An error that only one rank can see is raised on all, by name; then the model works."""
    model = plain_with_methods()
    answers: dict[str, Any] = {
        "raises": KeyError("broken pre"),
        "shape": ((torch.zeros(2, 3),), None),
        "count": ((torch.zeros(2), torch.zeros(2)), None),
        "result": torch.zeros(2),
        "subclass": ((make_weight(Int8Weight, 2, 2),), None),
    }
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather
    if rank == 0:
        local.fsdp_pre_all_gather = mock.Mock(side_effect=[answers[what]])
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH))
    local.fsdp_pre_all_gather = good
    step(model)
    assert model[0].up.grad is not None


@pytest.mark.parametrize("beside", [False, True])
@ranks(2, 3)
def test_an_extension_that_fails_on_one_rank_later(
    rank: int, world_size: int, beside: bool
) -> None:
    """On a CPU an error of one rank in a later step is raised on all ranks too.

    So it is where another extended parameter of the unit does not fail.
    """
    model = plain_with_methods()
    if beside:
        set_methods(model[0].down)
    step(model)
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather
    if rank == world_size - 1:
        local.fsdp_pre_all_gather = lambda mesh: ((torch.zeros(2, 3),), None)
    word = "shapes or dtypes differ" if rank == world_size - 1 else f"rank {world_size - 1}"
    with refused(fsdp2.StateError, "up", word):
        model(torch.randn(4, WIDTH))
    local.fsdp_pre_all_gather = good
    step(model)


@ranks(4)
def test_an_extension_that_fails_on_one_replica(rank: int) -> None:
    """An error in one replica is raised in the other one too, instead of a hang in backward."""
    model = plain_with_methods(mesh=make_mesh(2, 2))
    if rank == 3:
        model[0].up._local_tensor.fsdp_pre_all_gather = lambda mesh: 1 / 0
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH))


@ranks(2)
def test_what_post_may_not_return() -> None:
    """A post that returns no pair, or too little, is refused by name; shards stay registered."""
    whole = torch.zeros(13, WIDTH)
    for result in (whole, (whole, whole), (torch.zeros(2, 2), ())):
        model = plain_with_methods()
        model[0].up._local_tensor.fsdp_post_all_gather = lambda *args, found=result, **_: found
        with refused(fsdp2.StateError, "up", "fsdp_post_all_gather"):
            model(torch.randn(4, WIDTH))
        assert isinstance(model[0].up, DTensor)


@ranks(2)
def test_ranks_that_run_different_units(rank: int) -> None:
    """Ranks out of step get an error that says so, with extended parameters as without."""
    model = shard(make())
    for _ in range(2):
        step(model)
    with refused(fsdp2.StateError, "different collectives"):
        model[rank](torch.randn(4, WIDTH))
