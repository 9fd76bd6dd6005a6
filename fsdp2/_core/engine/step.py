"""Hooks of modules and of autograd: what happens when. This is the time line of a step.

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

Owns every hook of a module, and every hook on a node of autograd (``Call``: the *marks* of one
forward). It must not know buffers or collectives, nor how something is done: it calls the runtime.

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

[Note: marks]
A mark is a pre-hook on an autograd node. On the output side it is the node that made the output
(and the one that made its base, if the output is a view: an in-place update of a view moves the
view's history onto its base). On the input side it is the node of a ``view_as`` (or of the dtype
cast) put between the caller's tensor and the module: it is older than every node of the module, so
the engine, which runs younger nodes first, has finished the module when it gets there. A view is a
plain autograd view: updating it, or a view of it, in place stays legal, which a custom
``autograd.Function`` there would forbid.

An update in place of that view (or of another of the same base) takes it out of the graph: the
base's new history leads from the update to what the base was before. After the forward the mark is
put there, too.

A backward with ``create_graph`` makes nodes that read parameters. A backward through them comes in
at a gradient that a node of the module made. So in such a backward each node of the module gets a
hook, which marks what the node made as an output is marked.

What no mark tells, because a rank's graph goes another way, follows from the order of the forward:
see [Note: the order of backward] in ``_core.engine.tree``. It puts marks in order, too, that
share a node: a unit may return what a unit inside it returned, or its input.

[Note: outputs that nobody sees]
A forward may put a loss on an attribute, in a list that it was given, or where nobody looks, and
return something else. Autograd runs younger nodes first, so a backward from what is younger than
every marked output would read parameters that are freed. So would one from a loss that is older, if
it comes before the output's, or alone. So we look for such tensors, in three steps:

- The first forward of a unit ends with a look through the attributes of its modules. What it made
  and left there is marked, and these attributes are looked at after each later forward.
- If the youngest node is not that of a marked output, there is more: we look through all attributes
  and the arguments.
- If there is still more, nobody knows where it is. In this forward the unit is resharded, as on
  other ranks, but its memory stays while the graph lives. From the next forward on, for every unit
  of the same class, nodes save parameters by hooks of ours (``saved_by_hooks``). To read one is a
  mark, so no memory has to stay. The hooks cost a call for each saved tensor, and would hide those
  of the user: where there are some, the memory stays.

If nothing has a mark, its gradients come to unsharded parameters, and no backward of
ours reduces them: the next forward, or the optimizer, raises.

[Note: outputs that nobody sees] in
``step``; a forward that hides no output enters nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._core.base import torch_autograd, torch_compiler, torch_modes, torch_modules
from fsdp2._core.base.containers import Loan, map_tensors, visit_tensors
from fsdp2._core.base.errors import StateError, UnsupportedError
from fsdp2._core.base.events import FORWARD
from fsdp2._core.engine import between_steps
from fsdp2._core.engine.attach import attach
from fsdp2._core.engine.between_steps import StateHooks
from fsdp2._core.engine.tree import UNIT_ATTRIBUTE, Runtime, Unit, Visit, enter, leave

# Nodes that save parameters by hooks of ours, so that reading one tells that a backward comes.


class _Saved:
    """What a node saved of a unit's parameters. Who reads it has the unit gathered first."""

    __slots__ = ("read", "tensor")

    def __init__(self, read: Callable[[], None], tensor: Tensor) -> None:
        self.read = read
        self.tensor = tensor


class SavedByHooks:
    """The hooks of one forward of a unit, in place from now until ``end``.

    ``read`` is called when a node is about to read a parameter; ``around`` are the hooks of the
    next forward around this one that has some.
    """

    def __init__(self, unit: Unit, read: Callable[[], None], around: SavedByHooks | None) -> None:
        self._unit = unit
        self._read = read
        self._around = around
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self.pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> SavedByHooks | None:
        """Let nodes save as they did before; return the hooks around these."""
        assert self._hooks is not None
        self._hooks.__exit__()
        # They own this, and this owns a call, whose end tells that a graph was dropped.
        self._hooks = None
        return self._around

    @torch_compiler.always_eager
    def pack(self, tensor: Tensor) -> Any:
        """Return what a node saves for a tensor."""
        if tensor.grad_fn is not None:  # a node that saves what it made would own itself
            tensor = tensor.detach()
        hooks: SavedByHooks | None = self
        while hooks is not None:
            if hooks._unit.holds(tensor):
                return _Saved(hooks._read, tensor)
            hooks = hooks._around
        return tensor


@torch_compiler.always_eager
def _unpack(saved: Any) -> Any:
    """Give a node what it saved."""
    if type(saved) is not _Saved:
        return saved
    saved.read()
    return saved.tensor


_OF_MODULES = frozenset((*vars(nn.Module()), UNIT_ATTRIBUTE, *torch_modules.REGISTRIES))
"""Attributes of a module that hold no output of its forward."""


Comes = Callable[[tuple[Tensor | None, ...]], None]
"""A hook that tells that a backward comes to a module."""


class Call:
    """The marks of one forward of a unit. Autograd's graph owns it."""

    __slots__ = (
        "__weakref__",
        "first_node",
        "given",
        "has_leaf",
        "is_marked",
        "last_marked",
        "runtime",
        "saved_by_hooks",
        "saves",
        "views",
        "visit",
    )

    def __init__(self, visit: Visit, runtime: Runtime) -> None:
        self.visit = visit
        self.runtime = runtime
        self.is_marked = False
        # nodes with a higher number were made by the module
        self.first_node = torch_autograd.sequence_number()
        self.last_marked = self.first_node - 1
        self.given: Any = None  # the arguments, held while the forward runs
        self.has_leaf = False  # an output was made by no operation, or needs no gradient
        # the marked inputs, each with the node of its mark
        self.views: list[tuple[Tensor, Any]] | None = None
        # our hooks of saved tensors, while they are in place
        self.saves: SavedByHooks | None = None
        self.saved_by_hooks = False  # nodes of this forward were saved by our hooks

    @torch_compiler.always_eager
    def pre_backward(self, _grads: tuple[Tensor | None, ...]) -> None:
        """A gradient reached an output."""
        if torch.is_grad_enabled():  # create_graph: a backward may come through the gradients
            self._follow_gradients()
        visit, runtime = self.visit, self.runtime
        runtime.begin_backward()
        number = runtime.backward.number
        if visit.opened_in == number or (visit.closed_in == number and visit.was_passed()):
            return
        if visit.unit.precision.policy is not visit.policy:
            self._refuse_policy()
        _aside(runtime.arrive, visit)

    def _refuse_policy(self) -> NoReturn:
        raise StateError(
            "FS302",
            f"{self.visit.unit.fqn or '<root>'}: train() or eval() was called between this forward "
            "and its backward. Its policy has full_precision_in_eval, so the parameters that it "
            "needs are gone. Run the backward first.",
        )

    @torch_compiler.always_eager
    def come_back(self, _grads: tuple[Tensor | None, ...]) -> None:
        """A gradient reached one that a node of the module made in another backward."""
        visit, runtime = self.visit, self.runtime
        runtime.begin_backward()
        if visit.opened_in != runtime.backward.number != visit.closed_in:
            self._arrive(is_in_order=False)

    def _arrive(self, is_in_order: bool) -> None:
        _aside(self.runtime.arrive, self.visit, is_in_order)

    def _follow_gradients(self) -> None:
        """Have all nodes of the module that are before the running one mark what they make."""
        node = torch_autograd.current_node()
        for inner in torch_autograd.nodes_between(self.first_node, self.last_marked, node, self):
            inner.register_hook(self.mark_gradients)

    @torch_compiler.always_eager
    def post_backward(self, _grads: tuple[Tensor | None, ...]) -> None:
        """Every gradient inside the unit has been computed; this one leaves it."""
        visit, runtime = self.visit, self.runtime
        if visit.opened_in != runtime.backward.number:
            return
        _aside(runtime.depart, visit)

    def mark_input(self, tensor: Tensor, cast: Tensor) -> Tensor:
        """Put a node between the caller's tensor and the module, with post-backward on it."""
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
        """Mark again the inputs that the module updated in place; hold none any longer."""
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
        """From now on let reading a saved parameter be a mark, unless hooks forbid it."""
        hidden = self.runtime.hidden
        around: SavedByHooks | None = hidden.saving
        if torch_autograd.may_pack_saved_tensors(None if around is None else around.pack):
            self.saved_by_hooks = True
            self.saves = hidden.saving = SavedByHooks(self.visit.unit, self.read, around)

    def end_saving(self) -> None:
        """Let nodes save as they did before."""
        if self.saves is not None:
            self.runtime.hidden.saving = self.saves.end()
            self.saves = None

    def read(self) -> None:
        """A node is about to read a parameter that it saved."""
        visit, runtime = self.visit, self.runtime
        if torch_autograd.graph_task_id() == -1 or visit.unit.calls.running:
            return  # somebody looks at the graph; or the forward differentiates what it has
        runtime.begin_backward()
        if visit.opened_in != runtime.backward.number:
            if visit.unit.precision.policy is not visit.policy:
                self._refuse_policy()
            self._arrive(is_in_order=True)

    def let_go(self) -> None:
        """Hold no tensor any more: the graph owns the call, and they own the graph."""
        self.given = self.views = None
        self.end_saving()

    def __del__(self) -> None:
        if self.is_marked:
            self.runtime.lose_graph(self.visit.unit)

    def mark_outputs(self, output: Any) -> None:
        """Put pre-backward on what made the outputs."""
        mark = self._mark_layers if _has_layers() else self._mark
        if type(output) is Tensor:
            mark(output)
        else:
            visit_tensors(mark, output)

    @property
    def goes_on(self) -> bool:
        """True if the forward made nodes after those of every output that has a mark."""
        return torch_autograd.sequence_number() > self.last_marked + 1

    def mark_hidden(self, output: Any) -> bool:
        """Mark what the forward left elsewhere; return True if more may be where nobody looks.

        See [Note: outputs that nobody sees].
        """
        visit_tensors(self._mark_own, [self.given, *(value for *_, value in self._attributes())])
        seen: list[Tensor] = []
        visit_tensors(seen.append, output)
        return self.goes_on and (self.is_marked or not seen)

    def mark_kept(self) -> None:
        """Mark what the forward left on attributes that had outputs after the first one."""
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
        """Yield attributes of the unit's modules that may hold outputs."""
        waiting, seen = list(self.visit.unit.modules), set[nn.Module]()
        while waiting:  # a deep model is near the end of the stack here
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting.extend(module.children())
                for name, value in vars(module).items():
                    if name not in _OF_MODULES:
                        yield module, name, value

    def _is_own(self, tensor: Tensor) -> bool:
        # Not: younger than the last mark. An autograd function that runs modules in its forward has
        # an older number than the nodes of these.
        node = tensor.grad_fn
        return node is not None and torch_autograd.age_of(node) >= self.first_node

    def _mark_own(self, tensor: Tensor) -> None:
        if self._is_own(tensor):
            self._mark(tensor)

    @torch_compiler.always_eager
    def mark_gradients(
        self, grads: tuple[Tensor | None, ...], _given: tuple[Tensor | None, ...]
    ) -> None:
        """A node of the module made these in a backward."""
        if torch.is_grad_enabled():
            last = self.last_marked
            mark = self._mark_layers if _has_layers() else self._mark
            visit_tensors(lambda grad: mark(grad, self.come_back), grads)
            # gradients have numbers of their own: the forward's last one stays
            self.last_marked = last

    def _mark(self, tensor: Tensor, come: Comes | None = None) -> None:
        """Put a hook, ``pre_backward`` if not another, on what made a tensor."""
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
    """Return a tensor in a list, or the tensors in a list, tuple or dict.

    Other objects are not looked into: they may own anything, the model itself, too.
    """
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = (value,)
    return [item for item in value if isinstance(item, Tensor)]


class Beginning:
    """Lets a backward begin at the outputs of a root that has no parameters.

    The end of a backward is asked for where it begins. Without this mark a backward that a hook
    runs inside of another one might be the first that is seen, and its end would end both.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        self._runtime.begin_backward()

    def mark(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.begin)


def _aside(function: Callable[..., object], *args: Any) -> None:
    """Do the engine's own work where what watches or transforms the user's does not reach it."""
    if torch_modes.count_modes() or torch_modes.transforms_are_active():
        torch_modes.run_aside(function, *args)
    else:
        function(*args)


def _has_layers() -> bool:
    """True if tensors may consist of several: functorch's wrappers, dual numbers."""
    return torch_modes.transforms_are_active() or torch_modes.dual_level(forward_ad) >= 0


# --- Hooks of modules.


@torch_compiler.always_eager
def pre_forward(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make parameters whole and prepare the inputs."""
    if unit.runtime is None:
        _aside(attach, unit)
    _aside(enter, unit)
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # the first forward made it
    call = None
    if torch.is_grad_enabled() and unit.groups:
        order = runtime.order if runtime.context.phase is FORWARD else None
        call = Call(Visit(unit, order, runtime.context.streams.current), runtime)
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
    call: Call | None = calls.running.pop() if calls.running else None
    runtime: Runtime = unit.runtime  # type: ignore[assignment]  # the first forward made it
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
            # mostly it repeats a call that is open, and counts already
            if call.is_marked and calls.open == 0:
                calls.open = 1
        else:
            _end_recorded(unit, runtime, module, call, output)
        call.given = None
    if not calls.running:
        _aside(leave, unit, runtime, module, recomputing)
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
    # The node of an output is mostly the last one that the forward made.
    if torch_autograd.sequence_number() > call.last_marked + 1 and call.mark_hidden(output):
        runtime.hidden.note_hidden(unit, runtime.units, not call.saved_by_hooks)
    if not call.is_marked:
        if not unit.trains:
            return
        _refuse_lazy(unit, module, output)
        runtime.hidden.note_unmarked(unit)
    runtime.end_call(visit)


def _end_unrecorded(
    unit: Unit, runtime: Runtime, output: Any, outputs: Any, recomputing: bool
) -> Any:
    """Return the output of a forward that has no marks of its own."""
    with_grad, owner = torch.is_grad_enabled(), unit.owner
    if with_grad and owner is not None and owner.calls.running:
        around: Call | None = owner.calls.running[-1]
        if around is not None:  # a hook on it may differentiate before those of that unit
            around.mark_outputs(outputs)
    output = _without_parameters(output, unit, None, recomputing)
    if with_grad and runtime.forward_root is unit and not _has_layers():
        beginning = Beginning(runtime)
        if type(output) is Tensor:
            beginning.mark(output)
        else:
            visit_tensors(beginning.mark, output)
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

    output = apart(output) if type(output) is Tensor else map_tensors(apart, output)
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


@torch_compiler.always_eager
def forward_raised(unit: Unit, depth: int) -> None:
    """An exception left a forward of a unit that had ``depth`` calls running before it.

    It may be caught further up, or be no failure at all: a recomputation that has all it needs
    stops by raising. The next forward recovers if it left the outermost unit.
    """
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
    """Runs a module inside of another of its unit, whose hooks made the parameters whole."""

    @torch_compiler.never_traced
    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args, **kwargs)


WITHOUT_HOOKS = _AsItIs()


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
    unit.runner = WITHOUT_HOOKS
    try:
        output = compiled(*args, **kwargs)
    finally:
        unit.runner = None
    return post_forward(unit, module, output)


@torch_compiler.inlined_or_eager
def call_module(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a sharded module. It is ``FSDPModule.__call__``."""
    unit = self.__dict__.get(UNIT_ATTRIBUTE)
    if unit is not None and unit.runner is not None:
        return unit.runner.call(self._call_original, args, kwargs)
    return _call_eagerly(self, unit, args, kwargs)


@torch_compiler.never_traced
def _call_eagerly(
    module: Any, unit: Unit | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    original = module._fsdp2_original.__call__
    if unit is None:  # an empty instance, see ``FSDPModule.__new__``
        return original(module, *args, **kwargs)
    depth = len(unit.calls.running)
    try:
        compiled = torch_compiler.compiled_call(module)
        if compiled is not None:
            return call_compiled(unit, module, compiled, args, kwargs)
        if original is not nn.Module.__call__:
            return original(module, *args, **kwargs)
        return torch_compiler.call_with_hooks(module, *args, **kwargs)
    except BaseException as error:
        found = between_steps.explained(error)  # while parameters are what they were for it
        forward_raised(unit, depth)
        if found is not None:
            raise found from error
        raise


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


# What is put on modules so that their forwards are steps of units.


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
    StateHooks(unit).register()
