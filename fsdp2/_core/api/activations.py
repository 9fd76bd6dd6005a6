"""Activation offloading: tensors that chosen modules save for backward are kept in host memory.

``host_memory`` synchronizes the copies with each other.

[Note: what travels]
A *group* is the set of storages saved by one call of a chosen module. Each storage is copied once,
even if several nodes save it or views of it. The following tensors are not copied: parameters,
buffers and views of their memory (the engine frees and refills gathered parameters itself), small
tensors, tensors on unsupported devices, small views of large storages, and wrapper tensors.

[Note: when it travels]
In lane ``out``, the copy starts when a node saves the tensor. Two groups later, the compute stream
waits for the copy, and the source is dropped. Thus at most two groups are on the device at a time.
In lane ``back``, when a node first reads from a group, this group and the preceding group, which is
needed next, are copied back into memory allocated on the compute stream. Groups of the modules in
which backward begins stay on the device; reading such a group starts the preceding group's copy.

[Note: a call that Ctrl-C ends]
If a forward raises a non-``Exception``, such as ``KeyboardInterrupt``, torch runs no forward hooks.
Each call therefore stores a frame of its stack, and the next call of a chosen module removes the
hooks of calls whose frames have exited. Calls are tracked per thread, as are hooks and frames.

[Note: a backward that comes again]
With ``retain_graph``, the host copy is retained. The device copy is dropped when backward leaves
the group, and the next backward copies the group to the device again.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._core.api.collect import Asking, Ignored, WrapPolicy, called_in, run_policy
from fsdp2._core.api.host_memory import CopyLanes, HostMemory, Look
from fsdp2._core.api.settings import refuse_during_step
from fsdp2._core.base import torch_autograd, torch_compiler, torch_modes, torch_tensors
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import StateError, check_count, check_module
from fsdp2._core.base.names import WRAPPERS, class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import UNIT_ATTRIBUTE, Unit

ATTRIBUTE = "_fsdp2_activations"
_ASKING = Asking("offload_activations", "nothing is offloaded", "True or False")

LEAST_SHARE = 8  # views of less than 1/8 of a storage stay: the rest of it may not be needed
GROUP_NBYTES = 1 << 29  # larger groups are split, because a group is copied back as a whole
# nodes between a parameter and its cast, which a matmul saves under autocast
CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0")


def offload_activations(
    model: nn.Module, policy: WrapPolicy, *, keep_last: int = 1, min_bytes: int = 1 << 18
) -> list[str]:
    """Keep in host memory the tensors that selected modules save for backward.

    Tensors that autograd saves in a selected module's forward are copied to pinned memory while
    forward continues. They are copied back during the backward of the next selected module. Results
    do not change. Parameters, gathered parameters, buffers and small tensors stay on the device. A
    storage is copied once, even if several nodes save it. Pinned memory is reused.

    If a selected module is wrapped by activation checkpointing or ``torch.compile``, its wrapper is
    selected instead. A checkpoint saves only its inputs, so only the inputs are offloaded. Call
    this function after adding wrappers, before or after ``fully_shard``.

    Args:
        model: the model that contains the modules, sharded or not.
        policy: module classes, a function of a module, or a torch policy. It selects modules below
            ``model``, as in ``fsdp2.wrap.shard_model``. A function that returns False for every
            module undoes an earlier call.
        keep_last: the number of selected modules, from the end of ``model.modules()``, whose
            tensors stay on the device, so that backward can begin while others are copied back.
        min_bytes: the minimum size of an offloaded tensor.

    Returns:
        The names of the selected modules, in the order of ``model.modules()``.

    On a CPU, and on devices without streams, all tensors stay in place. In a step of
    ``fsdp2.compile``, the compiler decides which tensors to save, and no tensor is offloaded.

    Raises:
        ConfigError: an argument has an invalid type or value.
        StateError: called during a step.
    """
    check_module("offload_activations", "model", model)
    check_count("offload_activations", "keep_last", keep_last, low=0)
    check_count("offload_activations", "min_bytes", min_bytes)
    refuse_during_step("offload_activations", units_below(model))
    picked: dict[nn.Module, None] = {}
    outer = {
        child: module
        for module in model.modules()
        for name, child in module.named_children()
        if name in WRAPPERS
    }
    for chosen_module in run_policy(policy, model, Ignored.of(None, None), _ASKING):
        for module in called_in(chosen_module):
            outermost = module
            while outermost in outer:
                outermost = outer[outermost]
            picked[outermost] = None
    found = [(name, module) for name, module in model.named_modules() if module in picked]
    before: Activations | None = vars(model).pop(ATTRIBUTE, None)
    if before is not None:
        before.remove()
    if found:
        offloaded = len(found) - keep_last
        chosen = {module: place >= offloaded for place, (_, module) in enumerate(found)}
        vars(model)[ATTRIBUTE] = Activations(model, chosen, min_bytes)
    return [name for name, _ in found]


@dataclass(eq=False)
class Group:
    """Storages saved by one module call or a part of it. ``Away`` objects keep the group alive."""

    number: int
    nbytes: int = 0
    storages: list[weakref.ref[Away]] = field(default_factory=list)


class Away:
    """One offloaded storage of a group: a host buffer, and a device copy while in use."""

    def __init__(
        self,
        tensor: Tensor,
        group: Group,
        memory: HostMemory,
        lanes: CopyLanes,
    ) -> None:
        storage = tensor.untyped_storage()
        self.saved: Tensor | None = None  # the source, until its stream has waited for the copy
        self.here: Tensor | None = None  # all bytes on the device, once copied back
        self.arrival: torch.Event | None = None
        self.was_written = False
        self.group = group
        self.device, self.nbytes = tensor.device, storage.nbytes()
        self.version = torch_autograd.version_of(tensor)
        self.lanes, self.stream = lanes, lanes.compute
        self.memory, self.buffer = memory, memory.take(self.nbytes)
        self.departure = lanes.send_storage(tensor, self.buffer)
        self.saved = tensor

    def __del__(self) -> None:
        self.let_go()
        self.drop()
        self.memory.give(self.buffer)

    def drop(self) -> None:
        """Drop the device copy; the host copy remains."""
        if self.arrival is not None:  # never waited for: the copy may still be in flight
            self.stream.wait_event(self.arrival)
        self.here = self.arrival = None

    def let_go(self) -> None:
        """Drop the source; its stream may reuse the memory after the copy to the host."""
        if self.saved is not None:
            self.stream.wait_event(self.departure)
            self._look_for_writes()
            self.saved = None

    def bring(self) -> None:
        """Start the copy to the device, unless the bytes are already there."""
        if self.saved is None and self.here is None:
            self.stream = self.lanes.compute
            here = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self.arrival = self.lanes.bring_back(self.buffer, here)
            self.here = here

    def held(self) -> Tensor:
        """Return a device tensor of the entire storage, which the current stream may read."""
        self._look_for_writes()
        if self.was_written:
            raise StateError(
                "FS324",
                "a tensor that backward needs was modified in place after a module with "
                "offload_activations saved it, so its copy on the host may have old or new values. "
                "Modify a clone instead.",
            )
        if self.saved is not None:
            return self.saved
        assert self.here is not None
        if self.arrival is not None:
            self.lanes.compute.wait_event(self.arrival)
            self.arrival = None
        return self.here

    def _look_for_writes(self) -> None:
        if self.saved is not None and torch_autograd.version_of(self.saved) != self.version:
            self.was_written = True


@dataclass(eq=False, slots=True)
class _Saved:
    """Packed form of a saved tensor whose storage is offloaded."""

    away: Away
    group: Group
    look: Look

    def tensor(self) -> Tensor:
        return self.away.lanes.view(self.away.held(), self.look)


@dataclass(eq=False, slots=True)
class _Kept:
    """Packed form of a tensor kept on the device; unpacking it copies the preceding group back."""

    kept: Tensor
    group: Group

    def tensor(self) -> Tensor:
        return self.kept


@dataclass(eq=False)
class _Call:
    module: nn.Module
    group: Group
    stays: bool
    hooks: saved_tensors_hooks

    def __post_init__(self) -> None:
        name = nn.Module.__module__
        frames = (frame for frame in _stack() if frame.f_globals.get("__name__") == name)
        self.frame = next(frames, None)
        self.units: list[Unit] = units_below(self.module)
        self.own = {
            torch_tensors.number_of(tensor.untyped_storage())
            for tensor in (*self.module.parameters(), *self.module.buffers())
            if type(tensor) in (Tensor, nn.Parameter)
        }

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor uses memory of the module's parameters or buffers."""
        if torch_tensors.number_of(tensor.untyped_storage()) in self.own:
            return True
        return any(unit.holds(tensor) for unit in self.units)

    @property
    def was_interrupted(self) -> bool:
        """Return True if the frame of the call is no longer on the stack."""
        return self.frame is not None and all(frame is not self.frame for frame in _stack())


class _Running(threading.local):
    """This thread's running calls, innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(eq=False)
class Activations:
    """A model's ``chosen`` modules (True: saved tensors stay on the device), their hooks, and the
    offloaded storages. Tensors smaller than ``min_nbytes`` also stay on the device."""

    model: nn.Module
    chosen: dict[nn.Module, bool]
    min_nbytes: int
    handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.chosen:
            self.handles += [
                module.register_forward_pre_hook(self.before, prepend=True),
                module.register_forward_hook(self.after, always_call=True),
            ]
        self._begin()

    def _begin(self) -> None:
        self.memory = self._make_memory()
        self._lanes: dict[torch.device, CopyLanes] = {}
        self._running = _Running()
        self._count = 0
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._leaving: list[weakref.ref[Away]] = []
        # offloaded storages by ``number_of(source storage)``, while the source is alive
        self._known: dict[int, weakref.ref[Away]] = {}
        self._read = 0  # number of the group that backward is reading
        self._has_warned = False
        # the same objects in each call, because a compiler guards on their identity
        self._hooks: tuple[Callable[..., Any], Callable[..., Any]] = (self.pack, self.unpack)

    def _make_memory(self) -> HostMemory:
        return HostMemory()

    def _lanes_of(self, device: torch.device) -> CopyLanes:
        lanes = self._lanes.get(device)
        if lanes is None:
            lanes = self._lanes[device] = CopyLanes(device)
        return lanes

    def _can_copy(self, tensor: Tensor) -> bool:
        """Return True for a plain tensor on a device with asynchronous copies to the host."""
        can = capabilities(tensor.device)
        return type(tensor) is Tensor and can.has_lanes and can.pins

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "chosen", "min_nbytes", "handles")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    # Around a forward.

    @torch_compiler.eager_unless_inlined
    def before(self, module: nn.Module, args: Any) -> None:
        unit = self.model.__dict__.get(UNIT_ATTRIBUTE)
        if unit is None or unit.runner is None:  # a functional step is traced as a whole
            self._enter(module)

    @torch_compiler.eager_unless_inlined
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        unit = self.model.__dict__.get(UNIT_ATTRIBUTE)
        if unit is None or unit.runner is None:
            self._leave(module)

    @torch_compiler.always_eager
    def _enter(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() or torch_autograd.graph_task_id() != -1:
            return  # nothing is saved, or a recomputation saves tensors that are read immediately
        if torch_modes.is_under_transforms() or not torch_autograd.packing_is_enabled():
            return
        running = self._running.calls
        while running and running[-1].was_interrupted:
            running.pop()
            torch_autograd.stop_packing(self._hooks[0])
        if torch_autograd.is_in_checkpoint():
            if not self._has_warned:
                self._has_warned = True
                warn(
                    "FS325",
                    f"offload_activations: a {class_name(module)} runs inside an activation "
                    "checkpoint, which saves only its own inputs, outside of this module's "
                    "forward. Therefore none of the module's tensors are offloaded. Choose the "
                    "module that calls the checkpoint instead, such as CheckpointWrapper.",
                )
            return
        self._count += 1
        group = self._groups[self._count] = Group(self._count)
        call = _Call(module, group, self.chosen[module], saved_tensors_hooks(*self._hooks))
        self._let_go(before=self._count - 1)
        running.append(call)
        call.hooks.__enter__()

    @torch_compiler.always_eager
    def _leave(self, module: nn.Module) -> None:
        running = self._running.calls
        if running and running[-1].module is module:
            call = running.pop()
            call.hooks.__exit__()
            if call.stays:  # backward may begin soon: free device memory early
                self._let_go(before=self._count + 1)

    def _let_go(self, before: int) -> None:
        leaving, self._leaving = self._leaving, []
        for reference in leaving:
            away = reference()
            if away is not None and away.group.number < before:
                away.let_go()
            elif away is not None:
                self._leaving.append(reference)

    # Saving and reading tensors.

    @torch_compiler.always_eager
    def pack(self, tensor: Tensor) -> Any:
        is_made_of_one = _is_parameter(tensor)
        if tensor.grad_fn is not None:  # a node that saves its own output would form a cycle
            tensor = tensor.detach()
        if not self._running.calls:
            return tensor  # double backward within a call, in another thread
        call = self._running.calls[-1]
        if call.stays:
            return _Kept(tensor, call.group)
        if is_made_of_one or not self._may_travel(tensor) or call.holds(tensor):
            return tensor
        look = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        with torch.no_grad():
            return _Saved(self._away(tensor, call), call.group, look)

    def _may_travel(self, tensor: Tensor) -> bool:
        if not self._can_copy(tensor) or tensor.layout is not torch.strided:
            return False
        if tensor.nbytes < self.min_nbytes or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() <= LEAST_SHARE * tensor.nbytes

    def _away(self, tensor: Tensor, call: _Call) -> Away:
        """Return a tensor's offloaded storage; start a copy unless an earlier copy is valid."""
        storage = tensor.untyped_storage()
        number = torch_tensors.number_of(storage)
        known = self._known.get(number)
        found = None if known is None else known()
        if found is not None and found.version == torch_autograd.version_of(tensor):
            return found
        if call.group.nbytes >= GROUP_NBYTES:
            self._count += 1
            call.group = self._groups[self._count] = Group(self._count)
            self._let_go(before=self._count - 1)
        away = Away(tensor, call.group, self.memory, self._lanes_of(tensor.device))
        reference = weakref.ref(away)
        call.group.storages.append(reference)
        call.group.nbytes += away.nbytes
        self._leaving.append(reference)
        if known is None:
            weakref.finalize(storage, self._known.pop, number, None)
        self._known[number] = reference
        return away

    @torch_compiler.always_eager
    def unpack(self, saved: Any) -> Any:
        if type(saved) is Tensor or isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            self._arrive(saved.group)
            if type(saved) is _Saved:
                saved.away.bring()
            return saved.tensor()

    def _arrive(self, group: Group) -> None:
        """Start copying this group and the preceding one to the device."""
        if self._read == group.number:
            return
        left, self._read = self._groups.get(self._read), group.number
        if left is not None:
            for away in _living(left):
                away.drop()  # [Note: a backward that comes again]
        self._let_go(before=group.number - 1)
        self._bring(group)
        earlier = [number for number in self._groups if number < group.number]
        if earlier:
            before = self._groups.get(max(earlier))
            if before is not None:
                self._bring(before)

    def _bring(self, group: Group) -> None:
        for away in _living(group):
            away.bring()


Activations.__module__ = "fsdp2._pickles"  # the name in pickles, even if this file moves


def _is_parameter(tensor: Tensor) -> bool:
    """Return True for a parameter, a view of one, or autocast's (cached) cast of one."""
    base = torch_autograd.base_of(tensor)
    if isinstance(tensor if base is None else base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in CASTS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _living(group: Group) -> list[Away]:
    found = (reference() for reference in group.storages)
    return [away for away in found if away is not None]
