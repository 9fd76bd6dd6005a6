"""Compare two recordings of digests: find the first unit, slot and step at which they differ.

Reads the files of a run, and defines the order of computations. Needs no process group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp2._core.base.errors import ConfigError, check_path, wrong_type
from fsdp2._core.base.names import printable
from fsdp2._tools.record.bits import FORMAT, STEP_ROW, BitsRecording

MODULUS = 1 << 64


class Key(NamedTuple):
    """Identifies a digest. ``number`` is the index of the unit's forward in the slot."""

    step: int
    slot: int
    what: str
    unit: str
    number: int


@dataclass(frozen=True)
class SameBits:
    """The result of ``fsdp2.debug.same_bits``: true if both runs have the same bits.

    ``step``, ``slot``, ``unit`` and ``what`` describe the first difference, and are None if the
    runs are equal. ``slot`` is also None if the difference is in the sum over slots or an update.
    ``compared`` is the number of equal digests before the difference. ``notes`` lists differences
    between the programs, such as versions or numbers of threads.
    """

    step: int | None
    slot: int | None
    unit: str | None
    what: str | None
    found: str
    compared: int
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.step is None

    def __str__(self) -> str:
        return "\n".join([self.found, *(f"note: {note}" for note in self.notes)])


class _Run:
    """The digests of a run, summed over its ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: dict[str, Any] = {}
        self.order: dict[Key, int] = {}
        self._sums: dict[Key, dict[int, int]] = {}
        files = [folder] if folder.is_file() else sorted(folder.glob("bits*.jsonl"))
        if not files:
            raise _unreadable(folder, "it contains no bits*.jsonl")
        for file in files:
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            header, *rows = _lines(file)
            if not isinstance(header, dict) or header.get("bits") != FORMAT:
                raise ValueError(f"its first line is not of format {FORMAT}")
            self.header = self.header or header
            for row in rows:
                step, slot, what, unit, number, replica, digest = row
                key = Key(int(step), int(slot), str(what), str(unit), int(number))
                self.order.setdefault(key, len(self.order))
                sums = self._sums.setdefault(key, {})
                sums[replica] = (sums.get(replica, 0) + int(digest)) % MODULUS
        except (OSError, ValueError, TypeError) as error:
            raise _unreadable(file, printable(error)) from error

    def digests(self, key: Key) -> set[int]:
        """Return the distinct digests of all replicas: a single digest if replicas are equal."""
        return set(self._sums.get(key, {}).values())

    @property
    def steps(self) -> set[int]:
        return {key.step for key in self.order}


def _lines(file: Path) -> list[Any]:
    with open(file, encoding="utf-8") as opened:
        # the last line of a killed run may be incomplete
        whole = [line for line in opened if line.endswith("\n")]
    if not whole:
        raise ValueError("it is empty")
    return [json.loads(line) for line in whole]


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "FS914",
        f"same_bits: {printable(path)} cannot be read ({why}). Pass folders that "
        "fsdp2.debug.record_bits wrote.",
    )


def same_bits(
    a: str | os.PathLike[str] | BitsRecording, b: str | os.PathLike[str] | BitsRecording
) -> SameBits:
    """Compare two recordings made by ``record_bits``, on the same or different numbers of ranks.

    Returns the first unit, slot and step that differ, in the order in which a single process would
    compute all slots: forwards, then gradients, then the sum over slots, then the update. If the
    first difference is in a unit's outputs, its cause is inside that unit, because its inputs are
    other units' outputs. Only steps that are in both recordings are compared.

    ``python -m fsdp2 compare run1 run2`` prints the result.

    Args:
        a: the path that was passed to ``record_bits``, with the files of all ranks; or, for a
            single process, the result of ``record_bits``.
        b: the same for the other run.

    Raises:
        ConfigError: a folder has no recording; the runs differ in slots, or have no common step.
    """
    runs = [_Run(_path_of(one)) for one in (a, b)]
    first, second = runs
    slots = [run.header.get("slots") for run in runs]
    if slots[0] != slots[1]:
        raise _unreadable(second.folder, f"it has {slots[1]} slots, the other run has {slots[0]}")
    steps = first.steps & second.steps
    if not steps:
        raise _unreadable(second.folder, "the runs have no common step")
    compared = 0
    notes = tuple(_notes(first.header, second.header))
    order = second.order | first.order  # in the order of a process that runs all slots
    for key in sorted(order, key=lambda k: (k.step, k.slot == STEP_ROW, k.slot, order[k])):
        if key.step not in steps:
            continue
        found = _difference(key, *runs)
        if found:
            slot = None if key.slot == STEP_ROW else key.slot
            where = f"step {key.step}" + ("" if slot is None else f", slot {slot}")
            text = f"The runs diverge in {where}, at the {key.what} of {key.unit}: {found}."
            return SameBits(key.step, slot, key.unit, key.what, text, compared, notes)
        compared += 1
    text = f"The same bits: {compared} digests of {len(steps)} steps are equal."
    return SameBits(None, None, None, None, text, compared, notes)


def _path_of(one: object) -> Path:
    if isinstance(one, BitsRecording):
        return one.path
    if not isinstance(one, str | os.PathLike):
        raise wrong_type("same_bits", "a recording", "a path or a recording", one)
    return Path(check_path("same_bits", "a recording", one))


def _difference(key: Key, a: _Run, b: _Run) -> str:
    """Describe the difference between two runs' digests, or return "" if they are equal."""
    for run in (a, b):
        if len(run.digests(key)) > 1:
            return f"its replicas differ from each other in {run.folder}"
        if not run.digests(key):
            return f"missing in {run.folder}"
    (one,), (other,) = a.digests(key), b.digests(key)
    return "" if one == other else f"{one:016x} and {other:016x}"


def _notes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for name in ("seed", "torch", "threads", "processor"):
        if a.get(name) != b.get(name):
            yield f"{name}: {a.get(name)} and {b.get(name)}"
