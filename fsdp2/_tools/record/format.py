"""What a header and a row must have: a file is looked at once, before anybody uses what it says.

Owns the form of a recording's lines. It must not know what they are read for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from fsdp2._tools.record.steps import COLLECTIVES, RecordedStep

FORMAT = 1
MOST = 1 << 62
"""No number of a recording is as large: sums of such numbers are numbers, too."""

MOST_RANKS = 1 << 20

Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < MOST


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value) and abs(value) < MOST)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_time(value: Any) -> bool:
    return value is None or _is_int(value)


def _is_rank(value: Any) -> bool:
    return _is_count(value) and value < MOST_RANKS


def _one_of(*values: Any) -> Check:
    return lambda value: type(value) is type(values[0]) and value in values


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _is_dict(value: Any) -> bool:
    return type(value) is dict


HEADER: Mapping[str, Check] = {
    "kind": _one_of("header"),
    "format": _one_of(FORMAT),
    "rank": _is_rank,
    "world_size": _is_count,
    "host": _is_text,
    "fsdp2": _is_text,
    "torch": _is_text,
    "model": _is_text,
    "epoch_ns": _is_int,
    "axes": _list_of(_list_of(_is_rank)),
    "groups": _list_of(_is_dict),
}
GROUP: Mapping[str, Check] = {
    "name": _is_text,
    "dtypes": _list_of(_is_text),
    "mesh": lambda value: _list_of(_is_count)(value) and len(value) == 2,
    **dict.fromkeys(("parameters", "numel", "shard_axis", "replicate_axis"), _is_count),
    **dict.fromkeys(("whole_nbytes", "shard_nbytes", "padding_nbytes"), _is_count),
}
ROW: Mapping[str, Check] = {
    "n": _is_int,
    "kind": _is_text,
    "unit": _is_text,
    "phase": _is_text,
    "step": _is_count,
    "begin_ns": _is_time,
    "end_ns": _is_time,
}
EVENT: Mapping[str, Check] = {"nbytes": _is_count, "round": _is_count}
STEP: Mapping[str, Check] = {
    "failed": _one_of(True, False),
    "begin_ns": _is_int,
    "end_ns": _is_int,
    **{one.name: _is_number for one in dataclasses.fields(RecordedStep) if one.name != "number"},
}
WAIT: Mapping[str, Check] = {"for": _one_of(*COLLECTIVES), "by": _is_text}
MEMORY: Mapping[str, Check] = {"gathered_nbytes": _is_int, "communication_nbytes": _is_int}
IF_THERE: Mapping[str, Check] = {
    "allocated_nbytes": _is_int,
    "host_ns": _is_int,
    "prefetch": _one_of("hit", "late", "none"),
    "collective": _is_text,
}


def check_header(header: Any) -> None:
    """Raise ValueError for what is no header."""
    _require(header, HEADER)
    for group in header["groups"]:
        _require(group, GROUP)
        if max(group["shard_axis"], group["replicate_axis"]) >= len(header["axes"]):
            raise ValueError("a group is on an axis that is not there")


def check_row(row: Any) -> None:
    """Raise ValueError for what is no row."""
    _require(row, ROW)
    if row["kind"] == "step":
        _require(row, STEP)
        return
    _require(row, EVENT)
    if row["kind"] in ("wait", "waiting"):
        _require(row, WAIT)
    if "communication_nbytes" in row:
        _require(row, MEMORY)
    for name, check in IF_THERE.items():
        if name in row and not check(row[name]):
            raise ValueError(f"{name} is none")


def _require(found: Any, form: Mapping[str, Check]) -> None:
    if type(found) is not dict:
        raise ValueError("a line is no object")
    for name, check in form.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if not check(found[name]):
            raise ValueError(f"{name} is something else")
