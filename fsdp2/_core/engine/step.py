"""Module hooks and autograd hooks: the timeline of a step.

::

    pre_forward(unit)     begin_forward, if no other unit's forward is running
                          unshard, wait                     all-gather of this unit
                          prefetch                          all-gather of the next, overlapped
                          cast inputs; mark inputs          (in grad mode)
      ... the module's forward ...
    post_forward(unit)    cast outputs; mark outputs        (in grad mode)
                          reshard, depending on the unit's settings
                          end_forward, if this unit began it

    pre_backward(call)    at a marked output: unshard, wait, prefetch the previous call
      ... autograd through the module ...     mark its gradients   (create_graph)
    post_backward(call)   at a marked input: reshard, reduce
    end_backward          at the end of autograd's run: process events that no mark triggered

Owns every module hook, and every hook on an autograd node (``Call``: the *marks* of one forward).
Contains no buffer or collective code; delegates to the runtime.

[Note: memory of parameters in outputs]
A forward may return the unit's weight, or a view of it. The weight's memory is freed after forward,
so we return a differentiable copy. If the output is in an object that cannot be rebuilt with the
copy (such as a function, an object with ``__slots__`` or a set), we raise an error: later reads
would access freed memory.

[Note: one reduction per backward]
A unit may run several forwards before a backward. Each recorded call is *open* until its
post-backward or the end of the next backward. The unit reduces its gradients as soon as no call is
open, and at the latest at the end of backward. Each parameter thus gets one gradient per backward,
as without sharding. We count calls rather than track object lifetimes, because garbage collection
runs at different times on each rank, and collectives must have the same order on all ranks.

[Note: compiled modules]
This code is never compiled: graphs should contain no collectives, streams or freed storages. The
compiler breaks the graph at a unit, and compiles the unit's forward separately.
``module.compile()`` also compiles the code that calls module hooks. We therefore run our hooks
around the compiled call. The registered hooks are traced, but return immediately. Nested modules of
the same unit need no hooks, because all parameters of a unit are gathered together.

[Note: marks]
A mark is a pre-hook on an autograd node. An output mark is on the ``grad_fn`` of the output. If the
output is a view, a second mark is on the ``grad_fn`` of its base, because an in-place update of a
view moves the view's history to the base. An input mark is on the node of a ``view_as`` (or of the
dtype cast) that we insert between the caller's tensor and the module. This node is older than the
module's nodes, and autograd runs younger nodes first. When autograd reaches the mark, the module's
backward is therefore complete. The view is a plain autograd view, so the module may update it, or a
view of it, in place. Autograd would forbid this for a view from a custom ``autograd.Function``.

An in-place update of the inserted view, or of another view of the same base, bypasses the mark: the
base's new history leads from the update to the base's old node. We mark that node after forward.

A backward with ``create_graph`` creates nodes that read parameters. A second backward enters these
nodes through gradients that the module's nodes computed. Each node of the module therefore gets a
hook that marks the gradients computed by this node, in the same way as outputs.

If a backward on some rank reaches no mark of a unit, the order of forward determines when the unit
is processed: see [Note: the order of backward] in ``_core.engine.tree``. This order also applies to
multiple marks on one node, as when a unit returns the output of an inner unit or its own input.

[Note: hidden outputs]
A forward may store a loss in an attribute, a list argument or elsewhere, and return another tensor.
Autograd runs younger nodes first, so if the stored tensor is younger than every marked output, its
backward would read freed parameters. The backward of an older tensor would read them too, unless
the backward of the output runs first. We search for such tensors in three steps:

- After a unit's first forward, we search the attributes of its modules. Tensors that the forward
  created are marked, and the attributes that hold them are checked after each later forward.
- If the youngest node does not belong to a marked output, there are more hidden outputs, so we
  search all attributes and the arguments.
- If the youngest node is still unmarked, the hidden output's location is unknown. The unit is
  resharded, as on other ranks, but its memory is kept while the graph is alive. In later forwards
  of every unit with a module of the same class, our saved-tensor hooks save the parameters
  (``saved_by_hooks``). Unpacking a parameter then acts as a mark, so no memory is kept. The hooks
  cost one call per saved tensor. If the user's saved-tensor hooks are active, the memory is kept
  instead, because our hooks would override them.

Without any mark, gradients accumulate on unsharded parameters, and no backward reduces them. The
next forward or optimizer step then raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._core.base import torch_autograd, torch_compiler, torch_modes, torch_modules
from fsdp2._core.base.containers import map_tensors, visit_tensors
from fsdp2._core.base.errors import StateError, UnsupportedError
from fsdp2._core.base.events import FORWARD
from fsdp2._core.engine import between_steps
from fsdp2._core.engine.attach import attach
from fsdp2._core.engine.between_steps import StateHooks
from fsdp2._core.engine.tree import UNIT_ATTRIBUTE, Runtime, Unit, Visit, aside, enter, leave


@dataclass(eq=False, slots=True)
class _Saved:
    """A parameter saved by a node. ``read`` gathers the unit; call it before you use ``tensor``."""

    read: Callable[[], None]
    tensor: Tensor


@dataclass(eq=False)
class SavedByHooks:
    """Saved-tensor hooks for one forward of a unit, active from construction until ``end``. They
    call ``read`` before unpacking a parameter. ``around``: the hooks of the enclosing forward."""

    unit: Unit
    read: Callable[[], None]
    around: SavedByHooks | None

    def __post_init__(self) -> None:
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self.pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> SavedByHooks | None:
        """Deactivate the hooks; return those of the enclosing forward."""
        assert self._hooks is not None
        self._hooks.__exit__()
        self._hooks = None  # the hooks refer to the call, which must not outlive its graph
        return self.around

    @torch_compiler.always_eager
    def pack(self, tensor: Tensor) -> Any:
        if tensor.grad_fn is not None:  # a node that saves its own output would form a cycle
            tensor = tensor.detach()
        hooks: SavedByHooks | None = self
        while hooks is not None:
            if hooks.unit.holds(tensor):
                return _Saved(hooks.read, tensor)
            hooks = hooks.around
        return tensor


@torch_compiler.always_eager
def _unpack(saved: Any) -> Any:
    if type(saved) is not _Saved:
        return saved
    saved.read()
    return saved.tensor


_OF_MODULES = frozenset((*vars(nn.Module()), UNIT_ATTRIBUTE, *torch_modules.REGISTRIES))
"""Attributes of a module that never hold outputs of its forward."""


Comes = Callable[[tuple[Tensor | None, ...]], None]  # called when backward reaches an output


@dataclass(eq=False, slots=True)
class Call:
    """The marks of one forward of a unit. Owned by autograd's graph."""

    visit: Visit
    runtime: Runtime
    given: Any  # the arguments, during the forward
    first_node: int  # nodes of the module have this sequence number or a higher one
    last_marked: int  # number of the youngest marked node; ``first_node - 1`` before any
    is_marked: bool = False
    has_leaf: bool = False  # an output is a leaf or does not require grad
    views: list[tuple[Tensor, Any]] | None = None  # marked inputs with their nodes
    saves: SavedByHooks | None = None  # our saved-tensor hooks, while active
    saved_by_hooks: bool = False  # our hooks saved the parameters of this forward

    @torch_compiler.always_eager
    def pre_backward(self, _grads: tuple[Tensor | None, ...]) -> None:
        if torch.is_grad_enabled():  # create_graph: a later backward may start at the gradients
            self._follow_gradients()
        visit, runtime = self.visit, self.runtime
        runtime.begin_backward()
        number = runtime.backward.number
        if visit.opened_in == number or (visit.closed_in == number and visit.was_passed()):
            return
        if visit.unit.precision.policy is not visit.policy:
            self._refuse_policy()
        aside(runtime.arrive, visit)

    def _refuse_policy(self) -> NoReturn:
        raise StateError(
            "FS302",
            f"{self.visit.unit.fqn or '<root>'}: train() or eval() was called between this forward "
            "and its backward. The unit's policy has full_precision_in_eval, so the parameters "
            "that backward needs were freed. Run the backward before you call train() or eval().",
        )

    @torch_compiler.always_eager
    def come_back(self, _grads: tuple[Tensor | None, ...]) -> None:
        """Handle a later backward that reaches a gradient computed by nodes of the module."""
        visit, runtime = self.visit, self.runtime
        runtime.begin_backward()
        if visit.opened_in != runtime.backward.number != visit.closed_in:
            aside(runtime.arrive, visit, False)  # not in order

    def _follow_gradients(self) -> None:
        """Make the module's nodes, from the running one on, mark the gradients they compute."""
        node = torch_autograd.current_node()
        for inner in torch_autograd.nodes_between(self.first_node, self.last_marked, node, self):
            inner.register_hook(self.mark_gradients)

    @torch_compiler.always_eager
    def post_backward(self, _grads: tuple[Tensor | None, ...]) -> None:
        """Called when the last gradient leaves the unit: its parameters now have gradients."""
        visit, runtime = self.visit, self.runtime
        if visit.opened_in != runtime.backward.number:
            return
        aside(runtime.depart, visit)

    def mark_input(self, tensor: Tensor, cast: Tensor) -> Tensor:
        """Insert a node with a post-backward hook between the caller's tensor and the module."""
        is_view = cast is tensor
        if is_view:
            is_seen = torch_modes.count_modes()
            cast = torch_modes.unseen_view(tensor) if is_seen else tensor.view_as(tensor)
        node = cast.grad_fn
        if node is not None:
            node.register_prehook(self.post_backward)
            self.visit.marks_input = True
            if is_view:
                views = self.views = [] if self.views is None else self.views
                views.append((cast, node))
        return cast

    def follow_updates(self) -> None:
        """Mark inputs again if the module updated them in place; drop the references to inputs."""
        views, self.views = self.views, None
        for view, node in views or ():
            if view.grad_fn is not node:
                base = torch_autograd.base_of(view)
                before = torch_autograd.node_before(
                    torch_autograd.age_of(node), view if base is None else base
                )
                if before is not None:
                    before.register_prehook(self.post_backward)

    def save_by_hooks(self) -> None:
        """Make the unpacking of a saved parameter a mark, unless the user's hooks prevent this."""
        hidden = self.runtime.hidden
        around: SavedByHooks | None = hidden.saving
        if torch_autograd.may_pack_saved_tensors(None if around is None else around.pack):
            self.saved_by_hooks = True
            self.saves = hidden.saving = SavedByHooks(self.visit.unit, self.read, around)

    def end_saving(self) -> None:
        if self.saves is not None:
            self.runtime.hidden.saving = self.saves.end()
            self.saves = None

    def read(self) -> None:
        """Called before a node unpacks a saved parameter."""
        visit, runtime = self.visit, self.runtime
        if torch_autograd.graph_task_id() == -1 or visit.unit.calls.running:
            return  # graph inspection, or a backward inside the forward
        runtime.begin_backward()
        if visit.opened_in != runtime.backward.number:
            if visit.unit.precision.policy is not visit.policy:
                self._refuse_policy()
            aside(runtime.arrive, visit)

    def let_go(self) -> None:
        """Drop all tensors, because they own the graph, which owns the call."""
        self.given = self.views = None
        self.end_saving()

    def __del__(self) -> None:
        if self.is_marked:
            self.runtime.lose_graph(self.visit.unit)

    def mark_outputs(self, output: Any) -> None:
        mark = self._mark_layers if _has_layers() else self._mark
        if type(output) is Tensor:
            mark(output)
        else:
            visit_tensors(mark, output)

    def mark_hidden(self, output: Any) -> bool:
        """Mark hidden outputs; return True if there may be more. See [Note: hidden outputs]."""
        visit_tensors(self._mark_own, [self.given, *(value for *_, value in self._attributes())])
        seen: list[Tensor] = []
        visit_tensors(seen.append, output)
        has_younger = torch_autograd.sequence_number() > self.last_marked + 1
        return has_younger and (self.is_marked or not seen)

    def mark_kept(self) -> None:
        """Mark tensors in the attributes that held outputs after the first forward."""
        calls = self.visit.unit.calls
        if calls.kept_on is None:
            calls.kept_on = [
                (module, name)
                for module, name, value in self._attributes()
                if any(map(self._is_own, _tensors_at(value)))
            ]
        for module, name in calls.kept_on:
            for tensor in _tensors_at(vars(module).get(name)):
                self._mark_own(tensor)

    def _attributes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        waiting, seen = list(self.visit.unit.modules), set[nn.Module]()
        while waiting:  # not recursive: deep models are already near the recursion limit
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting.extend(module.children())
                for name, value in vars(module).items():
                    if name not in _OF_MODULES:
                        yield module, name, value

    def _is_own(self, tensor: Tensor) -> bool:
        # do not use last_marked: an autograd.Function is older than nodes of modules that it runs
        node = tensor.grad_fn
        return node is not None and torch_autograd.age_of(node) >= self.first_node

    def _mark_own(self, tensor: Tensor) -> None:
        if self._is_own(tensor):
            self._mark(tensor)

    @torch_compiler.always_eager
    def mark_gradients(
        self, grads: tuple[Tensor | None, ...], _given: tuple[Tensor | None, ...]
    ) -> None:
        if torch.is_grad_enabled():
            last = self.last_marked
            mark = self._mark_layers if _has_layers() else self._mark
            visit_tensors(lambda grad: mark(grad, self.come_back), grads)
            self.last_marked = last  # keep the forward's value: nodes of gradients are younger

    def _mark(self, tensor: Tensor, come: Comes | None = None) -> None:
        """Register a hook, by default ``pre_backward``, on the nodes that created a tensor."""
        if tensor.requires_grad:
            if not self.is_marked:
                self.is_marked = True
                self.visit.unit.calls.recorded += 1
            base = torch_autograd.base_of(tensor)
            for made in (tensor,) if base is None else (tensor, base):
                node = made.grad_fn
                if node is None:
                    self.has_leaf = True
                    continue
                node.register_prehook(come or self.pre_backward)
                age = torch_autograd.age_of(node)
                if age > self.last_marked:
                    self.last_marked = age
        else:
            self.has_leaf = True

    def _mark_layers(self, tensor: Tensor, come: Comes | None = None) -> None:
        for layer in torch_modes.layers_of(tensor):
            self._mark(layer, come)


def _tensors_at(value: Any) -> list[Tensor]:
    """Return a list of the tensors in ``value``: a tensor, or a list, tuple or dict. Other objects
    are not searched, because they may contain anything, including the model."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = (value,)
    return [item for item in value if isinstance(item, Tensor)]


class Beginning:
    """Begins a backward at the outputs of a root without parameters, and queues the callback that
    ends it. Otherwise, a nested backward in a hook might queue the callback and end both."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        self._runtime.begin_backward()

    def mark(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.begin)


def _has_layers() -> bool:
    """Return True if tensors may be functorch wrappers or dual tensors."""
    return torch_modes.transforms_are_active() or torch_modes.dual_level(forward_ad) >= 0


# Module hooks.

_TENSORS = frozenset((Tensor,))


@torch_compiler.always_eager
def pre_forward(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if unit.runtime is None:
        aside(attach, unit)
    aside(enter, unit)
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # set by the first forward
    call = None
    if torch.is_grad_enabled() and unit.groups:
        visit = Visit(unit, unit.precision.policy, runtime.context.streams.current)
        if runtime.context.phase is FORWARD:
            visit.order, visit.entered = runtime.order, len(runtime.order.events)
            runtime.order.events.append(visit)
        first = torch_autograd.sequence_number()
        call = Call(visit, runtime, (args, kwargs), first, first - 1)
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

    if not kwargs and set(map(type, args)) <= _TENSORS:
        return tuple(map(prepare, args)), kwargs
    loan = unit.calls.lend(prepare)
    args = tuple(map(loan.exchange, args))
    return args, {name: loan.exchange(value) for name, value in kwargs.items()}


@torch_compiler.always_eager
def post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    calls = unit.calls
    call: Call | None = calls.running.pop() if calls.running else None
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # set by the first forward
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
            # usually the recomputed call is still open
            if call.is_marked and calls.open == 0:
                calls.open = 1
        else:
            _end_recorded(module, call, output)
        call.given = None
    if not calls.running:
        aside(leave, unit, module, recomputing)
    return output


def _cast_and_give_back(unit: Unit, output: Any) -> tuple[Any, Any]:
    """Return the cast output, and the tensors to mark, including those in lent containers."""
    loan = unit.calls.take_back()
    dtype = unit.precision.policy.output_dtype
    if dtype is not None:

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        output = map_tensors(cast, output)
        if loan is not None:
            loan.map_added(cast)
    return output, output if loan is None else loan.with_added(output)


def _end_recorded(module: nn.Module, call: Call, output: Any) -> None:
    unit, runtime = call.visit.unit, call.runtime
    if unit.calls.kept_on != []:
        call.mark_kept()
    # usually the youngest node belongs to an output
    if torch_autograd.sequence_number() > call.last_marked + 1 and call.mark_hidden(output):
        runtime.hidden.note_hidden(unit, runtime.units, not call.saved_by_hooks)
    if not call.is_marked:
        if not unit.trains:
            return
        _refuse_lazy(unit, module, output)
        runtime.hidden.note_unmarked(unit)
    runtime.end_call(call.visit)


def _end_unrecorded(
    unit: Unit,
    runtime: Runtime,
    output: Any,
    outputs: Any,
    recomputing: bool,
) -> Any:
    """Return the output of a forward that has no ``Call``."""
    with_grad, owner = torch.is_grad_enabled(), unit.owner
    if with_grad and owner is not None and owner.calls.running:
        around: Call | None = owner.calls.running[-1]
        if around is not None:  # a backward in a hook may reach this output first
            around.mark_outputs(outputs)
    output = _without_parameters(output, unit, None, recomputing)
    if with_grad and runtime.forward_root is unit and not _has_layers():
        begins = Beginning(runtime)
        if type(output) is Tensor:
            begins.mark(output)
        else:
            visit_tensors(begins.mark, output)
    return output


def _without_parameters(
    output: Any,
    unit: Unit,
    call: Call | None,
    recomputing: bool,
) -> Any:
    """Copy outputs that alias parameters. See [Note: memory of parameters in outputs]."""

    def apart(tensor: Tensor) -> Tensor:
        if not unit.holds(tensor):
            return tensor
        copied = tensor.clone()
        if call is not None:
            call.mark_outputs(copied)
        return copied

    output = apart(output) if type(output) is Tensor else map_tensors(apart, output)
    stays = unit.calls.running or unit.keeps_after_forward(call is not None)
    if type(output) is not Tensor and not stays and not recomputing:
        visit_tensors(lambda tensor: _refuse_own(tensor, unit), output)
    return output


def _refuse_own(tensor: Tensor, unit: Unit) -> None:
    if unit.holds(tensor):
        raise UnsupportedError(
            "FS323",
            f"{unit.fqn or '<root>'}: its forward returned one of its parameters, or a view of "
            "one, inside an object in which fsdp2 cannot replace tensors. The memory of parameters "
            "is freed after forward. Return the tensor itself or a clone() of it, or return the "
            "tensor in a list, tuple, dict or dataclass.",
        )


def _refuse_lazy(unit: Unit, module: nn.Module, output: Any) -> None:
    own_code = getattr(type(module).forward, "__code__", None)
    code = getattr(output, "gi_code", getattr(output, "cr_code", None))
    if code is not None and code is own_code:
        raise UnsupportedError(
            "FS322",
            f"{unit.fqn or '<root>'}: its forward returned a {type(output).__name__}, whose body "
            "runs later, when the parameters are sharded. Return a list of the values that it "
            "yields, or apply fully_shard to the modules that it calls.",
        )


@torch_compiler.always_eager
def forward_raised(unit: Unit, depth: int) -> None:
    """Handle an exception in a unit's forward. ``depth`` calls were running before this forward.
    The caller may catch the exception: recomputation, for example, raises an exception to stop
    early. If the exception leaves the outermost unit, the next forward recovers."""
    unit.calls.give_up(depth)
    runtime = unit.runtime
    if runtime is None or unit.calls.running or runtime.is_recomputing:
        return
    unit.calls.ran.clear()
    if runtime.forward_root is unit:
        runtime.fail()
    elif not unit.calls.active:
        unit.reshard_unless_gathering()


class _AsItIs:
    """Runs a module without hooks: the unit's parameters are already gathered."""

    @torch_compiler.never_traced
    def call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return run(*args, **kwargs)


WITHOUT_HOOKS = _AsItIs()


@torch_compiler.inlined_or_eager
def call_module(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a sharded module. Implements ``FSDPModule.__call__``."""
    unit = self.__dict__.get(UNIT_ATTRIBUTE)
    if unit is not None and unit.runner is not None:
        return unit.runner.call(self._call_original, args, kwargs)
    return _call_eagerly(self, unit, args, kwargs)


@torch_compiler.never_traced
def _call_eagerly(
    module: Any,
    unit: Unit | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    original = module._fsdp2_original.__call__
    if unit is None:  # an empty instance, see ``FSDPModule.__new__``
        return original(module, *args, **kwargs)
    depth = len(unit.calls.running)
    try:
        compiled = torch_compiler.compiled_call(module)
        if compiled is not None:  # see [Note: compiled modules]
            args, kwargs = pre_forward(unit, args, kwargs)
            unit.runner = WITHOUT_HOOKS
            try:
                output = compiled(*args, **kwargs)
            finally:
                unit.runner = None
            return post_forward(unit, module, output)
        if original is not nn.Module.__call__:
            return original(module, *args, **kwargs)
        return torch_compiler.call_with_hooks(module, *args, **kwargs)
    except BaseException as error:
        found = between_steps.explained(error)  # before parameters are resharded
        forward_raised(unit, depth)
        if found is not None:
            raise found from error
        raise


@dataclass(eq=False)
class ForwardHooks:
    """Forward hooks of a unit's modules. Closures would not work: deepcopy does not copy them."""

    unit: Unit

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
    """A method of a module that gathers and frees parameters as ``forward`` does."""

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
    def _call_eagerly(
        self,
        unit: Unit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        depth = len(unit.calls.running)
        try:
            args, kwargs = pre_forward(unit, args, kwargs)
            return post_forward(unit, self.module, self._run(*args, **kwargs))
        except BaseException:
            forward_raised(unit, depth)
            raise


def register_hooks(unit: Unit) -> None:
    """Register a unit's module hooks: first among pre-forward hooks, last among forward hooks."""
    hooks = ForwardHooks(unit)
    for module in unit.modules:
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.after, prepend=False)
    StateHooks(unit).register()
