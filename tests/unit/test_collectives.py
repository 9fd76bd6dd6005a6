from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp2._core.base import torch_dtensor
from fsdp2._core.comm import wire
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.wire import Wire as Sender
from fsdp2._core.params.planning import GradientScale
from tests.unit._loopback import LoopbackComm, Wire, fake_process_group

SUM = dist.ReduceOp.SUM
WIDE = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 1000])
def test_wide_exponents_divide_once(ranks: int, dtype: torch.dtype) -> None:
    """In the collective if it can, on the shard if only sums are wanted or the factor is one's."""
    mean = GradientScale(1.0, 1.0, dist.ReduceOp.AVG if ranks > 1 else SUM)
    assert GradientScale.choose(ranks, dtype) == mean
    assert GradientScale.choose(ranks, dtype, only_sums=True) == GradientScale(1.0, 1.0 / ranks)
    assert GradientScale.choose(ranks, dtype, divide_by=5) == GradientScale(1.0, 1.0 / 5)


@pytest.mark.parametrize("ranks", [*range(1, 65), 1000, 1024, 4096])
def test_fp16_divides_as_torchs_own(ranks: int) -> None:
    scale = GradientScale.choose(ranks, torch.float16)
    before = default_hooks.DefaultState._get_gradient_predivide_factor(ranks)
    assert scale.before == pytest.approx(1.0 / before)
    assert scale.before * scale.after == pytest.approx(1.0 / ranks)


def test_fp16_neither_overflows_nor_underflows() -> None:
    """1024 ranks of a gradient whose sum is out of range, and of the smallest normal one."""
    for value in (1000.0, 2.0**-14):
        scale = GradientScale.choose(1024, torch.float16)
        one = torch.tensor(value, dtype=torch.float16) * scale.before
        total = one.float() * 1024
        assert total.half().isfinite()
        assert (total.half() * scale.after).item() == pytest.approx(value, rel=1e-2)


def test_buffers_are_what_was_asked_for() -> None:
    buffer = Sender().allocate((3, 4), torch.bfloat16, torch.device("cpu"))
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert buffer.is_contiguous()


# --- the loopback that other tests trust ----------------------------------------------------------


def axes(wire: Wire) -> list[MeshAxis]:
    return [MeshAxis("shard", wire.size, rank, wire) for rank in range(wire.size)]  # type: ignore[arg-type]


def test_loopback_all_gather() -> None:
    wire, comm = Wire(3), LoopbackComm()
    outputs = [torch.empty(6) for _ in range(3)]
    works = [
        comm.all_gather(out, torch.full((2,), float(axis.rank)), axis, True)
        for out, axis in zip(outputs, axes(wire), strict=True)
    ]
    for work, out in zip(works, outputs, strict=True):
        work.wait()
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_loopback_reductions() -> None:
    wire, comm = Wire(2), LoopbackComm()
    outputs = [torch.empty(2), torch.empty(2)]
    for out, axis in zip(outputs, axes(wire), strict=True):
        comm.reduce_scatter(out, torch.arange(4.0) * (1 + axis.rank), SUM, axis, False)
    assert [out.tolist() for out in outputs] == [[0.0, 3.0], [6.0, 9.0]]
    for out, axis in zip(outputs, axes(wire), strict=True):
        comm.all_reduce(out, SUM, axis, False)
    assert [out.tolist() for out in outputs] == [[6.0, 12.0]] * 2
    assert wire.kinds == ["reduce_scatter", "all_reduce"]


def test_loopback_notices_what_would_hang() -> None:
    wire, comm = Wire(2), LoopbackComm()
    first, second = axes(wire)
    out = torch.zeros(2)
    work = comm.all_gather(out, torch.ones(1), first, True)
    assert not out.eq(1.0).any(), "an output must be garbage until all have joined"
    with pytest.raises(AssertionError, match="not every rank has joined"):
        work.wait()
    with pytest.raises(AssertionError, match="rank 1 issued all_reduce, another one all_gather"):
        comm.all_reduce(torch.ones(1), SUM, second, True)


@pytest.fixture
def one_rank() -> Iterator[MeshAxis]:
    with fake_process_group(1):
        yield MeshAxis("shard", 1, 0, dist.group.WORLD)


@pytest.mark.parametrize("async_op", [True, False])
def test_collectives_reach_the_axis_process_group(one_rank: MeshAxis, async_op: bool) -> None:
    """A process group that sends nothing still answers: with a work, or after it is done."""
    comm = Sender()
    works = [
        comm.all_gather(torch.empty(2), torch.ones(2), one_rank, async_op),
        comm.reduce_scatter(torch.empty(2), torch.ones(2), SUM, one_rank, async_op),
        comm.all_reduce(torch.ones(2), SUM, one_rank, async_op),
    ]
    for work in works:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()


# --- kept memory ----------------------------------------------------------------------------------


def test_kept_memory_is_lent_again_when_nothing_refers_to_it() -> None:
    memory = wire.KeptMemory(wire.KEPT_NBYTES)
    take = partial(memory.take, "gather", (4, 6), torch.float32, ((2, 4), ((4, 2), (3, 4))))
    kept = take()
    assert [tuple(part.shape) for part in kept.parts] == [(4, 2), (3, 4)]
    assert take() is kept
    uses: list[Callable[[], object]] = [
        lambda: kept.memory,
        lambda: kept.memory.view(-1),
        lambda: kept.parts[0][0],
        lambda: torch.ones(4, 6, requires_grad=True) * kept.memory,  # autograd saves it
    ]
    for use in uses:
        holder = use()
        assert take() is not kept
        del holder
        assert take() is kept


def test_kept_memory_has_a_limit() -> None:
    memory = wire.KeptMemory(100)
    take = partial(memory.take, "reduce", dtype=torch.uint8)
    small = [take(shape=(1, n), cut=((n,), ((1, n),))) for n in (40, 60)]
    assert [take(shape=(1, n), cut=((n,), ((1, n),))) for n in (40, 60)] == small
    large = take(shape=(1, 101), cut=((101,), ((1, 101),)))
    assert take(shape=(1, 101), cut=((101,), ((1, 101),))) is not large
    other = take(shape=(1, 50), cut=((50,), ((1, 50),)))  # no room: the others are forgotten
    assert take(shape=(1, 50), cut=((50,), ((1, 50),))) is other
    assert take(shape=(1, 40), cut=((40,), ((1, 40),))) is not small[0]


def test_groups_over_one_process_group_share_kept_memory() -> None:
    axis = MeshAxis("shard", 2, 0, torch.nn.Module())  # type: ignore[arg-type]  # a placeholder
    other = MeshAxis("shard", 2, 0, torch.nn.Module())  # type: ignore[arg-type]
    assert wire.memory_of(axis) is wire.memory_of(axis) is not wire.memory_of(other)
    with torch_dtensor.without_memory():  # fake tensors and real ones must not meet
        assert wire.memory_of(axis) is not wire.memory_of(axis)
