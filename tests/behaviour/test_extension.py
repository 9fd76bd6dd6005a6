"""Promise: a tensor subclass may say itself what is gathered for it (the all-gather extension)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests._meshes import DEVICE
from tests._parity import make_mesh
from tests._pool import ranks
from tests._slow import slow, with_slow

aten = torch.ops.aten
WIDTH = 29


class Bare(torch.Tensor):
    """A float matrix kept as int8 with a scale for each row; without an extension of its class."""

    codes: Tensor
    scales: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Bare], codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Bare:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, codes.shape, dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Bare:
        return cls(inner["codes"], inner["scales"], dtype)

    @classmethod
    def quantize(cls, values: Tensor) -> Bare:
        values = values.detach()
        if values.numel():
            scales = values.float().abs().amax(dim=1).clamp(min=1e-8) / 127
        else:
            scales = values.new_zeros(values.shape[0], dtype=torch.float32)
        codes = (values.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(codes, scales, values.dtype)

    def values(self) -> Tensor:
        return (self.codes.float() * self.scales[:, None]).to(self.dtype)

    def on_both(self, function: Callable[[Tensor], Tensor], dtype: Any = None) -> Bare:
        return type(self)(function(self.codes), function(self.scales), dtype or self.dtype)

    def store(self, other: Tensor) -> Bare:
        found = other if isinstance(other, Bare) else self.quantize(other)
        self.codes.copy_(found.codes)
        self.scales.copy_(found.scales)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if isinstance(first, Bare):
            if func in (aten.detach.default, aten.alias.default):
                return first.on_both(lambda t: t.detach())
            if func is aten.clone.default:
                return first.on_both(torch.clone)
            if func is aten.split.Tensor:
                pairs = zip(first.codes.split(args[1]), first.scales.split(args[1]), strict=True)
                return [cls(codes, scales, first.dtype) for codes, scales in pairs]
            if func is aten.slice.Tensor and args[1:2] in ((), (0,)):
                return first.on_both(lambda t: func(t, *args[1:]))
            if func in (aten.new_zeros.default, aten.empty_like.default, aten.zeros_like.default):
                shape = args[1] if func is aten.new_zeros.default else first.shape
                device = kwargs.get("device") or first.device
                codes = torch.zeros(shape, dtype=torch.int8, device=device)
                return cls(codes, torch.zeros(shape[0], device=device), first.dtype)
            if func is aten.view.default:  # torch's own flattens what it keeps
                assert list(args[1]) in ([-1], list(first.shape))
                return first.on_both(lambda t: t)
            if func is aten.as_strided.default and list(args[1]) == list(first.shape):
                return first.on_both(lambda t: t)
            if func is aten._to_copy.default:
                device = kwargs.get("device") or first.device
                return first.on_both(lambda t: t.to(device, copy=True), kwargs.get("dtype"))
            if func is aten.copy_.default:
                return first.store(args[1])
            if func._schema.name.endswith("_"):
                values = first.values()
                func(values, *_plain(args[1:]), **_plain(kwargs))
                return first.store(values)
        return func(*_plain(args), **_plain(kwargs))


class Int8Weight(Bare):
    """The same with an extension: two inner tensors, both with rows."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        SEEN["mesh"] = mesh
        SEEN["outer"] = (tuple(outer_size), tuple(outer_stride), type(module), mp_policy)
        return (self.codes, self.scales), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        SEEN["param_dtype"] = param_dtype
        codes, scales = outputs
        if out is not None:
            local = out.to_local() if isinstance(out, DTensor) else out
            for mine, theirs in ((codes, local.codes), (scales, local.scales)):
                assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
            return None
        return type(self)(codes, scales, param_dtype), (codes, scales)


SEEN: dict[str, Any] = {}


def _plain(tree: Any) -> Any:
    """Replace every Bare by its values."""
    if isinstance(tree, Bare):
        return tree.values()
    if isinstance(tree, list | tuple):
        return type(tree)(_plain(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _plain(item) for key, item in tree.items()}
    return tree


class PaddedInt8Weight(Int8Weight):
    """The same, under torch's contract: it pads its inputs itself."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        missing = -(-outer_size[0] // mesh.size()) - self.shape[0]
        codes = F.pad(self.codes, (0, 0, 0, missing))
        return (codes, F.pad(self.scales, (0, missing))), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is not None:
            return None
        rows = outputs[0].shape[0]
        assert rows % dist.get_world_size() == 0, "padding was cut"
        return type(self)(*outputs, param_dtype), tuple(outputs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.as_strided.default:
            rows = args[1][0]
            return args[0].on_both(lambda t: t[:rows])
        return super().__torch_dispatch__(func, types, args, kwargs)


class BareToPad(Bare):
    """What the methods of `PaddedInt8Weight` need of a class, without these."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.as_strided.default:
            rows = args[1][0]
            return args[0].on_both(lambda t: t[:rows])
        return super().__torch_dispatch__(func, types, args, kwargs)


class Scaled(Int8Weight):
    """One scale for each rank's rows: an input whose first dim is not rows."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        values = self.values()
        largest = values.abs().max() if values.numel() else values.new_ones(())
        return (values / largest, largest.reshape(1)), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        parts, largest = outputs
        size = dist.get_world_size()
        assert largest.shape == (size,)
        chunk = -(-parts.shape[0] // size)
        values = parts * largest.repeat_interleave(chunk)[: parts.shape[0], None]
        if out is not None:
            out.copy_(values)
            return None
        return values, (values,)


class Apart(Int8Weight):
    """What post makes is a plain tensor in memory of its own; ``answers`` says so, or not."""

    answers: Any = None
    asked: int = 0
    gathered: ClassVar[dict[int, list[torch.UntypedStorage]]] = {}

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        codes, scales = outputs
        Apart.gathered[id(self)] = [tensor.untyped_storage() for tensor in outputs]
        values = (codes.float() * scales[:, None]).to(param_dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values)  # torch's own needs both
        return None


RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def _answer(self: Any) -> Any:
    type(self).asked += 1
    return self.answers


def apart(answer: Any) -> Any:
    """Make a class that answers so; None: that has no such method."""
    methods = {} if answer is None else {RELEASE: _answer}
    return type("Asked", (Apart,), {"answers": answer, **methods})


class Half(Int8Weight):
    """Only one of the two methods."""

    fsdp_post_all_gather = property()  # type: ignore[assignment]


class Opaque(Bare):
    """A wrapper of which no part can be made."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.new_zeros.default:
            raise NotImplementedError("new_zeros")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Dense(nn.Module):
    """A residual pair of matrices through `middle` features, and a plain bias."""

    def __init__(self, middle: int, kind: type[Bare] | None = Int8Weight) -> None:
        super().__init__()
        self.up = nn.Parameter(_weight(kind, middle, WIDTH))
        self.down = nn.Parameter(_weight(kind, WIDTH, middle))
        self.bias = nn.Parameter(torch.randn(middle))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.relu(F.linear(x, self.up, self.bias)), self.down)


def _weight(kind: type[Bare] | None, *shape: int) -> Tensor:
    values = torch.randn(*shape) / shape[1] ** 0.5
    return values if kind is None else kind.quantize(values)


MIDDLES = (13, 1, 2)  # uneven; one row; on three ranks, none for the last one


def make(middles: tuple[int, ...] = MIDDLES, kind: type[Bare] | None = Int8Weight) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Dense(middle, kind) for middle in middles))


def shard(model: Any, library: Any = fsdp2, **kwargs: Any) -> Any:
    for block in model:
        library.fully_shard(block, mesh=kwargs.get("mesh", make_mesh()), **_but_mesh(kwargs))
    return library.fully_shard(model, mesh=kwargs.get("mesh", make_mesh()), **_but_mesh(kwargs))


def _but_mesh(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "mesh"}


def values_of(tensor: Tensor) -> Tensor:
    """Return the whole values of a parameter or a gradient, sharded or not, subclass or not."""
    if isinstance(tensor, DTensor):
        local = values_of(tensor._local_tensor)
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).full_tensor()
    tensor = tensor.detach()
    return tensor.values() if isinstance(tensor, Bare) else tensor


def compare(model: nn.Module, reference: nn.Module, *, grads: bool, exact: bool) -> None:
    """Assert equal parameters (up to one step of int8) or gradients."""
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, other in expected.items():
        param = found[name]
        assert isinstance(param, DTensor)
        mine: Any = param.grad if grads else param
        theirs: Any = other.grad if grads else other
        assert mine.dtype == theirs.dtype, name
        if grads:
            assert type(mine._local_tensor) is Tensor, "gradients are ordinary tensors"
        a, b = values_of(mine), values_of(theirs)
        largest = b.abs().max().item()
        atol = largest * (1e-6 if exact else 1e-4 if grads else 1e-2)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, msg=f"{name} differs")


def train(model: Any, reference: Any, steps: int = 3) -> None:
    """Train both, the reference on the global batch in the ranks' parts, and compare all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    before = {name: values_of(p).clone() for name, p in reference.named_parameters()}
    for _ in range(steps):
        batch = torch.randn(12, WIDTH)
        parts = batch.chunk(size)
        loss = model(parts[rank]).square().mean()
        expected = [reference(part).square().mean() for part in parts]
        torch.testing.assert_close(loss, expected[rank], rtol=1e-3 if size == 3 else 1e-6, atol=0)
        loss.backward()
        torch.stack(expected).mean().backward()
        compare(model, reference, grads=True, exact=size != 3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, reference, grads=False, exact=size != 3)
        if size == 3:  # a division rounds elsewhere, and int8 codes are far apart: start alike
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    theirs.copy_(values_of(mine))
                    mine.copy_(mine)
    changed = [n for n, p in reference.named_parameters() if not values_of(p).equal(before[n])]
    assert len(changed) == len(before), changed


def step(model: Any) -> None:
    model(torch.randn(4, WIDTH)).sum().backward()


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(error) as found:
        yield
    for word in words:
        assert word in str(found.value), f"{word!r} is not in {found.value}"


# Values.


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
    ours, theirs = shard(_even(even)), shard(_even(even), torch_fsdp)
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


def _even(middles: tuple[int, ...], kind: type[Bare] = Int8Weight) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Dense(middle) for middle in middles))
    for block in model:
        block.up = nn.Parameter(_weight(kind, block.up.shape[0], WIDTH + 1))
        block.down = nn.Parameter(_weight(kind, WIDTH + 1, block.up.shape[0]))
    return model


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
    only[0].weight = nn.Parameter(_weight(Int8Weight, 5, WIDTH))
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
    whole = _weight(Int8Weight, 14, WIDTH)
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


# Methods on a plain tensor.


def set_methods(param: Any) -> None:
    """Let a plain parameter be gathered in bf16 and computed in the dtype that was asked for."""
    local = param._local_tensor

    def pre(self: Tensor, mesh: Any) -> Any:
        return (self.bfloat16(),), None

    def post(
        self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (found,) = outputs
        if out is not None:
            out.copy_(found)
            return None
        values = found.to(param_dtype)
        return values, (values,)

    local.fsdp_pre_all_gather = MethodType(pre, local)
    local.fsdp_post_all_gather = MethodType(post, local)


class Rounded(Dense):
    """What a gather in bf16 means, in one process."""

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
    held = [param for block in model for param in (block.up, block.down)]
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        parts = torch.randn(12, WIDTH).chunk(size)
        model(parts[rank]).square().mean().backward()
        torch.stack([reference(part).square().mean() for part in parts]).mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-3, atol=1e-4)
    assert all(
        a is b for a, b in zip(held, (p for b in model for p in (b.up, b.down)), strict=True)
    )


@ranks(2)
def test_methods_that_a_copy_lost() -> None:
    """A copy without the methods is refused by name, and works once it has them again."""
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
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
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].up.fill_(2)
    other[0].unshard()
    assert torch.equal(other[0].up, torch.full((13, WIDTH), 2.0))
    model[0].unshard()
    torch.testing.assert_close(model[0].up, make((13,), kind=None)[0].up.bfloat16().float())


# Methods on a subclass that has none.


def extend(model: Any, how: str = "method") -> Any:
    """Set the methods on the local tensors of all shards of `Bare`, as torch's own takes them."""
    for param in model.parameters():
        local = param._local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if has_codes(local) else ():
            function = getattr(PaddedInt8Weight if how == "padded" else Int8Weight, name)
            bound = partial(function, local) if how == "partial" else MethodType(function, local)
            setattr(local, name, bound)
    return model


def has_codes(local: Tensor) -> bool:
    return isinstance(local, Bare)


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
        extend(shard(_even((12, 2), Bare), library, mesh=make_mesh(*sizes)), how)
        for library in (fsdp2, torch_fsdp)
    )
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
        assert type(a) is type(b)
        if isinstance(b, Bare):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
        else:
            assert torch.equal(a, b)


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
    with refused(fsdp2.StateError, "0.up", "again after what copies them"):
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


# Collectives and memory.


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
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    for _ in range(2):
        model[0].unshard()
        whole = model[0].up
        assert whole.dtype is torch.float32
        torch.testing.assert_close(whole, make((13,), kind=None)[0].up.bfloat16().float())
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
    even = (12, 2)
    models = shard(_even(even, apart(True))), shard(_even(even, apart(True)), torch_fsdp)
    for model in models:
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            model(torch.randn(5, WIDTH + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        a, b = mine._local_tensor, other._local_tensor
        if isinstance(b, Bare):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
        else:
            assert torch.equal(a, b)


# State.


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
    for m in (model, reference):
        m(x).square().mean().backward()
    assert model[0].up.dtype is torch.float64
    compare(model, reference, grads=True, exact=True)


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


# Errors.


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
    for kind, word in ((Half, "fsdp_post_all_gather"), (Opaque, "no shard can be made")):
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
        model = shard(make((13,), kind=None))
        set_methods(model[0].up)
        seen = []
        setattr(model[0].up._local_tensor, RELEASE, lambda found=answers[rank]: found)
        post = model[0].up._local_tensor.fsdp_post_all_gather

        def keep(
            outputs: Any, *args: Any, seen: Any = seen, post: Any = post, **kwargs: Any
        ) -> Any:
            seen += outputs
            return post(outputs, *args, **kwargs)

        model[0].up._local_tensor.fsdp_post_all_gather = keep
        if answers[1] is True:
            for _ in range(2):
                model[0].unshard()
                assert [tensor.untyped_storage().nbytes() for tensor in seen] == [0] * len(seen)
                torch.testing.assert_close(
                    model[0].up, make((13,), kind=None)[0].up.bfloat16().float()
                )
                model[0].reshard()
            assert seen
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
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather

    def bad(mesh: Any) -> Any:
        if what == "raises":
            raise KeyError("broken pre")
        found: dict[str, Any] = {
            "shape": ((torch.zeros(2, 3),), None),
            "count": ((torch.zeros(2), torch.zeros(2)), None),
            "result": torch.zeros(2),
            "subclass": ((_weight(Int8Weight, 2, 2),), None),
        }
        return found[what]

    if rank == 0:
        local.fsdp_pre_all_gather = bad
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
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    if beside:
        set_methods(model[0].down)
    step(model)
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather
    if rank == world_size - 1:
        local.fsdp_pre_all_gather = lambda mesh: ((torch.zeros(2, 3),), None)
    word = "other shapes" if rank == world_size - 1 else f"rank {world_size - 1}"
    with refused(fsdp2.StateError, "up", word):
        model(torch.randn(4, WIDTH))
    local.fsdp_pre_all_gather = good
    step(model)


@ranks(4)
def test_an_extension_that_fails_on_one_replica(rank: int) -> None:
    """An error in one replica is raised in the other one too, instead of a hang in backward."""
    model = shard(make((13,), kind=None), mesh=make_mesh(2, 2))
    set_methods(model[0].up)
    if rank == 3:
        model[0].up._local_tensor.fsdp_pre_all_gather = lambda mesh: 1 / 0
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH))


@ranks(2)
def test_what_post_may_not_return() -> None:
    """A post that returns no pair, or too little, is refused by name; shards stay registered."""
    whole = torch.zeros(13, WIDTH)
    for result in (whole, (whole, whole), (torch.zeros(2, 2), ())):
        model = shard(make((13,), kind=None))
        set_methods(model[0].up)
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
