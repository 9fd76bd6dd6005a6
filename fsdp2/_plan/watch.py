"""How many bytes are alive while something runs, by what they are for.

Owns the count. It follows storages, also where one is resized, and must not know units.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp2._base import torch_tensors
from fsdp2._base.containers import visit_tensors
from fsdp2._base.torch_modes import DispatchMode


class MemoryWatch(DispatchMode):
    """Count the storages that are made inside, and those that it is told of."""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.nbytes = 0
        self._sizes: dict[int, int] = {}
        self._on_change = on_change

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in torch_tensors.CHUNK_CATS and args[0][0].is_cpu:
            self._on_change(self.nbytes + _copied_nbytes(*args, **(kwargs or {})))
        made = func(*args, **(kwargs or {}))
        visit_tensors(self.see, made)
        return made

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, until nothing has it any more."""
        storage = tensor.untyped_storage()
        key = torch_tensors.number_of(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, nbytes: int) -> None:
        before = self._sizes[key]
        if nbytes != before:
            self._sizes[key] = nbytes
            self.nbytes += nbytes - before
            self._on_change(self.nbytes)

    def _drop(self, key: int) -> None:
        self.nbytes -= self._sizes.pop(key)

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """See storages that are resized inside: no operation is dispatched for that."""
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if torch_tensors.number_of(storage) in self._sizes:
                self._set(torch_tensors.number_of(storage), size)
            return done

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[assignment,method-assign]  # for a while
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # as it was


def _copied_nbytes(tensors: Sequence[Tensor], dim: int, chunks: int, out: Tensor | None) -> int:
    """Return the bytes of the copies that a CPU makes to cut into chunks: padded, and uncast."""
    uneven = [one for one in tensors if one.shape[dim] % chunks]
    padded = sum(
        one.nbytes // one.shape[dim] * (-(-one.shape[dim] // chunks) * chunks) for one in uneven
    )
    is_cast = out is not None and out.dtype != tensors[0].dtype
    return padded + (out.numel() * tensors[0].itemsize if out is not None and is_cast else 0)
