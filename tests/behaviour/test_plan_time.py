"""Promise: a plan's timeline is what its operations, its bytes and their order make it."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE
from fsdp2._tools.plan.hardware import bandwidth_of, seconds_of
from tests.behaviour.test_plan import LENGTH, TOKENS, Block, Model
from tests.kit.pool import ranks

FP32, BF16 = torch.float32, torch.bfloat16


def machine(**changes: Any) -> fsdp2.plans.Hardware:
    given = {
        "name": "test",
        "flops": {FP32: 1.0},
        "memory_bandwidth": math.inf,
        "near": 1.0,
        "far": 1.0,
        "device_type": "cpu",
        **changes,
    }
    return fsdp2.plans.Hardware(**given)


def step_of(model: nn.Module, batch: torch.Tensor, **given: Any) -> Any:
    return fsdp2.plan(model, batch=batch, **given).step


def test_a_step_of_one_unit_by_hand() -> None:
    """4 ranks, 13 x 29: gather, product, product of the gradient, reduce, one after the other."""
    model, batch = nn.Linear(13, 29, bias=False), torch.zeros(5, 13)
    step = step_of(model, batch, mesh=4, hardware=machine(near=7.0))
    row = 4 * (32 // 4) * 13  # 29 rows are padded to 32
    sent, reduced = 4 * row * 3 / 4 / 7, 4 * (row + -row % 128) * 3 / 4 / 7  # counts go along
    assert step.seconds == pytest.approx(sent + reduced + 2 * (2 * 5 * 13 * 29), rel=1e-6)
    lanes = [(span.lane, span.name, span.cause) for span in step.spans]
    assert lanes == [
        (GATHER, "all_gather <root>", ""),
        (COMPUTE, "waits", "all_gather <root>"),
        (COMPUTE, "<root> forward", ""),
        (REDUCE, "reduce_scatter <root>", ""),
        (COMPUTE, "<root> backward", ""),
        (COMPUTE, "waits", "reduce_scatter <root>"),
    ]
    assert list(step.waits) == ["reduce_scatter <root>", "all_gather <root>"]
    assert list(step.waits.values()) == pytest.approx([reduced, sent], rel=1e-6)


@pytest.mark.parametrize(("fused", "nbytes"), [(False, 12), (True, 16)])
def test_an_optimizer_moves_what_it_reads_and_writes(fused: bool, nbytes: int) -> None:
    """SGD reads parameters and gradients and writes parameters, all in place and in lists.

    torch's fused kernel may write gradients, too: for a scaler's factor.
    """
    hardware = machine(flops={FP32: math.inf}, memory_bandwidth=5.0, near=math.inf)
    make = functools.partial(torch.optim.SGD, lr=0.1, foreach=not fused, fused=fused)
    given: dict[str, Any] = {"mesh": 4, "hardware": hardware, "optimizer": make}
    step = step_of(nn.Linear(13, 29, bias=False), torch.zeros(5, 13), **given)
    spans = [span for span in step.spans if span.name == "optimizer"]
    assert sum(span.end - span.begin for span in spans) == pytest.approx(8 * 13 * nbytes / 5.0)


def test_replicas_use_the_link_between_nodes() -> None:
    """2 nodes of 4: gathers stay inside a node, the all-reduce of shards goes between them."""
    model, batch = nn.Linear(16, 32, bias=False), torch.zeros(5, 16)
    hardware = machine(near=8.0, far=2.0, ranks_per_node=4, flops={FP32: math.inf})
    step = step_of(model, batch, mesh=(2, 4), hardware=hardware)
    whole, counts = 4 * 16 * 32, 128  # a row of a reduction has counts behind it
    row = whole / 4 + counts
    inside, between = (whole + 4 * row) * 3 / 4 / 8, 2 * row / 2 / 2
    assert step.seconds == pytest.approx(inside + between, rel=1e-6)
    flat = step_of(model, batch, mesh=8, hardware=hardware)
    both = 4 * 2  # each of the 4 ranks of a node has a port
    assert flat.seconds == pytest.approx((2 * whole + 8 * counts) * 7 / 8 / both, rel=1e-6)


def test_latency_and_links() -> None:
    hardware = machine(near=100.0, far=10.0, ranks_per_node=8, latency=3.0)
    assert bandwidth_of(hardware, 8, 1) == 100
    assert bandwidth_of(hardware, 16, 1) == 8 * 10
    assert bandwidth_of(hardware, 9, 1) == 10, "a node with one rank of the group has one port"
    assert bandwidth_of(hardware, 2, 8) == 10
    assert bandwidth_of(hardware, 4, 4) == 2 * 10
    assert bandwidth_of(hardware.scaled(links=2), 16, 1) == 160
    assert bandwidth_of(machine(near=50.0, far=10.0, ranks_per_node=8), 16, 1) == 50
    assert seconds_of(hardware, "all_gather", 800, 8, 1) == 3 * 3 + 7
    assert seconds_of(hardware, "all_reduce", 800, 8, 1) == 2 * (3 * 3 + 7)
    assert seconds_of(hardware, "all_gather", 800, 1, 1) == 0
    half = hardware.scaled(compute=0.5, memory=0.25, links=0.1)
    assert (half.near, half.far, half.flops[FP32]) == (10, 1, 0.5)


@pytest.mark.parametrize(("size", "hops"), [(16, 4), (17, 2 * 5), (512, 32 * 9)])
def test_uneven_pieces_take_the_hops_of_their_broadcasts(size: int, hops: int) -> None:
    """A broadcast for each rank, on 16 channels: one gather, and one reduction."""
    hardware = machine(flops={FP32: math.inf}, near=1e15, far=1e15, device_type="cuda", latency=1.0)
    model, batch = nn.Linear(13, 29, bias=False), torch.zeros(5, 13)
    given: dict[str, Any] = {"mesh": size, "hardware": hardware}
    step = step_of(model, batch, shard_placement_fn=lambda param: fsdp2.Whole(), **given)
    assert step.seconds == pytest.approx(2 * hops, rel=1e-3)


@pytest.mark.parametrize("memory", ["low", "balanced", "fast"])
def test_lanes_do_one_thing_at_a_time_and_lose_nothing(memory: str) -> None:
    """Spans of a lane follow each other; compute takes what the plain model's products do."""
    step = step_of(Model(), TOKENS, mesh=8, policy={Block}, memory=memory, hardware=machine())
    for lane in (COMPUTE, GATHER, REDUCE):
        spans = [span for span in step.spans if span.lane == lane]
        for before, after in itertools.pairwise(spans):
            assert before.begin < before.end <= after.begin
    compute = sum(s.end - s.begin for s in step.spans if s.lane == COMPUTE and not s.cause)
    model = Model(157, 2003)
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2) - 2003 * 157
    assert compute == 3 * 2 * 2 * LENGTH * products
    assert step.seconds == pytest.approx(compute + step.waiting_seconds)
    sent = sum(span.nbytes for span in step.spans if span.lane != COMPUTE)
    assert sent == pytest.approx(sum(one.nbytes for one in step.collectives), rel=3e-3)  # stamps


def test_overlap_is_seen() -> None:
    """On a link as fast as compute, prefetching hides gathers that `low` waits for."""
    took = {
        memory: step_of(
            Model(), TOKENS, mesh=8, policy={Block}, memory=memory, hardware=machine(near=0.01)
        ).seconds
        for memory in ("low", "balanced", "fast")
    }
    assert took["low"] > 1.1 * took["balanced"]
    assert took["balanced"] >= took["fast"]


def test_recomputing_takes_time_and_saves_memory() -> None:
    batch = torch.zeros(8, LENGTH, dtype=torch.long)
    given = {"mesh": 8, "policy": {Block}, "hardware": machine()}
    plain = step_of(Model(), batch, **given)
    again = step_of(Model(), batch, activation_checkpointing=True, **given)
    assert again.peak_nbytes < plain.peak_nbytes
    compute, more = (
        sum(s.end - s.begin for s in step.spans if s.lane == COMPUTE and not s.cause)
        for step in (plain, again)
    )
    first = sum(block.up.weight.numel() for block in Model().blocks)
    assert more - compute == 2 * 8 * LENGTH * first  # what `down` makes is not needed again


def test_an_optimizer_takes_time_and_memory() -> None:
    """SGD reads a gradient and writes a parameter, on shards of a quarter."""
    model, batch = nn.Linear(16, 32, bias=False), torch.zeros(5, 16)
    hardware = machine(flops={FP32: math.inf}, memory_bandwidth=1.0)
    plain = step_of(model, batch, mesh=4, hardware=hardware)
    stepped = step_of(model, batch, mesh=4, hardware=hardware, optimizer=torch.optim.SGD)
    shard = 4 * 16 * 32 // 4
    assert stepped.seconds == pytest.approx(plain.seconds + 3 * shard)
    assert plain.optimizer_peak_nbytes == 0
    assert stepped.optimizer_peak_nbytes >= stepped.start_nbytes
    assert stepped.spans[-1].name == "optimizer"


def test_hardware_by_name() -> None:
    model = nn.Linear(13, 29)
    with pytest.raises(fsdp2.ConfigError, match=r"expected hardware to be one of .*h100-nvlink-ib"):
        fsdp2.plan(model, mesh=2, hardware="h1000")
    for name, hardware in fsdp2.plan.hardware.items():
        assert hardware.name == name
        assert hardware.source
        assert step_of(model, torch.zeros(2, 13), mesh=16, hardware=name).seconds > 0


@ranks(2)
def test_what_is_measured_is_the_same_on_all_ranks() -> None:
    found = fsdp2.plan.measure("here")
    assert found.name == "here"
    others: list[Any] = [None, None]
    dist.all_gather_object(others, found)
    assert others[0] == others[1] == found
    assert 0 < found.near < math.inf
    assert found.flops[FP32] > 1e8
    step = step_of(nn.Linear(13, 29), torch.zeros(2, 13), mesh=2, hardware=found)
    assert step.seconds > 0


def test_one_process_measures_no_link() -> None:
    if not dist.is_initialized():
        assert fsdp2.plan.measure().near == math.inf
