"""Promise: whatever models and programs are drawn, they train as the unsharded model does.

A fixed slice of `scripts/fuzz`, which draws others, and shrinks what fails. A failure here prints
the program: give it to `scripts/fuzz --program -`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests._pool import ranks
from tests._slow import with_slow
from tests.fuzz._body import FuzzError, run
from tests.fuzz._program import Backward, Block, Model, Program, Setup, Update, parse
from tests.fuzz._search import draw


def run_slice(seed: int, count: int, rank: int, world_size: int) -> None:
    """Run programs that rank 0 draws: what Hypothesis draws may depend on what is imported."""
    drawn: list[Any] = [draw(world_size, seed, count) if rank == 0 else None]
    dist.broadcast_object_list(drawn)
    for program in drawn[0]:
        if program.leaves_world:
            continue
        try:
            run(program)
        except FuzzError as error:
            raise AssertionError(f"{error}\n{program}") from error


@pytest.mark.parametrize("seed", with_slow(range(5), default=[0]))
@ranks(2, 3, limit_s=120)
def test_a_fixed_slice(seed: int, rank: int, world_size: int) -> None:
    run_slice(seed, {0: 10, 1: 60}.get(seed, 100), rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", with_slow(range(4)))
@ranks(4, limit_s=180)
def test_a_fixed_slice_on_four_ranks(seed: int, rank: int, world_size: int) -> None:
    run_slice(seed, 60 if seed == 0 else 100, rank, world_size)


def test_a_program_prints_as_the_python_that_makes_it() -> None:
    program = Program(
        ops=(Backward(sync="no"), Backward(), Update("zeros")),
        model=Model(blocks=(Block("mlp"), Block(unit="none", inner=(Block("few"),)))),
        setup=Setup(ranks=4, replicas=2),
    )
    assert parse(str(program)) == program
    assert "width" not in str(program)
    assert all(parse(str(drawn)) == drawn for drawn in draw(3, 0, 30))
