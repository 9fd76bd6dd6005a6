"""Module hooks and autograd hooks: what happens when. This is the time line of a step.

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
      ... autograd through the module ...
    post_backward(call)   on a marked input: reshard, reduce
    end_backward          by the engine: whatever no marked input covered

Owns every hook registration. It must not know buffers or collectives.

[Note: marks]
A mark is a pre-hook on an autograd node. On the output side it is the node that made the output
(and the one that made its base, if the output is a view: an in-place update of a view moves the
view's history onto its base). On the input side it is the node of a ``view_as`` (or of the dtype
cast) put between the caller's tensor and the module: it is older than every node of the module, so
the engine, which runs younger nodes first, has finished the module when it gets there. A view is a
plain autograd view: updating it, or a view of it, in place stays legal, which a custom
``autograd.Function`` there would forbid.

What no mark tells, because a rank's graph goes another way, follows from the order of the forward:
see [Note: the order of backward] in ``_engine.unit_order``. It puts marks in order, too, that
share a node: a unit may return what a unit inside it returned, or its input.

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
from fsdp2._base.containers import map_tensors, visit_tensors
from fsdp2._base.errors import StateError
from fsdp2._base.events import FORWARD
from fsdp2._engine.runtime import Runtime, attach
from fsdp2._engine.unit import UNIT_ATTRIBUTE, Unit
from fsdp2._engine.unit_order import Visit


class Call:
    """The marks of one forward of a unit. Autograd's graph owns it."""

    __slots__ = ("__weakref__", "is_marked", "runtime", "visit")

    def __init__(self, visit: Visit, runtime: Runtime) -> None:
        self.visit = visit
        self.runtime = runtime
        self.is_marked = False

    @torch_compiler.always_eager
    def pre_backward(self, _grads: tuple[Tensor | None, ...]) -> None:
        """A gradient reached an output."""
        visit, runtime = self.visit, self.runtime
        runtime.begin_backward()
        if visit.opened_in == runtime.backward.number:
            return
        if visit.unit.precision.policy is not visit.policy:
            raise StateError(
                "FS302",
                f"{visit.unit.fqn or '<root>'}: train() or eval() was called between this forward "
                "and its backward. Its policy has full_precision_in_eval, so the parameters that "
                "it needs are gone. Run the backward first.",
            )
        if torch_modes.is_under_modes():
            torch_modes.run_aside(runtime.arrive, visit)
        else:
            runtime.arrive(visit)

    @torch_compiler.always_eager
    def post_backward(self, grads: tuple[Tensor | None, ...]) -> None:
        """Every gradient inside the unit has been computed; this one leaves it."""
        visit, runtime = self.visit, self.runtime
        number = runtime.backward.number
        if visit.opened_in != number or visit.closed_in == number:
            return
        if torch.is_grad_enabled():  # create_graph: a backward may come through these gradients
            mark = self._mark_layers if torch_modes.is_under_transforms() else self._mark
            visit_tensors(mark, grads)
        if torch_modes.is_under_modes():
            torch_modes.run_aside(runtime.depart, visit)
        else:
            runtime.depart(visit)

    def mark_input(self, tensor: Tensor, cast: Tensor) -> Tensor:
        """Put a node between the caller's tensor and the module, with post-backward on it."""
        if cast is tensor:
            cast = torch_modes.unseen_view(tensor)
        if cast.grad_fn is not None:
            cast.grad_fn.register_prehook(self.post_backward)
            self.visit.marks_input = True
        return cast

    def __del__(self) -> None:
        if self.is_marked:
            self.runtime.lose_graph(self.visit.unit)

    def mark_outputs(self, output: Any) -> bool:
        """Put pre-backward on what made the outputs; return True if any has a gradient."""
        mark = self._mark_layers if torch_modes.is_under_transforms() else self._mark
        if type(output) is Tensor:
            mark(output)
        else:
            visit_tensors(mark, output)
        return self.is_marked

    def _mark(self, tensor: Tensor) -> None:
        """Put pre-backward on what made a tensor."""
        if tensor.requires_grad:
            if not self.is_marked:
                self.is_marked = True
                self.visit.unit.calls.recorded += 1
            base = torch_autograd.base_of(tensor)
            for made in (tensor,) if base is None else (tensor, base):
                if made.grad_fn is not None:
                    made.grad_fn.register_prehook(self.pre_backward)

    def _mark_layers(self, tensor: Tensor) -> None:
        for layer in torch_modes.layers_of(tensor):
            self._mark(layer)


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
    unit.calls.running.append(call)
    dtype = unit.precision.input_dtype
    if call is None and dtype is None:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        cast = tensor
        if dtype is not None and tensor.dtype != dtype and tensor.is_floating_point():
            cast = tensor.to(dtype)
        if call is not None and tensor.requires_grad:
            cast = call.mark_input(tensor, cast)
        return cast

    args = tuple(
        [prepare(a) if type(a) is Tensor else map_tensors(prepare, a) for a in args]  # a call less
    )
    if kwargs:
        kwargs = {name: map_tensors(prepare, value) for name, value in kwargs.items()}
    return args, kwargs


@torch_compiler.always_eager
def post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Prepare the outputs and give parameters back."""
    call: Call | None = unit.calls.running.pop() if unit.calls.running else None  # type: ignore[assignment]  # ours
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # what a tree is, without a call
    dtype = unit.precision.policy.output_dtype
    if dtype is not None:
        output = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
    recomputing = runtime.context.phase is not FORWARD and runtime.is_recomputing
    if call is not None and (call.mark_outputs(output) or (unit.trains and not recomputing)):
        if not recomputing or unit.calls.open == 0:  # else it repeats a call that is open
            unit.calls.open += 1
        if not recomputing:
            visit = call.visit
            visit.previous = runtime.remember(unit)
            runtime.order.leave(visit)
    if not unit.calls.running:
        if torch_modes.is_under_modes():
            torch_modes.run_aside(_leave, unit, runtime, module, recomputing)
        else:
            _leave(unit, runtime, module, recomputing)
    return output


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
    del unit.calls.running[depth:]
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
