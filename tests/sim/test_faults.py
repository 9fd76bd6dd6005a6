"""Promise: each planted fault can be planted, and the simulator reports it as it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests._mutants import plant
from tests._sim import NoCompilerError
from tests._sim._build import build
from tests.sim import fault_scenarios, scenarios  # noqa: F401  # they fill the list
from tests.sim._faults import FAULTS, KINDS, SimFault
from tests.sim._world import SCENARIOS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_stands_once_is_python_and_has_a_scenario(fault: SimFault) -> None:
    source = (ROOT / fault.file).read_text()
    compile(plant(fault, source), fault.file, "exec")
    assert fault.scenario in SCENARIOS
    assert fault.expected in KINDS


def test_every_kind_is_expected_of_some_fault() -> None:
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
