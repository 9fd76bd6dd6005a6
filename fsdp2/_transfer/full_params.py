"""``full_params``: the whole parameters of a model, one after another in bounded memory.

Owns the choice of parameters and what the caller makes of each. It must not know how tensors
travel: ``_transfer.redistribute`` does that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._base.arguments import check_count, check_dtype, check_flag, check_function
from fsdp2._base.interrupts import kept_interrupts
from fsdp2._base.names import cleaned, named_parameters
from fsdp2._engine.between_steps import require_idle
from fsdp2._transfer.redistribute import Grids, Target, checked_together, gather

Transform = Callable[[str, Tensor], "Tensor | None"]


def full_params(
    module: nn.Module,
    *,
    max_bytes: int,
    dtype: torch.dtype | None = None,
    callback: Transform | None = None,
    names: Callable[[str], bool] | None = None,
    buffers: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over ``(name, whole tensor)`` of a module's parameters, in bounded memory.

    Parameters are gathered in buckets, in the order of ``named_parameters()``, under their names
    without wrappers (of activation checkpointing, say); a tied one comes once, under its first.
    Tensors are new, detached and plain, on the device of the shards, and belong to the caller;
    tensor-parallel ones are whole too. Collective: every rank iterates to the end, or leaves the
    loop at the same tensor. If one rank alone leaves, or its callback or its loop raises, the
    others raise too, when they ask for the next bucket.

    Adapters can be merged on the way: gather them first, then let ``callback`` add them::

        adapters = dict(full_params(model, max_bytes=n, names=lambda name: "lora_" in name))

        def merge(name, weight):
            stem = name.removesuffix("base_layer.weight")
            a, b = (adapters.get(f"{stem}lora_{x}.default.weight") for x in "AB")
            return weight if a is None else weight + scale * (b @ a)

        for name, weight in full_params(model, max_bytes=n, callback=merge): ...

    Args:
        module: a sharded module, or any other, whose parameters may be DTensors.
        max_bytes: bytes of the bucket and of the buffers that it travels in, beside what the caller
            keeps (the tensor of a loop's variable lives while the next bucket is gathered). A
            parameter that is larger comes alone, in pieces: then it is that parameter and this.
        dtype: floating-point tensors are cast to it, before they are sent if it is narrower.
        callback: called with each name and whole tensor on every rank; what it returns is yielded,
            and None leaves the tensor out.
        names: which parameters to take; None takes all. It must say the same on every rank.
        buffers: yield buffers too (this rank's), after the parameters.

    Raises:
        ConfigError: not a module; ``max_bytes`` is not a positive int; ``dtype`` is not one of
            floating-point numbers.
        StateError: inside a forward or a backward; a parameter is on the meta device; another rank
            left the loop, its callback raised, or it had no memory.
        UnsupportedError: a partial sum, or a tensor subclass without bytes of its own.
    """
    # Ctrl-C here is told in the exchange of the first bucket, where the others go on to
    with kept_interrupts(leave_pending=True), checked_together("full_params", module) as same:
        check_count("full_params", "max_bytes", max_bytes)
        check_dtype("full_params", "dtype", dtype)
        check_function("full_params", "callback", callback)
        check_function("full_params", "names", names)
        check_flag("full_params", "buffers", buffers)
        require_idle(module, "full_params")
        found: dict[str, Tensor] = {**named_parameters(module)}
        if buffers:
            found |= cleaned(dict(module.named_buffers()))
        chosen = {name: found[name] for name in found if names is None or names(name)}
        grids = Grids(list(chosen.values()))
        helds = [grids.hold(name, tensor) for name, tensor in chosen.items()]
        same.update(max_bytes=max_bytes, dtype=dtype, names=[*chosen])
    tensors = gather(helds, max_bytes, Target(dtype=dtype), grids.main, "full_params")
    return _iterate(tensors, list(chosen), callback)


def _iterate(
    tensors: Generator[tuple[int, Tensor | None], None, None],
    names: list[str],
    callback: Transform | None,
) -> Iterator[tuple[str, Tensor]]:
    with contextlib.closing(tensors):
        for index, tensor in tensors:
            assert tensor is not None
            result: Tensor | None = tensor
            if callback is not None:
                try:
                    result = callback(names[index], tensor)
                except Exception as error:
                    tensors.throw(error)  # so that the other ranks hear of it
                    raise
            del tensor
            if result is not None:
                yield names[index], result
            del result
