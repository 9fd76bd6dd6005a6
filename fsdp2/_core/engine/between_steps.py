"""State access between the steps of a sharded module.

Owns the check that no step is in progress, and the ``state_dict`` and ``load_state_dict`` hooks
that run it; the objects that other libraries get in place of torch's FSDP state; the error for an
operation that mixes sharded parameters and plain tensors; and checks of optimizers. Contains no
code that orders the operations of a step.

[Note: the state for torch's getters]
``fully_shard.state(module)`` and torch's getters return a ``TorchState``. It derives from
``FSDPState``, because torch's getters return only this type. Since torch 2.15, a stage of
``torch.distributed.pipelining`` whose module is an ``FSDPModule`` uses public methods:
``set_manual_backward_finalization``, ``finalize_backward``, and setters. With
``defer_reduce_grad_wait``, ``_get_fsdp_state()._comm_ctx`` is compared between stages. Up to torch
2.14, a stage sets ``is_last_backward``, ``reshard_after_backward`` and ``requires_gradient_sync``
to False before the backward of each microbatch, so gradients stay on the unsharded parameters.
After the last backward, it sets all three to True, calls ``post_backward`` on each group under
``_state_ctx.all_states``, and then calls ``_root_post_backward_final_callback``. No backward runs
at that time, so our hooks do not run either. Our runtime chooses the order of reductions, so
``all_states`` is empty, and the callback does all the work due at the end of a backward.

[Note: attributes that tools may read]
Torch's FSDP2 stores a state with parameter groups on each module, and programs read parts of it:
the number of ranks that shard a parameter, the compute dtype of a unit, whether a module is already
sharded (docs/clients.md lists the names and the programs). We support these reads. All other access
to torch's internals, and every write, raises an error. As in torch, one group contains all
parameters of a unit on one mesh, including the large parts of a root. The state and its groups
live as long as the unit, because programs use these objects as dict keys.

[Note: optimizer steps are counted]
The versions of shards show whether unsharded parameters kept from an earlier step are still valid.
But torch's multi-tensor and fused kernels write to DTensors without incrementing the version of the
DTensor or of its local tensor (torch 2.13.0). Every step of an optimizer that holds shards or their
memory therefore counts as a write. Steps of other optimizers, such as a probe on one rank, do not
count: the decision to gather may depend only on information that is the same on all ranks.

[Note: an optimizer that trains nothing]
An optimizer created at the wrong time holds parameters that never get a gradient:
unsharded ones, or those replaced by ``fully_shard``. Its first step raises an error on every rank.

[Note: forgotten parameters]
It is easy to forget ``fully_shard`` on the outermost module. Parameters in no unit are trained, but
their gradients are not averaged over ranks, so ranks silently diverge. If an optimizer holds both
such parameters and sharded ones, fsdp2 issues a warning at the optimizer's first step.

[Note: unreduced gradients at an optimizer step]
Gradients of a backward without sync are reduced by the same root's next backward with sync. An
optimizer step in between does not use them. This may be intended (one optimizer, several roots), so
fsdp2 only warns, and only once. If the gradients can never be reduced, fsdp2 raises an error.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2._core.base import torch_autograd, torch_compiler, torch_dealt, torch_modules
from fsdp2._core.base.containers import alive
from fsdp2._core.base.errors import ConfigError, StateError, UnsupportedError, check_module, coded
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import class_name, clean
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.mesh import REPLICATE, SHARD, DataMesh
from fsdp2._core.comm.wire import Streams
from fsdp2._core.engine.tree import Runtime, Unit, unit_of
from fsdp2._core.params import registration
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam, OwnerMark, is_forgotten, placeholder_of
from fsdp2._core.params.reduce import may_hold
from fsdp2._core.params.registration import GATHERING, SHARDED, Site


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of its submodules, without duplicates."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def refuse_other_thread(module: object, what: str) -> None:
    """Raise StateError if another live thread runs the steps: only that thread may issue
    collectives. All ranks raise. See [Note: threads] in ``tree``."""
    if threading.active_count() == 1 or not isinstance(module, nn.Module):
        return
    for unit in units_below(module):
        ranks = [group.data.shard.size * group.data.replicate.size for group in unit.groups]
        has_other = unit.runtime is not None and unit.runtime.thread.is_another
        if has_other and max(ranks, default=1) > 1:
            raise StateError(
                "FS301",
                f"{what}: called outside the thread that runs the steps of "
                f"{unit.fqn or '<root>'}. Two threads may issue collectives in a different order "
                "on each rank. Call it in the thread that runs the steps, between steps.",
            )


def require_idle(module: object, what: str) -> list[Unit]:
    """Check that no step is in progress, and register sharded parameters; return the units."""
    wait_for_copies()  # the caller may write to parameters that are being copied
    units = units_below(check_module(what, "the model", module))
    refuse_other_thread(module, what)
    for unit in units:
        runtime = unit.runtime
        if runtime is None:
            continue
        with unless_another_thread_steps(unit):
            runtime.recover_if_failed()
        if runtime.context.phase is not IDLE or torch_autograd.graph_task_id() != -1:
            phase = "backward" if runtime.context.phase is IDLE else runtime.context.phase
            raise StateError(
                "FS301",
                f"{what}: {unit.fqn or '<root>'} is inside a {phase}, where "
                "parameters are gathered and freed. Call it between steps.",
            )
    for unit in units:
        reshard_if_idle(unit)
        adopt_if_idle(unit)
    return units


def reshard_if_idle(unit: Unit) -> None:
    with unless_another_thread_steps(unit) as is_another:
        if is_another:  # resharding would change the collectives of this rank only
            if any(group.state is not SHARDED for group in unit.own_groups):
                raise StateError(
                    "FS301",
                    f"{unit.fqn or '<root>'}: another thread has run a forward, which keeps "
                    "parameters unsharded for its backward or the next forward. Read, copy or save "
                    "the state in that thread, between steps.",
                )
            return
        if unit.runtime is not None:
            with contextlib.suppress(StateError):  # allows saving after ranks diverged
                unit.runtime.recover_if_failed()
        if unit.runtime is None or unit.runtime.context.phase is IDLE:
            for group in unit.own_groups:
                if group.state is not GATHERING or unit.runtime is None or not unit.runtime.failed:
                    group.reshard()
                    group.context.streams.finish_host_reads()


@contextlib.contextmanager
def unless_another_thread_steps(unit: Unit) -> Iterator[bool]:
    """Guard access to parameters between steps; yield True if another thread runs the steps.
    StateError: that thread is inside a forward or a backward. See [Note: threads] in ``tree``."""
    runtime = unit.runtime
    if runtime is None:
        yield False
        return
    with runtime.thread.lock:
        if runtime.is_in_other_thread:
            raise StateError(
                "FS301",
                f"{unit.fqn or '<root>'}: another thread is inside its {runtime.context.phase}, "
                "where parameters are gathered and freed. Read, copy or save the state in the "
                "training thread, between steps.",
            )
        yield runtime.thread.is_another


def adopt_if_idle(unit: Unit) -> None:
    """Adopt parameters registered by ``load_state_dict(assign=True)`` immediately, so that a new
    optimizer holds shards. Skip groups that still have a parameter on the meta device."""
    if unit.summoned_on:
        return
    if unit.runtime is None or unit.runtime.context.phase is IDLE:
        for group in unit.own_groups:
            if not any(param.is_on_meta for param in group.params):
                group.inspect()


@dataclass(eq=False)
class StateHooks:
    """State-dict hooks of a unit's modules: an object, because deepcopy does not copy closures."""

    unit: Unit

    def before_state(self, *_: Any, **__: Any) -> None:
        reshard_if_idle(self.unit)

    def before_load(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Reshard before a load. ConfigError: the state dict has full tensors instead of shards."""
        reshard_if_idle(self.unit)
        if not local_metadata.get("assign_to_params_buffers", False):
            own = ((prefix + name, param) for name, param in module._parameters.items())
            refuse_whole(own, state_dict, "Modules before this one have already been loaded.")

    def after_load(self, *_: Any, **__: Any) -> None:
        adopt_if_idle(self.unit)

    def register(self) -> None:
        unit = self.unit
        for module in unit.modules:
            module.register_load_state_dict_post_hook(self.after_load)
        groups = unit.own_groups
        holders = {site.module for group in groups for p in group.params for site in p.sites}
        for module in holders.union(unit.modules):
            module.register_state_dict_pre_hook(self.before_state)
            module.register_load_state_dict_pre_hook(self.before_load)


@contextlib.contextmanager
def original_buffers(units: Iterable[Unit]) -> Iterator[None]:
    """Restore the original dtypes of cast buffers inside the context, to load values into them."""
    found = [unit.precision.buffers for unit in units]
    on = [buffers for buffers in found if buffers is not None and buffers.is_on]
    for buffers in on:
        buffers.switch(False)
    try:
        yield
    finally:
        for buffers in on:
            buffers.switch(True)


def refuse_whole(
    params: Iterable[tuple[str, torch.Tensor | None]], state_dict: Mapping[str, Any], after: str
) -> None:
    """Raise ConfigError for full tensors in place of shards. ``after`` ends the message."""
    for name, param in params:
        value = state_dict.get(name, state_dict.get(clean(name)))
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
            continue
        if isinstance(param, DTensor):
            raise ConfigError(
                "FS623",
                f"load_state_dict: {clean(name)} is a full tensor in the state dict, but sharded "
                "in the model. Load full tensors with fsdp2.checkpoint.load_full_state(model, "
                f"{{'model': state_dict}}). {after}",
            )


def finish(runtime: Runtime) -> None:
    """Reduce all unreduced gradients, and reshard, with the current settings. StateError: gradients
    of a unit were lost. See ``Unit.note_unsynced_backward``."""
    lost = [
        unit
        for unit in runtime.units
        if unit.may_lose_gradients
        and not any(group.reducer.has_local_gradients for group in unit.groups)
    ]
    for unit in runtime.units:
        unit.may_lose_gradients = False
    if lost:
        raise StateError(
            "FS315",
            f"{lost[0].fqn or '<root>'}: found no gradient after a pipeline step whose schedule "
            "splits the backward into input gradients and weight gradients. Such a schedule looks "
            "up the parameters between forward and backward, after this unit has freed them "
            f"(affected units in this stage: {len(lost)}). Apply fully_shard to the modules of a "
            "stage with reshard_after_forward=False.",
        )
    runtime.is_pipelined = True
    if runtime.parts is not None:
        runtime.parts.is_off = True  # several forwards may precede their backwards
    runtime.reduce_the_rest(set(), is_last=True, is_manual=False)


def rest(runtime: Runtime) -> None:
    """Wait for work in flight and for the optimizer, before a step that does not use the engine."""
    if runtime.reductions:
        runtime.wait_for_reductions()
    event, runtime.root.post_optim_event = runtime.root.post_optim_event, None
    if event is not None and runtime.context.streams.async_op:
        event.synchronize()
    elif event is not None:
        event.wait()


MIXED = "got mixed torch.Tensor and DTensor"  # part of torch's message, in torch 2.11 to 2.15

_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


def know(unit: Unit) -> None:
    """Register a unit for error messages. The first call installs the excepthook."""
    _explain_uncaught()
    _units[id(unit)] = unit


def units_around(unit: Unit) -> list[Unit]:
    """Return the other units whose modules contain all modules of ``unit``."""
    found = []
    for other in alive(_units):
        inside = {part for top in other.modules for part in top.modules()}
        if other is not unit and inside.issuperset(unit.modules):
            found.append(other)
    return found


def explained(error: BaseException) -> StateError | None:
    """Return a better error for torch's error about mixed tensors; None for other errors."""
    if not isinstance(error, RuntimeError) or MIXED not in str(error):
        return None
    owners = {
        (id(site.module), site.name): (param, site, unit)
        for unit in alive(_units)
        for group in unit.own_groups
        for param in group.params
        for site in param.sites
        if site.registered is param.sharded
    }
    frames = [] if error.__traceback__ is None else inspect.getinnerframes(error.__traceback__, 0)
    for info in reversed(frames):
        for module, name in _used_in(info):
            found = owners.get((id(module), name))
            if found is not None:
                return StateError("FS326", _words(*found, error))
    return None


def _words(param: FSDPParam, site: Site, unit: Unit, error: RuntimeError) -> str:
    top = unit.modules[0]
    owner = f"{unit.fqn or 'the outermost module'} ({class_name(top)})"
    names = {id(module): name for name, module in top.named_modules()}
    inside = names.get(id(site.module), "")
    ways = (
        "Use it inside that forward (or in a method passed to fsdp2.register_fsdp_forward_method)"
    )
    if inside:
        called = f"{unit.fqn}.{inside}" if unit.fqn else inside
        ways += f", or apply fully_shard to {called} too, so that its forward gathers it"
    return (
        f"{param.fqn}: used while it is sharded. It is unsharded only in the forward of {owner}, "
        f"which was not running. {ways}. To read it between steps, use "
        f"fsdp2.summon_full_params. torch reported: {error}"
    )


def _used_in(info: inspect.FrameInfo) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters of a frame's ``self``, and those used in the running expression."""
    known = {**info.frame.f_globals, **info.frame.f_locals}
    own = info.frame.f_locals.get("self")
    if isinstance(own, nn.Module):
        yield from ((own, name) for name in own._parameters)
    for node in _expressions(info):
        if isinstance(node, ast.Attribute):
            module = _value(node.value, known)
            if isinstance(module, nn.Module):
                yield module, node.attr


def _expressions(info: inspect.FrameInfo) -> Iterator[ast.AST]:
    """Yield the AST nodes of the running expression, if its source is available."""
    # Python 3.10 records only the line
    first, last, begin, end = getattr(info, "positions", None) or (None,) * 4
    code, names = info.frame.f_code, info.frame.f_globals
    numbers = range(first or info.lineno, (last or info.lineno) + 1)
    # columns count bytes
    raw = [linecache.getline(code.co_filename, number, names).encode() for number in numbers]
    if begin is not None and end is not None:
        raw[-1] = raw[-1][:end]
        raw[0] = raw[0][begin:]
    text = b"".join(raw).decode(errors="replace").strip()
    for candidate in (f"({text})", text, text.removeprefix("return ")):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:  # not a complete statement
            continue
        yield from ast.walk(tree)
        return


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Return the object that an expression refers to, without running property code."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return None
    owner = _value(node.value, known)
    children = dict(owner.named_children()) if isinstance(owner, nn.Module) else {}
    if isinstance(node, ast.Attribute):
        return getattr(owner, "__dict__", {}).get(node.attr, children.get(node.attr))
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    if isinstance(key, int) and isinstance(owner, nn.Sequential | nn.ModuleList) and children:
        key = key % len(children)
    return children.get(str(key))


@functools.cache
def _explain_uncaught() -> None:
    """Explain uncaught errors too: a direct call of an inner module does not run our code."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        found = explained(error)
        if found is not None:
            print(f"fsdp2: {found}", file=sys.stderr)

    sys.excepthook = hook


ADVICE = (
    "fsdp2.units(module) reports what is sharded and how; fsdp2.debug shows a step. To change "
    "a unit, call the methods of FSDPModule."
)


class View:
    """A read-only view. The error for a missing name contains a remedy."""

    what = "state"

    if not TYPE_CHECKING:  # otherwise type checkers would accept misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            self._refuse(name, "unlike in torch, the {} of a module sharded by fsdp2 has no {!r}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse(name, "the {} of a module sharded by fsdp2 is read-only, but {!r} was set")

    def _refuse(self, name: str, text: str) -> NoReturn:
        message = coded("FS910", f"{text.format(self.what, name)}. {ADVICE}")
        raise AttributeError(message, name=name, obj=self)


class ParamView(View):
    """One parameter, with attributes named as in torch's ``FSDPParam``."""

    what = "parameter state"
    _param: FSDPParam
    _data: DataMesh

    def __init__(self, param: FSDPParam, data: DataMesh) -> None:
        vars(self).update(_param=param, _data=data)

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._param.sharded

    @property
    def sharded_size(self) -> torch.Size:
        return torch.Size(self._param.placement.layout.shard_shape(self._data.shard.rank))

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._param.placement.layout.shape)

    @property
    def _param_fqn(self) -> str:
        return self._param.fqn


class GroupView(View):
    """A unit's parameters on one mesh, with attributes named as in torch's ``FSDPParamGroup``."""

    what = "parameter group"
    data: DataMesh
    views: dict[FSDPParam, ParamView]

    def __init__(self, data: DataMesh) -> None:
        vars(self).update(data=data, views={})

    def take(self, groups: list[ParamGroup]) -> None:
        """Set the groups' current parameters; parameters that have a view keep it."""
        known, params = self.views, [param for group in groups for param in group.params]
        vars(self)["views"] = {p: known.get(p) or ParamView(p, self.data) for p in params}

    @property
    def fsdp_params(self) -> list[ParamView]:
        return list(self.views.values())

    @property
    def mesh_info(self) -> Any:
        """The mesh as an instance of torch's class, because programs check ``isinstance``."""
        data = self.data
        if max(data.roles.count(SHARD), data.roles.count(REPLICATE)) > 1:
            raise UnsupportedError(
                "FS910",
                "the parameter group of a module sharded by fsdp2 over several dims with the same "
                f"role has no 'mesh_info'. {ADVICE}",
            )
        dims = {role: data.roles.index(role) for role in (SHARD, REPLICATE) if role in data.roles}
        return torch_modules.mesh_info(data.mesh, dims.get(SHARD), dims.get(REPLICATE))


class TorchState(View, torch_modules.FSDPState):
    """A unit, with the attributes of torch's ``FSDPState`` that programs use."""

    _unit: Unit
    _views: dict[DataMesh, GroupView]
    _state_ctx: ClassVar[Any] = SimpleNamespace(all_states=())  # see the first note above

    def __init__(self, unit: Unit) -> None:
        vars(self).update(_unit=unit, _views={})

    @property
    def _comm_ctx(self) -> Streams:
        """The unit's streams: the same object for all roots that share streams."""
        return self._unit.lanes

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.precision.chosen

    @property
    def _is_root(self) -> bool | None:
        """None before the first forward, which determines the root."""
        return None if self._unit.runtime is None else self._unit.is_root

    def _lazy_init(self) -> None:
        """No-op: the first forward initialises the unit."""

    def _root_post_backward_final_callback(self) -> None:
        """Finish a pipeline step, and wait for the reductions."""
        runtime = self._unit.runtime
        if runtime is not None:  # otherwise no forward has run yet
            finish(runtime)
            runtime.end_reductions()

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        found: dict[DataMesh, list[ParamGroup]] = {}
        for group in self._unit.own_groups:
            found.setdefault(group.data, []).append(group)
        vars(self)["_views"] = views = {d: self._views.get(d) or GroupView(d) for d in found}
        for data, view in views.items():
            view.take(found[data])
        return list(views.values())

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        """The group of the unit's parameters; None if it has no parameters, as in torch."""
        views = self._fsdp_param_groups
        if len(views) > 1:
            raise UnsupportedError(
                "FS910",
                f"{self._unit.fqn or '<root>'}: its parameters are on {len(views)} meshes, so it "
                "has no single '_fsdp_param_group'. Read '_fsdp_param_groups'. " + ADVICE,
            )
        return views[0] if views else None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the views, because a copied unit has different groups."""
        return {"_unit": self._unit, "_views": {}}


torch_modules.hide_torchs_own(TorchState, torch_modules.FSDPState)


def torch_state(module: nn.Module) -> TorchState | None:
    found = torch_modules.torch_state(module) if unit_of(module) is not None else None
    return found if isinstance(found, TorchState) else None


def register_torch_state(module: nn.Module, unit: Unit) -> None:
    """Register the state for torch's getters. All modules of a unit share one state."""
    known = _states.get(unit)
    state = None if known is None else known()
    if state is None:
        state = TorchState(unit)
        _states[unit] = weakref.ref(state)
    torch_modules.register_torch_state(module, state)


_states: weakref.WeakKeyDictionary[Unit, weakref.ref[TorchState]] = weakref.WeakKeyDictionary()

# Counting of optimizer steps, and checks of an optimizer's parameters.

_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""For each optimizer, the number of its param groups that have been checked."""
_placed: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""For each optimizer, the ``state`` dict whose tensors have their parameters' placements."""


@functools.cache
def watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


@torch_compiler.always_eager
def _before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    groups = optimizer.param_groups
    if may_hold:
        _tell_of_unreduced(optimizer)
    if torch_dealt.Dealt.was_made:
        _place_states(optimizer)
    if _looked_at.get(optimizer) == len(groups):
        return
    for what in map(placeholder_of, _params_of(optimizer)):
        if what is not None:
            raise StateError(
                "FS701",
                f"{type(optimizer).__name__}: found {what}, which gets no gradient, so this "
                "optimizer would not train it. Create optimizers after fully_shard, when "
                "parameters() returns shards: not between unshard() and reshard(), and not "
                "between a forward and its backward.",
            )
    _looked_at[optimizer] = len(groups)
    _warn_of_forgotten(optimizer)


def _place_states(optimizer: Optimizer) -> None:
    """Give states the placements of their parameter if any of these tensors is dealt, so that
    torch's helpers can load the states. fsdp2's own optimizers, which have no ``state`` dict, place
    their states themselves."""
    table = vars(optimizer).get("state")
    if table is None or _placed.get(optimizer) is table:
        return
    if table:  # loading states replaces the dict
        _placed[optimizer] = table
    for param in _params_of(optimizer):
        if not isinstance(param, DTensor) or param not in table:
            continue
        if any(isinstance(t, torch_dealt.DealtTensor) for t in (param, *table[param].values())):
            torch_dealt.place_like(param, table[param])


def _tell_of_unreduced(optimizer: Optimizer) -> None:
    """See [Note: unreduced gradients at an optimizer step]."""
    stepped = [OwnerMark.owner_of(param) for param in _params_of(optimizer)]
    waiting = []
    for reducer in alive(may_hold):
        if not reducer.has_unreduced:
            may_hold.pop(id(reducer), None)
        elif any(param in stepped for param in reducer.params):
            reducer.refuse_hidden()
            waiting.append(reducer.ids.fqn or "<root>")
    if waiting:
        warn(
            "FS710",
            f"{type(optimizer).__name__}: {', '.join(sorted(waiting))}: gradients were accumulated "
            "without sync, so this step does not use them. The next backward with sync reduces "
            "them, if its forward begins at the same outermost unit. Run such a backward "
            "before the step, or call zero_grad() on the model to discard the gradients.",
        )


def _warn_of_forgotten(optimizer: Optimizer) -> None:
    """See [Note: forgotten parameters]."""
    params: list[Any] = [*_params_of(optimizer)]
    forgotten = [param for param in params if is_forgotten(param)]
    sharded = [param for param in params if OwnerMark.owner_of(param) is not None]
    if forgotten and any(param.device_mesh.size() > 1 for param in sharded):
        warn(
            "FS709",
            f"{type(optimizer).__name__}: {len(forgotten)} of its parameters belong to no unit "
            f"(the first has shape {tuple(forgotten[0].shape)}), so fsdp2 does not average their "
            "gradients over ranks. Call fully_shard on the outermost module, after the inner ones. "
            "If other code, such as DistributedDataParallel, averages them, pass the parameters as "
            "ignored_params.",
        )


@torch_compiler.always_eager
def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if any(isinstance(param, DTensor) for param in _params_of(optimizer)) or (
        registration.lie_in_shards(_params_of(optimizer))
    ):
        registration.optimizer_steps.count += 1


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
