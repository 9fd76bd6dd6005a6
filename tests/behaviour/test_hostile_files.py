"""Promise: a file of somebody else alters nothing, takes little memory, and gets a message.

``python -m tests.hostile`` tries many more changes of each kind of file.
"""

from __future__ import annotations

import gzip
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2.checkpoint import _dcp, _safetensors
from fsdp2.checkpoint._files import corners
from tests.hostile._by_hand import INDEX, PLACES, model_of, several, trials, values_of
from tests.hostile._growing import WRITES
from tests.hostile._growing import load as load_both
from tests.hostile._kinds import KINDS, OTHER
from tests.hostile._many import faults_of, tried_many
from tests.hostile._tried import REFUSED, tried
from tests.kit.slow import slow

pytest.importorskip("safetensors")

MOST_NBYTES = 128 << 20
HARMLESS = ("LONG_BINPUT in extra", "LONG_BINPUT, 4 G in extra", "FRAME in extra")
"""What they say is a ``None``."""

QUICK = (
    "half of a tensor twice",
    ".metadata is a link out",
    "LONG_BINPUT in .metadata",
    "list of a range in extra",
    "BUILD on slots of a class of torch in extra",
    "BUILD on a class of torch in a value",
    "NEWOBJ of a member in extra",
    "SETITEM in a value",
    "EXT1 in extra",
    "a tensor larger than its storage",
    "a pipe as .metadata",
    "a pipe as .distcp",
    "a pipe as safetensors",
    "a pipe as index",
    "a text of holes as .metadata",
)


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in trials()])
def test_a_file_that_was_made_to_do_harm(tmp_path: Path, name: str) -> None:
    from tests.hostile._by_hand import load

    folder = tmp_path / "saved"
    trials()[name](folder)
    found = tried(lambda: load(folder))
    assert found.what == ("loaded" if name in HARMLESS else REFUSED), found
    assert found.nbytes < MOST_NBYTES, found


GROWN = ("a deep path", "one list of parts", "strips", "one tuple of arguments in .metadata")
"""Of each kind of bound one, in a size that hung or took a gigabyte without it."""


@pytest.mark.parametrize("name", [n if n in GROWN else slow(n) for n in WRITES])
def test_time_and_memory_grow_with_a_file_and_not_faster(tmp_path: Path, name: str) -> None:
    """Sizes are such that what is quadratic in them hangs, or takes more than a process has."""
    for size in (4_000, 16_000):
        folder = tmp_path / str(size)
        WRITES[name](folder, size)
        found = tried(lambda folder=folder: load_both(folder))  # type: ignore[misc]
        assert found.what in (REFUSED, "loaded"), found
        assert found.nbytes < MOST_NBYTES, found
        assert "rank 0 failed with" not in found.text, found


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_cover_each_element_once(seed: int) -> None:
    """The check agrees with a count of each element, for valid and for invalid lists of parts."""
    draw, right = random.Random(seed), 0
    for _ in range(300):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        parts = [([0] * len(shape), list(shape))]
        for _ in range(draw.randint(0, 4)):
            starts, sizes = parts[place := draw.randrange(len(parts))]
            dim = draw.randrange(len(shape))
            at = draw.randint(1, sizes[dim])
            if at < sizes[dim]:
                first, rest, moved = [*sizes], [*sizes], [*starts]
                first[dim], rest[dim], moved[dim] = at, sizes[dim] - at, starts[dim] + at
                parts[place : place + 1] = [(starts, first), (moved, rest)]
        if draw.random() < 0.5:
            starts, sizes = draw.choice(parts)
            starts[:] = [draw.randint(0, n - size) for n, size in zip(shape, sizes, strict=True)]
        regions = [Region(tuple(starts), tuple(sizes)) for starts, sizes in parts]
        every = itertools.chain(*(itertools.product(*_ranges(one)) for one in regions))
        whole = Region((0,) * len(shape), tuple(shape))
        is_right = Counter(every) == Counter(itertools.product(*_ranges(whole)))
        right += is_right
        dims = range(len(shape))
        assert (corners(regions, dims) == corners([whole], dims)) == is_right
    assert 50 < right < 290


def _ranges(region: Region) -> list[range]:
    return [range(s, s + n) for s, n in zip(region.starts, region.sizes, strict=True)]


@pytest.mark.parametrize(("depth", "problem"), [(201, "201 keys"), (3, "5000 characters")])
def test_what_no_load_reads_is_not_saved(tmp_path: Path, depth: int, problem: str) -> None:
    class Deep(nn.Linear):
        def get_extra_state(self) -> object:
            value: object = 1
            for _ in range(depth - 2):
                value = {"a" * (5000 if depth == 3 else 1): value}
            return value

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(fsdp2.FSDPError, match=problem):
        checkpoint.save(tmp_path / "saved", Deep(2, 2))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("count", [20, slow(1000)])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_a_file(tmp_path: Path, kind: str, count: int) -> None:
    found = tried_many(KINDS[kind], tmp_path, range(count))
    assert len(found) == count
    assert not faults_of(found)


@pytest.mark.parametrize("what", PLACES)
def test_a_recording_is_a_file(tmp_path: Path, what: str) -> None:
    """``report`` waits for nobody, and reads nothing that has no end."""
    PLACES[what](tmp_path / "rank0.jsonl")

    def read() -> str:
        fsdp2.read_recordings(tmp_path)
        return "read"

    found = tried(read)
    assert found.what == REFUSED
    assert "rank0.jsonl" in found.text
    assert found.text.endswith("[FS914]")
    assert found.nbytes < MOST_NBYTES, found


def test_a_packed_profile_that_becomes_huge(tmp_path: Path) -> None:
    case = KINDS["profile"](tmp_path / "run")
    case.path.write_bytes(gzip.compress(case.content))
    assert case.read() == OTHER
    case.path.write_bytes(gzip.compress(b"[" + bytes(1 << 29), 1))
    found = tried(case.read)
    assert (found.what, found.text[-7:]) == (REFUSED, "[FS917]")
    assert found.nbytes < MOST_NBYTES * 10, found


OVERTAKEN: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = {
    "load": (_dcp, "read", checkpoint.save, checkpoint.load),
    "load_safetensors": (
        _safetensors, "_read_index", checkpoint.save_safetensors, checkpoint.load_safetensors
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERTAKEN)
def test_a_load_that_another_save_overtakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is read is of two checkpoints then, and the next load is right."""
    module, reads, save, load = OVERTAKEN[name]
    folder = tmp_path if name == "load_safetensors" else tmp_path / "saved"
    if name == "load_safetensors":
        several(folder)
    else:
        save(folder, model_of(0))
    read, model = getattr(module, reads), model_of(1)
    before = values_of(model)

    def overtaken(*args: object, **named: object) -> object:
        found = read(*args, **named)
        with monkeypatch.context() as patched:
            patched.setattr(module, reads, read)
            save(folder, model_of(2))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(module, reads, overtaken)
        with pytest.raises(fsdp2.StateError, match=f"Call {name} again") as caught:
            load(folder, model)
    assert caught.value.code == "FS626"
    assert values_of(model) == before or name != "load"
    load(folder, model)
    assert values_of(model) == values_of(model_of(2))


def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    """With the name of the file: torch's archives say that a place is not where it was."""
    from tests.kit.error_ways._programs import full_disk

    model = nn.Linear(100, 100)
    for most in (300, 700, 1500, 20_000, 40_500):
        with full_disk(most), pytest.raises(fsdp2.StateError, match=r"File too large.*saved"):
            checkpoint.save(tmp_path / "saved", model)
    assert not os.listdir(tmp_path)


def test_a_save_waits_at_no_pipe(tmp_path: Path) -> None:
    """It looks at what stands beside its place, and at the index that it replaces."""
    beside = tmp_path / ".saved.tmp-other"
    beside.mkdir()
    os.mkfifo(beside / ".owner")
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / INDEX)

    def save() -> str:
        checkpoint.save(tmp_path / "saved", model_of())
        checkpoint.save_safetensors(folder, model_of())
        return "saved"

    assert tried(save).what == "saved"
