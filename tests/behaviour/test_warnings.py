"""Promise: a warning is shown once in a job, where the user's own line led to it."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2._base.warn import warn
from tests._pool import ranks


def shown(text: str, *, action: str = "always") -> list[warnings.WarningMessage]:
    """Return what this rank shows of a warning, as a user's program would."""
    alone = {name: value for name, value in os.environ.items() if name != "FSDP2_WARNINGS"}
    environment = mock.patch.dict(os.environ, alone, clear=True)
    with environment, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        warn("FS709", text)
    return found


def on_all(count: int) -> list[int]:
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return counts


@ranks(3)
def test_the_first_rank_shows_what_all_ranks_warn_of() -> None:
    assert on_all(len(shown("one for all"))) == [1, 0, 0]
    assert on_all(len(shown("one for all"))) == [1, 0, 0], "as often as it is issued"


@ranks(3)
def test_what_the_first_rank_does_not_come_to_another_one_shows() -> None:
    later = dist.get_rank() != 0
    counts = on_all(len(shown("of later stages")) if later else 0)
    assert sorted(counts) == [0, 0, 1]
    texts = on_all(len(shown(f"of rank {dist.get_rank()}")))
    assert texts == [1, 1, 1], "other words are another warning"


@ranks(2)
def test_a_filter_that_makes_errors_of_warnings_does_so_on_every_rank() -> None:
    with pytest.raises(UserWarning, match="an error on all"):
        shown("an error on all", action="error")


def test_without_ranks_every_process_warns() -> None:
    (found,) = shown("alone")
    assert Path(found.filename).name == "test_warnings.py"


@ranks(2)
def test_a_warning_in_a_step_names_the_line_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    with pytest.warns(UserWarning, match=r"^0: runs a forward by itself before Sequential") as seen:
        x = model[0](torch.ones(2, 13))
    assert [Path(one.filename).name for one in seen] == ["test_warnings.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once for the model
        model[2](model[1](x)).sum().backward()
    with pytest.raises(fsdp2.StateError, match="FS304"):
        model(torch.ones(2, 13))


@ranks(2)
def test_nothing_is_said_where_no_unit_contains_the_module() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13))
    for layer in model:
        fsdp2.fully_shard(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[1](model[0](torch.ones(2, 13)))
        whole = nn.Sequential(nn.Linear(13, 13))
        fsdp2.fully_shard(whole[0])
        fsdp2.fully_shard(whole)
        copy.deepcopy(whole[0])(torch.ones(2, 13))  # it has the name, and is of no model
