"""``materialize``: initialise the shards of a model on the meta device, module by module.

``materialize`` registers new shards, which param groups adopt. It is independent of their layouts.

[Note: every rank runs the same stream]
Every rank does the work of a single process: it initialises a module's full tensors from the same
generator state, and keeps its own block. Values do not depend on the mesh; generators stay equal.

[Note: written or not]
New memory is filled with one byte value. An element whose bytes all have this value counts as
unwritten. Version counters are not sufficient, because an ``init`` may write through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp2._core.base import torch_autograd, torch_dtensor, torch_modules
from fsdp2._core.base.errors import (
    ConfigError,
    UnsupportedError,
    check_device,
    check_flag,
    check_function,
    check_module,
)
from fsdp2._core.base.names import children_first, class_name
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.transfer.chunk_plan import Blocks
from fsdp2._core.transfer.redistribute import (
    STAGED_NBYTES,
    Grids,
    LocalShard,
    Target,
    checked_together,
    gather,
    groups_below,
    scatter,
)

# ``sync_from_rank0``: make the models of all ranks equal, before sharding.


@operation("sync_from_rank0")
def sync_from_rank0(model: nn.Module) -> nn.Module:
    """Copy the parameters and buffers of rank 0 to every rank. Returns the model.

    Use this for a model that each rank built separately, or that only rank 0 loaded. Call it
    **before** ``fully_shard``, which keeps only each rank's own rows: afterwards rank 0 lacks the
    other rows. Collective over all ranks. Data is sent in pieces of up to 64 MiB. For a model on
    the meta device, use ``materialize(..., sync_from_rank0=True)``; for a full state dict, use
    ``checkpoint.load_full_state``.

    Raises:
        ConfigError: ``model`` is not a module; a parameter or buffer is already sharded or on meta;
            names, shapes or dtypes differ between ranks. Every rank raises, and nothing is changed.
    """
    with checked_together("sync_from_rank0", model):
        check_module("sync_from_rank0", "model", model)
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    grids, helds = Grids([]), []
    with grids.main.together("sync_from_rank0"):  # ranks may have different models
        for group in groups_below(model):
            require_replicas("sync_from_rank0", group)
        for name, tensor in tensors:
            if tensor.is_meta or isinstance(tensor, DTensor):
                raise ConfigError(
                    "FS227",
                    f"sync_from_rank0: expected plain tensors on a real device, found {name} on "
                    "the meta device or as a DTensor. Call it before sharding; for a model on the "
                    "meta device, use materialize().",
                )
            helds.append(grids.hold(name, tensor))
    seen = [f"{name}: {t.dtype} of shape {tuple(t.shape)}" for name, t in tensors]
    grids.require_alike("sync_from_rank0: ranks have different models", seen)
    with torch.no_grad():
        for held in helds:
            scatter([held], STAGED_NBYTES, lambda held: held.local)
    return model


def require_replicas(what: str, group: ParamGroup) -> None:
    """Raise ConfigError if ranks sharded their own values, which may differ between ranks."""
    if group.data.shard.size == 1:
        return
    for param in group.params:
        if not param.is_on_meta and param.placement.layout.dim is not None:
            raise ConfigError(
                "FS227",
                f"{what}: {param.fqn} was already sharded from each rank's own values, so rank 0 "
                "has only its own rows. Call fsdp2.sync_from_rank0(model) before fully_shard, or "
                "load a full state with checkpoint.load_full_state.",
            )


Init = Callable[[nn.Module], Any]

FILL = 0xFD  # NaN or below -1e37 as a float of 2 to 8 bytes; unlikely initial value as an integer
SCAN_NUMEL = 1 << 16


@operation("materialize")
def materialize(
    model: nn.Module,
    device: torch.device | str,
    init: Init | None = None,
    sync_from_rank0: bool = False,
) -> nn.Module:
    """Allocate and initialise a sharded model on the meta device. Returns the model.

    Modules are initialised sequentially, children before parents, as in constructors. Only one
    module's own parameters are unsharded at a time, so peak memory is the shards plus the largest
    module. On any mesh, values are bitwise equal to those of a single process with the same seed.
    Tensors that are not on meta keep their values and are moved to ``device``. A module is
    initialised if any of its own tensors is on meta. Tied parameters stay tied, with the values
    from the last of their modules.

    Collective. The generators of the CPU and of ``device`` are set to the first rank's state, so
    they are equal on all ranks when initialisation starts, and after the call.

    Args:
        model: a module to which ``fully_shard`` was applied, or a plain module.
        device: device on which to initialise modules. It must have the mesh's device type.
        init: called with each module that directly owns parameters or buffers on meta. It must
            write all of them, in place or by assignment, and must not write to other modules. If
            None, ``module.reset_parameters()`` is called instead.
        sync_from_rank0: run ``init`` only on the first rank (where it may read files), and send
            shards and buffers to the other ranks. Replicas and buffers that were not on meta are
            copied from the first rank too. Shards of real values cannot be copied, because no rank
            has all rows (see ``fsdp2.sync_from_rank0``).

    Raises:
        ConfigError: ``init`` is None and a module has no ``reset_parameters``; the device type
            differs from the mesh's; ``init`` did not write a parameter or buffer, or changed its
            shape or dtype (the message names the module, and all ranks raise it); ``init`` drew
            different random numbers on some ranks; with ``sync_from_rank0``, a parameter was
            sharded from real values.
        StateError: ``init`` raised an exception on any rank; called inside a forward or a backward.
        UnsupportedError: ``init`` wrote to a sharded parameter of another module (constants are
            allowed without ``sync_from_rank0``); a parameter on meta has an all-gather extension,
            or wraps other tensors.
    """
    with checked_together("materialize", model) as same:
        device = check_device("materialize", "device", device)
        check_function("materialize", "init", init, "None or a function that takes a module")
        check_flag("materialize", "sync_from_rank0", sync_from_rank0)
        units = require_idle(model, "materialize")
        groups = [(unit, group) for unit in units for group in unit.own_groups]
        for unit, group in groups:
            if group.residence.compute.type != device.type:
                raise ConfigError(
                    "FS226",
                    f"materialize: found device {device}, but {unit.fqn or 'the module'} was "
                    f"sharded on {group.residence.compute.type}. Pass a device of that type.",
                )
        same.update(sync_from_rank0=sync_from_rank0)
    grids = Grids([*model.parameters(), *model.buffers()])
    params = model.named_parameters(remove_duplicate=False)
    tensors = [*params, *model.named_buffers(remove_duplicate=False)]
    on_meta = [f"{name} on meta" for name, tensor in tensors if tensor.is_meta]
    grids.require_alike("materialize: ranks have different tensors on the meta device", on_meta)
    for _, group in groups if sync_from_rank0 else ():
        require_replicas("materialize(sync_from_rank0=True)", group)
    meta = {id(module): _Own.of(module) for module in model.modules()}
    modules = [(name, module) for name, module in children_first(model) if any(meta[id(module)])]
    if init is None:
        lacking = [
            f"{name or '<root>'} ({class_name(module)})"
            for name, module in modules
            if not callable(getattr(module, "reset_parameters", None))
        ]
        if lacking:
            raise ConfigError(
                "FS224",
                f"materialize: found no reset_parameters() on {', '.join(lacking)}. Pass init=, a "
                "function that initializes the parameters and buffers of one module.",
            )
    allocate(model, device)
    _move_rest(model, device)
    _share_generators(grids, device)
    done: set[int] = set()
    for name, module in modules:
        _Step(name, module, meta[id(module)], device, grids, done).run(init, sync_from_rank0)
    if sync_from_rank0:
        _share_generators(grids, device)
        _share_rest(grids, model, meta)
    elif len(set(grids.main.collect(_generators(device)))) > 1:
        raise ConfigError(
            "FS405",
            "materialize: init drew different random numbers on some ranks, so the shards may not "
            "belong to the same full tensors. Make it draw the same numbers on every rank, or pass "
            "sync_from_rank0=True.",
        )
    return model


class _Own(NamedTuple):
    params: frozenset[str]
    buffers: frozenset[str]

    @staticmethod
    def of(module: nn.Module) -> _Own:
        params = {n for n, p in module._parameters.items() if p is not None and p.is_meta}
        buffers = {n for n, b in module._buffers.items() if b is not None and b.is_meta}
        return _Own(frozenset(params), frozenset(buffers))


# Memory.


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device | None = None) -> None:
    """Allocate parameters (and, without ``device``, persistent buffers) that are on meta, without
    initialising them. A group allocates one flat buffer for its shards when it adopts them, so each
    shard is first registered as a one-element tensor expanded to its shape.
    """
    groups = groups_below(model)
    for owner in (param for group in groups for param in group.params):
        if owner.wrapped.is_extended and owner.is_on_meta:
            kind = type(torch_dtensor.local_tensor(owner.sharded)).__name__
            raise UnsupportedError(
                "FS221",
                f"{owner.fqn} is a {kind} on the meta device, and only that subclass can allocate "
                "its memory. Call model.to_empty(device=...) and load a state dict, or create the "
                "parameter on a real device. Nothing was changed.",
            )
    made: dict[int, nn.Parameter] = {}
    for group in groups:
        if any(param.is_on_meta for param in group.params):
            _allocate_group(group, made)
            group.inspect()
    fallback = device or next((group.residence.compute for group in groups), None)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    made[id(param)] = _with_memory(param, fallback)
                module._parameters[name] = made[id(param)]
        if device is None:
            for name, buffer in module._buffers.items():
                kept = torch_modules.is_persistent(module, name)
                if buffer is not None and buffer.is_meta and kept:
                    module._buffers[name] = torch.empty_like(buffer, device=fallback or "cpu")


def _allocate_group(group: ParamGroup, made: dict[int, nn.Parameter]) -> None:
    for param in group.params:
        old = param.sharded
        if not old.is_meta:
            continue
        local = torch_dtensor.local_tensor(old)
        element = torch.zeros((), dtype=local.dtype, device=group.residence.storage)
        new = _like(old, torch_dtensor.new_dtensor(element.expand(local.shape), param.spec))
        made[id(old)] = new
        for site in param.sites:
            site.put(new)


def _with_memory(param: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    kind = param.device_mesh.device_type if isinstance(param, DTensor) else "cpu"
    local = torch.empty_like(torch_dtensor.local_part(param), device=device or kind)
    return _like(param, torch_dtensor.placed_like(param, local))


def _like(old: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    kept = {k: v for k, v in vars(old).items() if k not in vars(new) and not k.startswith("_fsdp2")}
    vars(new).update(kept)
    is_set, grad_dtype = torch_autograd.own_grad_dtype(old)
    if is_set:
        new.grad_dtype = grad_dtype
    torch_autograd.move_hooks(old, new)
    return new


@torch.no_grad()
def _move_rest(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and not isinstance(param, DTensor) and param.device != device:
                param.data = param.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and not isinstance(buffer, DTensor):
                module._buffers[name] = buffer.to(device)


# Generators.


def _share_generators(grids: Grids, device: torch.device) -> None:
    torch.set_rng_state(grids.main.broadcast(torch.get_rng_state()))
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        module.set_rng_state(grids.main.broadcast(module.get_rng_state(device)), device)


def _generators(device: torch.device) -> bytes:
    state = bytes(torch.get_rng_state().numpy())
    if device.type != "cpu":
        state += bytes(torch.get_device_module(device.type).get_rng_state(device).numpy())
    return state


# One module.


_SAME_ON_SHARDS = frozenset(("zero_", "zeros_", "ones_", "fill_", "constant_"))


class _Guard(TorchFunctionMode):
    """Refuses writes to sharded parameters while an ``init`` runs. Constants are allowed if every
    rank writes them (``on_all``), because they are correct on shards too. For example, torch's
    attention sets the bias of its output projection, which is another module.
    """

    def __init__(self, what: str, on_all: bool) -> None:
        super().__init__()
        self._what = what
        self._allowed = _SAME_ON_SHARDS if on_all else frozenset()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        target = args[0] if args else next(iter((kwargs or {}).values()), None)  # torch.nn.init
        writes = name.endswith("_") and not name.endswith("__") and name not in self._allowed
        if writes and isinstance(target, DTensor):
            raise UnsupportedError(
                "FS225",
                f"{self._what} wrote ({name}) to an already sharded parameter of another module, "
                f"of shape {tuple(target.shape)}. Make init write only to the parameters of the "
                "module with which it is called.",
            )
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Step:
    name: str
    module: nn.Module
    own: _Own
    device: torch.device
    grids: Grids
    done: set[int]  # ids of parameters written by earlier modules

    def __post_init__(self) -> None:
        module, own = self.module, self.own
        self.what = f"materialize: init of {self.name or '<root>'} ({class_name(module)})"
        self.registered = {n: p for n, p in module._parameters.items() if p is not None}
        self.buffers = {
            n: b for n, b in module._buffers.items() if b is not None and n not in own.buffers
        }
        self.fresh = {n for n in own.params if id(self.registered[n]) not in self.done}
        self.done.update(id(self.registered[n]) for n in own.params)

    def run(self, init: Init | None, sync: bool) -> None:
        """Register full tensors on the module, run ``init``, and check and keep its results."""
        whole: dict[str, Tensor] = {}
        error: BaseException | None = None
        written: dict[str, Tensor] = {}
        try:
            whole = self._put_whole()
            if not sync or self.grids.main.is_first:
                with torch.no_grad(), _Guard(self.what, on_all=not sync):
                    if init is None:
                        self.module.reset_parameters()  # type: ignore[operator]  # checked before
                    else:
                        init(self.module)
                written = self._check(whole)
        except BaseException as caught:
            error = caught
        finally:
            for name, param in self.registered.items():
                self.module._parameters[name] = param
            self.module._buffers.update(self.buffers)
        whole.clear()
        self.grids.main.raise_together(error, self.what)
        self._take(written, sync)

    def _put_whole(self) -> dict[str, Tensor]:
        """Register and return full, unwritten tensors in place of those that were on meta."""
        whole: dict[str, Tensor] = {}
        by_param: dict[int, nn.Parameter] = {}
        for name, param in self.registered.items():
            if id(param) not in by_param:
                by_param[id(param)] = _like(param, self._whole_of(name, param))
            self.module._parameters[name] = by_param[id(param)]
            if name in self.fresh:
                whole[name] = by_param[id(param)]
        for name, kept in self.buffers.items():
            self.module._buffers[name] = kept.detach().clone()
        for name in self.own.buffers:
            buffer = self.module._buffers[name]
            assert buffer is not None
            made = _unwritten(torch.empty_like(buffer, device=self.device))
            self.module._buffers[name] = whole[name] = made
        return whole

    def _whole_of(self, name: str, param: nn.Parameter) -> Tensor:
        """Return an unwritten full tensor, or the full parameter if it was already written."""
        if name in self.fresh:
            shape, stride = tuple(param.shape), tuple(param.stride())
            made = torch.empty_strided(shape, stride, dtype=param.dtype, device=self.device)
            return _unwritten(made)
        if not isinstance(param, DTensor) and name not in self.own.params:
            return param.detach().clone()
        held = self.grids.hold(name, param)
        target = Target(device=self.device, counted=False)
        ((_, tensor),) = gather([held], STAGED_NBYTES, target, self.grids.main, self.what)
        assert tensor is not None
        return tensor

    def _check(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that ``init`` wrote, by name. ConfigError: one is missing or wrong."""
        problems, written = [], {}
        for name in (*sorted(self.own.params), *sorted(self.own.buffers)):
            kind = "parameter" if name in self.own.params else "buffer"
            table: Any = self.module._parameters if kind == "parameter" else self.module._buffers
            found = table.get(name)
            expected = self.registered[name] if kind == "parameter" else whole[name]
            if found is None or found.is_meta:
                problems.append(f"left {kind} {name} {'on meta' if found is not None else 'unset'}")
            elif found.shape != expected.shape or found.dtype != expected.dtype:
                problems.append(
                    f"set {kind} {name} to {found.dtype} of shape {tuple(found.shape)} instead of "
                    f"{expected.dtype} of shape {tuple(expected.shape)}"
                )
            elif name in whole and found is whole[name] and (count := _count_unwritten(found)):
                problems.append(
                    f"did not write {kind} {name}"
                    + (f": {count} of {found.numel()} elements" if count < found.numel() else "")
                )
            else:
                written[name] = found
        if problems:
            raise ConfigError(
                "FS225",
                f"{self.what} {'; '.join(problems)}. Make it set every parameter and buffer of the "
                "module in place, or build the module on a real device.",
            )
        return written

    def _take(self, written: dict[str, Tensor], sync: bool) -> None:
        """Store this rank's blocks of the new values; with ``sync``, of the first rank's values."""
        names = sorted(self.own.params)
        helds = [self.grids.hold(name, self.registered[name]) for name in names]
        for name in sorted(self.own.buffers):
            buffer = written.get(name)
            if buffer is None:  # another rank ran ``init``
                buffer = self.module._buffers[name]
            assert buffer is not None
            self.module._buffers[name] = buffer.detach()
            helds.append(self.grids.hold(name, buffer))
        if sync:
            scatter(helds, STAGED_NBYTES, lambda held: written[held.name].detach())
            return
        with torch.no_grad():
            for held in helds:
                if held.name in self.own.params:
                    held.local.copy_(written[held.name].detach()[held.own.slices])


def _share_rest(grids: Grids, model: nn.Module, meta: dict[int, _Own]) -> None:
    """Copy from the first rank all replicas, plain tensors and buffers that were not on meta."""
    helds: dict[int, LocalShard] = {}
    for module in model.modules():
        own = meta[id(module)]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in own.params | own.buffers:
                helds[id(tensor)] = grids.hold(name, tensor)
    for held in helds.values():
        for index, axis in enumerate(held.grid.axes):
            if axis.size > 1 and index not in held.blocks.axes:  # replicated on this axis
                line = Grid((axis,), held.grid.device_type)
                block = Blocks(held.own.sizes, (axis.size,), ())
                part = LocalShard(held.name, held.local, block, line, tuple(held.local.stride()))
                scatter([part], STAGED_NBYTES, lambda one: one.local)


# Unwritten memory.


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _unwritten(tensor: Tensor) -> Tensor:
    _bytes_of(tensor).fill_(FILL)
    return tensor


_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _count_unwritten(tensor: Tensor) -> int:
    """Return the number of unwritten elements (one-byte dtypes: 0 if any element was written)."""
    raw = _bytes_of(tensor)
    if tensor.numel() == 0 or raw.numel() < tensor.numel() * tensor.itemsize:
        return 0
    wide = _WIDE[tensor.itemsize]
    flat = raw[: tensor.numel() * tensor.itemsize].view(wide)
    mark = torch.full((wide.itemsize,), FILL, dtype=torch.uint8, device=tensor.device).view(wide)
    count = sum(int(torch.count_nonzero(part == mark)) for part in flat.split(SCAN_NUMEL))
    count = count * wide.itemsize // tensor.itemsize
    if tensor.itemsize == 1 and (count < tensor.numel() or torch_autograd.version_of(tensor) > 0):
        return 0
    return count
