"""Promise: the page of a plan shows what the plan says, for each memory setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn

import fsdp2
from fsdp2 import ConfigError
from fsdp2._tools.pages.content import KINDS, Page
from tests.behaviour.test_plan import TOKENS, Block, Model


def plan(**given: object) -> fsdp2.plans.Plan:
    asked = {"mesh": 16, "policy": {Block}, "batch": TOKENS, "optimizer": torch.optim.AdamW}
    return fsdp2.plan(Model(), **{**asked, **given})


def facts(page: Page) -> dict[str, str]:
    return {fact.name: fact.value for fact in page.facts}


def test_a_page_has_what_the_plan_has() -> None:
    found = plan(hardware="h100-nvlink-ib")
    page = found.page(budget="1GB")
    assert page.title.startswith("Plan: ")
    assert "16 ranks (16)" in page.title
    assert page.subtitle == "as on rank 0 · h100-nvlink-ib"
    assert [unit.name for unit in page.units] == [group.name for group in found.groups]
    assert [tab.name for tab in page.memory] == ["balanced", "fast", "low"]
    assert [line.name for line in page.time_lines] == ["balanced", "fast", "low"]
    assert page.advice == found.advice("1GB")
    for tab in page.memory:
        step = found.changed(memory=tab.name).step
        assert tab.kinds == KINDS
        assert tab.limit_nbytes == 10**9
        assert max(sum(moment.nbytes) for moment in tab.moments) == step.highest_nbytes
        times = [moment.time for moment in tab.moments]
        assert times == sorted(times)
        assert times[-1] == step.seconds
    assert facts(page)["collectives"] == str(len(found.step.collectives))


def test_kinds_add_up() -> None:
    """At each point the kinds are all that is alive; at the end only what stays is."""
    step = plan().step
    for point in step.memory:
        assert sum(point.by_kind) == point.nbytes
        assert sum(point.peak_by_kind) == point.peak_nbytes >= point.nbytes
        assert min(point.by_kind) >= 0
    last = dict(zip(step.kinds, step.memory[-1].by_kind, strict=True))
    groups = plan(batch=None, optimizer=None).groups
    assert last["parameters"] == sum(group.shard_nbytes for group in groups)
    assert last["optimizer state"] == step.optimizer_nbytes
    assert last["gathered parameters"] == 0
    assert last["communication"] == 0
    assert last["activations"] < 1000  # the loss, and what the optimizer counts
    assert step.start_nbytes == sum(step.memory[-1].by_kind)


def test_a_page_without_a_step() -> None:
    page = plan(batch=None, optimizer=None).page()
    assert page.memory == page.time_lines == ()
    assert page.units
    assert "peak of a step" not in facts(page)


def test_a_file(tmp_path: Path) -> None:
    found = fsdp2.plan(nn.Linear(13, 29), mesh=3, batch=torch.zeros(2, 13))
    path = tmp_path / "plan.html"
    path.write_text("before")
    found.html(path)
    text = path.read_text()
    assert text.lower().startswith("<!doctype html>")
    assert "Plan: 406 parameters over 3 ranks" in text
    assert [one.name for one in tmp_path.iterdir()] == ["plan.html"]
    with pytest.raises(ConfigError, match=r"Plan\.html"):
        found.html("")
    with pytest.raises(OSError, match="nowhere"):
        found.html(tmp_path / "nowhere" / "plan.html")
    assert found._repr_html_().startswith("<iframe")
