"""The pure question: what comes next?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp2._core.engine.tree import Schedule


class Named:
    """A unit, for all that a schedule knows: compared by identity, equal to every other."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


A, B, C, D = units = [Named(name) for name in "ABCD"]


def run(schedule: Schedule[Named], order: str | list[Named]) -> list[str | None]:
    """Run one forward; return what was predicted at each unit."""
    visited = [u for n in order for u in units if u.name == n] if isinstance(order, str) else order
    schedule.begin(visited[0])
    predictions = [schedule.visit(unit, 1) for unit in visited]
    schedule.end()
    return [p[0].name if p else None for p in predictions]


def test_the_first_forward_is_not_predicted() -> None:
    assert run(Schedule(), "ABC") == [None, None, None]


def test_the_second_is_predicted_from_the_first() -> None:
    schedule: Schedule[Named] = Schedule()
    run(schedule, "ABBC")
    assert run(schedule, "ABBC") == ["B", "B", "C", None]


def test_a_forward_that_leaves_the_order_is_not_predicted_any_further() -> None:
    schedule: Schedule[Named] = Schedule()
    run(schedule, "ABCDA")
    assert run(schedule, "ACBDA") == ["B", None, None, None, None]  # C is off the track
    assert run(schedule, "ACBDA") == ["C", "B", "D", "A", None]  # the record for the next time


def test_a_longer_forward_is_predicted_as_far_as_the_record_goes() -> None:
    schedule: Schedule[Named] = Schedule()
    run(schedule, "AB")
    assert run(schedule, "ABC") == ["B", None, None]
    assert run(schedule, "A") == ["B"]
    assert run(schedule, "AB") == [None, None]


def test_entry_points_have_an_order_each() -> None:
    schedule: Schedule[Named] = Schedule()
    run(schedule, "ABC")
    run(schedule, "BDC")
    assert run(schedule, "ABC") == ["B", "C", None]
    assert run(schedule, "BDC") == ["D", "C", None]


def test_an_abandoned_forward_leaves_the_record_as_it_was() -> None:
    schedule: Schedule[Named] = Schedule()
    run(schedule, "ABC")
    schedule.begin(A)
    schedule.visit(A, 1)
    schedule.visit(D, 1)
    schedule.abandon()
    schedule.end()
    assert run(schedule, "ABC") == ["B", "C", None]


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=12))
def test_any_order_is_predicted_the_second_time(names: list[str]) -> None:
    schedule: Schedule[Named] = Schedule()
    assert run(schedule, "".join(names)) == [None] * len(names)
    assert run(schedule, "".join(names)) == [*names[1:], None]
