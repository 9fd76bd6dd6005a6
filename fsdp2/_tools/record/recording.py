"""``record`` and ``Recording``: the recording of a model on one rank."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp2._compiled.compile import CompiledModel
from fsdp2._core.api.inspect import GroupInfo
from fsdp2._core.api.inspect import units as describe_units
from fsdp2._core.api.settings import refuse_during_step, sharded_units
from fsdp2._core.base.errors import (
    StateError,
    UnsupportedError,
    check_count,
    check_function,
    check_path,
)
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._tools.pages.content import Page, Planned
from fsdp2._tools.record.ledger import Ledger, clock_for
from fsdp2._tools.record.memory import Allocator, Entry, Memory
from fsdp2._tools.record.recorder import Recorder
from fsdp2._tools.record.recordings import Recordings, read_recordings
from fsdp2._tools.record.rows import FORMAT, Writer, file_of
from fsdp2._tools.record.steps import RecordedStep, Step

Scalars = Callable[[int, dict[str, float]], Any]


def record(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    scalars: Scalars | None = None,
    tokens: int | None = None,
) -> Recording:
    """Record the events of a model's units on this rank, during the ``with`` block.

    Each recording rank writes ``rank<N>.jsonl`` into the folder ``path``. Nothing is communicated,
    so ranks may record at different times. ``fsdp2.read_recordings(path)`` reads all files. While a
    ``torch.profiler`` runs, units and collectives appear as ranges on its timeline.

    On a device, times come from events in its streams. No step waits for these events, so
    ``steps`` and ``scalars`` are one or two steps late. The host waits for the device when a
    recording begins and when it ends.

    Args:
        model: a module that was passed to ``fully_shard``, or that contains such modules. The
            model need not have run yet.
        path: a folder, which is created if it does not exist.
        scalars: a function that is called with each step's number (from 1) and a dict of the step's
            figures (see ``RecordedStep``). If it raises, a warning is issued, and the function is
            not called again.
        tokens: number of tokens in one step on this rank, for ``tokens_per_s``.

    Returns:
        A context manager, to be entered between steps.

    Raises:
        ConfigError: nothing in ``model`` is sharded; an argument is invalid; (when entered) the
            folder contains this rank's file from an earlier recording.
        StateError: (when entered) a step is running, or the recording was entered before.
        UnsupportedError: ``model`` is the result of ``fsdp2.compile``: compiled steps run no hooks.
    """
    check_path("record", "path", path)
    check_function("record", "scalars", scalars)
    if tokens is not None:
        check_count("record", "tokens", tokens)
    if isinstance(model, CompiledModel):
        raise UnsupportedError(
            "FS911",
            "record: found a model that fsdp2.compile returned. Compiled steps run no hooks, so "
            "nothing would be recorded. Record the original model and run it eagerly, or use "
            "torch.profiler.",
        )
    sharded_units("record", "model", model)
    return Recording(model, Path(path), scalars, tokens)


class Recording:
    """The result of ``record``: a context manager, and afterwards this rank's recording.

    ``steps`` are the complete steps, as ``RecordedStep``. ``rank`` is this rank's number, and
    ``path`` its file. The methods read the file: during the ``with`` block, the rows written so
    far. They raise the same errors as the methods of ``Recordings``.
    """

    def __init__(
        self, model: nn.Module, folder: Path, scalars: Scalars | None, tokens: int | None
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.path = file_of(folder, self.rank)
        self.steps: list[RecordedStep] = []
        self._model = model
        self._scalars = scalars
        self._tokens = tokens or 0
        self._last_end_ns: int | None = None  # end of the previous step
        self._recorder: Recorder | None = None
        self._ledger: Ledger | None = None

    def __repr__(self) -> str:
        return f"Recording(path={str(self.path)!r}, steps={len(self.steps)})"

    def __enter__(self) -> Recording:
        if self._ledger is not None:
            raise StateError(
                "FS912",
                f"record: this recording was already entered, and wrote {self.path}. Call "
                "fsdp2.record again, with another folder.",
            )
        units = sharded_units("record", "model", self._model)
        refuse_during_step("record", units)
        infos = describe_units(self._model)
        names = {unit: info.names[0] for unit, info in zip(units, infos, strict=True)}
        entries = [
            Entry(unit, group, ".".join(filter(None, (names[unit], group.early.part))))
            for unit in units
            for group in unit.own_groups
        ]
        device, writer = units[0].device, Writer(self.path)
        clock = clock_for(device)
        shards = (group for info in infos for group in info.groups)
        axes: list[list[int]] = []
        groups = [_describe(*pair, axes) for pair in zip(entries, shards, strict=True)]
        header = {
            **_header(self._model, self.rank, device),
            "units": list(names.values()),
            "axes": axes,
            "groups": groups,
            "epoch_ns": clock.epoch_ns,
        }
        writer.add(json.dumps(header) + "\n")
        writer.flush()
        memory = Memory(sum(group["shard_nbytes"] for group in groups))
        self._ledger = Ledger(clock, memory, Allocator(device), writer, self._end_step)
        self._recorder = Recorder(names, entries, self._ledger)
        self._recorder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._recorder is not None
        assert self._ledger is not None
        self._recorder.stop()
        self._ledger.finish(may_wait=kind is None)
        self._ledger.writer.close()

    def _end_step(self, step: Step) -> None:
        """Store and report a step's scalars, once the times of the step are known."""
        assert self._ledger is not None
        found = step.summarize(self._tokens, self._last_end_ns)
        row: dict[str, Any] = {"kind": "step", "n": next(self._ledger.numbers)}
        row |= {"unit": "", "phase": "", "step": step.number, "failed": step.failed}
        row |= {"begin_ns": step.begin_ns, "end_ns": step.end_ns, **found.scalars}
        self._ledger.writer.add(json.dumps(row) + "\n")
        if step.failed:
            return
        self._last_end_ns = step.end_ns
        self.steps.append(found)
        if self._scalars is None:
            return
        try:
            self._scalars(found.number, found.scalars)
        except Exception as error:  # may run in one rank's backward: the step must continue
            self._scalars = None
            warn(
                "FS918",
                f"fsdp2.record: scalars raised {type(error).__name__}: {error} at step "
                f"{found.number} of rank {self.rank}. The function will not be called again; the "
                "recording continues. Fix the function.",
                RuntimeWarning,
            )

    def read(self) -> Recordings:
        """Return this rank's recording, up to the last row written.

        Raises:
            ConfigError: nothing was recorded yet.
        """
        return read_recordings(self.path)

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        profiles: Sequence[Any] = (),
    ) -> None:
        """Write a trace of this rank for Perfetto; see ``Recordings.trace``."""
        self.read().trace(path, profiles=profiles)

    def rows(self, path: str | os.PathLike[str]) -> None:
        """Write all rows of this rank as JSON lines; see ``Recordings.rows``."""
        self.read().rows(path)

    def page(
        self,
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> Page:
        """Return the contents of a page about this rank; see ``Recordings.page``."""
        return self.read().page(step=step, planned=planned)

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> None:
        """Write a page about this rank; see ``Recordings.html``. Each rank needs its own path."""
        self.read().html(path, step=step, planned=planned)


def _header(model: nn.Module, rank: int, device: torch.device) -> dict[str, Any]:
    return {
        "kind": "header",
        "format": FORMAT,
        "rank": rank,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": str(device),
        "fsdp2": vars(sys.modules["fsdp2"])["__version__"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": class_name(model),
    }


def _describe(entry: Entry, info: GroupInfo, axes: list[list[int]]) -> dict[str, Any]:
    """Return a group's sizes, and the axes it communicates over, as indices into ``axes``."""
    group = entry.group
    places = []
    for axis in (group.data.shard, group.data.replicate):
        ranks = axis.global_ranks if axis.size > 1 else []
        if ranks not in axes:
            axes.append(ranks)
        places.append(axes.index(ranks))
    shards = info.shards
    even = [s for s in shards if s.dim is not None and s.owner is None and s.block is None]
    exact = sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in even)
    padded = sum(shard.nbytes for shard in even) * info.shard_size
    return {
        "name": entry.name,
        "parameters": len(shards),
        "numel": sum(math.prod(shard.shape) for shard in shards),
        "dtypes": list(dict.fromkeys(str(shard.dtype).partition(".")[2] for shard in shards)),
        "whole_nbytes": group.buffers.whole_nbytes,
        "shard_nbytes": info.nbytes,
        "padding_nbytes": max(padded - exact, 0),
        "mesh": [group.data.replicate.size, group.data.shard.size],
        "shard_axis": places[0],
        "replicate_axis": places[1],
    }
