"""``record`` and ``Recording``: what a user turns on, on one rank.

Owns the checks, the header of the file, and the end of each step: its scalars and the user's
callback. It must not know how rows are made, or read files of other ranks.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp2._compiled.compile import CompiledModel
from fsdp2._core.api.inspect import GroupInfo
from fsdp2._core.api.inspect import units as describe_units
from fsdp2._core.api.settings import refuse_during_step, sharded_units
from fsdp2._core.base.arguments import check_count, check_function, check_path
from fsdp2._core.base.errors import StateError, UnsupportedError
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._tools.pages.content import Page, Planned
from fsdp2._tools.record.format import FORMAT
from fsdp2._tools.record.ledger import Ledger, clock_for
from fsdp2._tools.record.memory import Allocator, Entry, Memory
from fsdp2._tools.record.recorder import Recorder
from fsdp2._tools.record.recordings import Recordings, read_recordings
from fsdp2._tools.record.rows import Writer, file_of
from fsdp2._tools.record.steps import RecordedStep, Step

Scalars = Callable[[int, dict[str, float]], Any]


def record(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    scalars: Scalars | None = None,
    tokens: int | None = None,
) -> Recording:
    """Record what a model's units do on this rank, while the ``with`` block runs.

    Each rank that records writes ``rank<N>.jsonl`` into the folder ``path``. Nothing is
    communicated, so ranks may differ in what they record. ``fsdp2.read_recordings(path)`` reads all
    of them. While a ``torch.profiler`` runs, units and collectives are ranges on its time line.

    On a device, times come from events in its streams, and no step waits for them. So steps and
    scalars appear one or two steps late. The host waits for the device when a recording begins and
    when it ends.

    Args:
        model: what ``fully_shard`` was applied to, or contains it. It need not have run yet.
        path: a folder. It is made if it is not there.
        scalars: called with the number of each step (from 1) and its figures by name, see
            ``RecordedStep``. If it raises, there is a warning, and it is not called again.
        tokens: number of tokens of one step on this rank, for ``tokens_per_s``.

    Returns:
        A context manager, to be entered between steps.

    Raises:
        ConfigError: nothing in ``model`` is sharded; an argument cannot be used; (when entered) the
            folder has this rank's file of an earlier recording.
        StateError: (when entered) during a step, or a second time.
        UnsupportedError: ``model`` is what ``fsdp2.compile`` returned: compiled steps run no hooks.
    """
    check_path("record", "path", path)
    check_function("record", "scalars", scalars)
    if tokens is not None:
        check_count("record", "tokens", tokens)
    if isinstance(model, CompiledModel):
        raise UnsupportedError(
            "FS911",
            "record: found a model that fsdp2.compile returned. Its steps are compiled whole and "
            "run no hooks, so nothing of them would be recorded. Record the model that was "
            "compiled, run eagerly, or use torch.profiler.",
        )
    sharded_units("record", "model", model)
    return Recording(model, Path(path), scalars, tokens)


class Recording:
    """What ``record`` returns: a context manager, and afterwards this rank's recording.

    ``steps`` are the complete ones, as ``RecordedStep``. ``path`` is this rank's file, and ``rank``
    its number. The methods read the file: they work during the ``with`` block too, on what is
    written. Errors are those of the same methods of ``Recordings``.
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
        self._last_end_ns: int | None = None  # of the step before
        self._recorder: Recorder | None = None
        self._ledger: Ledger | None = None

    def __repr__(self) -> str:
        return f"Recording(path={str(self.path)!r}, steps={len(self.steps)})"

    def __enter__(self) -> Recording:
        if self._ledger is not None:
            raise StateError(
                "FS912",
                f"record: found a recording that was entered before, whose file is {self.path}. "
                "Call fsdp2.record again, with another folder.",
            )
        units = sharded_units("record", "model", self._model)
        refuse_during_step("record", units)
        names = _names_of(self._model, units)
        entries = [
            Entry(group, ".".join(filter(None, (names[unit], group.early.part))))
            for unit in units
            for group in unit.own_groups
        ]
        device, writer = units[0].device, Writer(self.path)
        clock = clock_for(device)
        header = _header(self._model, units, names, self.rank)
        writer.add(json.dumps({**header, "epoch_ns": clock.epoch_ns}) + "\n")
        writer.flush()
        memory = Memory(sum(group["shard_nbytes"] for group in header["groups"]))
        self._ledger = Ledger(clock, memory, Allocator(device), writer, self._end_step)
        self._recorder = Recorder(units, names, entries, self._ledger)
        self._recorder.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._recorder is not None
        assert self._ledger is not None
        self._recorder.stop()
        self._ledger.finish(may_wait=kind is None)
        self._ledger.writer.close()

    def _end_step(self, step: Step) -> None:
        """Take the scalars of a step whose times are known."""
        assert self._ledger is not None
        found = step.summarize(self._tokens, self._last_end_ns)
        row: dict[str, Any] = {"kind": "step", "n": self._ledger.next_number()}
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
        except Exception as error:  # inside of a backward, of one rank: the step must go on
            self._scalars = None
            warn(
                "FS918",
                f"fsdp2.record: scalars raised {type(error).__name__}: {error} at step "
                f"{found.number} of rank {self.rank}. It is not called again; the recording "
                "goes on. Mend the function that was passed.",
                RuntimeWarning,
            )

    # What can be done with it afterwards, or meanwhile.

    def read(self) -> Recordings:
        """Return this rank's recording alone, as far as it is written.

        Raises:
            ConfigError: nothing was recorded yet.
        """
        return read_recordings(self.path)

    def trace(self, path: str | os.PathLike[str], *, profiles: Sequence[Any] = ()) -> None:
        """Write a trace of this rank for Perfetto; see ``Recordings.trace``."""
        self.read().trace(path, profiles=profiles)

    def rows(self, path: str | os.PathLike[str]) -> None:
        """Write all rows of this rank as JSON lines; see ``Recordings.rows``."""
        self.read().rows(path)

    def page(self, *, step: int | None = None, planned: Planned | None = None) -> Page:
        """Return what a page about this rank shows; see ``Recordings.page``."""
        return self.read().page(step=step, planned=planned)

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> None:
        """Write a page about this rank; see ``Recordings.html``.

        Give each rank a path of its own.
        """
        self.read().html(path, step=step, planned=planned)


def _names_of(model: nn.Module, units: Sequence[Unit]) -> dict[Unit, str]:
    names = {module: name for name, module in model.named_modules()}
    return {
        unit: next((names[module] for module in unit.modules if module in names), unit.fqn)
        for unit in units
    }


def _header(
    model: nn.Module, units: Sequence[Unit], names: dict[Unit, str], rank: int
) -> dict[str, Any]:
    """Return the first line: what was recorded, where, and with what."""
    axes: list[list[int]] = []
    groups = []
    for unit, info in zip(units, describe_units(model), strict=True):
        for group, shards in zip(unit.own_groups, info.groups, strict=True):
            name = ".".join(filter(None, (names[unit], group.early.part)))
            groups.append(_describe(group, name, shards, axes))
    return {
        "kind": "header",
        "format": FORMAT,
        "rank": rank,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": str(units[0].device),
        "fsdp2": vars(sys.modules["fsdp2"])["__version__"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": class_name(model),
        "units": [names[unit] for unit in units],
        "axes": axes,
        "groups": groups,
    }


def _describe(
    group: ParamGroup, name: str, info: GroupInfo, axes: list[list[int]]
) -> dict[str, Any]:
    """Return a group's sizes, and the axes that it communicates over: places in a list of ranks."""
    places = []
    for axis in (group.data.shard, group.data.replicate):
        ranks = axis.global_ranks if axis.size > 1 else []
        if ranks not in axes:
            axes.append(ranks)
        places.append(axes.index(ranks))
    shards = info.shards
    numels = [math.prod(shard.shape) for shard in shards]
    even = [s for s in shards if s.dim is not None and s.owner is None and s.block is None]
    exact = sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in even)
    padded = sum(shard.nbytes for shard in even) * info.shard_size
    return {
        "name": name,
        "parameters": len(shards),
        "numel": sum(numels),
        "dtypes": list(dict.fromkeys(str(shard.dtype).partition(".")[2] for shard in shards)),
        "whole_nbytes": group.buffers.whole_nbytes,
        "shard_nbytes": info.nbytes,
        "padding_nbytes": max(padded - exact, 0),
        "mesh": [group.data.replicate.size, group.data.shard.size],
        "shard_axis": places[0],
        "replicate_axis": places[1],
    }
