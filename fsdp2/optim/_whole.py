"""Optimizers that step on whole matrices, each once, on the rank that owns it.

Owns ``whole``: the classes that it refuses, and the optimizer that it makes of a class. What a step
does is in ``_owned_step``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.arguments import (
    check_count,
    check_dtype,
    check_flag,
    translated,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.errors import ConfigError, FSDPError, UnsupportedError
from fsdp2._core.params.deals import newton_schulz_flops
from fsdp2.optim._local import ELEMENTWISE, OptimizerT, local, needs_closure
from fsdp2.optim._owned_step import WHO, How, WholeOptimizer, options_of, step_together
from fsdp2.optim._owners import MAX_BYTES, Cost
from fsdp2.optim._several import Several

_DADAPT = ("AdaGrad", "Adam", "SGD", "Adan", "AdanIP", "Lion")
_SAM = ("SAM", "GSAM", "WSAM", "BSAM", "LookSAM", "FriendlySAM")
NEEDS_ALL = frozenset(
    {"LBFGS", "Prodigy", "AdaGC", "Adai", *(f"DAdapt{name}" for name in _DADAPT), *_SAM}
)
"""Classes, of torch and of known libraries, that compute something of all parameters at once."""


def whole(
    cls: type[OptimizerT],
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
    *,
    owners: str | Cost = "balanced",
    wire_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    batches: bool | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """Make an optimizer of class ``cls`` that steps on whole matrices, each on one rank.

    For optimizers that need all of a matrix (Muon, Shampoo, SOAP, Adafactor, LAMB), unmodified.
    Every parameter has an owner among the ranks that hold its parts, replicas and tensor-parallel
    ranks included. Its gradient goes there in a batch with others, ``cls`` steps the whole
    parameter once, and each rank gets its rows back. It computes what ``cls`` computes in one
    process that has the same gradients.

    It is an instance of ``cls``, with param groups and hooks, so learning rate schedulers and
    ``GradScaler`` take it. Before a step, gradients are shards as ever: clip them. The owner keeps
    a copy of its parameters and their states: as much as a shard of each. If a step fails on some
    rank, all ranks raise, and parameters are as they were (states of matrices that had stepped are
    ahead by that step: load them again, or go on).

    ``step``, ``state_dict`` and functions of ``fsdp2.checkpoint`` are collective. ``state`` has on
    each rank what that rank owns, and names alone of what it does not. ``state_dict()`` moves
    states into DTensors, where they lie as the parameters do (those of other shapes along their
    first dim), and the next step moves them back.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``, of torch or of a library.
        params: as ``cls`` takes them; sharded, tensor-parallel and plain parameters of any dtype. A
            param group may have a ``"cls"`` of its own (AdamW for embeddings and vectors): then the
            result is one optimizer for all of them. Element-wise classes step on local shards.
        owners: ``"balanced"``, by the FLOPs of Newton-Schulz steps, or a function of a matrix's
            shape that returns its cost. Bytes decide between equals.
        wire_dtype: floating-point gradients travel in it; None: in their own. Parameters come back
            as they are.
        max_bytes: bytes of the buffers that gradients and parameters travel in, and of the whole
            gradients. One matrix travels in any case; so that each owner has one at a time, it
            takes six times the largest. None: that, or 256 MiB if it is more.
        batches: a parameter of three dims or more is a batch of matrices, which its first dim
            counts: each has an owner, and is a parameter of ``cls`` by itself. None: True for
            ``torch.optim.Muon``, which takes nothing else.
        kwargs: the arguments of ``cls``, for the groups that name no other class.

    Raises:
        ConfigError: a class or an option that needs all parameters at once, as far as it is known;
            what ``cls`` refuses.
        UnsupportedError: a class whose ``step`` must be given a closure; a parameter that wraps
            other tensors, or is a partial sum.

    Source: ``cls``; the choice of one owner a matrix follows DistributedShampoo and the
    distributed Muon of Moonlight (arXiv 2502.16982).
    """
    _check_class(cls)
    is_balanced = isinstance(owners, str) and owners == "balanced"
    if not is_balanced and not callable(owners):
        raise wrong_value(WHO, "owners", "'balanced' or a function of a shape", owners)
    check_dtype(WHO, "wire_dtype", wire_dtype)
    check_count(WHO, "max_bytes", MAX_BYTES if max_bytes is None else max_bytes)
    how = How(
        newton_schulz_flops if is_balanced else cast(Cost, owners),
        wire_dtype,
        max_bytes,
        _takes_batches(cls) if batches is None else batches,
    )
    if batches is not None:
        check_flag(WHO, "batches", batches)
    if not isinstance(params, Iterable):
        raise wrong_type(WHO, "params", "tensors, or dicts of them", params)
    given = params if isinstance(params, Tensor) else list(cast(Any, params))
    if isinstance(given, list) and any(isinstance(g, Mapping) and "cls" in g for g in given):
        odd = [g for g in given if not isinstance(g, Mapping)]
        if odd:
            raise wrong_type(WHO, "params", "dicts, if one of them has 'cls'", odd[0])
        return cast(OptimizerT, _several(cls, given, how, kwargs))
    return cast(OptimizerT, _make(cls, given, how, kwargs))


def _several(cls: type[Optimizer], groups: list[Any], how: How, kwargs: Any) -> Any:
    """Make one optimizer of several classes, each with the groups that name it."""
    by_class: dict[type[Optimizer], list[int]] = {}
    for place, group in enumerate(groups):
        own = group.get("cls", cls)
        _check_class(own)
        by_class.setdefault(own, []).append(place)
    members: list[tuple[Any, list[int]]] = []
    for own, places in by_class.items():
        its = [{k: v for k, v in groups[place].items() if k != "cls"} for place in places]
        if own is cls:
            members.append((_make(own, its, how, kwargs), places))
        elif own in ELEMENTWISE:
            members.append((local(own, its), places))
        else:
            its_how = replace(how, batches=_takes_batches(own))
            members.append((_make(own, its, its_how, {}), places))
    return Several(cls, members, step_together)


def _takes_batches(cls: type[Optimizer]) -> bool:
    """True for a class of matrices alone: parameters of more dims are batches of them."""
    return issubclass(cls, torch.optim.Muon)


def _check_class(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise wrong_type(WHO, "cls", "a subclass of torch.optim.Optimizer", cls)
    needs_all = next((c.__name__ for c in cls.__mro__ if c.__name__ in NEEDS_ALL), None)
    if needs_all is not None:
        raise ConfigError(
            "FS711",
            f"{WHO}: {needs_all} computes something of all parameters at once, and an owner has "
            "its own ones only. Use a class that steps each parameter by itself.",
        )
    if needs_closure(cls):
        raise UnsupportedError(
            "FS703",
            f"{WHO}: {cls.__name__}.step must be given a closure, so it computes the loss in the "
            "middle of a step, and owners take gradients that are there before it. Use a class "
            "whose step needs none.",
        )


def _make(cls: type[Optimizer], params: Any, how: How, kwargs: dict[str, Any]) -> Any:
    """Make the optimizer; ``cls`` sees stand-ins on meta, which cost nothing."""
    known: dict[int, nn.Parameter] = {}  # stand-ins by the id of what they stand for
    real: dict[int, Tensor] = {}  # and the other way round

    def stand_in(param: Any) -> Any:
        if not isinstance(param, Tensor):
            raise wrong_type(WHO, "params", "tensors, or dicts of them", param)
        if not (param.is_leaf or param.retains_grad):
            raise wrong_value(WHO, "params", "parameters", "the result of an operation")
        if id(param) not in known:
            shape = param.shape[1:] if how.batches and param.dim() > 2 else param.shape
            empty = torch.empty(shape, dtype=param.dtype, device="meta")
            known[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            real[id(known[id(param)])] = param
        return known[id(param)]

    def replaced(given: Any) -> Any:
        if isinstance(given, Tensor):
            return stand_in(given)
        if isinstance(given, Mapping):
            inner = given["params"]
            single = isinstance(inner, Tensor)
            return {**given, "params": replaced(inner) if single else [replaced(p) for p in inner]}
        if isinstance(given, tuple) and len(given) == 2:
            return (given[0], replaced(given[1]))
        return stand_in(given)

    try:
        stands = params if isinstance(params, Tensor) else [replaced(one) for one in params]
        optimizer = _whole_class(cls)(stands, **kwargs)
    except FSDPError:
        raise
    except Exception as error:
        raise translated(f"{WHO}: {cls.__name__} refused its arguments", error) from error
    for group in optimizer.param_groups:
        group["params"] = [real[id(stand)] for stand in group["params"]]
    is_grouped = isinstance(params, list) and any(isinstance(one, Mapping) for one in params)
    given = [options_of(one) for one in params] if is_grouped else None
    optimizer._begin(how, kwargs, given)
    return optimizer


MODES = ("train", "eval")
"""Methods by which a class (schedulefree's) exchanges parameters with others of its state."""


def _on_shards(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of the class see parameters and states as shards, which the next step takes."""

    @functools.wraps(method)
    def switch(self: WholeOptimizer, *args: Any, **kwargs: Any) -> Any:
        self.gather_state()
        return method(self, *args, **kwargs)

    return switch


_classes: dict[type[Optimizer], Any] = {}


def _whole_class(cls: type[Optimizer]) -> Any:
    """Return the class that ``whole`` makes instances of."""
    if cls not in _classes:
        names: dict[str, Any] = {"_plain_class": cls, "__module__": __name__}
        names["__doc__"] = cls.__doc__
        for name in MODES:
            if callable(getattr(cls, name, None)):
                names[name] = _on_shards(getattr(cls, name))
        _classes[cls] = type(f"Whole{cls.__name__}", (WholeOptimizer, cls), names)
    return _classes[cls]
