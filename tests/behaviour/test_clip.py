"""Promise: `fsdp2.clip_grad_norm_` computes the norm of the whole model, whatever is sharded how.

The reference is torch's own function on the unsharded model with the same gradients.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.kit.collectives import Sent
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES, WIDTH, Batch, Case, each_block, seeded, stack
from tests.kit.parity import Pair, bits, local_loss, make_mesh, names_of, shard, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

ORDERS = [2.0, math.inf, 1.0, 3.0, -math.inf, 0.5]
TOLERANCE = 1e-6


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad).clone() for n, p in names_of(model).items() if p.grad is not None}


def trained(case: Case | str, **kwargs: Any) -> nn.Module:
    """Return a sharded model that has gradients."""
    case = CASES[case] if isinstance(case, str) else case
    model = shard(seeded(case.build), case, **kwargs)
    local_loss(model, case).backward()
    return model


def unsharded(gradients: dict[str, Tensor], model: nn.Module) -> list[nn.Parameter]:
    """Return plain parameters with the given whole gradients, each parameter once."""
    params = []
    for name, param in model.named_parameters():
        zeros = torch.zeros(param.shape, dtype=param.dtype)
        params.append(nn.Parameter(zeros, param.requires_grad))
        if name in gradients:
            params[-1].grad = gradients[name].clone()
    return params


def assert_clips_like_torch(
    model: nn.Module, order: float = 2.0, max_norm: float = 0.5, **kwargs: Any
) -> Tensor:
    """Clip by both and compare norm and every gradient; the norm is the same on every rank."""
    expected_params = unsharded(gradients_of(model), model)
    expected = torch.nn.utils.clip_grad_norm_(expected_params, max_norm, order)
    total = fsdp2.clip_grad_norm_(model.parameters(), max_norm, order, **kwargs)
    assert type(total) is Tensor
    assert total.dim() == 0
    torch.testing.assert_close(total, expected.to(total.dtype), rtol=TOLERANCE, atol=0.0)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, total.item())
    assert len(set(seen)) == 1, seen
    for param, plain in zip(model.parameters(), expected_params, strict=True):
        assert (param.grad is None) == (plain.grad is None)
        if param.grad is not None and plain.grad is not None:
            torch.testing.assert_close(whole(param.grad), plain.grad, rtol=4e-6, atol=1e-8)
    return total


@pytest.mark.parametrize("order", with_slow(ORDERS, [2.0, float("-inf")]))
@ranks(2)
def test_any_order(order: float) -> None:
    """The norm of any order is that of the unsharded model, and so is what is left of gradients."""
    for foreach in (None, True, False):
        total = assert_clips_like_torch(trained("stack"), order, 0.01, foreach=foreach)
        assert total > 0


HARD = "few_rows scalars non_contiguous partly_frozen tied_lm tied_blocks unused_parts one_row"


@pytest.mark.parametrize(
    "case", with_slow([*HARD.split(), "one_group"], ["few_rows", "scalars", "tied_blocks"])
)
@ranks(3)
def test_every_kind_of_parameter(case: str) -> None:
    """Empty and uneven shards, whole scalars, ties and missing gradients count as they should.

    The order -inf is a minimum over elements that exist, on ranks without rows too.
    """
    model = trained(case)
    assert_clips_like_torch(model)
    assert_clips_like_torch(model, math.inf, 1e6)
    if case == "few_rows":
        assert_clips_like_torch(trained(case), -math.inf)


@ranks(2)
def test_order_zero_counts_elements() -> None:
    """The order 0 counts elements that are not zero, over all ranks."""
    model = trained("stack")
    count = sum(int((g != 0).sum()) for g in gradients_of(model).values())
    assert fsdp2.clip_grad_norm_(model.parameters(), 1e9, 0).item() == count


@pytest.mark.parametrize("shape", [(2, 2), slow((4, 1)), slow((1, 4))])
@ranks(4)
def test_replicas_count_once(shape: tuple[int, int]) -> None:
    """On a replicate x shard mesh every element counts once, whatever the sizes."""
    assert_clips_like_torch(trained("stack", mesh=make_mesh(*shape)))
    assert_clips_like_torch(trained("scalars", mesh=make_mesh(*shape)))


def tensor_parallel_and_more(mesh: DeviceMesh) -> nn.Module:
    """Return a model with parameters on three meshes, and one on none."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parallel = nn.Sequential(nn.Linear(13, 30), nn.Tanh(), nn.Linear(30, 13))
            self.sharded = nn.Linear(13, 13)
            self.hybrid = nn.Linear(13, 5)
            self.plain = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(self.hybrid(self.sharded(self.parallel(x))))

    model = Model()
    parallelize_module(
        model.parallel, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fsdp2.fully_shard(model.parallel, mesh=mesh["data"])
    fsdp2.fully_shard(model.sharded, mesh=init_device_mesh(DEVICE, (4,)))
    fsdp2.fully_shard(model.hybrid, mesh=make_mesh(2, 2))
    return model


class Gathers(Sent):
    """And meets no operation of DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, *rest: Any) -> Any:
        assert not any(issubclass(t, DTensor) for t in types), func
        return super().__torch_dispatch__(func, types, *rest)


@ranks(4)
def test_any_mix_of_meshes() -> None:
    """TP x FSDP, FSDP over all ranks, HSDP and plain parameters give one norm."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel_and_more(mesh)
    batch = torch.ones(4, 13)
    model(batch).square().mean().backward()
    for order in (2.0, math.inf, 1.0):
        assert_clips_like_torch(model, order)
    with Gathers() as seen:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    # data, tensor, all ranks, the shard axis of the hybrid mesh
    assert len(seen.names) == 4, seen.names


@ranks(2)
def test_one_collective_on_one_mesh() -> None:
    """A model on one mesh costs one collective of a few numbers, and no DTensor operation."""
    model = trained("stack")
    with Gathers() as seen:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    assert len(seen.names) == 1, seen.names


@ranks(4)
def test_axes_of_a_mesh_by_hand() -> None:
    """Shards over two axes, replicas over one, and partial gradients count each element once."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("a", "b"))
    placements: list[list[Any]] = [
        [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)],
        [Shard(1), Replicate()], [Replicate(), Replicate()],
    ]  # fmt: skip
    params, plain = [], []

    def add(placed: list[Any], grad: DTensor) -> None:
        zeros = torch.zeros(grad.shape)
        params.append(nn.Parameter(distribute_tensor(zeros, mesh, placed)))
        plain.append(nn.Parameter(zeros.clone()))
        params[-1].grad, plain[-1].grad = grad, grad.full_tensor().clone()

    for placed in placements:
        add(placed, distribute_tensor(torch.randn(5, 3), mesh, placed))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()])
    add([Replicate(), Replicate()], partial)
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    total = fsdp2.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(total, expected, rtol=TOLERANCE, atol=0.0)
    for param, other in zip(params, plain, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


@ranks(2)
def test_ways_to_pass_parameters() -> None:
    """A generator, a list with duplicates, a single tensor and nothing at all are taken."""
    model = trained("stack")
    whole_norm = fsdp2.clip_grad_norm_(model.parameters(), 1e9)
    again = fsdp2.clip_grad_norm_([*model.parameters(), *model.parameters()], 1e9)
    assert torch.equal(again, whole_norm)
    before = gradients_of(model)
    fsdp2.clip_grad_norm_([*model.parameters(), *model.parameters()], whole_norm.item() / 2)
    for name, grad in gradients_of(model).items():
        torch.testing.assert_close(grad, before[name] / 2, rtol=1e-5, atol=0.0)
    weight = model.inp.weight
    assert isinstance(weight, nn.Parameter)
    single = fsdp2.clip_grad_norm_(weight, 1e9)
    torch.testing.assert_close(single, whole(weight.grad).norm())  # type: ignore[arg-type]
    assert fsdp2.clip_grad_norm_([], 1.0).item() == 0.0


@ranks(2)
def test_no_gradient_at_all(rank: int) -> None:
    """Without gradients the norm is 0; a rank that lacks some does not keep others waiting."""
    model = trained("stack")
    model.zero_grad()
    assert fsdp2.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0
    model = trained("stack")
    if rank == 0:
        model.zero_grad()
    norms: list[Any] = [None, None]
    dist.all_gather_object(norms, fsdp2.clip_grad_norm_(model.parameters(), 1e9).item())
    assert norms[0] == norms[1] > 0


@ranks(2)
def test_gradients_that_are_not_finite(rank: int) -> None:
    """Every rank raises for a nan on one rank, and changes nothing; unasked it scales by nan."""
    model = trained("stack")
    bias = model.out.bias.grad
    if rank == 1:
        bias.to_local().fill_(torch.nan)
    before = {n: p.grad.to_local().clone() for n, p in names_of(model).items()}  # type: ignore[union-attr]
    with pytest.raises(fsdp2.StateError, match=r"total norm of order 2.*is nan"):
        fsdp2.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for name, param in names_of(model).items():
        assert torch.equal(bits(param.grad.to_local()), bits(before[name])), name  # type: ignore[union-attr]
    assert fsdp2.clip_grad_norm_(model.parameters(), 1.0).isnan()
    assert model.inp.weight.grad.to_local().isnan().all()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(2)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """bf16 gradients are summed in float32, float64 ones in float64, complex ones by magnitude."""
    case = Case(
        lambda: stack()().to(dtype),
        each_block,
        lambda rows: Batch((torch.randn(rows, WIDTH).to(dtype),), {}),
    )
    model = trained(case)
    joined = torch.cat([g.flatten().double() for g in gradients_of(model).values()])
    total = fsdp2.clip_grad_norm_(model.parameters(), 0.1)
    assert total.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(total.double(), joined.norm(), rtol=TOLERANCE, atol=0.0)
    after = torch.cat([g.flatten().double() for g in gradients_of(model).values()]).norm()
    assert abs(after.item() - 0.1) < 1e-3
    plain = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    plain.grad = torch.tensor([3 + 4j, 0], dtype=torch.complex64)
    assert fsdp2.clip_grad_norm_([plain], 1.0).item() == 5.0


@ranks(2)
def test_training_with_clipping_is_that_of_the_plain_model() -> None:
    """Clipped training of sharded parameters follows clipped training of the unsharded model."""
    pair = Pair("stack", optimizer=functools.partial(torch.optim.SGD, momentum=0.9))
    params = list(pair.model.parameters())
    pair.optimizer = fsdp2.optim.local(torch.optim.SGD, params, lr=0.1, momentum=0.9)
    pair.first_rtol = pair.later_rtol = 1e-5
    for _ in range(4):
        pair.backward()
        norm = fsdp2.clip_grad_norm_(params, 0.1)
        expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        pair.finish()
