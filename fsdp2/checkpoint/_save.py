"""Writing a sharded checkpoint, at once or in the background.

Owns which entries a checkpoint has, and the order of what ranks do together. It must not know the
form of files (``_writing``), who writes which block (``_contents``), nor how a checkpoint takes its
name (``_place``).
"""

from __future__ import annotations

import os
import secrets
import zlib
from pathlib import Path
from typing import Any, Literal, overload

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._base.arguments import check_count, check_flag, check_path, wrong_value
from fsdp2._base.errors import StateError
from fsdp2._comm.process_mesh import operation
from fsdp2._transfer.redistribute import Grids, checked_together
from fsdp2.checkpoint._background import SaveHandle, WhenBusy, settle, start
from fsdp2.checkpoint._contents import Content, Contents
from fsdp2.checkpoint._extra import EXTRA, EXTRA_TENSORS, packed
from fsdp2.checkpoint._optimizer_state import named_state, settle_state
from fsdp2.checkpoint._place import require_room, require_series
from fsdp2.checkpoint._publish import Workspace
from fsdp2.checkpoint._room import room_of
from fsdp2.checkpoint._saving import Saving
from fsdp2.checkpoint._state import check, sharded_state
from fsdp2.checkpoint._wrapped import opened


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: Literal[False] = False,
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> None: ...
@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: Literal[True],
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> SaveHandle: ...
@operation("save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: bool = False,
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> SaveHandle | None:
    """Write a sharded checkpoint as ``torch.distributed.checkpoint`` does: all of it, or nothing.

    It is written to a folder beside ``path``. That folder takes the name ``path`` once every rank
    has finished. So a save that fails, or is interrupted, leaves the checkpoint before it whole. If
    the program ends between the two renames, ``load`` finds the checkpoint before under its other
    name. All ranks of the model's mesh must see the same file system. Stages of a pipeline have
    meshes of their own: each saves to a folder of its own. If two jobs save to one path, the
    checkpoint of the last one stays, whole.

    With ``background=True`` it returns when the state is copied to host memory, and a thread
    writes the copy. What is saved is the state at the moment of the call, whatever is done to the
    model and the optimizer next. The thread sends nothing to other ranks. Of a model on a device
    the copies run beside what the device does next, up to the next step of an optimizer; before you
    write to parameters in another way, call ``handle.wait_for_copies``. A failure ends no training:
    ``handle.wait()`` raises it, and the next save warns of it on every rank. A program that ends
    waits for its save. The host memory, as large as the rank's part, is kept for the next save.

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
        background: write while the program goes on.
        keep_last: the checkpoint belongs to a series in the folder that ``path`` is in. Of those
            that were saved with ``keep_last``, only so many stay, the newest. A link ``latest``
            beside them leads to the last one that is whole.
        when_busy: what to do if the save before, in the background, has not ended: ``"wait"`` for
            it, or ``"refuse"``. A rank writes one at a time.

    Returns:
        A ``SaveHandle`` with ``background=True``, else None.

    Raises:
        ConfigError: ``path`` is a file, the working directory, or a folder with other files only;
            with ``keep_last``, something else is called ``latest``.
        UnsupportedError: a tensor wraps others (optimizer states of torchao), and ``load`` could
            not read it.
        StateError: a rank could not write, or not where the first rank looks; the message says
            which one and why. With ``"refuse"``: the save before goes on.
    """
    with checked_together("save", model) as same:
        check("save", model, optimizer)
        check_path("save", "path", path)
        check_flag("save", "background", background)
        if keep_last is not None:
            check_count("save", "keep_last", keep_last)
        if when_busy not in ("wait", "refuse"):
            raise wrong_value("save", "when_busy", "'wait' or 'refuse'", when_busy)
        state = sharded_state(model)  # a hook of the user's may raise
        state["model"] = {k: v for k, v in state["model"].items() if v is not None}
        state["model"] = opened(model, state["model"])
        same.update(has_optimizer=optimizer is not None, background=background)
        same.update(keep_last=keep_last, when_busy=when_busy)
    place = Path(path).resolve()
    grids = Grids([*state["model"].values()])
    main = grids.main
    settle("save", main, when_busy)
    settle_state(optimizer)
    with main.together("save") as same:
        if optimizer is not None:  # a rank may have states that the others have not
            state["optimizer"] = named = named_state(model, optimizer)
            named["state"] = _without_tuples(named["state"])
        beside = packed(extra, main.is_first) if extra is not None else {}
        own_beside = beside.pop(EXTRA, None)  # the first rank's
        same["DTensors in extra"] = [*beside.get(EXTRA_TENSORS, ())]
        contents = Contents.of(state | beside, grids)
        digests = contents.digests()
        require_room(place)
        if keep_last is not None:
            require_series(place)
    total = zlib.crc32(repr(digests).encode())
    token = secrets.randbits(32) if main.is_first else 0
    token, most, least = main.highest(token, total, -total)
    contents = contents.agreed(main, digests, is_equal=most == -least)
    if own_beside is not None:
        contents.rest.append(Content((EXTRA,), own_beside))
    workspace = Workspace(place, f"{token:08x}")
    try:
        with main.together("save"):
            if main.is_first:
                workspace.make()
        with main.together("save"):
            if not workspace.path.is_dir():
                raise StateError(
                    "FS613",
                    f"save: does not see {workspace.path}, which the first rank has made. All "
                    "ranks must save to one path on a file system that all of them see.",
                )
            saving = Saving(place, workspace, contents, [*contents.pieces()], keep_last)
            if background:
                saving.copy(room_of(model))
                handle = SaveHandle(saving)
        if background:
            return start(handle)
        with main.together("save"):
            saving.write()
        with main.together("save"):
            if main.is_first:
                saving.finish()
    except BaseException as error:
        if main.is_first or isinstance(error, Exception):
            workspace.remove()
        raise
    return None


def _without_tuples(value: Any) -> Any:
    """Return lists for tuples of tensors, which DCP does not look into."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return list(value)
    return value
