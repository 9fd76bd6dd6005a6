"""Promise: each fault of `scripts/mutants` can be planted in the package as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._faults import FAULTS, Fault
from tests._mutants import plant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_stands_once_and_is_python(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    compile(plant(fault, source), fault.file, "exec")
