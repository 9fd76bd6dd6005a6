"""Lanes of rows, observers of objects, and the file of a rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.events import Observable
from fsdp2._tools.record.rows import FORMAT, Writer, files_in, read_file, write_beside
from fsdp2._tools.record.time_line import pieces_of


def span(n: int, kind: str, unit: str, begin: int, end: int | None, **more: Any) -> dict[str, Any]:
    row = {"n": n, "kind": kind, "unit": unit, "begin_ns": begin, "end_ns": end, "nbytes": 8}
    return {**row, **more}


def lanes(*rows: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(piece.name, piece.begin, piece.end) for piece in pieces_of(rows)]


def test_the_innermost_unit_is_shown_and_waits_are_cut_out() -> None:
    wait = {"for": "all_gather", "by": "a", "prefetch": "late"}
    found = lanes(
        span(1, "forward", "", 0, 100),
        span(2, "forward", "a", 30, 60),
        span(3, "wait", "a", 20, 30, **wait),
        span(4, "unshard", "a", 5, 30, collective="all_gather"),
    )
    assert found == [
        ("forward <root>", 0, 20),
        ("forward a", 30, 60),
        ("forward <root>", 60, 100),
        ("wait for all_gather a", 20, 30),
        ("all_gather a", 5, 30),
    ]


def test_backwards_end_in_another_order_than_they_began() -> None:
    """The root's ends a moment before that of the first block: no tree, and no overlap."""
    found = lanes(span(1, "backward", "", 0, 90), span(2, "backward", "a", 40, 100))
    assert found == [("backward <root>", 0, 40), ("backward a", 40, 100)]


def test_what_has_no_end_is_no_piece() -> None:
    assert lanes(span(1, "forward", "", 0, None), span(2, "reduce", "", 3, None)) == []


def test_what_takes_no_time_is_no_piece() -> None:
    """Its end sorts before its begin; nothing after the last unit is shown as this unit's."""
    wait = span(2, "wait", "a", 8, 9, **{"for": "all_gather", "by": "a"})
    assert lanes(span(1, "forward", "a", 5, 5), wait) == [("wait for all_gather a", 8, 9)]


def test_a_wait_over_several_pieces() -> None:
    wait = {"for": "reduce_scatter", "by": ""}
    found = lanes(
        span(1, "backward", "a", 0, 50),
        span(2, "backward", "b", 50, 100),
        span(3, "wait", "c", 40, 70, **wait),
        span(4, "wait", "c", 80, 80, **wait),
    )
    assert found == [
        ("backward a", 0, 40),
        ("backward b", 70, 100),
        ("wait for reduce_scatter c", 40, 70),
    ]


class Thing(Observable):
    def __init__(self) -> None:
        self.log: list[str] = []

    def _act(self, what: str) -> str:
        self.log.append(what)
        return what

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {"act": _act}


class Around:
    """Notes what it is around."""

    def __init__(self, name: str) -> None:
        self.name = name

    def around(self, kind: str, source: Any, call: Callable[..., Any], *args: Any) -> Any:
        source.log.append(f"{self.name} before {kind}")
        done = call(*args)
        source.log.append(f"{self.name} after")
        return done


def test_observers_come_and_go_in_any_order() -> None:
    """Only the object that is observed has anything in the place of its method."""
    thing, other = Thing(), Thing()
    first, second = Around("first"), Around("second")
    thing.observe(first)
    thing.observe(second)
    assert thing._act("x") == "x"
    before = ["second before act", "first before act"]
    assert thing.log == [*before, "x", "first after", "second after"]
    assert "_act" not in vars(other)
    thing.leave(first)
    thing.log.clear()
    thing._act("y")
    assert thing.log == ["second before act", "y", "second after"]
    thing.leave(second)
    assert "_act" not in vars(thing)


def header(**more: Any) -> str:
    told = {"kind": "header", "format": FORMAT, "rank": 0, "world_size": 1, "epoch_ns": 0}
    told |= {"host": "h", "fsdp2": "0", "torch": "2", "model": "Net", "axes": [[]], "groups": []}
    return json.dumps({**told, **more}) + "\n"


def line(n: int, kind: str, **more: Any) -> str:
    row = {**span(n, kind, "a", 0, 1), "phase": "forward", "step": 1, "round": 0}
    return json.dumps({**row, **more}) + "\n"


def test_lines_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = Writer(path)
    writer.add(header())
    wait = {"for": "all_gather", "by": "a"}
    writer.add(line(2, "forward"))
    writer.add(line(1, "waiting", **wait))
    writer.add(line(3, "waiting", **wait))
    writer.add(line(1, "wait", **wait))
    assert path.read_text() == ""
    writer.flush()
    writer.add('{"n": 4, "kind": "torn"')
    writer.close()
    found = read_file(path)
    kinds = [(row["n"], row["kind"]) for row in found.rows]
    assert kinds == [(1, "wait"), (2, "forward"), (3, "waiting")]
    with pytest.raises(ConfigError, match=r"without a recording of this rank, found rank0\.jsonl"):
        Writer(path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}\n", "no json\n", "[" * 10**5 + "\n", "7\n"),
        *(header(format=99), header(rank=-1), header(rank="0"), header(host=7), header(groups=[7])),
        *(header() + "broken\n" + line(1, "forward"), header() + "7\n", header() + "{}\n"),
        *(header() + line(1, "wait"), header() + line(1, "wait", by="a", **{"for": "nothing"})),
        *(header() + line(1, "forward", begin_ns="1"), header() + line(1, "step")),
        *(header() + line(1, "reduce", nbytes=10**40), header() + line(1, "x", step=None)),
        header() + line(1, "forward", communication_nbytes=8),
    ],
)
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"read_recordings: expected .*rank0\.jsonl"):
        read_file(path)


def test_files_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no rank\*\.jsonl"):
        files_in([tmp_path])
    path = tmp_path / "rank3.jsonl"
    path.write_text("")
    assert files_in([tmp_path, path]) == [path]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_beside(path, "one", [], "trace")
    write_beside(path, "two", [], "trace")
    assert path.read_text() == "two"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_beside(tmp_path / "nowhere" / "trace.json", "x", [], "trace")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_beside(tmp_path, "x", [], "trace")
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """Ranks on several machines may have one process id: threads stand for them."""
    path = tmp_path / "run.html"

    def write(word: str) -> None:
        for _ in range(200):
            write_beside(path, word * 1000, [], "html")

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, word) for word in "abcd"]:
            done.result()
    assert len(set(path.read_text())) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["run.html"]
