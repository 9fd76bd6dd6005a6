"""Dispatch modes that count: ops by name, and the bytes that copies move.

A `TorchDispatchMode` sees every op that Python or autograd dispatches, with its arguments, and
nothing of what the op does inside. Collectives on a `NoopGroup` never reach it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Ops whose only work is to put bytes in another place or another dtype, by name without overload.
COPIES = frozenset(
    [
        *("aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::_to_copy", "aten::repeat"),
        *("aten::cat", "aten::stack", "aten::_chunk_cat", "aten::constant_pad_nd"),
        *("aten::split_with_sizes_copy", "aten::split_copy", "aten::unbind_copy"),
        *("aten::slice_copy", "aten::narrow_copy", "aten::view_copy"),
        *("aten::index_select", "aten::index_copy_"),
        *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"),
    ]
)


class OpCounter(TorchDispatchMode):
    """Count ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Moved:
    """Bytes that copies read and wrote."""

    read: int = 0
    written: int = 0


class CopyCounter(TorchDispatchMode):
    """Count the bytes that `COPIES` read and write.

    Written are the arguments that the op's schema marks as written to, or else its results; read
    are its other tensors. torch's `all_gather_copy_in` is given the whole output of an all-gather
    and writes one rank's slice, so its inputs count for both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = Moved()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in COPIES:
            read, written = _split(func, args, kwargs)
            if name == "fsdp::all_gather_copy_in":
                read = nbytes_of(args[0])
                written = nbytes_of(args[0]) * args[1].element_size() // args[0][0].element_size()
            elif written is None:
                written = nbytes_of(result)
            self.moved.read += read
            self.moved.written += written
            self.by_name[name] += read + written
        return result


def _split(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, int | None]:
    """Return bytes of arguments that are read, and of those written (None: the results are)."""
    read, written = 0, None
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = (written or 0) + nbytes_of(value)
        else:
            read += nbytes_of(value)
    return read, written


def nbytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in a container."""
    leaves = pytree.tree_leaves(tree)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
