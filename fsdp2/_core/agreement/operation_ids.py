"""What a collective carries to say which operation it belongs to: numbers, and their encodings.

Owns the bits of a number, what ranks must agree on beside it (``Signature``), and how both travel
in elements of any dtype. It must not know process groups, or what follows if numbers differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
