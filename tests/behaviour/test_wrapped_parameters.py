"""Promise: adapters train on a frozen base that wraps other tensors, sharded by these.

`tests/ecosystem/test_qlora.py` shows it of torchao and bitsandbytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import linear

import fsdp2
from fsdp2._core.base import torch_dtensor
from tests.kit.in_turn import shard_each
from tests.kit.parity import assert_same, make_mesh, whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow

GROUP = 4


class Packed(Tensor):
    """Two codes a byte, and scales of groups, transposed: `[columns / GROUP, rows]`."""

    codes: Tensor
    scales: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls: type[Packed], codes: Tensor, scales: Tensor, table: Tensor) -> Packed:
        shape = (codes.shape[0], codes.shape[1] * 2)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scales: Tensor, table: Tensor) -> None:
        self.codes, self.scales, self.table = codes, scales, table

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, GROUP))
        scales = groups.abs().amax(2)
        codes = ((groups / scales.unsqueeze(2) + 1) * 7.5).round().to(torch.uint8).flatten(1)
        table = torch.linspace(-1, 1, 16)
        return cls(codes[:, ::2] * 16 + codes[:, 1::2], scales.T.contiguous(), table)

    def dequantize(self) -> Tensor:
        codes = torch.stack([self.codes // 16, self.codes % 16], 2).flatten(1)
        values = self.table[codes.long()].unflatten(1, (-1, GROUP))
        return (values * self.scales.T.unsqueeze(2)).flatten(1)

    def __tensor_flatten__(self) -> tuple[list[str], torch.Size]:
        return ["codes", "scales", "table"], self.shape

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Packed:
        made = cls(inner["codes"], inner["scales"], inner["table"])
        assert tuple(context) == tuple(made.shape)  # it was told of the new shape
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            return linear(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            like = args[0]
            return cls(*(func(one) for one in (like.codes, like.scales, like.table)))
        raise NotImplementedError(func)


class Adapted(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        weight = torch.randn(rows, columns) / columns**0.5
        self.base = nn.Parameter(Packed.of(weight), requires_grad=False)
        self.a = nn.Parameter(torch.randn(3, columns) / 10)
        self.b = nn.Parameter(torch.randn(rows, 3) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.base) + x @ self.a.T @ self.b.T


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(8, 13), nn.Tanh(), nn.Linear(13, 12), nn.Tanh(), Adapted(12, 29))


def sharded(seed: int, *shape: int, **kwargs: Any) -> nn.Module:
    model = build(seed)
    return shard_each(model[0], model[4], model, mesh=make_mesh(*shape), **kwargs)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def step(model: nn.Module, number: int, rank: int = 0, size: int = 1) -> Tensor:
    torch.manual_seed(number)
    rows = torch.randn(12, 8).chunk(size)[rank]
    loss = model(rows).square().mean()
    loss.backward()
    with torch.no_grad():
        for param in trained(model).values():
            param.sub_(param.grad, alpha=0.1)
            param.grad = None
    return loss.detach()


@pytest.mark.parametrize("setting", [{}, slow({"reshard_after_forward": False})])
@ranks(slow(2), 3, slow(4))
def test_adapters_train_on_a_quantised_base(setting: dict[str, Any], tmp_path: Path) -> None:
    """As one process does; a checkpoint brings base and adapters to another layout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(size,), (2, 2)] if size == 4 else [(size,)]
    for number, shape in enumerate(shapes):
        plain, model = build(1), sharded(1, *shape, **setting)
        for count in range(3):
            step(plain, count)
            step(model, count, rank, size)
        for name, param in trained(plain).items():
            assert_same(whole(trained(model)[name]), param.detach(), name, 1e-5)
        assert type(torch_dtensor.local_part(model[0].base)) is Packed
        fsdp2.checkpoint.save(tmp_path / str(number), model)
        other = sharded(2, *shapes[number - 1])  # another base, too
        fsdp2.checkpoint.load(tmp_path / str(number), other)
        for one in (model, other):
            step(one, 7, rank, size)
        for name, param in trained(model).items():
            assert_same(whole(trained(other)[name]), whole(param), name, 1e-5)
        full = fsdp2.checkpoint.full_state(other, rank0_only=False)["model"]
        for name in ("codes", "scales", "table"):
            expected = getattr(plain[4].base, name)
            assert torch.equal(full[f"4.base.{name}"], expected), name
        again = sharded(3, *shape)
        fsdp2.checkpoint.load_full_state(again, {"model": full})
        for name, param in trained(other).items():
            assert torch.equal(whole(trained(again)[name]), whole(param)), name


@ranks(2)
def test_what_a_class_lacks_is_told() -> None:
    """Which parameter, and which method: before anything was changed."""

    class Opaque(Packed):
        dequantize = None  # type: ignore[assignment]

    class Shuffled(Packed):
        """Its rows are not those of its tensors."""

        def dequantize(self) -> Tensor:
            return super().dequantize().flip(0)

    for kind, text in (
        (Opaque, r"base is a Opaque.*dequantize"),
        (Shuffled, r"base is a Shuffled.*dequantize\(\) of a shard does not return its rows"),
    ):
        module = Adapted(8, 13)
        module.base = nn.Parameter(kind.of(torch.randn(13, 8)), requires_grad=False)
        with pytest.raises(fsdp2.ConfigError, match=text):
            fsdp2.fully_shard(module, mesh=make_mesh())
    module = Adapted(8, 13)
    module.base.requires_grad_(True)
    with pytest.raises(fsdp2.ConfigError, match=r"base is a Packed, which cannot be sharded"):
        fsdp2.fully_shard(module, mesh=make_mesh())
