"""Every kind of file that the package reads from others, and how one is written, changed and read.

Half of the changes of a checkpoint are *accidents*: its checksums are as they were, so what loads
must be what was saved, bit for bit. The others are *forged*: somebody has changed checksums too, or
has left them out, and what loads may be anything that is plain data.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint._checksums import split, tail_of
from tests.behaviour.test_checkpoint_damage import Run, made
from tests.hostile import _mutate
from tests.hostile._mutate import Change, Draw

SAME, OTHER, CHANGED, SILENT = "as saved", "other values", "changed, and refused", "wrong values"
TEXT = (*(_mutate.value,) * 5, *_mutate.BYTES)
EXTRA = {"step": 3, "rng": torch.arange(64, dtype=torch.uint8), "names": ["a", "b"], "sets": {1, 2}}


@dataclass
class Case:
    """A file to be changed, and what reads it.

    ``read``: says what came of it. ``change``: returns other content, from a seed; sets
    ``is_forged``.
    """

    path: Path
    content: bytes
    change: Callable[[Draw], bytes]
    read: Callable[[], str]
    is_forged: bool = False
    others: dict[Path, bytes] = field(default_factory=dict)

    def apply(self, seed: int) -> None:
        """Write the file anew, changed."""
        for path, content in self.others.items():
            path.write_bytes(content)
        self.path.write_bytes(self.change(Draw(seed)))


def _drawn(changes: tuple[Change, ...], content: bytes, draw: Draw) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if content:
            content = draw.choice(changes)(content, draw)
    return content


class _Loaded:
    """Loads into one model, again and again, and compares."""

    def __init__(self, save: Callable[[Run], None], load: Callable[[Run], None]) -> None:
        source = made(1)
        save(source)
        self._load = load
        self._right = made(2)
        load(self._right)
        self._target = made(2)
        self._before = self._target.bits()
        self.case: Case | None = None

    def __call__(self) -> str:
        assert self.case is not None
        try:
            self._load(self._target)
        except fsdp2.FSDPError:
            if self._target.bits() != self._before:
                return CHANGED
            raise
        found = self._target.bits()
        self._target = made(2)
        if found == self._right.bits():
            return SAME
        return OTHER if self.case.is_forged else SILENT


def _sharded(folder: Path) -> _Loaded:
    def save(run: Run) -> None:
        checkpoint.save(folder, run.model, run.optimizer, extra=EXTRA)

    def load(run: Run) -> None:
        run.extra = checkpoint.load(folder, run.model, run.optimizer)

    return _Loaded(save, load)


def metadata(folder: Path) -> Case:
    read = _sharded(folder)
    path = folder / ".metadata"
    content = path.read_bytes()
    pickled, told = split(content)
    changes = (*_mutate.BYTES, _mutate.instruction, _mutate.instruction)

    def change(draw: Draw) -> bytes:
        case.is_forged = draw.random() < 0.5
        if not case.is_forged:
            return _drawn(changes, content, draw)
        if draw.random() < 0.3:
            forged = json.loads(_drawn((_mutate.value,), json.dumps(told).encode(), draw))
            return pickled + tail_of(pickled, forged)
        changed = _drawn(changes, pickled, draw)
        return changed + tail_of(changed, told)

    read.case = case = Case(path, content, change, read)
    return case


def data(folder: Path) -> Case:
    """A file of values, each one of ``torch.save``: an archive with a pickle in it."""
    read = _sharded(folder)
    path, meta = folder / "__0_0.distcp", folder / ".metadata"
    content, described = path.read_bytes(), meta.read_bytes()
    pickled, told = split(described)
    places = [(start, length) for start, length, _ in told[path.name]["sums"]]
    changes = (*_mutate.BYTES, _mutate.instruction)

    def same_length(changed: bytes, length: int) -> bytes:
        return changed[:length].ljust(length, b"\0")

    def change(draw: Draw) -> bytes:
        case.is_forged = draw.random() < 0.6
        if not case.is_forged:
            return _drawn(changes, content, draw)
        start, length = draw.choice(places)
        value = content[start : start + length]
        where = draw.random()
        if where < 0.4:  # in the pickle, which is at the head
            begin = value.index(b"\x80\x02")
            end = value.index(b"PK\x07\x08")
            inner = same_length(_drawn(changes, value[begin:end], draw), end - begin)
            value = value[:begin] + inner + value[end:]
        elif where < 0.8:  # in the list of entries
            begin = value.index(b"PK\x01\x02")
            value = value[:begin] + same_length(
                _drawn(changes, value[begin:], draw), length - begin
            )
        else:
            value = same_length(_drawn(changes, value, draw), length)
        changed = content[:start] + value + content[start + length :]
        forged = json.loads(json.dumps(told))
        for entry in forged[path.name]["sums"]:
            entry[2] = zlib.crc32(changed[entry[0] : entry[0] + entry[1]])
        meta.write_bytes(pickled + tail_of(pickled, forged))
        return changed

    read.case = case = Case(path, content, change, read, others={meta: described})
    return case


def extra(folder: Path) -> Case:
    """The pickle of ``extra`` alone, inside of all that surrounds it."""
    from tests.hostile._by_hand import saved

    read = _sharded(folder)
    path, meta = folder / "__0_0.distcp", folder / ".metadata"
    content, described = path.read_bytes(), meta.read_bytes()
    pickled, told = split(described)
    from fsdp2.checkpoint._files import read as read_metadata

    entries = read_metadata(folder, verify=True, trust=False).entries
    (part,) = next(entry.parts for entry in entries if entry.key == "fsdp2_extra")
    kept = torch.load(io.BytesIO(content[part.offset : part.offset + part.length]))
    inner = torch.load(io.BytesIO(kept))
    changes = (*_mutate.BYTES, _mutate.instruction, _mutate.instruction, _mutate.instruction)

    def change(draw: Draw) -> bytes:
        case.is_forged = True
        forged = {**inner, "pickled": _drawn(changes, inner["pickled"], draw)}
        value = saved(saved(forged))
        changed = content + value
        other = json.loads(json.dumps(told))
        other[path.name]["size"] = len(changed)
        other[path.name]["sums"].append([len(content), len(value), zlib.crc32(value)])
        moved = _moved(pickled, part.offset, part.length, len(content), len(value))
        meta.write_bytes(moved + tail_of(moved, other))
        return changed

    read.case = case = Case(path, content, change, read, others={meta: described})
    return case


def _moved(pickled: bytes, offset: int, length: int, to: int, new_length: int) -> bytes:
    """Let metadata say that a value lies elsewhere: exchange its two numbers."""
    import pickle

    found = pickle.loads(pickled)
    for info in found.storage_data.values():
        if (info.offset, info.length) == (offset, length):
            info.offset, info.length = to, new_length
    return pickle.dumps(found)


def one_safetensors(folder: Path) -> Case:
    read = _safetensors(folder, {})
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size]

    def change(draw: Draw) -> bytes:
        case.is_forged = draw.random() < 0.5
        if not case.is_forged:
            return _drawn(_mutate.BYTES, content, draw)
        found = json.loads(header)
        if draw.random() < 0.7:
            found.get("__metadata__", {}).pop("fsdp2", None)
        changed = _drawn(TEXT, json.dumps(found).encode(), draw)
        return struct.pack("<Q", len(changed)) + changed + content[8 + size :]

    read.case = case = Case(path, content, change, read)
    return case


def _safetensors(folder: Path, options: dict[str, Any]) -> _Loaded:
    def save(run: Run) -> None:
        checkpoint.save_safetensors(folder, run.model, **options)

    def load(run: Run) -> None:
        checkpoint.load_safetensors(folder, run.model)

    return _Loaded(save, load)


def index(folder: Path) -> Case:
    read = _safetensors(folder, {"max_file_bytes": 1000})
    path = folder / "model.safetensors.index.json"
    content = path.read_bytes()

    def change(draw: Draw) -> bytes:
        case.is_forged = draw.random() < 0.5
        if not case.is_forged:
            return _drawn(TEXT, content, draw)
        found = json.loads(content)
        found["metadata"].pop("fsdp2", None)
        return _drawn(TEXT, json.dumps(found).encode(), draw)

    read.case = case = Case(path, content, change, read)
    return case


# Recordings.


def recording(folder: Path) -> Case:
    """A rank's file, through all that ``report`` writes."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = fsdp2.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with fsdp2.record(model, folder):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    path = folder / "rank0.jsonl"
    content = path.read_bytes()
    other = folder / "rank1.jsonl"
    lines = content.split(b"\n")
    header = json.loads(lines[0])
    header.update(rank=1, world_size=2, axes=[[0, 1]])
    other.write_bytes(b"\n".join([json.dumps(header).encode(), *lines[1:]]))

    def change(draw: Draw) -> bytes:
        case.is_forged = True
        if draw.random() < 0.4:
            return _drawn(_mutate.BYTES, content, draw)
        changed = [*lines[:-1]]
        for _ in range(draw.choice((1, 1, 2, 5))):
            place = draw.choice((0, draw.randrange(len(changed)), draw.randrange(len(changed))))
            changed[place] = _mutate.value(changed[place], draw)
        return b"\n".join([*changed, b""])

    def read() -> str:
        from fsdp2._tools.commands import run

        out = folder.with_name("out")
        out.mkdir(exist_ok=True)
        try:
            found = fsdp2.read_recordings(folder)
            found.html(out / "page.html")
            found.trace(out / "trace.json")
            found.rows(out / "rows.jsonl")
        finally:
            shutil.rmtree(out)
        run("report", [str(folder)])
        return OTHER

    case = Case(path, content, change, read)
    return case


def profile(folder: Path) -> Case:
    """A trace that ``torch.profiler`` exported, merged into one of ours."""
    made_by = recording(folder)
    path = folder / "profile.json"
    events = [
        {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 1.5, "dur": 2, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "name": "flow", "pid": 7, "tid": 7, "ts": 1.5},
    ]
    content = json.dumps(
        {
            "traceEvents": events,
            "baseTimeNanoseconds": 10**18,
            "distributedInfo": {"rank": 0, "world_size": 2},
        }
    ).encode()

    def change(draw: Draw) -> bytes:
        case.is_forged = True
        return _drawn(TEXT, content, draw)

    def read() -> str:
        fsdp2.read_recordings(folder).trace(folder.with_name("trace.json"), profiles=[path])
        return OTHER

    case = Case(path, content, change, read, others={made_by.path: made_by.content})
    return case


KINDS: dict[str, Callable[[Path], Case]] = {
    ".metadata": metadata,
    ".distcp": data,
    "extra in .distcp": extra,
    "safetensors": one_safetensors,
    "safetensors index": index,
    "recording": recording,
    "profile": profile,
}
