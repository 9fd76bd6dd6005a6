"""What a way is, and the table that all of them are entered in.

It must not know what any of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """``on``: the ranks that the message comes on; ``alone``: it needs no ranks."""

    code: str
    words: tuple[str, ...]
    program: Callable[[bool], object]
    on: tuple[int, ...]
    alone: bool


WAYS: dict[str, Way] = {}


def way(
    code: str,
    *words: str,
    name: str = "",
    on: tuple[int, ...] = (0, 1),
    alone: bool = False,
) -> Callable[[Callable[[bool], object]], Any]:
    """Register a program that ends in ``code``, with each of ``words`` in the message.

    It is run on two ranks, and ``on`` these it gets the message; with ``alone``, in one process
    without any.
    """

    def register(program: Callable[[bool], object]) -> Callable[[bool], object]:
        key = f"{code} {name}".strip()
        assert key not in WAYS, key
        WAYS[key] = Way(code, words, program, on, alone)
        return program

    return register
