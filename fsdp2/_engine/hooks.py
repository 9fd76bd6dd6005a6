"""Module hooks, and what autograd hooks do: what happens when. This is the time line of a step.

::

    pre_forward(unit)     begin_forward, if no other unit's forward is running
                          unshard, wait                     all-gather of this unit
                          prefetch                          all-gather of the next, beside compute
                          cast inputs; mark inputs          (gradients wanted)
      ... the module's forward ...
    post_forward(unit)    cast outputs; mark outputs        (gradients wanted)
                          reshard, as the unit's settings say
                          end_forward, if this unit began it

    pre_backward(call)    on a marked output: unshard, wait, prefetch the call before it
      ... autograd through the module ...     mark its gradients   (create_graph)
    post_backward(call)   on a marked input: reshard, reduce
    end_backward          by the engine: whatever no marked input covered

Owns the hooks of modules; those of autograd's nodes are in ``_engine.marks``. It must not know
buffers or collectives.

[Note: memory of parameters in outputs]
A unit may return its own weight, or a view of it. The memory of that is freed, so a copy is
returned, through which the gradient comes. In an object that cannot be made again with a copy in
it (a function, slots, a set) it is an error: who reads it later would read freed memory.

[Note: one reduction a backward]
A unit may run several forwards before a backward. Each recorded call is *open* until its
post-backward or the end of the next backward; the unit reduces when no call is open, and at the
end of backward in any case. So its parameters get one gradient a backward, as plain ones do.
Calls are counted, not followed by their lifetime: garbage is collected at other times on other
ranks, and the order of collectives may depend only on what all ranks share.

[Note: compiled modules]
Nothing here is ever compiled: collectives, streams and freed storages have no place in a graph.
A compiler that meets a unit inside what it traces breaks its graph there and compiles the unit's
forward on its own. ``module.compile()`` compiles what runs the module's hooks; so a unit runs ours
around that, and the registered ones, which the compiler traces, return at once. A module of the
same unit inside the compiled one needs no hooks: its parameters came with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._base import torch_autograd, torch_compiler, torch_modes
from fsdp2._base.containers import Loan, map_tensors, visit_tensors
from fsdp2._base.errors import StateError, UnsupportedError
from fsdp2._base.events import FORWARD
from fsdp2._engine.marks import Call, mark_beginning
from fsdp2._engine.runtime import Runtime, attach
from fsdp2._engine.unit import UNIT_ATTRIBUTE, Unit
from fsdp2._engine.unit_order import Visit


def _enter(unit: Unit) -> None:
    """Make parameters whole."""
    if unit.runtime is None:
        attach(unit)
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # what a tree is, without a call
    owner = unit.owner
    if owner is not None and unit.own_groups and not (owner.calls.running or owner.calls.active):
        raise StateError(
            "FS305",
            f"{unit.fqn}: is conditional, and was called outside of the module above it, "
            "which gathers its parameters. Call it from that module's forward, or apply "
            "fully_shard to it without conditional.",
        )
    recomputing = runtime.context.phase is not FORWARD and runtime.is_recomputing  # mostly no call
    if not recomputing and runtime.forward_root is None:
        runtime.begin_forward(unit)
    for group in unit.groups:
        group.inspect(recomputing)
    for group in unit.groups:
        group.unshard()
    for group in unit.groups:
        group.wait_for_unshard()
    if not recomputing and owner is None:
        runtime.prefetch_forward(unit)


@torch_compiler.always_eager
def pre_forward(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make parameters whole and prepare the inputs."""
    if torch_modes.is_under_modes():
        torch_modes.run_aside(_enter, unit)
    else:
        _enter(unit)
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # what a tree is, without a call
    call = None
    if torch.is_grad_enabled() and unit.groups:
        order = runtime.order if runtime.context.phase is FORWARD else None
        call = Call(Visit(unit, order, runtime.context.streams.current()), runtime)
        call.given = args, kwargs
        if unit.calls.saves_by_hooks and not runtime.is_recomputing:
            call.save_by_hooks()
    unit.calls.running.append(call)
    dtype = unit.precision.input_dtype
    if call is None and dtype is None and unit.precision.policy.output_dtype is None:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        cast = tensor
        if dtype is not None and tensor.dtype != dtype and tensor.is_floating_point():
            cast = tensor.to(dtype)
        if call is not None and tensor.requires_grad:
            cast = call.mark_input(tensor, cast)
        return cast

    loan: Loan | None = None
    prepared = []
    for arg in args:
        if type(arg) is Tensor:
            prepared.append(prepare(arg))
        else:
            loan = unit.calls.lend(prepare) if loan is None else loan
            prepared.append(loan.exchange(arg))
    args = tuple(prepared)
    if kwargs:
        loan = unit.calls.lend(prepare) if loan is None else loan
        kwargs = {name: loan.exchange(value) for name, value in kwargs.items()}
    return args, kwargs


@torch_compiler.always_eager
def post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Prepare the outputs and give parameters back."""
    calls = unit.calls
    call: Call | None = calls.running.pop() if calls.running else None  # type: ignore[assignment]  # ours
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # what a tree is, without a call
    if call is not None:
        if call.saves is not None:
            call.end_saving()
        if call.views is not None:
            call.follow_updates()
    outputs = output
    if calls.lent or unit.precision.policy.output_dtype is not None:
        output, outputs = _cast_and_give_back(unit, output)
    recomputing = runtime.context.phase is not FORWARD and runtime.is_recomputing
    if call is None:
        output = _end_unrecorded(unit, runtime, output, outputs, recomputing)
    else:
        call.mark_outputs(outputs)
        if call.has_leaf:
            output = _without_parameters(output, unit, call, recomputing)
        if recomputing:
            if call.is_marked and calls.open == 0:  # else it repeats a call that is open
                calls.open = 1
        else:
            _end_recorded(unit, runtime, module, call, output)
        call.given = None
    if not calls.running:
        if torch_modes.is_under_modes():
            torch_modes.run_aside(_leave, unit, runtime, module, recomputing)
        else:
            _leave(unit, runtime, module, recomputing)
    return output


def _cast_and_give_back(unit: Unit, output: Any) -> tuple[Any, Any]:
    """Return the output in its dtype, and what is to be marked: it, and what the caller lent."""
    loan = unit.calls.take_back()
    dtype = unit.precision.policy.output_dtype
    if dtype is not None:

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        output = map_tensors(cast, output)
        if loan is not None:
            loan.map_added(cast)
    return output, output if loan is None else loan.with_added(output)


def _end_recorded(unit: Unit, runtime: Runtime, module: nn.Module, call: Call, output: Any) -> None:
    """Note a forward that a backward may come to."""
    calls, visit = unit.calls, call.visit
    if calls.kept_on != []:
        call.mark_kept()
    # ``call.goes_on``, a call less: an output's node is the forward's last one as a rule.
    if torch_autograd.sequence_number() > call.last_marked + 1 and call.mark_hidden(output):
        runtime.note_hidden(unit, keeps_memory=not call.saved_by_hooks)
    if not call.is_marked:
        if not unit.trains:
            return
        _refuse_lazy(unit, module, output)
        runtime.note_unmarked(unit)
    calls.open += 1
    visit.previous = runtime.remember(unit)
    runtime.order.leave(visit)


def _end_unrecorded(
    unit: Unit, runtime: Runtime, output: Any, outputs: Any, recomputing: bool
) -> Any:
    """Return the output of a forward that has no marks of its own."""
    with_grad, owner = torch.is_grad_enabled(), unit.owner
    if with_grad and owner is not None and owner.calls.running:
        around: Call | None = owner.calls.running[-1]  # type: ignore[assignment]  # ours
        if around is not None:  # a hook on it may differentiate before those of that unit
            around.mark_outputs(outputs)
    output = _without_parameters(output, unit, None, recomputing)
    if with_grad and runtime.forward_root is unit:
        mark_beginning(runtime, output)
    return output


def _without_parameters(output: Any, unit: Unit, call: Call | None, recomputing: bool) -> Any:
    """Copy what lies in memory of the unit's parameters; return anything else as it is.

    See [Note: memory of parameters in outputs].
    """

    def apart(tensor: Tensor) -> Tensor:
        if not unit.holds(tensor):
            return tensor
        copied = tensor.clone()
        if call is not None:
            call.mark_outputs(copied)
        return copied

    output = map_tensors(apart, output)
    stays = unit.calls.running or unit.keeps_after_forward(call is not None)
    if type(output) is not Tensor and not stays and not recomputing:
        visit_tensors(lambda tensor: _refuse_own(tensor, unit), output)
    return output


def _refuse_own(tensor: Tensor, unit: Unit) -> None:
    """Raise UnsupportedError for a parameter in an output that could not be made again."""
    if unit.holds(tensor):
        raise UnsupportedError(
            "FS323",
            f"{unit.fqn or '<root>'}: its forward returned a parameter of its own, or a view of "
            "one, inside an object that cannot be copied with another tensor in it. The memory of "
            "parameters is given back after a forward. Return the tensor itself, in a list, tuple, "
            "dict or dataclass, or return a clone() of it.",
        )


def _refuse_lazy(unit: Unit, module: nn.Module, output: Any) -> None:
    """Raise UnsupportedError for a forward that is a generator: it computes later."""
    own_code = getattr(type(module).forward, "__code__", None)
    code = getattr(output, "gi_code", getattr(output, "cr_code", None))
    if code is not None and code is own_code:
        raise UnsupportedError(
            "FS322",
            f"{unit.fqn or '<root>'}: its forward returned a {type(output).__name__}, whose body "
            "runs later, when the parameters are sharded. Return a list of what it yields, or "
            "apply fully_shard to the modules that it calls.",
        )


def _leave(unit: Unit, runtime: Runtime, module: nn.Module, recomputing: bool) -> None:
    """Give parameters back, as the unit's settings say."""
    with_grad = torch.is_grad_enabled()
    if not (unit.calls.active or (recomputing and with_grad)):
        _reshard_after(unit, runtime, module, with_grad)
    for group in unit.groups:
        if group.watch.placed:
            group.watch.return_stand_ins()
    if runtime.forward_root is unit:
        runtime.end_forward()


def _reshard_after(unit: Unit, runtime: Runtime, module: nn.Module, with_grad: bool) -> None:
    if len(unit.modules) > 1:
        unit.calls.ran.add(module)
        if len(unit.calls.ran) < len(unit.modules):
            return
        unit.calls.ran.clear()
    if runtime.parts is not None:
        runtime.end_parts(unit, with_grad)
    if unit.keeps_after_forward(with_grad):
        unit.keep()
        return
    if with_grad:
        for group in unit.groups:
            if not group.early.is_released:
                group.reshard_post_forward()
    else:
        unit.reshard()


@torch_compiler.always_eager
def forward_raised(unit: Unit, depth: int) -> None:
    """An exception left a forward of a unit that had ``depth`` calls running before it.

    It may be caught further up, or be no failure at all: a recomputation that has all it needs
    stops by raising. The next forward recovers if it left the outermost unit.
    """
    unit.calls.give_up(depth)
    runtime = unit.runtime
    if not isinstance(runtime, Runtime) or unit.calls.running or runtime.is_recomputing:
        return
    unit.calls.ran.clear()
    if runtime.forward_root is unit:
        runtime.fail()
    elif not unit.calls.active:
        unit.reshard_unless_gathering()


class _AsItIs:
    """Runs a module inside of another of its unit, whose hooks made the parameters whole."""

    @torch_compiler.never_traced
    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args, **kwargs)


AS_IT_IS = _AsItIs()


@torch_compiler.never_traced
def call_compiled(
    unit: Unit,
    module: nn.Module,
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module on which ``compile()`` was called. See [Note: compiled modules]."""
    args, kwargs = pre_forward(unit, args, kwargs)
    unit.runner = AS_IT_IS
    try:
        output = compiled(*args, **kwargs)
    finally:
        unit.runner = None
    return post_forward(unit, module, output)


class ForwardHooks:
    """The hooks of a unit's modules: an object, so that copies of the module copy them."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @torch_compiler.eager_unless_inlined
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.unit.runner is not None:
            return None
        return pre_forward(self.unit, args, kwargs)

    @torch_compiler.eager_unless_inlined
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.unit.runner is not None:
            return None
        return post_forward(self.unit, module, output)


class ForwardMethod:
    """A method of a module that unshards as ``forward`` does."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.replaced = module.__dict__.get(name)

    @torch_compiler.inlined_or_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.module.__dict__[UNIT_ATTRIBUTE]
        if unit.runner is not None:
            return unit.runner.call(self._run, args, kwargs)
        return self._call_eagerly(unit, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    @torch_compiler.never_traced
    def _call_eagerly(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = len(unit.calls.running)
        try:
            args, kwargs = pre_forward(unit, args, kwargs)
            return post_forward(unit, self.module, self._run(*args, **kwargs))
        except BaseException:
            forward_raised(unit, depth)
            raise


def register_hooks(unit: Unit) -> None:
    """Put the hooks onto a unit's modules, ours first before forward and last after it."""
    hooks = ForwardHooks(unit)
    for module in unit.modules:
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.after, prepend=False)
        module.register_load_state_dict_post_hook(unit.adopt_if_idle)
    holders = {site.module for group in unit.own_groups for p in group.params for site in p.sites}
    for module in holders.union(unit.modules):
        module.register_state_dict_pre_hook(unit.reshard_if_idle)
        module.register_load_state_dict_pre_hook(unit.before_load)
