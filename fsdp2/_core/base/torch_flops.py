"""Private torch API for the cost of operations, used by plans of a step.

Comments say why each private name is needed. Tested with torch 2.11.0, 2.13.0 and 2.15.0. This is
a separate file because training programs do not need torch's table of costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _of_attention(count: Callable[..., float], first: int) -> Callable[..., float]:
    """Make an attention FLOP counter accept fewer key and value heads than query heads, and count
    key and value heads as repeated (torch 2.11 raises an error). ``first``: index of the query; key
    and value follow."""

    def counted(*args: Any, **kwargs: Any) -> float:
        query, *rest = args[first : first + 3]
        heads = query.shape[1]
        whole = [
            tensor.new_empty((), device="meta").expand(tensor.shape[0], heads, *tensor.shape[2:])
            for tensor in rest
        ]
        return count(*args[: first + 1], *whole, *args[first + 3 :], **kwargs)

    return counted


_forward = _of_attention(flop_registry[aten._scaled_dot_product_flash_attention], 0)
_backward = _of_attention(flop_registry[aten._scaled_dot_product_flash_attention_backward], 1)

FLOPS: dict[Any, Callable[..., float]] = dict(flop_registry)
"""FLOP counters by operation. Torch's table lacks attention on a CPU."""

_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
for _kind in _KINDS:
    FLOPS[getattr(aten, f"_scaled_dot_product_{_kind}")] = _forward
    FLOPS[getattr(aten, f"_scaled_dot_product_{_kind}_backward")] = _backward

VIEW_OF_A_PRODUCT = torch.ops.aten._unsafe_view.default
"""A view op whose schema is not that of a view; the only such op without a public name."""


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int | str, bool], ...]:
    """Return the position or keyword of each argument that an operation writes to, and whether its
    old value is unused (an ``out``, the target of a copy or fill). There is no public API."""
    schema = func._schema
    is_overwritten = schema.name.removeprefix("aten::").rstrip("_") in _OVERWRITES
    return tuple(
        (argument.name if argument.kwarg_only else place, argument.is_out or is_overwritten)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_OVERWRITES = {"copy", "fill", "zero", "_foreach_copy", "_foreach_zero"}
