"""Programs on ranks that are threads of one process, as in torch's multi-threaded test harness.

`scripts/fuzz --threads`. One process runs all ranks, so a lock that is held across a collective, or
state that is shared by accident, shows as a hang or as a wrong number. Some programs are left out
(`LACKING`): ranks that part ways on purpose (`Diverge`), because the harness's collectives have no
time-out; a full state on one rank, because its groups neither send nor receive; and tensor
parallelism, because from a process's second world on, torch 2.13's own `DTensor.full_tensor` of
uneven shards on a 2-D mesh gathers wrong shapes there.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Sequence
from typing import ClassVar

import pytest
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from fsdp2._core.api import collect
from tests.fuzz._body import AT, run
from tests.fuzz._program import Diverge, Program, State
from tests.fuzz._search import Found, Ranks, Verdict, place_of_failure, signature_of, verdicts
from tests.kit.meshes import forget_meshes
from tests.kit.rank import Request

LACKING = "the harness lacks an operation"


class Threads(Ranks):
    """Runs programs in one process, which is replaced if they hang or fail."""

    def _run_some(self, programs: Sequence[Program]) -> list[Verdict]:
        outcome = self._pool.run(
            Request(
                name="fuzz",
                module=__name__,
                qualname="run_on_threads",
                kwargs={"programs": tuple(programs)},
                world_size=1,
                limit_s=self._limit_s,
                with_process_group=False,
                shares_world=False,
                device="cpu",
            )
        )
        if outcome.kind == "skipped":
            return verdicts(programs, json.loads(outcome.replies[0].text))
        index, _ = place_of_failure(outcome.text)
        found = Found(signature_of(outcome.text), programs[index], outcome.text)
        return [*[Verdict()] * index, Verdict(found)]


class _Case(MultiThreadedTestCase):
    """One program on its ranks; ``told`` has what came of it by rank. The harness makes an object
    for each thread from a name alone, so the program is an attribute of the class."""

    __test__ = False

    def __init__(self, name: str = "program", program: Program | None = None) -> None:
        type(self).running = program or type(self).running
        super().__init__(name)

    running: Program
    told: ClassVar[dict[int, str]] = {}

    @property
    def world_size(self) -> int:
        return self.running.setup.ranks

    def setUp(self) -> None:
        super().setUp()
        type(self).told = {}
        self._spawn_threads()

    def program(self) -> None:
        self.told[self.rank] = run(self.running)


def run_on_threads(programs: Sequence[Program]) -> None:
    """Be the body of the one process. What came of the programs is told as by `run_programs`."""
    told = []
    for index, program in enumerate(programs):
        print(f"{AT} {index}", flush=True)
        told.append(run_on_threads_here(program))
    by_rank = [list(texts) for texts in zip(*told, strict=True)]
    raise pytest.skip.Exception(json.dumps(by_rank)) from None


def run_on_threads_here(program: Program) -> list[str]:
    """Run a program on threads of this process; return what came of it, by rank."""
    ops = program.ops
    lacks = any(isinstance(o, Diverge) or (isinstance(o, State) and o.how == "full") for o in ops)
    if lacks or program.setup.tensor > 1:
        return [LACKING] * program.setup.ranks
    usual, collect.PART_NBYTES = collect.PART_NBYTES, program.setup.part_nbytes  # for all threads
    result = unittest.TestResult()
    try:
        _Case(program=program).run(result)
    finally:
        collect.PART_NBYTES = usual
        forget_meshes()
    for _, report in result.errors + result.failures:
        raise AssertionError(report)
    return [_Case.told[rank] for rank in range(program.setup.ranks)]


run_on_threads.body = run_on_threads  # type: ignore[attr-defined]  # where a rank looks for it
