"""Each scenario on the simulated device: nothing unordered, no wait, the host's values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.pool import RunOnRanks, make_request
from tests.kit.sim import NoCompilerError
from tests.kit.sim._build import build
from tests.sim import fault_scenarios, scenarios  # noqa: F401  # they fill the list
from tests.sim._world import SCENARIOS, problems, run_scenario


@pytest.fixture(scope="session")
def simulator() -> None:
    """Compile the simulator before ranks ask for it, or say why that is impossible here."""
    try:
        build()
    except NoCompilerError as reason:
        pytest.skip(f"no simulator: {reason}")


def on_a_rank(name: str) -> None:
    report = run_scenario(name)
    told = problems(report)
    assert not told, told
    assert report.operations > 0


on_a_rank.body = on_a_rank  # type: ignore[attr-defined]  # what a rank looks for


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if SCENARIOS[name].slow else name


@pytest.mark.parametrize("name", [marked(name) for name in SCENARIOS])
@pytest.mark.usefixtures("simulator")
def test_scenario(name: str, run_on_ranks: RunOnRanks, request: pytest.FixtureRequest) -> None:
    size = SCENARIOS[name].ranks
    run_on_ranks(
        make_request(
            on_a_rank, request.node.nodeid, size, {"name": name}, device="sim", shares_world=True
        )
    )
