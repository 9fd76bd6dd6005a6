"""Optimizer states on the host: they come to the device for their unit's step, and leave again.

Owns which parameters step together, and where their states are. It must not know optimizer classes,
nor how copies are ordered among themselves (``_core/api/host_memory``).

[Note: states that travel]
A *batch* is the parameters of one unit, or of some small ones. Its states lie in one piece of
pinned memory, and come and go in one copy. The class's own step runs once for each batch, with the
param groups cut down to its parameters. While one batch steps, the next one's states are on their
way in, and those of the one before on their way out; what left before that is let go. So three
batches are on the device at a time, at most, and none between steps. With ``max_bytes`` as many
batches are there as that allows: they begin to come when backward has their gradients, and the last
ones leave beside the next forward.

Between steps the states that a user sees are tensors of the host, placed as before: DTensors whose
local parts are views of that memory. Who looks waits for the copies. Counters stay where they are.

[Note: states of runs that travel]
``fsdp2.optim.local`` keeps states in its plans, by runs. Each batch has plans of its own, and
between steps the optimizer has all of them, as if one step had made them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.api.host_memory import CopyLanes, HostBuffer, HostMemory
from fsdp2._core.base import torch_compiler, torch_dtensor, torch_optim
from fsdp2._core.base.arguments import (
    check_count,
    check_flag,
    check_function,
    check_optimizer,
    wrong_type,
)
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2._core.params.param import OwnerMark
from fsdp2.optim._local import ELEMENTWISE, LocalOptimizer, OptimizerT, needs_closure, plain_step
from fsdp2.optim._owned_step import WholeOptimizer
from fsdp2.optim._several import Several

LEAVING = 2
"""So many batches may be on their way out while another one comes."""
LEAST_NBYTES = 1 << 25
"""Units whose local parameters are smaller step with the next ones: a copy has to be worth it."""
ALIGNMENT = 128
BY_THEMSELVES = (*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon)
"""Classes that step each parameter without looking at others."""

State = dict[str, Any]
Groups = list[dict[str, Any]]


def offload_states(
    optimizer: OptimizerT, *, max_bytes: int | None = None, by_itself: bool = False
) -> OptimizerT:
    """Keep an optimizer's states in pinned memory of the host, between its steps.

    The step runs on the device, unit by unit: while one unit steps, the states of the next one come
    from the host, and those of the one before go back. Parameters and gradients stay on the device,
    and nothing else changes: results are those of the optimizer, bit for bit, and so are its
    ``param_groups``, hooks and ``state_dict()``. States are DTensors as before, with local parts on
    the host. Who reads ``state`` waits for copies that are under way. Loading a state needs room
    for all of it on the device for a moment, because torch puts it there.

    On a CPU, and for parameters that lie with the host (``CPUOffloadPolicy``), states stay where
    they are. With ``max_bytes``, states that came in backward are on the device until the step is
    done, also where it is left out, as for a gradient that is not finite.

    Args:
        optimizer: of ``torch.optim`` or ``fsdp2.optim.local``, before or after its first step. It
            is changed in place: its class becomes a subclass of what it was.
        max_bytes: how many bytes of states may be on the device at a time. None: those of three
            units, in the step alone. With a number, states begin to come in backward, when the
            gradients of their unit are there, and the last ones leave beside the next forward. So
            the link hides behind more than the step. Choose what backward has freed by its end, so
            that the peak stays what it is: activations, less the gradients. Two units are there in
            the step at least.
        by_itself: vouch for a class of your own, or of another library: it steps each parameter
            without looking at the others, and keeps nothing about them but its states.

    Returns:
        The optimizer.

    Raises:
        ConfigError: a class that is not known to step each parameter by itself; ``optimizer.step``
            was replaced (but for what a scheduler of learning rates does).
        UnsupportedError: an optimizer that must be given a closure; ``fsdp2.optim.whole``, whose
            states lie with their owners.
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
            f"{who}: {type(optimizer).__name__} does not step parameters one after the other: "
            + ("it must be given a closure." if needs_closure(plain) else "they have owners.")
            + " Use an optimizer of torch.optim, or fsdp2.optim.local.",
        )
    if plain not in BY_THEMSELVES and not by_itself:
        raise ConfigError(
            "FS716",
            f"{who}: {plain.__name__} is not known to step each parameter by itself, and units "
            "step one after the other here. Use a class of torch.optim, or pass by_itself=True if "
            "it looks at one parameter at a time.",
        )
    if not torch_optim.steps_as_its_class(optimizer):
        raise ConfigError(
            "FS717",
            f"{who}: somebody replaced step of this {plain.__name__}, so the step of its class "
            "would not run. Call offload_states before that.",
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
    """Where a state lies in its batch's memory, in bytes, and how."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Return the state in memory of a batch, as a storage of its own there.

        See ``packing.own_shard``: torch can copy and pickle a DTensor around it.
        """
        end = self.offset + self.size.numel() * self.dtype.itemsize
        found = torch.empty(0, dtype=self.dtype, device=flat.device)
        return found.set_(flat.untyped_storage()[self.offset : end], 0, self.size, self.stride)


class Slot(NamedTuple):
    """A place that holds a state: ``entry[key]``."""

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
        """Let the state have its values in other memory."""
        self.entry[self.key] = torch_dtensor.placed_like(self.value, part)


class Batch:
    """Parameters that step together, all on one device, and the memory of their states."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.keys: set[str] = set()  # names of the states that travel
        self.plans: Any = None  # of fsdp2.optim.local
        self.buffer: HostBuffer | None = None
        self.flat: Tensor | None = None  # all states, on the device
        self.event: torch.Event | None = None  # when they have come, or gone
        self._stream: Any = None  # whose memory ``flat`` is

    def __del__(self) -> None:
        if self.event is not None:  # they came for a step that never was: the copy may still write
            self._stream.wait_event(self.event)

    def bring(self, slots: Sequence[Slot], lanes: CopyLanes, device: torch.device) -> None:
        """Begin to bring the states to the device; who reads them waits by ``wait``."""
        found = [(slot, home) for slot in slots if (home := self._home_of(slot.part)) is not None]
        if not found:
            return
        assert self.buffer is not None
        self._stream = torch.accelerator.current_stream(device)
        flat = torch.empty(self.buffer.data.numel(), dtype=torch.uint8, device=device)
        self.event = lanes.bring_back(self.buffer, flat)
        self.flat = flat
        for slot, home in found:
            slot.put(home.view(flat))

    def _home_of(self, part: Tensor) -> Home | None:
        """Return where a state lies in the host's memory of this batch; None: it is elsewhere."""
        if self.buffer is None or part.device.type != "cpu" or not part.numel():
            return None
        offset = part.data_ptr() - self.buffer.data.data_ptr()
        if not 0 <= offset < self.buffer.data.numel():
            return None
        return Home(offset, part.dtype, part.size(), part.stride())

    def wait(self) -> None:
        """Let compute wait until what is under way has come, or gone."""
        if self.event is not None:
            assert self.flat is not None
            torch.accelerator.current_stream(self.flat.device).wait_event(self.event)
            self.event = None

    @property
    def nbytes(self) -> int:
        """Bytes of states that come and go; 0 before the first step."""
        return 0 if self.buffer is None else self.buffer.data.numel()

    def let_go(self) -> None:
        """Hold no memory of the device."""
        self.wait()
        self.flat = None

    def leave(self, lanes: CopyLanes) -> None:
        """Hold no memory of the device, without a wait: the allocator gets it when it is copied."""
        if self.flat is not None:
            lanes.free_behind(self.flat)
        self.flat = self.event = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are: their local parts, if they are sharded."""
        return _device_of(self.params[0]) if self.params else torch.device("cpu")

    def send(self, slots: Sequence[Slot], memory: HostMemory, lanes: CopyLanes) -> None:
        """Begin to copy the states to the host, where they are seen from now on."""
        moving = [slot for slot in slots if _can_travel(slot.value)]
        parts = [slot.part for slot in moving]
        homes, nbytes = _laid_out(parts)
        if not nbytes:
            return
        flat = self._joined(parts, homes, nbytes)
        if self.buffer is None or self.buffer.data.numel() < nbytes:
            self.buffer = memory.take(nbytes)
        self._stream = lanes.compute
        self.event = lanes.send_out(flat[:nbytes], self.buffer)
        self.flat = flat
        for slot, home in zip(moving, homes, strict=True):
            slot.put(home.view(self.buffer.data))
            self.keys.add(slot.key)

    def _joined(self, parts: Sequence[Tensor], homes: Sequence[Home], nbytes: int) -> Tensor:
        """Return the memory that has all states in order: that in which they came, mostly."""
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

    def forget(self) -> None:
        """Let other states come to these parameters."""
        self.let_go()
        self.plans = None


class OffloadedStates:
    """What ``offload_states`` puts in front of an optimizer's class."""

    _stepped_class: type[Optimizer]
    param_groups: Groups

    def _begin(self) -> None:
        self._memory = HostMemory()
        self._batches: list[Batch] = []
        self._lanes: dict[torch.device, CopyLanes] = {}
        self._is_stepping = False
        self._most: int | None = None  # bytes on the device at a time, by ``max_bytes``
        self._ahead: list[Batch] = []  # what came in backward, the first one first
        self._handles: list[Any] = []
        # they end with this: a model whose gradients have hooks waits for each reduction earlier
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._states: Any = defaultdict(dict)

    def _set_most(self, most: int | None) -> None:
        """Say how many bytes of states may be on the device, and whether they come in backward."""
        batches = self._batches_now()
        _remove_all(self._handles)
        self._most = most
        for batch in batches:
            self._follow(batch)

    def _follow(self, batch: Batch) -> None:
        """Learn in backward when gradients of a batch are there, if states may come that early."""
        first = next((p for p in batch.params if p.requires_grad), None)
        if self._most is not None and first is not None:
            hook = functools.partial(_come_ahead, weakref.ref(self), weakref.ref(batch))
            self._handles.append(first.register_post_accumulate_grad_hook(hook))

    def _has_room(self, batch: Batch, leaving: Sequence[Batch]) -> bool:
        """True if the states of one more batch may be on the device."""
        if self._most is None:
            return len(leaving) < LEAVING
        here = sum(other.nbytes for other in self._batches if other.flat is not None)
        return here + batch.nbytes <= self._most

    @property
    def _local(self) -> Any:
        """This, if it is an optimizer of ``fsdp2.optim.local``; or None."""
        return self if isinstance(self, LocalOptimizer) else None

    @property
    def state(self) -> Any:
        """States by parameter, on the host; waits for copies to it."""
        if not self._is_stepping:
            for batch in self._batches:
                if batch.buffer is not None and batch.buffer.event is not None:
                    batch.buffer.event.synchronize()
        return self._states if self._local is None else cast(Any, super()).state

    @state.setter
    def state(self, table: Any) -> None:
        if self._local is None:
            self._states = table
        else:
            LocalOptimizer.state.fset(self, table)  # type: ignore[attr-defined]  # a property
        if not self._is_stepping:
            with torch.no_grad():
                self._take_states()

    def _take_states(self) -> None:
        """Move states that somebody put there to the host."""
        batches = self._batches_now()
        for batch in batches:
            batch.forget()
        for batch in batches:
            device = batch.device
            for slot in self._slots(batch):
                if slot.part.device.type != device.type:  # of a copy, or out of a file
                    slot.put(slot.part.to(device))
            self._send(batch)
            batch.let_go()

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, unit by unit. ``closure`` computes the loss again, with gradients."""
        check_function("step", "closure", closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, batches = self.param_groups, self._batches_now()
        places = {param: place for place, group in enumerate(groups) for param in group["params"]}
        if self._local is not None and self._local._plans is None:  # somebody looked at the state
            for batch in batches:
                batch.plans = None
        self._is_stepping = True
        stepped: dict[int, dict[str, Any]] = {}
        leaving: deque[Batch] = deque()
        # what came first steps first: it leaves while the last ones are still on their way
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
        # what a class writes into a param group, as its own counters
        for index, own in stepped.items():
            for key, value in own.items():
                if key != "params" and groups[index].get(key) is not value:
                    groups[index][key] = value
        return loss

    def _bring_more(self, following: Sequence[Batch], leaving: deque[Batch]) -> None:
        """Bring the next batch, whatever has to leave for it, and more if there is room."""
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
        """Run the class's own step on the parameters of a batch, and return its param groups.

        ``places``: where each parameter is among ``groups``.
        """
        params: dict[int, list[Tensor]] = defaultdict(list)
        for param in batch.params:
            if param in places:  # nobody took it out of its param group since
                params[places[param]].append(param)
        own = {index: {**groups[index], "params": params[index]} for index in sorted(params)}
        self._move_strangers(batch)
        self.param_groups = list(own.values())
        local = self._local
        if local is not None:
            local._plans, local._kernels = batch.plans, []
        try:
            plain_step(self._stepped_class)(self)
        finally:
            if local is not None:
                batch.plans = local._plans
                self._drop_published(batch)
        return own

    def _move_strangers(self, batch: Batch) -> None:
        """Bring states to the device that somebody put in the place of those on the host."""
        device = batch.device
        with torch.no_grad():
            for slot in self._slots(batch):
                if slot.key in batch.keys and slot.part.device.type != device.type:
                    slot.put(slot.part.to(device))

    def _step_fused(self, *_: Any) -> bool:
        """Step by the class's own fused step: a kernel's lists would name what has left."""
        return False

    def _drop_published(self, batch: Batch) -> None:
        """Let the table of ``fsdp2.optim.local`` keep nothing that plans hold now."""
        for plan in batch.plans or ():
            for run in plan.runs:
                for member in run.members:
                    self._local._table.pop(member.param, None)

    # Batches.

    def _batches_now(self) -> list[Batch]:
        """Return all batches; parameters that are new make new ones."""
        known = {param for batch in self._batches for param in batch.params}
        waiting, nbytes, last = list[Tensor](), 0, None
        for param in itertools.chain(*(group["params"] for group in self.param_groups)):
            if param in known:
                continue
            unit, device = _unit_of(param), _device_of(param)
            is_cut = nbytes >= LEAST_NBYTES and (unit is None or (unit, device) != last)
            if waiting and (is_cut or device != _device_of(waiting[0])):
                self._add(Batch(waiting))
                waiting, nbytes = [], 0
            last = unit, device
            waiting.append(param)
            nbytes += torch_dtensor.local_part(param).nbytes
        if waiting or not self._batches:
            self._add(Batch(waiting))
        return self._batches

    def _add(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._follow(batch)

    def _slots(self, batch: Batch) -> Iterator[Slot]:
        local = self._local
        table = self._states if local is None else local._table
        entries = [table[p] for p in batch.params if p in table]
        entries += [run.state for plan in batch.plans or () for run in plan.runs]
        for entry in entries:
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.dim():
                    yield Slot(entry, key)

    def _bring(self, batch: Batch) -> None:
        if batch.buffer is not None and batch.flat is None:
            device = batch.device
            with torch.no_grad():
                batch.bring(list(self._slots(batch)), self._lanes_of(device), device)

    def _send(self, batch: Batch) -> None:
        slots = list(self._slots(batch))
        if any(_can_travel(slot.value) for slot in slots):
            batch.send(slots, self._memory, self._lanes_of(batch.device))

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
        plain = getattr(self, "_plain_class", self._stepped_class)
        given = (plain, self._local is not None, self._most)
        return rebuild_offloaded, given, cast(Any, self).__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = rebuild_offloaded(*self.__reduce__()[1])
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(cast(Any, self).__getstate__(), memo))
        return made


_classes: dict[type[Optimizer], Any] = {}


def offloaded_class(cls: type[Optimizer]) -> Any:
    """Return the class that instances of a class become."""
    if cls not in _classes:
        step: Any = Optimizer.profile_hook_step(OffloadedStates.step)
        step.hooked = True  # torch would wrap it once more
        names = {
            "_stepped_class": cls,
            "__doc__": cls.__doc__,
            "__module__": __name__,
            "step": step,
        }
        _classes[cls] = type(f"Offloaded{cls.__name__}", (OffloadedStates, cls), names)
    return _classes[cls]


def rebuild_offloaded(plain: type[Optimizer], is_local: bool, most: int | None = None) -> Any:
    """Make an empty optimizer; its state follows (copy and pickle)."""
    if is_local:
        from fsdp2.optim._local import rebuild_optimizer

        made = rebuild_optimizer(plain)
        made.__class__ = offloaded_class(type(made))
    else:
        made = object.__new__(offloaded_class(plain))
    made._begin()
    made._most = most
    return made


rebuild_offloaded.__module__ = "fsdp2._pickles"  # which finds it, wherever this file moves


def _remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _come_ahead(
    optimizer: weakref.ref[OffloadedStates], batch: weakref.ref[Batch], _param: Tensor
) -> None:
    """Bring the states of a batch whose gradients are there, if there is room for them."""
    own, its = optimizer(), batch()
    if own is not None and its is not None and own._has_room(its, ()):
        own._bring(its)
        if its not in own._ahead:
            own._ahead.append(its)


def _unit_of(param: Tensor) -> object:
    """Return what is the same for parameters that lie side by side in their unit's memory."""
    owner = OwnerMark.owner_of(param)
    span = None if owner is None else owner.span
    return None if span is None else id(span.flat)


def _device_of(param: Tensor) -> torch.device:
    """Return where a parameter is: its local part, if it is sharded."""
    return torch_dtensor.local_part(param).device


def _can_travel(value: Tensor) -> bool:
    part = torch_dtensor.local_part(value)
    if type(part) is not Tensor or part.layout is not torch.strided or not part.numel():
        return False
    can = capabilities(part.device)
    return can.has_lanes and can.pins and _is_dense(part)


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor has as many elements of memory as it has of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _laid_out(parts: Sequence[Tensor]) -> tuple[list[Home], int]:
    """Say where each state lies behind the others, and how many bytes there are."""
    homes, offset = [], 0
    for part in parts:
        homes.append(Home(offset, part.dtype, part.size(), part.stride()))
        offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return homes, offset
