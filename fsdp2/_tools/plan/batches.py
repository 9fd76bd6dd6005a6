"""What goes into a step and what comes out: arguments, tokens, a loss.

Owns the looks at a batch, at an output and at the words that a model knows. It must not know how a
step is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base.arguments import wrong_type
from fsdp2._core.base.containers import map_tensors, visit_tensors
from fsdp2._core.base.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], Tensor]


def vocabularies_of(model: nn.Module) -> frozenset[int]:
    """Return the sizes of embeddings: a last dim of that size has a number for each word."""
    sizes = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    widths = {one.embedding_dim for one in model.modules() if isinstance(one, nn.Embedding)}
    return frozenset(sizes - widths)


def tokens_of(given: Arguments) -> int:
    """Return how many elements the first tensor of whole numbers has; 0 if there is none."""
    found: list[int] = []

    def take(tensor: Tensor) -> None:
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim():
            found.append(tensor.numel())

    visit_tensors(take, given)
    return found[0] if found else 0


def mean_of(output: Any) -> Tensor:
    """Return an output's ``loss``, or the mean of all floating-point tensors in it."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    means: list[Tensor] = []

    def take(tensor: Tensor) -> None:
        if tensor.requires_grad:
            means.append(tensor.float().mean())

    visit_tensors(take, output)
    if not means:
        raise ConfigError(
            "FS903",
            "plan: the model's output has no tensor with a gradient. Pass loss, a function that "
            "makes a scalar of the output.",
        )
    return torch.stack(means).sum()


def check_batch(batch: object) -> None:
    """Raise ConfigError if it is nothing that a forward can be given."""
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise wrong_type(
            "plan", "batch", "a tensor, a tuple of arguments or a dict of keywords", batch
        )


def arguments_of(batch: Any) -> Arguments:
    """Return positional arguments and keywords, with fake tensors in place of real ones."""
    faked = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"), batch)
    if isinstance(faked, Mapping):
        return (), dict(faked)
    return (faked if isinstance(faked, tuple) else (faked,)), {}
