"""A corpus that every machine has: the source of Python's standard library, as memory-mapped bytes.

Each source file belongs either to the training set or to the held-out set. The files of each set
are concatenated once into a cache file, which is memory-mapped rather than read into Python lists.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests are repetitive, and the tables in `encodings` are not text.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "test",
    "tests",
    "idle_test",
}
HELD_OUT_ONE_IN = 20
# No source file contains a zero byte, so this marks the beginning of each file.
FILE_MARK = b"\0"
FORMAT = b"1"


@dataclass(frozen=True)
class Batch:
    """`tokens` and `targets`, both int64 [B, T]; a target is the byte that follows its token."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class CorpusFiles:
    """The two cache files, and a fingerprint of their sources."""

    train: Path
    held_out: Path
    fingerprint: str


@dataclass(frozen=True)
class Corpus:
    """The memory-mapped bytes, uint8 [N] each."""

    train: Tensor
    held_out: Tensor

    @staticmethod
    def open(files: CorpusFiles) -> Corpus:
        return Corpus(_map_bytes(files.train), _map_bytes(files.held_out))


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def list_sources(root: Path) -> list[Path]:
    """Return all `.py` files below `root`, sorted, except those in skipped folders."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def is_held_out(relative_path: str) -> bool:
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def build_cache(root: Path, cache_dir: Path) -> CorpusFiles:
    """Write the two cache files unless they exist.

    Processes may call this concurrently: a file gets its final name when it is complete. The
    fingerprint covers the names and sizes of the sources.
    """
    train: list[Path] = []
    held_out: list[Path] = []
    digest = hashlib.sha256(FORMAT)
    for path in list_sources(root):
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\n".encode())
        (held_out if is_held_out(name) else train).append(path)
    fingerprint = digest.hexdigest()[:16]

    cache_dir.mkdir(parents=True, exist_ok=True)
    files = CorpusFiles(
        cache_dir / f"{fingerprint}-train.bin",
        cache_dir / f"{fingerprint}-held-out.bin",
        fingerprint,
    )
    for target, sources in ((files.train, train), (files.held_out, held_out)):
        if not target.exists():
            _join(sources, target)
    return files


def _join(sources: list[Path], target: Path) -> None:
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    try:
        with open(handle, "wb") as joined:
            for path in sources:
                joined.write(FILE_MARK)
                with path.open("rb") as source:
                    shutil.copyfileobj(source, joined)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def _map_bytes(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def train_batch(
    corpus: Corpus, *, seed: int, step: int, rows: range, batch_size: int, length: int
) -> Batch:
    """Return `rows` of the global batch of `step`.

    The global batch depends only on the seed and the step, so it is the same on any mesh, and there
    is no reader state to save.
    """
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(corpus.train.numel() - length, (batch_size,), generator=generator)
    return _windows(corpus.train, starts[rows.start : rows.stop], length)


def held_out_batch(
    corpus: Corpus, *, index: int, batches: int, rows: range, batch_size: int, length: int
) -> Batch:
    """Return `rows` of held-out batch `index`. All `batches` are spread evenly over the text."""
    positions = torch.arange(index * batch_size + rows.start, index * batch_size + rows.stop)
    starts = positions * (corpus.held_out.numel() - length - 1) // (batches * batch_size)
    return _windows(corpus.held_out, starts, length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])
