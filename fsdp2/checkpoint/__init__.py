"""``fsdp2.checkpoint``: state of a sharded model and its optimizer, in memory and in files.

Owns the public functions and the meaning of their arguments. ``_state`` makes and loads states,
``_optimizer_state`` has names and ids, ``_dcp`` and ``_safetensors`` write and read.

Three forms, each ``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``:

============ ============================================ =====================================
form         tensors                                      loads on
============ ============================================ =====================================
full         whole and plain                              any mesh, a plain model, torch's FSDP1
                                                          and FSDP2
sharded      ``DTensor``s; what ``save`` and ``load`` use any mesh, through a folder
rank-local   this rank's part, plain                      the same ranks of the same meshes
============ ============================================ =====================================

Every function is collective over the ranks of the model's meshes. Where one rank meets an error,
all of them raise it; a load that raises has changed nothing, and runs nothing that files say.
``docs/checkpoints.md`` has what can be relied on, and what is trusted.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from fsdp2._base.arguments import (
    check_count,
    check_dtype,
    check_flag,
    check_key,
    check_module,
    check_optimizer,
    check_path,
)
from fsdp2._base.names import clean
from fsdp2._comm.process_mesh import operation
from fsdp2._transfer.full_params import check_max_bytes
from fsdp2._transfer.redistribute import Target
from fsdp2.checkpoint import _change, _load, _state
from fsdp2.checkpoint._change import IncompatibleKeys as IncompatibleKeys
from fsdp2.checkpoint._optimizer_state import Keys, check_keys, map_values
from fsdp2.checkpoint._optimizer_state import rekey as rekey

MAX_BYTES = 256 << 20
"""Default cap on what a rank holds beside its shards while tensors travel."""

PLAIN_DICTS = (dict, OrderedDict)
"""A state of any other mapping may be read from files as it is asked."""

MAX_FILE_BYTES = 5 * 10**9
"""Default size of a file of a safetensors checkpoint, as in ``transformers``."""

__all__ = [
    "IncompatibleKeys",
    "full_state",
    "load",
    "load_full_state",
    "load_local_state",
    "load_safetensors",
    "load_sharded_state",
    "local_state",
    "rekey",
    "save",
    "save_safetensors",
    "sharded_state",
]


def _check(who: str, model: object, optimizer: object = None, **flags: object) -> None:
    """Raise ConfigError for what no function here can use."""
    check_module(who, "model", model)
    check_optimizer(who, optimizer)
    for name, flag in flags.items():
        check_flag(who, name, flag)


@operation("full_state")
def full_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    rank0_only: bool = True,
    cpu_offload: bool = True,
    max_bytes: int = MAX_BYTES,
    optim_keys: Keys = "name",
) -> dict[str, Any]:
    """Return the whole state of a model and its optimizer, as one process would have it.

    Tensors are plain and new; names of a tied parameter share one. Ranks other than the writer hold
    at most ``max_bytes`` beside their shards at any time, and so does the writer beside what it
    has collected.

    Args:
        optimizer: one over the model's parameters.
        rank0_only: only the first rank of the mesh gets the state, the others an empty dict.
        cpu_offload: the tensors are in host memory.
        max_bytes: bytes of the buffers that tensors travel in.
        optim_keys: ``"name"`` calls parameters by name, as torch's FSDP1 and DCP helpers do,
            ``"id"`` as ``optimizer.state_dict()`` of one process does.

    Raises:
        ConfigError: the optimizer holds other parameters; a wrong argument.
        StateError: inside a forward or a backward; a parameter is on the meta device.
        UnsupportedError: a parameter lies on some of the model's ranks only, is a partial sum, or
            is a tensor subclass without bytes of its own.
    """
    flags = {"rank0_only": rank0_only, "cpu_offload": cpu_offload}
    _check("full_state", model, optimizer, **flags)
    check_max_bytes("full_state", max_bytes)
    check_keys("full_state: optim_keys", optim_keys)
    device = torch.device("cpu") if cpu_offload else None
    target = Target(on_all=not rank0_only, device=device, counted=False)
    return _state.full(model, optimizer, optim_keys, target, max_bytes)


@operation("load_full_state")
def load_full_state(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    optimizer: Optimizer | None = None,
    *,
    from_rank0: bool = True,
    strict: bool = True,
    max_bytes: int = MAX_BYTES,
) -> IncompatibleKeys:
    """Load a whole state: what ``full_state``, a plain model or torch's FSDP1 returned.

    The first rank scatters each tensor to the ranks that hold parts of it, so that no other rank
    has more than ``max_bytes`` beside its shards. Parameters on the meta device get memory first.
    The optimizer's state may be under names or ids; values of a parameter's shape become
    ``DTensor``s placed as the parameter is. Values are cast to the dtypes of the model.

    Args:
        state: needed on the first rank of the mesh only; the others may pass None. If its
            ``"model"`` is no plain dict, values may be read from files as it is asked, and get room
            beside the model's first, which ``max_bytes`` does not count.
        from_rank0: False takes each rank's own ``state``, and nothing is sent.
        strict: every name must be in both; a tied parameter needs one of its names.

    Returns:
        Names of the model that the state lacks, and the other way round (empty if ``strict``).

    Raises:
        ConfigError: names, shapes or the kind of the optimizer differ; no state for the optimizer;
            a value that an integer dtype cannot hold. Nothing was changed.
        StateError: inside a forward or a backward; reading a value failed. Nothing was changed.
    """
    _check("load_full_state", model, optimizer, from_rank0=from_rank0, strict=strict)
    check_max_bytes("load_full_state", max_bytes)
    given: Any = state
    names: dict[str, str] = {}
    values: dict[str, torch.Tensor] = {}

    def describe() -> _change.Told:
        told = _change.tell("load_full_state", given, model, optimizer)
        names.update({clean(name): name for name in given["model"]})
        if optimizer is not None:
            named = _change.optimizer_part("load_full_state", given, model, optimizer)
            for name, fields in named["state"].items():
                map_values(values.setdefault, name, fields)
        return told

    return _load.load_full(
        "load_full_state",
        model,
        optimizer,
        describe,
        lambda name: given["model"][names[name]],
        values.__getitem__,
        from_rank0=from_rank0,
        strict=strict,
        max_bytes=max_bytes,
        is_in_memory=not isinstance(state, Mapping) or type(state.get("model")) in PLAIN_DICTS,
    )


@operation("sharded_state")
def sharded_state(
    model: nn.Module, optimizer: Optimizer | None = None, *, optim_keys: Keys = "name"
) -> dict[str, Any]:
    """Return the state as it lies on the ranks: ``DTensor``s that share memory with the model.

    Raises:
        ConfigError: the optimizer holds other parameters.
        StateError: inside a forward or a backward.
    """
    _check("sharded_state", model, optimizer)
    check_keys("sharded_state: optim_keys", optim_keys)
    return _state.sharded(model, optimizer, optim_keys)


@operation("load_sharded_state")
def load_sharded_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load what ``sharded_state`` returned for a model on the same meshes.

    Raises:
        ConfigError: as ``load_full_state``, or another placement; nothing was changed.
        StateError: inside a forward or a backward.
    """
    _check("load_sharded_state", model, optimizer, strict=strict)
    return _load.load_sharded(model, state, optimizer, strict)


@operation("local_state")
def local_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's own parts as plain tensors, and under ``"layout"`` where they lie.

    Tensors share memory with the model. ``torch.save`` of it is the fastest checkpoint there is,
    and loads on the same ranks of the same meshes only.
    """
    _check("local_state", model, optimizer)
    return _state.local(model, optimizer)


@operation("load_local_state")
def load_local_state(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None
) -> None:
    """Load what ``local_state`` returned on this rank.

    Raises:
        ConfigError: as ``load_full_state``, or some rank's parts lie elsewhere now; nothing was
            changed.
    """
    _check("load_local_state", model, optimizer)
    _load.load_local(model, state, optimizer)


@operation("save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Write a sharded checkpoint with ``torch.distributed.checkpoint``: all of it, or nothing.

    It is written to a folder beside ``path``, which takes the name once every rank has finished, so
    a save that fails, or is interrupted, leaves the checkpoint before it whole. If the program ends
    between the two renames, ``load`` finds the one before under its other name. All ranks must see
    the same file system. Two jobs may save to one path: the last one's checkpoint stays, whole.

    Args:
        path: a folder that is empty, has a checkpoint, or does not exist. The checkpoint is
            replaced, other files beside it stay.
        extra: any object that pickles (a step, a scheduler's state); the first rank's is kept, and
            comes back as it was, with tensors on the CPU. ``DTensor``s in it (of an ``EMA``) are
            saved in shards and come back whole. What is more than plain data is loaded with
            ``trust=True`` only.

    Raises:
        ConfigError: ``path`` is a file, the working directory, or a folder with other files only.
        StateError: a rank could not write, or not where the first rank looks; the message says
            which one and why.
    """
    _check("save", model, optimizer)
    check_path("save", "path", path)
    from fsdp2.checkpoint import _dcp  # it imports torch.distributed.checkpoint, which is heavy

    _dcp.save(path, model, optimizer, extra)


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
    or FSDP2: say under which keys of the saved dict the two states are (``model_key=None``: the
    model's was saved by itself). Parameters on the meta device get memory.

    Values are read beside the model's: while it loads, a rank holds the room of its shards again.

    Args:
        strict: every name of the model must be in the checkpoint, and the other way round.
        verify: check the checksums of all that is read (those that ``save`` wrote).
        trust: execute what the files say, where they hold more than plain data. Only for files
            that you wrote.

    Raises:
        ConfigError: no checkpoint there; names, shapes or the kind of the optimizer differ; a value
            is no plain data. Nothing was changed.
        StateError: a file is missing or damaged. Nothing was changed.
    """
    _check("load", model, optimizer, strict=strict)
    check_path("load", "path", path)
    if model_key is not None:
        check_key("load", "model_key", model_key)
    check_key("load", "optim_key", optim_key)
    from fsdp2.checkpoint import _dcp  # it imports torch.distributed.checkpoint, which is heavy

    return _dcp.load(
        path,
        model,
        optimizer,
        strict=strict,
        model_key=model_key,
        optim_key=optim_key,
        verify=verify,
        trust=trust,
    )


@operation("save_safetensors")
def save_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a full model as safetensors, with the names of files that ``transformers`` loads.

    One file, ``model.safetensors``, or several and an index. The first rank writes, and holds one
    file's tensors at a time; the other ranks hold at most ``max_bytes`` beside their shards. A tied
    parameter is written once, under its first name. Files that were there are replaced once all
    new ones are written. Two jobs may save to one folder: the last one's files stay, whole.

    Args:
        dtype: floating-point tensors are cast to it.
        max_file_bytes: most bytes of tensors in a file (one tensor may be larger).

    Raises:
        ConfigError: the package ``safetensors`` is not installed.
        StateError: the first rank could not write.
    """
    _check("save_safetensors", model)
    check_path("save_safetensors", "folder", folder)
    check_dtype("save_safetensors", "dtype", dtype)
    check_max_bytes("save_safetensors", max_bytes)
    check_count("save_safetensors", "max_file_bytes", max_file_bytes)
    from fsdp2.checkpoint import (
        _safetensors,  # it imports torch.distributed.checkpoint, which is heavy
    )

    _safetensors.save(folder, model, dtype, max_bytes, max_file_bytes)


@operation("load_safetensors")
def load_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    max_bytes: int = MAX_BYTES,
    verify: bool = True,
    trust: bool = False,
) -> IncompatibleKeys:
    """Load a full model from safetensors: the first rank reads, tensor by tensor, and scatters.

    Values are read beside the model's: while it loads, a rank holds the room of its shards again.

    Args:
        strict: every name of the model must be in the files, and the other way round.
        max_bytes: bytes of the buffers that tensors travel in.
        verify: check the checksums that ``save_safetensors`` wrote.
        trust: follow links that leave the folder.

    Raises:
        ConfigError: no such files; names or shapes differ; a name or a link that leaves the folder;
            ``safetensors`` is not installed. Nothing was changed.
        StateError: a file is missing or damaged. Nothing was changed.
    """
    _check("load_safetensors", model, strict=strict)
    check_path("load_safetensors", "folder", folder)
    check_max_bytes("load_safetensors", max_bytes)
    from fsdp2.checkpoint import (
        _safetensors,  # it imports torch.distributed.checkpoint, which is heavy
    )

    return _safetensors.load(
        folder, model, strict=strict, max_bytes=max_bytes, verify=verify, trust=trust
    )
