"""A recording: events of streams tell times, no host waits for one, and nothing else changes."""

from __future__ import annotations

import tempfile
from collections import Counter

import fsdp2
from fsdp2._tools.record.rows import read_file
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import training


@scenario(2)
def recorded(world: World) -> Values:
    """The simulator has no times, but it tells whether anybody waits for one."""
    run = training(world, steps=6)
    numbers: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        figures = fsdp2.record(run.model, folder, scalars=lambda number, _: numbers.append(number))
        with figures as recording:
            for step in run.steps():
                run.train(step)
        rows = read_file(recording.path).rows
    assert numbers == [found.number for found in recording.steps] == [1, 2, 3, 4, 5, 6]
    kinds = Counter((row["kind"], row.get("for")) for row in rows if row.get("step") == 6)
    blocks = 3
    assert kinds["forward", None] == kinds["backward", None] == blocks + 1
    assert kinds["unshard", None] == kinds["wait", "all_gather"] == 2 * blocks + 1
    assert kinds["reduce", None] == blocks + 1
    # on a device compute needs the inputs of two back before their gradients are set
    returned = 2 if world.is_simulated else 0
    assert kinds["wait", "reduce_scatter"] == blocks + 1 + returned
    assert all(row["end_ns"] is not None for row in rows)
    return run.values()


@scenario(4, slow=True)
def recorded_with_replicas(world: World) -> Values:
    run = training(world, mesh=world.mesh(2, 2))
    with tempfile.TemporaryDirectory() as folder:
        with fsdp2.record(run.model, folder) as recording:
            for step in run.steps():
                run.train(step)
        kinds = Counter(row["kind"] for row in read_file(recording.path).rows)
    assert kinds["all_reduce"] == kinds["reduce"]
    return run.values()


@scenario(2, slow=True)
def recorded_twice(world: World) -> Values:
    """Two recordings of one model at the same time have the same rows."""
    run = training(world)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        with fsdp2.record(run.model, first) as outer, fsdp2.record(run.model, second) as inner:
            for step in run.steps():
                run.train(step)
        of_both = [
            Counter((row["kind"], row.get("collective")) for row in read_file(one.path).rows)
            for one in (outer, inner)
        ]
    assert of_both[0] == of_both[1]
    assert of_both[0]["reduce", "reduce_scatter"]
    return run.values()
