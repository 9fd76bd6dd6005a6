"""Promise: what torch builds on its own FSDP2 takes our units, or says at once that it cannot.

Averages of weights (`torch.optim.swa_utils`) and trackers of memory (`torch.distributed._tools`).
Other tests have the state dicts of `torch.distributed.checkpoint` (`test_distributed_checkpoint`)
and the schedules of `torch.distributed.pipelining` (`test_pipelining`).
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fsdp2
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import ROWS, Pair, assert_same, names_of, sharded, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow


class WithStatistics(nn.Module):
    """Odd sizes, a row, and buffers that averages may include."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.norm = nn.BatchNorm1d(29)
        self.down = nn.Linear(29, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def pair_of(model: type[nn.Module] = WithStatistics) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and a whole one, for batches that all ranks see."""
    sharded = seeded(model)
    fsdp2.fully_shard(sharded.up)
    fsdp2.fully_shard(sharded)
    return sharded, seeded(model)


AVERAGES: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "decaying, many at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "decaying, one by one": {"avg_fn": lambda old, new, count: 0.8 * old + 0.2 * new},
    "buffers too": {"use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
@ranks(2, 3)
def test_an_averaged_model_is_that_of_the_whole_model(kind: str) -> None:
    """`AveragedModel` copies the units and averages shards, with a schedule of SWA's, and runs."""
    models = pair_of()
    averages = [AveragedModel(model, **AVERAGES[kind]) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedules = [SWALR(o, swa_lr=0.01, anneal_epochs=2) for o in optimizers]
    for _ in range(4):
        x = torch.randn(ROWS, 13)
        for model, average, optimizer, schedule in zip(
            models, averages, optimizers, schedules, strict=True
        ):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    assert isinstance(averages[0].module, fsdp2.FSDPModule)
    ours, expected = (names_of(average) for average in averages)
    for name, param in ours.items():
        assert_same(param, expected[name], name, 1e-5)
    for (name, buffer), other in zip(
        averages[0].named_buffers(), averages[1].buffers(), strict=True
    ):
        assert_same(buffer, other, name, 1e-5)
    batches = [torch.randn(ROWS, 13) for _ in range(3)]
    for average in averages:
        update_bn(batches, average)
        average.eval()
    with torch.no_grad():
        assert_same(averages[0](batches[0]), averages[1](batches[0]), "output", 1e-5)


@ranks(2)
def test_one_kernel_over_shards_and_buffers_is_refused_by_torch() -> None:
    """A `multi_avg_fn` of torch's mixes buffers with `DTensor`s, an error; ours has a way."""
    model, _ = pair_of()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)  # the first one copies
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        average.update_parameters(model)
    fsdp2.optim.EMA(model, 0.5, include_buffers=True).update()


@ranks(2)
def test_torchs_own_units_have_no_averaged_model() -> None:
    """`AveragedModel` copies its model, which torch's own units refuse."""
    model = seeded(WithStatistics)
    torch_fsdp.fully_shard(model)
    with pytest.raises(AssertionError, match="deepcopy"):
        AveragedModel(model)


@ranks(2)
def test_an_averaged_model_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Averages and their count are saved in shards, and load into a fresh one of another model."""
    model, _ = pair_of()
    average = AveragedModel(model)
    for _ in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        average.update_parameters(model)
    dcp.save({"average": get_model_state_dict(average)}, checkpoint_id=tmp_path)
    other = AveragedModel(pair_of()[0])
    state = {"average": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state["average"])
    assert other.n_averaged == 3
    for (name, mine), expected in zip(other.named_parameters(), average.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(expected)), name
    assert copy.deepcopy(average).n_averaged == 3


@ranks(2)
def test_the_average_of_torch_is_ours() -> None:
    """`fsdp2.optim.EMA` and `AveragedModel` with the same decay hold the same averages."""
    model, _ = pair_of()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.update_parameters(model)  # the first one copies
    ours = fsdp2.optim.EMA(model, 0.8)
    for _ in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.ones_like(param))
        theirs.update_parameters(model)
        ours.update()
    with ours.swapped():
        for (name, mine), other in zip(
            model.named_parameters(), theirs.module.parameters(), strict=True
        ):
            assert_same(mine, other, name, 1e-6)


@ranks(2)
def test_the_tracker_of_torchs_units_refuses_ours() -> None:
    """`FSDPMemTracker` reads torch's engine: the error says what to read here, and does no harm."""
    pair = Pair("stack")
    tracker = FSDPMemTracker(pair.model, pair.optimizer)
    with pytest.raises(AttributeError, match=r"fsdp2\.units"), tracker:
        pass
    pair.train(steps=2)


@pytest.mark.parametrize("of_torch", [False, slow(True)])
@ranks(2)
def test_a_tracker_of_any_memory_sees_units(of_torch: bool) -> None:
    """`MemTracker` counts tensors, not units: the shards it saw are the bytes that a rank holds."""
    case = CASES["stack"]
    model = sharded(case, library=torch_fsdp if of_torch else fsdp2)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.batch(4)

    def step() -> None:
        loss_of(model(*batch.args)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    device = torch.device("cpu")
    peak = tracker.get_tracker_snapshot("peak")[device]
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert peak["Total"] > 4 * shards  # shards, two moments, gradients


def test_every_helper_of_torchs_is_one_that_was_looked_at() -> None:
    """A new schedule of pipelining or helper of state dicts has to be tried; these were."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.pipelining import schedules

    helpers = {name for name in state_dict.__all__ if name[0].islower()}
    known = itertools.product(("get", "set"), ("model", "optimizer"))
    assert helpers <= {f"{verb}_{what}_state_dict" for verb, what in known} | {
        "get_state_dict",
        "set_state_dict",
    }
    found = {name for name in schedules.__all__ if name.startswith("Schedule")}
    assert found <= {
        "Schedule1F1B",
        "ScheduleDualPipeV",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
        "ScheduleZBVZeroBubble",
    }
