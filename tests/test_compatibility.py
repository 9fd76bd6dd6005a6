"""`docs/compatibility.md` names a test in every row, and the test exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    """Return the rows of every table, without heads and rules."""
    found = []
    lines = PAGE.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        following = lines[lines.index(line) + 1] if line in lines[:-1] else ""
        is_head = following.startswith("|--") or line.startswith("|--")
        if line.startswith("|") and before.startswith("|") and not is_head:
            found.append(line)
    return found


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_row_names_tests_that_exist(row: str) -> None:
    """A promise without a test is a wish."""
    named = TEST.findall(row)
    assert named, "no test"
    for path, function in named:
        assert (ROOT / path).exists(), path
        assert function in functions(path), f"{path}::{function}"


def test_the_page_has_rows() -> None:
    """The parser reads the page as it is written."""
    assert len(rows()) > 60
