"""Tracks the bytes of all tensor storages, including resized ones, by purpose."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_dtensor, torch_tensors
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.torch_modes import DispatchMode
from fsdp2._tools.pages.content import KINDS

PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, COMMUNICATION, ACTIVATIONS, LOGITS = range(len(KINDS))
"""Indices into ``KINDS``. Untagged tensors are activations, or logits if their shape matches."""


def number_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage."""
    return torch_tensors.number_of(tensor.untyped_storage())


class MemoryWatch(DispatchMode):
    """Counts the storages that are created in this mode, and those that are registered explicitly.
    ``by_kind``: current bytes, in the order of ``KINDS``. ``highest``: total bytes, and bytes by
    kind, at the peak since the last ``take_highest``. ``vocabularies``: tensors whose last dim has
    one of these sizes are logits, counted as if computed in ``loss_chunks`` sequential parts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.by_kind = [0] * len(KINDS)
        self.nbytes = 0
        self.vocabularies: frozenset[int] = frozenset()
        self.loss_chunks = 1
        self.highest = (0, tuple(self.by_kind))
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, int] = {}
        self._elsewhere: set[int] = set()  # storages in host memory, which are not counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch_tensors.DEVICE_OF:
            return torch_tensors.device_of_fake(args[0])
        if torch_dtensor.is_among(types):
            return NotImplemented  # DTensor's operations on local tensors are counted instead
        if func in torch_tensors.CHUNK_CATS and args[0][0].is_cpu:
            copied = _copied_nbytes(*args, **(kwargs or {}))
            self._change(COMMUNICATION, copied)
            self._change(COMMUNICATION, -copied)
        made = func(*args, **(kwargs or {}))
        visit_tensors(self.see, made)
        return made

    def see(self, tensor: Tensor, kind: int = ACTIVATIONS) -> None:
        """Count a tensor's storage from now on, until it is freed."""
        if tensor.is_meta:  # DTensor uses meta tensors only to compute shapes
            return
        storage = tensor.untyped_storage()
        key = torch_tensors.number_of(storage)
        if key not in self._sizes:
            if kind == ACTIVATIONS and tensor.dim() > 1 and tensor.shape[-1] in self.vocabularies:
                kind = LOGITS
            self._sizes[key] = 0
            self._kinds[key] = kind
            weakref.finalize(storage, self._drop, key)
        self._set(key, storage.nbytes())

    def leave_out(self, tensor: Tensor) -> None:
        """Stop counting a storage, because it is in host memory and not in device memory."""
        self.see(tensor)
        key = number_of(tensor)
        self._set(key, 0)
        self._elsewhere.add(key)

    def tag(self, tensor: Tensor, kind: int) -> None:
        self.see(tensor, kind)
        key = number_of(tensor)
        nbytes = self._sizes[key]
        self.by_kind[self._kinds[key]] -= nbytes
        self.by_kind[kind] += nbytes
        self._kinds[key] = kind

    def kind_of(self, tensor: Tensor) -> int:
        key = number_of(tensor)
        return self._kinds.get(key, ACTIVATIONS)

    def take_highest(self) -> tuple[int, ...]:
        """Return the bytes by kind at the peak since the last call."""
        _, found = self.highest
        self.highest = (self.nbytes, tuple(self.by_kind))
        return found

    def is_alive(self, key: int) -> bool:
        return key in self._sizes

    def rise(self, nbytes: int) -> None:
        """Count activations that are allocated and then freed."""
        self._change(ACTIVATIONS, nbytes)
        self._change(ACTIVATIONS, -nbytes)

    def _set(self, key: int, nbytes: int) -> None:
        before = self._sizes[key]
        if self._kinds[key] == LOGITS:
            nbytes = -(-nbytes // self.loss_chunks)
        if nbytes != before and key not in self._elsewhere:
            self._sizes[key] = nbytes
            self._change(self._kinds[key], nbytes - before)

    def _change(self, kind: int, nbytes: int) -> None:
        self.nbytes += nbytes
        self.by_kind[kind] += nbytes
        if self.nbytes > self.highest[0]:
            self.highest = (self.nbytes, tuple(self.by_kind))

    def _drop(self, key: int) -> None:
        nbytes = self._sizes.pop(key)
        self._elsewhere.discard(key)
        self.nbytes -= nbytes
        self.by_kind[self._kinds.pop(key)] -= nbytes

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Track resized storages in this context: a resize dispatches no operation."""
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if torch_tensors.number_of(storage) in self._sizes:
                self._set(torch_tensors.number_of(storage), size)
            return done

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[assignment,method-assign]  # temporarily
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # restored


def _copied_nbytes(
    tensors: Sequence[Tensor],
    dim: int,
    chunks: int,
    out: Tensor | None,
) -> int:
    """Return the bytes that a CPU allocates to chunk tensors. All padded copies exist at
    the same time. Tensors that need a cast are copied again, one at a time."""

    def padded(one: Tensor) -> int:
        return one.nbytes // one.shape[dim] * (-(-one.shape[dim] // chunks) * chunks)

    copied = sum(padded(one) for one in tensors if one.shape[dim] % chunks)
    is_cast = out is not None and out.dtype != tensors[0].dtype
    return copied + (max(map(padded, tensors)) if is_cast else 0)
