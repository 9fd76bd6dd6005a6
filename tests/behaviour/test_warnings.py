"""Promise: a warning is shown once in a job, where the user's own line led to it."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2._core.base.warn import warn
from tests.behaviour.test_lifetime import COPIES
from tests.kit.in_turn import shard_each
from tests.kit.pool import ranks


def shown(text: str) -> list[str]:
    """Return what this rank prints of a warning, without filters, as Python starts with for it."""
    alone = {name: value for name, value in os.environ.items() if name != "FSDP2_WARNINGS"}
    with (
        mock.patch.dict(os.environ, alone, clear=True),
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
        warnings.resetwarnings()
        warn("FS709", text)
    return [line for line in printed.getvalue().splitlines() if "[FS709]" in line]


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="an error on all"):
            warn("FS709", "an error on all")


def recorded(text: str) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        warn("FS709", text)
    return len(found)


def expected(text: str) -> int:
    with pytest.warns(UserWarning, match=text) as found:
        warn("FS709", text)
    return len(found)


def logged(text: str) -> int:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("py.warnings")
    logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        shown(text)
    finally:
        logging.captureWarnings(False)
        logger.removeHandler(handler)
    return len(found)


def filtered(text: str) -> int:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.resetwarnings()
        warnings.filterwarnings("always", message=text[:4])
        warn("FS709", text)
    return printed.getvalue().count("[FS709]")


@ranks(2)
def test_a_rank_that_looks_at_warnings_sees_its_own() -> None:
    alone = {name: value for name, value in os.environ.items() if name != "FSDP2_WARNINGS"}
    with mock.patch.dict(os.environ, alone, clear=True):
        for way in (recorded, expected, logged, filtered):
            assert on_all(way(f"seen by {way.__name__}")) == [1, 1], way
            assert on_all(len(shown(f"seen by {way.__name__}"))) == [1, 0], way


@ranks(1, with_process_group=False)
def test_without_ranks_every_process_warns() -> None:
    (found,) = shown("alone")
    assert Path(found.partition(":")[0]).name == "test_warnings.py"


@ranks(1, with_process_group=False)  # pytest records warnings of its own process
def test_threads_that_hide_a_warning_at_once_hide_nothing_else() -> None:
    """The first one to begin ends first, when the other one has seen what it put there."""
    both, first_is_over = threading.Barrier(2, timeout=60), threading.Event()

    class Slow(UserWarning):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            if "first" not in text:
                both.wait()
                assert first_is_over.wait(60)
            elif "other" not in text:
                other.start()
                both.wait()

    def hide(text: str) -> None:
        warn("FS709", text, Slow)
        if text == "first":
            first_is_over.set()

    other = threading.Thread(target=hide, args=("second",))
    with (
        mock.patch("fsdp2._core.base.warn._is_shown_here", return_value=False),
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
        warnings.resetwarnings()
        hide("first")
        other.join()
        assert not printed.getvalue()
        warnings.warn("from the program", stacklevel=1)
    assert printed.getvalue().count("Warning: ") == 1


@ranks(2, with_process_group=False)
def test_each_process_group_of_a_job_learns_anew_who_shows(rank: int, tmp_path: Path) -> None:
    """A rank that was not the first one may be the first one of what is left."""
    for count, place in enumerate((rank, 1 - rank, rank)):
        where = f"file://{tmp_path}/{count}"
        dist.init_process_group("gloo", init_method=where, rank=place, world_size=2)
        assert on_all(len(shown("again"))) == [1, 0]
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert len(shown("again")) == 1
    dist.destroy_process_group()


@ranks(2)
def test_a_store_that_is_gone_is_asked_once() -> None:
    """Torch writes of each attempt at length. Every rank shows what it warns of then."""
    store = mock.Mock()
    store.check.side_effect = store.set.side_effect = dist.DistStoreError("gone")
    with mock.patch("fsdp2._core.base.torch_comm.default_store", return_value=store):
        assert [len(shown(f"gone {place}")) for place in range(3)] == [1, 1, 1]
    assert len(store.method_calls) == 1


@ranks(2)
def test_a_warning_of_a_context_manager_names_the_line_of_the_user() -> None:
    model = fsdp2.fully_shard(nn.Linear(13, 13))
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        pytest.warns(UserWarning, match="FS309") as seen,
        fsdp2.summon_full_params(model, offload_to_cpu=True),
    ):
        pass
    assert [Path(one.filename).name for one in seen] == ["test_warnings.py"]


@ranks(2)
def test_a_warning_in_a_step_names_the_line_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13))
    shard_each(*model, model)
    with pytest.warns(UserWarning, match=r"^0: ran a forward on its own before Sequential") as seen:
        x = model[0](torch.ones(2, 13))
    assert [Path(one.filename).name for one in seen] == ["test_warnings.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once for the model
        model[2](model[1](x)).sum().backward()
    with pytest.raises(fsdp2.StateError, match="FS304"):
        model(torch.ones(2, 13))


@ranks(2)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_it_is_said_of_a_copy_too(copied: Callable[[nn.Module], Any]) -> None:
    model: Any = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13))
    shard_each(*model)
    other: Any = copied(fsdp2.fully_shard(model))
    with pytest.warns(UserWarning, match=r"^0: ran a forward on its own before Sequential"):
        other[0](torch.ones(2, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 13)).sum().backward()


@ranks(2)
def test_nothing_is_said_where_no_unit_contains_the_module() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13))
    shard_each(*model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[1](model[0](torch.ones(2, 13)))
        whole = nn.Sequential(nn.Linear(13, 13))
        fsdp2.fully_shard(whole[0])
        fsdp2.fully_shard(whole)
        copy.deepcopy(whole[0])(torch.ones(2, 13))  # it has the name, and is of no model
