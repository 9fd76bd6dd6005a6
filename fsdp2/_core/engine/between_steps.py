"""What programs meet between the steps of a sharded module.

Owns the check that no step is under way, after which sharded parameters are registered, and the
hooks by which ``state_dict`` and ``load_state_dict`` of a unit's modules ask for that; what other
software finds in place of torch's own state; and the message where torch met a sharded parameter
among ordinary tensors. It must not know when anything happens in a step.

[Note: the state that torch's software asks for]
``fully_shard.state(module)`` is a ``TorchState``, by our accessor and by torch's getters, which
return an ``FSDPState`` only, so it is one. From torch 2.15 on a stage of
``torch.distributed.pipelining`` whose module is an ``FSDPModule`` uses public methods:
``set_manual_backward_finalization``, ``finalize_backward``, and settings. With
``defer_reduce_grad_wait`` it compares ``_get_fsdp_state()._comm_ctx`` of its stages. Up to torch
2.14 it sets ``is_last_backward``, ``reshard_after_backward`` and ``requires_gradient_sync`` to
False before each backward of a microbatch, so gradients stay on the unsharded parameters. After the
last one it sets all three to True, calls ``post_backward`` on each group that it finds under
``_state_ctx.all_states``, and then ``_root_post_backward_final_callback``. No backward runs at that
time, so no hook of ours would. The order of reductions is the runtime's to choose: the list of
states is empty, and the callback is the end of a backward.

[Note: what tools may read]
Torch's FSDP2 keeps a state with parameter groups on each module, and programs read some of it: how
many ranks share a parameter, which dtype a unit computes in, whether a module is sharded already
(docs/clients.md lists the names and who reads them). These are true here too. What would act on
torch's internals, and every write, is an error. One of torch's groups is all parameters of a unit
on one mesh, so large parts of a root are in the group of the rest. The objects live as long as the
unit: programs use them as keys.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_autograd, torch_modules
from fsdp2._core.base.arguments import check_module
from fsdp2._core.base.errors import ConfigError, StateError, UnsupportedError, coded
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import class_name, clean
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.mesh import REPLICATE, SHARD, DataMesh
from fsdp2._core.comm.wire import Streams
from fsdp2._core.engine.tree import Runtime, Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.registration import GATHERING, SHARDED, Site


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of a module's tree, each once; the module need not be one."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def refuse_other_thread(module: object, what: str) -> None:
    """Check that what ranks do together is begun by the thread of the steps, if there are several.

    It is the same on all ranks, so nothing is told. See [Note: threads] in ``tree``.

    Raises:
        StateError: another thread took the last step, and still lives.
    """
    if threading.active_count() == 1 or not isinstance(module, nn.Module):
        return
    for unit in units_below(module):
        ranks = [group.data.shard.size * group.data.replicate.size for group in unit.groups]
        has_other = unit.runtime is not None and unit.runtime.thread.is_another
        if has_other and max(ranks, default=1) > 1:
            raise StateError(
                "FS301",
                f"{what}: called in another thread than the one that runs steps of "
                f"{unit.fqn or '<root>'}. All ranks take part in both, each in the same order. "
                "Call it in that thread, between steps.",
            )


def require_idle(module: object, what: str) -> list[Unit]:
    """Check that no step is under way, and register sharded parameters; return the units.

    Raises:
        ConfigError: not a module.
        StateError: inside a forward or a backward.
    """
    wait_for_copies()  # whoever calls may write
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
    """Register sharded parameters, unless a step is under way."""
    with unless_another_thread_steps(unit) as is_another:
        if is_another:  # to free what it keeps would change its collectives on this rank alone
            _require_sharded(unit)
            return
        if unit.runtime is not None:
            with contextlib.suppress(StateError):  # ranks that diverged can still save theirs
                unit.runtime.recover_if_failed()
        if unit.runtime is None or unit.runtime.context.phase is IDLE:
            for group in unit.own_groups:
                if group.state is not GATHERING or unit.runtime is None or not unit.runtime.failed:
                    group.reshard()
                    group.context.streams.finish_host_reads()


@contextlib.contextmanager
def unless_another_thread_steps(unit: Unit) -> Iterator[bool]:
    """Around what looks at parameters between steps. See [Note: threads] in ``tree``.

    It gives True if steps run in another thread.

    Raises:
        StateError: another thread is inside of a forward or a backward.
    """
    runtime = unit.runtime
    if runtime is None:
        yield False
        return
    with runtime.thread.lock:
        if runtime.is_in_other_thread:
            raise StateError(
                "FS301",
                f"{unit.fqn or '<root>'}: another thread is inside a {runtime.context.phase} "
                "of it, where parameters are gathered and freed. Read, copy or save its state "
                "in the thread that trains, between steps.",
            )
        yield runtime.thread.is_another


def _require_sharded(unit: Unit) -> None:
    if any(group.state is not SHARDED for group in unit.own_groups):
        raise StateError(
            "FS301",
            f"{unit.fqn or '<root>'}: another thread has run a forward, and keeps parameters "
            "whole for its backward or for the next forward. Read, copy or save its state in "
            "that thread, between steps.",
        )


def adopt_if_idle(unit: Unit) -> None:
    """Take over what ``load_state_dict(assign=True)`` registered.

    At once, so that an optimizer made next holds shards, before the first forward too. A model
    that leaves the meta device in several loads waits for the last of them.
    """
    if unit.summoned_on:
        return
    if unit.runtime is None or unit.runtime.context.phase is IDLE:
        for group in unit.own_groups:
            if not any(param.is_on_meta for param in group.params):
                group.inspect()


class StateHooks:
    """What a unit's modules call around their states: an object, so that copies of them copy it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def before_state(self, *_: Any, **__: Any) -> None:
        """Register sharded parameters before ``state_dict`` reads them."""
        reshard_if_idle(self.unit)

    def before_load(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Register a module's sharded parameters before ``load_state_dict`` fills them.

        Raises:
            ConfigError: it has whole tensors for them.
        """
        reshard_if_idle(self.unit)
        if not local_metadata.get("assign_to_params_buffers", False):
            own = ((prefix + name, param) for name, param in module._parameters.items())
            refuse_whole(own, state_dict, "Modules before it are loaded already.")

    def after_load(self, *_: Any, **__: Any) -> None:
        """Take over what ``load_state_dict(assign=True)`` registered."""
        adopt_if_idle(self.unit)

    def register(self) -> None:
        """Put the hooks onto the unit's modules, and onto those that hold its parameters."""
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
    """Register cast buffers in their dtypes of origin inside the context: to be filled."""
    found = [unit.precision.buffers for unit in units]
    on = [buffers for buffers in found if buffers is not None and buffers.is_on]
    for buffers in on:
        buffers.restore()
    try:
        yield
    finally:
        for buffers in on:
            buffers.cast()


def refuse_whole(
    params: Iterable[tuple[str, torch.Tensor | None]], state_dict: Mapping[str, Any], after: str
) -> None:
    """Raise ConfigError where torch would fail to copy whole tensors to shards.

    ``after`` says what was changed.
    """
    for name, param in params:
        value = state_dict.get(name, state_dict.get(clean(name)))
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
            continue
        if isinstance(param, DTensor):
            raise ConfigError(
                "FS623",
                f"load_state_dict: {clean(name)} is a whole tensor in the state dict, and sharded "
                "in the model. Load whole tensors with fsdp2.checkpoint.load_full_state(model, "
                f"{{'model': state_dict}}). {after}",
            )


def finish(runtime: Runtime) -> None:
    """Reduce what backwards left to the caller, and reshard, as settings say now.

    Raises:
        StateError: a unit's part of the gradient is lost. See ``Unit.note_unsynced_backward``.
    """
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
            f"{lost[0].fqn or '<root>'}: found no gradient after a step of a pipeline whose "
            "schedule computes gradients of inputs first and those of parameters later. Such a "
            "schedule looks for the parameters between forward and backward, when this unit "
            f"({len(lost)} in this stage) had freed them. Apply fully_shard to the modules of "
            "a stage with reshard_after_forward=False.",
        )
    runtime.is_pipelined = True
    if runtime.parts is not None:
        runtime.parts.is_off = True  # several forwards may run before their backwards
    runtime.reduce_the_rest(set(), is_last=True, is_manual=False)


def rest(runtime: Runtime) -> None:
    """Wait for what is in flight, and for the optimizer: a step begins that is not ours."""
    if runtime.reductions:
        runtime.wait_for_reductions()
    event, runtime.root.post_optim_event = runtime.root.post_optim_event, None
    if event is not None and runtime.context.streams.async_op:
        event.synchronize()
    elif event is not None:
        event.wait()


# What to say where torch met a sharded parameter among ordinary tensors.

MIXED = "got mixed torch.Tensor and DTensor"
"""In torch's message, of 2.11 to 2.15."""

_units: weakref.WeakSet[Unit] = weakref.WeakSet()


def know(unit: Unit) -> None:
    """Let errors name the parameters of a unit. The first one lets Python's last words say more."""
    if not _units:
        tell_before_the_end()
    _units.add(unit)


def units_around(unit: Unit) -> list[Unit]:
    """Return the units whose modules contain those of a unit."""
    return [
        other
        for other in list(_units)
        if other is not unit
        and all(any(part is top for part in _parts(other)) for top in unit.modules)
    ]


def _parts(unit: Unit) -> Iterator[nn.Module]:
    for top in unit.modules:
        yield from top.modules()


def explained(error: BaseException) -> StateError | None:
    """Return what to raise in place of torch's error; None for any other error."""
    if not isinstance(error, RuntimeError) or MIXED not in str(error):
        return None
    owners = {
        (id(site.module), site.name): (param, site, unit)
        for unit in list(_units)
        for group in unit.own_groups
        for param in group.params
        for site in param.sites
        if site.registered is param.sharded
    }
    for frame, instruction in _innermost_first(error.__traceback__):
        for module, name in _used_in(frame, instruction):
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
        "Use it inside of that forward (another method than forward: "
        "fsdp2.register_fsdp_forward_method)"
    )
    if inside:
        called = f"{unit.fqn}.{inside}" if unit.fqn else inside
        ways += f", or apply fully_shard to {called} too: then its own call gathers it"
    return (
        f"{param.fqn}: used while it is sharded. It is whole while a forward of {owner} runs, and "
        f"that one was not running here. {ways}. To read it between steps: "
        f"fsdp2.summon_full_params. torch said: {error}"
    )


def _innermost_first(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return found[::-1]


def _used_in(frame: FrameType, instruction: int) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters that a frame's own module has, or that its line names."""
    own = frame.f_locals.get("self")
    if isinstance(own, nn.Module):
        yield from ((own, name) for name in own._parameters)
    known = {**frame.f_globals, **frame.f_locals}
    for node in _expressions(frame, instruction):
        if isinstance(node, ast.Attribute):
            module = _value(node.value, known)
            if isinstance(module, nn.Module):
                yield module, node.attr


def _expressions(frame: FrameType, instruction: int) -> Iterator[ast.AST]:
    """Yield the nodes of the expression that runs, or nothing where it cannot be read."""
    code = frame.f_code
    first = last = frame.f_lineno
    begin: int | None = None
    end: int | None = None
    if sys.version_info >= (3, 11):  # before, all that is known is the line
        found = list(code.co_positions())[instruction // 2]
        first, last, begin, end = found[0] or first, found[1] or last, found[2], found[3]
    lines = [
        linecache.getline(code.co_filename, n, frame.f_globals) for n in range(first, last + 1)
    ]
    raw = [line.encode() for line in lines]  # columns count bytes
    if begin is not None and end is not None:
        raw[-1] = raw[-1][:end]
        raw[0] = raw[0][begin:]
    text = b"".join(raw).decode(errors="replace").strip()
    for candidate in (f"({text})", text, text.removeprefix("return ")):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:  # a part of a statement, or none
            continue
        yield from ast.walk(tree)
        return


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Return what a chain of names refers to, without running code of a property."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return _member(_value(node.value, known), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        whole, key = _value(node.value, known), node.slice.value
        if isinstance(whole, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            if isinstance(key, int) and len(whole):
                key = key % len(whole)
            return dict(whole.named_children()).get(str(key))
    return None


def _member(owner: Any, name: str) -> Any:
    found = getattr(owner, "__dict__", {}).get(name)
    if found is None and isinstance(owner, nn.Module):
        found = dict(owner.named_children()).get(name)
    return found


def tell_before_the_end() -> None:
    """Say it also behind the traceback of an error that nobody catches.

    A call of an inner module alone passes through none of our code, and hooks on every module
    would cost each step.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        found = explained(error)
        if found is not None:
            print(f"fsdp2: {found}", file=sys.stderr)

    sys.excepthook = hook


# What other software finds on a sharded module in place of torch's own state: a façade.

ADVICE = (
    "fsdp2.units(module) tells what is sharded and how, fsdp2.debug what a step does. What acts on "
    "a unit are the methods of FSDPModule."
)


def missing(what: str, name: str, of: object) -> AttributeError:
    """Make the error for a name that only torch's own object has."""
    return AttributeError(
        coded(
            "FS910",
            f"the {what} of a module that fsdp2 has sharded has no {name!r}: it is not torch's. "
            f"{ADVICE}",
        ),
        name=name,
        obj=of,
    )


class View:
    """Read-only, and an error with a remedy for what it has not."""

    what = "state"

    if not TYPE_CHECKING:  # or every misspelt name would pass the type checker

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self.what, name, self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            coded(
                "FS910",
                f"the {self.what} of a module that fsdp2 has sharded is read-only, and {name!r} "
                f"was set. {ADVICE}",
            ),
            name=name,
            obj=self,
        )


class ParamView(View):
    """One parameter, by the names that torch's ``FSDPParam`` has for what it holds."""

    what = "parameter state"

    def __init__(self, param: FSDPParam, data: DataMesh) -> None:
        vars(self).update(_param=param, _data=data)

    @property
    def sharded_param(self) -> nn.Parameter:
        param: FSDPParam = vars(self)["_param"]
        return param.sharded

    @property
    def sharded_size(self) -> torch.Size:
        """Size of this rank's shard, without padding."""
        param, data = vars(self)["_param"], vars(self)["_data"]
        return torch.Size(param.placement.layout.shard_shape(data.shard.rank))

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(vars(self)["_param"].placement.layout.shape)

    @property
    def _param_fqn(self) -> str:
        fqn: str = vars(self)["_param"].fqn
        return fqn


class GroupView(View):
    """A unit's parameters on one mesh, by the names of torch's ``FSDPParamGroup``."""

    what = "parameter group"

    def __init__(self, data: DataMesh) -> None:
        vars(self).update(data=data, views={})

    def take(self, groups: list[ParamGroup]) -> None:
        """Show the parameters that these groups have now; views of known ones stay."""
        known, data = vars(self)["views"], vars(self)["data"]
        params = [param for group in groups for param in group.params]
        vars(self)["views"] = {p: known.get(p) or ParamView(p, data) for p in params}

    @property
    def fsdp_params(self) -> list[ParamView]:
        return list(vars(self)["views"].values())

    @property
    def mesh_info(self) -> Any:
        """The mesh, as torch's classes say it: other code asks ``isinstance``.

        Raises:
            UnsupportedError: several dims of the mesh have one role.
        """
        data: DataMesh = vars(self)["data"]
        if max(data.roles.count(SHARD), data.roles.count(REPLICATE)) > 1:
            raise UnsupportedError(
                "FS910",
                "the parameter group of a module that fsdp2 has sharded over several dims of one "
                f"role has no 'mesh_info'. {ADVICE}",
            )
        dims = {role: data.roles.index(role) for role in (SHARD, REPLICATE) if role in data.roles}
        return torch_modules.mesh_info(data.mesh, dims.get(SHARD), dims.get(REPLICATE))


class TorchState(View, torch_modules.FSDPState):
    """A unit, by the names that torch's ``FSDPState`` has for what programs read and call."""

    _state_ctx: ClassVar[Any] = SimpleNamespace(all_states=())  # see the note above

    def __init__(self, unit: Unit) -> None:
        vars(self).update(_unit=unit, _views={})

    @property
    def _comm_ctx(self) -> Streams:
        """An object that is another one for each root, unless roots share their streams."""
        unit: Unit = vars(self)["_unit"]
        if unit.runtime is not None:
            return unit.runtime.context.streams
        if unit.streams is None:
            unit.streams = streams_for(unit.device)
        return unit.streams

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        policy: MixedPrecisionPolicy = vars(self)["_unit"].precision.chosen
        return policy

    @property
    def _is_root(self) -> bool | None:
        """None before the first forward, which decides it."""
        unit: Unit = vars(self)["_unit"]
        return None if unit.runtime is None else unit.is_root

    def _lazy_init(self) -> None:
        """Do nothing: a first forward initialises by itself, and later is never wrong."""

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what a pipeline's step accumulated, wait for it, and reshard, as settings say.

        Raises:
            StateError: a unit's part of the gradient is lost. See ``Unit.note_unsynced_backward``.
        """
        runtime = vars(self)["_unit"].runtime
        if runtime is not None:  # else no forward ran yet
            finish(runtime)
            runtime.end_reductions()

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        found: dict[DataMesh, list[ParamGroup]] = {}
        for group in vars(self)["_unit"].own_groups:
            found.setdefault(group.data, []).append(group)
        known = vars(self)["_views"]
        vars(self)["_views"] = views = {d: known.get(d) or GroupView(d) for d in found}
        for data, view in views.items():
            view.take(found[data])
        return list(views.values())

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        """The parameters of the unit; None if it has none, as torch's own says.

        Raises:
            UnsupportedError: they lie on several meshes.
        """
        views = self._fsdp_param_groups
        if len(views) > 1:
            raise UnsupportedError(
                "FS910",
                f"{vars(self)['_unit'].fqn or '<root>'}: has parameters on {len(views)} meshes, so "
                "it is not one '_fsdp_param_group'. Read '_fsdp_param_groups'. " + ADVICE,
            )
        return views[0] if views else None

    def __getstate__(self) -> dict[str, Any]:
        """Copies are of a copied unit, whose groups nobody has seen yet."""
        return {"_unit": vars(self)["_unit"], "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


torch_modules.hide_torchs_own(TorchState, torch_modules.FSDPState)


def torch_state(module: nn.Module) -> TorchState | None:
    """Return what a module of a unit has in place of torch's state; None for other modules."""
    found = torch_modules.torch_state(module) if unit_of(module) is not None else None
    return found if isinstance(found, TorchState) else None


def register_torch_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's getters find the state of a module; all modules of a unit have the same one."""
    known = _states.get(unit)
    state = None if known is None else known()
    if state is None:
        state = TorchState(unit)
        _states[unit] = weakref.ref(state)
    torch_modules.register_torch_state(module, state)


_states: weakref.WeakKeyDictionary[Unit, weakref.ref[TorchState]] = weakref.WeakKeyDictionary()
"""The state of each unit; its modules hold it."""
