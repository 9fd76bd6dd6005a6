"""Promise: `fsdp2.record` writes down exactly what units did, and changes nothing about the run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import ConfigError, StateError, UnsupportedError
from fsdp2._core.base import events
from fsdp2._core.engine.tree import unit_of
from fsdp2._tools.record.rows import EVENTS, read_file
from tests.behaviour.test_plan import TOKENS
from tests.behaviour.test_plan import Block as PlanBlock
from tests.behaviour.test_plan import Model as PlanModel
from tests.kit.in_turn import shard_each
from tests.kit.models import seeded
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks

WIDTH, ROWS = 24, 6
Row = dict[str, Any]


class Net(nn.Module):
    """Three blocks that are units, and a head that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.is_checkpointed = False
        self.raises_in = ""
        self.sleeps_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            time.sleep(self.sleeps_s)
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = x.tanh()
        if self.raises_in == "forward":
            raise ValueError("on purpose")
        if self.raises_in == "backward":
            x = Raises.apply(x)
        return self.head(x)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("on purpose")


def build(mesh: tuple[int, ...] = (), **kwargs: Any) -> Any:
    model = seeded(Net)
    shard_each(*model.blocks, model, mesh=make_mesh(*mesh), **kwargs)
    return model


def batch() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def step(model: nn.Module) -> None:
    model(batch()).sum().backward()


def with_inputs(model: nn.Module) -> None:
    model(batch().requires_grad_()).sum().backward()


def recorded(
    model: nn.Module, path: Path, times: int = 2, run: Callable[[Any], None] = step
) -> fsdp2.recordings.Recording:
    """Record some steps: rows are the events that there were, and scalars are sums of rows."""
    seen: list[events.Event] = []
    with events.listen(seen.append), fsdp2.record(model, path) as recording:
        for _ in range(times):
            run(model)
    rows = rows_of(recording)
    assert told(rows) == heard(seen)
    check_rows(rows)
    check_steps(recording)
    return recording


def numbers_of(recording: fsdp2.recordings.Recording) -> list[int]:
    return [found.number for found in recording.steps]


def rows_of(recording: fsdp2.recordings.Recording) -> list[Row]:
    return list(read_file(recording.path).rows)


def read_all(path: Path) -> Any:
    dist.barrier()
    return fsdp2.read_recordings(path)


def told(rows: list[Row]) -> list[tuple[str, str, str, int]]:
    """Return the rows that are events, as these are."""
    return [(r["kind"], r["unit"], r["phase"], r["nbytes"]) for r in rows if r["kind"] in EVENTS]


def heard(seen: list[events.Event]) -> list[tuple[str, str, str, int]]:
    return [(e.kind, e.fqn, e.phase, e.nbytes) for e in seen]


def check_rows(rows: list[Row]) -> None:
    """See what holds of every recording."""
    numbers = [row["n"] for row in rows]
    assert numbers == sorted(set(numbers))
    for row in rows:
        if row["end_ns"] is not None:
            assert row["begin_ns"] <= row["end_ns"], row


def check_steps(recording: fsdp2.recordings.Recording) -> None:
    """Scalars are the sums of rows."""
    rows = rows_of(recording)
    for found in recording.steps:
        own = [row for row in rows if row.get("step") == found.number]
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            waits = [r for r in own if r["kind"] == "wait" and r["for"] == kind]
            total = sum(r["end_ns"] - r["begin_ns"] for r in waits) / 1e9
            assert getattr(found, f"wait_{kind}_s") == pytest.approx(total)
        parts = found.compute_s + found.between_s + found.wait_all_gather_s
        parts += found.wait_reduce_scatter_s + found.wait_all_reduce_s
        assert parts == pytest.approx(found.seconds)
        assert found.gathered_nbytes == sum(r["nbytes"] for r in own if r["kind"] == "unshard")
        assert found.reduced_nbytes == sum(r["nbytes"] for r in own if r["kind"] == "reduce")
        status = Counter(r["prefetch"] for r in own if "prefetch" in r)
        assert status["hit"] == found.prefetch_hits
        assert status["late"] == found.prefetch_late
        assert status["none"] == found.prefetch_none


SETTINGS: dict[str, Callable[[], Any]] = {
    "plain": build,
    "resharded": lambda: build(reshard_after_forward=True),
    "kept": lambda: build(reshard_after_forward=False),
    "offload": lambda: build(offload_policy=fsdp2.CPUOffloadPolicy()),
    "bf16": lambda: build(mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16)),
}


@pytest.mark.parametrize("name", SETTINGS)
@ranks(1, 2)
def test_every_event_is_a_row(name: str, tmp_path: Path) -> None:
    """Units, phases, bytes and order; from the very first forward on."""
    recording = recorded(SETTINGS[name](), tmp_path, 3)
    assert len(recording.steps) == 3
    assert repr(recording) == f"Recording(path={str(recording.path)!r}, steps=3)"
    assert repr(recording.read()) == f"Recordings(ranks=({dist.get_rank()},), steps=(3,))"


@ranks(2)
def test_nothing_stays_when_it_is_off(tmp_path: Path) -> None:
    """Every attribute that was put onto the model's objects is gone, and no listener is left."""
    model = build()
    step(model)
    unit = unit_of(model)

    def look() -> list[Any]:
        units = [unit_of(module) for module in model.modules()]
        owners = [u for u in units if u is not None]
        groups = [group for u in owners for group in u.own_groups]
        objects = [*owners, *groups, unit.runtime, unit.runtime.context.streams]
        return [sorted(vars(one)) for one in objects] + [type(u.calls.running) for u in owners]

    before, others = look(), list(events.listeners)
    with fsdp2.record(model, tmp_path):
        step(model)
        assert look() != before
    assert (look(), events.listeners) == (before, others)


@ranks(2)
def test_recording_changes_no_number(tmp_path: Path) -> None:
    plain, other = build(), build()
    for _ in range(2):
        step(plain)
    recorded(other, tmp_path)
    for one, ours in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), ours.grad.to_local())


@ranks(2)
def test_spans_of_units(tmp_path: Path) -> None:
    """A unit's forward lies in its root's; a recomputation in the backward."""
    model = build()
    model.is_checkpointed = True
    rows = [row for row in rows_of(recorded(model, tmp_path)) if row.get("step") == 2]
    kinds = Counter((row["kind"], row["unit"]) for row in rows)
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert kinds["forward", unit] == kinds["backward", unit] == kinds["recompute", unit] == 1
    assert kinds["forward", ""] == kinds["backward", ""] == 1
    root = next(row for row in rows if (row["kind"], row["unit"]) == ("forward", ""))
    for row in rows:
        if row["kind"] == "forward":
            assert root["begin_ns"] <= row["begin_ns"] <= row["end_ns"] <= root["end_ns"]
        if row["kind"] == "recompute":
            assert row["phase"] == "backward"
            assert row["begin_ns"] > root["end_ns"]
    assert [row["phase"] for row in rows if row["kind"] == "pass"] == ["forward", "backward"]


@ranks(2)
def test_backwards_inside_of_a_backward(tmp_path: Path) -> None:
    """Reentrant checkpointing gives each unit a backward of its own: together they are one step."""
    model = build()
    model.forward = lambda x: [x := checkpoint(b, x, use_reentrant=True) for b in model.blocks][-1]
    recording = recorded(model, tmp_path, run=with_inputs)
    rows = rows_of(recording)
    assert numbers_of(recording) == [1, 2]
    kinds = Counter((row["kind"], row["unit"]) for row in rows if row["step"] == 2)
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert kinds["recompute", unit] == kinds["backward", unit] == kinds["reduce", unit] == 1
    assert {row["step"] for row in rows} == {1, 2}


@ranks(2)
def test_backwards_that_the_caller_ends(tmp_path: Path) -> None:
    model = build()
    model.set_manual_backward_finalization(True)

    def run(model: Any) -> None:
        for is_async in (False, True):
            step(model)
            handle = model.finalize_backward(async_op=is_async)
            if handle is not None:
                handle.wait()

    assert numbers_of(recorded(model, tmp_path, run=run)) == [1, 2, 3, 4]


@ranks(2)
def test_a_frozen_model(tmp_path: Path) -> None:
    """Backward for the inputs only: nothing is reduced, and the step ends all the same."""
    model = build()
    model.requires_grad_(False)
    recording = recorded(model, tmp_path, run=with_inputs)
    assert [(found.number, found.reduced_nbytes) for found in recording.steps] == [(1, 0), (2, 0)]


@ranks(2)
def test_a_compiled_unit(tmp_path: Path) -> None:
    """One on which `compile()` was called runs our hooks around the graph: it is recorded."""
    model = build()
    model.blocks[1].compile(backend="eager")
    rows = rows_of(recorded(model, tmp_path))
    assert Counter((r["kind"], r["unit"]) for r in rows)["forward", "blocks.1"] == 2


@ranks(2)
def test_waits_say_for_what_and_by_whom(tmp_path: Path) -> None:
    recording = recorded(build(), tmp_path)
    waits = [r for r in rows_of(recording) if r["kind"] == "wait" and r["step"] == 2]
    gathers = [r for r in waits if r["for"] == "all_gather"]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert [r["unit"] for r in gathers] == ["", *blocks, *reversed(blocks)]
    assert all(r["by"] == r["unit"] for r in gathers)
    ahead = {r["unit"] for r in gathers if r["prefetch"] != "none"}
    assert ahead == set(blocks)  # the root is the first: nobody can gather it ahead
    reductions = [r["unit"] for r in waits if r["for"] == "reduce_scatter"]
    assert sorted(reductions) == ["", *blocks]
    assert all(r["by"] in ("", *blocks) for r in waits)


@ranks(2)
def test_memory_follows_the_groups(tmp_path: Path) -> None:
    """Between steps nothing is gathered; in a step, what is whole and what is in flight."""
    recording = recorded(build(), tmp_path)
    rows = [row for row in rows_of(recording) if row.get("step") == 2 and row["kind"] != "step"]
    header = read_file(recording.path).header
    sizes = {group["name"]: group for group in header["groups"]}
    assert rows[-1]["gathered_nbytes"] == 0
    block = next(r["nbytes"] for r in rows if (r["kind"], r["unit"]) == ("reshard", "blocks.0"))
    assert block >= sizes["blocks.0"]["whole_nbytes"] == 4 * (WIDTH + 1) * WIDTH
    most = max(row["gathered_nbytes"] for row in rows)
    root = next(r["nbytes"] for r in rows if (r["kind"], r["unit"]) == ("reshard", ""))
    assert root + block <= most <= root + 2 * block
    peak = max(row["gathered_nbytes"] + row["communication_nbytes"] for row in rows)
    shards = sum(group["shard_nbytes"] for group in header["groups"])
    assert recording.steps[1].peak_nbytes == shards + peak
    assert recording.steps[1].rss_nbytes > 1 << 20


@ranks(4)
def test_replicas(tmp_path: Path, rank: int) -> None:
    """On a mesh of two dims the sums over replicas are collectives of their own."""
    recording = recorded(build((2, 2)), tmp_path)
    rows = rows_of(recording)
    kinds = Counter(row["kind"] for row in rows if row.get("step") == 2)
    assert kinds["reduce"] == kinds["all_reduce"] == 4
    header = read_file(recording.path).header
    group = header["groups"][0]
    assert (group["mesh"], header["world_size"]) == ([2, 2], 4)
    assert header["axes"][group["shard_axis"]] == ([0, 1] if rank < 2 else [2, 3])
    assert header["axes"][group["replicate_axis"]] == [rank % 2, rank % 2 + 2]
    found = read_all(tmp_path)
    assert found.ranks == (0, 1, 2, 3)
    assert all(clock.accuracy_s < 60 for clock in found.clocks)  # all ranks are connected


@ranks(2)
def test_accumulated_microbatches_are_one_step(tmp_path: Path) -> None:
    model = build()

    def run(model: Any) -> None:
        with fsdp2.no_sync(model):
            step(model)
            step(model)
        step(model)

    recording = recorded(model, tmp_path, run=run)
    assert numbers_of(recording) == [1, 2]
    rows = [row for row in rows_of(recording) if row.get("step") == 2]
    assert Counter(row["kind"] for row in rows)["pass"] == 6


@ranks(2)
def test_several_forwards_before_one_backward(tmp_path: Path) -> None:
    model = build()
    with fsdp2.record(model, tmp_path) as recording:
        (model(batch()).sum() + model(batch()).sum()).backward()
    (found,) = recording.steps
    kinds = Counter((row["kind"], row["unit"]) for row in rows_of(recording))
    assert kinds["forward", "blocks.1"] == kinds["backward", "blocks.1"] == 2
    assert kinds["reduce", "blocks.1"] == 1
    assert found.reduced_nbytes > 0


@ranks(2)
def test_a_forward_without_gradients_is_no_step(tmp_path: Path) -> None:
    model = build()
    with fsdp2.record(model, tmp_path) as recording:
        with torch.no_grad():
            model(batch())
        step(model)
    assert numbers_of(recording) == [1]
    numbers = [row["step"] for row in rows_of(recording) if row["kind"] == "pass"]
    assert numbers == [0, 1, 1]


@pytest.mark.parametrize("where", ["forward", "backward"])
@ranks(2)
def test_a_step_that_raises(where: str, tmp_path: Path) -> None:
    """It is told, it is in no figure, and the next step is whole."""
    model = build()
    figures: list[int] = []
    recorded = fsdp2.record(model, tmp_path, scalars=lambda number, _: figures.append(number))
    seen: list[events.Event] = []
    with events.listen(seen.append), recorded as recording:
        step(model)
        model.raises_in = where
        with pytest.raises(ValueError, match="on purpose"):
            step(model)
        model.raises_in = ""
        step(model)
    assert figures == numbers_of(recording) == [1, 3]
    rows = rows_of(recording)
    assert [row["failed"] for row in rows if row["kind"] == "step"] == [False, True, False]
    assert told(rows) == heard(seen)
    raised = {row["kind"] for row in rows if row.get("raised")}
    assert raised == {"pass", where}
    check_steps(recording)


@ranks(2)
def test_an_exception_leaves_the_block(tmp_path: Path) -> None:
    model = build()
    model.raises_in = "forward"
    with (
        pytest.raises(ValueError, match="on purpose"),
        fsdp2.record(model, tmp_path) as recording,
    ):
        step(model)
    assert recording.steps == []
    assert [row["failed"] for row in rows_of(recording) if row["kind"] == "step"] == [True]
    model.raises_in = ""
    step(model)


@ranks(2)
def test_a_callback_that_raises_is_the_users_error(tmp_path: Path) -> None:
    """It is told once, in a warning; the step and the recording go on."""
    model, calls = build(), []

    def fails(number: int, figures: dict[str, float]) -> None:
        calls.append(number)
        raise KeyError("mine")

    with fsdp2.record(model, tmp_path, scalars=fails) as recording:
        with pytest.warns(RuntimeWarning, match=r"scalars raised KeyError: 'mine' at step 1"):
            step(model)
        step(model)
    assert calls == [1]
    assert len(recording.steps) == 2
    assert all(param.grad is not None for param in model.parameters())


@ranks(2)
def test_scalars(tmp_path: Path) -> None:
    model = build()
    found: dict[int, dict[str, float]] = {}
    with fsdp2.record(model, tmp_path, scalars=found.__setitem__, tokens=100) as recording:
        for _ in range(2):
            step(model)
    assert found == {one.number: one.scalars for one in recording.steps}
    assert list(found) == [1, 2]
    assert found[1]["tokens_per_s"] == pytest.approx(100 / found[1]["seconds"])
    assert set(map(type, found[1].values())) <= {int, float}


@ranks(2)
def test_two_recordings_of_one_model(tmp_path: Path) -> None:
    """Nested, or ending in another order than they began: each has all of its time."""
    model = build()
    seen: list[events.Event] = []
    first = fsdp2.record(model, tmp_path / "first")
    second = fsdp2.record(model, tmp_path / "second")
    with events.listen(seen.append):
        first.__enter__()
        step(model)
        second.__enter__()
        step(model)
        first.__exit__(None, None, None)
        step(model)
        second.__exit__(None, None, None)
        step(model)
    assert numbers_of(first) == numbers_of(second) == [1, 2]
    events_of_both = told(rows_of(first)), told(rows_of(second))
    all_events = heard(seen)
    assert all_events[: len(events_of_both[0])] == events_of_both[0]
    steps = [i for i, e in enumerate(all_events) if e[0] == "wait_for_reduce"]
    assert all_events[steps[0] + 1 : steps[2] + 1] == events_of_both[1]
    check_steps(first)
    check_steps(second)


@ranks(2)
def test_two_models(tmp_path: Path) -> None:
    """Each recording has its own model only, though both have a root of the same name."""
    one, other = build(), build()
    with fsdp2.record(one, tmp_path / "one") as first:
        step(one)
        second = recorded(other, tmp_path / "other", 1)
    assert len(first.steps) == len(second.steps) == 1


@ranks(2)
def test_models_that_share_streams(tmp_path: Path) -> None:
    """What another model launches in the same lanes is not this one's."""
    one, other = build(), build()
    fsdp2.share_comm_ctx([one, other])
    seen: list[events.Event] = []
    with fsdp2.record(one, tmp_path) as recording:
        with events.listen(seen.append):
            step(one)
        step(other)
    assert told(rows_of(recording)) == heard(seen)
    assert len(recording.steps) == 1


@ranks(2)
def test_several_roots_are_one_step(tmp_path: Path) -> None:
    """A generator and a critic, say, in one container: the step ends with the last reductions."""
    pair = nn.ModuleDict({"one": build(), "other": build()})
    with fsdp2.record(pair, tmp_path) as recording:
        loss = pair["one"](batch()).sum()
        other = pair["other"](batch()).sum()
        loss.backward()
        other.backward()
    assert len(recording.steps) == 1
    rows = rows_of(recording)
    assert {row["unit"] for row in rows if row["kind"] == "pass"} == {"one", "other"}
    reduced = {row["unit"] for row in rows if row["kind"] == "reduce" and row["step"] == 1}
    assert reduced >= {"one", "other", "one.blocks.0", "other.blocks.2"}


@ranks(2)
def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Its units are recorded, by their names in it; steps are those of the root above."""
    model = build()
    with fsdp2.record(model.blocks, tmp_path) as recording:
        step(model)
        step(model)
    rows = rows_of(recording)
    assert {r["unit"] for r in rows if r["kind"] in ("forward", "reduce")} == {"0", "1", "2"}
    assert len(recording.steps) == 2


@ranks(2)
def test_a_conditional_unit(tmp_path: Path, rank: int) -> None:
    """One that this rank skips has a gather, and no forward."""
    model = seeded(Net)
    fsdp2.fully_shard(model.blocks[1], mesh=make_mesh(), conditional=True)
    fsdp2.fully_shard(model, mesh=make_mesh())
    model.forward = lambda x: model.head(model.blocks[0](x if rank else model.blocks[1](x)))
    with fsdp2.record(model, tmp_path) as recording:
        step(model)
    kinds = Counter((row["kind"], row["unit"]) for row in rows_of(recording))
    assert kinds["unshard", "blocks.1"] == kinds["reduce", "blocks.1"] == 1
    assert kinds["forward", "blocks.1"] == (0 if rank else 1)


@ranks(2)
def test_unsharding_by_hand(tmp_path: Path) -> None:
    model = build()
    with fsdp2.record(model, tmp_path) as recording:
        handle = model.unshard(async_op=True)
        handle.wait()
        model.reshard()
    rows = rows_of(recording)
    kinds = [row["kind"] for row in rows if row["kind"] in EVENTS]
    assert kinds[:2] == ["unshard", "wait_for_unshard"]
    assert {row["step"] for row in rows} == {0}


@ranks(1)
def test_what_is_refused(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(ConfigError, match="fully_shard was not applied to any module"):
        fsdp2.record(nn.Linear(2, 2), tmp_path)
    with pytest.raises(UnsupportedError, match=r"fsdp2\.compile returned"):
        fsdp2.record(fsdp2.compile(model, backend="eager"), tmp_path)
    with fsdp2.record(model, tmp_path / "a") as recording:
        step(model)
    with pytest.raises(StateError, match="already entered"):
        recording.__enter__()
    kept = recording.path.read_bytes()
    with pytest.raises(ConfigError, match=r"rank0\.jsonl"):
        fsdp2.record(model, tmp_path / "a").__enter__()
    with pytest.raises(ConfigError, match="one of the recorded files"):
        recording.trace(recording.path)
    assert recording.path.read_bytes() == kept
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        fsdp2.record(model, tmp_path / "file" / "below").__enter__()

    def nested(module: nn.Module, args: Any) -> None:
        fsdp2.record(model, tmp_path / "b").__enter__()

    model.register_forward_pre_hook(nested)
    with pytest.raises(StateError, match="during the forward"):
        step(model)


@ranks(2)
def test_the_file_is_whole_while_it_is_written(tmp_path: Path, rank: int) -> None:
    """After each step all of it is on disk; a torn last line is left out."""
    model = build()
    with fsdp2.record(model, tmp_path) as recording:
        step(model)
        rows = rows_of(recording)
        assert [row["kind"] for row in rows if row["kind"] == "step"] == ["step"]
        check_steps(recording)
        torn = recording.path.read_bytes() + b'{"n":99999,"kind":"for'
    copy = tmp_path / f"copy{rank}.jsonl"
    copy.write_bytes(torn)
    assert list(read_file(copy).rows) == rows
    assert not list(tmp_path.glob(".*"))


@ranks(2)
def test_a_rank_that_waits_says_so_first(tmp_path: Path, rank: int) -> None:
    """Before the host blocks, the file has a line that tells for what."""
    recording = recorded(build(), tmp_path, 1)
    lines = [json.loads(line) for line in recording.path.read_text().splitlines()]
    waiting = {line["n"]: line for line in lines if line["kind"] == "waiting"}
    waits = {line["n"]: line for line in lines if line["kind"] == "wait"}
    assert waiting
    for number, line in waiting.items():
        assert (line["unit"], line["for"]) == (waits[number]["unit"], waits[number]["for"])
    assert not [row for row in rows_of(recording) if row["kind"] == "waiting"]


@ranks(2)
def test_a_planted_straggler_is_named(tmp_path: Path, rank: int) -> None:
    model = build()
    step(model)
    step(model)
    model.sleeps_s = 0.1 * rank  # of load, that is: far more than a busy machine's own
    recorded(model, tmp_path, 8)
    found = read_all(tmp_path)
    assert [one.rank for one in found.stragglers] == [1]
    page = found.page()
    name, headline, *changes = str(found).split("\n")
    assert name == repr(found)
    assert headline == page.headline.text
    assert headline.startswith("rank 1: the others waited ")
    assert changes[0].startswith("  rank 1: check this rank's input pipeline")
    first = page.advice[0]  # the others, if any, are about what it did not cause
    assert first.about == "rank 1"
    assert first.found.startswith("the others waited ")
    assert " at a time; it was last in " in first.found
    blamed = {
        line.name: [s for s in line.spans if s.cause.startswith("rank 1, ")]
        for line in page.time_lines
    }
    late = {line.name: [s for s in line.spans if s.lane == "late"] for line in page.time_lines}
    assert blamed["rank 0"]
    assert not blamed["rank 1"]
    assert late["rank 1"]
    assert not late["rank 0"]
    assert sum(s.end - s.begin for s in late["rank 1"]) > 0.05


@ranks(2)
def test_a_shifted_clock_is_found(tmp_path: Path, rank: int) -> None:
    recording = recorded(build(), tmp_path, 5)
    straight = read_all(tmp_path).clocks
    dist.barrier()
    if rank == 1:
        first, rest = recording.path.read_text().split("\n", 1)
        header = json.loads(first)
        header["epoch_ns"] += 5_000_000_000
        recording.path.write_text(json.dumps(header) + "\n" + rest)
    shifted = read_all(tmp_path).clocks
    assert straight[0] == shifted[0]
    assert shifted[1].ahead_s - straight[1].ahead_s == pytest.approx(5.0, abs=1e-6)
    assert shifted[1].accuracy_s == pytest.approx(straight[1].accuracy_s)
    # They have one clock, in fact. A busy machine wakes one rank later than the other each time, by
    # more than the spread of what it sees, so only the order of the shift is certain.
    assert abs(straight[1].ahead_s) < 1.0


@ranks(2)
def test_ranks_may_record_different_steps(tmp_path: Path, rank: int) -> None:
    """Collectives are known by backwards, not by where a recording began."""
    model = build()
    step(model)
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(fsdp2.record(model, tmp_path))
        step(model)
        step(model)
        if rank == 1:
            stack.enter_context(fsdp2.record(model, tmp_path))
        step(model)
        step(model)
    found = read_all(tmp_path)
    assert abs(found.clocks[1].ahead_s) <= found.clocks[1].accuracy_s < 60
    assert {key[3] for key in found._aligned.met[1]} < {key[3] for key in found._aligned.met[0]}


def check_trace(path: Path) -> list[Row]:
    """See that a file is what the trace event format says."""
    trace = json.loads(path.read_text())
    assert isinstance(trace["baseTimeNanoseconds"], int)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMiCsftbe", event
        assert "name" in event
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "XiC":
            assert isinstance(event["ts"], float)
            assert isinstance(event["tid"], int | str)  # a profiler names one of its own
    return trace["traceEvents"]


@ranks(2)
def test_a_trace_of_all_ranks(tmp_path: Path, rank: int) -> None:
    recording = recorded(build(), tmp_path)
    target = tmp_path / f"trace{rank}.json"
    read_all(tmp_path).trace(target)
    found = check_trace(target)
    names = {
        (event["pid"], event["args"]["name"])
        for event in found
        if event["name"] in ("process_name", "thread_name")
    }
    for one in (0, 1):
        threads = ("steps", "compute", "waits", "gathers", "reductions", "engine")
        assert {(one, name) for name in (f"rank {one}: fsdp2", *threads)} <= names
    spans = [event for event in found if event["ph"] == "X"]
    for one in (0, 1):
        titles = Counter(event["name"] for event in spans if event["pid"] == one)
        assert titles["step 1"] == titles["step 2"] == 1
        assert titles["all_gather blocks.1"] == 4
        assert titles["reduce_scatter blocks.1"] == 2
    by_thread: dict[tuple[int, int], list[Row]] = {}
    for event in spans:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for key, ones in by_thread.items():
        if key[1] // 100 == 1:  # steps, and the passes in them
            continue
        ones.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(ones):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    assert {event["name"] for event in found if event["ph"] == "C"} == {"memory"}
    own = tmp_path / f"own{rank}.json"
    recording.trace(own)
    assert {event["pid"] for event in check_trace(own)} == {rank}


@ranks(2)
def test_a_profile_is_merged(tmp_path: Path, rank: int) -> None:
    """Units and collectives are ranges of the profiler; its file and ours lie on one clock."""
    model = build()
    exported = tmp_path / f"profile{rank}.json"
    with fsdp2.record(model, tmp_path):
        step(model)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(model)
        profiler.export_chrome_trace(str(exported))
    dist.barrier()
    ranges = Counter(event.name for event in profiler.events() if event.name.startswith("fsdp2::"))
    for kind in ("forward", "backward"):
        for unit in ("<root>", "blocks.0", "blocks.1", "blocks.2"):
            assert ranges[f"fsdp2::{kind} {unit}"] == 1, ranges
    assert ranges["fsdp2::all_gather blocks.1"] == 2
    assert ranges["fsdp2::wait all_gather blocks.1"] == 2
    assert ranges["fsdp2::reduce_scatter <root>"] == 1
    target = tmp_path / f"merged{rank}.json"
    profiles = {one: tmp_path / f"profile{one}.json" for one in (0, 1)}
    fsdp2.read_recordings(tmp_path).trace(target, profiles=profiles)
    found = check_trace(target)
    theirs = [e for e in found if e["name"] == "fsdp2::forward blocks.1" and e["ph"] == "X"]
    assert len(theirs) == 2  # one of each rank
    assert len({event["pid"] for event in theirs}) == 2
    second = {
        event["pid"]: event for event in found if event["name"] == "step 2" and event["ph"] == "X"
    }
    for event in theirs:
        step_of_rank = second[0 if event["pid"] < 2 << 20 else 1]
        slack_us = 2000.0  # of the profiler's own clock, which it converts
        assert step_of_rank["ts"] - slack_us <= event["ts"]
        assert event["ts"] <= step_of_rank["ts"] + step_of_rank["dur"] + slack_us


@ranks(2)
def test_rows_for_pandas(tmp_path: Path, rank: int) -> None:
    recording = recorded(build(), tmp_path, 1)
    dist.barrier()
    target = tmp_path / f"rows{rank}.jsonl"
    found = fsdp2.read_recordings(tmp_path)
    found.rows(target)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert {row["rank"] for row in rows} == {0, 1}
    own = [row for row in rows if row["rank"] == rank]
    assert told(own) == told(rows_of(recording))
    assert min(row["begin_ns"] for row in rows) >= 0
    assert set(found.steps) == {0, 1}


@ranks(2)
def test_a_page(tmp_path: Path, rank: int) -> None:
    recording = recorded(build(), tmp_path, 3)
    found = read_all(tmp_path)
    page = found.page()
    assert [tab.name for tab in page.memory] == ["rank 0", "rank 1"]
    assert [line.name for line in page.time_lines] == ["rank 0", "rank 1"]
    assert [area.name for area in page.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    for line in page.time_lines:
        causes = {span.cause for span in line.spans if span.cause}
        assert "all_gather blocks.1" in causes
        compute = sorted(
            (span for span in line.spans if span.lane == "compute"), key=lambda one: one.begin
        )
        for before, after in itertools.pairwise(compute):
            assert before.end <= after.begin + 1e-9
    moments = page.memory[0].moments
    assert [m.time for m in moments] == sorted(m.time for m in moments)
    assert all(len(m.nbytes) == len(page.memory[0].kinds) for m in moments)
    assert found.page(step=1) != page
    with pytest.raises(ConfigError, match="from 1 to 3"):
        found.page(step=4)
    target = tmp_path / f"page{rank}.html"
    recording.html(target)
    assert "rank" in target.read_text()


@ranks(2)
def test_a_plan_is_laid_over_what_was_measured(tmp_path: Path) -> None:
    """Each event of the plan gets the time at which it was measured, and its bytes are those."""
    model = seeded(PlanModel)
    # a host, as these ranks: on a device the parts of a root are reduced at another place
    host = dataclasses.replace(fsdp2.plan.hardware["h100-nvlink-ib"], device_type="cpu")
    plan = fsdp2.plan(
        model,
        mesh=2,
        policy={PlanBlock},
        batch=TOKENS,
        rank=dist.get_rank(),
        hardware=host,
    )
    fsdp2.wrap.shard_model(model, {PlanBlock})
    with fsdp2.record(model, tmp_path) as recording:
        for _ in range(3):
            model(TOKENS).mean().backward()
            model.zero_grad()
    page = recording.page(planned=plan.planned())
    assert [line.name for line in page.time_lines] == [f"rank {dist.get_rank()}", "planned"]
    (tab,) = page.memory
    assert tab.measured_name == "planned"
    assert [one.label for one in tab.measured] == [str(event) for event in plan.step.events]
    times = [one.time for one in tab.measured]
    assert times == sorted(times)
    measured = {(one.label, one.time): sum(one.nbytes) for one in tab.moments}
    gathered = [o for o in tab.measured if o.label.startswith("forward: wait_for_unshard")]
    assert gathered
    for one in gathered:
        assert one.nbytes[0] == pytest.approx(measured[one.label, one.time], rel=0.35)
    with pytest.raises(ConfigError, match=r"a result of Plan\.planned\(\)"):
        recording.page(planned=plan)  # type: ignore[arg-type]  # wrong


@ranks(1)
def test_a_recording_that_cannot_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: one warning, and the steps are not touched."""
    model = build()
    with fsdp2.record(model, tmp_path) as recording:
        step(model)

        def full(*_: Any) -> int:
            raise OSError("no space")

        with monkeypatch.context() as patched:
            patched.setattr("os.write", full)
            with pytest.warns(RuntimeWarning, match="no space"):
                step(model)
        step(model)
    assert len(recording.steps) == 3
    assert len([row for row in rows_of(recording) if row["kind"] == "step"]) == 1


def vocabulary() -> nn.Module:
    """Return a model with large parts below the root, which are groups of their own."""
    parts = {
        "embedding": nn.Embedding(2003, 157),
        "block": nn.Linear(157, 157),
        "head": nn.Linear(157, 2003, bias=False),
    }
    return nn.Sequential(OrderedDict(parts))


@pytest.mark.parametrize("memory", ["low", "fast"])
@pytest.mark.parametrize("reshards", [None, 2])
@ranks(4)
def test_parts_smaller_meshes_and_adoption(
    reshards: int | None, memory: str, tmp_path: Path
) -> None:
    """What is gathered and reduced out of turn, over fewer ranks, or taken over, is told too."""
    model: Any = seeded(vocabulary)
    shard_each(model.block, model, mesh=make_mesh(), reshard_after_forward=reshards)
    model.set_memory(memory)

    def run(model: Any) -> None:
        for number in range(5):
            if number == 4:
                model.double()
            model(torch.zeros(1, 48, dtype=torch.long)).mean().backward()
            model.zero_grad()

    recording = recorded(model, tmp_path, 1, run)
    rows = rows_of(recording)
    assert {row["unit"] for row in rows if row["kind"] == "adopt"} >= {"block", "embedding", "head"}
    assert any("is_smaller" in row for row in rows) == (reshards == 2)
    assert len(recording.steps) == 5
