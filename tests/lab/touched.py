"""Which tests a change touches: those of files that it changes, and those that enter its functions.

`tests/lab/entered.json` says which tests enter a function of the package, for functions that few
tests enter: one that all enter says nothing about which of them to run first. `scripts/choose`
writes it. `python -m tests.lab.touched fsdp2/_core/engine/step.py` lists the tests of a file.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.lab.suite import function_of

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


def tests_of(path: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the functions of a file with the tests that enter each, and those that most enter."""
    known = json.loads(ENTERED.read_text())
    file = path.removeprefix("fsdp2/")
    few = {
        name.partition("::")[2]: [known["tests"][number] for number in numbers]
        for name, numbers in known["entered"].items()
        if name.partition("::")[0] == file
    }
    source = (Path(__file__).parents[2] / "fsdp2" / file).read_text()
    names = [name for name, _, _ in qualified_names(ast.parse(source))]
    return few, [name for name in names if name not in few]


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


def main(paths: Sequence[str]) -> int:
    for path in paths:
        few, others = tests_of(path)
        for test in sorted({test for tests in few.values() for test in tests}):
            print(test)
        print(f"{path}: many tests, or none, enter {', '.join(others) or 'no function'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
