"""All ranks issue the same collectives in the same order, or all of them raise an error.

Owns, for each axis, the numbers that identify operations, the observed sequences of operations, and
the handling of deviations. A step in steady state runs no code from this file.

[Note: agreement]
If two ranks gather different blocks of the same size, data is silently mixed; if the sizes differ,
gloo kills the process. All ranks must therefore issue the same operations, and the check must
not make them wait. All ranks have the same history of operations, and so make the same predictions.
Each rank compares its next operation with the prediction from the last few operations:
- Equal: continue. The operation's buffer contains a few extra elements, the *stamp*, which encode
  the operation's number. Receivers check the stamp (``Stamp``).
- No prediction, or several known successors without a repeating pattern: ranks first exchange
  numbers in a tiny collective. (Micro-batches, only the last of which is synced, form a pattern.)
- Different: other ranks may be issuing the predicted operation. This rank issues it too, but as a
  *placeholder*: without data, with the stamp of the operation that this rank needs. If all ranks
  need the same operation, they record this point as uncertain and continue. Otherwise, every rank
  finds different stamps and raises. A rank that raises also reports this on the other process
  groups of its units: replicas of its shards have a separate agreement, and would otherwise wait.

[Note: one order over several process groups]
Reductions may have a separate process group, and so may *neighbours*: ranks that together hold a
full parameter between forward and backward. If a rank reduces over one process group while another
rank gathers over a different group, both wait until the groups time out. The ranks of the axis
therefore agree on one order of operations over all groups of the axis, and exchange numbers over
the axis. An operation among neighbours reaches only these ranks, so a rank that needs a different
operation issues placeholders until a placeholder reaches all ranks of the axis. A rank that gives
up also issues placeholders until then.

A number also encodes how the operation is sent (``Signature``): if only one rank changes a setting,
its numbers differ from those of other ranks, and its placeholders use the previous setting. After
the first steps, a program that repeats the same step issues no extra collectives.
On a device, the host does not wait for the check: each step copies the stamps of gathers to the
host, and usually a later step checks them (``LateLook``). Until then, other ranks continue as
predicted. A rank that gives up also continues, without data, until all other ranks have given up.

If a wire sends nothing (in a benchmark), a rank does not receive its own stamp: nothing is checked.

[Note: reuse of numbers]
A program may copy, run and drop many models, but there are only 65,535 operation numbers.
Object lifetimes differ between ranks; the history of operations does not. A cleanup after every
``RENEWED`` new numbers therefore drops all operations that have not been issued since the last
cleanup, and frees their numbers. If a dropped operation is issued later, its ``Stamp`` registers it
again. The cleanup also drops predictions, so the next step exchanges numbers.
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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp2._core.base import torch_autograd, torch_comm, torch_modes
from fsdp2._core.base.errors import StateError, known_of
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.wire import Wire

# Encoding of operation numbers in collectives.

NUMBER_BITS = 16
TRAIT_BITS = (12, 6, 8, 1, 1)
"""Bits per trait of a ``Signature``. Ranks must agree on an operation and its traits."""
STAMP_BITS = NUMBER_BITS + sum(TRAIT_BITS)
STAMP_NUMEL = 2 * STAMP_BITS
"""Number of elements of a reduction's stamp: bits and their complements."""

DIGIT_BITS = 3  # bits per element of a gather's stamp, exact in any dtype
GATHER_STAMP_NUMEL = 1 + -(-STAMP_BITS // DIGIT_BITS)
"""Number of elements of a gather's stamp: a leading 1, then digits."""

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
"""Dtypes that error messages can name. ``members`` distinguishes all others."""

NamedShape = tuple[str, tuple[int, ...]]
MOST_TENSORS = 12  # maximum number of tensors that a message lists
DIFFERENCES = (
    "which parameters are trainable, or their shapes or dtypes: freeze, cast and replace "
    "parameters identically on all ranks",
    "which parameters are sent separately: use the same set_copy_free_min_bytes on all ranks",
    "the dtypes that are sent and summed: use the same mixed precision policy, gradient wire dtype "
    "(set_gradient_wire_dtype) and mode, train() or eval(), on all ranks",
    "the custom collectives or hooks: set the same ones on all ranks",
    "whether an all-reduce over replicas follows: use the same set_requires_all_reduce on all "
    "ranks",
)
"""For each trait in ``TRAIT_BITS``: a description of the difference, and the remedy."""


@dataclass(frozen=True)
class Signature:
    """Properties of an operation on which ranks must agree. ``members``: an object whose ``repr``
    identifies the parameters; ``alone``: how many parameters are sent separately; ``dtypes``: the
    dtypes sent and summed; ``is_partial``: no all-reduce over replicas follows (other ranks might
    wait for one); ``tensors``: names and shapes, for messages."""

    members: object
    alone: int
    dtypes: tuple[torch.dtype, torch.dtype]
    is_custom: bool
    is_partial: bool = False
    tensors: tuple[NamedShape, ...] = ()

    @property
    def bits(self) -> int:
        """The traits, packed into one integer of ``sum(TRAIT_BITS)`` bits."""
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
    """List this rank's tensors, so that users can compare the messages of all ranks."""
    shown = ", ".join(f"{name} {tuple(shape)}" for name, shape in tensors[:MOST_TENSORS])
    more = len(tensors) - MOST_TENSORS
    return f" Tensors on this rank: {shown or 'none'}{f' and {more} more' if more > 0 else ''}."


def last_word(number: int, traits: Sequence[int]) -> int:
    """Return the number sent by a rank that gives up: an operation, and which traits differ."""
    differing = sum(1 << index for index in traits)
    return (differing << NUMBER_BITS | number % (1 << NUMBER_BITS)) << NUMBER_BITS


def fields_of(number: int) -> list[int]:
    """Split a number with traits into the operation's own number and the traits."""
    fields = []
    for width in (NUMBER_BITS, *TRAIT_BITS):
        fields.append(number % (1 << width))
        number >>= width
    return fields


def describe_trait(index: int, value: int) -> str:
    if index == 0:
        return f"parameter set {value:x}"
    if index == 1:
        return f"{value} sent separately"
    if index == 2:
        sent, summed = (_dtype_name(code) for code in divmod(value, 16))
        return f"sends {sent}" if sent == summed else f"sends {sent}, sums {summed}"
    if index == 3:
        return "by a user-supplied function" if value else "by the library"
    return "no all-reduce over replicas" if value else "then all-reduced over replicas"


def _dtype_name(code: int) -> str:
    found = DTYPES[code - 1] if 0 < code <= len(DTYPES) else "another dtype"
    return str(found).removeprefix("torch.")


def code_of(number: int) -> list[float]:
    """Return a number's bits and their complements. A sum over ranks, in any precision, is nonzero
    in each element where any rank has 1, so it reveals that a rank has a different number."""
    bits = [number >> position & 1 for position in range(STAMP_BITS)]
    return [float(bit) for bit in bits] + [float(1 - bit) for bit in bits]


def number_of(code: list[Any]) -> int | None:
    bits = [bool(value) for value in code]
    if any(bit == other for bit, other in zip(bits[:STAMP_BITS], bits[STAMP_BITS:], strict=True)):
        return None
    return sum(bit << position for position, bit in enumerate(bits[:STAMP_BITS]))


def digits_of(number: int) -> list[float]:
    """Return 1 and a number's digits: a code shorter than ``code_of``, for unsummed data only."""
    positions = range(0, STAMP_BITS, DIGIT_BITS)
    return [1.0, *(float(number >> position & (1 << DIGIT_BITS) - 1) for position in positions)]


def number_of_digits(digits: list[Any]) -> int | None:
    mark, *values = map(abs, digits)
    if mark != 1 or any(value not in range(1 << DIGIT_BITS) for value in values):
        return None
    return sum(int(value) << DIGIT_BITS * index for index, value in enumerate(values))


def stamp_of(kind: str, number: int) -> list[float]:
    return digits_of(number) if kind == "gather" else code_of(number)


# Prediction of operations in a program that repeats its steps.

CONTEXT = 4  # number of operations on which a prediction is based
LONG_RUN = 3  # after this many equal successors in a row, predict that successor again
MAX_RUN = 4096  # upper bound for counts of equal successors in a row
MAX_PREDICTIONS = 100_000
UNCERTAIN = -1

DOUBTED = 1 - LONG_RUN  # trust in a pattern that has just deviated; a prediction needs at least 1
Recent = tuple[int, ...]  # the last operations, newest last
Runs = dict[Recent, tuple[int, int]]  # last successor and its repetitions, if successors differ
_NO_RUN = (UNCERTAIN, 0)


@dataclass(eq=False)
class Predictions:
    """Predicts the next operation from the last few operations. If these have had different
    successors, the prediction also depends on the most recent successor and on how often it was
    repeated, to detect the last of several micro-batches. After a single deviation (such as an
    evaluation), a pattern is predicted again once it has been repeated ``LONG_RUN`` times."""

    first: dict[Recent, int] = field(default_factory=dict)  # based on the last operations only
    # (operations, last successor, its repetitions) -> (the next successor, trust in it)
    _turns: dict[tuple[Recent, int, int], tuple[int, int]] = field(default_factory=dict)
    _runs: Runs = field(default_factory=dict)

    def expect(self, recent: Recent, runs: Runs | None = None) -> int | None:
        """Return the next operation's predicted number, or None if there is no prediction. Pass
        ``runs`` to predict further: those after the predicted operations."""
        predicted = self.first.get(recent)
        if predicted != UNCERTAIN:
            return predicted
        last, length = (self._runs if runs is None else runs).get(recent, _NO_RUN)
        number, trust = self._turns.get((recent, last, length), (last, length - LONG_RUN + 1))
        return number if trust > 0 else None

    def learn(self, recent: Recent, number: int) -> None:
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
        """Yield the numbers of all predicted operations, and finally None."""
        runs = dict(self._runs)
        while True:
            predicted = self.expect(recent, runs)
            if predicted is None or predicted == UNCERTAIN:
                yield None
                return
            yield predicted
            if self.first.get(recent) == UNCERTAIN:
                _count(runs, recent, predicted)
            recent = (*recent[1:], predicted)

    def forget(self, number: int) -> None:
        for recent in [recent for recent, known in self.first.items() if known == number]:
            del self.first[recent]
        for turn in [turn for turn, (known, _) in self._turns.items() if known == number]:
            del self._turns[turn]

    @property
    def numbers(self) -> set[int]:
        runs = {last for last, _ in self._runs.values()}
        turns = {number for number, _ in self._turns.values()}
        return {*self.first.values(), *turns, *runs} - {UNCERTAIN}

    def clear(self) -> None:
        self.first.clear()
        self._turns.clear()
        self._runs.clear()


def _count(runs: Runs, recent: Recent, number: int) -> None:
    last, length = runs.get(recent, _NO_RUN)
    runs[recent] = (number, min(length + 1, MAX_RUN) if last == number else 1)


GAVE_UP = 0  # the number sent by a rank that has stopped
LAST_WORDS = 4
"""Number of operations issued after giving up: more than other ranks issue before a check."""
SAME_ON_EVERY_RANK = (
    "Every rank must run the same units in the same order. Did only some ranks run the model, or "
    "call full_tensor, clip_grad_norm_, save or load, e.g. under `if rank == 0:`? Do that on "
    "every rank. Does a rank have fewer batches? Give all ranks the same number. If some ranks "
    "skip a unit on purpose, pass conditional=True to its fully_shard call."
)
"""Remedies, starting with the most common mistake."""

LAST_NUMBER = (1 << NUMBER_BITS) - 1
RENEWED = 8192  # number of new operations between two cleanups
FOLLOWED = 100_000
FOLLOWED_S = 10.0
"""On a device, limits after a rank gives up: number of further operations, seconds for each."""

HOST = torch.device("cpu")


class Over:
    """The axis of an operation, with a weak reference to its process group."""

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
            raise ReferenceError(f"the process group of mesh dim {self._axis.name!r} was deleted")
        return dataclasses.replace(self._axis, pg=group)


@dataclass(frozen=True)
class Operation:
    """The collectives of one operation of a param group. ``numels``: for each collective, the
    number of ``dtype`` elements that a rank sends (in a reduce-scatter, to each rank). The result
    of the first collective contains the stamp at offset ``stamp``, in elements of ``seen_as``.
    ``pieces``: for an uneven collective, the number of elements that each rank sends (or receives,
    in a reduction)."""

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
        """The operation's wire or, if it was deleted or later customised, a default wire."""
        wire = self.wire()
        return Wire() if wire is None or (wire.is_custom and not self.is_custom) else wire


class Enqueued:
    """A ``Work`` that completes when ``event`` does."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)


_streams = threading.local()  # streams for exchanging numbers, by device


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[tuple[bool, Callable[[Any], Any]]]:
    """Issue collectives concurrently with compute: compute must not wait for ranks that have ended.
    Yields the ``async_op`` to pass, and a function that converts the result to a ``Work``."""
    if device == HOST:
        with torch_autograd.without_packing():
            yield True, lambda work: work
        return
    streams = vars(_streams)
    if str(device) not in streams:
        streams[str(device)] = torch.Stream(device)
    stream = streams[str(device)]

    def end(work: Any) -> Enqueued:
        if work is not None:  # returned by a custom collective
            work.wait()
        return Enqueued(stream.record_event())

    with stream, torch_autograd.without_packing():
        yield False, end


@dataclass(frozen=True)
class Sent:
    """An issued collective, and its buffers."""

    output: Tensor
    pairs: list[tuple[Tensor, Tensor]]
    work: Any


class Member(Protocol):
    """Owner of a number. ``beside`` returns all owners in its param group, in all agreements."""

    agreement: Agreement

    def beside(self) -> Iterable[Member]: ...


@dataclass(eq=False)
class Rehearsal:
    """The operations of a captured step, each with the operations that precede it."""

    numbers: list[int] = field(default_factory=list)
    recents: list[Recent] = field(default_factory=list)
    end: Recent = ()  # the last operations when the step ends


class Agreement:
    """The operations issued over one axis, and predictions of the next ones."""

    def __init__(self, axis: MeshAxis) -> None:
        self.over = Over(axis)
        self.names: dict[int, str] = {}
        self.tensors: dict[int, tuple[NamedShape, ...]] = {}  # keyed by operation
        self._young = [0]  # the numbers issued since the last cleanup, after the last one before it
        self.operations: dict[int, Operation] = {}
        self._predictions = Predictions()
        self.predicted = self._predictions.first  # certain predictions
        self.recent: tuple[int, ...] = (UNCERTAIN,) * CONTEXT
        self.is_silent = False
        self.broken: str | None = None
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.late: LateLook | None = None  # checks a device's stamps, one step later
        # host memory for the stamps that gathers receive, by size in bytes
        self.landed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._last_words: list[Sent] = []
        self._issued: list[tuple[Recent, int]] = []  # placeholders, with preceding operations
        self._rehearsal: Rehearsal | None = None  # of the step that is being captured

    def number(self, name: str) -> int:
        """Assign a number to a new operation. All ranks must call this in the same order."""
        if len(self._young) > RENEWED:
            self._give_back()
        taken = self.names if len(self.names) < LAST_NUMBER else ()
        number = self._young[-1] % LAST_NUMBER + 1
        while number in taken:
            number = number % LAST_NUMBER + 1
        self._young.append(number)
        self.names[number] = name
        return number

    def _give_back(self) -> None:
        """Free idle numbers. See [Note: reuse of numbers]."""
        issued = {fields_of(number)[0] for number in self._predictions.numbers}
        kept = issued.union(self._young[1:])
        self._young = self._young[-1:]
        self.names = {own: name for own, name in self.names.items() if own in kept}
        self.tensors = {own: found for own, found in self.tensors.items() if own in kept}
        known = self.operations.items()
        self.operations = {n: operation for n, operation in known if fields_of(n)[0] in kept}
        self._predictions.clear()

    def retire(self, number: int) -> None:
        """Drop an operation and its predictions: its group now uses another process group."""
        self.operations.pop(number, None)
        self.tensors.pop(fields_of(number)[0], None)
        self._predictions.forget(number)

    def look_late(self) -> LateLook:
        if self.late is None:
            self.late = LateLook()
        return self.late

    def before(self, number: int, device: torch.device = HOST) -> None:
        """Raise StateError unless every rank is about to issue this operation on ``device``."""
        recent = self.recent
        if self._rehearsal is not None:
            self._rehearsal.recents.append(recent)
            self._rehearsal.numbers.append(number)
        elif self.predicted.get(recent) != number:
            self._settle(number, device)
        self.recent = (*recent[1:], number)

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[Rehearsal]:
        """Record the operations inside the context, which are captured but not issued. Exchanges
        no numbers: ``expects`` checks later whether the operations may be issued."""
        recent, rehearsal = self.recent, Rehearsal()
        self._rehearsal, self.predicted = rehearsal, {}  # so that no operation is certain
        try:
            yield rehearsal
        finally:
            rehearsal.end = self.recent
            self._rehearsal, self.predicted = None, self._predictions.first
            self.recent = recent

    def expects(self, rehearsal: Rehearsal) -> bool:
        """Return True if the rehearsed operations may be issued next without exchanging numbers."""
        if self.is_silent or self.broken is not None:
            return self.broken is None
        if self._is_certain(rehearsal):
            return True
        coming = self._predictions.after(self.recent)
        return all(next(coming) == number for number in rehearsal.numbers)

    def _is_certain(self, rehearsal: Rehearsal) -> bool:
        """Return True if each operation is the only known successor of those before it."""
        recents = rehearsal.recents
        if not recents or recents[0] != self.recent:
            return not recents
        return list(map(self.predicted.get, recents)) == rehearsal.numbers

    def follow(self, rehearsal: Rehearsal) -> None:
        """Record operations that were issued after ``expects`` returned True."""
        if self._is_certain(rehearsal):
            self.recent = rehearsal.end if rehearsal.numbers else self.recent
            return
        for number in rehearsal.numbers:
            if self.predicted.get(self.recent) != number:
                self._predictions.learn(self.recent, number)
            self.recent = (*self.recent[1:], number)

    def _settle(self, number: int, device: torch.device) -> None:
        if self.broken is not None:
            raise StateError("FS401", self.broken)
        recent = self.recent
        if not self.is_silent and self._predictions.expect(recent) != number:
            try:
                self._ask(number, device)
            finally:
                self._issued.clear()
        self._predictions.learn(recent, number)

    def _ask(self, number: int, device: torch.device) -> None:
        """Send an operation's number to all ranks, in placeholders or in a separate collective."""
        # bounded, because an endless cycle of operations among neighbours may be predicted
        for _ in range(len(self.operations) + 1):
            predicted = self._predictions.expect(self.recent)
            expected = None if predicted is None else self.operations.get(predicted)
            if predicted is None or expected is None:
                break
            self._issued.append((self.recent, predicted))
            self.recent = (*self.recent[1:], predicted)  # issued, even if the check raises
            self._placeholder(expected, number)
            if expected.over.size == self.over.size:  # it reaches all ranks
                return
        sent = self.send_number(number, device)
        self.compare(number, [*self._wait(number, sent).tolist()], self.over.axis)

    def _placeholder(self, expected: Operation, number: int) -> None:
        """Issue the operation that other ranks are expected to issue, but stamped ``number``."""
        try:
            sent = self.send_stamp(expected, number)
        except ReferenceError as error:  # this rank deleted the group; other ranks may wait in it
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
        """Issue a placeholder: zeros and a stamp. See [Note: dealt parameters] in ``layout``."""
        axis, wire = expected.over.axis, expected.sender
        dtype, seen_as = expected.dtype, expected.seen_as
        first, *others = expected.numels
        pieces = list(expected.pieces)
        device = expected.device
        with torch_modes.hidden_from_modes(), _beside(device) as (async_op, end):
            code = torch.tensor(stamp_of(expected.kind, number), dtype=torch.float32, device=device)
            at = slice(expected.stamp, expected.stamp + len(code))
            if expected.kind == "gather" and pieces:
                own = torch.zeros(pieces[axis.rank], dtype=dtype, device=device)
                own.view(seen_as)[at] = code.to(seen_as)
                landed = torch.zeros(sum(pieces), dtype=dtype, device=device)
                pairs = [(landed, own)]
                work = wire.all_gather_uneven(landed.split(pieces), own, axis, async_op)
            elif expected.kind == "gather":
                own = torch.zeros(first, dtype=dtype, device=device)
                own.view(seen_as)[at] = code.to(seen_as)
                pairs = [wire.stage(own, axis)]
                for numel in others:
                    gathered = torch.empty(axis.size * numel, dtype=dtype, device=device)
                    pairs.append((gathered, own.new_zeros(numel)))
                work = wire.all_gather_each(pairs, axis, async_op)
            elif pieces:
                own = torch.zeros(sum(pieces), dtype=dtype, device=device)
                for piece in own.split(pieces):  # the stamp is as far from the end of each
                    start = len(piece) - (pieces[axis.rank] - expected.stamp)
                    piece[start : start + len(code)] = code.to(dtype)
                reduced = torch.empty(pieces[axis.rank], dtype=seen_as, device=device)
                pairs, op = [(reduced, own)], expected.reduction
                work = wire.reduce_scatter_uneven(reduced, own, pieces, op, axis, async_op)
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

    def compare(
        self,
        number: int,
        numbers: list[int | None],
        axis: MeshAxis,
    ) -> None:
        others = [n for rank, n in enumerate(numbers) if rank != axis.rank]
        if numbers[axis.rank] != number or all(other is None for other in others):
            self.is_silent = True
        elif any(other != number for other in numbers):
            self._break(number, numbers, axis)

    def compare_sum(self, number: int, total: list[Any], axis: MeshAxis) -> None:
        own = code_of(number)
        foreign = [value != 0 and not bit for value, bit in zip(total, own, strict=True)]
        if not all(abs(value) > 0 for value, bit in zip(total, own, strict=True) if bit):
            self.is_silent = True
        elif any(foreign):
            both = max(abs(value) for value in total)
            code = [abs(v) == both if bit else v != 0 for v, bit in zip(total, own, strict=True)]
            other = number_of(code)  # valid if only one rank or all other ranks sent it
            others: list[int | None] = [other if axis.size == 2 else None] * axis.size
            others[axis.rank] = number
            bits = zip(foreign[:STAMP_BITS], foreign[STAMP_BITS:], strict=True)
            differing = sum(any(pair) << position for position, pair in enumerate(bits))
            self._break(number, others, axis, differing, other)

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
        """Raise the error for ranks that need different operations. If ``numbers`` is incomplete,
        ``differing`` contains the bits that differ, and ``another`` is another rank's number."""
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
            did.append(f"another rank: {self.describe(another, traits)}")
        if word is not None:
            told = word >> 2 * NUMBER_BITS
            traits = [index for index in range(len(TRAIT_BITS)) if told >> index & 1]
        if traits:
            what = "; and in ".join(DIFFERENCES[index] for index in traits)
            why = f"ranks send it differently ({'; '.join(did)}). The ranks differ in {what}."
            tensors = self.tensors.get(fields_of(number)[0])
            if 0 in traits and tensors is not None:
                why += describe_tensors(tensors)
        else:
            why = f"ranks issued different collectives ({'; '.join(did)}). {SAME_ON_EVERY_RANK}"
        if word is None:
            word = last_word(number, traits)
        raise self._give_up_everywhere(
            f"{self.describe(number)}: {why} No data was corrupted, but the ranks are permanently "
            "out of sync: end this run, or create a new process group.",
            word,
        )

    def lose(self, number: int, error: Exception) -> StateError:
        """Return the error for a failed collective, after which this process group is unusable."""
        known = known_of(str(error))
        first = f"{known}. First check the output of the other ranks" if known else "it has ended"
        return self._give_up_everywhere(
            f"{self.describe(number)}: another rank did not take part: {first}. Alternatively, the "
            f"ranks diverged. {SAME_ON_EVERY_RANK} The backend reported: {error}",
            last_word(number, ()),
        )

    def _give_up_everywhere(self, why: str, word: int) -> StateError:
        """Stop communicating, and inform the ranks that wait for this one in any process group."""
        elsewhere = word >> 2 * NUMBER_BITS << 2 * NUMBER_BITS  # other agreements use other numbers
        members = [other for own in self.members for other in own.beside()]
        followers = [self.give_up(why, word)]
        followers += [member.agreement.give_up(why, elsewhere) for member in members]
        for follower in followers:
            if follower is not None:
                follower.finish()
        return StateError("FS401", why)

    def give_up(self, why: str, word: int) -> Follower | None:
        """Inform other ranks that this rank has stopped: issue the operations that they expect
        next, stamped ``word`` (see ``last_word``). Other ranks may issue several operations before
        they check a stamp and give up too. Do not wait for other ranks: they may also have failed.
        On a device, they check later; the returned follower issues operations until then."""
        if self.broken is not None or self.is_silent:
            return None
        # other ranks have recorded these operations, and base predictions on them
        for recent, issued in self._issued:
            self._predictions.learn(recent, issued)
        self.broken, predictions = why, self._predictions
        self._predictions = Predictions()
        self.predicted = self._predictions.first  # every further operation is checked, and rejected
        known, numbers = dict(self.operations), predictions.after(self.recent)
        following = (None if number is None else known.get(number) for number in numbers)
        device = next((one.device for one in known.values()), HOST)
        if device != HOST:
            return Follower(self, following, word, device)
        said: Counter[int] = Counter()  # operations issued, by number of ranks
        with contextlib.suppress(Exception):  # the error being raised is more informative
            for expected in itertools.islice(following, FOLLOWED):
                if expected is None:
                    self._last_words.append(self.send_number(word, device))
                    break
                said[expected.over.size] += 1
                if said[expected.over.size] <= LAST_WORDS:
                    self._last_words.append(self.send_stamp(expected, word))
                if said[self.over.size] == LAST_WORDS:
                    break
        return None


def numbers_in(output: Tensor, expected: Operation) -> list[int | None]:
    start, end = expected.stamp, expected.stamp + GATHER_STAMP_NUMEL
    sent, seen = expected.dtype.itemsize, expected.seen_as.itemsize
    pieces = [numel * sent // seen for numel in expected.pieces]
    rows = output.split(pieces) if pieces else output.chunk(expected.over.size)
    return [number_of_digits(row[start:end].tolist()) for row in rows]


@dataclass(eq=False)
class Follower:
    """Issues, without data, the operations that other ranks expect on a device's process group.
    Runs in its own thread: a wait in one process group must not block operations in another."""

    agreement: Agreement
    following: Iterator[Operation | None]
    word: int
    device: torch.device

    def __post_init__(self) -> None:
        # a new thread would use device 0 and create a context there
        self._index = torch.accelerator.current_device_index()
        self._answered = time.monotonic()  # time of the last completed operation
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until other ranks are informed, or have not responded for ``FOLLOWED_S`` seconds."""
        while self._thread.is_alive() and time.monotonic() - self._answered < FOLLOWED_S:
            self._thread.join(0.01)

    def _run(self) -> None:
        send, word = self.agreement, self.word
        with contextlib.suppress(Exception):  # the error being raised is more informative
            torch.accelerator.set_device_index(self._index)
            for operation in itertools.islice(self.following, FOLLOWED):
                if operation is None:
                    self._wait(send.send_number(word, self.device))
                    return
                sent = send.send_stamp(operation, word)
                if not self._wait(sent) or not self._somebody_goes_on(operation, sent.output):
                    return

    def _wait(self, sent: Sent) -> bool:
        while not sent.work.is_completed():
            if time.monotonic() - self._answered > FOLLOWED_S:
                _unanswered.append(sent)  # the backend may still read its memory
                return False
            time.sleep(0.001)
        self._answered = time.monotonic()
        sent.work.wait()
        return True

    def _somebody_goes_on(self, operation: Operation, output: Tensor) -> bool:
        if operation.over.size < self.agreement.over.size:  # other ranks may continue
            return True
        if operation.kind != "gather":  # a rank that gave up sends zeros in these bits
            return any(output[operation.stamp :][:NUMBER_BITS].tolist())
        axis = operation.over.axis
        numbers = numbers_in(output, operation)
        others = [n for rank, n in enumerate(numbers) if rank != axis.rank]
        return any(n is not None and fields_of(n)[0] != GAVE_UP for n in others)


_unanswered: list[Sent] = []
_agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(axis: MeshAxis) -> Agreement:
    """Return the agreement for an axis, shared by all groups that use its process group."""
    whole = axis.whole or axis
    if whole.pg is None:
        return Agreement(whole)
    if whole.pg not in _agreements:
        _agreements[whole.pg] = Agreement(whole)
    return _agreements[whole.pg]
