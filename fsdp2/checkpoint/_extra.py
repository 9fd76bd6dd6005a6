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

from fsdp2._base.errors import ConfigError
from fsdp2.checkpoint._unpickling import RefusedError, Unpickler, plain_names

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
    pickler.dump(extra)
    numbered = list(enumerate(pickler.tensors))
    sharded_tensors = {str(n): t.detach() for n, t in numbered if isinstance(t, DTensor)}
    entries: dict[str, Any] = {EXTRA_TENSORS: sharded_tensors} if sharded_tensors else {}
    if is_first:
        plain = {n: t for n, t in numbered if not isinstance(t, DTensor)}
        torch.save({"pickled": file.getvalue(), "tensors": plain}, kept)
        entries[EXTRA] = kept.getvalue()
    return entries


def unpacked(kept: Any, whole: dict[Any, Tensor], *, trust: bool) -> Any:
    """Return the ``extra`` of a checkpoint; DTensors have become whole.

    Args:
        kept: the entry ``EXTRA`` as it was saved: the bytes of a file of ``torch.save``.
        whole: the entries under ``EXTRA_TENSORS``.

    Raises:
        ConfigError: it is no plain data.
    """
    file = torch.load(io.BytesIO(kept), map_location="cpu", weights_only=not trust)
    tensors = {**file["tensors"], **{int(number): tensor for number, tensor in whole.items()}}
    try:
        return Unpickler(file["pickled"], plain_names(), trust=trust, tensors=tensors).load()
    except RefusedError as error:
        raise ConfigError(
            "FS616",
            f"load: extra holds a {error}, which is no plain data: loading it could run any code. "
            "Pass trust=True if you know who wrote it, allow its class with "
            "torch.serialization.add_safe_globals, or save numbers, strings, tensors, lists and "
            "dicts only. Nothing was changed.",
        ) from error
