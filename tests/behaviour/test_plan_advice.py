"""Promise: a plan names what is wrong, and what it proposes gives what it says, on real ranks."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import ConfigError
from fsdp2._core.comm import wire
from fsdp2._tools.pages.content import Advice
from fsdp2._tools.plan.budget import Search, Suggestion, largest_batch, search_of, size_of
from fsdp2._tools.plan.setup import code_of
from fsdp2._tools.plan.values import MemoryPoint, StepPlan
from tests.behaviour.test_plan import LENGTH, TOKENS, Block, Model, real_step
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow


class Tagged(nn.Module):
    """A block with an embedding of its own: what it adds depends on the tokens."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tags = nn.Embedding(2003, width)
        self.block = Block(width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.block(x + self.tags(ids))


class TaggedModel(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, width)
        self.layers = nn.ModuleList(Tagged(width) for _ in range(3))
        self.head = nn.Linear(width, 301)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return self.head(x)


@dataclass(frozen=True)
class Measured:
    """A step of real ranks."""

    collectives: int  # gathers and reductions
    peak: int  # bytes above the step's start, by the allocator
    kept: int  # bytes of host buffers that the start contains, because steps reuse them
    shards: int  # bytes of all units' shards


class Narrow(nn.Module):
    """Five rows over four ranks: three of eight are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8192, 5, bias=False) for _ in range(4))
        self.out = nn.Linear(20, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([part(x) for part in self.parts], dim=-1))


def measured(
    model: nn.Module, policy: Any, batch: Tensor, memory: str | None = None, **kwargs: Any
) -> Measured:
    mesh = shared_mesh((dist.get_world_size(),), ("shard",))
    fsdp2.wrap.shard_model(model, policy, mesh=mesh, **kwargs)
    if memory is not None:
        model.set_memory(memory)
    seen, peak = real_step(model, batch)
    groups = [group for unit in fsdp2.units(model) for group in unit.groups]
    return Measured(
        collectives=sum(event.kind in ("unshard", "reduce") for event in seen),
        peak=peak,
        kept=sum(kept._most - kept._room for known in wire._memories.values() if (kept := known())),
        shards=sum(group.nbytes for group in groups),
    )


def only(advice: tuple[Advice, ...], severity: str, about: str) -> Advice:
    found = [one for one in advice if one.severity == severity and about in one.about]
    assert len(found) == 1, advice
    return found[0]


def check_peak(plan: fsdp2.plans.Plan, real: Measured) -> None:
    """A plan is of a device, where each gather allocates. The ranks of this test keep buffers."""
    planned = plan.step.peak_nbytes - plan.step.start_nbytes
    assert -0.03 * real.peak <= planned - real.peak <= 0.03 * real.peak + real.kept, (
        f"{planned} planned, {real}"
    )


def nothing(module: nn.Module) -> bool:
    return False


@ranks(2)
def test_tiny_units() -> None:
    build = lambda: Model(width=64, vocabulary=301)  # noqa: E731  # short
    plan = fsdp2.plan(build(), mesh=2, policy={nn.Linear, nn.LayerNorm}, batch=TOKENS)
    one = only(plan.advice(), "slow", "units")
    assert one.change == "policy={Block}"
    assert one.found.startswith("too small for the link: at most ")
    before = measured(seeded(build), {nn.Linear, nn.LayerNorm}, TOKENS)
    after = measured(seeded(build), {Block}, TOKENS)
    assert one.found.endswith(f"in {before.collectives} collectives a step")
    assert f"{before.collectives} collectives a step become {after.collectives}" in one.gain
    assert after.collectives < before.collectives / 2


@ranks(2)
def test_a_huge_root() -> None:
    plan = fsdp2.plan(Model(), mesh=2, batch=TOKENS, rank=dist.get_rank())
    one = only(plan.advice(), "memory", "<root>")
    assert one.change == "policy={Block}"
    better = plan.changed(policy={Block})
    before = measured(seeded(Model), nothing, TOKENS)
    after = measured(seeded(Model), {Block}, TOKENS)
    assert after.peak < before.peak
    check_peak(plan, before)
    check_peak(better, after)


@ranks(4)
def test_a_badly_padded_dim() -> None:
    batch = torch.zeros(3, 8192)
    plan = fsdp2.plan(Narrow(), mesh=4, policy={nn.Linear}, batch=batch, rank=dist.get_rank())
    one = only(plan.advice(), "memory", "parts.0.weight")
    assert one.found.startswith("5 rows over 4 ranks: 96 KiB of padding added to 160 KiB")
    assert one.change == "shard_placement_fn=lambda param: Shard(1) for this parameter"

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.shape == (5, 8192) else None

    better = plan.changed(shard_placement_fn=place)
    before = measured(seeded(Narrow), {nn.Linear}, batch)
    after = measured(seeded(Narrow), {nn.Linear}, batch, shard_placement_fn=place)
    assert after.shards < before.shards
    for found, real in ((plan, before), (better, after)):
        assert sum(group.shard_nbytes for group in found.groups) == real.shards
        check_peak(found, real)


@ranks(slow(2))
def test_an_embedding_in_a_block() -> None:
    plan = fsdp2.plan(TaggedModel(), mesh=2, policy={Tagged}, batch=TOKENS, rank=dist.get_rank())
    for number in range(3):
        one = only(plan.advice(), "memory", f"layers.{number}.tags")
        assert one.change == "policy={Embedding, Tagged}"
        assert "an embedding of 500.8 KiB is 84% of the unit" in one.found
    better = plan.changed(policy={Tagged, nn.Embedding})
    before = measured(seeded(TaggedModel), {Tagged}, TOKENS)
    after = measured(seeded(TaggedModel), {Tagged, nn.Embedding}, TOKENS)
    check_peak(plan, before)
    check_peak(better, after)
    assert max(g.whole_nbytes for g in better.groups) < max(g.whole_nbytes for g in plan.groups)


@pytest.mark.parametrize("spare", with_slow([0.001, 0.1, 1.0, 30.0], [0.001, 30.0]))
def test_the_largest_batch_is_found_in_few_plans(spare: float) -> None:
    """A plan of a large model takes seconds: two sizes tell the third, whatever the budget."""
    batch = torch.zeros(1, LENGTH, dtype=torch.long)
    plan = fsdp2.plan(Model(), mesh=8, policy={Block}, batch=batch, optimizer=torch.optim.AdamW)
    sizes: list[int] = []

    def predict(changes: dict[str, Any]) -> Any:
        sizes.append(len(changes["batch"]))
        return plan.changed(**changes).step

    def fits(rows: int) -> bool:
        return predict({"batch": batch.expand(rows, -1)}).highest_nbytes <= budget

    budget = int((1 + spare) * plan.step.highest_nbytes)
    found = largest_batch(batch, plan.step, budget, predict, {})
    assert len(sizes) <= 5, sizes
    most, step = found
    assert step == predict({"batch": batch.expand(most, -1)})
    assert fits(most)
    assert not fits(most + 1)


@ranks(2)
def test_a_budget_that_does_not_fit() -> None:
    """What is suggested fits, and takes on real ranks what it says; one row more does not fit."""
    batch = torch.zeros(16, LENGTH, dtype=torch.long)
    given = {"mesh": 2, "policy": {Block}, "rank": dist.get_rank(), "memory": "fast"}
    plan = fsdp2.plan(Model(), batch=batch, **given)
    budget = int(0.97 * plan.step.highest_nbytes)
    one = only(plan.advice(budget), "memory", "the step")
    assert one.found.startswith("does not fit: it takes ")
    assert str(one) == f"memory, the step: {one.found}\n    {one.change}: {one.gain}"
    best = plan.suggest(budget)[0]
    assert best.fits
    assert str(best).startswith(f"fits: {best.code}, peak ")
    assert str(best).endswith(f"up to a batch of {best.batch}")
    assert one.change == best.code
    assert best.peak_nbytes <= budget
    assert best.batch >= 16
    for rows, fits in ((best.batch, True), (best.batch + 1, False)):
        more = torch.zeros(rows, LENGTH, dtype=torch.long)
        step = plan.changed(batch=more, **best.changes).step
        assert (step.highest_nbytes <= budget) is fits
    better = plan.changed(**best.changes)
    if best.changes.get("activation_checkpointing"):
        return  # how the user recomputes is the user's
    check_peak(better, measured(seeded(Model), {Block}, batch, best.changes["memory"]))


def test_nothing_is_wrong_with_blocks_of_good_size() -> None:
    with torch.device("meta"):
        model = Model(width=2048, vocabulary=32000)
    batch = torch.zeros(4, LENGTH, dtype=torch.long)
    plan = fsdp2.plan(model, mesh=8, policy={Block}, batch=batch)
    assert plan.advice() == ()


def test_precision_replicas_and_prefetch_are_told_on_a_machine() -> None:
    with torch.device("meta"):
        model = Model(width=1024, vocabulary=8000)
    plan = fsdp2.plan(
        model, mesh=16, policy={Block}, batch=TOKENS, hardware="h100-nvlink-ib", memory="low"
    )
    found = plan.advice()
    assert "MixedPrecisionPolicy(torch.bfloat16" in only(found, "slow", "all units").change
    assert only(found, "slow", "the mesh").change.startswith("mesh=(2, 8)")
    assert only(found, "slow", "the step").change.startswith("model.set_memory(")
    assert all("becomes" in one.gain for one in found)


def test_what_does_not_run_is_not_proposed() -> None:
    """A block reads its embedding's weight from outside, so that cannot be a unit of its own."""

    class Reads(Tagged):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.block(x + self.tags.weight[: x.shape[1]])

    model = TaggedModel()
    model.layers = nn.ModuleList(Reads() for _ in range(2))
    assert fsdp2.plan(model, mesh=2, policy={Reads}, batch=TOKENS).advice() == ()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("70GB", 70 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("64mib", 64 << 20),
        ("7", 7),
        (7, 7),
        ("2KB", 2000),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert size_of("x", "budget", text) == nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "GB",
        "-1",
        "7 apples",
        "0",
        0,
        -3,
        1.5,
        True,
        None,
        [7],
        1 << 61,
        "9" * 5000,
        "2000000TB",
    ],
)
def test_what_is_no_size(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"x: expected budget to be .*'70GB'"):
        size_of("x", "budget", wrong)


def test_what_cannot_be_suggested() -> None:
    model = nn.Linear(13, 29)
    with pytest.raises(ConfigError, match="a plan without a batch"):
        fsdp2.plan(model, mesh=2).suggest("1GB")
    with pytest.raises(ConfigError, match="neither a budget nor hardware"):
        fsdp2.plan(model, mesh=2, batch=torch.zeros(2, 13)).suggest()
    best = fsdp2.plan(model, mesh=2, batch=torch.zeros(2, 13), hardware="a100-pcie").suggest()[0]
    assert best.fits
    assert best.seconds > 0


def search(**keywords: Any) -> list[Suggestion]:
    """Search for a model that is made up: 10 bytes, 3 if computed again; a device, one row."""

    def predict(changes: dict[str, Any]) -> StepPlan:
        is_again = "activation_checkpointing" in changes
        memory = changes.get("memory", "balanced")
        step = {"low": 3, "balanced": 4, "fast": 6}[memory] if is_again else 10
        stepped = 3 if "optimizer" in changes else 5
        return StepPlan(
            kinds=("all",),
            collectives=(),
            events=(),
            memory=(MemoryPoint("forward: reshard a", 0.0, step, step, (step,), (step,)),),
            start_nbytes=1,
            peak_nbytes=step,
            optimizer_nbytes=1,
            optimizer_peak_nbytes=stepped,
            seconds={"low": 3.0, "balanced": 2.0, "fast": 1.0}[memory] + is_again,
            tokens=6,
        )

    given: dict[str, Any] = {"fused": None, "may_offload": False, "memory": "balanced", **keywords}
    batch = torch.zeros(1, LENGTH, dtype=torch.long)
    return Search(batch=batch, predict=predict, found=lambda one: None, **given).run()


def fused(*args: Any) -> None: ...


FUSED = functools.partial(fused, fused=True)


def test_what_fits_is_tried_with_faster_settings() -> None:
    """``low`` is tried first beside dearer ways; of what fits the fastest is told first."""
    again = {"activation_checkpointing": True}
    (best, *_) = search(budget=5)
    assert (best.fits, best.changes, best.seconds) == (True, again, 3.0)
    found = search(budget=4, fused=FUSED)
    assert found[0].fits
    assert found[0].changes == {**again, "optimizer": FUSED}
    assert "fused(..., fused=True)" in str(found[0])
    found = search(budget=3, fused=FUSED)
    assert [one.changes for one in found if one.fits] == [
        {**again, "optimizer": FUSED, "memory": "low"}
    ]
    tried = [one.changes.get("memory") for one in found if "optimizer" in one.changes]
    assert {"low", "balanced", "fast"} <= {*tried, "balanced"}


def test_a_fused_step_is_tried_where_the_optimizer_takes_the_most() -> None:
    assert not any("optimizer" in one.changes for one in search(budget=2, fused=None))
    assert any("optimizer" in one.changes for one in search(budget=2, fused=FUSED))
    assert code_of({"optimizer": torch.optim.SGD}) == "another optimizer"
    assert code_of({"optimizer": functools.partial(fused, lr=0.1)}) == "another optimizer"
    plan = fsdp2.plan(
        Model(), mesh=8, policy={Block}, batch=TOKENS, optimizer=torch.optim.AdamW, hardware="h100"
    )
    making = search_of(plan, "1MB").fused
    assert isinstance(making, functools.partial)
    assert making.func is torch.optim.AdamW
    assert plan.changed(optimizer=making).step is not None
    assert search_of(plan.changed(hardware=None), "1MB").fused is None, "on CPUs foreach is not it"
    assert search_of(plan.changed(optimizer=torch.optim.Rprop), "1MB").fused is None


def test_a_machine_is_read_from_its_values(tmp_path: Path) -> None:
    """MFU is counted over the peak, whatever part of it is planned with."""
    machine = fsdp2.plan.hardware["h100-nvlink-ib"].scaled(compute=0.5, links=0.8)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(machine.to_values()))
    made = fsdp2.plan(Model(), mesh=8, policy={Block}, batch=TOKENS, hardware=str(file))
    assert made.hardware == machine
    whole = made.changed(hardware="h100").step
    assert made.step.product_seconds == pytest.approx(whole.product_seconds)
    assert made.step.mfu == pytest.approx(whole.product_seconds / (made.step.seconds or 0))
    file.write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match="no measurements of a machine"):
        made.changed(hardware=str(file))
