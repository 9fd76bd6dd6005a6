"""Exchange of objects and failures between the ranks of a mesh, outside steps.

[Note: a failure reaches every rank]
If one rank fails (a full disk, a missing file), the others would hang in their next collective.
Therefore local work runs inside ``Grid.together``. When the work ends, ranks exchange whether it
failed; if so, all ranks raise the error of the first rank that failed. An interrupted rank (Ctrl-C,
``sys.exit``) informs the others, then raises its own interrupt. The exchange also compares
arguments that must be equal on all ranks. During an ``operation``, Ctrl-C is deferred to the next
exchange (``_core.base.interrupts``). A rank that leaves a loop over full tensors early calls
``Grid.leave``.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    FSDPError,
    StateError,
    UnsupportedError,
    carrying,
    described,
    named,
)
from fsdp2._core.base.interrupts import kept_interrupts, take_interrupt
from fsdp2._core.comm.mesh import MeshAxis, current_device

T = TypeVar("T")
NOTHING: Mapping[str, object] = MappingProxyType({})

FAULTS: tuple[type[Exception], ...] = (
    *(AssertionError, AttributeError, ImportError, MemoryError, NameError, RecursionError),
    torch.OutOfMemoryError,
)
"""Errors in the program or the machine, which callers may catch by class."""

_KINDS = (ConfigError, ConfigTypeError, StateError, UnsupportedError)
"""Classes of errors that other ranks raise too; they raise a StateError for any other class."""


@contextlib.contextmanager
def operation(what: str) -> Iterator[None]:
    """Wrap a public function that communicates. Use as a context manager or a decorator."""
    with named(what), kept_interrupts():
        yield


def _of_kind(failed: FSDPError, error: BaseException | None) -> FSDPError:
    """Return ``failed``. If it tells of an error with a class in ``FAULTS``, and this rank has such
    an ``error``, the result also has that class."""
    kind = next((fault for fault in FAULTS if isinstance(error, fault)), None)
    if kind is None or failed.code != "FS403":
        return failed
    as_told = {"__reduce__": lambda _: (StateError, (failed.code, failed.text))}
    both: type[StateError] = type(kind.__name__, (StateError, kind), as_told)
    return both(failed.code, failed.text)


def _compared(value: object) -> str:
    """Return an argument as text. Large ints are summarised: Python formats at most 4300 digits."""
    return described(value) if isinstance(value, int) else repr(value)


@dataclass(frozen=True)
class Grid:
    """The axes of a mesh of ranks. A grid without axes represents a single process."""

    axes: tuple[MeshAxis, ...]
    device_type: str = "cpu"

    @staticmethod
    def of(mesh: DeviceMesh) -> Grid:
        axes = tuple(
            MeshAxis(str(dim), mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
            for dim in range(mesh.ndim)
        )
        return Grid(axes, mesh.device_type)

    @staticmethod
    def world() -> Grid:
        """Return a grid of all ranks on one axis, or of a single process."""
        if not dist.is_initialized():
            return Grid(())
        return Grid((MeshAxis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD),))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.counts)

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(axis.rank for axis in self.axes)

    @property
    def is_first(self) -> bool:
        """Return True on the rank that reads and writes for all ranks."""
        return not any(self.place)

    def is_first_on(self, axes: Iterator[int] | range | tuple[int, ...]) -> bool:
        return not any(self.place[axis] for axis in axes)

    def broadcast(self, value: T) -> T:
        """Return the first rank's object on every rank."""
        held: list[Any] = [value if self.is_first else None]
        for index, axis in enumerate(self.axes):
            if axis.size > 1 and self.is_first_on(range(index + 1, len(self.axes))):
                with carrying():
                    dist.broadcast_object_list(held, src=axis.global_ranks[0], group=axis.pg)
        return held[0]  # type: ignore[no-any-return]  # the first rank's value

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' objects on the first rank (its own first), and None on other ranks."""
        held: list[Any] | None = [value]
        for index, axis in reversed([*enumerate(self.axes)]):
            if axis.size > 1 and self.is_first_on(range(index + 1, len(self.axes))):
                parts: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
                with carrying():
                    dist.gather_object(held, parts, dst=axis.global_ranks[0], group=axis.pg)
                held = [item for part in parts for item in part] if parts is not None else None
        return held

    def scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's item of the first rank's list, which has the order of ``gather``."""
        held: Any = values  # None on a rank that has received nothing
        for index, axis in enumerate(self.axes):
            if axis.size > 1 and self.is_first_on(range(index + 1, len(self.axes))):
                parts = None
                if axis.rank == 0:
                    size = len(held) // axis.size
                    parts = [held[start : start + size] for start in range(0, len(held), size)]
                received: list[Any] = [None]
                source = axis.global_ranks[0]
                with carrying():
                    dist.scatter_object_list(received, parts, src=source, group=axis.pg)
                held = received[0]
        (own,) = held
        return own

    def collect(self, value: Any) -> list[Any]:
        """Return the objects of all ranks on every rank, starting with the first rank's."""
        return self._joined([value], lambda parts: [item for part in parts for item in part])

    def common(self, values: set[T]) -> set[T]:
        """Return the intersection of all ranks' sets."""
        return self._joined(values, lambda parts: set.intersection(*parts))

    def _joined(self, held: T, join: Callable[[list[Any]], T]) -> T:
        """Join the objects of all ranks, axis by axis, starting with the first rank's."""
        for axis in reversed(self.axes):
            if axis.size > 1:
                gathered: list[Any] = [None] * axis.size
                with carrying():
                    dist.all_gather_object(gathered, held, group=axis.pg)
                held = join(gathered)
        return held

    def any_is(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank. Sends one number per axis."""
        return bool(self.highest(int(flag))[0])

    def highest(self, *numbers: int) -> list[int]:
        highest = list(numbers)
        for axis in self.axes:
            if axis.size > 1:
                sent = torch.tensor(highest, device=wire_device(axis.pg))
                with carrying():
                    dist.all_reduce(sent, dist.ReduceOp.MAX, group=axis.pg)
                highest = sent.tolist()
        return highest

    def raise_together(
        self, error: BaseException | None, what: str, same: Mapping[str, object] = NOTHING
    ) -> None:
        """Raise on every rank if any rank has an error, or if the text of an argument in ``same``
        (keyed by name) differs between ranks. See [Note: a failure reaches every rank]."""
        error = error or take_interrupt()
        try:
            with named(what):
                told = self._tell(error, what, same)
        finally:
            if error is not None and not isinstance(error, Exception):
                raise error  # KeyboardInterrupt, SystemExit
        if told is not None:
            raise _of_kind(told, error) from error

    def _tell(
        self, error: BaseException | None, what: str, same: Mapping[str, object]
    ) -> FSDPError | None:
        """Return the error of the first rank that failed, or an error about differing arguments."""
        given = {name: _compared(value) for name, value in same.items()}
        digest = zlib.crc32(repr(given).encode())
        failed, most, least = self.highest(int(error is not None), digest, -digest)
        if not failed:
            return None if most == -least else self._difference(what, given)
        mine: FSDPError | None = None
        if isinstance(error, FSDPError) and type(error) in _KINDS:
            mine = type(error)(error.code, error.text)
        elif error is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            mine = StateError("FS403", f"{what}: rank {rank} failed with {why}")
        found: list[FSDPError] = [told for told in self.collect(mine) if told is not None]
        return found[0]

    def _difference(self, what: str, given: dict[str, str]) -> FSDPError:
        """Return an error that names the first differing argument and its values on two ranks."""
        rank = dist.get_rank()
        ranks: list[tuple[int, dict[str, str]]] = self.collect((rank, given))
        first, one = ranks[0]
        other, two = next(told for told in ranks if told[1] != one)
        name = next(name for name in (*one, *two) if one.get(name) != two.get(name))
        return ConfigError(
            "FS409",
            f"{what}: ranks passed different arguments. Found {name}={one.get(name)} on rank "
            f"{first}, and {name}={two.get(name)} on rank {other}. Pass the same value on every "
            "rank. Nothing was done.",
        )

    def leave(self, error: BaseException, what: str) -> None:
        """Make other ranks raise ``error`` in ``raise_together``. Suppresses exceptions here."""
        with contextlib.suppress(Exception):  # other ranks may be gone
            if dist.is_initialized():
                self.raise_together(error, what)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[dict[str, object]]:
        """Run local work without collectives. Raise on all ranks if the work fails on any rank, or
        if the values stored in the yielded dict differ between ranks."""
        error: BaseException | None = None
        same: dict[str, object] = {}
        try:
            yield same
        except BaseException as caught:
            error = caught
        self.raise_together(error, what, same)


def wire_device(
    group: dist.ProcessGroup,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> torch.device:
    """Return a device whose tensors a process group can send: ``device`` if possible."""
    kinds = [kind for kind in dist.get_backend_config(group).split(",") if kind]
    devices = [kind.split(":")[0] for kind in kinds]
    if device.type in devices or not devices:
        return device
    return current_device(devices[0])
