"""Promise: the simulator reports each planted fault as it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.sim import NoCompilerError
from tests.kit.sim._build import build
from tests.sim import fault_scenarios, scenarios  # noqa: F401  # they fill the list
from tests.sim._faults import FAULTS, KINDS
from tests.sim._world import SCENARIOS

ROOT = Path(__file__).parents[2]


def test_every_fault_has_a_scenario_and_every_kind_a_fault() -> None:
    assert {fault.scenario for fault in FAULTS} <= set(SCENARIOS)
    assert {fault.expected for fault in FAULTS} == set(KINDS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
def test_the_simulator_finds_every_fault() -> None:
    try:
        build()
    except NoCompilerError as reason:
        pytest.skip(f"no simulator: {reason}")
    command = [sys.executable, "-m", "tests.sim", "--faults"]  # ranks are not born with the package
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
