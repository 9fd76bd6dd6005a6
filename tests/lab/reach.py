"""Which functions of the package each test enters: `pytest --reach FILE`, for `scripts/mutants`.

A trace hook notes the code objects that run, in pytest's process and in the ranks. Functions that
a compiler traces, and those of programs that a test starts itself, are not seen.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

PACKAGE = "fsdp2"


class Entered:
    """A context that notes the package's functions that run inside it."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    def __enter__(self) -> Entered:
        add = self._codes.add

        def note(frame: FrameType, event: str, argument: Any) -> None:
            add(frame.f_code)  # only calls come here: nothing is returned that would trace lines

        threading.settrace(note)
        sys.settrace(note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as documented

    def functions(self) -> set[str]:
        """Return each function as `path in the package:its first line, decorators included`."""
        package = _folder_of_package()
        return {
            f"{Path(code.co_filename).relative_to(package)}:{code.co_firstlineno}"
            for code in self._codes
            if code.co_filename.startswith(f"{package}/")
        }


@functools.cache
def _folder_of_package() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


class Reach:
    """The plugin: notes what pytest's process and the ranks enter, and writes it in the end."""

    option = "reach"

    def __init__(self, config: pytest.Config) -> None:
        self._path = Path(config.getoption("reach"))
        self._entered: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()  # they could not tell a fault from none

    def add_body(self, test: str, outcome: Any) -> None:
        for reply in outcome.replies:
            self._entered[test] |= reply.entered

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with Entered() as entered:
            result = yield
        self._entered[item.nodeid] |= entered.functions()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        tests = {
            test: {"seconds": round(self._seconds[test], 3), "entered": sorted(functions)}
            for test, functions in self._entered.items()
            if test not in self._failed
        }
        self._path.write_text(json.dumps(tests))
