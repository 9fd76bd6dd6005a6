"""Tensor subclasses with an all-gather extension, models of them, and their twins in one process.

Everything here runs on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.in_turn import advance, shard_each
from tests.kit.parity import make_mesh

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
        self.up = nn.Parameter(make_weight(kind, middle, WIDTH))
        self.down = nn.Parameter(make_weight(kind, WIDTH, middle))
        self.bias = nn.Parameter(torch.randn(middle))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.relu(F.linear(x, self.up, self.bias)), self.down)


def make_weight(kind: type[Bare] | None, *shape: int) -> Tensor:
    values = torch.randn(*shape) / shape[1] ** 0.5
    return values if kind is None else kind.quantize(values)


MIDDLES = (13, 1, 2)  # uneven; one row; on three ranks, none for the last one


def make(middles: tuple[int, ...] = MIDDLES, kind: type[Bare] | None = Int8Weight) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Dense(middle, kind) for middle in middles))


def shard(model: Any, library: Any = fsdp2, **kwargs: Any) -> Any:
    shard_each(*model, library=library, mesh=kwargs.get("mesh", make_mesh()), **_but_mesh(kwargs))
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
        advance(*optimizers)
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


def make_even(middles: tuple[int, ...], kind: type[Bare] = Int8Weight) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Dense(middle) for middle in middles))
    for block in model:
        block.up = nn.Parameter(make_weight(kind, block.up.shape[0], WIDTH + 1))
        block.down = nn.Parameter(make_weight(kind, WIDTH + 1, block.up.shape[0]))
    return model


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
