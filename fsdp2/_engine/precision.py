"""In what dtypes a unit computes: its policy, as the mode of its modules lets it hold.

It must not know units, or when a step runs: nothing here runs in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn

from fsdp2._base.policy import MixedPrecisionPolicy
from fsdp2._engine.cast_buffers import CastBuffers


class Precision:
    """What the user chose for a unit, and what of it holds now."""

    def __init__(self, chosen: MixedPrecisionPolicy, modules: Sequence[nn.Module]) -> None:
        self.chosen = chosen
        self.policy = _policy_for(chosen, modules)  # that holds; a call tells it by identity
        self.buffers: CastBuffers | None = None  # None: none is cast
        self.input_dtype: torch.dtype | None = None  # None: inputs are not cast
        self.choose_input_dtype(is_root=False)

    def choose_input_dtype(self, is_root: bool) -> None:
        """See to what floating-point inputs of a forward are cast. Call it when that may change."""
        policy = self.policy
        casts = policy.cast_forward_inputs or (policy.cast_root_forward_inputs and is_root)
        self.input_dtype = policy.param_dtype if casts else None

    def cast_buffers(self, sites: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        """Take buffers in, and cast them if that is what holds now."""
        self.buffers = CastBuffers(sites, dtype)
        if self.policy.buffer_dtype is not None:
            self.buffers.cast()

    def follow(self, modules: Sequence[nn.Module]) -> bool:
        """Let hold what the modules' mode asks for; return whether that is something else."""
        policy = _policy_for(self.chosen, modules)
        if policy == self.policy:
            return False
        self.policy = dataclasses.replace(policy)
        if self.buffers is not None:
            if policy.buffer_dtype is None:
                self.buffers.restore()
            else:
                self.buffers.cast()
        return True

    def outdate(self) -> None:
        """Let calls that were recorded until now be told from later ones."""
        self.policy = dataclasses.replace(self.policy)


def _policy_for(policy: MixedPrecisionPolicy, modules: Iterable[nn.Module]) -> MixedPrecisionPolicy:
    """Return the policy that holds in the modules' present mode."""
    if not policy.full_precision_in_eval or any(module.training for module in modules):
        return policy
    return dataclasses.replace(policy, param_dtype=None, buffer_dtype=None, gather_dtype=None)
