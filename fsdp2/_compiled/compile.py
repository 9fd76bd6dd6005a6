"""``compile``: trace a sharded model and its collectives into one forward and one backward graph.

Calls the compiler, prepares each step (see ``functional``), and rejects unsupported models.

[Note: graphs that differ]
A running graph does not check that all ranks start the same collectives. Therefore, before the
first run of a graph with a new sequence of gathers, the ranks compare their sequences. If these
differ, because ranks took different branches, all ranks raise an error. If one rank compiles a new
graph while the others reuse an old one, only that rank enters the comparison: it waits, and raises
an error when the process group times out.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fsdp2._compiled.backward import Again, FunctionalBackward, OwedReductions, watch
from fsdp2._compiled.functional import TracedUnit
from fsdp2._compiled.passes import Gathered, Overlapped, SeenThrough, place_gathers
from fsdp2._compiled.plan import plans
from fsdp2._core.api.module import FSDPModule
from fsdp2._core.base import torch_comm, torch_compiler, torch_modes
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    UnsupportedError,
    check_flag,
    check_mapping,
    check_module,
    translated,
    wrong_type,
)
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import class_name
from fsdp2._core.base.policy import PARAMETERS
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.engine.attach import attach
from fsdp2._core.engine.between_steps import rest, units_below
from fsdp2._core.engine.tree import Runtime
from fsdp2._core.params.group import ParamGroup

OVERLAPPING = ("inductor", "aot_eager")  # backends that accept our graph passes


def compile(  # noqa: A001  # torch's name for it
    model: nn.Module,
    *,
    overlap: bool | None = None,
    bucket: bool = True,
    **torch_compile_kwargs: Any,
) -> CompiledModel:
    """Compile a sharded model as a whole, including its collectives.

    With ``fullgraph=True``, a training step is one forward and one backward graph. For each unit,
    and for each large child of a root, these graphs contain one all-gather, a second all-gather in
    backward if the unit reshards after forward, and one reduce-scatter (plus one all-reduce if
    there is a replicate axis). Gradients are stored in ``grad`` as sharded DTensors. Without
    gradient sync, they accumulate unreduced, as in eager mode. ``model`` itself still runs eagerly,
    and calls to ``model`` and to the compiled model can be mixed.

    Args:
        model: a model that is sharded with ``fully_shard``, or has sharded submodules. If it is a
            compiled model, its original model is compiled again.
        overlap: whether to overlap collectives with compute (see ``set_memory``). None means True
            for the backends ``"inductor"`` and ``"aot_eager"``, and False for all others. With
            False, the compiler determines the order of collectives.
        bucket: False gives each parameter its own collectives, for compilers that do the bucketing.
        torch_compile_kwargs: arguments of ``torch.compile``. The backend ``"eager"`` has no
            partitioner, so it keeps unsharded parameters from forward to backward.

    Returns:
        A module that runs the compiled model. Its parameters, names, state dict and methods are
        those of ``model``.

    Raises:
        ConfigError: the model has no sharded module; the backend does not support
            ``overlap=True``; ``torch.compile`` rejects an argument.
        UnsupportedError: a unit has a feature that a graph cannot contain. Nothing was changed.
    """
    check_module("compile", "model", model)
    if overlap is not None:
        check_flag("compile", "overlap", overlap)
    check_flag("compile", "bucket", bucket)
    if isinstance(model, CompiledModel):
        model = model.__dict__["_compiled_model"].model
    return CompiledModel(model, Choices(torch_compile_kwargs, overlap, bucket))


@dataclass(frozen=True)
class Choices:
    torch_compile_kwargs: dict[str, Any]
    overlap: bool | None = None
    bucket: bool = True


class CompiledModel(FSDPModule):
    """The result of ``fsdp2.compile``: a model whose calls run the compiled step.

    Attributes, parameters and the state dict are those of the original model.
    """

    def __new__(cls, *_args: Any) -> Any:
        """Create an instance. ``FSDPModule.__new__`` would create an unsharded module instead."""
        return object.__new__(cls)

    def __init__(self, model: nn.Module, choices: Choices) -> None:
        self.__dict__["_compiled_model"] = FunctionalStep(model, choices)

    @torch_compiler.always_eager  # the step calls its own compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self.__dict__["_compiled_model"].run(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_compiled_model"].model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_compiled_model"].model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_compiled_model"].model, name)

    def __dir__(self) -> list[str]:
        return list(dir(self.__dict__["_compiled_model"].model))

    @property
    def forward(self) -> Any:  # type: ignore[override]  # writable in nn.Module
        """The original model's forward, without compilation or hooks. Call the module instead."""
        return self.__dict__["_compiled_model"].model.forward

    def __repr__(self) -> str:
        return f"CompiledModel({self.__dict__['_compiled_model'].model!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        step = self.__dict__["_compiled_model"]
        return CompiledModel, (step.model, step.choices)


def _delegate(name: str, original: Callable[..., Any]) -> Any:
    def method(self: CompiledModel, *args: Any, **kwargs: Any) -> Any:
        model = self.__dict__["_compiled_model"].model
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


for _class in FSDPModule.__mro__:
    for _name, _value in vars(_class).items():
        is_method = isinstance(_value, FunctionType) and not _name.startswith("__")
        if is_method and _name not in vars(CompiledModel):
            setattr(CompiledModel, _name, _delegate(_name, _value))


def _call(
    model: nn.Module,
    ahead: list[TracedUnit],
    several: list[TracedUnit],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the model. This function is compiled."""
    for unit in ahead:
        unit.gather()
    output = model(*args, **kwargs)
    for unit in (*ahead, *several):  # all units have finished at this point
        unit.forget()
    return output


def own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function and its code object, because compilers count graphs per code object."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


class FunctionalStep:
    """A compiled model. Prepares its units before each call, and restores them afterwards."""

    def __init__(self, model: nn.Module, choices: Choices) -> None:
        self.model = model
        self.choices = choices
        self._units: list[TracedUnit] = []
        self._ahead: list[TracedUnit] = []  # gathered before the model runs
        self._several: list[TracedUnit] = []  # units with several modules
        self._runtimes: list[Runtime] = []
        self._backward = FunctionalBackward(())
        self._agreed: set[int] = set()  # hashes of gather sequences on which all ranks agreed
        self._refused: StateError | None = None
        check_units(model)
        options = dict(choices.torch_compile_kwargs)
        if not check_flag("compile", "disable", options.get("disable", False)):
            backend = options.pop("backend", "inductor")
            if choices.overlap and backend not in OVERLAPPING:
                raise ConfigError(
                    "FS804",
                    "compile: expected backend to be 'inductor' or 'aot_eager' with overlap=True, "
                    f"found {backend!r}. Omit overlap, and let that backend order collectives.",
                )
            overlap = choices.overlap is not False and backend in OVERLAPPING
            mode, inductor = options.pop("mode", None), options.pop("options", None)
            check_choice(mode, inductor, options.get("dynamic"))
            for unit in units_below(model):
                check_mode(mode, inductor, unit.device)
            with refusals_of_torch():
                compiler = torch_compiler.find_compiler(
                    backend, mode, inductor, options.get("dynamic")
                )

            def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
                found = place_gathers(graph)
                try:
                    self._agree(found, inputs)
                except StateError as error:
                    self._refused = error  # torch.compile wraps a backend's exceptions
                    raise
                chosen = compiler
                if found and backend in OVERLAPPING:  # otherwise our passes do not apply
                    change = Overlapped(plans[found[0].key].overlap) if overlap else None
                    chosen = torch_compiler.with_passes(compiler, backend, SeenThrough(), change)
                return chosen(graph, inputs)

            options["backend"] = compile_graph
        with refusals_of_torch():
            self._compiled: Callable[..., Any] = torch.compile(own_copy(_call), **options)
        self._may_break = not options.get("fullgraph", False)
        self._switches = torch_compiler.switches_of_steps()

    def _agree(self, found: Sequence[Gathered], inputs: Sequence[Any]) -> None:
        """Compare a graph's sequence of gathers across ranks. If the sequences differ, all ranks
        raise StateError. A collective if the sequence is new. See [Note: graphs that differ]."""
        traced = [group for unit in self._units for group in unit.groups]
        groups = [group.group for group in traced]
        if not found or not groups:
            return
        names = {id(group.flats[0]): group.group.fqn for group in traced}
        read = [None if one.place is None else inputs[one.place] for one in found]
        text = "\n".join(
            f"{names.get(id(flat), '')} {plans[one.key].signature}"
            for one, flat in zip(found, read, strict=True)
        )
        number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        if number in self._agreed:
            return
        axes = [axis for group in groups for axis in (group.data.shard, group.data.replicate)]
        told: int | None = number
        for axis in dict.fromkeys(axes):
            if axis.size > 1:
                told = _compare(told, axis, groups[0].residence.compute)
        if told is None:
            raise StateError(
                "FS801",
                f"{self._units[0].unit.fqn or '<root>'}: ranks compiled different graphs, which "
                "gather different parameters, or the same parameters in a different order. Make "
                "all ranks take the same branches and use the same units in the same order, or run "
                "the original model, which checks every collective and reports any that differs.",
            )
        self._agreed.add(number)

    def _attach(self) -> None:
        """Find the roots, as the first eager forward does."""
        units = units_below(self.model)
        for unit in units:
            if unit.runtime is None:
                attach(unit)
        self._units = [TracedUnit(unit, self.choices.bucket) for unit in units]
        self._ahead = [] if self._may_break else self._units
        self._several = [unit for unit in self._units if unit.has_several_modules]
        self._backward = FunctionalBackward(self._units)
        runtimes = [unit.runtime for unit in units if unit.runtime is not None]
        self._runtimes = list(dict.fromkeys(runtimes))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._units:
            self._attach()
        with self._backward.set_aside():
            return self._run(args, kwargs)

    def _watch(self, output: Any) -> None:
        """Register backward hooks on the output, for the work that is done outside of graphs."""
        groups = [group for unit in self._units for group in unit.groups]
        owed = [g for g in groups if g.group.reducer.unreduced.is_owed or not g.syncs]
        if owed and torch.is_grad_enabled():
            watch(output, OwedReductions(owed).begin)
        if self._may_break or any(unit.ran_outside for unit in self._units):
            watch(output, self._backward.begin)
        else:
            for group in groups:
                group.let_go()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begin()
        outer = [unit.unit.runner for unit in self._units]  # a backward may be running
        try:
            for unit in self._units:
                unit.forget()
                unit.enter_regions()
                unit.unit.runner = unit
            with self._switches:
                output = self._compiled(self.model, self._ahead, self._several, *args, **kwargs)
            self._watch(output)
            return output
        except BaseException:
            self._abandon()
            refused, self._refused = self._refused, None
            if refused is not None:
                raise refused from None
            raise
        finally:
            for unit, runner in zip(self._units, outer, strict=True):
                is_over = isinstance(runner, Again) and not runner.backward.is_open
                unit.unit.runner = None if is_over else runner
                unit.leave_regions()
                unit.put_parameters_back()

    def _begin(self) -> None:
        """Reshard all units; apply user changes since the last step; raise if a step cannot run."""
        for runtime in self._runtimes:
            runtime.recover_if_failed()
            if runtime.context.phase is not IDLE:
                raise StateError(
                    "FS805",
                    f"{runtime.root.fqn or '<root>'}: a compiled model was called during a forward "
                    "or backward of its own units. Compile the outermost module, or call compile() "
                    "on a block.",
                )
            rest(runtime)
        inside = {unit.unit for unit in self._units}
        delivered: set[int] = set()
        for unit in self._units:
            owner = unit.unit.owner
            if owner is not None and owner not in inside:
                raise StateError(
                    "FS305",
                    f"{unit.unit.fqn} is conditional, but was compiled without its enclosing "
                    "module, which gathers its parameters. Compile the enclosing module, or apply "
                    "fully_shard to this module without conditional.",
                )
            if unit.unit.summoned_on:
                raise StateError(
                    "FS306",
                    f"{unit.unit.fqn or '<root>'}: a compiled model was called inside "
                    "summon_full_params. Exit the context first.",
                )
            for group in unit.unit.groups:
                group.inspect()
            unit.unit.reshard()
            for group in unit.unit.groups:
                check_group(group, group.fqn)
                if group.registration.placeholders:
                    group.registration.forget_placeholders()
                    raise UnsupportedError(
                        "FS806",
                        f"{group.fqn or '<root>'}: functional_call replaces its parameters, but a "
                        "compiled model gathers its own parameters. Use the original model.",
                    )
        try:
            for unit in self._units:
                unit.begin(joins=not self._may_break, delivered=delivered)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for unit in self._units:
            for group in unit.groups:
                group.abandon()


def check_units(model: nn.Module) -> None:
    """Raise, as ``compile`` does, if a model has no units or a unit cannot be traced."""
    units = units_below(model)
    if not units:
        raise ConfigError(
            "FS503",
            f"compile: found no sharded module in {class_name(model)}. Apply fully_shard first, "
            "or call torch.compile.",
        )
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        for child, inner in module.named_children():
            if isinstance(inner, CompiledModel):
                raise ConfigError(
                    "FS805",
                    f"compile: {names[id(module)] or '<root>'} contains a compiled model, {child}, "
                    "but compiled steps cannot be nested. Compile the outermost model only.",
                )
    for unit in units:
        for group in unit.own_groups:
            check_group(group, unit.fqn or names.get(id(unit.modules[0]), ""))


def check_group(group: ParamGroup, name: str) -> None:
    """Raise UnsupportedError if a group has a feature that a graph cannot contain."""
    found = None
    extended = [param.fqn for param in group.params if param.wrapped.is_extended]
    deals = ((param.fqn, param.placement.layout.deal) for param in group.params)
    dealt = [f"{fqn} {deal.asked_by}" for fqn, deal in deals if deal is not None]
    if extended:
        found = f"parameter {extended[0]} has an all-gather extension, which runs user code"
    elif dealt:
        found = f"parameter {dealt[0]}, so ranks send different amounts"
    elif group.settings.sharding != PARAMETERS:
        found = (
            f"it has {group.settings.sharding.name}, which keeps state between steps; a compiled "
            "step cannot keep such state"
        )
    elif not group.wire.carries:
        found = "debug.without_communication is on"
    elif group.wire.custom != (None, None):
        found = "a custom all-gather or reduce-scatter was set"
    elif group.reducer.hook is not None:
        found = "an all-reduce hook was set"
    elif group.wire.only_sums:
        found = "fsdp2.reproducible sums its gradients"
    elif any(
        axis.pg is not None and torch_comm.is_gloo(axis.pg, group.residence.compute.type)
        for axis in (group.data.shard, group.data.replicate)
        if group.residence.compute.type != "cpu"
    ):
        found = f"gloo has no functional collectives for tensors on {group.residence.compute}"
    elif any(param.placement.data_axes for param in group.params):
        found = "dp_mesh_dims was passed, so its parameters are DTensors on the data axes too"
    if found is not None:
        raise UnsupportedError(
            "FS802",
            f"{name or '<root>'} cannot be compiled as a whole, because {found}. Call compile() "
            "on the blocks instead: fsdp2's hooks then run eagerly around them.",
        )


def check_choice(mode: object, options: object, dynamic: object) -> None:
    """Raise ConfigError for arguments that ``torch.compile`` would reject only at compile time."""
    if mode is not None and not isinstance(mode, str):
        raise wrong_type("compile", "mode", "a str or None", mode)
    if options is not None:
        check_mapping("compile", "options", options)
    if dynamic is not None:
        check_flag("compile", "dynamic", dynamic)


@contextlib.contextmanager
def refusals_of_torch() -> Iterator[None]:
    """Convert the exceptions that ``torch.compile`` raises for its arguments to ConfigError."""
    try:
        yield
    except Exception as error:
        raise translated("compile: torch.compile rejected its arguments", error) from error


def check_mode(mode: str | None, options: dict[str, Any] | None, device: torch.device) -> None:
    """Raise UnsupportedError if the compiler would record CUDA graphs."""
    if device.type != "cuda":
        return
    if mode in ("reduce-overhead", "max-autotune") or (options or {}).get("triton.cudagraphs"):
        raise UnsupportedError(
            "FS803",
            f"compile: mode {mode!r} with options {options} records CUDA graphs, but replaying "
            "collectives in them has not been verified. Use mode='default' or "
            "'max-autotune-no-cudagraphs'.",
        )


DIFFERENT = -1  # sent by ranks that have already found a difference


def _compare(number: int | None, axis: MeshAxis, device: torch.device) -> int | None:
    """Return ``number`` if it is the same on all ranks of the axis, else None. If ``number`` is
    None, send DIFFERENT, so that all axes detect a difference that was found on one axis."""
    told = DIFFERENT if number is None else number
    with torch_modes.hidden_from_modes(), torch.no_grad():
        own = torch.tensor([told], dtype=torch.int64, device=device)
        seen = torch.empty(axis.size, dtype=torch.int64, device=device)
        torch_comm.all_gather_single(seen, own, axis.pg, False)
        return number if set(seen.tolist()) == {number} else None
