"""``FSDPParam``: one parameter with its forms and their dtypes. Marks on sharded parameters.

Contains no buffer-layout, collective or hook code; ``registration`` registers the forms.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_autograd, torch_dtensor
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.params.layout import Coding, GatherItem, ShardLayout
from fsdp2._core.params.parts import Part
from fsdp2._core.params.placement import ParamPlacement
from fsdp2._core.params.registration import Forms, ParamState, Registration, Site


@dataclass(frozen=True, eq=False)
class Span:
    """Byte range of a padded shard in the group's flat shard buffer."""

    flat: torch.Tensor
    start: int
    nbytes: int


class OwnerMark:
    """Marks a parameter as sharded, so that a later ``fully_shard`` detects it."""

    def __init__(self, owner: FSDPParam | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    @property
    def owner(self) -> FSDPParam | None:
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[type[OwnerMark], tuple[()]]:
        return OwnerMark, ()  # copies and pickles have no owner

    @staticmethod
    def owner_of(param: torch.Tensor) -> FSDPParam | None:
        """Return the ``FSDPParam`` that an earlier ``fully_shard`` created for a tensor, if any."""
        mark = param.__dict__.get(_MARK)
        return mark.owner if isinstance(mark, OwnerMark) else None


def leave_alone(tensors: Iterable[torch.Tensor]) -> None:
    """Mark ignored parameters: the user, not fsdp2, reduces their gradients."""
    for tensor in tensors:
        tensor.__dict__[_LEFT_ALONE] = True


def is_forgotten(param: torch.Tensor) -> bool:
    """Return True if a parameter is trainable, not a DTensor, and not ignored by the user."""
    return (
        param.requires_grad and not isinstance(param, DTensor) and _LEFT_ALONE not in param.__dict__
    )


_LEFT_ALONE = "_fsdp2_left_alone"
_MARK = "_fsdp2_owner"
_STANDS_FOR = "_fsdp2_stands_for"
SUMMONED = "_fsdp2_summoned"
"""Attribute of the unsharded parameters that ``summon_full_params`` registers."""


def placeholder_of(param: torch.Tensor) -> str | None:
    """Return a description of ``param`` if optimizers must hold its sharded form, else None."""
    mark = param.__dict__.get(_STANDS_FOR)
    owner = mark.owner if isinstance(mark, OwnerMark) else None
    if owner is None or owner.sharded is param:
        return None
    if param is owner.unsharded or param is owner.post_forward:
        return f"the unsharded form of {owner.fqn}"
    if param.grad is None:
        return f"{owner.fqn} as it was before fully_shard"
    return None  # also trained by a module that is not sharded


@dataclass
class ChosenDtypes:
    """Dtypes that the user chose for a parameter: by ``grad_dtype``, and by its group's policy."""

    has_grad_dtype: bool  # the user set grad_dtype
    grad_dtype: torch.dtype | None  # the user's value; None: gradients may have any dtype
    param_dtype: torch.dtype | None = None  # the dtype to compute in; None: the storage dtype
    reduce_dtype: torch.dtype | None = None  # the dtype to reduce in; None: see grad_dtype
    keeps_dtype: bool = False  # this parameter is not cast to param_dtype
    coding: Coding | None = None  # how matrices are encoded; None: sent in the compute dtype
    keeps_reduced_dtype: bool = False  # the sharded gradient keeps its reduce dtype

    @property
    def takes_any_gradient(self) -> bool:
        """Return True if the sharded gradient keeps the dtype in which it was reduced."""
        return self.keeps_reduced_dtype or (self.has_grad_dtype and self.grad_dtype is None)

    @property
    def is_reduced_in_any(self) -> bool:
        """Return True if gradients keep the dtype of backward when accumulated and reduced."""
        return self.takes_any_gradient and self.reduce_dtype is None


@dataclass(eq=False)
class Wrapped:
    is_extended: bool = False  # has or needs an all-gather extension
    releases_gathered: bool | None = None  # result of an extension's method; None: not called
    parts: tuple[Part, ...] | None = None  # how inner tensors are sharded; None: unknown
    divides_parts: bool = False  # we gather the parts: the class has no extension


class FSDPParam(Forms):
    """A parameter with its sharded, unsharded and post-forward forms."""

    def __init__(
        self,
        fqn: str,
        sites: list[Site],
        placement: ParamPlacement,
        original: nn.Parameter,
    ) -> None:
        super().__init__(fqn, sites, original)
        self.placement = placement
        self.storage_dtype = original.dtype  # dtype of the shard
        self.wrapped = Wrapped()
        self.chosen = ChosenDtypes(*torch_autograd.own_grad_dtype(original))
        self.found_dtype: torch.dtype | None = None  # the last gradient's dtype, if none is fixed
        self.registration = Registration((self,))  # ``ParamGroup.shard`` replaces it
        self.tops: tuple[nn.Module, ...] = ()  # modules of this parameter's fully_shard call
        self.uses: list[nn.Module] = []  # other units' modules that contain this parameter's module
        self.attributes = torch_dtensor.own_attributes(original)
        original.__dict__[_MARK] = original.__dict__[_STANDS_FOR] = OwnerMark(self)
        self.span: Span | None = None  # read by optimizers

    @property
    def state(self) -> ParamState:
        return self.registration.form

    @property
    def places(self) -> list[nn.Module]:
        """Modules that a unit must contain to cover all uses of this parameter."""
        return [site.module for site in self.sites] + self.uses

    @property
    def spec(self) -> torch_dtensor.DTensorSpec:
        assert isinstance(self.sharded, DTensor)
        return torch_dtensor.spec_of(self.sharded)

    @property
    def is_on_meta(self) -> bool:
        return any(s.registered is not None and s.registered.is_meta for s in self.sites)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter over all tensor-parallel ranks, in the storage dtype."""
        return math.prod(self.sharded.shape) * self.storage_dtype.itemsize

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter. Integers and 8-bit floats are never cast."""
        dtype = self.storage_dtype
        if self.chosen.param_dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:
            return dtype
        return dtype if self.chosen.keeps_dtype else self.chosen.param_dtype

    def coding_of(self, layout: ShardLayout, is_again: bool = False) -> Coding | None:
        """Return the coding in which a shard is sent; None: sent in the compute dtype. Vectors
        (one element per row) and parameters that keep their dtype are not encoded. ``is_again``:
        decoded values are encoded again, which is exact only if each row keeps its scale."""
        coding, dtype = self.chosen.coding, self.compute_dtype
        is_cast = dtype.is_floating_point and dtype.itemsize > 1 and not self.chosen.keeps_dtype
        if coding is None or not is_cast or layout.dim is None or layout.size == 1:
            return None
        if len(layout.shape) < 2 or not layout.numel:
            return None
        keeps_values = coding.by_row and layout.dim == 0
        return coding if keeps_values or not is_again else None

    def item_of(self, layout: ShardLayout, is_again: bool = False) -> GatherItem:
        """Describe a shard for a gather. ``is_again``: a shard of gathered values."""
        stored, coding = self.storage_dtype, self.coding_of(layout, is_again)
        if is_again:
            stored = self.compute_dtype
        return GatherItem(layout, stored, self.compute_dtype, coding=coding)

    @property
    def _computed_dtype(self) -> torch.dtype:
        """Dtype in which backward computes the gradient; an all-gather extension may choose it."""
        if self.wrapped.is_extended and self.unsharded is not None:
            return self.unsharded_dtype
        return self.compute_dtype

    @property
    def backward_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter's gradient after one backward."""
        return self._cast_by_autograd or self._computed_dtype

    @property
    def accumulated_dtype(self) -> torch.dtype:
        """Dtype in which gradients accumulate over backwards."""
        computed = self._computed_dtype
        if self.chosen.is_reduced_in_any:
            dtype = self.found_dtype or computed
        else:
            stored = self._stored_grad_dtype
            dtype = self.chosen.reduce_dtype or (stored if stored.itemsize > 1 else computed)
        return torch.promote_types(dtype, torch.complex64) if computed.is_complex else dtype

    @property
    def _cast_by_autograd(self) -> torch.dtype | None:
        """Dtype to which autograd casts a gradient before accumulation; None: no cast. Casts to a
        wider dtype are left to packing, unless the gradient may be summed over the parameter's own
        mesh axes: autograd then casts, so that no rank rounds its summand before the sum."""
        dtype = self.accumulated_dtype
        is_wider = dtype.itemsize > self._computed_dtype.itemsize
        leaves = is_wider and not self.placement.may_sum_gradients
        return None if leaves or self.chosen.is_reduced_in_any else dtype

    def kept_dtype(self, reduced: torch.dtype) -> torch.dtype:
        """Dtype of the sharded gradient, given the dtype in which it was reduced."""
        if self.chosen.takes_any_gradient and reduced.is_complex is self.storage_dtype.is_complex:
            return reduced
        return self._stored_grad_dtype

    @property
    def _stored_grad_dtype(self) -> torch.dtype:
        chosen = self.chosen.grad_dtype if self.chosen.has_grad_dtype else None
        return chosen or self.storage_dtype

    def follow(self, policy: MixedPrecisionPolicy) -> None:
        """Apply the dtypes of the group's policy; a tied parameter may have changed groups."""
        chosen, stored, coded = self.chosen, self.sharded.dtype, policy.gather_dtype
        chosen.coding = None if coded is None else Coding(coded, policy.gather_scale == "row")
        chosen.param_dtype, chosen.reduce_dtype = policy.param_dtype, policy.reduce_dtype
        if chosen.keeps_reduced_dtype and not policy.keep_low_precision_grads:
            self.sharded.grad_dtype = chosen.grad_dtype if chosen.has_grad_dtype else stored
        chosen.keeps_reduced_dtype = policy.keep_low_precision_grads

    def set_gradient_aside(self) -> torch.Tensor | None:
        """Remove and return the sharded gradient, but only if the user set ``grad_dtype``."""
        if not self.chosen.has_grad_dtype:
            return None
        grad, self.sharded.grad = self.sharded.grad, None
        return grad

    def see_grad_dtype(self) -> None:
        """Adopt a ``grad_dtype`` set on the sharded parameter, or restore the previous one if the
        parameter was replaced (by ``to(dtype)`` or ``load_state_dict(assign=True)``)."""
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
        """Update ``grad_dtype`` of the unsharded parameter, and cast its existing gradient."""
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
        """Set the dtype to which autograd casts in this backward. If an accumulation without sync
        begins (``waits``), autograd also casts to a wider dtype, so that the gradients of all uses
        in this backward are added in the wider dtype."""
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
        """Return a plain tensor with the shard's shape, dtype and device."""
        local = self.local
        if local is not None and self.wrapped.is_extended:
            return torch.empty(local.shape, dtype=local.dtype, device=local.device)
        return local

    def set_shard(
        self, local: torch.Tensor, registered: nn.Parameter | None, span: Span | None = None
    ) -> None:
        """Set ``local`` as the local tensor of ``registered``, which an optimizer may hold, or of a
        new parameter if it is None. ``span``: position of ``local`` in the group's flat buffer."""
        if registered is None:
            made = torch_dtensor.new_dtensor(local, self.placement.sharded_spec(local.dtype))
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
        spec = placement.sharded_spec(local.dtype)
        self.post_forward = self._parameter(torch_dtensor.new_dtensor(local, spec), None)
        self.post_forward.__dict__[_STANDS_FOR] = OwnerMark(self)

    def replace(self, new: torch.Tensor | None) -> None:
        """Adopt the parameter that the user registered. Call ``set_shard`` afterwards."""
        assert isinstance(new, nn.Parameter)
        self.see_grad_dtype()  # records the old parameter's grad_dtype
        self.sharded = self.shown = new
        if not isinstance(new, DTensor):
            self.attributes = torch_dtensor.own_attributes(new)
        if new.requires_grad is not self.trainable:
            self.toggle()

    def __getstate__(self) -> dict[str, Any]:
        """Copies contain no group buffers; adoption reads the shard registered on the module."""
        self.see_grad_dtype()
        return {
            **vars(self),
            **vars(self.wrapped),  # flattened, so that a pickle names fewer classes
            "wrapped": None,
            "local": None,
            "span": None,
            "unsharded": None,
            "post_forward": None,
            "shown": None,
            "registration": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        wrapped = {field.name: state.pop(field.name) for field in fields(Wrapped)}
        vars(self).update(state, wrapped=Wrapped(**wrapped))
        self.see_grad_dtype()  # a copied tensor has no grad_dtype

    def _parameter(self, tensor: torch.Tensor, hooks_of: nn.Parameter | None) -> nn.Parameter:
        param = torch_dtensor.as_parameter(tensor, self.trainable)
        for name, value in self.attributes.items():
            setattr(param, name, value)
        if hooks_of is not None:
            torch_autograd.move_hooks(hooks_of, param)
        return param


def check_unused(
    params: Sequence[FSDPParam], settings: Settings, policy: MixedPrecisionPolicy
) -> None:
    """Raise ConfigError on every rank if zeros for an unused parameter would have no dtype."""
    if not settings.reduce_unused or policy.reduce_dtype is not None:
        return
    for param in params:
        if param.trainable and param.chosen.has_grad_dtype and param.chosen.grad_dtype is None:
            raise ConfigError(
                "FS320",
                f"{param.fqn}: its grad_dtype is None, so the zeros that "
                "set_reduce_scatter_unused_params(True) sends instead of a gradient have no dtype. "
                "Set its grad_dtype, or pass its unit a MixedPrecisionPolicy with a reduce_dtype.",
            )
