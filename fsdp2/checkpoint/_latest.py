"""Going on from the newest checkpoint that is whole.

Owns the search, and what is passed over. It must not know how a checkpoint is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer

from fsdp2._core.base.arguments import check_path, wrong_type
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.transfer.redistribute import Grids, checked_together
from fsdp2.checkpoint._background import settle
from fsdp2.checkpoint._dcp import load
from fsdp2.checkpoint._neighbours import NeighbourCopies, fetched, newest
from fsdp2.checkpoint._place import candidates, newest_time
from fsdp2.checkpoint._state import check, model_tensors


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
    """Load the newest checkpoint in a folder that is whole; return its ``extra``.

    So a program that is started again goes on where the last save was::

        step = load_latest("run", model, optimizer, default={"step": 0})["step"]

    A checkpoint that is damaged is passed over, with a warning on every rank, and the one before is
    taken. A save in the background is waited for.

    Args:
        folder: where checkpoints lie under names of their own, as ``run/step-100``, or the one
            folder that each save replaces. It need not exist.
        model: sharded, or any other.
        optimizer: one over the model's parameters, if its state is to be loaded.
        default: what is returned if the folder has no checkpoint. Nothing is loaded then.
        copies: in the memory of hosts, which are taken if they are newer than what the folder has,
            and whole.
        strict, verify, trust: as for ``load``.

    Raises:
        ConfigError: names, shapes or the kind of the optimizer differ; a value is no plain data.
            Nothing was changed.
        StateError: there are checkpoints, and all are damaged. Nothing was changed.
    """
    with checked_together("load_latest", model) as same:
        check("load_latest", model, optimizer, strict=strict, verify=verify, trust=trust)
        check_path("load_latest", "folder", folder)
        if not isinstance(copies, NeighbourCopies | None):
            raise wrong_type("load_latest", "copies", "a NeighbourCopies or None", copies)
        tensors = [*model_tensors(model)[0].values()]
        same.update(has_optimizer=optimizer is not None, strict=strict)
    main = Grids(tensors).main
    settle("load_latest", main, "wait")
    with main.together("load_latest"):
        mine = candidates(Path(folder)) if main.is_first else []
        written_ns = newest_time(Path(folder)) if main.is_first else 0
    found = main.broadcast(mine)
    passed_over: list[str] = []
    (written_ns,) = main.highest(written_ns)
    in_memory = None if copies is None else newest(copies, written_ns)
    if copies is not None and in_memory is not None:
        try:
            with fetched(copies, in_memory, model) as place:
                return load(place, model, optimizer, strict=strict, verify=verify, trust=trust)
        except StateError as error:
            if error.code != "FS618":
                raise
            passed_over.append(error.text.partition(" Take another checkpoint")[0])
            warn(
                "FS618",
                f"load_latest: passes over copies in memory: {passed_over[-1]}",
            )
    for name in found:
        try:
            return load(
                Path(folder) / name, model, optimizer, strict=strict, verify=verify, trust=trust
            )
        except StateError as error:
            if error.code != "FS618":
                raise
            passed_over.append(error.text.partition(" Take another checkpoint")[0])
            warn("FS618", f"load_latest: passes over {name}: {passed_over[-1]}")
    if passed_over:
        raise StateError(
            "FS618",
            f"load_latest: all of {len(passed_over)} checkpoints in {folder} are damaged; nothing "
            "was changed.\n" + "\n".join(passed_over),
        )
    return default
