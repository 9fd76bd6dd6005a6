"""What a checkpoint holds beside models and optimizers: any object, pickled, but for its DTensors.

Owns the form of an ``extra`` among the entries of a checkpoint. It must not know models, nor files.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

EXTRA = "fsdp2_extra"
EXTRA_TENSORS = "fsdp2_extra_tensors"


class _Pickler(pickle.Pickler):
    """Pickles an object without the tensors in it, which it numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: dict[int, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def packed(extra: Any, is_first: bool) -> dict[str, Any]:
    """Return entries for an ``extra``: DTensors of all ranks, and all else of the first one.

    DCP would take values of a nested dict one by one, each from any rank, make strings of keys, and
    lose empty dicts.
    """
    file, kept = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(extra)
    numbered = list(enumerate(pickler.tensors))
    sharded_tensors = {str(n): t.detach() for n, t in numbered if isinstance(t, DTensor)}
    entries: dict[str, Any] = {EXTRA_TENSORS: sharded_tensors} if sharded_tensors else {}
    if is_first:
        plain = {n: t for n, t in numbered if not isinstance(t, DTensor)}
        torch.save({"pickled": file.getvalue(), "tensors": plain}, kept)
        entries[EXTRA] = kept.getvalue()
    return entries


def unpacked(tree: dict[Any, Any]) -> Any:
    """Return the ``extra`` of a checkpoint, tensors on the CPU; DTensors have become whole."""
    kept = torch.load(io.BytesIO(tree[EXTRA]), map_location="cpu", weights_only=False)
    whole = {int(number): tensor for number, tensor in tree.get(EXTRA_TENSORS, {}).items()}
    return _Unpickler(kept["pickled"], {**kept["tensors"], **whole}).load()
