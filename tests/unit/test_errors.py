from __future__ import annotations

import copy
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    FSDPError,
    LostRank,
    StateError,
    UnsupportedError,
    known_of,
)

CLOSED = "it closed the connection. Its program ended (did it have fewer batches?)"
TREE = {ConfigError: ValueError, StateError: RuntimeError, UnsupportedError: NotImplementedError}


@pytest.mark.parametrize(("error", "builtin"), TREE.items(), ids=lambda e: e.__name__)
def test_an_error_is_ours_and_the_builtin_that_programs_catch(
    error: type[FSDPError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="what to do") as caught:
        raise error("FS101", "fqn: found this. Here is what to do.")
    assert isinstance(caught.value, FSDPError)


def test_a_wrong_type_is_a_type_error_too() -> None:
    """Programs that catch what torch's own functions raise catch it, and as a ConfigError."""
    for kind in (ConfigError, TypeError, ValueError, FSDPError):
        with pytest.raises(kind, match="found 1"):
            raise ConfigTypeError("FS101", "expected steps to be an int, found 1.5.")
    assert not issubclass(ConfigError, TypeError)


def test_the_classes_tell_callers_mistakes_apart() -> None:
    """UnsupportedError is a RuntimeError too, as NotImplementedError is; nothing else overlaps."""
    for error in TREE:
        assert [other for other in TREE if issubclass(error, other)] == [error]
        assert not issubclass(error, AssertionError)
    assert not issubclass(ConfigError, RuntimeError)
    assert not issubclass(StateError, ValueError)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": lambda e, n=n: pickle.loads(pickle.dumps(e, n)) for n in range(6)},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "error",
    [
        *(kind("FS101", "a: found b.") for kind in (*TREE, ConfigTypeError)),
        LostRank("Connection closed", ("save", "first rank")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_goes_to_another_process_whole(
    error: FSDPError, copied: Callable[[Any], Any]
) -> None:
    error.__notes__ = ["a note"]  # type: ignore[attr-defined]  # as add_note of Python 3.11 does
    there = copied(error)
    assert type(there) is type(error)
    assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


def test_a_message_ends_with_its_code() -> None:
    error = StateError("FS301", "save: called during a backward.")
    assert str(error) == "save: called during a backward. [FS301]"
    assert error.args == (str(error),)
    assert (error.code, error.text) == ("FS301", "save: called during a backward.")
    lost = LostRank("some words")
    assert lost.code == "FS402"
    assert str(lost).startswith("a collective: another rank did not take part. It has exited")
    assert str(lost).endswith("The backend reported: some words [FS402]")


@pytest.mark.parametrize(
    ("cause", "known"),
    [
        ("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:40312", CLOSED),
        ("[/gloo/pair.cc:534] Read error [10.0.0.1]:1234: Connection reset by peer", CLOSED),
        ("writev [10.0.0.1]:1234: Broken pipe", CLOSED),
        ("failed to recv, got 0 bytes", CLOSED),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exited or there was a network problem.",
            CLOSED,
        ),
        ("[/gloo/buffer.cc:81] Timed out waiting 2000ms for recv operation to complete", "2 s"),
        ("wait timeout after 300000ms, keys: /default_pg/0//cpu//3/rank_1", "300 s"),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
            "Timeout(ms)=600000) ran for 600071 milliseconds before timing out.",
            "600 s",
        ),
        ("Gloo connectFullMesh failed with something", ""),
    ],
)
def test_what_a_backend_tells_comes_first(cause: str, known: str) -> None:
    """A peer that is gone, or how long nothing came, before any guess at the program."""
    if known.endswith(" s"):
        known = f"no data arrived from it for {known}."
    assert known_of(cause).startswith(known)
    assert bool(known_of(cause)) == bool(known)
    text = str(LostRank(cause, ("save",)))
    assert text.startswith(f"save: another rank did not take part{': ' if known else ''}{known}")
    assert text.index(known) < text.index("rank == 0")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from 3.11 on")
def test_a_traceback_says_how_to_look_a_code_up() -> None:
    error = StateError("FS301", "save: called during a backward.")
    assert "explain FS301" not in str(error)
    assert (
        traceback.format_exception(error)[-1]
        == "For details, run `python -m fsdp2 explain FS301`.\n"
    )
    assert copy.copy(error).__notes__ == error.__notes__  # once


def test_an_error_without_a_code_cannot_be_made() -> None:
    for kind in TREE:
        with pytest.raises(TypeError, match="text"):
            kind("a: found b.")  # type: ignore[call-arg]  # the point of the test
