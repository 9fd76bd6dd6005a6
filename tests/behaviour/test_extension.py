"""Promise: a tensor subclass may say itself what is gathered for it (the all-gather extension)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.kit.extensions import (
    SEEN,
    WIDTH,
    Bare,
    Dense,
    Int8Weight,
    PaddedInt8Weight,
    Scaled,
    compare,
    make,
    make_even,
    make_weight,
    shard,
    train,
)
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
    for model in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            model(torch.randn(5, WIDTH + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.placements == other.placements
        a, b = mine._local_tensor, other._local_tensor
        if isinstance(b, Bare):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
        else:
            assert torch.equal(a, b)


@ranks(slow(2), 3)
def test_inputs_that_the_extension_padded_keep_their_padding() -> None:
    """A subclass that pads its inputs itself, as torch demands, gets padded outputs and is cut."""
    model = shard(make(kind=PaddedInt8Weight))
    train(model, make(kind=PaddedInt8Weight), steps=2)


@ranks(2, 3)
def test_an_input_that_is_not_rows() -> None:
    """A scale of one element a rank arrives as one element for each rank, empty shards too."""
    model, reference = shard(make(kind=Scaled)), make(kind=Int8Weight)
    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(model(x), reference(x))
        model(x).sum().backward()


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
    fsdp2.fully_shard(only, mesh=make_mesh())
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(only(x), expected(x))
        only(x).sum().backward()


@ranks(2)
def test_several_forwards_before_one_backward() -> None:
    """What autograd saved of an extended parameter is valid after it was gathered again."""
    model, reference = shard(make()), make()
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for m in (model, reference):
        (m(x).square().mean() + m(y).square().mean()).backward()
    compare(model, reference, grads=True, exact=True)


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
    for m in models:
        m(x).square().mean().backward()
    compare(model, models[1], grads=True, exact=True)


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
    assert isinstance(grad, DTensor)
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
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float32


class Checkpointed(nn.Module):
    """Recomputes its inner module in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


@ranks(2)
def test_activation_checkpointing() -> None:
    """Extended parameters that are gathered again for a recomputed forward have their values."""
    model, reference = make(), make()
    for index, block in enumerate(model):
        model[index] = Checkpointed(fsdp2.fully_shard(block, mesh=make_mesh()))
    fsdp2.fully_shard(model, mesh=make_mesh())
    x = torch.randn(4, WIDTH)
    for m in (model, reference):
        for _ in range(2):
            m(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


class BytesOnly(fsdp2.AllGather):
    """An all-gather of the user's that notes what it carried."""

    def __init__(self) -> None:
        self.carried: list[torch.dtype] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.carried.append(input_tensor.dtype)
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


@ranks(2)
def test_a_custom_all_gather() -> None:
    """A custom all-gather carries extended parameters too, as bytes."""
    model, custom = shard(make()), BytesOnly()
    for block in model:
        block.set_custom_all_gather(custom)
    train(model, make(), steps=2)
    assert set(custom.carried) == {torch.uint8}
