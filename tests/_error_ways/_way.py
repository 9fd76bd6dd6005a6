"""What a way is, and the table that all of them are entered in.

It must not know what any of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    code: str
    words: tuple[str, ...]
    program: Callable[[bool], object]


WAYS: dict[str, Way] = {}


def way(code: str, *words: str, name: str = "") -> Callable[[Callable[[bool], object]], Any]:
    """Register a program that ends in ``code``, with each of ``words`` in the message."""

    def register(program: Callable[[bool], object]) -> Callable[[bool], object]:
        key = f"{code} {name}".strip()
        assert key not in WAYS, key
        WAYS[key] = Way(code, words, program)
        return program

    return register
