"""Several ranks on one GPU: the order of streams, who reuses whose memory, kernels.

One process. Ranks are simulated with the loopback of `tests/unit`: they share one stream for each
lane, as the groups of one rank do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.comm.device_streams import DeviceStreams, streams_for
from fsdp2._core.comm.wire import InFlight
from fsdp2._core.params.group import ParamGroup
from tests.gpu._device import BF16, ON_A_GPU, here, keep_compute_busy, no_synchronisation
from tests.unit._loopback import LoopbackGroup, chunk_of, local_of, reduced

pytestmark = ON_A_GPU


class Blob(nn.Module):
    """Large enough that copies take a while, and uneven over any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(1021, 517))
        self.column = nn.Parameter(torch.randn(517, 301).t())
        self.small = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 7))


LOOPBACKS: dict[str, dict[str, Any]] = {
    "one rank": {"shard": 1},
    "two ranks": {"shard": 2},
    "three ranks": {"shard": 3},
    "2 replicas of 2": {"shard": 2, "replicate": 2},
    "bf16": {"shard": 3, "policy": BF16},
}


def simulate(name: str, zero_copy_nbytes: int | None = None) -> LoopbackGroup:
    torch.manual_seed(5)
    module = Blob().to(here())
    return LoopbackGroup(
        module,
        device=str(here()),
        streams=streams_for(here()),
        zero_copy_nbytes=zero_copy_nbytes,
        **LOOPBACKS[name],
    )


def assert_whole(ranks: LoopbackGroup, factor: float = 1.0) -> None:
    dtype = ranks.groups[0].policy.param_dtype or torch.float32
    expected = dict(ranks.original.named_parameters())
    for module in ranks.modules:
        for name, param in module.named_parameters():
            assert torch.equal(param, (expected[name] * factor).to(dtype)), name


def order_gathers(ranks: LoopbackGroup) -> None:
    """Do what the beginning of a forward does."""
    ranks.groups[0].context.streams.order_after_compute("gather")


def test_a_device_has_lanes() -> None:
    streams = streams_for(here())
    assert isinstance(streams, DeviceStreams)
    assert not streams.async_op


@pytest.mark.parametrize("name", LOOPBACKS)
@pytest.mark.usefixtures("four_ranks")
def test_gathered_parameters_are_whole_however_busy_compute_is(name: str) -> None:
    ranks = simulate(name)
    for _ in range(3):
        order_gathers(ranks)
        keep_compute_busy()
        ranks.gather()
        assert_whole(ranks)
        ranks.reshard()
        sizes = {
            param.unsharded.untyped_storage().nbytes()
            for group in ranks.groups
            for param in group.params
        }
        assert sizes == {0}


@pytest.mark.usefixtures("four_ranks")
def test_a_gather_sees_what_compute_wrote_before() -> None:
    ranks = simulate("three ranks")
    factor = 1.0
    for _ in range(3):
        keep_compute_busy()
        with torch.no_grad():
            for rank in range(3):
                for param in ranks.parameters(rank):
                    local_of(param).mul_(2.0)
        factor *= 2.0
        order_gathers(ranks)
        ranks.gather()
        assert_whole(ranks, factor)
        ranks.reshard()


@pytest.mark.usefixtures("four_ranks")
def test_a_gather_buffer_is_not_reused_while_compute_still_reads_it() -> None:
    """The unpack is delayed; the next gather, of other values, must not take its buffer."""
    first, second = simulate("three ranks"), simulate("three ranks")
    streams = first.groups[0].context.streams
    for group in second.groups:
        group.context.streams = streams
    with torch.no_grad():
        for rank in range(3):
            for param in second.parameters(rank):
                local_of(param).zero_()
    for _ in range(3):
        order_gathers(first)
        first.each(ParamGroup.inspect)
        first.each(ParamGroup.unshard)
        keep_compute_busy()
        first.wait()
        second.gather()
        assert_whole(first)
        assert_whole(second, 0.0)
        first.reshard()
        second.reshard()


@pytest.mark.parametrize("name", LOOPBACKS)
@pytest.mark.usefixtures("four_ranks")
def test_reduced_gradients_are_chunks_of_the_mean_however_busy_compute_is(name: str) -> None:
    ranks = simulate(name)
    count = len(ranks.groups)
    for step in range(3):
        order_gathers(ranks)
        ranks.gather()
        keep_compute_busy()
        for rank, module in enumerate(ranks.modules):
            for param in module.parameters():  # dense, and of the strides of the parameter
                param.grad = torch.randn_like(param).mul_(1 + rank + step)
        sums = [
            sum(gradient.float() for gradient in gradients)
            for gradients in zip(
                *([p.grad for p in module.parameters()] for module in ranks.modules), strict=True
            )
        ]
        ranks.reduce()
        ranks.reshard()
        for group in ranks.groups:
            for param, total in zip(group.params, sums, strict=True):
                layout = param.placement.layout
                expected = chunk_of(total / count, layout.dim, group.data.shard.rank, layout.size)
                torch.testing.assert_close(local_of(param.sharded.grad), expected)
                param.sharded.grad = None


@pytest.mark.parametrize("name", LOOPBACKS)
@pytest.mark.usefixtures("four_ranks")
def test_one_kernel_packs_the_gradients_of_a_group(name: str) -> None:
    """Whatever the strides of the gradients are."""
    ranks = simulate(name)

    def step() -> None:
        order_gathers(ranks)
        ranks.gather()
        for module in ranks.modules:
            for param in module.parameters():
                param.grad = torch.ones_like(param)
        ranks.reduce()
        ranks.reshard()

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    packs = [event.name for event in profiler.events() if "chunk_cat" in event.name]
    assert len(packs) == len(ranks.groups), packs


@pytest.mark.parametrize("zero_copy_nbytes", [1, 100_000])
@pytest.mark.usefixtures("four_ranks")
def test_zero_copy_parameters_are_whole_however_busy_compute_is(zero_copy_nbytes: int) -> None:
    ranks = simulate("three ranks", zero_copy_nbytes)
    assert ranks.groups[0].buffers.home is not None
    assert ranks.groups[0].buffers.home.layout.zero_copy
    for _ in range(3):
        order_gathers(ranks)
        keep_compute_busy()
        ranks.gather()
        assert_whole(ranks)
        ranks.reshard()


@pytest.mark.usefixtures("four_ranks")
def test_a_group_never_waits_for_the_device() -> None:
    ranks = simulate("2 replicas of 2")

    def step() -> None:
        order_gathers(ranks)
        ranks.gather()
        for module in ranks.modules:
            for param in module.parameters():
                param.grad = torch.ones_like(param)
        ranks.reshard()
        ranks.reduce()
        for module in ranks.modules:
            module.zero_grad()

    for _ in range(2):
        step()
    with no_synchronisation():
        step()


@pytest.mark.usefixtures("four_ranks")
def test_partial_sums_never_wait_for_the_device() -> None:
    """Three backwards in four leave out the replicas, and a parameter has no gradient in some."""
    ranks = simulate("2 replicas of 2")

    def step() -> None:
        for part in range(4):
            order_gathers(ranks)
            ranks.gather()
            for module in ranks.modules:
                for param in list(module.parameters())[part % 2 :]:
                    param.grad = torch.ones_like(param)
            ranks.reshard()
            ranks.reduce(Settings(all_reduce_grads=part == 3, reduce_unused=True))
        for group in ranks.groups:
            for param, times in zip(group.params, (2, 4, 4, 4, 4), strict=True):
                grads.append((param.sharded.grad, times))
                param.sharded.grad = None

    grads: list[tuple[Any, int]] = []
    for _ in range(2):
        step()
    grads.clear()
    with no_synchronisation():
        step()
    for grad, times in grads:
        assert torch.equal(local_of(grad), torch.full_like(local_of(grad), times))


@pytest.mark.usefixtures("four_ranks")
def test_a_partial_sum_with_a_gradient_that_misses_sets_nothing() -> None:
    ranks = simulate("2 replicas of 2")
    for part in range(2):
        order_gathers(ranks)
        ranks.gather()
        for module in ranks.modules:
            module.large.grad = torch.ones_like(module.large)
        ranks.reshard()
        ranks.reduce(Settings(all_reduce_grads=part == 1))
        for group in ranks.groups:
            assert (group.params[0].sharded.grad is None) is (part == 0)
            assert [p.sharded.grad for p in group.params[1:]] == [None] * 4
    for group in ranks.groups:
        grad = local_of(group.params[0].sharded.grad)
        assert torch.equal(grad, torch.full_like(grad, 2))


@pytest.mark.usefixtures("four_ranks")
def test_memory_of_a_partial_sum_is_not_reused_while_it_is_kept() -> None:
    """What was reduced lies in memory of one lane, and another one, which is late, copies it."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # so it is no sharded gradient
    first, second = (
        LoopbackGroup(
            nn.Linear(512, 512).to(here()),
            2,
            2,
            policy=policy,
            device=str(here()),
            streams=streams_for(here()),
        )
        for _ in range(2)
    )
    streams = first.groups[0].context.streams
    for group in second.groups:
        group.context.streams = streams
    assert isinstance(streams, DeviceStreams)
    for _ in range(2):
        for ranks in (first, second):
            order_gathers(ranks)
            ranks.gather()
        for ranks, value in ((first, 3.0), (second, 5.0)):
            for module in ranks.modules:
                for param in module.parameters():
                    param.grad = torch.full_like(param, value)
            for group in ranks.groups:
                group.settings = Settings(all_reduce_grads=False)
        works = []
        for ranks in (first, second):
            started = ranks.each(reduced)
            for reduction in started:
                reduction.start()
            if ranks is first:  # late from here on
                streams.launch("all_reduce", late)
            for reduction in reversed(started):
                reduction.advance()
            for reduction in reversed(started):
                reduction.finish()
            works += started
        for reduction in works:
            reduction.wait()
        for ranks, value in ((first, 3.0), (second, 5.0)):
            for group in ranks.groups:
                partial = group.reducer.unreduced.partial
                assert partial is not None
                layout = group.reducer.plan().layout
                numel = layout.tail_start - layout.tail_gap  # rows are filled up with zeros
                assert torch.equal(partial[:numel], torch.full_like(partial[:numel], value))
                group.reducer.discard()
            ranks.reshard()


def late() -> InFlight:
    keep_compute_busy()
    return InFlight(())
