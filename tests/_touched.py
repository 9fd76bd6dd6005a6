"""Which tests a change touches: those of files that it changes, and those that enter its functions.

`tests/entered.json` says which tests enter a function of the package, for functions that few tests
enter: one that all enter says nothing about which of them to run first. `scripts/choose` writes it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests._suite import function_of

ENTERED = Path(__file__).with_name("entered.json")
HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")


def touched_tests(tests: Iterable[str], root: Path, since: str) -> set[str]:
    """Return those tests that the commits after ``since`` touch."""
    changed = changed_lines(_diff(root, since))
    functions = {
        f"{path.removeprefix('fsdp2/')}::{name}"
        for path, lines in changed.items()
        if path.startswith("fsdp2/") and path.endswith(".py") and (root / path).exists()
        for name in functions_at((root / path).read_text(), lines)
    }
    known = json.loads(ENTERED.read_text())
    entered: dict[str, list[int]] = known["entered"]
    enter = {known["tests"][n] for function in functions for n in entered.get(function, ())}
    return {t for t in tests if t.partition("::")[0] in changed or function_of(t) in enter}


def _diff(root: Path, since: str) -> str:
    command = ["git", "diff", "--unified=0", "--no-renames", since, "HEAD"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def changed_lines(diff: str) -> dict[str, set[int]]:
    """Return the lines of each file's new text that a diff changes, and where it takes lines away.

    A file that is gone has none.
    """
    changed: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
            lines = set() if path == "/dev/null" else changed.setdefault(path, set())
        elif match := HUNK.match(line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.update(range(first, first + max(count, 1)))
    return changed


def functions_at(source: str, lines: set[int]) -> set[str]:
    """Return the qualified names of the functions that have one of these lines."""
    return {
        name
        for name, first, last in qualified_names(ast.parse(source))
        if not lines.isdisjoint(range(first, last + 1))
    }


def qualified_names(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield each function: its qualified name, and its first line (of a decorator) and last one."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, f"{name}.")
                else:
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    yield name, first, child.end_lineno or first
                    yield from walk(child, f"{name}.<locals>.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")
