"""Private torch API, by subject: where values lie in the files of a checkpoint.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.14.1. A file of its
own, because ``torch.distributed.checkpoint`` takes long to import, and only saves need it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo


def storage_info(file: str, offset: int, nbytes: int) -> Any:
    """Return what metadata has for a value: torch's reader of files looks for this class.

    It is only made by torch's own writer, of values that it writes itself.
    """
    return _StorageInfo(file, offset, nbytes)
