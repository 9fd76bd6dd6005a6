"""When Ctrl-C takes effect, in one process: once, where it was kept for, and never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp2._core.base.interrupts import kept_interrupts, take_interrupt
from fsdp2._core.comm.process_mesh import Grid, operation

ALONE = Grid(())


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    assert take_interrupt() is None


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_when_the_outermost_operation_is_done() -> None:
    done = []

    @operation("outer")
    def run() -> None:
        with operation("inner"):
            press()
            done.append("inner")
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["inner", "outer"]


def test_ranks_are_told_at_their_next_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Grid, "_tell", lambda self, error, *_: told.append(error))
    done = []

    @operation("save")
    def run() -> None:
        press()
        with ALONE.together("save"):
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == [1]
    assert [type(error) for error in told] == [KeyboardInterrupt]


def test_a_second_one_is_raised_at_once() -> None:
    done = []

    @operation("save")
    def run() -> None:
        press()
        done.append(1)
        press()
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == [1]


def test_it_is_raised_though_the_operation_fails() -> None:
    @operation("save")
    def run() -> None:
        press()
        raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    assert isinstance(raised.value.__context__, ValueError)


def test_one_that_is_left_pending_is_raised_by_the_next_operation() -> None:
    with kept_interrupts(leave_pending=True):
        press()
    with pytest.raises(KeyboardInterrupt), operation("save"):
        pass


def test_a_handler_of_the_users_stays() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with operation("save"):
            press()
            assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_keep_nothing() -> None:
    failures: list[BaseException] = []

    def save() -> None:
        try:
            with operation("save"):
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert not failures
