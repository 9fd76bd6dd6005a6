"""Sharded checkpoints out of files, as ``torch.distributed.checkpoint`` writes them.

Owns what becomes of a checkpoint's entries in a model and an optimizer. It must not know how
tensors are cut, nor the form of files. ``_save`` writes them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.arguments import check_key, check_path
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.names import clean, named_parameters, printable
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.transfer.redistribute import Grids, LocalShard, checked_together
from fsdp2.checkpoint._change import StateManifest
from fsdp2.checkpoint._checksums import DamagedError, said
from fsdp2.checkpoint._extra import EXTRA, EXTRA_TENSORS, unpacked
from fsdp2.checkpoint._load import Source, load_full
from fsdp2.checkpoint._optimizer_state import map_state, rekey
from fsdp2.checkpoint._place import RENAMES, find
from fsdp2.checkpoint._reading import Reader
from fsdp2.checkpoint._saved import Entry, Saved, read
from fsdp2.checkpoint._state import check, is_extra, model_tensors


def _read(path: str | os.PathLike[str], *, verify: bool, trust: bool) -> Saved:
    """Read what a checkpoint has, wherever saves give names meanwhile."""
    for _ in range(RENAMES):
        with contextlib.suppress(FileNotFoundError):
            return read(find(path), verify=verify, trust=trust)
    raise StateError(
        "FS626",
        f"load: other saves replaced {path} {RENAMES} times meanwhile. Call load again; nothing "
        "was changed.",
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
    """Load a sharded checkpoint, written on any mesh; return its ``extra``.

    It takes what ``save`` wrote, and what ``torch.distributed.checkpoint`` wrote for torch's FSDP1
    or FSDP2. Parameters on the meta device get memory. While it loads, a rank needs as much memory
    again as its shards take.

    Args:
        path: the folder.
        model: sharded, or any other.
        optimizer: one over the model's parameters, if its state is to be loaded.
        model_key: under which key of the saved dict the model's state is. None: the state was saved
            by itself.
        optim_key: under which key the optimizer's state is.
        strict: every name of the model must be in the checkpoint, and the other way round.
        verify: check the checksums of all that is read (those that ``save`` wrote).
        trust: execute what the files say, where they hold more than plain data. Only for files
            that you wrote.

    Raises:
        ConfigError: no checkpoint there; names, shapes or the kind of the optimizer differ; a value
            is no plain data. Nothing was changed.
        StateError: a file is missing or damaged. Nothing was changed.
    """
    with checked_together("load", model) as same:
        check("load", model, optimizer, strict=strict, verify=verify, trust=trust)
        check_path("load", "path", path)
        if model_key is not None:
            check_key("load", "model_key", model_key)
        check_key("load", "optim_key", optim_key)
        require_idle(model, "load")
        same.update(has_optimizer=optimizer is not None, strict=strict)
        same.update(model_key=model_key, optim_key=optim_key)
    main = Grids([*model_tensors(model)[0].values()]).main
    with main.together("load"):
        saved = _read(path, verify=verify, trust=trust)
    if len(set(main.collect(saved.digest))) > 1:
        raise StateError(
            "FS613",
            f"load: ranks see different checkpoints at {path}. If a save replaced it meanwhile, "
            "call load again. Else all ranks must see one file system. Nothing was changed.",
        )
    with Reader(saved, verify=verify, trust=trust) as reader:
        content = _Content(reader, model_key, optim_key)
        load_full("load", model, optimizer, content, from_rank0=False, strict=strict)
        return content.extra


class _Content(Source):
    """What a checkpoint has for a model, for an optimizer, and beside (``extra``)."""

    def __init__(self, reader: Reader, model_key: str | None, optim_key: str) -> None:
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
        return replace(told, extra={**told.extra, **states})

    def fill(self, what: str, held: LocalShard, in_optimizer: bool) -> None:
        name = held.name
        entry = self._in_optimizer[name] if in_optimizer else self._in_model[name][0]
        self._reader.fill(entry, held.own, held.local)

    def _extra_state(self, entries: Sequence[Entry]) -> Any:
        inside = [replace(e, path=("", *e.path[self._depth :])) for e in entries]
        return _lists(_tree(inside, self._reader.whole)[""])

    def _optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state under names, its tensors on meta.

        Raises:
            ConfigError: there is none.
        """
        own = [entry for entry in self._reader.entries if entry.is_under(self._optim_key)]
        if not any(entry.path[1] == "param_groups" for entry in own):
            keys = {str(entry.path[0]) for entry in self._reader.entries}
            found = [printable(key) for key in sorted(keys)[:5]]
            raise ConfigError(
                "FS602",
                "load: an optimizer was passed, and the checkpoint has none under "
                f"{self._optim_key!r}. Found {found}. If one of these is an optimizer's state, "
                "pass it as optim_key=; if none is, leave the optimizer out. Nothing was changed.",
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
        # Older saves left out tensors without elements: a state that lacks them begins anew.
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
        """Return what the user saved beside."""
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
    """True if what was saved under a name is a tensor, not an object that may hold some."""
    return len(found) == 1 and found[0].shape is not None and len(found[0].path) <= 2


def _with_ids(entry: Entry, params: dict[str, nn.Parameter]) -> Entry:
    """Return an entry of an optimizer's state with a number for an id that was made a string."""
    path = entry.path
    is_id = len(path) > 2 and path[1] == "state" and str(path[2]).isdecimal()
    if not is_id or path[2] in params:
        return entry
    return replace(entry, path=(*path[:2], int(path[2]), *path[3:]))


def _tree(entries: Sequence[Entry], value_of: Callable[[Entry], Any]) -> dict[Any, Any]:
    """Put values back into the dicts that they were saved in; lists are dicts of numbers."""
    root: dict[Any, Any] = _Branch()
    for entry in entries:
        target = root
        for part in entry.path[:-1]:
            target = target.setdefault(part, _Branch())
        target[entry.path[-1]] = value_of(entry)
    return root


class _Branch(dict[Any, Any]):
    """A dict of ``_tree``: what stands in one is a branch, or was saved as a whole."""


def _lists(value: Any) -> Any:
    """Turn branches whose keys are 0, 1, 2, ... back into lists, and others into dicts."""
    if not isinstance(value, _Branch):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
