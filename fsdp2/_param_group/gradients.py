"""Gradients: packed for a reduction, and sharded ones on a flat buffer that is used again.

Owns how gradients lie in what is reduced (tensors in, tensors out), the buffer of sharded
gradients, which are DTensors built once, the proof that nobody else holds them, and what autograd
does to a leaf that gets a gradient. It must not know collectives.

Legend: W = ranks of the shard axis, P = parameters, S = elements of stamps.

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

import itertools
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2._base import torch_autograd, torch_dtensor, torch_modes, torch_tensors
from fsdp2._base.errors import StateError
from fsdp2._base.policy import Residence
from fsdp2._param_group.layout import ReduceLayout, contiguous_stride
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
        self.layout = layout
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
            local = view = gradient_view(self._flats[dtype], layout, position, rank)
            if layout.slotted[position]:
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._sums.append((local, position))
            elif not view.is_contiguous():
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._copies.append((local, view))
            self._grads.append(as_gradient(local, param))
        self.only = next(iter(self._flats.values())) if len(self._flats) == 1 else None
        self._outputs: list[Tensor] = []
        if self.only is not None and layout.zero_copy:
            self._outputs = list(self.only.split(layout.output_sizes))
        self._storages = [flat.untyped_storage() for flat in self._flats.values()]
        self._storages += [copied.untyped_storage() for copied, _ in self._copies]
        self._storages += [summed.untyped_storage() for summed, _ in self._sums]
        self._numbers = list(map(torch_tensors.number_of, self._storages))
        local = view = None  # or they would count as holders
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
        shards = list(map(torch_tensors.local_of, self._grads))
        for tensors in (self._grads, shards):  # of a DTensor, and of its local tensor
            counts += map(sys.getrefcount, tensors)
            counts += map(torch_tensors.owners_of, tensors)
        return counts

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

    def outputs(self, reduced: Tensor) -> list[Tensor]:
        """View what each collective of a reduction writes, in the order of ``output_sizes``."""
        if self._outputs and self.only is reduced:
            return self._outputs
        return list(reduced.split(self.layout.output_sizes))

    def fill(self, reduced: Tensor) -> list[Tensor]:
        """Take over reduced values ``[numel]``; return the members' gradients, for ``settle``."""
        for flat in self._flats.values():
            if flat is not reduced:
                narrows = reduced.is_complex() and not flat.is_complex()
                flat.copy_(reduced.real if narrows else reduced, non_blocking=True)
        for local, position in self._sums:
            total = sum_of_slots(reduced, self.layout, position)
            narrows = total.is_complex() and not local.is_complex()
            local.copy_(total.real if narrows else total, non_blocking=True)
        return self._grads

    def deliver(self, params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
        """Set or add gradients, from what ``fill`` copied, which is there now."""
        for local, view in self._copies:
            local.copy_(view)
        self.is_filling = False
        accumulate(params, grads)


def as_gradient(local: Tensor, param: FSDPParam) -> DTensor:
    """Wrap the local part of a sharded gradient, of any dtype, as its parameter is sharded."""
    spec, like = param.spec, param.like
    if local.dtype is not param.storage_dtype:
        spec = param.placement.sharded_spec(local.dtype)
        like = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return torch_dtensor.new_dtensor(local, spec, like=like)


def accumulate(params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Do to leaves what autograd does when it has computed gradients: hooks, then ``grad``."""
    have_hooks = any(map(torch_autograd.gradient_hooks_of, params)) or any(
        map(torch_autograd.accumulate_hooks_of, params)
    )
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


# --- What is reduced.


def pack_gradients(
    grads: Sequence[Tensor | None],
    layout: ReduceLayout,
    rank: int,
    behind: Tensor,
    out: Tensor,
    is_mixed: bool = False,
) -> None:
    """Write the packed ones of local gradients, and ``behind``, into ``out`` ``[W, packed_numel]``.

    ``behind`` is what ``tail`` made. A gradient that is ``None`` counts as zero. All are cast to
    the dtype of ``out``. Gradients and ``behind`` have one dtype, unless they are ``is_mixed``.

    On a device columns are made contiguous: CUDA has one kernel for all of them then, and else one
    for each (torch 2.11; a test counts them), or one that is right for contiguous columns only.
    """
    as_it_is = out.is_cpu
    columns = []
    for position in layout.packed:
        grad, shard = grads[position], layout.shards[position]
        if shard.padded_numel == 0:
            continue
        if grad is None:
            grad = (
                behind.new_zeros(()).expand(shard.shape)
                if as_it_is
                else behind.new_zeros(shard.shape)
            )
        if layout.slotted[position]:
            slots = grad.new_zeros((layout.size, shard.numel))
            slots[rank] = grad.reshape(-1)
            grad = slots.view(1, -1).expand(layout.size, -1)
        elif shard.dim is None:
            grad = grad.reshape(1, -1).expand(layout.size, -1)
        elif shard.dim:
            grad = grad.movedim(shard.dim, 0)
        columns.append(grad if as_it_is else grad.contiguous())
    columns.append(behind)
    if is_mixed:
        _chunk_cat_mixed(columns, layout.size, out)
    else:
        torch_tensors.chunk_cat(columns, 0, layout.size, out=out)


def _chunk_cat_mixed(columns: Sequence[Tensor], size: int, out: Tensor) -> None:
    """Write columns of several dtypes: a kernel takes one, so there is one for each run."""
    if not out.is_cpu:  # a kernel of a device takes the whole of a buffer
        torch_tensors.chunk_cat([c.to(out.dtype) for c in columns], 0, size, out=out)
        return
    runs = [list(run) for _, run in itertools.groupby(columns, key=attrgetter("dtype"))]
    widths = [sum(-(-len(c) // size) * (c.numel() // len(c)) for c in run) for run in runs]
    for run, part in zip(runs, out.split(widths, dim=1), strict=True):
        torch_tensors.chunk_cat(run, 0, size, out=part)


def zero_copy_gradients(
    grads: Sequence[Tensor | None], layout: ReduceLayout, device: torch.device
) -> list[Tensor]:
    """Return the zero-copy ones of local gradients as a collective takes them, flat."""
    dtype = layout.wire_dtype
    sent = []
    for position in layout.zero_copy:
        grad = grads[position]
        if grad is None:
            grad = torch.zeros(layout.shards[position].shape, dtype=dtype, device=device)
        elif not grad.is_contiguous():
            grad = grad.contiguous()
        sent.append(grad.view(-1).to(dtype))
    return sent


def rearranged(partial: Tensor, old: ReduceLayout, new: ReduceLayout) -> Tensor:
    """Return half reduced gradients ``[numel]`` of one layout as another one places them.

    Both layouts have the same members.
    """
    if old.offsets == new.offsets and old.numel == new.numel:
        return partial.to(new.dtype)
    moved = partial.new_zeros(new.numel, dtype=new.dtype)
    parts = [(old.offsets[p], new.offsets[p], old.width(p)) for p in range(len(old.members))]
    for source, target, width in [*parts, (old.tail_start, new.tail_start, len(old.members))]:
        moved[target : target + width] = partial[source : source + width]
    return moved


def tail(
    stamps: Sequence[float], layout: ReduceLayout, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return what a rank that has every gradient adds behind them: ``[W, P + S]``."""
    row = torch.ones(len(layout.members), dtype=dtype, device=device)
    if stamps:  # values from the host, for which a device waits
        row = torch.cat([row, torch.tensor(stamps, dtype=dtype, device=device)])
    return _for_each_rank(row, layout)


def tail_without(complete: Tensor, absent: Sequence[int], layout: ReduceLayout) -> Tensor:
    """Return what a rank adds that has no gradient for some members: 0 for these.

    Made of what ``tail`` returned, and not of values from the host, for which a device would wait.
    """
    row = complete[0].clone()
    for _, run in itertools.groupby(enumerate(absent), lambda pair: pair[1] - pair[0]):
        positions = [position for _, position in run]
        row[positions[0] : positions[-1] + 1] = 0
    return _for_each_rank(row, layout)


def _for_each_rank(row: Tensor, layout: ReduceLayout) -> Tensor:
    """Return ``[W, n]``, each row of which is ``row``; on a device with memory of its own."""
    rows = row.expand(layout.size, -1)
    return rows if row.is_cpu else rows.contiguous()


def sum_of_slots(reduced: Tensor, layout: ReduceLayout, position: int) -> Tensor:
    """Add up the slots of a replicated member, in the same order on every rank."""
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    slots = reduced.as_strided((layout.size, shard.numel), (shard.numel, 1), start)
    return slots.sum(0).view(shard.shape)


def gradient_view(reduced: Tensor, layout: ReduceLayout, position: int, rank: int) -> Tensor:
    """View a member's shard of the gradient in a reduced buffer ``[numel]``.

    Not contiguous for a parameter sharded off dim 0, whose gradient travels with that dim first.
    """
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    shape = shard.shard_shape(rank)
    if not shard.dim:
        return reduced.as_strided(shape, contiguous_stride(shape), start)
    moved = (shape[shard.dim], *shape[: shard.dim], *shape[shard.dim + 1 :])
    return reduced.as_strided(moved, contiguous_stride(moved), start).movedim(0, shard.dim)
