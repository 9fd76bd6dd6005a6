"""What may step as one tensor: the measured claim about rounding, and who is whose neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2._core.params.param import Span
from fsdp2.optim._local import ELEMENTWISE, _granule
from fsdp2.optim._runs import Member, _follows
from tests.kit.slow import slow

ODD = (5, 7, 33, 1, 100, 64, 3000, 17)
ALIGNED = (16, 48, 64, 3008, 7)  # only the last one ends inside a cache line (of floats)
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}],
    "Adam": [{"weight_decay": 0.1}, {"betas": (0.4, 0.3), "amsgrad": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
}


def step_apart_and_joined(
    cls: type[torch.optim.Optimizer], sizes: tuple[int, ...], dtype: torch.dtype, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return what separate tensors become, and what one tensor of all of them becomes."""
    torch.manual_seed(0)
    apart = [torch.randn(size, dtype=dtype) for size in sizes]
    joined = torch.cat(apart)
    optimizers = [cls(apart, **kwargs), cls([joined], **kwargs)]
    for _ in range(6):
        for tensor in apart:
            tensor.grad = torch.randn_like(tensor)
        joined.grad = torch.cat([tensor.grad for tensor in apart if tensor.grad is not None])
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat(apart), joined


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_joining_changes_no_bit_of_the_loop(
    cls: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """In fp32 and fp64 the loop and foreach compute an element alike wherever it lies."""
    assert _granule(False, torch.empty(1, dtype=dtype)) == 1
    for kwargs in SETTINGS.get(cls.__name__, [{}]):
        for foreach in (False, True):
            apart, joined = step_apart_and_joined(cls, ODD, dtype, foreach=foreach, **kwargs)
            assert torch.equal(apart, joined), (kwargs, foreach)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_joining_whole_cache_lines_changes_no_bit_of_fused_kernels(
    name: str, dtype: torch.dtype
) -> None:
    """Behind whole cache lines a fused kernel computes an element alike too."""
    assert _granule(True, torch.empty(1, dtype=dtype)) == 64
    for kwargs in SETTINGS.get(name, [{}]):
        cls = getattr(torch.optim, name)
        apart, joined = step_apart_and_joined(cls, ALIGNED, dtype, fused=True, **kwargs)
        assert torch.equal(apart, joined), kwargs


def test_what_is_never_joined_on_a_cpu() -> None:
    """Half precision and complex tensors step one by one on a CPU; on a device floats join."""
    for dtype in (torch.bfloat16, torch.float16, torch.complex64):
        assert _granule(False, torch.empty(1, dtype=dtype)) == 0
    assert _granule(True, torch.empty(1, dtype=torch.bfloat16, device="meta")) == 1
    assert _granule(False, torch.empty(1, dtype=torch.complex64, device="meta")) == 0


def test_neighbours() -> None:
    """A neighbour begins where the padded span before it ends, in the same buffer and dtype."""
    flat, other = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)

    def member(
        buffer: Tensor | None,
        start: int,
        nbytes: int,
        rows: int,
        dtype: torch.dtype = torch.float32,
    ) -> Member:
        span = None if buffer is None else Span(buffer, start, nbytes)
        local = torch.zeros(rows, dtype=dtype)
        return Member(local, local, span, {})  # type: ignore[arg-type]  # no DTensor is needed

    def joins(first: Member, second: Member, step: int = 1) -> bool:
        return _follows(first, second, lambda _: step)

    first = member(flat, 0, 64, 16)
    assert joins(first, member(flat, 64, 8, 2))
    assert not joins(first, member(flat, 72, 8, 2))
    assert not joins(first, member(other, 64, 8, 2))
    assert not joins(first, member(None, 0, 0, 2))
    assert not joins(first, member(flat, 64, 8, 1, torch.float64))
    assert not joins(first, member(flat, 64, 8, 2), step=0)
    assert joins(first, member(flat, 64, 8, 2), step=64)
    assert not joins(member(flat, 0, 64, 15), member(flat, 64, 8, 2), step=64)  # padded
    assert joins(member(flat, 0, 64, 0), member(flat, 64, 8, 2), step=64)  # nothing but padding
