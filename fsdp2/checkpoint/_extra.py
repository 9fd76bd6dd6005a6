"""What a checkpoint holds beside models and optimizers: any object, pickled, but for its DTensors.

Owns the form of an ``extra`` among the entries of a checkpoint. It must not know models, nor files.
Plain data comes back by itself; anything else only if the caller trusts the checkpoint, because a
pickle can run any code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint._checksums import DamagedError
from fsdp2.checkpoint._pickle_machine import RefusedError
from fsdp2.checkpoint._torch_files import read_torch_file
from fsdp2.checkpoint._unpickling import not_plain, plain_names, unpickle

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


def packed(extra: Any, is_first: bool) -> dict[str, Any]:
    """Return entries for an ``extra``: DTensors of all ranks, and all else of the first one.

    DCP would take values of a nested dict one by one, each from any rank, make strings of keys, and
    lose empty dicts.
    """
    file, kept = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(extra)
    except (AttributeError, TypeError) as error:  # as pickle says it of a lambda, of a lock
        raise pickle.PicklingError(f"extra cannot be pickled: {error}") from error
    numbered = list(enumerate(pickler.tensors))
    sharded_tensors = {str(n): t.detach() for n, t in numbered if isinstance(t, DTensor)}
    entries: dict[str, Any] = {EXTRA_TENSORS: sharded_tensors} if sharded_tensors else {}
    if is_first:
        plain = {n: t for n, t in numbered if not isinstance(t, DTensor)}
        torch.save({"pickled": file.getvalue(), "tensors": plain}, kept)
        entries[EXTRA] = kept.getvalue()
    return entries


def unpacked(kept: Any, whole: Any, *, trust: bool) -> Any:
    """Return the ``extra`` of a checkpoint; DTensors have become whole.

    Args:
        kept: the entry ``EXTRA`` as it was saved: the bytes of a file of ``torch.save``.
        whole: the entries under ``EXTRA_TENSORS``.

    Raises:
        ConfigError: it is no plain data.
        DamagedError, UnpicklingError: it is damaged.
    """
    if not isinstance(kept, bytes) or not isinstance(whole, dict):
        raise DamagedError("extra holds something else")
    try:
        if trust:
            file = torch.load(io.BytesIO(kept), map_location="cpu", weights_only=False)
        else:
            file = read_torch_file(io.BytesIO(kept), 0, len(kept), verify=True)
        if type(file) is not dict or type(file.get("pickled")) is not bytes:
            raise DamagedError("extra holds something else")
        tensors = {**file["tensors"], **{int(number): tensor for number, tensor in whole.items()}}
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise DamagedError("a tensor of extra is something else")
        pickled = file["pickled"]
        return unpickle(pickled, plain_names(), trust=trust, persistent=tensors.__getitem__)
    except RefusedError as error:
        raise not_plain("extra", error) from error
