"""Full models in files, as ``safetensors`` writes them.

Owns where files lie and when they take their names. It must not know how tensors are cut.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._errors import ConfigError
from fsdp2._files import PathLike, sync
from fsdp2._idle import require_idle
from fsdp2._state import IncompatibleKeys, Told, full, load_full, model_tensors
from fsdp2._stream import Grids, Target

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _require_safetensors() -> Any:
    """Import the package when it is needed: it is optional."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ConfigError(
            "safetensors: the package is not installed. Install it with pip install safetensors."
        ) from error


class _Writer:
    """Collects tensors of a file and writes it when it is full; the names come last."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._limit = max_file_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0
        self.error: BaseException | None = None

    def __call__(self, names: list[str], tensor: Tensor | None) -> None:
        """Take a tensor. An error is kept: the ranks that send must not be left alone."""
        if tensor is None or self.error is not None:
            return
        try:
            if self._pending and self._pending_nbytes + tensor.nbytes > self._limit:
                self._flush()
            self._pending[names[0]] = tensor.contiguous()
            self._pending_nbytes += tensor.nbytes
        except BaseException as caught:  # an interrupt is raised at the end too
            self.error = caught

    def _flush(self) -> None:
        package = _require_safetensors()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".{SINGLE}.tmp-{len(self._files)}"
        package.torch.save_file(self._pending, str(path), metadata={"format": "pt"})
        sync(path)
        self._files.append((path, list(self._pending)))
        self._total += self._pending_nbytes
        self._pending, self._pending_nbytes = {}, 0

    def finish(self) -> None:
        """Give the files their names.

        A name that is in use is not given to one of several files: until the index is replaced, the
        old one is valid.
        """
        if self.error is not None:
            self.discard()
            raise self.error
        self._flush()
        before = set(_files_of(self._folder))
        count = len(self._files)
        weight_map: dict[str, str] = {}
        finals = [SINGLE] if count == 1 else _names_of_several("model", count)
        if count > 1 and any((self._folder / final).exists() for final in finals):
            finals = _names_of_several(f"model-{uuid.uuid4().hex[:8]}", count)
        try:
            for (path, names), final in zip(self._files, finals, strict=True):
                os.replace(path, self._folder / final)
                weight_map.update(dict.fromkeys(names, final))
            self._replace_index(weight_map if count > 1 else {})
        except BaseException:
            for final in finals if count > 1 else ():
                (self._folder / final).unlink(missing_ok=True)
            self.discard()
            raise
        for stale in before - set(weight_map.values()):
            (self._folder / stale).unlink(missing_ok=True)
        sync(self._folder)
        self.discard()  # what a save that was stopped left

    def _replace_index(self, weight_map: dict[str, str]) -> None:
        index = self._folder / INDEX
        if not weight_map:
            index.unlink(missing_ok=True)
            return
        text = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        temporary = index.with_name(f".{INDEX}.tmp")
        temporary.write_text(json.dumps(text, indent=2) + "\n")
        sync(temporary)
        os.replace(temporary, index)

    def discard(self) -> None:
        for path in self._folder.glob(f".{SINGLE}.tmp-*"):
            path.unlink(missing_ok=True)


def _names_of_several(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _files_of(folder: Path) -> list[str]:
    """Return the files of the checkpoint in a folder."""
    index = folder / INDEX
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return sorted(set(names.values()))
    return [SINGLE] if (folder / SINGLE).exists() else []


def save(
    folder: PathLike,
    model: nn.Module,
    dtype: torch.dtype | None,
    max_bytes: int,
    max_file_bytes: int,
) -> None:
    """Write a full model, file by file."""
    require_idle(model, "save_safetensors")
    tensors, _ = model_tensors(model)
    main = Grids([*tensors.values()]).main
    with main.together("save_safetensors"):
        _require_safetensors()
    writer = _Writer(Path(folder), max_file_bytes)
    target = Target(on_all=False, dtype=dtype, device=torch.device("cpu"), counted=False)
    full(model, None, "name", target, max_bytes, visit=writer)
    with main.together("save_safetensors"):
        if main.is_first:
            writer.finish()


def load(folder: PathLike, model: nn.Module, strict: bool, max_bytes: int) -> IncompatibleKeys:
    """Read tensors one by one on the first rank, and scatter them."""
    place = Path(folder)
    files: dict[str, Any] = {}
    stack = contextlib.ExitStack()

    def describe() -> Told:
        package = _require_safetensors()
        names = _files_of(place)
        if not names:
            raise ConfigError(
                f"load_safetensors: neither {SINGLE} nor {INDEX} in {place}. Pass the folder that "
                "save_safetensors, or save_pretrained of transformers, wrote."
            )
        for name in names:
            file = stack.enter_context(package.safe_open(str(place / name), framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        shapes: dict[str, tuple[int, ...] | None] = {
            name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()
        }
        return Told(shapes)

    def no_optimizer(name: str) -> Tensor:
        raise AssertionError(name)

    with stack:
        return load_full(
            "load_safetensors",
            model,
            None,
            describe,
            lambda name: files[name].get_tensor(name),
            no_optimizer,
            from_rank0=True,
            strict=strict,
            max_bytes=max_bytes,
        )
