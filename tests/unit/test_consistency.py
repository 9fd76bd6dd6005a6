"""That ranks agree on the order of collectives: the codes, the predictions, and the comparison."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2._core.agreement.agreement import (
    CONTEXT,
    GATHER_STAMP_NUMEL,
    GAVE_UP,
    LONG_RUN,
    NUMBER_BITS,
    RENEWED,
    STAMP_BITS,
    STAMP_NUMEL,
    TRAIT_BITS,
    Agreement,
    Follower,
    Operation,
    Over,
    Predictions,
    Sent,
    Signature,
    code_of,
    digits_of,
    last_word,
    number_of,
    number_of_digits,
)
from fsdp2._core.agreement.agreement import DTYPES as SENT
from fsdp2._core.agreement.stamp import Stamp
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.wire import Wire

NUMBERS = [1, 2, 3, 255, 256, 1000, (1 << STAMP_BITS) - 1]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def axis_of(size: int, rank: int = 0) -> MeshAxis:
    return MeshAxis("shard", size, rank, None)


class Recorded(Agreement):
    """An agreement whose exchanges are answered by the test, and counted."""

    def __init__(self, others: dict[int, int] | None = None) -> None:
        super().__init__(axis_of(2))
        self.others = others or {}
        self.exchanges = 0
        self.stood_in_for: list[int] = []

    def send_number(self, number: int, device: torch.device) -> Sent:
        self.exchanges += 1
        numbers = [self.others.get(rank, number) for rank in range(self.over.size)]
        return Sent(torch.tensor(numbers), [], None)

    def _placeholder(self, expected: Operation, number: int) -> None:
        self.stood_in_for.append(expected.number)
        axis = expected.over.axis
        self.compare(number, [self.others.get(r, number) for r in range(axis.size)], axis)

    def give_up(self, why: str, word: int = GAVE_UP) -> None:
        self.broken = why
        self._predictions.clear()


def knowing(agreement: Recorded, count: int = 3, over: int = 2) -> list[int]:
    """Number some operations and let the agreement know how they travel, over some ranks."""
    numbers = [agreement.number(f"unit {index} (all-gather)") for index in range(count)]
    for number in numbers:
        known: Any = (number, "gather", (8,), torch.float32, torch.float32, 0, lambda: None)
        known += (Over(axis_of(over)),)
        agreement.operations[number] = Operation(*known)
    return numbers


def known(**kwargs: Any) -> Recorded:
    """Return an agreement that knows some operations."""
    agreement = Recorded(**kwargs)
    knowing(agreement)
    return agreement


def alternating(agreement: Recorded) -> list[int]:
    """Let the agreement know three operations, and predict the first two in turn."""
    numbers = knowing(agreement)
    for number in numbers[:2] * (CONTEXT + 2):
        agreement.before(number)
    return numbers


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_a_code_stands_for_its_number(number: int) -> None:
    """Half of the elements are 1, whatever the number, and the number comes back."""
    code = code_of(number)
    assert len(code) == STAMP_NUMEL
    assert sum(code) == STAMP_BITS
    assert number_of(code) == number


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.uint8, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_digits_stand_for_their_number(number: int, dtype: torch.dtype) -> None:
    """In every dtype that is gathered."""
    digits = torch.tensor(digits_of(number)).to(dtype)
    assert len(digits) == GATHER_STAMP_NUMEL
    assert number_of_digits(digits.tolist()) == number


@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan"), float("inf")])
def test_what_is_not_of_digits_is_no_number(wrong: float) -> None:
    """Memory that nothing was received into is told apart."""
    assert number_of_digits([wrong] * GATHER_STAMP_NUMEL) is None
    assert number_of_digits([1.0, wrong + 0.5] + [0.0] * (GATHER_STAMP_NUMEL - 2)) is None


@pytest.mark.parametrize("wrong", [[0.0] * STAMP_NUMEL, [1.0] * STAMP_NUMEL])
def test_what_is_no_code_is_no_number(wrong: list[float]) -> None:
    """Memory that nothing was received into, or a sum of codes, is told apart."""
    assert number_of(wrong) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divide_by", [1, 2, 1024])
def test_a_sum_of_codes_shows_any_other_number(dtype: torch.dtype, divide_by: int) -> None:
    """In every reduce dtype, as a sum or a mean, and for one rank of a thousand."""
    for own in NUMBERS:
        for other in NUMBERS:
            total = torch.zeros(STAMP_NUMEL, dtype=dtype)
            total += torch.tensor(code_of(own), dtype=dtype) * 1023
            total += torch.tensor(code_of(other), dtype=dtype)
            foreign = 1.0 - torch.tensor(code_of(own), dtype=dtype)
            seen = torch.dot(total / divide_by, foreign)
            assert bool(seen) is (own != other), (own, other)


# --- predictions ----------------------------------------------------------------------------------


def test_a_program_that_repeats_itself_stops_to_exchange() -> None:
    """Every place is exchanged once; then the last operations predict the next one."""
    agreement = Recorded()
    numbers = knowing(agreement)
    for _ in range(CONTEXT + 1):
        for number in numbers:
            agreement.before(number)
    learned = agreement.exchanges
    assert learned <= CONTEXT + len(numbers)
    for number in numbers * 5:
        agreement.before(number)
    assert agreement.exchanges == learned
    assert not agreement.stood_in_for


def test_a_place_where_ranks_agree_on_something_new_is_uncertain() -> None:
    """They stand in for what was predicted once, and exchange there from then on."""
    agreement = Recorded()
    first, second, third = alternating(agreement)
    agreement.before(third)
    assert agreement.stood_in_for == [first]
    known = agreement.exchanges
    for number in (first, second) * (CONTEXT + 2):
        agreement.before(number)
    assert agreement.stood_in_for == [first]
    assert agreement.exchanges > known


def test_another_number_breaks_the_agreement_for_good() -> None:
    """The error names every rank and unit, and comes again without any exchange."""
    agreement = known(others={1: 2})
    match = r"rank 0: unit 0 .*; rank 1: unit 1 .*`if rank == 0:`.*conditional=True"
    with pytest.raises(StateError, match=match):
        agreement.before(1)
    assert agreement.exchanges == 1
    with pytest.raises(StateError, match=r"rank 1: unit 1"):
        agreement.before(2)
    assert agreement.exchanges == 1


def test_another_number_in_place_of_what_was_predicted() -> None:
    """This rank does what the others may be doing, and finds out what they did."""
    agreement = Recorded()
    first, _, third = alternating(agreement)
    agreement.others = {1: first}
    with pytest.raises(StateError, match=r"rank 0: unit 2 .*; rank 1: unit 0 "):
        agreement.before(third)
    assert agreement.stood_in_for == [first]
    assert agreement.recent[-1] == first, "what was issued, not what was wanted"


def test_a_process_group_that_is_gone_where_others_may_wait_in_it() -> None:
    """Nothing can be sent there in place of what they expect: the error is that of a lost rank."""

    class Gone(Over):
        @property
        def axis(self) -> MeshAxis:
            raise ReferenceError("the process group is gone")

    class Standing(Recorded):
        def _placeholder(self, expected: Operation, number: int) -> None:
            Agreement._placeholder(
                self, dataclasses.replace(expected, over=Gone(axis_of(2))), number
            )

    agreement = Standing()
    _, _, third = alternating(agreement)
    with pytest.raises(StateError, match=r"unit 2 .*did not take part.*group is gone"):
        agreement.before(third)


def test_a_retired_operation_is_not_expected_again() -> None:
    """Where it was predicted, ranks exchange, and learn what comes there now."""
    agreement = Recorded()
    first, second, third = alternating(agreement)
    agreement.retire(first)
    known = agreement.exchanges
    for number in (third, second) * (CONTEXT + 4):
        agreement.before(number)
    learned = agreement.exchanges
    assert learned > known
    for number in (third, second) * (CONTEXT + 4):
        agreement.before(number)
    assert agreement.exchanges == learned
    assert not agreement.stood_in_for


# --- comparison -----------------------------------------------------------------------------------


def test_a_wire_that_carries_nothing_is_not_checked() -> None:
    """The rank's own stamp is missing: a benchmark replaced the collectives."""
    agreement = known()
    agreement.compare(1, [None, None], axis_of(2))
    assert agreement.is_silent
    agreement.before(2)
    assert agreement.exchanges == 0
    other = known()
    other.compare_sum(1, [0.0] * STAMP_NUMEL, axis_of(2))
    assert other.is_silent


def total_of(numbers: list[int], divide_by: int = 1) -> list[Any]:
    total: Tensor = torch.tensor([code_of(number) for number in numbers]).sum(0) / divide_by
    return total.tolist()


@pytest.mark.parametrize("divide_by", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_a_sum_tells_what_the_other_did(rank: int, divide_by: int) -> None:
    """Own code known, the other's follows from the sum, or the mean."""
    agreement = known()
    numbers = [1, 3]
    with pytest.raises(StateError, match=r"rank 0: unit 0 .*; rank 1: unit 2 "):
        agreement.compare_sum(numbers[rank], total_of(numbers, divide_by), axis_of(2, rank))


def test_of_three_ranks_a_sum_tells_that_one_differs() -> None:
    """Not which: the error names what this rank did."""
    agreement = known()
    agreement.compare_sum(2, total_of([2, 2, 2]), axis_of(3))
    with pytest.raises(StateError, match=r"rank 0: unit 1 .*; rank 1: something else"):
        agreement.compare_sum(2, total_of([2, 3, 2]), axis_of(3))


def numbered(number: int, **changes: Any) -> int:
    given: dict[str, Any] = {"members": (1, 2), "alone": 3, "dtypes": (torch.float32,) * 2}
    return number | Signature(**(given | {"is_custom": False} | changes)).bits << NUMBER_BITS


def test_every_trait_has_bits_of_its_own() -> None:
    pairs = [(sent, summed) for sent in SENT for summed in SENT]
    numbers = {numbered(1, dtypes=pair) for pair in pairs}
    numbers |= {numbered(1, alone=alone) for alone in range(60)}
    numbers |= {numbered(1, members=members) for members in range(8)}
    numbers |= {numbered(1, is_custom=True), numbered(1, is_partial=True)}
    assert len(numbers) == len(pairs) + 59 + 8 + 2
    assert all(number % (1 << NUMBER_BITS) == 1 for number in numbers)
    assert all(number < 1 << STAMP_BITS for number in numbers)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "members": ({"members": (1,)}, "parameter set .*; .*trainable"),
    "alone": ({"alone": 0}, "3 sent separately; .* 0 sent separately.*set_copy_free_min_bytes"),
    "dtypes": (
        {"dtypes": (torch.bfloat16, torch.float32)},
        "sends float32; .*sends bfloat16, sums float32.*set_gradient_wire_dtype",
    ),
    "is_custom": ({"is_custom": True}, "by the library; .*by a user-supplied function"),
    "is_partial": ({"is_partial": True}, "then all-reduced .*; .*no all-reduce over"),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CHANGES))
def test_ranks_that_send_the_same_differently_are_told_how(name: str, size: int) -> None:
    """From all numbers, or from their sum, in which one that differs is told by what is missing."""
    changes, match = CHANGES[name]
    numbers = [numbered(1), *[numbered(1, **changes)] * (size - 1)]
    expected = pytest.raises(StateError, match=f"unit 0 .*send it differently .*{match}")
    with expected:
        known().compare(numbers[0], [*numbers], axis_of(size))
    with expected:
        known().compare_sum(numbers[0], total_of(numbers), axis_of(size))


def test_last_words_say_where_and_why() -> None:
    """Whoever meets them in a later operation is told of the one in which ranks differ."""
    agreement = known()
    word = last_word(numbered(2), [1])
    assert word < 1 << STAMP_BITS
    match = "unit 2 .*rank 1: nothing, after an error in unit 1 .*set_copy_free_min_bytes"
    with pytest.raises(StateError, match=match):
        agreement.compare(numbered(3), [numbered(3), word], axis_of(2))
    assert last_word(3, range(len(TRAIT_BITS))) < 1 << STAMP_BITS


def test_a_collective_that_fails_is_the_last_one() -> None:
    """A rank that died, or a timeout: the error names the unit, and comes again at once."""

    class Lost:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    class Losing(Recorded):
        def send_number(self, number: int, device: torch.device) -> Sent:
            self.exchanges += 1
            return Sent(torch.empty(0), [], Lost())

    agreement = Losing()
    knowing(agreement)
    for _ in range(2):
        with pytest.raises(StateError, match=r"unit 1 .*it closed the connection.*ranks diverged"):
            agreement.before(2)
    assert agreement.exchanges == 1


def test_a_rank_that_gave_up_is_named() -> None:
    """Its last word is the number of no operation."""
    agreement = known()
    with pytest.raises(StateError, match="rank 1: nothing, after an error"):
        agreement.compare(1, [1, GAVE_UP], axis_of(2))


# --- numbers that are free again ------------------------------------------------------------------


def test_a_number_in_use_is_not_handed_out_again() -> None:
    """There are 65,535, and copies take new ones; what was dropped is forgotten, on all ranks."""
    agreement = Recorded()
    live, most = knowing(agreement), 0
    for _ in range(700):
        for number in live:
            agreement.before(number)
        copy = knowing(agreement, 100)
        assert not set(copy) & set(live)
        for number in copy[:5]:
            agreement.before(number)
        most = max(most, len(agreement.operations))
    assert {*live} <= agreement.operations.keys()
    assert most < 2.5 * RENEWED
    assert len(agreement.names) < 2.5 * RENEWED
    assert agreement.describe(live[0]) == "unit 0 (all-gather)"


def test_an_operation_that_was_idle_for_long_is_known_again() -> None:
    """With its name, and in the way that it travels."""
    wire, stamp = Wire(), Stamp(axis_of(2), "gather")
    stamp.enroll("encoder")
    stamp.register(wire, (8,), torch.float32, torch.float32, 0)
    agreement = stamp.agreement
    agreement.is_silent = True  # there are no ranks
    for _ in range(2 * RENEWED):
        agreement.number("a copy")
    assert stamp.number not in agreement.operations
    stamp.before()
    assert stamp.number in agreement.operations
    assert agreement.describe(stamp.number) == "encoder (all-gather)"


# --- turns ----------------------------------------------------------------------------------------


def surprises(steps: list[list[int]]) -> list[int]:
    """Return how often each step did what was not predicted."""
    predictions, recent, counts = Predictions(), (-1,) * CONTEXT, []
    for step in steps:
        counts.append(0)
        for number in step:
            counts[-1] += predictions.expect(recent) != number
            predictions.learn(recent, number)
            recent = (*recent[1:], number)
    return counts


@pytest.mark.parametrize("microbatches", [2, 3, 8, 20])
def test_the_last_microbatch_is_told_from_the_others(microbatches: int) -> None:
    """It reduces what it gathered; the others gather alone."""
    step = [1, 2, 3, 4, 5] * (microbatches - 1) + [1, 2, 3, 4, 15, 16]
    counts = surprises([step] * 6)
    assert counts[0] > 0
    assert counts[3:] == [0, 0, 0]


def test_what_was_different_once_is_forgotten() -> None:
    """After a long run of the same, that is expected again."""
    usual, other = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6]
    counts = surprises([usual, usual, usual, other] + [usual] * (LONG_RUN + 6))
    assert counts[2] == 0
    assert counts[3] > 0
    assert counts[-3:] == [0, 0, 0]


@pytest.mark.parametrize("microbatches", [2, 3])
def test_turns_that_were_different_once_are_expected_again(microbatches: int) -> None:
    """An evaluation gathers, too, and so it looks like a microbatch: between steps, or at first."""
    step = [1, 2, 3, 4] * (microbatches - 1) + [1, 2, 3, 4, 15, 16]
    evaluation = [1, 2, 3, 4]
    for begin in ([step[-6:], evaluation], [*[step] * 5, evaluation]):
        counts = surprises([*begin, *[step] * (LONG_RUN + 6)])
        assert counts[-4:] == [0, 0, 0, 0], counts


def test_what_comes_after_is_known_as_far_as_it_is_predicted() -> None:
    predictions, recent = Predictions(), (-1,) * CONTEXT
    for number in [1, 2, 3, 4, 5] * 3:
        predictions.learn(recent, number)
        recent = (*recent[1:], number)
    following = predictions.after(recent)
    assert [next(following) for _ in range(7)] == [1, 2, 3, 4, 5, 1, 2]
    predictions.forget(3)
    assert list(predictions.after(recent)) == [1, 2, None]


def test_rows_may_become_longer_where_a_device_looks_later() -> None:
    """A group that is planned again may have longer rows: what a device leaves is as long."""
    stamp = Stamp(axis_of(2), "gather")
    for numel in (32, 32, 64, 32):
        stamp.expect(torch.float32, numel)
        seen = stamp._look_late()
        assert seen.shape == (2, numel)
        assert seen[:, : len(stamp.code)].tolist() == [stamp.code] * 2
        assert not seen[:, len(stamp.code) :].any()


def test_a_follower_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0: without a word it would make a context there."""
    chosen: list[tuple[int, bool]] = []
    caller = threading.get_ident()

    def choose(index: int) -> None:
        chosen.append((index, threading.get_ident() != caller))

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", choose)
    nobody: Any = None
    follower = Follower(nobody, iter([None]), 0, torch.device("cuda"))
    follower.finish()
    assert chosen == [(3, True)]
