"""The default suite is chosen by what it finds for its seconds, and keeps its budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.choose import LONGEST_S, Measured, choose, entered_by_few, lines_of
from tests.lab.suite import Chosen

A, B, C = (f"tests/test_{name}.py::test_{name}" for name in "abc")


def measured(**of: tuple[float, str]) -> Measured:
    """Tests by letter, or letter and variant: seconds, and the letters of what they enter."""
    names = {
        key: f"tests/test_{key[0]}.py::test_{key[0]}" + (f"[{key[1:]}]" if key[1:] else "")
        for key in of
    }
    return Measured(
        {names[key]: seconds for key, (seconds, _) in of.items()},
        {},
        {names[key]: frozenset(entered) for key, (_, entered) in of.items()},
    )


def test_one_variant_keeps_a_promise() -> None:
    """The second variant adds nothing, and the third enters something more."""
    rows = measured(a1=(1.0, "xy"), a2=(0.5, "xy"), a3=(1.0, "xyz"), b=(3.0, "x"))
    assert choose(rows, (), 100.0) == [f"{A}[2]", f"{A}[3]", B]


def test_the_budget_is_kept_and_what_is_worth_most_goes_first() -> None:
    rows = measured(a=(3.0, "x"), b=(3.0, "xyz"), c=(1.0, "x"))
    assert choose(rows, (), 4.5) == [B, C]
    assert choose(rows, (), 1.5) == [C]


def test_a_function_of_free_variants_is_whole() -> None:
    """So that a variant to come is in the suite, too."""
    variants = {f"a{n}": (0.001, "x") for n in range(9)}
    rows = measured(**variants, a9=(0.1, "x"))
    assert lines_of(rows, choose(rows, (), 1.0)) == [f"  0.11 {A}"]


def test_a_test_that_found_a_fault_is_in_it() -> None:
    rows = measured(a=(3.0, "x"), b=(1.0, "xyz"))
    assert choose(rows, [A, "tests/test_gone.py::test_gone"], 3.5) == [A]
    with pytest.raises(ValueError, match=r"take 3 of 2 s"):
        choose(rows, [A], 2.0)


def test_a_test_that_takes_too_long_is_for_the_pool() -> None:
    assert choose(measured(a=(LONGEST_S + 1, "xyz"), b=(0.001, "")), (), 100.0) == [B]


def test_waiting_in_pytests_own_process_counts() -> None:
    """A program that a test starts and waits for holds up all others."""
    rows = Measured({A: 0.1, B: 1.0}, {A: 30.0}, {A: frozenset(), B: frozenset()})
    assert choose(rows, (), 100.0) == [B]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    rows = measured(a1=(1.0, "x"), a2=(0.25, "x"), b=(0.5, "x"), c1=(1.0, "y"), c2=(1.0, "z"))
    lines = lines_of(rows, [f"{A}[2]", B, f"{C}[1]", f"{C}[2]"])
    assert lines == [f"  0.25 {A}[2]", f"  0.50 {B}", f"  2.00 {C}"]
    path = tmp_path / "default.txt"
    path.write_text("\n".join(["# a comment", *lines]))
    assert Chosen.read(path).seconds == {f"{A}[2]": 0.25, B: 0.5, C: 2.0}


def test_functions_that_few_tests_enter() -> None:
    rows = measured(a1=(1.0, "xy"), a2=(1.0, "x"), b=(1.0, "x"))
    assert json.loads(entered_by_few(rows)) == {"tests": [A, B], "entered": {"x": [0, 1], "y": [0]}}
