"""Sharded gradients: DTensors built once on a flat buffer, and reused while nobody else holds them.

Owns that buffer, the proof that it is free, and what autograd does to a leaf that gets a gradient.
It must not know collectives.

[Note: reused gradients]
Building a DTensor for every parameter in every step costs more than reducing it. So a group keeps
the gradients of its last reduction, and fills the same memory again if nothing but the group
refers to it: not the DTensors (``p.grad``, a list of the user's, a saved tensor of autograd), not
their local tensors, not the storage (views). Otherwise it makes a new buffer, and the old one
belongs to whoever holds it. A user who keeps ``p.grad`` across steps keeps the values.
On a device the memory of a buffer that nobody refers to is *released* when a forward begins: it
would lie idle where the step needs most, while allocating it anew costs next to nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2._base import torch_autograd, torch_dtensor, torch_modes, torch_tensors
from fsdp2._base.errors import StateError
from fsdp2._base.policy import Residence
from fsdp2._param_group import packing
from fsdp2._param_group.layout import ReduceLayout
from fsdp2._param_group.param import FSDPParam, OwnerMark

_buffers: WeakValueDictionary[int, GradientBuffer] = WeakValueDictionary()
"""Buffers that are alive, by the address of a gradient's storage."""


class GradientBuffer:
    """One flat buffer for each storage dtype, and a DTensor for each member of a reduce layout."""

    def __init__(
        self,
        layout: ReduceLayout,
        params: Sequence[FSDPParam],
        rank: int,
        residence: Residence,
    ) -> None:
        self.is_filling = False
        self.is_released = False
        self._device = device = residence.storage
        self._flats: dict[torch.dtype, Tensor] = {}
        self._layout = layout
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._sums: list[tuple[Tensor, int]] = []
        self._grads: list[Tensor] = []
        for position, param in enumerate(params):
            dtype = param.kept_dtype(layout.dtype)
            if dtype not in self._flats:
                self._flats[dtype] = torch.empty(
                    layout.numel, dtype=dtype, device=device, pin_memory=residence.is_pinned
                )
            local: Tensor | None
            view: Tensor | None
            local = view = packing.gradient_view(self._flats[dtype], layout, position, rank)
            if layout.slotted[position]:
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._sums.append((local, position))
            elif not view.is_contiguous():
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._copies.append((local, view))
            self._grads.append(as_gradient(local, param))
        only = next(iter(self._flats.values())) if len(self._flats) == 1 else None
        self._stamps = None if only is None else only[layout.stamp_start :]
        self._outputs: list[Tensor] = []
        if only is not None and layout.zero_copy:
            self._outputs = list(only.split(layout.output_sizes))
        self._storages = [flat.untyped_storage() for flat in self._flats.values()]
        self._storages += [copied.untyped_storage() for copied, _ in self._copies]
        self._storages += [summed.untyped_storage() for summed, _ in self._sums]
        self._numbers = list(map(torch_tensors.number_of, self._storages))
        local = view = only = None  # or they would count as holders
        self._lent: dict[tuple[int, int, int], Tensor] = {}  # by storage, offset and size
        self._held = self._references()
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._enter()

    def _enter(self) -> None:
        if torch_modes.has_real_memory():
            for storage in self._storages:
                _buffers[storage.data_ptr()] = self

    def release(self) -> None:
        """Give the memory back; only while ``is_free``. See [Note: reused gradients]."""
        for storage in self._storages:
            _buffers.pop(storage.data_ptr(), None)
            storage.resize_(0)
        self.is_released = True

    def reclaim(self) -> None:
        """Have memory again, of undefined values."""
        for storage, nbytes in zip(self._storages, self._sizes, strict=True):
            storage.resize_(nbytes)
        self._enter()
        self.is_released = False

    def _references(self) -> list[int]:
        counts = list(map(torch_tensors.use_count, self._numbers))
        counts += map(sys.getrefcount, self._storages)  # a storage is one object in Python
        return counts + torch_tensors.count_references(self._grads)

    @staticmethod
    def holding(grad: Tensor) -> GradientBuffer | None:
        """Return the buffer that ``grad`` is a gradient of, if there is one."""
        if not isinstance(grad, DTensor):
            return None
        storage = torch_dtensor.local_tensor(grad).untyped_storage()
        buffer = _buffers.get(storage.data_ptr())
        if buffer is None or not any(grad is own for own in buffer._grads):
            return None
        return buffer

    def lend(self, first: Tensor, numel: int) -> Tensor:
        """View ``[numel]`` elements from the local part of gradient ``first`` on.

        The view is the buffer's own and made once, and it stays when memory is released: whoever
        keeps it (and not this buffer) beyond the moment would read the values of later steps.
        """
        local = torch_dtensor.local_tensor(first)
        at = local.untyped_storage().data_ptr()
        index = [storage.data_ptr() for storage in self._storages].index(at)
        key = (index, int(local.storage_offset()), numel)
        if key not in self._lent:
            self._lent[key] = local.as_strided((numel,), (1,))
            self._held[index] += 1
        return self._lent[key]

    @property
    def is_free(self) -> bool:
        """True if nothing but this buffer refers to its memory. See [Note: reused gradients]."""
        return not self.is_filling and self._references() == self._held

    def flat(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the buffer to reduce into, if every gradient is kept in ``dtype`` there."""
        if len(self._flats) != 1 or device != self._device:
            return None
        return self._flats.get(dtype)

    def outputs(self, reduced: Tensor) -> list[Tensor]:
        """View what each collective of a reduction writes, in the order of ``output_sizes``."""
        if self._outputs and self._flats.get(reduced.dtype) is reduced:
            return self._outputs
        return list(reduced.split(self._layout.output_sizes))

    def stamps(self, reduced: Tensor, start: int) -> Tensor:
        """View the stamps behind reduced values ``[numel]``, which may lie in this buffer."""
        if self._stamps is not None and self._flats.get(reduced.dtype) is reduced:
            return self._stamps
        return reduced[start:]

    def fill(self, reduced: Tensor) -> list[Tensor]:
        """Take over reduced values ``[numel]``; return the members' gradients, for ``settle``."""
        for flat in self._flats.values():
            if flat is not reduced:
                narrows = reduced.is_complex() and not flat.is_complex()
                flat.copy_(reduced.real if narrows else reduced, non_blocking=True)
        for local, position in self._sums:
            total = packing.sum_of_slots(reduced, self._layout, position)
            narrows = total.is_complex() and not local.is_complex()
            local.copy_(total.real if narrows else total, non_blocking=True)
        return self._grads

    def settle(self) -> None:
        """Finish the gradients from what ``fill`` copied, which is there now."""
        for local, view in self._copies:
            local.copy_(view)
        self.is_filling = False


def as_gradient(local: Tensor, param: FSDPParam) -> DTensor:
    """Wrap the local part of a sharded gradient, of any dtype, as its parameter is sharded."""
    spec, like = param.spec, param.like
    if local.dtype is not param.storage_dtype:
        spec = param.placement.sharded_spec(local.dtype)
        like = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return torch_dtensor.new_dtensor(local, spec, like=like)


def accumulate(params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Do to leaves what autograd does when it has computed gradients: hooks, then ``grad``."""
    have_hooks = torch_autograd.have_hooks(params)
    for param, grad in zip(params, grads, strict=True):
        if have_hooks:
            grad = torch_autograd.apply_gradient_hooks(param, grad)
        existing = param.grad
        try:
            if existing is None:
                param.grad = grad
            elif isinstance(grad, DTensor):
                _add(param, existing, grad)
            else:
                existing.add_(grad)
        except RuntimeError as error:
            raise StateError("FS319", _mismatch(param, grad)) from error
        if have_hooks:
            torch_autograd.run_post_accumulate_hooks(param)


def _add(param: torch.nn.Parameter, existing: Tensor, grad: DTensor) -> None:
    """Add to the gradient that a parameter has: ours of earlier, or what the user put there.

    A whole tensor, or a DTensor with other placements on the same mesh, is placed as ours first.
    """
    if not isinstance(existing, DTensor) or existing.placements != grad.placements:
        mesh, placements = grad.device_mesh, grad.placements
        if isinstance(existing, DTensor):
            existing = existing.redistribute(mesh, placements)
        else:
            existing = distribute_tensor(existing, mesh, placements, src_data_rank=None)
        param.grad = existing
    own, new = torch_dtensor.local_tensor(existing), torch_dtensor.local_tensor(grad)
    if own.shape != new.shape:  # broadcasting would hide it
        raise RuntimeError(f"local shapes {tuple(own.shape)} and {tuple(new.shape)}")
    own.add_(new)


def _mismatch(param: torch.nn.Parameter, grad: Tensor) -> str:
    owner = OwnerMark.owner_of(param)
    name = "a parameter" if owner is None else owner.fqn
    return (
        f"{name}: its gradient is {_describe(grad)}, and cannot be set or added: the parameter is "
        f"now {_describe(param)}, its grad {_describe(param.grad)}. Replace a sharded parameter "
        "or gradient only by one of the same shape, dtype, device and mesh, or by None."
    )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    text = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}"
    if isinstance(tensor, DTensor):
        local = torch_dtensor.local_tensor(tensor)
        text += f" ({tuple(local.shape)} here, on {local.device}, {tensor.placements})"
    return text


def local_gradient(grad: Tensor, param: FSDPParam, dtype: torch.dtype) -> Tensor:
    """Return the local part of a gradient that is placed as its parameter is on its own axes.

    How a plain one lies, the annotation of its parameter says; without one it is that part.
    What has to be summed for that is summed in ``dtype``, if it is the wider one. On data axes it
    stays what this rank has, summed over them or not: the group reduces it.
    """
    spec, annotation = param.placement.tensor_parallel, param.placement.annotation
    if not isinstance(grad, DTensor):
        if annotation is None or not annotation.sums:
            return grad
        grad = annotation.placed_gradient(grad)
    assert spec is not None
    placements = list(spec.placements)
    for axis in param.placement.data_axes:
        if not grad.placements[axis].is_shard():
            placements[axis] = grad.placements[axis]
    if tuple(grad.placements) != tuple(placements):
        if any(placement.is_partial() for placement in grad.placements):
            grad = cast(DTensor, grad.to(torch.promote_types(grad.dtype, dtype)))
        grad = grad.redistribute(placements=placements)
    return grad.to_local()
