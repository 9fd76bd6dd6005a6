"""The forms of one parameter, and the places where it is registered.

Owns which objects these are. What is registered when, ``registration`` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register a tensor here, a leaf or not."""
        self.module._parameters[self.name] = tensor  # type: ignore[assignment]  # maybe no leaf


class Forms:
    """The forms of one parameter, of which one is registered at a time, and where.

    ``sharded`` is what optimizers and checkpoints hold: one object for life, unless the user
    replaces it. ``unsharded`` is one object for life too, so that autograd's saved tensors stay
    valid while its storage is freed and filled again.
    """

    def __init__(self, fqn: str, sites: list[Site], original: nn.Parameter) -> None:
        self.fqn = fqn
        self.sites = sites
        self.trainable = original.requires_grad  # requires_grad of all forms
        self.sharded: nn.Parameter = original
        self.shown: nn.Parameter | None = original  # what the group registered last
        self.local: torch.Tensor | None = None  # what the sharded DTensor holds
        self.unsharded: nn.Parameter | None = None
        self.unsharded_dtype = original.dtype
        self.post_forward: nn.Parameter | None = None  # over the smaller mesh

    def is_form(self, found: torch.Tensor | None) -> bool:
        """True if a registered tensor is one of this parameter's forms."""
        if found is None:
            return False
        return found is self.sharded or found is self.unsharded or found is self.post_forward

    @property
    def is_toggled(self) -> bool:
        """True if somebody changed ``requires_grad`` of a form that may be registered."""
        forms = (self.sharded, self.unsharded)
        return any(f is not None and f.requires_grad is not self.trainable for f in forms)

    def toggle(self) -> None:
        """Carry ``requires_grad`` over from the form that the user changed."""
        self.trainable = not self.trainable
        for form in (self.sharded, self.unsharded, self.post_forward):
            if form is not None:
                form.requires_grad = self.trainable  # the method is refused under functorch
