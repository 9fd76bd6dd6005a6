"""Private torch API, by subject: what operations cost, for who plans a step.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. A file of its
own, because torch's table of costs is loaded by nothing that a training program needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Operations of products, by what is called. Torch's list lacks attention on a CPU."""

VIEW_OF_A_PRODUCT = torch.ops.aten._unsafe_view.default
"""A view that does not say so: the only one without a public name."""
