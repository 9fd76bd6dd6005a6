"""What a user chooses: policies (frozen, for good) and settings (frozen, replaced at run time)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Choose dtypes for compute, reduction and outputs of a unit.

    Args:
        param_dtype: dtype of the unsharded floating-point parameters, and so of the compute and of
            the all-gather. ``None`` keeps the dtype of each parameter. The sharded parameters, and
            the optimizer, always keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while gradient sync is
            off. ``None`` means the dtype of the gradients; a group whose gradients have several
            dtypes reduces in the one that holds them all (``torch.promote_types``).
        output_dtype: dtype to which floating-point outputs of the forward are cast.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``, inside
            lists, tuples, named tuples, dicts and dataclasses too.

    Integer, boolean, complex and 8-bit float parameters are never cast. A group with complex
    gradients reduces in a complex dtype at least as wide as ``reduce_dtype``.

    Source: the meaning of the same class in ``torch.distributed.fsdp``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards where they are: no offloading."""


@dataclass(frozen=True)
class Settings:
    """Run-time settings of one unit; ``FSDPModule.set_*`` replace it as a whole.

    ``reshard_after_forward`` is what the user said: ``None`` (True below the root, False at the
    root), a bool, or the number of ranks to reshard to.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    is_last_backward: bool = True
