"""How a stage reports to the driver: rows are written at once; a failed question is a row."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.gpu._driver import FAILED, LATE, OK, ROWS, SECONDS, SKIPPED, VERDICTS

_LAST_S = 3.0  # to end in


class Skipped(Exception):  # noqa: N818  # no error
    """A question that this machine or this torch cannot be asked."""


class Rows:
    """The rows of one stage. Without a driver they are printed."""

    def __init__(self) -> None:
        self._path = os.environ.get(ROWS)
        self._ends = time.monotonic() + float(os.environ.get(SECONDS, "600")) - _LAST_S
        self._verdicts: list[str] = []

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def add(self, table: str, **values: Any) -> None:
        self._say({"table": table, **values})
        self._verdicts.append(values.get("verdict", OK))

    def headline(self, text: str) -> None:
        self._say({"headline": text})

    def ask(self, table: str, what: str, work: Callable[[], Any], needs: float = 2.0) -> Any:
        """Run one question; None if it failed, was skipped, or has no time (``needs`` seconds).

        ``work`` returns the values of its row, a list of such, or None.
        """
        if self.seconds_left < needs:
            self.add(table, what=what, verdict=LATE, why="no time is left")
            return None
        began = time.monotonic()
        try:
            found = work()
        except Skipped as reason:
            self.add(table, what=what, verdict=SKIPPED, why=str(reason))
            return None
        except Exception as error:  # each is a row, and the next question is asked
            traceback.print_exc()
            self.add(table, what=what, verdict=FAILED, why=f"{type(error).__name__}: {error}")
            return None
        seconds = round(time.monotonic() - began, 2)
        for values in found if isinstance(found, list) else [found or {}]:
            self.add(table, **{"what": what, "verdict": OK, "seconds": seconds, **values})
        return found

    def end(self, headline: str = "") -> None:
        """End the stage with the status that its rows have earned."""
        counts = [f"{self._verdicts.count(one)} {one}" for one in (OK, FAILED, LATE, SKIPPED)]
        said = ", ".join(text for text in counts if not text.startswith("0 "))
        self.headline("; ".join(part for part in (headline, said) if part))
        worst = FAILED if FAILED in self._verdicts else LATE if LATE in self._verdicts else OK
        sys.exit(next(status for status, verdict in VERDICTS.items() if verdict == worst))

    def _say(self, row: dict[str, Any]) -> None:
        if self._path is None:
            print(row, flush=True)
            return
        with open(self._path, "a") as file:  # one write a line: ranks may share the file
            file.write(json.dumps(row) + "\n")
