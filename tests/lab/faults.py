"""Faults that the tests must find: small changes of the package, each of which breaks something.

`tests/lab/faults.txt` has those of `scripts/mutants`. `tests.lab.plant` finds the place of a fault:
a function by its name, and Python inside it, whatever the file, the layout and the local names. A
change of that code mends its fault; a fault of code that is gone makes room for one of what
replaced it.

A fault is a paragraph: its name, its place (a file, and the function or class by its qualified
name; without one it is the whole module), what finds it, what it breaks, and lines of Python to
take away (-) and to put there (+).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One change of one function or class."""

    name: str
    file: str  # a hint: looked at first, and the whole package if the function is not there
    where: str  # the function or class by its qualified name; "" is the whole module
    old: str  # Python that stands once inside it; `tests.lab.plant` has the rules
    new: str  # what takes its place; nothing, if that is all
    breaks: str  # what a user would see
    near: tuple[str, ...]  # files of tests that are about it; they are tried first


def read(path: Path, made: Callable[..., Any]) -> list[Any]:
    """Return what ``made`` makes of the fields of each fault in a text, and of what finds it."""
    faults = []
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    for paragraph in text.strip().split("\n\n"):
        name, place, found, *lines = paragraph.replace("\n    ", "\n").split("\n")
        file, _, where = place.partition(" ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        breaks = " ".join(line for line in lines if line[0] not in "-+")
        faults.append(made(name, file, where, old, new, breaks, found))
    return faults


def _fault(*fields: str) -> Fault:
    *said, near = fields
    return Fault(*said, near=tuple(near.split()))


FAULTS: list[Fault] = read(Path(__file__).with_name("faults.txt"), _fault)
