"""Ranks issue the same collectives in the same order, or every one of them gets an error.

Owns, for each axis of ranks, the numbers of the operations on it, what followed what so far, and
what happens where something else follows: ranks exchange numbers, stand in for what others issue,
or give up. It must not know parameters, groups or hooks. A steady step does not enter this file.

[Note: agreement]
Two ranks that gather different blocks of one size would mix them silently; of different sizes, gloo
ends the process. So no rank may issue an operation that another does not, and none may wait to
find out. What all ranks did so far is the same on all; so is any prediction made from it. Each rank
compares what it is about to do with the prediction for the last few operations:

- It is what was predicted: go on. The operation carries its number in a few elements of its own
  buffer (its *stamp*), and who receives it compares (``Stamp``).
- Nothing is predicted, or what followed differed in the past, and not in turns that repeat: all
  ranks know that, and exchange the numbers in one tiny collective first. Turns that repeat are
  those of microbatches: the last one is synchronised, the others are not.
- Something else is predicted: the others may be issuing that. So this rank does too, with nothing
  in it but a stamp that says what it wants. If all ranks came here for the same reason, they agree,
  mark the place as uncertain, and go on; if not, everybody sees the stamps and raises.

A rank that raises also says so on the other process groups of its units: the replicas of its shards
agree among themselves and would wait for it.

[Note: several groups of some ranks]
Reductions may have a process group of their own, and so have neighbours that hold a whole parameter
together between forward and backward. One rank may be about to reduce over the one group, another
to gather over the other: they would wait for each other until the groups' time-outs. So the ranks
of the axis agree on what is issued over all of its groups, in one order, and exchange numbers over
the axis.
What travels among neighbours is seen by these alone. A rank that wants something else stands in for
operation after operation, until all ranks of the axis have taken part in one. A rank that gives up
goes on as far.

Part of a number is in which way the operation travels (``Signature``): ranks of which one changed a
setting alone want different operations, and what is issued meanwhile is what was before.

A program that repeats its steps exchanges nothing beside its own collectives after the first ones.

On a device the host does not wait to look: what came with gathers is copied to it once a step, and
looked at when that is there, mostly a step later (``LateLook``). Until then the others go on with
what was predicted. So a rank that gives up goes on with that too, one empty operation after the
other, until all others have seen it.
A wire that carries nothing (a benchmark that replaces collectives by no-ops) is recognised by the
missing stamp of the rank itself, and is not checked.

[Note: numbers that are free again]
Models are copied, run and dropped, and there are 65,535 numbers. When which object dies differs
between ranks, so it says nothing. What all ranks know is what was issued: after every ``RENEWED``
numbers, an operation that was issued by no rank since the last time, and is no younger, gives its
number back, and is forgotten. Its stamp makes it known again if it comes back after all. What ranks
expect is forgotten at that moment too, so the next step exchanges its numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp2._core.base import torch_autograd, torch_comm, torch_modes
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.process_mesh import known_of
from fsdp2._core.comm.wire import Wire

# What a collective carries to say which operation it belongs to: numbers, and their encodings.

NUMBER_BITS = 16
TRAIT_BITS = (12, 6, 8, 1, 1)
"""Of what ranks must agree on beside the operation: see ``Signature``."""
STAMP_BITS = NUMBER_BITS + sum(TRAIT_BITS)
STAMP_NUMEL = 2 * STAMP_BITS
"""Elements that say which operation a reduction belongs to: bits and their complements."""

DIGIT_BITS = 3
"""Bits of a stamp in an element that is gathered, not summed: any dtype holds these exactly."""
GATHER_STAMP_NUMEL = 1 + -(-STAMP_BITS // DIGIT_BITS)
"""Elements that say which operation a gather belongs to: a mark, and digits."""

NAMES = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "reduce_outer": "reduce-scatter over the outer dim",
}


DTYPES = (
    *(torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
"""Dtypes of collectives; messages of other ones are told apart by what takes part."""

NamedShape = tuple[str, tuple[int, ...]]
MOST_TENSORS = 12
"""In a message."""

DIFFERENCES = (
    "which parameters are trainable, or their shapes or dtypes: freeze, cast and replace "
    "parameters alike on all ranks",
    "which parameters travel by themselves: call set_copy_free_min_bytes alike on all ranks",
    "the dtypes that are sent and summed: use one mixed precision policy, one "
    "set_gradient_wire_dtype and one mode, train() or eval(), on all ranks",
    "who carries it: set custom collectives and hooks on all ranks",
    "whether replicas are summed behind it: call set_requires_all_reduce alike on all ranks",
)
"""What it means, and what to do, that ranks differ in a trait; in the order of ``TRAIT_BITS``."""


@dataclass(frozen=True)
class Signature:
    """What ranks have to agree on for their parts of an operation to fit.

    ``members``: anything whose ``repr`` tells what takes part; ``alone``: how many of these travel
    in collectives of their own; ``dtypes``: what is sent, and what it is summed in;
    ``is_partial``: no sum over replicas follows, for which other process groups would wait;
    ``tensors``: the names and shapes of those that take part, for messages.
    """

    members: object
    alone: int
    dtypes: tuple[torch.dtype, torch.dtype]
    is_custom: bool
    is_partial: bool = False
    tensors: tuple[NamedShape, ...] = ()

    @property
    def bits(self) -> int:
        """The traits as one number of ``sum(TRAIT_BITS)`` bits."""
        sent, summed = (1 + DTYPES.index(d) if d in DTYPES else 0 for d in self.dtypes)
        digest = zlib.crc32(repr(self.members).encode())
        result = position = 0
        flags = (int(self.is_custom), int(self.is_partial))
        values = (digest, self.alone, sent << 4 | summed, *flags)
        for value, width in zip(values, TRAIT_BITS, strict=True):
            result |= value % (1 << width) << position
            position += width
        return result


def describe_tensors(tensors: Sequence[NamedShape]) -> str:
    """Say what takes part on this rank: other ranks say theirs, and who reads both can compare."""
    shown = ", ".join(f"{name} {tuple(shape)}" for name, shape in tensors[:MOST_TENSORS])
    more = len(tensors) - MOST_TENSORS
    return f" On this rank it has {shown or 'none'}{f' and {more} more' if more > 0 else ''}."


def last_word(number: int, traits: Sequence[int]) -> int:
    """Return what a rank sends that gives up: where, and in which traits ranks differ there.

    It is the number of no operation.
    """
    differing = sum(1 << index for index in traits)
    return (differing << NUMBER_BITS | number % (1 << NUMBER_BITS)) << NUMBER_BITS


def fields_of(number: int) -> list[int]:
    """Return an operation's own number, and each trait, out of its number with traits."""
    fields = []
    for width in (NUMBER_BITS, *TRAIT_BITS):
        fields.append(number % (1 << width))
        number >>= width
    return fields


def describe_trait(index: int, value: int) -> str:
    """Say what a rank's operation is like in one trait."""
    if index == 0:
        return f"set {value:x} of parameters"
    if index == 1:
        return f"{value} by themselves"
    if index == 2:
        sent, summed = (_dtype_name(code) for code in divmod(value, 16))
        return f"sends {sent}" if sent == summed else f"sends {sent}, sums {summed}"
    if index == 3:
        return "by a function of the user's" if value else "by the library"
    return "without the replicas" if value else "then over the replicas"


def _dtype_name(code: int) -> str:
    found = DTYPES[code - 1] if 0 < code <= len(DTYPES) else "another dtype"
    return str(found).removeprefix("torch.")


def code_of(number: int) -> list[float]:
    """Return a number's bits followed by their complements: half of the elements are 1.

    No sum of such codes over ranks, in whatever precision, is zero where one of them is 1; so a
    rank sees in a sum of codes that another one sent a different number.
    """
    bits = [number >> position & 1 for position in range(STAMP_BITS)]
    return [float(bit) for bit in bits] + [float(1 - bit) for bit in bits]


def number_of(code: list[Any]) -> int | None:
    """Return the number that a code stands for, or None if it is none."""
    bits = [bool(value) for value in code]
    if any(bit == other for bit, other in zip(bits[:STAMP_BITS], bits[STAMP_BITS:], strict=True)):
        return None
    return sum(bit << position for position, bit in enumerate(bits[:STAMP_BITS]))


def digits_of(number: int) -> list[float]:
    """Return 1, and then a number's digits: shorter than a code, for what is not summed."""
    positions = range(0, STAMP_BITS, DIGIT_BITS)
    return [1.0, *(float(number >> position & (1 << DIGIT_BITS) - 1) for position in positions)]


def number_of_digits(digits: list[Any]) -> int | None:
    """Return the number that digits stand for, or None if they are none."""
    mark, *values = map(abs, digits)
    if mark != 1 or any(value not in range(1 << DIGIT_BITS) for value in values):
        return None
    return sum(int(value) << DIGIT_BITS * index for index, value in enumerate(values))


def stamp_of(kind: str, number: int) -> list[float]:
    """Return what a collective of a kind carries for a number."""
    return digits_of(number) if kind == "gather" else code_of(number)


# What follows what in a program that repeats itself, learned from what it did.

CONTEXT = 4
"""How many operations a prediction looks back."""

LONG_RUN = 3
"""What followed this often in a row is expected again."""

MAX_RUN = 4096
"""How often in a row the same thing followed, as far as that is counted."""

MAX_PREDICTIONS = 100_000
UNCERTAIN = -1

DOUBTED = 1 - LONG_RUN
"""How much a turn is trusted that was another one this time: from 1 on it is expected."""

Recent = tuple[int, ...]  # the last operations, the newest one at the end
Runs = dict[Recent, tuple[int, int]]  # where several things followed: the last one, how often

_NO_RUN = (UNCERTAIN, 0)


class Predictions:
    """What comes next, by the last operations.

    Where different things followed these, what counts besides is which one did last, and how often
    in a row: so the last of several microbatches, which is synchronised, is told from the others.
    A turn that was once another one (an evaluation in between) is expected again when it has come
    ``LONG_RUN`` times in a row.
    """

    def __init__(self) -> None:
        self.first: dict[Recent, int] = {}  # by the last operations alone
        self._turns: dict[tuple[Recent, int, int], tuple[int, int]] = {}  # what came, and its trust
        self._runs: Runs = {}

    def expect(self, recent: Recent) -> int | None:
        """Return the number of what comes next, UNCERTAIN, or None: that was never seen."""
        return self._expect(recent, self._runs)

    def _expect(self, recent: Recent, runs: Runs) -> int | None:
        predicted = self.first.get(recent)
        if predicted != UNCERTAIN:
            return predicted
        last, length = runs.get(recent, _NO_RUN)
        number, trust = self._turns.get((recent, last, length), (last, length - LONG_RUN + 1))
        return number if trust > 0 else None

    def learn(self, recent: Recent, number: int) -> None:
        """Note what came next."""
        if len(self.first) + len(self._turns) >= MAX_PREDICTIONS:
            self.clear()
        known = self.first.get(recent)
        if known is None or known == number:
            self.first[recent] = number
            return
        if known == UNCERTAIN:
            last, length = self._runs.get(recent, _NO_RUN)
            turn = self._turns.get((recent, last, length))
            if turn is not None or number != last or length < LONG_RUN:
                trust = 1
                if turn is not None:
                    trust = min(turn[1] + 1, 1) if turn[0] == number else DOUBTED
                self._turns[recent, last, length] = number, trust
        else:
            self.first[recent] = UNCERTAIN
        _count(self._runs, recent, number)

    def after(self, recent: Recent) -> Iterator[int | None]:
        """Yield what comes next if all goes on as predicted; None where nothing is, at the end."""
        runs = dict(self._runs)
        while True:
            predicted = self._expect(recent, runs)
            if predicted is None or predicted == UNCERTAIN:
                yield None
                return
            yield predicted
            if self.first.get(recent) == UNCERTAIN:
                _count(runs, recent, predicted)
            recent = (*recent[1:], predicted)

    def forget(self, number: int) -> None:
        """Never expect an operation again."""
        for recent in [recent for recent, known in self.first.items() if known == number]:
            del self.first[recent]
        for turn in [turn for turn, (known, _) in self._turns.items() if known == number]:
            del self._turns[turn]

    @property
    def numbers(self) -> set[int]:
        """The numbers of all that was learned."""
        runs = {last for last, _ in self._runs.values()}
        turns = {number for number, _ in self._turns.values()}
        return {*self.first.values(), *turns, *runs} - {UNCERTAIN}

    def clear(self) -> None:
        """Forget everything."""
        self.first.clear()
        self._turns.clear()
        self._runs.clear()


def _count(runs: Runs, recent: Recent, number: int) -> None:
    last, length = runs.get(recent, _NO_RUN)
    runs[recent] = (number, min(length + 1, MAX_RUN) if last == number else 1)


GAVE_UP = 0
"""The number of a rank that issues nothing more."""
LAST_WORDS = 4
"""How many operations a rank that gives up goes on with; more than others leave unchecked."""
SAME_ON_EVERY_RANK = (
    "Every rank must run the same units in the same order. Did only some ranks run the model, or "
    "call full_tensor, clip_grad_norm_, save or load, as under `if rank == 0:`? Do that on every "
    "rank. Has one fewer batches? Give all as many. If some ranks skip a unit on purpose, pass "
    "conditional=True to fully_shard for it."
)
"""What to ask and to do, the commonest mistake first."""

LAST_NUMBER = (1 << NUMBER_BITS) - 1
RENEWED = 8192
"""How many numbers are handed out from one time that idle ones are given back to the next."""

FOLLOWED = 100_000
FOLLOWED_S = 10.0
"""How many operations a rank of a device that gave up goes on with, and how long one may take."""


HOST = torch.device("cpu")


class Over:
    """An axis that something travels over; its process group is not kept alive."""

    def __init__(self, axis: MeshAxis) -> None:
        self._group = None if axis.pg is None else weakref.ref(axis.pg)
        self._axis = dataclasses.replace(axis, pg=None, whole=None)

    @property
    def size(self) -> int:
        return self._axis.size

    @property
    def axis(self) -> MeshAxis:
        if self._group is None:
            return self._axis
        group = self._group()
        if group is None:
            raise ReferenceError(f"the process group of mesh dim {self._axis.name!r} is gone")
        return dataclasses.replace(self._axis, pg=group)


@dataclass(frozen=True)
class Operation:
    """The collectives of one move of one group, as every rank of the process group knows them.

    Each rank sends ``numels`` elements of ``dtype``, to each rank for a reduce-scatter, in one
    collective for each number. What comes back of the first is looked at in ``seen_as``: there the
    stamp begins at element ``stamp``. ``pieces``: elements that each rank sends, or that are
    reduced for each rank, in one collective, where that is not as much for every rank.
    """

    number: int
    kind: str
    numels: tuple[int, ...]
    dtype: torch.dtype
    seen_as: torch.dtype
    stamp: int
    wire: weakref.ref[Wire]
    over: Over
    reduction: Any = None
    is_custom: bool = False
    device: torch.device = HOST
    pieces: tuple[int, ...] = ()

    @property
    def sender(self) -> Wire:
        """What other ranks send it over: ours, if theirs was ours."""
        wire = self.wire()
        return Wire() if wire is None or (wire.is_custom and not self.is_custom) else wire


class Enqueued:
    """What a device was given up to here, as a work."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)


class _Streams(threading.local):
    """The stream of each thread in which a device is asked what others want."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.Stream] = {}


_streams = _Streams()


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[tuple[bool, Callable[[Any], Any]]]:
    """Issue what is inside beside the compute, which must not wait for ranks that never come.

    Yields if works are asked for, and what makes a work of what was issued.
    """
    if device == HOST:
        with torch_autograd.without_packing():
            yield True, lambda work: work
        return
    stream = _streams.of.get(device)
    if stream is None:
        stream = _streams.of[device] = torch.Stream(device)

    def end(work: Any) -> Enqueued:
        if work is not None:  # of a custom collective, which nobody asked for one
            work.wait()
        return Enqueued(stream.record_event())

    with stream, torch_autograd.without_packing():
        yield False, end


@dataclass(frozen=True)
class Sent:
    """An issued collective, and the memory that it works on."""

    output: Tensor
    pairs: list[tuple[Tensor, Tensor]]
    work: Any


class Member(Protocol):
    """What has a number here, and its neighbours, which may have theirs in other agreements."""

    def beside(self) -> Iterable[Member]: ...

    def give_up(self, why: str, word: int) -> Follower | None: ...


class Agreement:
    """What the ranks of one axis did, and what they expect of each other."""

    def __init__(self, axis: MeshAxis) -> None:
        self.over = Over(axis)
        self.names: dict[int, str] = {}
        # names and shapes of the tensors that an operation sends
        self.tensors: dict[int, tuple[NamedShape, ...]] = {}
        self._last = 0  # the number that was handed out last
        self._young: list[int] = []  # numbers that were handed out since idle ones were given back
        self._in_use: set[int] = set()  # numbers that were not given back then
        self._operations: dict[int, Operation] = {}
        self._predictions = Predictions()
        # what is certain to follow; it is looked up before each operation
        self.predicted = self._predictions.first
        self.recent: tuple[int, ...] = (UNCERTAIN,) * CONTEXT
        self.is_silent = False
        self.broken: str | None = None
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.late: LateLook | None = None  # what looks at the stamps of a device, a step late
        # where gathers leave the stamps of all ranks on a host, by their bytes
        self.landed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._last_words: list[Sent] = []
        # operations that are issued in place of another one, with what came before each
        self._issued: list[tuple[Recent, int]] = []

    def number(self, name: str) -> int:
        """Return the number of a new operation. Ranks must ask in the same order."""
        if len(self._young) == RENEWED:
            self._give_back()
        number = self._last % LAST_NUMBER + 1
        while number in self._in_use:
            number = number % LAST_NUMBER + 1
        self._last = number
        self._young.append(number)
        self.names[number] = name
        return number

    def _give_back(self) -> None:
        """Forget what no rank issues any more. See [Note: numbers that are free again]."""
        issued = {fields_of(number)[0] for number in self._predictions.numbers}
        kept = issued.union(self._young)
        self._in_use = kept if len(kept) < LAST_NUMBER else set()
        self._young = []
        self.names = {own: name for own, name in self.names.items() if own in kept}
        self.tensors = {own: found for own, found in self.tensors.items() if own in kept}
        known = self._operations.items()
        self._operations = {n: operation for n, operation in known if fields_of(n)[0] in kept}
        self._predictions.clear()

    def register(self, operation: Operation) -> None:
        """Learn how an operation travels; again if its group's plan changed."""
        self._operations[operation.number] = operation

    def knows(self, number: int) -> bool:
        return number in self._operations

    def retire(self, number: int) -> None:
        """Never expect an operation again: its group sends over another process group now."""
        self._operations.pop(number, None)
        self.tensors.pop(fields_of(number)[0], None)
        self._predictions.forget(number)

    def look_late(self) -> LateLook:
        """Return what looks at the stamps of a device."""
        if self.late is None:
            self.late = LateLook()
        return self.late

    def before(self, number: int, device: torch.device = HOST) -> None:
        """Make sure that every rank is about to issue this operation.

        ``device``: where it works.

        Raises:
            StateError: one is not; or one was not, earlier.
        """
        recent = self.recent
        if self.predicted.get(recent) != number:
            self._settle(number, device)
        self.recent = (*recent[1:], number)

    def _settle(self, number: int, device: torch.device) -> None:
        if self.broken is not None:
            raise StateError("FS401", self.broken)
        recent = self.recent
        predicted = self._predictions.expect(recent)
        if self.is_silent or predicted == number:
            pass
        else:
            try:
                self._ask(number, device)
            finally:
                self._issued.clear()
        self._predictions.learn(recent, number)

    def _ask(self, number: int, device: torch.device) -> None:
        """Let every rank see what this one wants, in place of what is predicted, or beside it."""
        # operations of neighbours alone may follow each other without end
        for _ in range(len(self._operations) + 1):
            predicted = self._predictions.expect(self.recent)
            expected = None if predicted is None else self._operations.get(predicted)
            if predicted is None or expected is None:
                break
            self._issued.append((self.recent, predicted))
            self.recent = (*self.recent[1:], predicted)  # that is what was issued, if this raises
            self._stand_in(expected, number)
            if self._is_seen_by_all(expected):
                return
        sent = self.send_number(number, device)
        self.compare(number, [*self._wait(number, sent).tolist()], self.over.axis)

    def _is_seen_by_all(self, operation: Operation) -> bool:
        return operation.over.size == self.over.size

    def _stand_in(self, expected: Operation, number: int) -> None:
        """Issue what the others may be issuing, with a stamp that says what this rank wants."""
        try:
            sent = self.send_stamp(expected, number)
        except ReferenceError as error:  # its group is gone here, and others may wait in it
            raise self.lose(number, error) from error
        output = self._wait(number, sent)
        start, axis = expected.stamp, expected.over.axis
        if expected.kind == "gather":
            self.compare(number, numbers_in(output, expected), axis)
        else:
            self.compare_sum(number, output[start : start + STAMP_NUMEL].tolist(), axis)

    def _wait(self, number: int, sent: Sent) -> Tensor:
        try:
            if sent.work is not None:
                sent.work.wait()
        except RuntimeError as error:
            raise self.lose(number, error) from error
        return sent.output

    def send_number(self, number: int, device: torch.device) -> Sent:
        axis = self.over.axis
        with torch_modes.hidden_from_modes(), _beside(device) as (async_op, end):
            own = torch.tensor([number], dtype=torch.int64, device=device)
            received = torch.full((axis.size,), -1, dtype=torch.int64, device=device)
            work = torch_comm.all_gather_single(received, own, axis.pg, async_op)
            return Sent(received, [(received, own)], end(work))

    @staticmethod
    def send_stamp(expected: Operation, number: int) -> Sent:
        axis, wire = expected.over.axis, expected.sender
        dtype, seen_as = expected.dtype, expected.seen_as
        first, *others = expected.numels
        device = expected.device
        with torch_modes.hidden_from_modes(), _beside(device) as (async_op, end):
            code = torch.tensor(stamp_of(expected.kind, number), dtype=torch.float32, device=device)
            if expected.pieces and expected.kind != "all_reduce":
                return _send_uneven(expected, code, async_op, end)
            at = slice(expected.stamp, expected.stamp + len(code))
            if expected.kind == "gather":
                own = torch.zeros(first, dtype=dtype, device=device)
                own.view(seen_as)[at] = code.to(seen_as)
                pairs = [wire.stage(own, axis)]
                for numel in others:
                    gathered = torch.empty(axis.size * numel, dtype=dtype, device=device)
                    pairs.append((gathered, own.new_zeros(numel)))
                work = wire.all_gather_each(pairs, axis, async_op)
            elif expected.kind in ("reduce", "reduce_outer"):
                own = wire.allocate((axis.size, first), dtype, device).zero_()
                own[:, at] = code.to(dtype)
                pairs = [(wire.allocate((first,), seen_as, device), own.view(-1))]
                for numel in others:
                    zeros = torch.zeros(axis.size * numel, dtype=dtype, device=device)
                    pairs.append((torch.empty(numel, dtype=seen_as, device=device), zeros))
                work = wire.reduce_scatter_each(pairs, expected.reduction, axis, async_op)
            else:
                own = torch.zeros(first, dtype=dtype, device=device)
                own[at] = code.to(dtype)
                pairs = [(own, own)]
                work = wire.all_reduce(own, expected.reduction, axis, async_op)
            return Sent(pairs[0][0].view(seen_as), pairs, end(work))

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
            tensors = self.tensors.get(fields_of(number)[0])
            if 0 in traits and tensors is not None:
                why += describe_tensors(tensors)
        else:
            why = f"ranks issued different collectives ({'; '.join(did)}). {SAME_ON_EVERY_RANK}"
        if word is None:
            word = last_word(number, traits)
        raise self._give_up_everywhere(
            f"{self.describe(number)}: {why} Nothing was mixed, but the ranks are out of step for "
            "good: end this run, or make a new process group.",
            word,
        )

    def lose(self, number: int, error: Exception) -> StateError:
        """Return the error for a collective that failed, the last one of this process group."""
        known = known_of(str(error))
        first = f"{known}. Look first at what the others printed" if known else "it has ended"
        return self._give_up_everywhere(
            f"{self.describe(number)}: another rank did not take part: {first}. Else ranks differ: "
            f"{SAME_ON_EVERY_RANK} The backend said: {error}",
            last_word(number, ()),
        )

    def _give_up_everywhere(self, why: str, word: int) -> StateError:
        """Send nothing any more, and let ranks that wait for this one, here or elsewhere, know."""
        elsewhere = word >> 2 * NUMBER_BITS << 2 * NUMBER_BITS  # other operations have the numbers
        members = [other for own in self.members for other in own.beside()]
        followers = [self.give_up(why, word)]
        followers += [member.give_up(why, elsewhere) for member in members]
        for follower in followers:
            if follower is not None:
                follower.finish()
        return StateError("FS401", why)

    def give_up(self, why: str, word: int = GAVE_UP) -> Follower | None:
        """Say that this rank does not go on, where the others expect its next operations.

        They may have issued several before they look at one. Nobody waits here: those others may
        have failed too. They see ``word`` (see ``last_word``), and give up in turn. On a device
        they look later, and what is returned goes on until then.
        """
        if self.broken is not None or self.is_silent:
            return None
        for recent, issued in self._issued:  # ranks that wanted it learned it, and expect by that
            self._predictions.learn(recent, issued)
        self.broken, predictions = why, self._predictions
        self._predictions = Predictions()
        self.predicted = self._predictions.first  # whatever comes next is looked at, and refused
        following = predictions.after(self.recent)
        device = next((known.device for known in self._operations.values()), HOST)
        if device != HOST:
            known = dict(self._operations)
            operations = (None if number is None else known.get(number) for number in following)
            return Follower(self, operations, word, device)
        said: Counter[int] = Counter()  # by the size of what it travels over
        with contextlib.suppress(Exception):  # the error that is being raised says more
            for predicted in itertools.islice(following, FOLLOWED):
                expected = None if predicted is None else self._operations.get(predicted)
                if expected is None:
                    self._last_words.append(self.send_number(word, device))
                    break
                said[expected.over.size] += 1
                if said[expected.over.size] <= LAST_WORDS:
                    self._last_words.append(self.send_stamp(expected, word))
                if said[self.over.size] == LAST_WORDS:
                    break
        return None


def _send_uneven(expected: Operation, code: Tensor, async_op: bool, end: Any) -> Sent:
    """Send a stamp and zeros where ranks send pieces. See [Note: dealt parameters] in ``layout``.

    The stamp lies as far from the start of each piece that is gathered, and as far from the end of
    each that is reduced.
    """
    axis, wire, pieces = expected.over.axis, expected.sender, expected.pieces
    dtype, seen_as, device = expected.dtype, expected.seen_as, expected.device
    if expected.kind == "gather":
        own = torch.zeros(pieces[axis.rank], dtype=dtype, device=device)
        own.view(seen_as)[expected.stamp : expected.stamp + len(code)] = code.to(seen_as)
        landed = torch.zeros(sum(pieces), dtype=dtype, device=device)
        rows = landed.split(list(pieces))
        work = wire.all_gather_uneven(rows, own, axis, async_op)
        return Sent(landed.view(seen_as), [(landed, own)], end(work))
    own = torch.zeros(sum(pieces), dtype=dtype, device=device)
    for piece in own.split(list(pieces)):
        first = len(piece) - (pieces[axis.rank] - expected.stamp)
        piece[first : first + len(code)] = code.to(dtype)
    reduced = torch.empty(pieces[axis.rank], dtype=seen_as, device=device)
    work = wire.reduce_scatter_uneven(reduced, own, pieces, expected.reduction, axis, async_op)
    return Sent(reduced, [(reduced, own)], end(work))


def numbers_in(output: Tensor, expected: Operation) -> list[int | None]:
    """Return the numbers in what a gather brought."""
    start, end = expected.stamp, expected.stamp + GATHER_STAMP_NUMEL
    if expected.pieces:
        sent, seen = expected.dtype.itemsize, expected.seen_as.itemsize
        rows = output.split([numel * sent // seen for numel in expected.pieces])
        return [number_of_digits(row[start:end].tolist()) for row in rows]
    stamps = output.view(expected.over.axis.size, -1)[:, start:end].tolist()
    return [number_of_digits(row) for row in stamps]


class Follower:
    """Goes on with what the others of one process group of a device expect, with nothing in it.

    Each has a thread of its own: who waits for this rank in one process group may be waited for in
    another one.
    """

    def __init__(
        self,
        agreement: Agreement,
        following: Iterator[Operation | None],
        word: int,
        device: torch.device,
    ) -> None:
        self._agreement = agreement
        self._following = following
        self._word = word
        self._device = device
        # a thread begins on device 0, and would make a context there
        self._index = None if device.type == "cpu" else torch.accelerator.current_device_index()
        self._answered = time.monotonic()  # the last time
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the others know, or have not answered for a while."""
        while self._thread.is_alive() and time.monotonic() - self._answered < FOLLOWED_S:
            self._thread.join(0.01)

    def _run(self) -> None:
        send, word = self._agreement, self._word
        with contextlib.suppress(Exception):  # the error that is being raised says more
            if self._index is not None:
                torch.accelerator.set_device_index(self._index)
            for operation in itertools.islice(self._following, FOLLOWED):
                if operation is None:
                    self._wait(send.send_number(word, self._device))
                    return
                sent = send.send_stamp(operation, word)
                if not self._wait(sent) or not self._somebody_goes_on(operation, sent.output):
                    return

    def _wait(self, sent: Sent) -> bool:
        """Return whether the others took part."""
        while not sent.work.is_completed():
            if time.monotonic() - self._answered > FOLLOWED_S:
                _unanswered.append(sent)  # it may still be read
                return False
            time.sleep(0.001)
        self._answered = time.monotonic()
        sent.work.wait()
        return True

    def _somebody_goes_on(self, operation: Operation, output: Tensor) -> bool:
        # ranks that take no part in this operation may go on
        if operation.over.size < self._agreement.over.size:
            return True
        if operation.kind != "gather":
            return any(output[operation.stamp :][:NUMBER_BITS].tolist())  # who gave up sends none
        axis = operation.over.axis
        numbers = numbers_in(output, operation)
        others = [n for rank, n in enumerate(numbers) if rank != axis.rank]
        return any(n is not None and fields_of(n)[0] != GAVE_UP for n in others)


_unanswered: list[Sent] = []


_agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(axis: MeshAxis) -> Agreement:
    """Return the agreement of an axis' ranks; groups over the same process group share it."""
    whole = axis.whole or axis
    if whole.pg is None:
        return Agreement(whole)
    if whole.pg not in _agreements:
        _agreements[whole.pg] = Agreement(whole)
    return _agreements[whole.pg]
