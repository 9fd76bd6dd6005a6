"""Which errors of the package a program may end in: what it cannot do right, and says so.

A program has a right answer all the same, so it may as well go on.
"""

from __future__ import annotations

from tests.fuzz._program import Program

UNREDUCED = ("FS321",)  # a root hides its output, so nobody reduces its gradients


def refusals(program: Program) -> set[str]:
    """Return the codes of errors that may end a program."""
    found: set[str] = set()
    model = program.model
    if model.hides != "no":
        found.update(UNREDUCED)
    return found
