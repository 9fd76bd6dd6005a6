"""The benchmarks: tables come out, counts are right where they can be said, a regress is found."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.check import compare, quick, stale
from benchmarks.device import offload
from benchmarks.kit import compile_worker, noop
from benchmarks.kit.dispatch import CopyCounter, OpCounter
from benchmarks.kit.emulated import EmulatedGroup
from benchmarks.kit.limits import sharded_bytes_sent
from benchmarks.kit.link import Link, LinkGroup, VirtualClock
from benchmarks.kit.models import (
    LIBRARIES,
    PRECISIONS,
    Size,
    applies,
    build,
    make_input,
    make_step,
    prepare_step,
)
from benchmarks.kit.report import Figure, Origin, Result
from benchmarks.kit.rounds import rotate, spread
from benchmarks.start import scale
from benchmarks.state import state
from benchmarks.step import copies, gloo, link, peak, walk
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

SMALL = Size(depth=2)
ORIGIN = Origin("python -m benchmarks.x", "abc", "2.13.0", "3.11.7")


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a benchmark left its process group")


def make_result(value: float, *, is_gated: bool = True) -> Result:
    figures = [
        Figure("fp32", "torch", "ops", 60.0),
        Figure("fp32", "fsdp2", "ops", value, is_gated),
    ]
    return Result("x", ORIGIN, figures)


@pytest.mark.parametrize(
    ("old", "new", "is_worse"),
    [(10.0, 10.9, False), (10.0, 11.1, True), (10.0, 5.0, False), (0.0, 0.0, False), (0, 1, True)],
)
def test_compare_finds_a_figure_that_became_worse(
    tmp_path: Path, old: float, new: float, is_worse: bool
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    make_result(old).write(before)
    make_result(new).write(after)
    assert compare.main([str(before), str(after)]) == int(is_worse)


def test_compare_ignores_figures_that_are_not_gated_and_misses_those_that_are_gone() -> None:
    loose = compare.compare(make_result(1, is_gated=False), make_result(9, is_gated=False))
    assert not any(change.is_worse(0.1) for change in loose)
    gone = compare.compare(make_result(1), Result("x", ORIGIN, make_result(1).figures[:1]))
    assert [change.key for change in gone if change.is_worse(0.1)] == [("fp32", "fsdp2", "ops")]
    assert "missing" in compare.show(gone, 0.1)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = dataclasses.replace(make_result(3.25), notes=["a note"])
    result.write(tmp_path / "x.json")
    assert Result.read(tmp_path / "x.json") == result
    assert compare.read_results(tmp_path) == {"x": result}
    assert result.to_table().splitlines() == [
        "| case | variant | ops |",
        "| --- | --- | ---: |",
        "| fp32 | torch | 60 |",
        "| fp32 | fsdp2 | 3.25 |",
    ]


def test_a_result_is_as_old_as_what_changed_since(tmp_path: Path) -> None:
    def age(words: str) -> stale.Age:
        path = tmp_path / "wire.md"
        path.write_text(words)
        return stale.age_of(path)

    now = stale.git("rev-parse", "--short=7", "HEAD")
    assert (age(f"commit {now};").commits, age(f"commit {now};").lines) == (0, 0)
    unknown = age("torch 2.13.0, commit 00000ff with changes; a machine")
    assert unknown == stale.Age("wire", "00000ff with changes, not in this clone")
    assert age("no word of it").commit == "none named"


def test_committed_results_can_be_read() -> None:
    for name in quick.BENCHMARKS:
        path = quick.RESULTS / f"{name}.json"
        result = Result.read(path)
        assert result.benchmark == name
        assert any(figure.is_gated for figure in result.figures)
        assert (quick.RESULTS / f"{name}.md").exists()


@pytest.mark.parametrize(
    ("library", "precision"),
    with_slow(
        itertools.product(LIBRARIES, PRECISIONS),
        [("fsdp1", "fp32"), ("torch tuned", "fp32"), ("fsdp2", "bf16")],
    ),
)
def test_every_variant_runs_on_collectives_that_do_nothing(library: str, precision: str) -> None:
    if not applies(library, precision):
        pytest.skip("no such variant")
    with noop.ranks(4) as (group, mesh):
        step = prepare_step(library, SMALL, mesh, bf16=precision == "bf16")
        for _ in range(3):
            step()
        before = group.calls
        step()
        calls = {"plain": 0, "ddp": 1}.get(library, 2 + 3 * SMALL.depth)
        assert group.calls - before == calls


def test_collectives_carry_what_equal_ranks_would_send() -> None:
    with noop.ranks(3) as (group, _):
        whole, part = torch.empty(6), torch.tensor([1.0, 2.0])
        group.all_gather_single(whole, part).wait()
        assert whole.tolist() == [1, 2] * 3
        group.reduce_scatter_single(part, torch.arange(6.0)).wait()
        assert part.tolist() == [0, 1]


def test_copies_are_counted_by_what_ops_read_and_write() -> None:
    source, target = torch.ones(8), torch.empty(8, dtype=torch.float64)
    with CopyCounter() as counter:
        target.copy_(source)  # reads 32 bytes, writes 64
        torch.cat([source, source])  # 64 and 64
        torch.split_with_sizes_copy(source, [4, 4], out=[torch.empty(4), torch.empty(4)])  # 32, 32
        source + source  # no copy
    assert (counter.moved.read, counter.moved.written) == (128, 160)
    with OpCounter() as ops:
        source + source
    assert ops.names == {"aten.add.Tensor": 1}


def test_a_serial_link_overlaps_compute_and_nothing_else() -> None:
    link_, x = Link(VirtualClock(), bandwidth=1.0), torch.ones(2, 2)
    with link_.clock:
        first, second = link_.send(10), link_.send(10)
        assert (first, second) == (10, 20)
        x @ x  # 16 operations
        link_.clock.wait_until(first)
        assert link_.clock.now() == 16
        link_.wait_until_idle()
        assert link_.clock.now() == 20


@pytest.mark.parametrize("library", with_slow(["fsdp1", "torch", "fsdp2"], ["fsdp2"]))
def test_what_goes_over_the_link_is_what_the_limit_says(library: str) -> None:
    size, link_ = Size(depth=2, width=64, hidden=64, vocabulary=64), Link(VirtualClock())
    with noop.ranks(4, lambda rank, n: LinkGroup(rank, n, link_)) as (_, mesh), link_.clock:
        step = prepare_step(library, size, mesh)
        for _ in range(3):
            step()
        before = link_.nbytes
        link.time_step(step, link_)
    least = sharded_bytes_sent(size, 4)
    assert least <= link_.nbytes - before < 1.05 * least


@pytest.mark.slow
def test_emitted_products_and_collectives_move_the_clock_of_the_link() -> None:
    size, link_ = Size(depth=1, width=64, hidden=64, vocabulary=64), Link(VirtualClock())
    with noop.ranks(4, lambda rank, n: LinkGroup(rank, n, link_)) as (_, mesh), link_.clock:
        steps = {
            "plain": prepare_step("plain", size, mesh),
            link.COMPILED: link.prepare_compiled(size, mesh, link_.clock),
        }
        for step in steps.values():
            step()
        link.check_compute(steps, link_)
        compute, before = link.time_step(steps["plain"], link_), link_.nbytes
        link_.bandwidth = 1.0
        took = link.time_step(steps[link.COMPILED], link_)
    torch._dynamo.reset()
    sent, least = link_.nbytes - before, sharded_bytes_sent(size, 4)
    assert least <= sent < 1.05 * least
    assert sent < took <= sent + compute


@pytest.mark.parametrize("library", with_slow(["torch", "fsdp2"], ["fsdp2"]))
def test_emulated_collectives_carry_what_equal_ranks_would(library: str) -> None:
    gradients = {}
    for name in ("plain", library):
        with noop.ranks(2, EmulatedGroup) as (_, mesh):
            model: Any = build(name, SMALL, mesh, bf16=False)
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, 0.1)
            make_step(model, make_input(name, SMALL, bf16=False))()
            grad = model.blocks[0].w2.weight.grad
            gradients[name] = grad if name == "plain" else grad.to_local()
    torch.testing.assert_close(gradients[library], gradients["plain"][: SMALL.width // 2])


def test_emulated_collectives_of_several_pieces_are_those_of_each() -> None:
    """A device sends large parameters in collectives of their own, together."""
    group = EmulatedGroup(0, 3)
    pieces = [torch.arange(2.0), torch.arange(5.0)]
    gathered = [torch.empty(3 * len(piece)) for piece in pieces]
    group.all_gather_single_coalesced(gathered, pieces).wait()
    assert [one.tolist() for one in gathered] == [piece.tolist() * 3 for piece in pieces]
    reduced = [torch.empty(len(piece)) for piece in pieces]
    group.reduce_scatter_single_coalesced(reduced, gathered).wait()
    assert [one.tolist() for one in reduced] == [(3 * piece).tolist() for piece in pieces]
    assert group.calls == 2


def test_peak_counts_gradients_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "MEDIUM", dataclasses.replace(SMALL, width=64))
    plain, ours = (peak.find_peak(name, 4, bf16=False) for name in ("plain", "fsdp2"))
    assert 0 < plain.after_forward < plain.highest
    assert plain.highest >= 4 * peak.MEDIUM.numel  # every gradient, whole
    assert ours.highest > 0


@pytest.mark.slow
def test_state_is_saved_and_loaded_by_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SIZE", dataclasses.replace(SMALL, width=64))
    monkeypatch.setattr(state, "CAPS", (50_000,))
    arguments = argparse.Namespace(libraries=["torch", "fsdp2"], ranks=2, rounds=1)
    found = {(f.case, f.variant) for f in state.measure(arguments).figures}
    assert found == {
        ("full save, N=2", "torch"),
        ("full load, N=2", "torch"),
        ("sharded save, N=2", "torch"),
        ("sharded load, N=2", "torch"),
        ("full save, N=2", "fsdp2, cap 0 MB"),
        ("full load, N=2", "fsdp2, cap 0 MB"),
        ("sharded save, N=2", "fsdp2"),
        ("sharded load, N=2", "fsdp2"),
        ("sharded load, no sums, N=2", "fsdp2"),
    }


def test_padding_of_small_blocks_on_many_ranks_is_not_allocated_in_a_step() -> None:
    """Groups use the same buffers one after another, and unsharded parameters have no padding."""
    few, many = (
        scale.memory_of("fsdp2", ranks, blocks=3)[scale.ALLOCATED] for ranks in (128, 1024)
    )
    assert many == few < 0.2  # each block gathers 0.6 MB twice, and reduces 1 MB


@pytest.mark.slow
def test_tables_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    few = argparse.Namespace(
        libraries=["plain", "fsdp2"], world_sizes=[4], save=False, wall=False, rounds=2
    )
    monkeypatch.setattr(copies, "MEDIUM", SMALL)
    monkeypatch.setattr(copies, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(link, "VIRTUAL", SMALL)
    monkeypatch.setattr(link, "GROUPINGS", ("default",))
    monkeypatch.setattr(scale, "points", lambda: [scale.Point("ranks", 4, 4, 2)])
    monkeypatch.setattr(scale, "MEMORY_RANKS", ())
    for module in (copies, link, scale):
        measured = module.measure(few)
        table = Result("x", ORIGIN, measured.figures).to_table()
        assert "| fsdp2 |" in table
        assert any(figure.is_gated for figure in measured.figures)


@pytest.mark.slow
def test_a_compiled_step_is_split_into_parts_and_its_nodes_are_counted() -> None:
    outcome = compile_worker.run(compile_worker.Task(depth=1, stubbed=True))
    torch._dynamo.reset()
    assert outcome.error == ""
    parts = sum(outcome.seconds.values())
    assert all(seconds >= 0 for seconds in outcome.seconds.values())
    assert 0 < parts <= outcome.first_s
    assert outcome.nodes["forward graphs"] == outcome.nodes["backward graphs"] == 1
    assert 0 < outcome.nodes["dynamo"] < outcome.nodes["forward"] < outcome.nodes["backward"]


def test_rounds_rotate_and_ratios_are_taken_by_round() -> None:
    order: list[str] = []

    def called(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = rotate(2, {name: lambda name=name: called(name) for name in "ab"})
    assert order == ["a", "b", "b", "a"]
    assert values == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert spread([2.0, 4.0, 6.0], [1.0, 1.0, 2.0]).value == 3.0
    assert gloo.choose_rounds([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], cores=2) == [1, 2, 3, 4, 5]
    assert gloo.choose_rounds([9.0, 1.0], cores=2) == [0, 1]


@ranks(2)
def test_a_walk_counts_the_calls_of_a_library(rank: int, world_size: int) -> None:
    for library in walk.MODULES:
        found = walk.walk(rank, world_size, library)
        for calls, changes in found.values():
            assert 0 < changes < len(calls)
            assert all("fsdp" in file and not name.endswith(">") for file, name in calls)
        hook = "pre_forward" if library == "fsdp2" else "FSDPState._pre_forward"
        assert [name for _, name in found["forward"][0]].count(hook) == 5


def test_the_check_is_skipped_where_figures_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(quick, "RESULTS", tmp_path)
    assert quick.find_obstacle() is not None  # nothing committed, or a torch for GPUs
    make_result(1).write(tmp_path / "host.json")
    left_out = quick.find_left_out(["host", "ops"], is_check=True)
    assert set(left_out) == {"host", "ops"}


def test_offloading_is_measured_in_a_small_form_without_a_gpu() -> None:
    measured = offload.measure(
        argparse.Namespace(tiny=True, only=None, blocks=2, tokens=32, rounds=1)
    )
    losses = {f.variant: f.value for f in measured.figures if f.quantity == "last loss"}
    assert len(losses) == len(offload.VARIANTS)
    assert len(set(losses.values())) == 1
