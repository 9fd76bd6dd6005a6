"""The clock of a device: schedules computed by hand, and one rule at a time."""

from __future__ import annotations

import pytest

from fsdp2._tools.plan.costs import (
    ALIGNMENT_NBYTES,
    CHANNELS,
    MISALIGNED,
    SHORTEST_KERNEL,
    Costs,
    sustained,
)
from fsdp2._tools.plan.device_clock import DeviceClock
from fsdp2._tools.plan.hardware import HARDWARE

COMPUTE, GATHER, REDUCE, SUM = 0, 1, 2, 3
NEAR, FAR = 450e9, 50e9


def clock_of(*slow: int, straggler: float = 0.0) -> DeviceClock:
    """Return a clock on which all streams are urgent but compute and those given."""
    return DeviceClock(lambda stream: stream not in (COMPUTE, *slow), straggler)


class Marks:
    """Lets streams of a clock wait for each other."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock, self.count = clock, 0

    def after(self, waiting: int, first: int) -> None:
        self.count += 1
        self.clock.record(first, self.count)
        self.clock.hold_back(waiting, self.count)


def spans(clock: DeviceClock) -> dict[str, tuple[float, float]]:
    return {ran.name: (ran.start, ran.end) for ran in clock.ran}


def test_a_forward_of_three_units() -> None:
    """Gathers of 3, units of 5, one gathered ahead, which waits for the unit before last.

    gather: a 0-3, b 3-6, c when a has been computed: 8-11. compute: a 3-8, b 8-13, c 13-18.
    """
    clock = clock_of()
    marks = Marks(clock)
    clock.collective(GATHER, 7, NEAR, 3.0, "gather a")
    marks.after(COMPUTE, GATHER)
    clock.collective(GATHER, 7, NEAR, 3.0, "gather b")
    clock.kernel(COMPUTE, 5.0, "a")
    marks.after(GATHER, COMPUTE)
    marks.after(COMPUTE, GATHER)
    clock.collective(GATHER, 7, NEAR, 3.0, "gather c")
    clock.kernel(COMPUTE, 5.0, "b")
    marks.after(COMPUTE, GATHER)
    clock.kernel(COMPUTE, 5.0, "c")
    assert clock.finish() == 18.0
    gathers = {"gather a": (0.0, 3.0), "gather b": (3.0, 6.0), "gather c": (8.0, 11.0)}
    units = {"a": (3.0, 8.0), "b": (8.0, 13.0), "c": (13.0, 18.0)}
    assert spans(clock) == gathers | units


def test_a_backward_whose_link_decides() -> None:
    """Gathers of 4 and reductions of 6 share a link; units of 2.

    link: gather b 0-4, gather a 4-8, reduce b (from 6) 8-14, reduce a (from 10) 14-20.
    """
    clock = clock_of()
    marks = Marks(clock)
    clock.collective(GATHER, 7, NEAR, 4.0, "gather b")
    marks.after(COMPUTE, GATHER)
    clock.collective(GATHER, 7, NEAR, 4.0, "gather a")
    clock.kernel(COMPUTE, 2.0, "b")
    marks.after(REDUCE, COMPUTE)
    clock.collective(REDUCE, 7, NEAR, 6.0, "reduce b")
    marks.after(COMPUTE, GATHER)
    clock.kernel(COMPUTE, 2.0, "a")
    marks.after(REDUCE, COMPUTE)
    clock.collective(REDUCE, 7, NEAR, 6.0, "reduce a")
    assert clock.finish() == 20.0
    assert spans(clock) == {
        "gather b": (0.0, 4.0),
        "gather a": (4.0, 8.0),
        "b": (4.0, 6.0),
        "a": (8.0, 10.0),
        "reduce b": (8.0, 14.0),
        "reduce a": (14.0, 20.0),
    }


def test_sums_over_replicas_have_a_link_of_their_own() -> None:
    """Scatters of 3 inside nodes, sums of 4 between them: unit by unit, beside each other.

    scatter: 2-5, 5-8, 8-11. sum: 5-9, 9-13, 13-17, after the compute of three units, 0-6.
    """
    clock = clock_of()
    marks = Marks(clock)
    for name in "cba":
        clock.kernel(COMPUTE, 2.0, name)
        marks.after(REDUCE, COMPUTE)
        clock.collective(REDUCE, 7, NEAR, 3.0, f"scatter {name}")
        marks.after(SUM, REDUCE)
        clock.collective(SUM, 8, FAR, 4.0, f"sum {name}")
    assert clock.finish() == 17.0
    found = spans(clock)
    assert [found[f"scatter {name}"] for name in "cba"] == [(2.0, 5.0), (5.0, 8.0), (8.0, 11.0)]
    assert [found[f"sum {name}"] for name in "cba"] == [(5.0, 9.0), (9.0, 13.0), (13.0, 17.0)]


def test_the_host_issues_ahead_and_waits() -> None:
    clock = clock_of()
    clock.work(1.0)
    clock.kernel(COMPUTE, 10.0, "a")  # from 1: it was issued then
    clock.record(COMPUTE, 1)
    clock.work(2.0)
    assert clock.host == 3.0
    clock.wait_for(1)
    assert clock.host == 11.0
    assert [(wait.start, wait.seconds) for wait in clock.waits] == [(3.0, 8.0)]
    clock.work(1.0)
    clock.kernel(COMPUTE, 1.0, "b")
    clock.wait_for_stream(COMPUTE)
    assert clock.host == 13.0
    assert clock.finish() == 13.0


def test_one_communicator_keeps_the_order_of_issue() -> None:
    """What was issued first starts first, in whatever stream, though it is ready later."""
    clock = clock_of()
    clock.kernel(COMPUTE, 5.0, "a")
    Marks(clock).after(REDUCE, COMPUTE)
    clock.collective(REDUCE, 7, NEAR, 1.0, "first")
    clock.collective(GATHER, 7, NEAR, 1.0, "second")
    clock.collective(SUM, 8, FAR, 1.0, "other group, other link")
    clock.finish()
    assert spans(clock)["first"] == (5.0, 6.0)
    assert spans(clock)["second"] == (6.0, 7.0)
    assert spans(clock)["other group, other link"] == (0.0, 1.0)


def test_two_groups_share_a_link() -> None:
    clock = clock_of()
    clock.kernel(COMPUTE, 5.0, "a")
    Marks(clock).after(REDUCE, COMPUTE)
    clock.collective(REDUCE, 7, NEAR, 3.0, "first")
    clock.collective(GATHER, 8, NEAR, 3.0, "second")  # is ready, and nothing holds it back
    clock.finish()
    assert spans(clock)["second"] == (0.0, 3.0)
    assert spans(clock)["first"] == (5.0, 8.0)


@pytest.mark.parametrize(("slow", "start"), [((), 1.0), ((GATHER,), 4.0)])
def test_a_stream_without_priority_waits_for_a_kernel_to_end(
    slow: tuple[int, ...], start: float
) -> None:
    clock = clock_of(*slow)
    clock.kernel(COMPUTE, 4.0, "a")
    clock.kernel(COMPUTE, 4.0, "b")
    clock.work(1.0)
    clock.collective(GATHER, 7, NEAR, 1.0, "gather")
    clock.finish()
    assert spans(clock)["gather"] == (start, start + 1.0)
    assert spans(clock)["b"] == (4.0, 8.0)


def test_stragglers_are_waited_for() -> None:
    clock = clock_of(straggler=2.0)
    clock.collective(GATHER, 7, NEAR, 1.0, "gather")
    assert clock.finish() == 3.0


def test_what_things_cost() -> None:
    machine = sustained(HARDWARE["h100-nvlink-ib"])
    costs = Costs(machine)
    assert costs.kernel(0) == SHORTEST_KERNEL
    assert costs.kernel(2.904e9) == pytest.approx(1e-3, rel=1e-3)  # bandwidth of memory
    import torch

    assert costs.kernel(8, 692.6e9, torch.bfloat16) == pytest.approx(1e-3, rel=1e-3)
    aligned = costs.collective("all_gather", 360 * 10**6, 8, 1)
    assert aligned == pytest.approx(7 / 8 * 1e-3 + 9e-6, rel=1e-3)  # 3 hops
    assert costs.collective("all_gather", 360 * 10**6, 8, 1, 2) == MISALIGNED * aligned
    assert costs.collective("all_gather", 360 * 10**6, 8, 1, ALIGNMENT_NBYTES) == aligned
    # collectives issued as one wait for each other's hops only if a channel has several of them
    assert costs.collective("all_gather", 360 * 10**6, 8, 1, pieces=CHANNELS) == aligned
    more = costs.collective("all_gather", 360 * 10**6, 8, 1, pieces=CHANNELS + 1) - aligned
    assert more == pytest.approx(3 * machine.latency, rel=1e-3)
    assert costs.copy(50e6) == pytest.approx(1e-3)
