"""The ranks that share tensors, and what they agree on outside of a step.

Owns ``Grid``: the axes of a mesh as this rank sees them, over which objects are broadcast and
failures are told. It must not know parameters or modules.

[Note: a failure is everybody's]
What one rank meets alone (a full disk, a file that is missing, an ``init`` that raises) would leave
the others in a collective. So work of one rank is done inside ``Grid.together``: at its end ranks
exchange whether it failed, and all of them raise what the first one met; one that was interrupted
(Ctrl-C, ``sys.exit``) tells the others, and goes on with that. In the same exchange they compare
what has to be the same on all of them: arguments that say which collectives follow. Ctrl-C at
another moment of an ``operation`` waits for the next such exchange (``_core.base.interrupts``). Who
leaves a stream of tensors early tells it in the others' next exchange (``Grid.leave``).

[Note: a rank that is gone]
A rank that is killed, or stopped, tells nothing: the others' next collective fails, with a text of
the backend. ``carrying`` around collectives makes a ``LostRank`` of it, and whoever knows what they
were for says so on the way up (``named``): the parameter, the operation.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base.arguments import described
from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    FSDPError,
    StateError,
    UnsupportedError,
    coded,
)
from fsdp2._core.base.interrupts import kept_interrupts, take_interrupt
from fsdp2._core.comm.mesh import MeshAxis

# What a backend's error tells for certain about the rank that is missing.

CLOSED = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|got 0 bytes|"
    r"remote process exited|ncclRemoteError|connection refused",
    re.IGNORECASE,
)
WAITED = re.compile(
    r"(?:timed out waiting|timeout after|timeout\(ms\)\s*=|timed out after)\s*(\d+)\s*(ms)?",
    re.IGNORECASE,
)


def known_of(cause: str) -> str:
    """Return what is known of "another rank", as a clause that follows it; "" if nothing is."""
    waited = WAITED.search(cause)
    if waited is not None:
        seconds = int(waited[1]) / 1000
        return (
            f"nothing came from it for {seconds:g} s. It stands still, it comes later than that, "
            "or the link to it is cut"
        )
    if CLOSED.search(cause):
        return (
            "it closed the connection. Its program came to its end (had it fewer batches?), or it "
            "failed, or the link to it broke"
        )
    return ""


T = TypeVar("T")
NOTHING: Mapping[str, object] = MappingProxyType({})

FAULTS: tuple[type[Exception], ...] = (
    *(AssertionError, AttributeError, ImportError, MemoryError, NameError, RecursionError),
    torch.OutOfMemoryError,
)
"""Faults of a program or of a machine, which somebody may catch by their own class."""

_KINDS: dict[str, type[FSDPError]] = {
    kind.__name__: kind for kind in (ConfigError, ConfigTypeError, StateError, UnsupportedError)
}


class LostRank(StateError):  # noqa: N818  # a StateError, by another cause
    """A collective failed, because another rank is gone. See [Note: a rank that is gone]."""

    def __init__(self, cause: str, where: tuple[str, ...] = ()) -> None:
        super().__init__("FS402", cause)
        self.cause = cause
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.where), vars(self)

    def __str__(self) -> str:
        known = known_of(self.cause)
        what = f": {known}. If no rank has ended, one" if known else ". It has ended, or it"
        text = (
            f"{': '.join(self.where) or 'a collective'}: another rank did not take part{what} "
            "called something else: is this call under `if rank == 0:`? Look at what the others "
            f"printed, and start all ranks again. The backend said: {self.cause}"
        )
        return coded(self.code, text)


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """Around collectives, and nothing else: raise LostRank for errors of the backend."""
    try:
        yield
    except FSDPError:
        raise
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise LostRank(cause or type(error).__name__) from error


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Say in a LostRank what is done inside; a context, or the decorator of a function."""
    try:
        yield
    except LostRank as error:
        if not (error.where and error.where[0].startswith(what)):
            error.where = (what, *error.where)
        raise


@contextlib.contextmanager
def operation(what: str) -> Iterator[None]:
    """Around all that a public function does with the other ranks; a context, or a decorator."""
    with named(what), kept_interrupts():
        yield


def _of_kind(failed: StateError, error: BaseException | None) -> StateError:
    """Return an error that is also caught as the fault that this rank has met, if it is one."""
    kind = next((fault for fault in FAULTS if isinstance(error, fault)), None)
    if kind is None:
        return failed
    as_told = {"__reduce__": lambda _: (StateError, (failed.code, failed.text))}
    both: type[StateError] = type(kind.__name__, (StateError, kind), as_told)
    return both(failed.code, failed.text)


class _Told(NamedTuple):
    """What a rank tells the others of its error; ``kind``: which one of ours it is."""

    kind: str
    code: str
    text: str
    rank: int


def _compared(value: object) -> str:
    """Return an argument's text. Python writes no int of more than 4300 digits: those by size."""
    return described(value) if isinstance(value, int) else repr(value)


@dataclass(frozen=True)
class Grid:
    """Axes of ranks. Without an axis, a process alone."""

    axes: tuple[MeshAxis, ...]
    device_type: str = "cpu"

    @staticmethod
    def of(mesh: DeviceMesh) -> Grid:
        """Read a mesh; this rank must be on it."""
        axes = tuple(
            MeshAxis(str(dim), mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
            for dim in range(mesh.ndim)
        )
        return Grid(axes, mesh.device_type)

    @staticmethod
    def world() -> Grid:
        """Return all ranks as one axis, or a process alone."""
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
        """This rank's coordinate on every axis."""
        return tuple(axis.rank for axis in self.axes)

    @property
    def is_first(self) -> bool:
        """True on the rank that reads and writes for all."""
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
        return held[0]  # type: ignore[no-any-return]  # what the first rank passed

    def gather(self, value: Any) -> list[Any] | None:
        """Return the objects of all ranks on the first one, its own first; None on the others."""
        held: list[Any] | None = [value]
        for index, axis in reversed([*enumerate(self.axes)]):
            if axis.size > 1 and self.is_first_on(range(index + 1, len(self.axes))):
                parts: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
                with carrying():
                    dist.gather_object(held, parts, dst=axis.global_ranks[0], group=axis.pg)
                held = [item for part in parts for item in part] if parts is not None else None
        return held

    def scatter(self, values: list[Any] | None) -> Any:
        """Return on each rank its own of the first one's objects, in the order of ``gather``."""
        held = values
        for index, axis in enumerate(self.axes):
            if axis.size > 1 and self.is_first_on(range(index + 1, len(self.axes))):
                parts = None
                if axis.rank == 0:
                    assert held is not None
                    size = len(held) // axis.size
                    parts = [held[start : start + size] for start in range(0, len(held), size)]
                received: list[Any] = [None]
                with carrying():
                    dist.scatter_object_list(
                        received, parts, src=axis.global_ranks[0], group=axis.pg
                    )
                held = received[0]
        assert held is not None
        (own,) = held
        return own

    def collect(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, the first rank's first."""
        held = [value]
        for axis in reversed(self.axes):
            if axis.size > 1:
                gathered: list[Any] = [None] * axis.size
                with carrying():
                    dist.all_gather_object(gathered, held, group=axis.pg)
                held = [item for part in gathered for item in part]
        return held

    def common(self, values: set[T]) -> set[T]:
        """Return what all ranks have. What one axis has in common goes over the next."""
        held = values
        for axis in reversed(self.axes):
            if axis.size > 1:
                gathered: list[Any] = [None] * axis.size
                with carrying():
                    dist.all_gather_object(gathered, held, group=axis.pg)
                held = set.intersection(*gathered)
        return held

    def any_is(self, flag: bool) -> bool:
        """True if the flag is set on some rank: one number for each axis travels."""
        return bool(self.highest(int(flag))[0])

    def highest(self, *numbers: int) -> list[int]:
        """Return the highest of all ranks for each number."""
        highest = list(numbers)
        for axis in self.axes:
            if axis.size > 1:
                assert axis.pg is not None
                sent = torch.tensor(highest, device=wire_device(axis.pg))
                with carrying():
                    dist.all_reduce(sent, dist.ReduceOp.MAX, group=axis.pg)
                highest = sent.tolist()
        return highest

    def raise_together(
        self, error: BaseException | None, what: str, same: Mapping[str, object] = NOTHING
    ) -> None:
        """Raise on every rank if some rank has an error. See [Note: a failure is everybody's].

        Args:
            same: arguments by name that all ranks must give alike; their texts are compared.
        """
        error = error or take_interrupt()
        try:
            with named(what):
                told = self._tell(error, what, same)
        finally:
            if error is not None and not isinstance(error, Exception):
                raise error  # KeyboardInterrupt, SystemExit
        if told is None:
            return
        if told.kind in _KINDS:
            raise _KINDS[told.kind](told.code, told.text) from error
        failed = StateError("FS403", f"{what}: rank {told.rank} failed with {told.text}")
        raise _of_kind(failed, error) from error

    def _tell(
        self, error: BaseException | None, what: str, same: Mapping[str, object]
    ) -> _Told | None:
        """Return the first rank's error, if any has one; or in what their arguments differ."""
        given = {name: _compared(value) for name, value in same.items()}
        digest = zlib.crc32(repr(given).encode())
        failed, most, least = self.highest(int(error is not None), digest, -digest)
        if not failed:
            return None if most == -least else self._difference(what, given)
        mine = None
        if error is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            name = type(error).__name__
            if name in _KINDS and isinstance(error, FSDPError):
                mine = _Told(name, error.code, error.text, rank)
            else:
                mine = _Told("", "", f"{name}: {error}".removesuffix(": "), rank)
        found: list[_Told] = [told for told in self.collect(mine) if told is not None]
        return found[0]

    def _difference(self, what: str, given: dict[str, str]) -> _Told:
        """Say which argument of a call is not the same on all ranks, and what two of them gave."""
        rank = dist.get_rank()
        ranks: list[tuple[int, dict[str, str]]] = self.collect((rank, given))
        first, one = ranks[0]
        other, two = next(told for told in ranks if told[1] != one)
        name = next(name for name in (*one, *two) if one.get(name) != two.get(name))
        error = ConfigError(
            "FS409",
            f"{what}: ranks called it with different arguments. Found {name}={one.get(name)} on "
            f"rank {first}, and {name}={two.get(name)} on rank {other}. Pass the same on every "
            "rank. Nothing was done.",
        )
        return _Told(ConfigError.__name__, error.code, error.text, first)

    def leave(self, error: BaseException, what: str) -> None:
        """Tell the others, who go on to ``raise_together``, why this rank does not.

        It raises nothing: the caller has an error of its own, or is being closed.
        """
        with contextlib.suppress(Exception):  # of ranks that are gone too
            if dist.is_initialized():
                self.raise_together(error, what)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[dict[str, object]]:
        """Run work of this rank alone (no collectives inside); raise on all ranks if one failed.

        What is put into the dict that it gives has to be the same on all ranks, else they raise.
        """
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
    """Return where a process group takes tensors from: ``device`` if it can."""
    kinds = [kind for kind in dist.get_backend_config(group).split(",") if kind]
    devices = [kind.split(":")[0] for kind in kinds]
    if device.type in devices or not devices:
        return device
    kind = devices[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())
