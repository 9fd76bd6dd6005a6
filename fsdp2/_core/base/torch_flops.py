"""Private torch API, by subject: what operations cost, for who plans a step.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. A file of its
own, because torch's table of costs is loaded by nothing that a training program needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _of_attention(count: Callable[..., float], first: int) -> Callable[..., float]:
    """Count attention whose keys and values have fewer heads, which torch 2.11 refuses to count.

    Its kernels do the same work as with a copy of them for each head of the query. ``first``: where
    the query is among the arguments; key and value follow.
    """

    def counted(*args: Any, **kwargs: Any) -> float:
        query, *rest = args[first : first + 3]
        heads = query.shape[1]
        whole = [
            tensor.new_empty((), device="meta").expand(tensor.shape[0], heads, *tensor.shape[2:])
            for tensor in rest
        ]
        return count(*args[: first + 1], *whole, *args[first + 3 :], **kwargs)

    return counted


_FORWARD = aten._scaled_dot_product_flash_attention
_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_EFFICIENT = aten._scaled_dot_product_efficient_attention
_CUDNN = aten._scaled_dot_product_cudnn_attention

FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    **dict.fromkeys(
        (_FORWARD, aten._scaled_dot_product_flash_attention_for_cpu, _EFFICIENT, _CUDNN),
        _of_attention(flop_registry[_FORWARD], 0),
    ),
    **dict.fromkeys(
        (
            _BACKWARD,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _of_attention(flop_registry[_BACKWARD], 1),
    ),
}
"""Operations of products, by what is called. Torch's list lacks attention on a CPU."""

VIEW_OF_A_PRODUCT = torch.ops.aten._unsafe_view.default
"""A view that does not say so: the only one without a public name."""


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int | str, bool], ...]:
    """Return the position or keyword of each argument that an operation writes to.

    The second of each pair is true if it is only written: an ``out``, or the target of a copy or a
    fill. No public way exists to ask an operation for its schema.
    """
    schema = func._schema
    is_overwritten = schema.name.removeprefix("aten::").rstrip("_") in _OVERWRITES
    return tuple(
        (argument.name if argument.kwarg_only else place, argument.is_out or is_overwritten)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_OVERWRITES = {"copy", "fill", "zero", "_foreach_copy", "_foreach_zero"}
