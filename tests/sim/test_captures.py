"""A captured stream on the simulated device: what may not be called, and what a replay does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit import sim
from tests.kit.pool import ranks

sim_ranks = functools.partial(ranks, device="sim", limit_s=25.0)
DEVICE = "sim"


def module() -> Any:
    return torch.get_device_module("sim")


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture a step; return the graph, and what the step returned."""
    graph = module().CUDAGraph()
    with module().graph(graph, stream=torch.Stream(DEVICE)):
        made = step()
    return graph, made


def numbers(*shape: int, first: float = 1.0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, device="cpu").view(shape).to(DEVICE)


def finished() -> None:
    sim.finish()
    assert not sim.reports(), "\n\n".join(map(str, sim.reports()))


class Acts:
    """Operations that are not allowed during capture, each with a word of its error."""

    def __init__(self) -> None:
        self.x = numbers(13)
        self.side = torch.Stream(DEVICE)
        self.before = torch.accelerator.current_stream().record_event()
        self.pinned = torch.ones(13, device="cpu", pin_memory=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def synchronize_a_stream(self) -> None:
        self.side.synchronize()

    def synchronize_an_event(self) -> None:
        self.before.synchronize()

    def query_an_event(self) -> None:
        self.before.query()

    def query_an_event_of_its_own(self) -> None:
        torch.accelerator.current_stream().record_event().query()

    def query_a_stream(self) -> None:
        self.side.query()

    def read_a_value(self) -> None:
        self.x.sum().item()

    def read_a_value_as_a_branch(self) -> None:
        assert (self.x > 0).all()

    def find_a_size_in_data(self) -> None:
        self.x.nonzero()

    def copy_from_pageable_memory(self) -> None:
        self.x.copy_(torch.ones(13, device="cpu"), non_blocking=True)

    def copy_and_wait(self) -> None:
        self.x.copy_(self.pinned)

    def copy_to_pageable_memory(self) -> None:
        self.x.to("cpu", non_blocking=True)

    def make_a_tensor_of_numbers_of_the_host(self) -> None:
        torch.tensor([1.0, 2.0], device=DEVICE)

    def allocate_elsewhere(self) -> None:
        with self.side:
            torch.empty(7, device=DEVICE)

    def read_the_state_of_the_generator(self) -> None:
        module().get_rng_state()

    def pin_memory(self) -> None:
        torch.empty(7, device="cpu", pin_memory=True)

    def wait_for_an_event_of_outside(self) -> None:
        torch.accelerator.current_stream().wait_event(self.before)

    def leave_a_stream_unjoined(self) -> None:
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            self.x.add_(1)

    def make_a_communicator(self) -> None:
        dist.all_reduce(self.x, group=dist.new_group([0]))


ACTS = [name for name in vars(Acts) if not name.startswith("_")]


@sim_ranks(1)
def test_what_a_capture_forbids(rank: int, world_size: int) -> None:
    """Each ends the capture with an error, and after it the device is as before."""
    for name in ACTS:
        acts = Acts()
        try:
            captured(getattr(acts, name))
        except RuntimeError as error:
            if "sim: " not in str(error):
                raise
        else:
            pytest.fail(f"a capture allows this: {name}")
        assert not module().is_current_stream_capturing(), name
        assert acts.x.tolist() == numbers(13).tolist(), name
    finished()


@sim_ranks(1)
def test_what_a_capture_allows(rank: int, world_size: int) -> None:
    """Streams that fork and join, pinned memory, collectives, memory of its own."""
    x = numbers(13)
    pinned, back = (torch.ones(13, device="cpu", pin_memory=True) for _ in range(2))
    side = torch.Stream(DEVICE)
    dist.all_reduce(x)

    def step() -> Tensor:
        here = torch.accelerator.current_stream()
        side.wait_stream(here)
        with side:
            made = torch.empty_like(x).copy_(pinned, non_blocking=True)
            made += x
        here.wait_stream(side)
        x.add_(made)
        dist.all_reduce(x)
        back.copy_(x, non_blocking=True)
        return made

    graph, made = captured(step)
    assert x.tolist() == numbers(13).tolist()  # nothing ran
    for _ in range(2):
        graph.replay()
    torch.accelerator.synchronize()
    assert x.tolist() == (4 * numbers(13) + 3).tolist()
    assert back.tolist() == x.tolist()
    assert made.tolist() == (2 * numbers(13) + 2).tolist()
    finished()


@sim_ranks(1)
def test_a_replay_reads_addresses_and_keeps_what_the_host_read(rank: int, world_size: int) -> None:
    x, out = numbers(7), torch.zeros(7)
    factor, scalar = [2.0], torch.tensor(3.0, device="cpu")

    def step() -> None:
        out.copy_(x * factor[0] + scalar)

    graph, _ = captured(step)
    graph.replay()
    assert out.tolist() == (2 * numbers(7) + 3).tolist()
    x += 1  # the same address
    factor[0] = 5.0  # read when the step was captured
    scalar.fill_(100.0)
    graph.replay()
    assert out.tolist() == (2 * numbers(7, first=2.0) + 3).tolist()
    old, x = x, numbers(7, first=50.0)  # another address, which the graph does not know
    graph.replay()
    assert out.tolist() == (2 * old + 3).tolist()
    finished()


@sim_ranks(1)
def test_a_replay_that_uses_freed_memory_is_reported(rank: int, world_size: int) -> None:
    read, out = [numbers(7)], torch.zeros(7)
    graph, _ = captured(lambda: out.copy_(read[0] * 2))
    read.clear()
    graph.replay()
    found = [report.kind for report in sim.reports()]
    sim.load().forget()
    assert found == ["GRAPH"]


@sim_ranks(1)
def test_memory_of_a_graph_is_its_own(rank: int, world_size: int) -> None:
    """What was freed inside of a capture is not what it was in the replay before."""
    out = torch.zeros(3)

    def step() -> Tensor:
        made = torch.full((3,), 5.0)
        out.copy_(made)
        del made
        return torch.empty(3)

    graph, made = captured(step)
    graph.replay()
    assert out.tolist() == [5.0] * 3
    assert made.to("cpu").isnan().all()  # nothing wrote to it
    finished()


@sim_ranks(1)
def test_random_numbers_advance_from_replay_to_replay(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(5, device="cpu") for _ in range(3)]
    torch.manual_seed(5)
    out = torch.zeros(5)
    graph, _ = captured(lambda: out.uniform_())
    for drawn in expected:
        graph.replay()
        assert out.tolist() == drawn.tolist()
    finished()


@sim_ranks(1)
def test_an_event_of_a_capture_is_of_no_use_after_it(rank: int, world_size: int) -> None:
    _, event = captured(lambda: torch.accelerator.current_stream().record_event())
    with pytest.raises(RuntimeError, match="a capture that is over"):
        torch.accelerator.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="an event of a capture"):
        event.query()
    finished()


@sim_ranks(1)
def test_a_replay_is_ordered_with_what_is_around_it(rank: int, world_size: int) -> None:
    x = numbers(13)
    graph, _ = captured(lambda: x.add_(1))
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.mul_(2)
    graph.replay()  # does not wait for it
    found = [report.kind for report in sim.reports()]
    sim.load().forget()
    assert found == ["RACE"]
    torch.accelerator.current_stream().wait_stream(side)
    graph.replay()
    finished()
