"""One parameter's life: ``FSDPParam``, its forms and their dtypes.

Owns what each form is made of, in which dtypes it is stored, computed, summed and reduced, and how
a later call of ``fully_shard`` tells that a parameter is taken. It must not know buffers' layout in
a group, what is registered when (``registration``), collectives or hooks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_autograd, torch_dtensor, torch_spmd
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.params.layout import Coding, ShardLayout
from fsdp2._core.params.parts import Part
from fsdp2._core.params.placement import ParamPlacement
from fsdp2._core.params.registration import Forms, ParamState, Registration, Site


@dataclass(frozen=True, eq=False)
class Span:
    """Where a shard lies in the group's flat shard buffer, padding included. In bytes."""

    flat: torch.Tensor
    start: int
    nbytes: int


class OwnerMark:
    """What tells a later call of ``fully_shard`` that a parameter is taken. Copies are blank."""

    def __init__(self, owner: FSDPParam | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    @property
    def owner(self) -> FSDPParam | None:
        return None if self._owner is None else self._owner()

    def __deepcopy__(self, memo: dict[int, object]) -> OwnerMark:
        return OwnerMark()

    def __reduce__(self) -> tuple[type[OwnerMark], tuple[()]]:
        return OwnerMark, ()

    @staticmethod
    def owner_of(param: torch.Tensor) -> FSDPParam | None:
        """Return the parameter object that an earlier call made of this tensor."""
        mark = param.__dict__.get(_MARK)
        return mark.owner if isinstance(mark, OwnerMark) else None


def leave_alone(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a user has these parameters ignored, and so looks after their gradients."""
    for tensor in tensors:
        tensor.__dict__[_LEFT_ALONE] = True


def is_forgotten(param: torch.Tensor) -> bool:
    """True for a plain parameter that is trained, and that nobody said to ignore."""
    return (
        param.requires_grad and not isinstance(param, DTensor) and _LEFT_ALONE not in param.__dict__
    )


_LEFT_ALONE = "_fsdp2_left_alone"
_MARK = "_fsdp2_owner"
_STANDS_FOR = "_fsdp2_stands_for"
SUMMONED = "_fsdp2_summoned"
"""An attribute of the whole parameters that ``summon_full_params`` registers."""


def stand_in_of(param: torch.Tensor) -> str | None:
    """Say what a tensor is if it stands for a sharded parameter, which alone gets gradients."""
    mark = param.__dict__.get(_STANDS_FOR)
    owner = mark.owner if isinstance(mark, OwnerMark) else None
    if owner is None or owner.sharded is param:
        return None
    if param is owner.unsharded or param is owner.post_forward:
        return f"the unsharded form of {owner.fqn}"
    if param.grad is None:
        return f"{owner.fqn} as it was before fully_shard"
    return None  # another module, that nobody sharded, has it too, and trains it


@dataclass
class ChosenDtypes:
    """What users chose for a parameter: by ``grad_dtype``, and by the policy of its group."""

    has_grad_dtype: bool  # the user has set grad_dtype
    grad_dtype: torch.dtype | None  # what the user set; None lets gradients have any dtype
    # the dtype to compute in; None: as the parameter is stored
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None  # the dtype to reduce in; None: as grad_dtype says
    keeps_dtype: bool = False  # this parameter is not cast to param_dtype
    coding: Coding | None = None  # matrices travel in codes; None: in the compute dtype
    keeps_reduced_dtype: bool = False  # the sharded gradient is not cast back

    @property
    def takes_any_gradient(self) -> bool:
        """True if the dtype of the gradient is what backward and the reduction make it."""
        return self.keeps_reduced_dtype or (self.has_grad_dtype and self.grad_dtype is None)

    @property
    def is_reduced_in_any(self) -> bool:
        """True if gradients add up and are reduced in whatever dtype backward leaves them."""
        return self.takes_any_gradient and self.reduce_dtype is None


class FSDPParam(Forms):
    """A parameter in its forms: the sharded one, the unsharded one, the post-forward one."""

    def __init__(
        self,
        fqn: str,
        sites: list[Site],
        placement: ParamPlacement,
        original: nn.Parameter,
    ) -> None:
        super().__init__(fqn, sites, original)
        self.placement = placement
        self.storage_dtype = original.dtype  # the dtype of the shard
        self.is_extended = False  # the parameter's class has an all-gather extension
        self.releases_gathered: bool | None = None  # what an extension answered; None: not asked
        # how the tensors inside a wrapped parameter follow its rows; None: it is none, or not known
        self.parts: tuple[Part, ...] | None = None
        self.divides_parts = False  # we gather them, in the place of an extension
        self.chosen = ChosenDtypes(*torch_autograd.own_grad_dtype(original))
        # the dtype that was found on a gradient that may have any
        self.found_dtype: torch.dtype | None = None
        self.registration = Registration((self,))  # the group's, from ``ParamGroup.shard`` on
        # the modules that were passed to the call of fully_shard which took it
        self.tops: tuple[nn.Module, ...] = ()
        self.uses: list[nn.Module] = []  # modules of other units that contain its module, too
        self.attributes = own_attributes(original)
        original.__dict__[_MARK] = original.__dict__[_STANDS_FOR] = OwnerMark(self)
        self.span: Span | None = None  # where the shard lies in the flat buffer, for optimizers
        self.spec = placement.sharded_spec(self.storage_dtype)

    @property
    def state(self) -> ParamState:
        return self.registration.form

    @property
    def places(self) -> list[nn.Module]:
        """Modules that a unit must contain to hold this parameter for all its uses."""
        return [site.module for site in self.sites] + self.uses

    @property
    def is_on_meta(self) -> bool:
        """True if what is registered has no memory yet."""
        return any(s.registered is not None and s.registered.is_meta for s in self.sites)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter in its own dtype (of all tensor-parallel ranks)."""
        return math.prod(self.sharded.shape) * self.storage_dtype.itemsize

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter. Raw kinds (integers, 8-bit floats) are never cast."""
        dtype = self.storage_dtype
        if self.chosen.param_dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:
            return dtype
        return dtype if self.chosen.keeps_dtype else self.chosen.param_dtype

    def compute_by(self, policy: MixedPrecisionPolicy) -> None:
        """Compute, and travel before that, as a policy says from now on."""
        self.chosen.param_dtype, dtype = policy.param_dtype, policy.gather_dtype
        self.chosen.coding = None if dtype is None else Coding(dtype, policy.gather_scale == "row")

    def coding_of(self, layout: ShardLayout, is_again: bool = False) -> Coding | None:
        """Return how a shard of this parameter travels; None: in its compute dtype.

        Vectors, in which each row is one element, and what is kept in its own dtype stay as they
        are. ``is_again``: values that were decoded are sent once more. By the same rows that
        changes nothing; others would have other scales, and values.
        """
        coding, dtype = self.chosen.coding, self.compute_dtype
        is_cast = dtype.is_floating_point and dtype.itemsize > 1 and not self.chosen.keeps_dtype
        if coding is None or not is_cast or layout.dim is None or layout.size == 1:
            return None
        if len(layout.shape) < 2 or not layout.numel:
            return None
        keeps_values = coding.by_row and layout.dim == 0
        return coding if keeps_values or not is_again else None

    @property
    def _computed_dtype(self) -> torch.dtype:
        """Dtype in which backward computes the gradient. An all-gather extension chooses it."""
        if self.is_extended and self.unsharded is not None:
            return self.unsharded_dtype
        return self.compute_dtype

    @property
    def backward_dtype(self) -> torch.dtype:
        """Dtype of the gradient that one backward leaves on the unsharded parameter."""
        return self._cast_by_autograd or self._computed_dtype

    @property
    def accumulated_dtype(self) -> torch.dtype:
        """Dtype in which gradients add up, from one backward to the next."""
        computed = self._computed_dtype
        if self.chosen.is_reduced_in_any:
            dtype = self.found_dtype or computed
        else:
            stored = self._stored_grad_dtype
            dtype = self.chosen.reduce_dtype or (stored if stored.itemsize > 1 else computed)
        return torch.promote_types(dtype, torch.complex64) if computed.is_complex else dtype

    @property
    def _cast_by_autograd(self) -> torch.dtype | None:
        """Dtype to which autograd casts a gradient before it adds it up; None: it casts nothing.

        Not to a wider one: it adds to a wider gradient in place, and packing casts the others.
        What may be summed over the parameter's own axes it does cast: no rank rounds its part.
        """
        dtype = self.accumulated_dtype
        is_wider = dtype.itemsize > self._computed_dtype.itemsize
        leaves = is_wider and not self.placement.may_sum_gradients
        return None if leaves or self.chosen.is_reduced_in_any else dtype

    def kept_dtype(self, reduced: torch.dtype) -> torch.dtype:
        """Dtype of the sharded gradient, of one that was reduced in another."""
        if self.chosen.takes_any_gradient and reduced.is_complex is self.storage_dtype.is_complex:
            return reduced
        return self._stored_grad_dtype

    @property
    def _stored_grad_dtype(self) -> torch.dtype:
        chosen = self.chosen.grad_dtype if self.chosen.has_grad_dtype else None
        return chosen or self.storage_dtype

    def follow(self, policy: MixedPrecisionPolicy) -> None:
        """Take the dtypes of a group's policy; a tied parameter may come from another group."""
        chosen, stored = self.chosen, self.sharded.dtype
        self.compute_by(policy)
        chosen.reduce_dtype = policy.reduce_dtype
        if chosen.keeps_reduced_dtype and not policy.keep_low_precision_grads:
            self.sharded.grad_dtype = chosen.grad_dtype if chosen.has_grad_dtype else stored
        chosen.keeps_reduced_dtype = policy.keep_low_precision_grads

    def set_gradient_aside(self) -> torch.Tensor | None:
        """Take the sharded gradient off, if the user chose its dtype apart from the parameter's."""
        if not self.chosen.has_grad_dtype:
            return None
        grad, self.sharded.grad = self.sharded.grad, None
        return grad

    def see_grad_dtype(self) -> None:
        """Take over a ``grad_dtype`` that the user set on the sharded parameter; keep an older one.

        What makes a parameter anew (``to(dtype)``, ``load_state_dict(assign=True)``) forgets it.
        """
        chosen = self.chosen
        is_set, dtype = torch_autograd.own_grad_dtype(self.sharded)
        if chosen.keeps_reduced_dtype:
            self.sharded.grad_dtype = None  # any
        elif is_set:
            chosen.has_grad_dtype, chosen.grad_dtype = True, dtype
        elif chosen.has_grad_dtype:
            self.sharded.grad_dtype = chosen.grad_dtype
        self._tell_autograd()

    def _tell_autograd(self) -> None:
        """Let unsharded gradients add up in the dtype that is theirs now."""
        leaf = self.unsharded
        if leaf is None or not (leaf.is_floating_point() or leaf.is_complex()):
            return
        dtype = self._cast_by_autograd
        if leaf.grad_dtype is dtype:
            return
        pending, leaf.grad = leaf.grad, None
        leaf.grad_dtype = dtype
        if pending is not None:
            leaf.grad = pending.to(dtype or pending.dtype)

    def begin_sum(self, waits: bool) -> None:
        """Let autograd cast to a wider dtype too, if a sum begins that ``waits`` for a reduction.

        Then uses of the parameter in one backward add up in it, before anybody sees a gradient.
        """
        leaf = self.unsharded
        if leaf is None or not self.trainable:
            return
        dtype = self._cast_by_autograd
        if dtype is None and waits and leaf.grad is None and not self.chosen.is_reduced_in_any:
            dtype = self.accumulated_dtype
        if leaf.grad_dtype is not dtype:
            leaf.grad_dtype = dtype

    @property
    def like(self) -> torch.Tensor | None:
        """A tensor of the shard's shape, dtype and device; a plain one if the shard is not."""
        local = self.local
        if local is not None and self.is_extended:
            return torch.empty(local.shape, dtype=local.dtype, device=local.device)
        return local

    def set_shard(
        self, local: torch.Tensor, registered: nn.Parameter | None, span: Span | None = None
    ) -> None:
        """Take ``local`` (``span`` of the group's flat buffer) as the shard, and register it.

        ``registered`` is a DTensor parameter that keeps its identity (the optimizer may hold it);
        None makes a new one.
        """
        self.spec = self.placement.sharded_spec(local.dtype)
        if registered is None:
            made = torch_dtensor.new_dtensor(local, self.spec)
            self.sharded = self._parameter(made, self.sharded)
        else:
            self.sharded = registered
        assert isinstance(self.sharded, DTensor)
        torch_dtensor.set_local_tensor(self.sharded, local)
        self.sharded.__dict__[_MARK] = OwnerMark(self)
        self.local = local
        self.span = span
        self.storage_dtype = local.dtype
        self.see_grad_dtype()

    def set_unsharded(self, tensor: torch.Tensor) -> None:
        """Build the unsharded parameter on memory of the group's full buffer."""
        spec = self.placement.unsharded_spec(tensor.dtype)
        whole = tensor if spec is None else torch_dtensor.new_dtensor(tensor, spec)
        pending = None if self.unsharded is None else self.unsharded.grad
        self.unsharded = self._parameter(whole, None)
        if self.placement.annotation is not None:
            self.placement.annotation.restore(self.unsharded)
        self.unsharded.__dict__[_STANDS_FOR] = OwnerMark(self)
        self.unsharded_dtype = tensor.dtype
        self._tell_autograd()
        if pending is not None:  # accumulated without sync before the plan changed
            dtype = self._cast_by_autograd or pending.dtype
            self.unsharded.grad = pending.to(device=tensor.device, dtype=dtype)

    def set_post_forward(self, local: torch.Tensor, placement: ParamPlacement) -> None:
        """Build the parameter that is registered while sharded over the smaller mesh."""
        spec = placement.sharded_spec(local.dtype)
        self.post_forward = self._parameter(torch_dtensor.new_dtensor(local, spec), None)
        self.post_forward.__dict__[_STANDS_FOR] = OwnerMark(self)

    def replace(self, new: torch.Tensor | None) -> None:
        """Take over what the user registered; ``set_shard`` follows."""
        assert isinstance(new, nn.Parameter)
        self.see_grad_dtype()  # of the one that goes
        self.sharded = self.shown = new
        if not isinstance(new, DTensor):
            self.attributes = own_attributes(new)
        if new.requires_grad is not self.trainable:
            self.toggle()

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep no memory of the group's buffers; adoption finds the shard on its site."""
        self.see_grad_dtype()
        return {
            **vars(self),
            "local": None,
            "span": None,
            "unsharded": None,
            "post_forward": None,
            "shown": None,
            "registration": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.see_grad_dtype()  # a copied tensor forgot it

    def _parameter(self, tensor: torch.Tensor, hooks_of: nn.Parameter | None) -> nn.Parameter:
        param = torch_dtensor.as_parameter(tensor, self.trainable)
        for name, value in self.attributes.items():
            setattr(param, name, value)
        if hooks_of is not None:
            torch_autograd.move_hooks(hooks_of, param)
        return param


def own_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Return what the user set on a parameter. A wrapper keeps its own parts in the same place."""
    dispatches = type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if dispatches and not isinstance(param, DTensor):
        return {}
    foreign = torch_spmd.own_attributes()
    return {
        name: value
        for name, value in vars(param).items()
        if not name.startswith("_fsdp2") and name not in foreign
    }


def check_unused(
    params: Sequence[FSDPParam], settings: Settings, policy: MixedPrecisionPolicy
) -> None:
    """Raise ConfigError if zeros for an unused parameter would have no dtype, on every rank."""
    if not settings.reduce_unused or policy.reduce_dtype is not None:
        return
    for param in params:
        if param.trainable and param.chosen.has_grad_dtype and param.chosen.grad_dtype is None:
            raise ConfigError(
                "FS320",
                f"{param.fqn}: its grad_dtype is None, so zeros in place of a gradient have no "
                "dtype, and set_reduce_scatter_unused_params(True) asks for them. Give it a "
                "grad_dtype, or its unit a MixedPrecisionPolicy with a reduce_dtype.",
            )
