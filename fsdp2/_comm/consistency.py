"""Ranks issue the same collectives in the same order, or every one of them gets an error.

Owns, for each process group, the numbers of the operations on it, what followed what so far, and
the check. It must not know parameters, groups or hooks.

[Note: agreement]
Two ranks that gather different blocks of one size would mix them silently; of different sizes, gloo
ends the process. So no rank may issue an operation that another does not, and none may wait to
find out. What all ranks did so far is the same on all; so is any prediction made from it. Each rank
compares what it is about to do with the prediction for the last few operations:

- It is what was predicted: go on. The operation carries its number in a few elements of its own
  buffer (its *stamp*), and who receives it compares (``Stamp``).
- Nothing is predicted, or what followed differed in the past: all ranks know that, and exchange
  the numbers in one tiny collective first.
- Something else is predicted: the others may be issuing that. So this rank does too, with nothing
  in it but a stamp that says what it wants. If all ranks came here for the same reason, they agree,
  mark the place as uncertain, and go on; if not, everybody sees the stamps and raises.

A rank that raises also says so on the other process groups of its units: the replicas of its shards
agree among themselves and would wait for it.

Part of a number is in which way the operation travels (``Signature``): ranks of which one changed a
setting alone want different operations, and what is issued meanwhile is what was before.

A program that repeats its steps exchanges nothing beside its own collectives after the first ones.
A wire that carries nothing (a benchmark that replaces collectives by no-ops) is recognised by the
missing stamp of the rank itself, and is not checked.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2._base import torch_comm, torch_modes
from fsdp2._base.errors import StateError
from fsdp2._comm.collectives import Wire
from fsdp2._comm.mesh import MeshAxis
from fsdp2._comm.operation_ids import (
    DIFFERENCES,
    GATHER_STAMP_NUMEL,
    NAMES,
    NUMBER_BITS,
    STAMP_BITS,
    STAMP_NUMEL,
    TRAIT_BITS,
    Signature,
    code_of,
    describe_trait,
    fields_of,
    last_word,
    number_of,
    number_of_digits,
    stamp_of,
)

CONTEXT = 4
"""How many operations a prediction looks back."""

MAX_PREDICTIONS = 100_000
UNCERTAIN = -1
NO_NUMBER = -2
GAVE_UP = 0
LAST_WORDS = 4
"""How many operations a rank that gives up goes on with; more than others leave unchecked."""


@dataclass(frozen=True)
class Operation:
    """The collectives of one move of one group, as every rank of the process group knows them.

    Each rank sends ``numels`` elements of ``dtype``, to each rank for a reduce-scatter, in one
    collective for each number. What comes back of the first is looked at in ``seen_as``: there the
    stamp begins at element ``stamp``.
    """

    number: int
    kind: str
    numels: tuple[int, ...]
    dtype: torch.dtype
    seen_as: torch.dtype
    stamp: int
    wire: weakref.ref[Wire]
    reduction: Any = None
    is_custom: bool = False

    @property
    def sender(self) -> Wire:
        """What other ranks send it over: ours, if theirs was ours."""
        wire = self.wire()
        return Wire() if wire is None or (wire.is_custom and not self.is_custom) else wire


@dataclass(frozen=True)
class Sent:
    """An issued collective, and the memory that it works on."""

    output: Tensor
    pairs: list[tuple[Tensor, Tensor]]
    work: Any


class Agreement:
    """What the ranks of one process group did, and what they expect of each other."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._count = 0
        self._operations: dict[int, Operation] = {}
        self.predicted: dict[tuple[int, ...], int] = {}
        self.recent: tuple[int, ...] = (UNCERTAIN,) * CONTEXT
        self.is_silent = False
        self.broken: str | None = None
        self.stamps: weakref.WeakSet[Stamp] = weakref.WeakSet()
        self._last_words: list[Sent] = []

    def number(self, name: str) -> int:
        """Return the number of a new operation. Ranks must ask in the same order."""
        number = 1 + self._count % ((1 << NUMBER_BITS) - 1)
        self._count += 1
        self.names[number] = name
        return number

    def register(self, operation: Operation) -> None:
        """Learn how an operation travels; again if its group's plan changed."""
        self._operations[operation.number] = operation

    def retire(self, number: int) -> None:
        """Never expect an operation again: its group sends over another process group now."""
        self._operations.pop(number, None)
        self.predicted = {key: n for key, n in self.predicted.items() if n != number}

    def before(self, number: int, axis: MeshAxis) -> None:
        """Make sure that every rank of the axis is about to issue this operation.

        Raises:
            StateError: one is not; or one was not, earlier.
        """
        recent = self.recent
        if self.predicted.get(recent) != number:
            self._settle(number, axis)
        self.recent = (*recent[1:], number)

    def _settle(self, number: int, axis: MeshAxis) -> None:
        if self.broken is not None:
            raise StateError(self.broken)
        recent = self.recent
        predicted = self.predicted.get(recent)
        if self.is_silent:
            pass
        elif predicted is None or predicted == UNCERTAIN or predicted not in self._operations:
            self.compare(number, self._exchange(number, axis), axis)
        else:
            self.recent = (*recent[1:], predicted)  # that is what was issued, if this raises
            self._stand_in(self._operations[predicted], number, axis)
        if len(self.predicted) >= MAX_PREDICTIONS:
            self.predicted.clear()
        certain = predicted is None or self.is_silent
        self.predicted[recent] = number if certain else UNCERTAIN

    def _exchange(self, number: int, axis: MeshAxis) -> list[int | None]:
        numbers = self._wait(number, self._send_number(number, axis), axis)
        return [*numbers.tolist()]

    def _stand_in(self, expected: Operation, number: int, axis: MeshAxis) -> None:
        """Issue what the others may be issuing, with a stamp that says what this rank wants."""
        output = self._wait(number, self._send_stamp(expected, number, axis), axis)
        start = expected.stamp
        if expected.kind == "gather":
            stamps = output.view(axis.size, -1)[:, start : start + GATHER_STAMP_NUMEL].tolist()
            self.compare(number, [number_of_digits(row) for row in stamps], axis)
        else:
            self.compare_sum(number, output[start : start + STAMP_NUMEL].tolist(), axis)

    def _wait(self, number: int, sent: Sent, axis: MeshAxis) -> Tensor:
        try:
            if sent.work is not None:
                sent.work.wait()
        except RuntimeError as error:
            raise self.lose(number, error, axis) from error
        return sent.output

    @staticmethod
    def _send_number(number: int, axis: MeshAxis) -> Sent:
        own = torch.tensor([number], dtype=torch.int64, device="cpu")
        received = torch.full((axis.size,), -1, dtype=torch.int64, device="cpu")
        with torch_modes.hidden_from_modes():
            work = torch_comm.all_gather_single(received, own, axis.pg, True)
            return Sent(received, [(received, own)], work)

    @staticmethod
    def _send_stamp(expected: Operation, number: int, axis: MeshAxis) -> Sent:
        wire, dtype, seen_as = expected.sender, expected.dtype, expected.seen_as
        first, *others = expected.numels
        host = torch.device("cpu")
        code = torch.tensor(stamp_of(expected.kind, number), dtype=torch.float32, device=host)
        at = slice(expected.stamp, expected.stamp + len(code))
        with torch_modes.hidden_from_modes():
            if expected.kind == "gather":
                own = torch.zeros(first, dtype=dtype, device=host)
                own.view(seen_as)[at] = code.to(seen_as)
                pairs = [wire.stage(own, axis)]
                for numel in others:
                    gathered = torch.empty(axis.size * numel, dtype=dtype, device=host)
                    pairs.append((gathered, own.new_zeros(numel)))
                work = wire.all_gather_each(pairs, axis, True)
            elif expected.kind == "reduce":
                own = wire.allocate((axis.size, first), dtype, host).zero_()
                own[:, at] = code.to(dtype)
                pairs = [(wire.allocate((first,), seen_as, host), own.view(-1))]
                for numel in others:
                    zeros = torch.zeros(axis.size * numel, dtype=dtype, device=host)
                    pairs.append((torch.empty(numel, dtype=seen_as, device=host), zeros))
                work = wire.reduce_scatter_each(pairs, expected.reduction, axis, True)
            else:
                own = torch.zeros(first, dtype=dtype, device=host)
                own[at] = code.to(dtype)
                pairs = [(own, own)]
                work = wire.all_reduce(own, expected.reduction, axis, True)
        return Sent(pairs[0][0].view(seen_as), pairs, work)

    def compare(self, number: int, numbers: list[int | None], axis: MeshAxis) -> None:
        """Raise StateError unless every rank of the axis wants the same."""
        others = [n for rank, n in enumerate(numbers) if rank != axis.rank]
        if numbers[axis.rank] != number or all(other is None for other in others):
            self.is_silent = True
        elif any(other != number for other in numbers):
            self._break(number, numbers, axis)

    def compare_sum(self, number: int, total: list[Any], axis: MeshAxis) -> None:
        """The same for a sum (or a mean) of codes."""
        own = code_of(number)
        if not all(abs(value) > 0 for value, bit in zip(total, own, strict=True) if bit):
            self.is_silent = True
        elif any(value != 0 for value, bit in zip(total, own, strict=True) if not bit):
            both = max(abs(value) for value in total)
            code = [abs(v) == both if bit else v != 0 for v, bit in zip(total, own, strict=True)]
            other = number_of(code)  # if only one differs, or all others alike
            others: list[int | None] = [other if axis.size == 2 else None] * axis.size
            others[axis.rank] = number
            self._break(number, others, axis, self._foreign_bits(total, own), other)

    @staticmethod
    def _foreign_bits(total: list[Any], own: list[float]) -> int:
        """Return the bits of a number in which a sum shows other ones than a rank's own."""
        foreign = [value != 0 and not bit for value, bit in zip(total, own, strict=True)]
        bits = zip(foreign[:STAMP_BITS], foreign[STAMP_BITS:], strict=True)
        return sum(any(pair) << position for position, pair in enumerate(bits))

    def describe(self, number: int | None, differing: Sequence[int] = ()) -> str:
        """Name an operation, or the traits in which ranks differ."""
        if number is None:
            return "something else"
        own, *traits = fields_of(number)
        if own == GAVE_UP:
            place = number >> NUMBER_BITS & ((1 << NUMBER_BITS) - 1)
            where = f" in {self.names.get(place, 'an operation')}" if place else ""
            return f"nothing, after an error{where}"
        if differing:
            return ", ".join(describe_trait(index, traits[index]) for index in differing)
        return self.names.get(own, f"operation {own}")

    def _break(
        self,
        number: int,
        numbers: list[int | None],
        axis: MeshAxis,
        differing: int | None = None,
        another: int | None = None,
    ) -> None:
        """Raise the error of ranks that want different things.

        ``differing`` are the bits that do, ``another`` the number of some rank, if these are not to
        be seen in ``numbers``.
        """
        known = [n for n in (*numbers, another) if n is not None]
        if differing is None:
            differing = functools.reduce(operator.or_, [n ^ number for n in known], 0)
        word = next((n for n in known if fields_of(n)[0] == GAVE_UP), None)
        own, *fields = fields_of(differing)
        traits = [] if own else [index for index, field in enumerate(fields) if field]
        did = [
            f"rank {r}: {self.describe(n, traits)}"
            for r, n in zip(axis.global_ranks, numbers, strict=True)
        ]
        if another is not None and another not in numbers:
            did.append(f"one of these: {self.describe(another, traits)}")
        if word is not None:
            told = word >> 2 * NUMBER_BITS
            traits = [index for index in range(len(TRAIT_BITS)) if told >> index & 1]
        if traits:
            what = "; and in ".join(DIFFERENCES[index] for index in traits)
            why = f"ranks send it differently ({'; '.join(did)}). They differ in {what}."
        else:
            why = (
                f"ranks issued different collectives ({'; '.join(did)}). Every rank must run the "
                "same units in the same order. Pass conditional=True to fully_shard for a unit "
                "that some ranks skip."
            )
        if word is None:
            word = last_word(number, traits)
        raise self._give_up_everywhere(
            f"{self.describe(number)}: {why} Nothing was mixed, but the ranks are out of step for "
            "good: end this run, or make a new process group.",
            axis,
            word,
        )

    def lose(self, number: int, error: Exception, axis: MeshAxis) -> StateError:
        """Return the error for a collective that failed, the last one of this process group."""
        return self._give_up_everywhere(
            f"{self.describe(number)}: waited for ranks that issued something else, or nothing "
            f"({error}). Every rank must run the same units in the same order. Pass "
            "conditional=True to fully_shard for a unit that some ranks skip.",
            axis,
            last_word(number, ()),
        )

    def _give_up_everywhere(self, why: str, axis: MeshAxis, word: int) -> StateError:
        """Send nothing any more, and let ranks that wait for this one, here or elsewhere, know."""
        self.give_up(why, axis, word)
        elsewhere = word >> 2 * NUMBER_BITS << 2 * NUMBER_BITS  # other operations have the numbers
        for stamp in [other for own in self.stamps for other in own.beside()]:
            stamp.give_up(why, elsewhere)
        return StateError(why)

    def give_up(self, why: str, axis: MeshAxis, word: int = GAVE_UP) -> None:
        """Say that this rank does not go on, where the others expect its next operations.

        They may have issued several before they look at one. Nobody waits here: those others may
        have failed too. They see ``word`` (see ``last_word``), and give up in turn.
        """
        if self.broken is not None or self.is_silent:
            return
        self.broken, recent = why, self.recent
        with contextlib.suppress(Exception):  # the error that is being raised says more
            for _ in range(LAST_WORDS):
                predicted = self.predicted.get(recent, UNCERTAIN)
                expected = self._operations.get(predicted)
                if expected is None:
                    self._last_words.append(self._send_number(word, axis))
                    break
                self._last_words.append(self._send_stamp(expected, word, axis))
                recent = (*recent[1:], predicted)
        self.predicted = {}  # whatever comes next is looked at, and refused


class Stamp:
    """The number of one operation of one group, and the check of those that came back.

    ``group`` refers weakly to a function that returns all stamps of the group: who gives up on one
    gives up on all.
    """

    def __init__(
        self,
        axis: MeshAxis,
        kind: str,
        group: weakref.ref[Callable[[], Iterable[Stamp]]] | None = None,
    ) -> None:
        self.axis = axis
        self.kind = kind
        self._agreement = agreement_of(axis)
        self.number = NO_NUMBER
        self.code = [0.0] * len(stamp_of(kind, NO_NUMBER))
        self._group = group
        self._agreement.stamps.add(self)

    def beside(self) -> Iterable[Stamp]:
        """Return all stamps of the group, as long as it lives."""
        stamps = None if self._group is None else self._group()
        return () if stamps is None else stamps()

    def enroll(self, fqn: str) -> None:
        """Take a number, and a name for errors. Ranks enroll the same operations in one order."""
        self.number = self._agreement.number(f"{fqn or '<root>'} ({NAMES[self.kind]})")
        self.code = stamp_of(self.kind, self.number)

    def update_signature(self, signature: Signature) -> bool:
        """Number the operation by its traits, too; return whether the number is another one."""
        before = self.number
        if before != NO_NUMBER:
            self.number = before % (1 << NUMBER_BITS) | signature.bits << NUMBER_BITS
            self.code = stamp_of(self.kind, self.number)
        return self.number != before

    def register(
        self,
        wire: Wire,
        numels: Sequence[int],
        dtype: torch.dtype,
        seen_as: torch.dtype,
        start: int,
        reduction: Any = None,
    ) -> None:
        """Say how the operation travels; see ``Operation``."""
        if self.number == NO_NUMBER:
            return
        self._agreement.register(
            Operation(
                self.number,
                self.kind,
                tuple(numels),
                dtype,
                seen_as,
                start,
                weakref.ref(wire),
                reduction,
                wire.is_custom,
            )
        )

    def before(self) -> None:
        """Make sure that every rank is about to issue this operation. See [Note: agreement]."""
        agreement, number = self._agreement, self.number
        recent = agreement.recent
        if agreement.predicted.get(recent) == number:  # what is certain takes no other call
            agreement.recent = (*recent[1:], number)
        elif number != NO_NUMBER:
            agreement.before(number, self.axis)

    def retire(self) -> None:
        """No rank issues this operation again."""
        self._agreement.retire(self.number)

    @property
    def is_checked(self) -> bool:
        return self.number != NO_NUMBER and not self._agreement.is_silent

    def check(self, seen: Tensor) -> None:
        """Look at the stamps ``[W, n]`` that came with a gather and are not all this one's."""
        numbers = [number_of_digits(row) for row in seen.tolist()]
        self._agreement.compare(self.number, numbers, self.axis)

    def check_sum(self, seen: Tensor) -> None:
        """Look at the sum of the stamps ``[n]`` of a reduction, which is not this one's."""
        self._agreement.compare_sum(self.number, seen.tolist(), self.axis)

    def silence(self, is_silent: bool) -> bool:
        """Switch checks of the process group off (or on); return whether they were off before."""
        before, self._agreement.is_silent = self._agreement.is_silent, is_silent
        return before

    @property
    def broken(self) -> str | None:
        """Why nothing can be sent any more; None if all is well."""
        return self._agreement.broken

    def lost(self, error: Exception) -> StateError:
        """Return the error for a collective that failed."""
        return self._agreement.lose(self.number, error, self.axis)

    def give_up(self, why: str, word: int = GAVE_UP) -> None:
        """Let ranks that wait for this one know that it does not go on."""
        self._agreement.give_up(why, self.axis, word)


_agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(axis: MeshAxis) -> Agreement:
    """Return the agreement of an axis' process group; groups that share one share it."""
    if axis.pg is None:
        return Agreement()
    if axis.pg not in _agreements:
        _agreements[axis.pg] = Agreement()
    return _agreements[axis.pg]
