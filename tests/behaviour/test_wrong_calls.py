"""Promise: a wrong argument of anything public is an error of ours, and the call changes nothing.

The calls are made from the signatures (`tests.kit.calls`): every argument in turn is what it should
not be, the others are right. Some of what is tried is right after all: such calls do their work.
"""

from __future__ import annotations

import traceback
import warnings

import pytest

import fsdp2
from tests.kit.calls import FAMILIES, WRONG, World, some_calls, wrong_calls
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

SHOWN = 40


def test_there_are_enough() -> None:
    """Every family of names is there, and so many calls."""
    assert set(FAMILIES) >= {"FSDPModule", "checkpoint", "debug", "functions", "optim", "wrap"}
    assert len(wrong_calls()) >= 6000
    called = {wrong.callee.name for wrong in some_calls()}
    assert called == {wrong.callee.name for wrong in wrong_calls()}
    assert len(some_calls()) >= 1200


@pytest.mark.parametrize("values", with_slow(["some", "all"], ["some"]))
@pytest.mark.parametrize("family", FAMILIES)
@ranks(2, limit_s=120)
def test_wrong_calls(family: str, values: str, rank: int) -> None:
    """No raw exception; after an error model, optimizer, averages and files are as before."""
    world = World(rank, reads_files=family == "checkpoint")
    calls = wrong_calls(family, WRONG) if values == "all" else some_calls(family)
    problems: list[str] = []
    warnings.simplefilter("ignore")
    for wrong in calls:
        refusal: Exception | None = None
        try:
            world.call(wrong)
        except fsdp2.FSDPError as error:
            refusal = error
        except TimeoutError:
            continue  # documented: a wait of `weights.Files` or of a handle
        except Exception as error:
            if "Error(s) in loading state_dict" in str(error):
                continue  # torch's own, of missing names: programs know it
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            problems.append(f"{wrong}: {type(error).__name__} at {where}: {str(error)[:120]}")
        now = world.look()
        if now != world.seen:
            if refusal is not None:
                changed = [key for key in now if now[key] != world.seen.get(key)]
                problems.append(f"{wrong}: changed {changed}, and raised {refusal}")
            world.build()
    world.close()
    text = "\n".join(problems[:SHOWN])
    assert not problems, f"{len(problems)} of {len(calls)} calls\n{text}"
