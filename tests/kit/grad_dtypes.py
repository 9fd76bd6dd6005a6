"""What a user chooses about dtypes of gradients, and the gradients that follow, taken by hand.

The reference adds up what plain models in the dtypes of compute leave, and takes the mean over
ranks. Everything here runs on a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.models import seeded
from tests.kit.parity import whole

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


UNSET = "unset"


class Odd(nn.Module):
    """Dims that no number of ranks divides, one row, one element, something frozen, a tie."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.norm = nn.LayerNorm(29)
        self.down = nn.Linear(29, 1)
        self.one = nn.Parameter(torch.full(() if scalar else (1,), 1.25))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.again = nn.Linear(29, 1, bias=False)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor, use_one: bool = True) -> Tensor:
        y = F.linear(x, self.up.weight.to(x.dtype), self.up.bias.to(x.dtype))
        y = F.layer_norm(y, (29,), self.norm.weight.to(y.dtype), self.norm.bias.to(y.dtype))
        y = F.linear(torch.tanh(y), self.down.weight, self.down.bias) + self.again(y)
        return y * self.one.to(y.dtype) if use_one else y + self.frozen.to(y.dtype).sum()


def is_of_a_norm(param: nn.Parameter) -> bool:
    return param.dim() == 1 and param.numel() == 29


@dataclass(frozen=True)
class Choice:
    """What a user says about dtypes; `grad_dtype` is of the parameters that `sets` picks."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    stored: torch.dtype = FP32
    keeps: bool = False
    grad_dtype: torch.dtype | str | None = UNSET
    sets: Callable[[nn.Parameter], bool] = lambda param: True
    overrides: Callable[[nn.Parameter], torch.dtype | None] | None = None

    def make(self, build: Callable[[], nn.Module] = Odd) -> nn.Module:
        model = seeded(build).to(self.stored)
        if self.grad_dtype is not UNSET:
            for param in model.parameters():
                if self.sets(param) and param.requires_grad:
                    param.grad_dtype = self.grad_dtype
        return model

    def policy(self, library: Any = fsdp2) -> Any:
        mine = {"keep_low_precision_grads": True} if self.keeps else {}
        return library.MixedPrecisionPolicy(
            self.param_dtype,
            self.reduce_dtype,
            param_dtype_override_fn=self.overrides,
            **mine,
        )

    def computed(self, param: nn.Parameter) -> torch.dtype:
        chosen = self.overrides(param) if self.overrides is not None else None
        return chosen or self.param_dtype or self.stored

    def adds_up(self, param: nn.Parameter) -> torch.dtype:
        """Dtype in which gradients add up."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        if self.keeps:
            return self.computed(param)
        if self.grad_dtype is not UNSET and self.sets(param):
            return self.computed(param) if self.grad_dtype is None else self.grad_dtype  # type: ignore[return-value]  # UNSET
        return self.stored

    def kept(self, param: nn.Parameter, reduced: torch.dtype) -> torch.dtype:
        """Dtype of the sharded gradient."""
        if self.keeps:
            return reduced
        if self.grad_dtype is not UNSET and self.sets(param):
            return reduced if self.grad_dtype is None else self.grad_dtype  # type: ignore[return-value]  # UNSET
        return self.stored


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if is_of_a_norm(param) else None


CHOICES = {
    "nothing": Choice(),
    "bf16": Choice(BF16),
    "fp16": Choice(FP16),
    "bf16_in_bf16": Choice(BF16, BF16),
    "bf16_in_fp16": Choice(BF16, FP16),
    "fp32_in_bf16": Choice(None, BF16),
    "norms_whole": Choice(BF16, overrides=keep_norms),
    "norms_whole_in_bf16": Choice(BF16, BF16, overrides=keep_norms),
    "all_bf16": Choice(stored=BF16),
    "all_bf16_in_fp32": Choice(reduce_dtype=FP32, stored=BF16),
    "all_bf16_norms_add_in_fp32": Choice(stored=BF16, grad_dtype=FP32, sets=is_of_a_norm),
    "grads_bf16": Choice(grad_dtype=BF16),
    "norms_bf16": Choice(grad_dtype=BF16, sets=is_of_a_norm),
    "grads_bf16_in_fp32": Choice(BF16, FP32, grad_dtype=BF16),
    "any": Choice(BF16, grad_dtype=None),
    "norms_any": Choice(BF16, grad_dtype=None, sets=is_of_a_norm),
    "any_in_fp32": Choice(BF16, FP32, grad_dtype=None),
    "kept": Choice(BF16, keeps=True),
    "kept_fp32": Choice(BF16, FP32, keeps=True),
}
FIRST = ("bf16", "norms_whole", "all_bf16_norms_add_in_fp32", "norms_bf16", "any", "kept")
IN_TORCH = [name for name, choice in CHOICES.items() if not choice.keeps]


def batch_of(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(1000 * step + rank))


def micro_batch(model: nn.Module, step: int, **kwargs: Any) -> None:
    x = batch_of(step).to(next(model.parameters()).dtype)
    model(x, **kwargs).float().square().mean().backward()


def gradients_by_hand(
    model: nn.Module, choice: Choice, steps: Sequence[int], waits: bool = False, **kwargs: Any
) -> dict[str, Tensor]:
    """Add up a plain model's gradients, and take the mean over ranks, in the dtypes of a choice.

    Uses in one backward add up in that dtype if it is no wider than that of compute, or if their
    sum `waits` for a later backward with sync.
    """
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor] = {}
    for step in steps:
        low = {
            name: param.detach().to(choice.computed(param)).requires_grad_()
            for name, param in params.items()
        }
        x = batch_of(step).to(choice.param_dtype or choice.stored)
        begins = step == steps[0] and (waits or len(steps) > 1)
        for name, leaf in low.items():
            dtype = choice.adds_up(params[name])
            leaf.grad_dtype = dtype if begins or dtype.itemsize <= leaf.itemsize else None
        low["again.weight"] = low["down.weight"]
        torch.func.functional_call(model, low, (x,), kwargs).float().square().mean().backward()
        del low["again.weight"]
        for name, leaf in low.items():
            dtype, grad = choice.adds_up(params[name]), leaf.grad
            if grad is None:
                continue
            if name not in sums:
                sums[name] = grad.to(dtype)
            elif grad.dtype.itemsize < dtype.itemsize:
                sums[name] += grad
            else:
                sums[name] += grad.to(dtype)
    reduced = functools.reduce(torch.promote_types, map(choice.adds_up, params.values()))
    return {
        name: mean_over_ranks(sums[name].to(reduced)).to(choice.kept(params[name], reduced))
        for name in params
        if name in sums
    }


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean, added up in the dtype of `value`."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return functools.reduce(torch.add, parts) / len(parts)


def assert_same_values(actual: Tensor, expected: Tensor, what: str, scale: float = 1.0) -> None:
    """Two ranks add in one order: bits are equal. More add in the backend's order."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    if dist.get_world_size() <= 2 and expected.dtype is not FP16:
        assert torch.equal(actual, expected), what
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * scale, msg=what)


def check_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, param in model.named_parameters():
        assert (param.grad is not None) is (name in expected), name
        if param.grad is not None:
            assert isinstance(param.grad, DTensor)
            assert_same_values(whole(param.grad), expected[name], name, largest)


def twins(choice: Choice, mesh: DeviceMesh, **kwargs: Any) -> list[nn.Module]:
    """Return the same model sharded by this package and by torch's own."""
    models = []
    for library in (fsdp2, torch_fsdp):
        model = choice.make()
        library.fully_shard(model, mesh=mesh, mp_policy=choice.policy(library), **kwargs)
        models.append(model)
    return models


def assert_same_bits(models: Sequence[nn.Module], rtol: float = 0.0) -> None:
    ours, theirs = (dict(model.named_parameters()) for model in models)
    for name, param in ours.items():
        found, expected = param.grad, theirs[name].grad
        assert (found is None) is (expected is None), name
        if expected is not None:
            assert found.dtype is expected.dtype, f"{name}: {found.dtype}, not {expected.dtype}"
            torch.testing.assert_close(
                found.to_local(), expected.to_local(), rtol=rtol, atol=rtol / 50, msg=name
            )
