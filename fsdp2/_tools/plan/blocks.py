"""What a block consists of, takes and returns: what of it a trace can stand for.

Owns the looks at modules, arguments and graphs, and the tensors that stand in for arguments. It
must not know what a trace is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_dtensor, torch_tensors

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
NUMBERS = {"layer_idx", "layer_id", "layer_number", "index", "idx"}
"""Attributes by which a block knows its place: they tell no form from another."""


class Unsuited(Exception):  # noqa: N818  # not an error: such a block runs as it is
    """A node cannot stand for this block."""


class End(torch.autograd.Function):
    """What comes behind a block: its backward gives a gradient that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = (x.shape, x.dtype, x.device)
        return x.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


class Start(torch.autograd.Function):
    """What comes before a block: a tensor that nobody else has, and that has a history."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, like: Tensor) -> Tensor:
        ctx.numel = seed.numel()
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_empty(ctx.numel, dtype=torch.float32), None


def parameters_of(block: nn.Module) -> list[Tensor]:
    return list(block.parameters())


def structure_of(block: nn.Module) -> Iterator[Any]:
    """Yield what tells a block's form from others: classes, modes, plain attributes, buffers."""
    for name, module in block.named_modules():
        attributes = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, PLAIN) and key not in NUMBERS and not key.startswith("_")
        )
        yield name, type(module), tuple(map(repr, attributes)), _names_of(module)
    for name, buffer in block.named_buffers():
        yield name, buffer.shape, buffer.dtype


def _names_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(module._parameters)


def attributes_of(block: nn.Module) -> list[tuple[int, str, int]]:
    """Return what a forward may have changed: which objects attributes are."""
    return [
        (id(module), key, id(value))
        for module in block.modules()
        for key, value in (*vars(module).items(), *module._buffers.items())
        if key != "forward"
    ]


@contextmanager
def with_own_parameters(block: nn.Module) -> Iterator[list[Tensor]]:
    """Let a block have parameters that share memory with its own, and nothing else."""
    places = [
        (module, name, param)
        for module in block.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    if torch_dtensor.is_among([type(param) for _, _, param in places]):
        raise Unsuited
    made: dict[int, nn.Parameter] = {}
    for module, name, param in places:
        if id(param) not in made:
            made[id(param)] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        module._parameters[name] = made[id(param)]
    try:
        yield parameters_of(block)
    finally:
        for module, name, param in places:
            module._parameters[name] = param


def fresh_like(tensor: Tensor, into: list[Tensor]) -> Tensor:
    if tensor.requires_grad:
        seed = torch.empty(1, device=tensor.device, dtype=torch.float32, requires_grad=True)
        made: Tensor = Start.apply(seed, tensor.detach())  # type: ignore[no-untyped-call]  # torch's own
    else:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    into.append(made)
    return made


def replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replace(value)
    if type(value) in (tuple, list):
        return type(value)(replaced(one, replace) for one in value)
    if type(value) is dict:
        return {key: replaced(one, replace) for key, one in value.items()}
    return value


def collected(value: Any, tensors: list[Tensor]) -> Any:
    """Add an output's tensors to a list; return its form, with their places in it."""
    if isinstance(value, Tensor):
        if torch_dtensor.is_among([type(value)]):
            raise Unsuited
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(collected(one, tensors) for one in value)
    if type(value) is dict:
        return {key: collected(one, tensors) for key, one in value.items()}
    if isinstance(value, PLAIN):
        return value
    raise Unsuited


@dataclass(frozen=True)
class _Place:
    number: int


def rebuilt(form: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(form, _Place):
        return tensors[form.number]
    if type(form) in (tuple, list):
        return type(form)(rebuilt(one, tensors) for one in form)
    if type(form) is dict:
        return {key: rebuilt(one, tensors) for key, one in form.items()}
    return form


def number_of_storage(tensor: Tensor) -> int:
    return torch_tensors.number_of(tensor.untyped_storage())


def check_leaves(nodes: Sequence[Any], own: Sequence[Tensor]) -> None:
    """Raise if a graph leads to what is neither an input nor a parameter of the block."""
    mine = {id(one) for one in own}
    starts = {id(one.grad_fn) for one in own if one.grad_fn is not None}
    todo, seen = [node for node in nodes if node is not None], set()
    while todo:
        node = todo.pop()
        if id(node) in starts or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in mine:
            raise Unsuited
        todo += [after for after, _ in node.next_functions if after is not None]
