"""Save and load full models as ``safetensors`` files.

[Note: sums of safetensors]
The metadata of a file has one additional key, ``fsdp2``. Its value is JSON: the id of the save, and
for each tensor, a checksum over its name, dtype, shape and data. If there are several files, their
index has the same key, with a checksum of the index.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base.errors import (
    ConfigError,
    FSDPError,
    StateError,
    check_count,
    check_dtype,
    check_path,
)
from fsdp2._core.base.names import clean, printable
from fsdp2._core.base.regular_files import is_hollow, open_regular, read_regular
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.transfer.redistribute import Grids, Target
from fsdp2.checkpoint._checksums import DamagedError, damaged, said, sum_of_tensor
from fsdp2.checkpoint._load import IncompatibleKeys, Source, StateManifest, load_full
from fsdp2.checkpoint._place import Workspace, exclusive, file_in, plain_name, stamp_of, sync
from fsdp2.checkpoint._state import MAX_BYTES, checked, gather_each, model_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OURS = "fsdp2"
MAX_FILE_BYTES = 5 * 10**9  # default size limit of a file, as in ``transformers``


def _require_safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ConfigError(
            "FS620",
            "safetensors: the package is not installed. Install it with pip install safetensors.",
        ) from error


class _Writer:
    """Collects tensors, writes each file when it is full, and renames all files at the end."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._limit = max_file_bytes
        self._token = uuid.uuid4().hex[:8]
        self._workspace = Workspace(folder / SINGLE, self._token)
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0
        self.error: BaseException | None = None

    def take(self, name: str, tensor: Tensor | None) -> None:
        """Add a tensor. Errors are raised by ``finish``, because other ranks are still sending."""
        if tensor is None or self.error is not None:
            return
        try:
            if self._pending and self._pending_nbytes + tensor.nbytes > self._limit:
                self._flush()
            self._pending[name] = tensor.contiguous()
            self._pending_nbytes += tensor.nbytes
        except BaseException as caught:  # even an interrupt is raised only at the end
            self.error = caught

    def _flush(self) -> None:
        package = _require_safetensors()
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._workspace.make()
        path = self._workspace.path / str(len(self._files))
        sums = {name: _sum_of(name, tensor) for name, tensor in self._pending.items()}
        told = json.dumps(_told(self._token, sums))
        package.torch.save_file(self._pending, str(path), metadata={"format": "pt", OURS: told})
        sync(path)
        self._files.append((path, list(self._pending)))
        self._total += self._pending_nbytes
        self._pending, self._pending_nbytes = {}, 0

    def finish(self) -> None:
        try:
            if self.error is not None:
                raise self.error
            self._flush()
            with exclusive(self._folder / SINGLE):
                self._publish()
            sync(self._folder)
        finally:
            self._workspace.remove()

    def _publish(self) -> None:
        """Replace the existing files. If there are several new files, none takes the name of an
        existing file, so the old index remains valid until it is replaced."""
        before = _stale_files(self._folder)
        finals = [SINGLE]
        if len(self._files) == 1:
            os.replace(self._files[0][0], self._folder / SINGLE)
            (self._folder / INDEX).unlink(missing_ok=True)
        else:
            finals = self._take_names()
            try:
                self._write_index(finals)
            except BaseException:
                for final in finals:
                    (self._folder / final).unlink(missing_ok=True)
                raise
        for stale in before - set(finals):
            (self._folder / stale).unlink(missing_ok=True)

    def _take_names(self) -> list[str]:
        """Rename the files to the standard names if these are all unused, else to unique names."""
        count = len(self._files)
        finals = _names_of_several("model", count)
        taken: list[Path] = []
        try:
            for (path, _), final in zip(self._files, finals, strict=True):
                os.link(path, self._folder / final)  # fails if the name exists
                taken.append(self._folder / final)
        except OSError:
            for path in taken:
                path.unlink(missing_ok=True)
            finals = _names_of_several(f"model-{self._token}", count)
            for (path, _), final in zip(self._files, finals, strict=True):
                os.rename(path, self._folder / final)
        return finals

    def _write_index(self, finals: list[str]) -> None:
        files = zip(self._files, finals, strict=True)
        weight_map = {name: final for (_, names), final in files for name in names}
        ours = _told(self._token, {INDEX: _sum_of_map(weight_map)})
        text = {"metadata": {"total_size": self._total, OURS: ours}, "weight_map": weight_map}
        temporary = self._workspace.path / INDEX
        temporary.write_text(json.dumps(text, indent=2) + "\n")
        sync(temporary)
        os.replace(temporary, self._folder / INDEX)


def _damaged(path: Path, error: BaseException) -> StateError:
    how = "damaged" if path.exists() else "missing"
    return damaged("load_safetensors", f"{path} is {how}: {said(error)}.")


def _names_of_several(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _sum_of(name: str, tensor: Tensor) -> int:
    """Return a checksum over a tensor's name, dtype, shape and data."""
    told = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
    return sum_of_tensor(tensor.contiguous(), zlib.crc32(told.encode()))


def _told(save: str, sums: dict[str, int]) -> dict[str, Any]:
    return {"save": save, "crc32": sums, "self": _sum_of_map({"save": save, **sums})}


def _checked(told: Any, save: str | None, names: set[str]) -> dict[str, int]:
    """Return a file's checksums. Raise DamagedError if they do not match ``names`` and ``save``."""
    sums = {str(name): int(value) for name, value in told["crc32"].items()}
    if told != _told(str(told["save"]), sums) or set(sums) != names:
        raise DamagedError("its checksums are incomplete or do not match")
    if save is not None and told["save"] != save:
        raise DamagedError(f"it belongs to save {told['save']}, but the index to save {save}")
    return sums


def _sum_of_map(mapping: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(mapping, sort_keys=True).encode())


def _stale_files(folder: Path) -> set[str]:
    """Return the files of a folder's previous checkpoint, which a save may delete."""
    try:
        names = _read_index(folder).files
    except (ConfigError, StateError):  # the index is damaged, or names files elsewhere: keep all
        return set()
    return {name for name in names if name.endswith(".safetensors")}


class _Index(NamedTuple):
    files: list[str]
    weight_map: dict[str, str]
    save: str | None


def _read_index(folder: Path, *, verify: bool = True, trust: bool = False) -> _Index:
    """Return a folder's index, or one for a single file. Raise StateError for a damaged index."""
    path = file_in(folder, INDEX, "load_safetensors", trust=trust)
    if not path.exists():
        return _Index([SINGLE] if (folder / SINGLE).exists() else [], {}, None)
    try:
        told = json.loads(read_regular(path))
        weight_map = {str(name): file for name, file in told["weight_map"].items()}
        ours = told.get("metadata", {}).get(OURS) if verify else None
        save = None if ours is None else str(ours["save"])
        if ours is not None and _checked(ours, None, {INDEX})[INDEX] != _sum_of_map(weight_map):
            raise DamagedError("its checksum does not match")
    except MemoryError:
        raise
    except Exception as error:  # the JSON may have any structure
        raise _damaged(path, error) from error
    files = sorted({plain_name(file, str(path)) for file in weight_map.values()})
    return _Index(files, weight_map, save)


@operation("save_safetensors")
def save_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a full model as safetensors, with the file names that ``transformers`` loads.

    Writes one file, ``model.safetensors``, or several files and an index. The first rank writes the
    files, and holds the tensors of one file at a time; the other ranks need at most ``max_bytes``
    in addition to their shards. A tied parameter is written once, under its first name. Existing
    files are replaced once all new files are written. If two jobs save to the same folder, the
    files of the job that finished last remain, and are complete.

    Args:
        dtype: floating-point tensors are cast to this dtype; None keeps their dtypes.
        max_bytes: maximum size of the communication buffers; 256 MiB by default.
        max_file_bytes: maximum size of the tensors in a file; 5 GB by default. A larger tensor is
            written to a separate file.

    Raises:
        ConfigError: the package ``safetensors`` is not installed.
        StateError: the first rank could not write.
    """
    what = "save_safetensors"
    with checked(what, model, max_bytes=max_bytes) as same:
        check_path(what, "folder", folder)
        check_dtype(what, "dtype", dtype)
        check_count(what, "max_file_bytes", max_file_bytes)
        require_idle(model, what)
        given = [*model_tensors(model)[0].items()]
        _require_safetensors()
        same.update(dtype=dtype)
    grids = Grids([tensor for _, tensor in given])
    writer = _Writer(Path(folder), max_file_bytes)
    target = Target(on_all=False, dtype=dtype, device=torch.device("cpu"), counted=False)

    def take(places: list[int], tensor: Tensor | None) -> None:
        writer.take(given[places[0]][0], tensor)

    gather_each(what, grids, given, target, max_bytes, take)
    with grids.main.together(what):
        if grids.main.is_first:
            writer.finish()


class _Files(Source, contextlib.ExitStack):
    """The tensors in a folder, on the reading rank. A context manager that closes the files."""

    def __init__(self, folder: Path, *, verify: bool, trust: bool) -> None:
        super().__init__()
        self._folder = folder
        self._verify = verify
        self._trust = trust
        self._files: dict[str, tuple[Any, str]] = {}  # from clean names to open files and keys
        self._sums: dict[str, int] = {}
        self._stamps = self._stamps_now()

    def describe(self) -> StateManifest:
        with self._unless_replaced():
            return self._describe()

    def _stamps_now(self) -> list[tuple[int, ...] | None]:
        return [stamp_of(self._folder / name) for name in (SINGLE, INDEX)]

    @contextlib.contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        """Convert errors to FS626 if another save replaced the files, which then seem damaged."""
        try:
            yield
        except FSDPError as error:
            if self._stamps_now() == self._stamps:
                raise
            raise StateError(
                "FS626",
                f"load_safetensors: another save replaced the files in {self._folder} while they "
                "were being read. Call load_safetensors again; nothing was changed. (Found: "
                f"{error.text})",
            ) from error

    def _describe(self) -> StateManifest:
        package = _require_safetensors()
        index = _read_index(self._folder, verify=self._verify, trust=self._trust)
        if not index.files:
            raise ConfigError(
                "FS612",
                f"load_safetensors: found neither {SINGLE} nor {INDEX} in {self._folder}. Pass the "
                "folder, not a file, that save_safetensors or transformers' save_pretrained wrote.",
            )
        shapes: dict[str, tuple[int, ...] | None] = {}
        where: dict[str, str] = {}
        for name in index.files:
            path = file_in(self._folder, name, f"{self._folder / INDEX}", trust=self._trust)
            try:
                with open_regular(path) as looked_at:  # safetensors itself would map any file
                    if is_hollow(os.fstat(looked_at.fileno())) and not self._trust:
                        raise DamagedError("it is mostly holes")
                file = self.enter_context(package.safe_open(str(path), framework="pt"))
                for key in file.keys():  # noqa: SIM118  # not a mapping
                    if key in where or clean(key) in shapes:
                        raise DamagedError(f"{key} is also in {where.get(key, 'it')}")
                    where[key], self._files[clean(key)] = name, (file, key)
                    shapes[clean(key)] = tuple(file.get_slice(key).get_shape())
                self._take_sums(file, index.save)
            except (MemoryError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a Rust panic is not an Exception
                raise _damaged(path, error) from error
        wrong = [key for key, file in index.weight_map.items() if where.get(key) != file]
        if wrong:
            raise damaged(
                "load_safetensors",
                f"{self._folder / INDEX} lists {printable(wrong[0])} in "
                f"{index.weight_map[wrong[0]]}, which does not contain it.",
            )
        return StateManifest(shapes)

    def _take_sums(self, file: Any, save: str | None) -> None:
        text = (file.metadata() or {}).get(OURS)
        if text is not None and self._verify:
            self._sums.update(_checked(json.loads(text), save, set(file.keys())))
        elif save is not None:
            raise DamagedError("it has no checksums, but the index does")

    def read(self, name: str, in_optimizer: bool) -> Tensor:
        file, name = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        if name in self._sums and _sum_of(name, tensor) != self._sums[name]:
            problem = DamagedError(f"the checksum of {name} does not match")
            with self._unless_replaced():
                raise _damaged(self._folder, problem)
        return tensor


@operation("load_safetensors")
def load_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    max_bytes: int = MAX_BYTES,
    verify: bool = True,
    trust: bool = False,
) -> IncompatibleKeys:
    """Load a full model from safetensors: the first rank reads and scatters one tensor at a time.

    During the load, a rank needs additional memory equal to the size of its shards.

    Args:
        strict: require every name in the model to be in the files, and vice versa.
        max_bytes: maximum size of the communication buffers; 256 MiB by default.
        verify: verify all data read against the checksums that ``save_safetensors`` wrote.
        trust: follow links to files outside the folder.

    Raises:
        ConfigError: no safetensors files; names or shapes differ; a name or link points outside the
            folder; ``safetensors`` is not installed. Nothing was changed.
        StateError: a file is missing or damaged. Nothing was changed.
    """
    flags = {"strict": strict, "verify": verify, "trust": trust}
    with checked("load_safetensors", model, max_bytes=max_bytes, **flags):
        check_path("load_safetensors", "folder", folder)
    options: dict[str, Any] = {"strict": strict, "max_bytes": max_bytes}
    with _Files(Path(folder), verify=verify, trust=trust) as files:
        return load_full("load_safetensors", model, None, files, from_rank0=True, **options)
