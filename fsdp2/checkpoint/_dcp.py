"""Sharded checkpoints in files, as ``torch.distributed.checkpoint`` writes them.

Owns which entries a checkpoint has, what becomes of them in a model and an optimizer, and when a
checkpoint takes its name. It must not know how tensors are cut, nor the form of files.

[Note: saves, all or nothing]
A checkpoint is written to a workspace beside its place (see ``_publish``). When every rank has said
that it is done, the first one looks whether it sees all files, as large as they were written; it
renames what is there to ``.NAME.old-TOKEN``, the new one to ``NAME``, and removes the old one;
files in it that are not of a checkpoint go to the new one. Whatever stops a save before, the old
one has its name; if it is stopped between the two renames, the old one is whole under its other
name, where ``load`` looks next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._base.arguments import check_key, check_path
from fsdp2._base.containers import visit_tensors
from fsdp2._base.errors import ConfigError, StateError
from fsdp2._base.names import clean, named_parameters
from fsdp2._comm.process_mesh import Grid, operation
from fsdp2._engine.between_steps import require_idle
from fsdp2._transfer.redistribute import Grids, LocalShard, checked_together
from fsdp2.checkpoint._change import StateManifest
from fsdp2.checkpoint._checksums import DamagedError, said
from fsdp2.checkpoint._extra import EXTRA, EXTRA_TENSORS, packed, unpacked
from fsdp2.checkpoint._load import Source, load_full
from fsdp2.checkpoint._optimizer_state import map_state, named_state, rekey, settle_state
from fsdp2.checkpoint._publish import Workspace, exclusive, neighbour, neighbours, sync
from fsdp2.checkpoint._reading import Reader
from fsdp2.checkpoint._saved import METADATA, Entry, Saved, read
from fsdp2.checkpoint._state import check, is_extra, model_tensors, sharded_state
from fsdp2.checkpoint._wrapped import opened

OLD = "old"
"""What the names of checkpoints say that saves replaced, or had no time to."""

RENAMES = 100
"""How often a save gives its names again, where others give theirs at the same time."""


# Saving.


@operation("save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Write a sharded checkpoint with ``torch.distributed.checkpoint``: all of it, or nothing.

    It is written to a folder beside ``path``. That folder takes the name ``path`` once every rank
    has finished. So a save that fails, or is interrupted, leaves the checkpoint before it whole. If
    the program ends between the two renames, ``load`` finds the checkpoint before under its other
    name. All ranks of the model's mesh must see the same file system. Stages of a pipeline have
    meshes of their own: each saves to a folder of its own. If two jobs save to one path, the
    checkpoint of the last one stays, whole.

    Args:
        path: a folder that is empty, has a checkpoint, or does not exist. The checkpoint is
            replaced; other files in the folder stay.
        model: sharded, or any other. Of what is not sharded (buffers, ignored parameters) the
            first rank's is saved.
        optimizer: one over the model's parameters.
        extra: any object that pickles (a step, a scheduler's state). The first rank's is saved.
            ``load`` returns it, with tensors on the CPU. DTensors in it (of an ``EMA``) are saved
            in shards and come back whole. What is more than plain data needs ``trust=True`` in
            ``load``.

    Raises:
        ConfigError: ``path`` is a file, the working directory, or a folder with other files only.
        UnsupportedError: a tensor wraps others (optimizer states of torchao), and ``load`` could
            not read it.
        StateError: a rank could not write, or not where the first rank looks; the message says
            which one and why.
    """
    with checked_together("save", model) as same:
        check("save", model, optimizer)
        check_path("save", "path", path)
        state = sharded_state(model)  # a hook of the user's may raise
        same.update(has_optimizer=optimizer is not None)
    # it imports torch.distributed.checkpoint, which is heavy
    from fsdp2.checkpoint._summing import write

    place = Path(path).resolve()
    state["model"] = {k: v for k, v in state["model"].items() if v is not None}
    state["model"] = opened(model, state["model"])
    grids = Grids([*state["model"].values()])
    main = grids.main
    settle_state(optimizer)
    with main.together("save"):  # a rank may have states that the others have not
        if optimizer is not None:
            state["optimizer"] = named = named_state(model, optimizer)
            named["state"] = _without_tuples(named["state"])
        _require_loadable(state, grids)
    _leave_to_the_first(state, main)
    with main.together("save") as same:  # the others may pass no extra
        entries = packed(extra, main.is_first) if extra is not None else {}
        same["DTensors in extra"] = [*entries.get(EXTRA_TENSORS, ())]
    state |= entries
    workspace = Workspace(place, main.broadcast(uuid.uuid4().hex[:8]))
    try:
        with main.together("save"):
            _require_room(place)
            if main.is_first:
                workspace.make()
        with main.together("save"):
            if not workspace.path.is_dir():
                raise StateError(
                    "FS613",
                    f"save: does not see {workspace.path}, which the first rank has made. All "
                    "ranks must save to one path on a file system that all of them see.",
                )
        sizes = write(state, workspace.path, main)
        with main.together("save"):
            _require_written(workspace.path, sizes)
            if main.is_first:
                _publish(workspace, place)
    except BaseException as error:
        if main.is_first or isinstance(error, Exception):
            workspace.remove()
        raise


def _require_loadable(state: dict[str, Any], grids: Grids) -> None:
    """Raise UnsupportedError for what ``load`` could not read: torch would write it."""
    for name, tensor in state["model"].items():
        if isinstance(tensor, Tensor):
            grids.hold(name, tensor)
    if "optimizer" in state:
        map_state(lambda name, key, t: grids.hold(f"{name}.{key}", t), state["optimizer"]["state"])


def _leave_to_the_first(state: dict[str, Any], main: Grid) -> None:
    """Drop what the first rank saves for all: buffers, plain parameters, counters, param groups.

    Ranks may have different ones (BatchNorm's running values), and DCP would take each from any
    rank. What the first rank does not have stays.
    """
    optimizer: dict[str, Any] = state.get("optimizer", {})
    states: dict[str, dict[str, Any]] = optimizer.get("state", {})
    holders: dict[tuple[str, ...], dict[str, Any]] = {
        ("model",): state["model"],
        ("optimizer",): optimizer,
    }
    holders |= {("optimizer", "state", name): fields for name, fields in states.items()}
    mine = {
        (*path, key)
        for path, holder in holders.items()
        for key, value in holder.items()
        if value is not states and not _has_shards(value)
    }
    by_the_first = main.broadcast(mine)
    if main.is_first:
        return
    for *path, key in mine & by_the_first:
        holder = holders[tuple(path)]
        del holder[key]
        if not holder and holder is states.get(path[-1]):
            del states[path[-1]]


def _has_shards(value: Any) -> bool:
    found: list[Tensor] = []
    visit_tensors(found.append, value)
    return any(isinstance(tensor, DTensor) for tensor in found)


def _require_room(place: Path) -> None:
    """Raise ConfigError unless a checkpoint may take the name: nothing else may be lost.

    Other saves rename what is there: what was found counts if it still stands there after.
    """
    for _ in range(RENAMES):
        try:
            found = os.stat(place)
            problem = _in_the_way(place, found)
            if problem is None:
                return
            again = os.stat(place)
            # a number may be that of a folder that was removed, so its time counts too
            if os.path.samestat(found, again) and found.st_ctime_ns == again.st_ctime_ns:
                raise ConfigError("FS615", f"save: {problem}")
        except FileNotFoundError:
            if not place.exists():
                return


def _in_the_way(place: Path, found: os.stat_result) -> str | None:
    """Say what a checkpoint would replace, unless that is nothing, or a checkpoint."""
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is a file. Pass a folder."
    is_here = os.path.samestat(found, os.stat("."))
    if is_here or os.path.ismount(place):
        what = "the working directory" if is_here else "a mount point"
        return (
            f"{place} is {what}, and a checkpoint takes the place of its folder. Pass a "
            "folder in it."
        )
    is_ours = (place / METADATA).exists() or any(neighbours(place, OLD))
    if not is_ours and any(place.iterdir()):
        return (
            f"{place} is a folder with other files, and no checkpoint. A checkpoint takes "
            "the place of its folder: pass one that is empty, or does not exist."
        )
    return None


def _require_written(folder: Path, sizes: dict[str, int]) -> None:
    """Raise StateError unless every file is there, as large as it was written."""
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            found = None
        if found != size:
            what = "is not there" if found is None else f"has {found} bytes"
            raise StateError(
                "FS613",
                f"save: {folder / name}, which a rank wrote with {size} bytes, {what} where the "
                "first rank looks. All ranks must see one file system. The checkpoint before, if "
                "there is one, is as it was.",
            )


def _publish(workspace: Workspace, place: Path) -> None:
    """Give a checkpoint its name, whoever else does so. See [Note: saves, all or nothing]."""
    sync(workspace.path)
    with exclusive(place):
        workspace.release()
        for number in range(RENAMES):
            try:
                aside = neighbour(place, f"{OLD}-{workspace.token}-{number}")
                if place.exists():
                    os.rename(place, aside)
                older = neighbours(place, OLD)
                os.rename(workspace.path, place)
            except FileNotFoundError:
                if not workspace.path.exists():
                    raise
            except OSError as error:  # the other one's has the name again
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                break
        else:
            raise StateError(
                "FS614",
                f"save: others gave {place} to their checkpoints {RENAMES} times meanwhile. Save "
                "to another path.",
            )
        sync(place.parent)
        for old in older:
            _retire(old, place)


def _retire(old: Path, heir: Path) -> None:
    """Remove a checkpoint. What somebody else put into its folder moves to the heir's.

    Where there are no locks, another save may do the same, or rename the heir meanwhile: then the
    rest is left to it, or to the next save.
    """
    try:
        for entry in old.iterdir():
            is_ours = entry.name.startswith(METADATA) or entry.suffix == ".distcp"
            if not is_ours and not (heir / entry.name).exists():
                os.rename(entry, heir / entry.name)
    except FileNotFoundError:
        return
    shutil.rmtree(old, ignore_errors=True)


def _without_tuples(value: Any) -> Any:
    """Return lists for tuples of tensors, which DCP does not look into."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return list(value)
    return value


# Loading.


def find(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint lies: at ``path``, or where an interrupted save left it.

    Raises:
        ConfigError: at neither.
    """
    place = Path(path).resolve()
    for _ in range(2):  # a save may give names between two looks
        if (place / METADATA).exists():
            return place
        older = [old for old in neighbours(place, OLD) if (old / METADATA).exists()]
        if older:
            return max(older, key=lambda old: (old / METADATA).stat().st_mtime)
    hint = "Pass the folder that fsdp2.checkpoint.save or torch.distributed.checkpoint.save wrote."
    if place.is_file():
        hint += " A file of torch.save is for load_full_state(model, {'model': torch.load(path)})."
    elif any(place.glob("*.safetensors")):
        hint += " For the safetensors files in it call load_safetensors."
    raise ConfigError("FS612", f"load: no checkpoint at {place}. {hint}")


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
            found = sorted({str(entry.path[0]) for entry in self._reader.entries})
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
