"""Load sharded checkpoints from files, in the format of ``torch.distributed.checkpoint``.

Maps a checkpoint's entries to a model and an optimizer, and finds the newest intact checkpoint.
Independent of sharding and of file formats. ``_save`` writes the files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base import slot_clock
from fsdp2._core.base.errors import ConfigError, StateError, check_key, check_path, wrong_type
from fsdp2._core.base.names import clean, named_parameters, printable
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.transfer.redistribute import Grids, LocalShard
from fsdp2.checkpoint._checksums import DamagedError, said
from fsdp2.checkpoint._contents import EXTRA, EXTRA_TENSORS, SLOTS, unpacked
from fsdp2.checkpoint._files import Entry, Reader, Saved, read
from fsdp2.checkpoint._load import Source, StateManifest, load_full
from fsdp2.checkpoint._neighbours import NeighbourCopies, fetched, newest
from fsdp2.checkpoint._place import RENAMES, candidates, find, newest_time
from fsdp2.checkpoint._save import settle
from fsdp2.checkpoint._state import checked, is_extra, map_state, model_tensors, rekey


def _read(path: str | os.PathLike[str], *, verify: bool, trust: bool) -> Saved:
    """Read a checkpoint's metadata; retry if a concurrent save renames the folder."""
    for _ in range(RENAMES):
        with contextlib.suppress(FileNotFoundError):
            return read(find(path), verify=verify, trust=trust)
    raise StateError(
        "FS626",
        f"load: other saves replaced {path} {RENAMES} times during the load. Call load again; "
        "nothing was changed.",
    )


@operation("load")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    model_key: str | None = "model",
    optim_key: str = "optimizer",
    verify: bool = True,
    trust: bool = False,
) -> Any:
    """Load a sharded checkpoint that was saved on any mesh, and return its ``extra``.

    Loads checkpoints written by ``save``, or by ``torch.distributed.checkpoint`` for torch's FSDP1
    or FSDP2. Parameters on the meta device are allocated. During the load, a rank needs additional
    memory equal to the size of its shards.

    Args:
        path: the checkpoint's folder.
        model: a sharded model, or any other module.
        optimizer: an optimizer over the model's parameters, whose state is loaded too.
        model_key: key of the model's state in the saved dict. None: the dict is the model's state.
        optim_key: key of the optimizer's state.
        strict: require every name in the model to be in the checkpoint, and vice versa.
        verify: verify the data that is read against the checksums that ``save`` wrote.
        trust: allow data that is not plain. Loading it can execute code from the files, so pass
            True only for files that you wrote.

    Raises:
        ConfigError: no checkpoint at ``path``; names, shapes or the optimizer's class differ; a
            value is not plain data. Nothing was changed.
        StateError: a file is missing or damaged. Nothing was changed.
    """
    with checked("load", model, optimizer, strict=strict, verify=verify, trust=trust) as same:
        check_path("load", "path", path)
        if model_key is not None:
            check_key("load", "model_key", model_key)
        check_key("load", "optim_key", optim_key)
        require_idle(model, "load")
        same.update(model_key=model_key, optim_key=optim_key)
    main = Grids([*model_tensors(model)[0].values()]).main
    with main.together("load"):
        saved = _read(path, verify=verify, trust=trust)
    if len(set(main.collect(saved.digest))) > 1:
        raise StateError(
            "FS613",
            f"load: ranks see different checkpoints at {path}. If a save replaced it during the "
            "load, call load again. Otherwise make all ranks use the same file system. Nothing was "
            "changed.",
        )
    with Reader(saved, verify=verify, trust=trust) as reader:
        content = _Content(reader, model_key, optim_key)
        load_full("load", model, optimizer, content, from_rank0=False, strict=strict)
        if content.slots is not None:
            slot_clock.load(model, content.slots)
        return content.extra


class _Content(Source):
    """Maps the contents of a checkpoint to a model and an optimizer, and reads its ``extra``."""

    def __init__(
        self,
        reader: Reader,
        model_key: str | None,
        optim_key: str,
    ) -> None:
        self._reader = reader
        self._optim_key = optim_key
        self._depth = 1 if model_key is None else 2
        self._in_model: dict[str, list[Entry]] = {}
        for entry in reader.entries:
            if model_key is None or entry.is_under(model_key):
                name = clean(str(entry.path[model_key is not None]))
                self._in_model.setdefault(name, []).append(entry)
        self._in_optimizer: dict[str, Entry] = {}
        self.extra: Any = None
        self.slots: slot_clock.State | None = None

    def describe(self) -> StateManifest:
        own = self._in_model
        shapes = {n: e[0].shape for n, e in own.items() if _is_one(e) and not is_extra(n)}
        return StateManifest(shapes, {name: None for name in own if name not in shapes})

    def with_optimizer(
        self, told: StateManifest, model: nn.Module, optimizer: Optimizer
    ) -> StateManifest:
        with self._reader.making_sense():
            return replace(told, optimizer=self._optimizer_state(model, optimizer))

    def with_objects(self, told: StateManifest, extra: Mapping[str, Any]) -> StateManifest:
        own = {n: e for n, e in self._in_model.items() if n in extra and is_extra(n)}
        with self._reader.making_sense():
            states = {name: self._extra_state(entries) for name, entries in own.items()}
            self.extra = self._beside()
            own_slots = [entry for entry in self._reader.entries if entry.path == (SLOTS,)]
            if own_slots:
                self.slots = slot_clock.State.unpacked(self._reader.whole(own_slots[0]))
        return replace(told, extra={**told.extra, **states})

    def fill(self, what: str, held: LocalShard, in_optimizer: bool) -> None:
        name = held.name
        entry = self._in_optimizer[name] if in_optimizer else self._in_model[name][0]
        self._reader.fill(entry, held.own, held.local)

    def _extra_state(self, entries: Sequence[Entry]) -> Any:
        inside = [replace(e, path=("", *e.path[self._depth :])) for e in entries]
        return _lists(_tree(inside, self._reader.whole)[""])

    def _optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by name, with meta tensors. ConfigError if it is missing."""
        own = [entry for entry in self._reader.entries if entry.is_under(self._optim_key)]
        if not any(entry.path[1] == "param_groups" for entry in own):
            keys = {str(entry.path[0]) for entry in self._reader.entries}
            found = [printable(key) for key in sorted(keys)[:5]]
            raise ConfigError(
                "FS602",
                "load: an optimizer was passed, but the checkpoint has no optimizer state under "
                f"{self._optim_key!r}. Found the keys {found}. Pass the key of an optimizer's "
                "state as optim_key=, or omit the optimizer. Nothing was changed.",
            )
        params = named_parameters(model)
        on_meta: dict[int, tuple[Tensor, Entry]] = {}

        def told(entry: Entry) -> Any:
            if entry.shape is None or len(entry.path) < 4 or entry.path[1] != "state":
                return self._reader.whole(entry)
            value = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            on_meta[id(value)] = value, entry
            return value

        tree = _tree([_with_ids(entry, params) for entry in own], told)[self._optim_key]
        loaded = {**tree, "param_groups": _lists(tree["param_groups"])}
        loaded["state"] = {
            name: {key: _lists(value) for key, value in fields.items()}
            for name, fields in tree.get("state", {}).items()
        }
        named = rekey(loaded, "name", model=model, optimizer=optimizer)
        # older saves omitted empty tensors: drop an empty parameter's state if it has none
        named["state"] = {
            name: fields
            for name, fields in named["state"].items()
            if not (name in params and params[name].numel() == 0)
            or any(isinstance(value, Tensor) and not value.numel() for value in fields.values())
        }

        def note(name: str, key: str, value: Tensor) -> Tensor:
            if id(value) in on_meta:
                self._in_optimizer[f"{name}.{key}"] = on_meta[id(value)][1]
            return value

        map_state(note, named["state"])
        return named

    def _beside(self) -> Any:
        names = ("extra", EXTRA, EXTRA_TENSORS)
        own = [entry for entry in self._reader.entries if entry.path[0] in names]
        tree = _tree(own, self._reader.whole)
        if EXTRA in tree:
            tensors = tree.get(EXTRA_TENSORS, {})
            try:
                return unpacked(tree[EXTRA], tensors, trust=self._reader.trust)
            except (DamagedError, pickle.UnpicklingError) as error:
                raise self._reader.damaged(f"extra cannot be read: {said(error)}.") from error
        return _lists(tree.get("extra"))


def _is_one(found: list[Entry]) -> bool:
    """Return True if the value saved under a name is one tensor, not a container of tensors."""
    return len(found) == 1 and found[0].shape is not None and len(found[0].path) <= 2


def _with_ids(entry: Entry, params: dict[str, nn.Parameter]) -> Entry:
    """Convert the parameter id in an entry's path, which was saved as a string, to an int."""
    path = entry.path
    is_id = len(path) > 2 and path[1] == "state" and str(path[2]).isdecimal()
    if not is_id or path[2] in params:
        return entry
    return replace(entry, path=(*path[:2], int(path[2]), *path[3:]))


def _tree(entries: Sequence[Entry], value_of: Callable[[Entry], Any]) -> dict[Any, Any]:
    """Rebuild the saved nested dicts. Lists become dicts with int keys: see ``_lists``."""
    root: dict[Any, Any] = _Branch()
    for entry in entries:
        target = root
        for part in entry.path[:-1]:
            target = target.setdefault(part, _Branch())
        target[entry.path[-1]] = value_of(entry)
    return root


class _Branch(dict[Any, Any]):
    """A dict created by ``_tree``, as opposed to a dict that was saved as a value."""


def _lists(value: Any) -> Any:
    """Convert branches with int keys back to lists, and other branches to plain dicts."""
    if not isinstance(value, _Branch):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


@operation("load_latest")
def load_latest(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    default: Any = None,
    copies: NeighbourCopies | None = None,
    strict: bool = True,
    verify: bool = True,
    trust: bool = False,
) -> Any:
    """Load the newest intact checkpoint in a folder, and return its ``extra``.

    A restarted program calls this function to continue from the last save::

        step = load_latest("run", model, optimizer, default={"step": 0})["step"]

    A damaged checkpoint is skipped, with a warning on every rank, and the next older one is loaded.
    If a background save of this process is running, the call waits for it first.

    Args:
        folder: a folder of checkpoints (for ``run/step-100``, this is ``run``), or a single
            checkpoint that each save replaces. The folder need not exist.
        model: a sharded model, or any other module.
        optimizer: an optimizer over the model's parameters, whose state is loaded too.
        default: the value returned if the folder has no checkpoint. In this case nothing is loaded.
        copies: copies in host memory, which are loaded if they are complete and newer than the
            checkpoints in the folder.
        strict, verify, trust: as for ``load``.

    Raises:
        ConfigError: names, shapes or the optimizer's class differ; a value is not plain data.
            Nothing was changed.
        StateError: all checkpoints are damaged. Nothing was changed.
    """
    with checked("load_latest", model, optimizer, strict=strict, verify=verify, trust=trust):
        check_path("load_latest", "folder", folder)
        if not isinstance(copies, NeighbourCopies | None):
            raise wrong_type("load_latest", "copies", "a NeighbourCopies or None", copies)
        tensors = [*model_tensors(model)[0].values()]
    main = Grids(tensors).main
    settle("load_latest", main, "wait")
    with main.together("load_latest"):
        mine = (candidates(Path(folder)), newest_time(Path(folder))) if main.is_first else ([], 0)
    found, written_ns = main.broadcast(mine)
    in_memory = None if copies is None else newest(copies, written_ns)
    places: list[tuple[str, contextlib.AbstractContextManager[Path]]] = []
    if copies is not None and in_memory is not None:
        places.append(("copies in memory", fetched(copies, in_memory, model)))
    places += [(name, contextlib.nullcontext(Path(folder) / name)) for name in found]
    passed_over: list[str] = []
    for name, where in places:
        try:
            with where as place:
                return load(place, model, optimizer, strict=strict, verify=verify, trust=trust)
        except StateError as error:
            if error.code != "FS618":
                raise
            passed_over.append(error.text.partition(" Use another checkpoint")[0])
            warn("FS618", f"load_latest: skipping {name}: {passed_over[-1]}")
    if passed_over:
        raise StateError(
            "FS618",
            f"load_latest: all {len(passed_over)} checkpoints in {folder} are damaged; nothing was "
            "changed.\n" + "\n".join(passed_over),
        )
    return default
