"""Optimizer states in host memory; each is copied to the device only while its unit steps.

Independent of optimizer classes; ``_core/api/host_memory`` orders the copies.

[Note: states that travel]
A *batch* consists of the parameters of one unit, or of several small units. Its states are in one
block of pinned memory, and one copy moves all of them. The step of the optimizer's class runs once
per batch, with param groups that contain only the batch's parameters. While one batch steps, the
states of the next batch are copied in, and those of the previous batch are copied out. The device
thus has the states of at most three batches during a step, and of none between steps. ``max_bytes``
replaces this limit: a batch's states are then copied in when backward has computed the batch's
gradients, and the last copies to the host overlap with the next forward.

Between steps, the user sees host tensors with unchanged placements: DTensors whose local parts are
views of the pinned memory. Reading the states waits for the copies. Counters stay where they are.

[Note: states of runs that travel]
``fsdp2.optim.local`` keeps states per run, in its plans. Each batch has separate plans. Between
steps the optimizer holds the plans of all batches, like an optimizer that is not offloaded.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.api.host_memory import CopyLanes, HostBuffer, HostMemory
from fsdp2._core.base import torch_compiler, torch_dtensor, torch_optim
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import (
    ConfigError,
    UnsupportedError,
    check_count,
    check_flag,
    check_optimizer,
    wrong_type,
)
from fsdp2._core.params.layout import align, dense_stride
from fsdp2._core.params.param import OwnerMark
from fsdp2.optim._local import (
    ELEMENTWISE,
    LocalOptimizer,
    OptimizerT,
    needs_closure,
    rebuild_optimizer,
)
from fsdp2.optim._several import Several
from fsdp2.optim._whole import WholeOptimizer
from fsdp2.optim._wrapped import (
    Groups,
    State,
    loss_of,
    params_of,
    plain_step,
    wrapped_class,
    write_back,
)

LEAVING = 2  # number of batches that may be copied out while another one is copied in
LEAST_NBYTES = 1 << 25
"""Units with fewer bytes of local parameters join the next units' batch, to amortise the copies."""
ALIGNMENT = 128
BY_THEMSELVES = (*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon)
"""Classes that step each parameter independently of the others."""


def offload_states(
    optimizer: OptimizerT, *, max_bytes: int | None = None, by_itself: bool = False
) -> OptimizerT:
    """Keep an optimizer's states in pinned host memory between its steps.

    The step runs on the device, unit by unit: while one unit steps, the states of the next unit are
    copied to the device, and those of the previous unit back to the host. Parameters and gradients
    stay on the device, and results are bitwise equal to those without offloading. ``param_groups``,
    hooks and ``state_dict()`` work as before. States remain DTensors, with local parts on the host.
    Reading ``state`` waits for copies in flight. Loading a state dict temporarily needs device
    memory for all states, because torch loads them to the device.

    On a CPU, and for parameters on the host (``CPUOffloadPolicy``), states stay where they are.
    With ``max_bytes``, states copied in during backward stay on the device until a step has run. If
    a step is skipped, for example because of a non-finite gradient, they stay until the next step.

    Args:
        optimizer: a ``torch.optim`` optimizer, or one from ``fsdp2.optim.local``, before or after
            its first step. It is changed in place: its class is replaced by a subclass.
        max_bytes: upper bound on the bytes of states that are on the device at the same time. None:
            the states of three units, during the step only. With a number, a unit's states are
            copied in during backward, once its gradients exist, and the last copies to the host
            overlap with the next forward. To keep peak memory unchanged, pass the number of bytes
            that backward frees in total: activations minus gradients. The states of at least two
            units are on the device during the step, even if the bound is smaller.
        by_itself: declares that a user-defined or third-party class steps each parameter
            independently, and keeps no data about parameters except in their states.

    Returns:
        The optimizer.

    Raises:
        ConfigError: the class is not known to step each parameter independently;
            ``optimizer.step`` was replaced (except by a learning-rate scheduler).
        UnsupportedError: the optimizer requires a closure, or was made by ``fsdp2.optim.whole``,
            which keeps states on owners.
    """
    who = "fsdp2.optim.offload_states"
    if check_optimizer(who, optimizer) is None:
        raise wrong_type(who, "optimizer", "a torch.optim.Optimizer", optimizer)
    check_flag(who, "by_itself", by_itself)
    if max_bytes is not None:
        check_count(who, "max_bytes", max_bytes)
    found: Any = optimizer
    if isinstance(found, OffloadedStates):
        found._set_most(max_bytes)
        return optimizer
    plain: type[Optimizer] = getattr(optimizer, "_plain_class", type(optimizer))
    if isinstance(optimizer, WholeOptimizer | Several) or needs_closure(plain):
        raise UnsupportedError(
            "FS715",
            f"{who}: {type(optimizer).__name__} cannot step parameters separately, because "
            + ("its step requires a closure." if needs_closure(plain) else "owners step them.")
            + " Use an optimizer of torch.optim, or fsdp2.optim.local.",
        )
    if plain not in BY_THEMSELVES and not by_itself:
        raise ConfigError(
            "FS716",
            f"{who}: {plain.__name__} is not known to step each parameter independently, but units "
            "step one after another here. Use a class of torch.optim, or pass by_itself=True if "
            "this class does.",
        )
    if not torch_optim.steps_as_its_class(optimizer):
        raise ConfigError(
            "FS717",
            f"{who}: other code replaced the step method of this {plain.__name__}, and this "
            "replacement would not be called. Call offload_states before replacing the method.",
        )
    state = optimizer.state
    optimizer.__class__ = offloaded_class(type(optimizer))
    torch_optim.step_as_new_class(optimizer)
    made = cast(OffloadedStates, optimizer)
    vars(made).pop("state", None)
    made._begin()
    made.state = state
    made._set_most(max_bytes)
    return optimizer


class Home(NamedTuple):
    """A state's layout, and its offset in bytes in the batch's memory."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """View the state in a batch's memory, with its own storage, as in ``packing.own_shard``."""
        end = self.offset + self.size.numel() * self.dtype.itemsize
        found = torch.empty(0, dtype=self.dtype, device=flat.device)
        return found.set_(flat.untyped_storage()[self.offset : end], 0, self.size, self.stride)


class Slot(NamedTuple):
    entry: State
    key: str

    @property
    def value(self) -> Tensor:
        value: Tensor = self.entry[self.key]
        return value

    @property
    def part(self) -> Tensor:
        return torch_dtensor.local_part(self.value)

    def put(self, part: Tensor) -> None:
        self.entry[self.key] = torch_dtensor.placed_like(self.value, part)


@dataclass(eq=False)
class Batch:
    """Parameters that step together, all on one device, and the memory of their states."""

    params: list[Tensor]
    keys: set[str] = field(default_factory=set)  # names of the states that are copied
    plans: Any = None  # the plans of ``fsdp2.optim.local``
    buffer: HostBuffer | None = None
    flat: Tensor | None = None  # all states, on the device
    event: torch.Event | None = None  # recorded after the last copy from or to the host
    _stream: Any = None  # the stream that ``flat`` was allocated on

    def __del__(self) -> None:
        if self.event is not None:  # the step was skipped: the copy may still be running
            self._stream.wait_event(self.event)

    def bring(self, slots: Iterable[Slot], lanes: CopyLanes) -> None:
        """Start copying the states to the device; call ``wait`` before reading them."""
        found = [(slot, home) for slot in slots if (home := self._home_of(slot.part)) is not None]
        if not found:
            return
        assert self.buffer is not None
        self._stream = lanes.compute
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.event = lanes.bring_back(self.buffer, flat)
        self.flat = flat  # only now: if the copy fails, the next step tries again
        for slot, home in found:
            slot.put(home.view(flat))

    def _home_of(self, part: Tensor) -> Home | None:
        """Return a state's home in the batch's host memory, or None if the state is elsewhere."""
        if self.buffer is None or part.device.type != "cpu" or not part.numel():
            return None
        offset = part.data_ptr() - self.buffer.data.data_ptr()
        if not 0 <= offset < self.nbytes:
            return None
        return Home(offset, part.dtype, part.size(), part.stride())

    def wait(self) -> None:
        if self.event is not None:
            assert self.flat is not None
            torch.accelerator.current_stream(self.flat.device).wait_event(self.event)
            self.event = None

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.data.numel()

    def let_go(self) -> None:
        self.wait()
        self.flat = None

    def leave(self, lanes: CopyLanes) -> None:
        """Release the device memory without waiting; it is not reused before the copy is done."""
        if self.flat is not None:
            lanes.free_behind(self.flat)
        self.flat = self.event = None

    @property
    def device(self) -> torch.device:
        return _device_of(self.params[0]) if self.params else torch.device("cpu")

    def send(
        self,
        slots: Sequence[Slot],
        lanes: CopyLanes,
    ) -> None:
        """Start copying the states to the host. ``state`` contains the host copies from now on."""
        parts = [slot.part for slot in slots]
        homes, nbytes = list[Home](), 0
        for part in parts:
            homes.append(Home(nbytes, part.dtype, part.size(), part.stride()))
            nbytes += align(part.nbytes, ALIGNMENT)
        self.flat = self._joined(parts, homes, nbytes)
        if self.buffer is None or self.nbytes < nbytes:
            self.buffer = HostMemory().take(nbytes)
        self._stream = lanes.compute
        self.event = lanes.send_out(self.flat[:nbytes], self.buffer)
        for slot, home in zip(slots, homes, strict=True):
            slot.put(home.view(self.buffer.data))
            self.keys.add(slot.key)

    def _joined(
        self,
        parts: Sequence[Tensor],
        homes: Sequence[Home],
        nbytes: int,
    ) -> Tensor:
        """Return one block with all states in order, usually the block they were copied into."""
        flat = self.flat
        if flat is not None and flat.numel() >= nbytes:
            begin = flat.data_ptr()
            pairs = zip(parts, homes, strict=True)
            if all(part.data_ptr() == begin + home.offset for part, home in pairs):
                return flat
        flat = torch.empty(nbytes, dtype=torch.uint8, device=parts[0].device)
        for part, home in zip(parts, homes, strict=True):
            home.view(flat).copy_(part)
        return flat


class OffloadedStates:
    _plain_class: type[Optimizer]
    _stepped_class: type[Optimizer]
    param_groups: Groups

    def _begin(self) -> None:
        self._batches: list[Batch] = []
        self._lanes: dict[torch.device, CopyLanes] = {}
        self._is_stepping = False
        self._most: int | None = None  # bytes allowed on the device at a time (``max_bytes``)
        self._ahead: list[Batch] = []  # batches copied in during backward, in order
        self._handles: list[Any] = []
        # remove hooks with the optimizer: they make the model wait for reductions earlier
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._table: Any = defaultdict(dict)

    def _set_most(self, most: int | None) -> None:
        """Set the bound on states on the device, and whether they are copied in during backward."""
        batches = self._batches_now()
        _remove_all(self._handles)
        self._most = most
        for batch in batches:
            self._follow(batch)

    def _follow(self, batch: Batch) -> None:
        """With ``max_bytes``, register a hook that runs when a batch's gradients are complete."""
        first = next((p for p in batch.params if p.requires_grad), None)
        if self._most is not None and first is not None:
            hook = functools.partial(_come_ahead, weakref.ref(self), weakref.ref(batch))
            self._handles.append(first.register_post_accumulate_grad_hook(hook))

    def _has_room(self, batch: Batch, leaving: Sequence[Batch]) -> bool:
        if self._most is None:
            return len(leaving) < LEAVING
        here = sum(other.nbytes for other in self._batches if other.flat is not None)
        return here + batch.nbytes <= self._most

    @property
    def _local(self) -> Any:
        return self if isinstance(self, LocalOptimizer) else None

    @property
    def state(self) -> Any:
        """States by parameter, on the host. Reading them waits for copies to the host."""
        if not self._is_stepping:
            for batch in self._batches:
                if batch.buffer is not None and batch.buffer.event is not None:
                    batch.buffer.event.synchronize()
        return self._table if self._local is None else cast(Any, super()).state

    @state.setter
    def state(self, table: Any) -> None:
        if self._local is None:
            self._table = table
        else:
            LocalOptimizer.state.fset(self, table)  # type: ignore[attr-defined]  # a property
        if not self._is_stepping:
            with torch.no_grad():
                self._take_states()

    def _take_states(self) -> None:
        batches = self._batches_now()
        for batch in batches:
            batch.let_go()
            batch.plans = None
        for batch in batches:
            self._bring_strangers(batch, None)
            self._send(batch)
            batch.let_go()

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step, unit by unit. ``closure`` recomputes the loss and gradients."""
        loss = loss_of(closure)
        groups, batches = self.param_groups, self._batches_now()
        places = {param: place for place, group in enumerate(groups) for param in group["params"]}
        if self._local is not None and self._local._plans is None:  # the state was read
            for batch in batches:
                batch.plans = None
        self._is_stepping = True
        stepped: dict[int, dict[str, Any]] = {}
        leaving: deque[Batch] = deque()
        # step in order of arrival: the first batches are copied out while the last are copied in
        ahead, self._ahead = [batch for batch in self._ahead if batch.flat is not None], []
        order = ahead + [batch for batch in batches if batch not in ahead]
        try:
            self._bring(order[0])
            for place, batch in enumerate(order):
                self._bring_more(order[place + 1 :], leaving)
                batch.wait()
                stepped |= self._step_batch(batch, groups, places)
                with torch.no_grad():
                    self._send(batch)
                leaving.append(batch)
            if self._most is not None:
                for batch in leaving:
                    batch.leave(self._lanes_of(batch.device))
        finally:
            self.param_groups = groups
            self._is_stepping = False
            for batch in batches:
                batch.let_go()
            if self._local is not None:
                plans = [plan for batch in batches for plan in batch.plans or ()]
                self._local._plans, self._local._kernels = plans or None, []
        # values that a class writes into a param group, such as counters
        for index, own in stepped.items():
            write_back(groups[index], own)
        return loss

    def _bring_more(self, following: Sequence[Batch], leaving: deque[Batch]) -> None:
        """Copy in the next batch, evicting others if necessary, then more batches if they fit."""
        for place, batch in enumerate(following):
            if batch.flat is not None:
                continue
            while place == 0 and leaving and not self._has_room(batch, leaving):
                leaving.popleft().let_go()
            if place and (self._most is None or not self._has_room(batch, leaving)):
                return
            self._bring(batch)

    def _step_batch(
        self, batch: Batch, groups: Groups, places: dict[Tensor, int]
    ) -> dict[int, dict[str, Any]]:
        """Step a batch; return its param groups by number. ``places``: each parameter's group."""
        params: dict[int, list[Tensor]] = defaultdict(list)
        for param in batch.params:
            if param in places:  # the user may have removed it from its param group
                params[places[param]].append(param)
        own = {index: {**groups[index], "params": params[index]} for index in sorted(params)}
        self._bring_strangers(batch, batch.keys)
        self.param_groups = list(own.values())
        local = self._local
        if local is not None:
            local._plans, local._kernels = batch.plans, []
        try:
            plain_step(self._stepped_class)(self)
        finally:
            if local is not None:
                batch.plans = local._plans
                # plans contain these states from now on
                for plan in batch.plans or ():
                    for run in plan.runs:
                        for member in run.members:
                            self._table.pop(member.param, None)
        return own

    def _bring_strangers(self, batch: Batch, keys: set[str] | None) -> None:
        """Copy states to the batch's device if the user loaded or assigned them elsewhere."""
        device = batch.device
        with torch.no_grad():
            for slot in self._slots(batch):
                if slot.part.device.type != device.type and (keys is None or slot.key in keys):
                    slot.put(slot.part.to(device))

    def _step_fused(self, *_: Any) -> bool:
        """Return False so that the class's step runs: ``FusedAdam`` would keep evicted states."""
        return False

    # Batches.

    def _batches_now(self) -> list[Batch]:
        known = {param for batch in self._batches for param in batch.params}
        waiting, nbytes, last = list[Tensor](), 0, None
        for param in params_of(self.param_groups):
            if param in known:
                continue
            unit = _unit_of(param)
            is_cut = nbytes >= LEAST_NBYTES and (unit is None or unit != last)
            if waiting and (is_cut or _device_of(param) != _device_of(waiting[0])):
                self._add(Batch(waiting))
                waiting, nbytes = [], 0
            last = unit
            waiting.append(param)
            nbytes += torch_dtensor.local_part(param).nbytes
        if waiting or not self._batches:
            self._add(Batch(waiting))
        return self._batches

    def _add(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._follow(batch)

    def _slots(self, batch: Batch) -> Iterator[Slot]:
        entries = [self._table[p] for p in batch.params if p in self._table]
        entries += [run.state for plan in batch.plans or () for run in plan.runs]
        for entry in entries:
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.dim():
                    yield Slot(entry, key)

    def _bring(self, batch: Batch) -> None:
        if batch.buffer is not None and batch.flat is None:
            with torch.no_grad():
                batch.bring(self._slots(batch), self._lanes_of(batch.device))

    def _send(self, batch: Batch) -> None:
        moving = [slot for slot in self._slots(batch) if _can_travel(slot.value)]
        if moving:
            batch.send(moving, self._lanes_of(batch.device))

    def _lanes_of(self, device: torch.device) -> CopyLanes:
        if device not in self._lanes:
            self._lanes[device] = CopyLanes(device)
        return self._lanes[device]

    # Copies and pickles.

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_batches" not in vars(self):
            self._begin()
        table = state.pop("state", None)
        if table is not None:
            self._is_stepping = True  # the groups of the table are set below
            self.state = table
            self._is_stepping = False
        cast(Any, super()).__setstate__(state)
        if table is not None:
            with torch.no_grad():
                self._take_states()

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self._plain_class, self._local is not None, self._most)
        return rebuild_offloaded, given, cast(Any, self).__getstate__()


def offloaded_class(cls: type[Optimizer]) -> Any:
    step: Any = Optimizer.profile_hook_step(OffloadedStates.step)
    step.hooked = True  # prevents torch from wrapping the step again
    return wrapped_class("Offloaded", OffloadedStates, cls, step=step)


def rebuild_offloaded(plain: type[Optimizer], is_local: bool, most: int | None = None) -> Any:
    if is_local:
        made = rebuild_optimizer(plain)
        made.__class__ = offloaded_class(type(made))
    else:
        made = object.__new__(offloaded_class(plain))
    made._begin()
    made._most = most
    return made


rebuild_offloaded.__module__ = "fsdp2._pickles"  # pickles stay valid if this file moves


def _remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _come_ahead(
    optimizer: weakref.ref[OffloadedStates], batch: weakref.ref[Batch], _param: Tensor
) -> None:
    """Copy in the states of a batch whose gradients are complete, if there is room for them."""
    own, its = optimizer(), batch()
    if own is not None and its is not None and own._has_room(its, ()):
        own._bring(its)
        if its not in own._ahead:
            own._ahead.append(its)


def _unit_of(param: Tensor) -> object:
    owner = OwnerMark.owner_of(param)
    span = None if owner is None else owner.span
    return None if span is None else id(span.flat)


def _device_of(param: Tensor) -> torch.device:
    return torch_dtensor.local_part(param).device


def _can_travel(value: Tensor) -> bool:
    part = torch_dtensor.local_part(value)
    if type(part) is not Tensor or part.layout is not torch.strided or not part.numel():
        return False
    can = capabilities(part.device)
    dense = dense_stride(part.size(), part.stride())
    dims = zip(part.size(), part.stride(), dense, strict=True)
    is_dense = all(size == 1 or stride == wanted for size, stride, wanted in dims)
    return can.has_lanes and can.pins and is_dense
