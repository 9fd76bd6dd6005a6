"""Writing a sharded checkpoint, at once or in the background.

Owns which entries a checkpoint has, and the order of what ranks do together. It must not know the
form of files (``_writing``), who writes which block (``_contents``), nor how a checkpoint takes its
name (``_place``).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Literal, overload

import torch.nn as nn
from torch.optim import Optimizer

from fsdp2._core.base.arguments import check_count, check_flag, check_path, wrong_value
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.transfer.redistribute import checked_together
from fsdp2.checkpoint._agreed import agree, main_of, state_of
from fsdp2.checkpoint._background import SaveHandle, Saving, WhenBusy, room_of, settle, start
from fsdp2.checkpoint._place import require_room, require_series
from fsdp2.checkpoint._publish import Workspace
from fsdp2.checkpoint._state import check


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
        state = state_of(model)  # a hook of the user's may raise
        same.update(has_optimizer=optimizer is not None, background=background)
        same.update(keep_last=keep_last, when_busy=when_busy)
    place = Path(path).resolve()

    def require_place() -> None:
        require_room(place)
        if keep_last is not None:
            require_series(place)

    settle("save", main_of(state), when_busy)
    number = secrets.randbits(32)
    agreed = agree("save", model, optimizer, extra, state, number, require_place)
    main, contents = agreed.main, agreed.contents
    workspace = Workspace(place, f"{agreed.number:08x}")
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
