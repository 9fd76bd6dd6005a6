"""Promise: whatever models and programs are drawn, they train as the unsharded model does.

A fixed slice of `scripts/fuzz`, which draws others, and shrinks what fails. A failure here prints
the program: give it to `scripts/fuzz --program -`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import fsdp2
from tests.fuzz import _body
from tests.fuzz._body import AT, MARK, OTHER_RANK, FuzzError, run
from tests.fuzz._ops import PERFORM
from tests.fuzz._program import (
    Backward,
    Block,
    Call,
    Diverge,
    Evaluate,
    Model,
    NewOptimizer,
    Program,
    Reshard,
    Setup,
    Update,
    Zero,
    parse,
)
from tests.fuzz._search import draw, draw_one, place_of_failure, verdicts
from tests.kit.pool import ranks
from tests.kit.slow import with_slow


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
@pytest.mark.parametrize("seed", with_slow(range(12)))
@ranks(4, limit_s=120)
def test_a_fixed_slice_on_four_ranks(seed: int, rank: int, world_size: int) -> None:
    run_slice(seed, 30, rank, world_size)  # three such tests share two cores, and CI has slow hours


@ranks(2, limit_s=60)
def test_ranks_that_are_out_of_step_end_alike_where_what_comes_next_has_changed(rank: int) -> None:
    """A rank raises alone. What followed at that place differed before, so all have learned it."""
    skips = Call(ways=((0, 1, "skip"),))
    program = Program(
        ops=(
            Backward(
                calls=(Call(rows=1), skips, Call(rows=3)),
                between=(NewOptimizer(), Reshard(layer=2)),
            ),
            Evaluate(call=Call(ways=((-1, 2, "updates_alias"),), empty=1)),
            Backward(),
            Diverge(rank=1, layer=1, way="fail"),
        ),
        model=Model(blocks=(Block(hidden=2), Block(unit="none", hidden=7), Block()), width=8),
        setup=Setup(reshard=True, optimizer="fused"),
    )
    run(program)


def test_a_program_prints_as_the_python_that_makes_it() -> None:
    program = Program(
        ops=(Backward(sync="no"), Backward(), Update("zeros")),
        model=Model(blocks=(Block("mlp"), Block(unit="none", inner=(Block("few"),)))),
        setup=Setup(ranks=4, replicas=2),
    )
    assert parse(str(program)) == program
    assert "width" not in str(program)
    assert all(parse(str(drawn)) == drawn for drawn in draw(3, 0, 30))


def test_each_program_has_a_seed_of_its_own() -> None:
    drawn = draw(2, 7, 30)
    assert len(set(drawn)) > 25
    assert drawn[17] == draw_one(2, "7:17")
    pinned = (("precision", "half"), ("replicas", 2))
    setups = [draw_one(4, f"7:{index}", pinned).setup for index in range(10)]
    assert all(setup.precision == "half" and setup.replicas == 2 for setup in setups)
    assert all(setup.reshard in (None, True, False, 1, 2) for setup in setups)


def test_what_ranks_tell_of_programs() -> None:
    programs = draw(2, 0, 4)
    wrong = f"{MARK} | Update: parameter differs | op 3"
    told = [["", "FS302", wrong, "FS302"], ["", "FS302", OTHER_RANK, OTHER_RANK]]
    right, refused, found, by_one_rank = verdicts(programs, told)
    assert right.found is None
    assert refused == (None, "FS302")
    assert found.found is not None
    assert found.found.signature == "Update: parameter differs"
    assert found.found.program is programs[2]
    assert by_one_rank.found is not None
    assert place_of_failure(f'Error: {AT} 2 ["", "FS302"]\n{wrong}') == (2, ["", "FS302"])
    assert place_of_failure(f"{AT} 0\n{AT} 1\nFatal Python error") == (1, [])


@pytest.mark.parametrize("refusing", [2, 1])
@ranks(2)
def test_a_program_may_end_in_a_declared_error(refusing: int, rank: int) -> None:
    def refuse(*_: Any) -> None:
        if rank < refusing:
            raise fsdp2.StateError("FS302", "on purpose")

    program = Program(ops=(Backward(), Zero(), Backward()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PERFORM, Zero, refuse)
        patch.setattr(_body, "refusals", lambda program: {"FS302"})
        if refusing == 2:
            assert run(program) == "FS302"
        else:
            with pytest.raises(FuzzError, match="only some ranks refuse" if rank == 0 else "^$"):
                run(program)
