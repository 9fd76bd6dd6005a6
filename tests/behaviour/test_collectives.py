"""Promise: an unshard is one all-gather, a reduction one reduce-scatter (and one all-reduce).

Seen from outside, as `CommDebugMode` sees c10d operations.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2._compiled.compile import check_group
from fsdp2._core.base import torch_comm
from fsdp2._core.base.policy import Residence
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import advance
from tests.kit.meshes import BACKEND
from tests.kit.models import CASES, WIDTH, Block, loss_of, seeded
from tests.kit.parity import Pair, make_mesh, shard
from tests.kit.pool import ranks
from tests.kit.slow import slow


def kinds(comm: CommDebugMode) -> Counter[str]:
    """Count collectives by what they are, whatever variant of the operation carried them out."""
    found: Counter[str] = Counter()
    for operation, number in comm.get_comm_counts().items():
        name = str(operation).replace("_", "")
        for kind in ("allgather", "reducescatter", "allreduce", "alltoall", "broadcast"):
            if kind in name:
                found[kind] += number
                break
        else:
            found[str(operation)] += number
    return +found


def watch(pair: Pair) -> tuple[Counter[str], Counter[str]]:
    """Run a step of the sharded model; return the collectives of forward and of backward."""
    batch = pair.local(pair.batch())
    with CommDebugMode() as forward:
        loss = pair.run(pair.model, batch)
    with CommDebugMode() as backward:
        loss.backward()
    advance(pair.optimizer)
    return kinds(forward), kinds(backward)


UNITS = 4  # three blocks and the root
FORWARD = {"allgather": UNITS}
BACKWARD = {"allgather": UNITS - 1, "reducescatter": UNITS}


@pytest.mark.parametrize(
    ("name", "reshard_after_forward", "expected"),
    [
        ("stack", None, BACKWARD),
        ("stack", True, FORWARD | {"reducescatter": UNITS}),
        ("stack", False, {"reducescatter": UNITS}),
        ("all_frozen_blocks", None, BACKWARD | {"reducescatter": 1}),  # the root
        ("scalars", None, BACKWARD),
        slow("partly_frozen", None, BACKWARD),
        ("one_row", None, BACKWARD),
        ("tied_within", None, BACKWARD),
        slow("quantised", None, BACKWARD),
    ],
)
@ranks(2, 3)
def test_a_step_of_sharded_blocks(
    name: str, reshard_after_forward: bool | None, expected: dict[str, int]
) -> None:
    """The counts do not depend on the contents of a group."""
    pair = Pair(name, reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        assert watch(pair) == (FORWARD, expected)


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((2, 2), FORWARD, BACKWARD | {"allreduce": UNITS}),
        ((4, 1), {}, {"allreduce": UNITS}),
        ((1, 4), FORWARD, BACKWARD),
    ],
)
@ranks(4)
def test_a_replicate_axis_adds_one_all_reduce_a_unit(
    shape: tuple[int, int], forward: dict[str, int], backward: dict[str, int]
) -> None:
    """An axis of one rank communicates nothing."""
    pair = Pair("stack", mesh=make_mesh(*shape))
    for _ in range(2):
        assert watch(pair) == (forward, backward)


@ranks(1)
def test_one_rank_communicates_nothing() -> None:
    for shape in ((), (1, 1)):
        pair = Pair("stack", mesh=make_mesh(*shape))
        for _ in range(2):
            assert watch(pair) == ({}, {})


@ranks(2)
def test_accumulation_without_sync_does_not_reduce() -> None:
    pair = Pair("stack")
    pair.model.set_requires_gradient_sync(False)
    assert watch(pair)[1] == {"allgather": UNITS - 1}
    pair.model.set_requires_gradient_sync(True)
    assert watch(pair)[1] == BACKWARD


@ranks(2)
def test_unshard_is_one_all_gather_and_reshard_none() -> None:
    pair = Pair("stack")
    watch(pair)
    with CommDebugMode() as comm:
        pair.model.blocks[0].unshard()
        pair.model.blocks[0].unshard()
    assert kinds(comm) == {"allgather": 1}
    with CommDebugMode() as comm:
        pair.model.blocks[0].reshard()
    assert kinds(comm) == {}


@ranks(2)
def test_two_forwards_in_one_backward_gather_for_each() -> None:
    pair = Pair("stack", reshard_after_forward=True)
    loss = torch.zeros(())
    for _ in range(2):
        with CommDebugMode() as forward:
            loss = loss + pair.run(pair.model, pair.local(pair.batch()))
        assert kinds(forward) == {"allgather": UNITS}
    with CommDebugMode() as backward:
        loss.backward()
    assert UNITS <= kinds(backward)["allgather"] <= 2 * UNITS
    assert UNITS <= kinds(backward)["reducescatter"] <= 2 * UNITS


@ranks(2)
def test_sharding_a_model_communicates_nothing() -> None:
    case = CASES["stack"]
    model, mesh = seeded(case.build), make_mesh()
    with CommDebugMode() as comm:
        shard(model, case, mesh=mesh)
    assert kinds(comm) == {}


@ranks(2)
def test_the_order_of_prefetched_gathers_is_the_same_every_step() -> None:
    """From the second step on the recorded order only moves gathers earlier; their number stays."""
    pair = Pair("nested_units")
    counts = [watch(pair) for _ in range(3)]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0]["allgather"] == 5  # two inner units, two outer units, the root


@pytest.mark.parametrize(("name", "units"), [("stack", UNITS), ("one_group", UNITS - 1)])
@ranks(2)
def test_evaluation_only_gathers(name: str, units: int) -> None:
    pair = Pair(name)
    pair.train(steps=1)
    with CommDebugMode() as comm, torch.no_grad():
        pair.run(pair.model, pair.local(pair.batch()))
    assert kinds(comm) == {"allgather": units}


@ranks(2)
def test_a_lone_unit() -> None:
    model = fsdp2.fully_shard(seeded(Block))
    with CommDebugMode() as comm:
        loss_of(model(torch.randn(4, WIDTH))).backward()
    assert kinds(comm) == {"allgather": 1, "reducescatter": 1}


@pytest.mark.skipif(BACKEND != "gloo", reason="says what gloo lacks")
@ranks(2)
def test_gloo_is_known_by_kinds_of_devices() -> None:
    """On a device it has no sends, and no collectives for graphs: others are used, or none."""
    assert torch_comm.is_gloo(dist.group.WORLD, "cpu")
    assert torch_comm.is_gloo(dist.group.WORLD, "cuda")
    only_host = dist.new_group(backend="cpu:gloo")
    assert torch_comm.is_gloo(only_host)
    assert not torch_comm.is_gloo(only_host, "cuda")


@pytest.mark.skipif(BACKEND != "gloo", reason="says what gloo lacks")
@ranks(2)
def test_a_model_over_gloo_on_a_device_is_not_compiled_whole() -> None:
    """Its collectives would end the process."""
    model = fsdp2.fully_shard(seeded(Block))
    (group,) = unit_of(model).own_groups
    check_group(group, "block")
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = Residence(torch.device("cuda"), fsdp2.OffloadPolicy())
        patch.setattr(group, "residence", elsewhere)
        with pytest.raises(fsdp2.UnsupportedError, match=r"block .*gloo has no functional"):
            check_group(group, "block")
