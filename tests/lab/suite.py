"""Which tests a run takes: `--suite`, and the list of the default suite in `tests/default.txt`.

Time is a budget that the default suite keeps by itself. A test is in it only if `default.txt` names
it, and `scripts/choose` writes that file: what finds most for its seconds, until the budget is
spent. Every other test is in the pool, from which `.ci/run` draws for as long as its clock allows
(`tests.lab.draw`). So a new test costs the default suite nothing until somebody chooses it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[1] / "default.txt"
LINE = re.compile(r"\s*(\d+\.\d+) (.+)")

SUITES = {
    "default": "the tests that tests/default.txt names",
    "pool": "all other tests",
    "short": "all tests but the slow ones and those that need libraries of clients",
    "all": "every test",
}


def function_of(nodeid: str) -> str:
    """Return a test's name without the values of its parameters."""
    return nodeid.partition("[")[0]


@dataclass(frozen=True)
class Chosen:
    """The default suite: CPU seconds by test, or by function where all its variants are in it."""

    seconds: Mapping[str, float]

    @classmethod
    def read(cls, path: Path = DEFAULT) -> Chosen:
        """Read lines of seconds and a name; a line that begins with ``#`` is a comment."""
        found = {}
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                match = LINE.fullmatch(line)
                assert match, f"{path.name}: not seconds and a test: {line!r}"
                found[match[2]] = float(match[1])
        return cls(found)

    @property
    def functions(self) -> set[str]:
        return {function_of(name) for name in self.seconds}

    def among(self, items: Iterable[pytest.Item]) -> set[str]:
        """Return the names of those that are in the suite.

        Another version of torch may know other values of a parameter. If it has none of those that
        are named for a function, its first variant that is not slow stands in for them.
        """
        variants: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            variants[function_of(item.nodeid)].append(item)
        taken: set[str] = set()
        for function in self.functions & variants.keys():
            quick = [i.nodeid for i in variants[function] if not i.get_closest_marker("slow")]
            is_whole = function in self.seconds
            named = [name for name in quick if is_whole or name in self.seconds]
            taken.update(named or quick[:1])
        return taken


class Suite:
    """The plugin: leaves out the tests that are not of the suite that was asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.name = config.getoption("suite") or _meant(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.name == "all":
            return
        if self.name == "short":
            taken = {
                item.nodeid
                for item in items
                if not any(item.get_closest_marker(name) for name in ("slow", "ecosystem"))
            }
        else:
            taken = Chosen.read().among(items)
            if self.name == "pool":
                taken = {item.nodeid for item in items} - taken
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in taken])
        items[:] = [item for item in items if item.nodeid in taken]

    def pytest_report_header(self) -> str:
        return f"suite: {self.name} ({SUITES[self.name]}); --suite chooses another"


def _meant(config: pytest.Config) -> str:
    """Return the suite of a run that names none: who names tests wants more than the default."""
    if config.option.markexpr:
        return "all"
    names_tests = config.args_source == config.ArgsSource.ARGS or config.option.keyword
    return "short" if names_tests else "default"
