"""Faults that the simulator must find: changes of the package's order of streams, mostly.

`tests/sim/faults.txt` has them for `scripts/sim --faults`, beside `tests/lab/faults.txt`, whose
faults the other tests find on a CPU. `tests.lab.plant` finds their places. What finds a fault is a
kind of report in a scenario: RACE and REUSE are about what waits for what; HOST about pinned memory
that both sides use; WAIT is a wait of the host in a steady step; VALUE a difference from the host's
values; ERROR an exception. No fault leads to GRAPH, a replay that uses freed memory, because a
captured step holds its tensors; `test_captures.py` shows that the simulator reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.lab.faults import Fault, read

KINDS = ("RACE", "REUSE", "HOST", "WAIT", "VALUE", "ERROR")


@dataclass(frozen=True)
class SimFault(Fault):
    """A change, the scenario that must find it, and what is reported then."""

    near: tuple[str, ...] = ()
    scenario: str = ""
    expected: str = ""


def _fault(*fields: str) -> SimFault:
    *said, found = fields
    expected, scenario = found.split(" in ")
    return SimFault(*said, scenario=scenario, expected=expected)


FAULTS: list[SimFault] = read(Path(__file__).with_name("faults.txt"), _fault)
