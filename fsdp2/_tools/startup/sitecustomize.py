"""Runs first in every Python child process of a program run with ``python -m fsdp2``.

These processes have this folder in ``PYTHONPATH``, so Python imports this ``sitecustomize``. This
file must not import torch, which most processes never use, and must not shadow the user's own
``sitecustomize``.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


class _AfterTorch:
    """Import fsdp2 right after ``torch.distributed.fsdp``; fsdp2 then replaces the names there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.distributed.fsdp" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_import(module: ModuleType) -> None:
                load(module)
                # the parent process may have found fsdp2 in its working folder
                if importlib.util.find_spec("fsdp2") is None:
                    sys.path.append(str(_HERE.parent.parent))
                importlib.import_module("fsdp2")

            loader.exec_module = load_and_import
        return spec


def _run_the_next_of_this_name() -> None:
    rest = [part for part in sys.path if Path(part or os.curdir).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("FSDP2_REPLACE_TORCH") == "1":
    sys.meta_path.insert(0, _AfterTorch())
_run_the_next_of_this_name()  # called last: if it raises, Python prints the error and continues
