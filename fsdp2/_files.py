"""Sharded checkpoints in files, as ``torch.distributed.checkpoint`` writes them.

Owns where files lie and when they take their names. It must not know how tensors are cut.

[Note: all or nothing]
A checkpoint is written to ``.NAME.tmp-...`` beside its place. When every rank has said that it is
done, the first one renames what is there to ``.NAME.old``, the new one to ``NAME``, and removes the
old one; files in it that are not of a checkpoint go to the new one. Whatever stops a save before,
the old one has its name; if it is stopped between the two renames, the old one is whole under
``.NAME.old``, where ``load`` looks next.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.optim import Optimizer

from fsdp2._errors import ConfigError, StateError
from fsdp2._extra import EXTRA, EXTRA_TENSORS, packed, unpacked
from fsdp2._idle import require_idle
from fsdp2._materialize import allocate
from fsdp2._optim_state import keys_of, load_named, names_in_groups, rekey
from fsdp2._precision import original_buffers
from fsdp2._state import (
    EXTRA_STATE,
    Told,
    compare,
    model_tensors,
    sharded,
    state_like,
)
from fsdp2._stream import Grids

PathLike = str | os.PathLike[str]

METADATA = ".metadata"


# Sharded.


def _neighbour(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def save(path: PathLike, model: nn.Module, optimizer: Optimizer | None, extra: Any) -> None:
    """Write a checkpoint. See [Note: all or nothing]."""
    place = Path(path).resolve()
    state = sharded(model, optimizer, "name")
    state["model"] = {k: v for k, v in state["model"].items() if v is not None}
    if optimizer is not None:
        state["optimizer"]["state"] = _without_tuples(state["optimizer"]["state"])
    grids = Grids([*state["model"].values()])
    if extra is not None:
        with grids.main.together("save"):
            state |= packed(extra, grids.main.is_first)
    token = grids.main.broadcast(uuid.uuid4().hex[:8])
    temporary = _neighbour(place, f"tmp-{token}")
    with grids.main.together("save"):
        if grids.main.is_first:
            if place.exists() and not place.is_dir():
                raise ConfigError(f"save: {place} is a file. Pass a folder.")
            for stale in place.parent.glob(f".{glob.escape(place.name)}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        _in_step(grids, lambda: save_state_dict(state, storage_writer=FileSystemWriter(temporary)))
        with grids.main.together("save"):
            if grids.main.is_first:
                _take_name(temporary, place)
    except BaseException:
        if grids.main.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _in_step(grids: Grids, run: Any) -> None:
    """Run a function of DCP, which tells its failures to all ranks itself, and be sure of it."""
    error: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there, and deprecations
            run()
    except CheckpointException as caught:  # the same on every rank
        own = caught.failures.get(dist.get_rank() if dist.is_initialized() else 0)
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from None  # DCP has told the others of this interrupt
        rank, (first, _) = next(iter(caught.failures.items()))
        raise StateError(
            f"checkpoint: rank {rank} failed with {type(first).__name__}: {first}"
        ) from caught
    except Exception as caught:
        error = caught
    grids.main.raise_together(error, "checkpoint")


def _take_name(temporary: Path, place: Path) -> None:
    old = _neighbour(place, "old")
    sync(temporary)
    if (place / METADATA).exists():
        _retire(old, place)  # of a save that was stopped before it had done so
    if place.exists() and not old.exists():
        os.rename(place, old)
    elif place.exists():  # the checkpoint is the old one, and what is here is none
        _retire(place, temporary)
    os.rename(temporary, place)
    sync(place.parent)
    _retire(old, place)


def _retire(old: Path, heir: Path) -> None:
    """Remove a checkpoint. What somebody else put into its folder moves to the heir's."""
    if not old.exists():
        return
    for entry in old.iterdir():
        is_ours = entry.name.startswith(METADATA) or entry.suffix == ".distcp"
        if not is_ours and not (heir / entry.name).exists():
            os.rename(entry, heir / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _without_tuples(value: Any) -> Any:
    """Return lists for tuples of tensors, which DCP does not look into."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return list(value)
    return value


def find(path: PathLike) -> Path:
    """Return where a checkpoint lies: at ``path``, or where an interrupted save left it.

    Raises:
        ConfigError: at neither.
    """
    place = Path(path).resolve()
    for found in (place, _neighbour(place, "old")):
        if (found / METADATA).exists():
            return found
    raise ConfigError(
        f"load: no checkpoint at {place}. Pass the folder that fsdp2.checkpoint.save or "
        "torch.distributed.checkpoint.save wrote."
    )


@dataclass(frozen=True)
class _Entry:
    """One value of a checkpoint: its flat key, and its path in the dict that was saved."""

    key: str
    path: tuple[Any, ...]
    meta: Any

    @property
    def is_tensor(self) -> bool:
        return not isinstance(self.meta, BytesStorageMetadata)

    def is_under(self, key: str) -> bool:
        return len(self.path) > 1 and self.path[0] == key


def _entries(metadata: Metadata) -> list[_Entry]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    found = []
    for key, meta in metadata.state_dict_metadata.items():
        path = paths.get(key)
        found.append(_Entry(key, tuple(path) if path is not None else (key,), meta))
    return found


def load(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None,
    strict: bool,
    model_key: str | None,
    optim_key: str,
) -> Any:
    """Load a checkpoint: its metadata says what to make room for."""
    with original_buffers(require_idle(model, "load")):
        tensors, extra_names = model_tensors(model)
        grids = Grids([*tensors.values()])
        entries: list[_Entry] = []
        in_model: dict[str, list[_Entry]] = {}
        place = Path(path)
        with grids.main.together("load"):
            place = find(path)
            entries = _entries(FileSystemReader(place).read_metadata())
            for entry in entries:
                if model_key is None or entry.is_under(model_key):
                    in_model.setdefault(str(entry.path[model_key is not None]), []).append(entry)
            told = Told(
                {n: tuple(found[0].meta.size) for n, found in in_model.items() if _is_one(found)},
                {n: None for n, found in in_model.items() if not _is_one(found)},
            )
            compare("load", told, tensors, extra_names, strict)
            groups = _has_groups(entries, optim_key)
            if optimizer is not None and not groups:
                raise ConfigError(
                    "load: an optimizer was passed, and the checkpoint has none under "
                    f"{optim_key!r}. Found {sorted({str(e.path[0]) for e in entries})}. "
                    "Pass optim_key=."
                )
            if optimizer is not None:
                names_in_groups(model, optimizer)
        if any(tensor.is_meta for tensor in tensors.values()):
            allocate(model)
            tensors, extra_names = model_tensors(model)
        flat: dict[str, Any] = {}
        for name, found in in_model.items():
            if name in tensors:
                flat[found[0].key] = tensors[name].detach()
            elif name in extra_names:
                flat |= {entry.key: _empty(entry) for entry in found}
        params: dict[Any, nn.Parameter] = dict(model.named_parameters())
        if optimizer is not None:  # saved under ids, of which DCP makes strings
            ordered = [p for group in optimizer.param_groups for p in group["params"]]
            params |= dict(enumerate(ordered))
            entries = [_with_ids(e, params) if e.is_under(optim_key) else e for e in entries]
        optim_entries = (
            [e for e in entries if e.is_under(optim_key)] if optimizer is not None else []
        )
        for entry in optim_entries:
            flat[entry.key] = _room_for(entry, params, optimizer)
        flat |= {e.key: _empty(e) for e in entries if e.path[0] in ("extra", EXTRA, EXTRA_TENSORS)}
        _in_step(grids, lambda: load_state_dict(flat, storage_reader=FileSystemReader(place)))
        tree = _tree(entries, flat)
        states = tree if model_key is None else tree.get(model_key, {})
        modules = dict(model.named_modules())
        for name in in_model:
            if name in extra_names and name.rpartition(".")[2] == EXTRA_STATE:
                modules[name.rpartition(".")[0]].set_extra_state(_lists(states[name]))
        if optimizer is not None:
            loaded = {"state": {}, **tree[optim_key]}
            loaded["param_groups"] = _lists(loaded["param_groups"])
            if keys_of(loaded) == "id":
                loaded = rekey(loaded, "name", model=model, optimizer=optimizer)
            known = {
                name: {key: _lists(value) for key, value in fields.items()}
                for name, fields in loaded["state"].items()
                if name in params
            }
            load_named(model, optimizer, {**loaded, "state": known})
        return unpacked(tree) if EXTRA in tree else _lists(tree.get("extra"))


def _is_one(found: list[_Entry]) -> bool:
    """True if what was saved under a name is a tensor, not an object that may hold some."""
    return len(found) == 1 and found[0].is_tensor and len(found[0].path) <= 2


def _has_groups(entries: list[_Entry], optim_key: str) -> bool:
    return any(e.is_under(optim_key) and e.path[1] == "param_groups" for e in entries)


def _empty(entry: _Entry) -> Any:
    """Make room for a value that is loaded as it was saved."""
    if not entry.is_tensor:
        return ""
    return torch.empty(entry.meta.size, dtype=entry.meta.properties.dtype, device="cpu")


def _with_ids(entry: _Entry, params: dict[Any, nn.Parameter]) -> _Entry:
    """Return an entry of an optimizer's state with a number for an id that was made a string."""
    path = entry.path
    if len(path) < 3 or path[1] != "state" or path[2] in params or not str(path[2]).isdecimal():
        return entry
    return replace(entry, path=(*path[:2], int(path[2]), *path[3:]))


def _room_for(entry: _Entry, params: dict[Any, nn.Parameter], optimizer: Optimizer | None) -> Any:
    """Make room for a value of an optimizer's state, placed as its parameter is."""
    path = entry.path
    if optimizer is None or not entry.is_tensor or len(path) < 4 or path[2] not in params:
        return _empty(entry)
    current = optimizer.state.get(params[path[2]], {}).get(path[3]) if len(path) == 4 else None
    return state_like(params[path[2]], current, tuple(entry.meta.size), entry.meta.properties.dtype)


def _tree(entries: list[_Entry], flat: dict[str, Any]) -> dict[Any, Any]:
    """Put values back into the dicts that they were saved in; lists are dicts of numbers."""
    root: dict[Any, Any] = {}
    for entry in entries:
        if entry.key in flat:
            target = root
            for part in entry.path[:-1]:
                target = target.setdefault(part, {})
            target[entry.path[-1]] = flat[entry.key]
    return root


def _lists(value: Any) -> Any:
    """Turn dicts whose keys are 0, 1, 2, ... back into lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
