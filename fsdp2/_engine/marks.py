"""``Call``: the marks of one forward of a unit, on nodes of autograd.

Owns every hook on a node: where a backward comes to a unit, and where it leaves it. It must not
know module hooks, or what is done there: it calls the runtime.

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
see [Note: the order of backward] in ``_engine.unit_order``. It puts marks in order, too, that
share a node: a unit may return what a unit inside it returned, or its input.

[Note: outputs that nobody sees]
A forward may put a loss on an attribute, in a list that it was given, or where nobody looks, and
return something else. Autograd runs younger nodes first, so a backward from what is younger than
every marked output would read parameters that are freed. So would one from a loss that is older, if
it comes before the output's, or alone. After the first forward of a unit we look through the
attributes of its modules for what it made. In that forward and in each later one we mark what lies
on the attributes where we found something.

The numbers of nodes tell of more: if the last one is not an output's, we look through all
attributes and the arguments. If there is still more, the unit counts as resharded, as on other
ranks, but its memory stays while the graph lives. From the next forward on no memory has to stay,
of it or of another unit of the same class: what nodes save of its parameters they save by hooks,
and reading it is a mark: backward comes to the unit there. That costs a call for each saved tensor,
so it is not done before it is known to be needed, and not inside of hooks of the user's, which it
would hide. If nothing has a mark, its gradients come to unsharded parameters, and no backward of
ours reduces them: the next forward, or the optimizer, raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._base import torch_autograd, torch_compiler, torch_modes, torch_modules
from fsdp2._base.containers import visit_tensors
from fsdp2._base.errors import StateError
from fsdp2._engine.runtime import Runtime
from fsdp2._engine.unit import UNIT_ATTRIBUTE
from fsdp2._engine.unit_order import Visit

_OF_MODULES = frozenset((*vars(nn.Module()), UNIT_ATTRIBUTE, *torch_modules.REGISTRIES))
"""Attributes of a module that hold no output of its forward."""

Comes = Callable[[tuple[Tensor | None, ...]], None]
"""A hook that tells that a backward comes to a module."""


class _Saved:
    """What a node saved of a unit's parameters. Who reads it has the unit gathered first."""

    __slots__ = ("call", "tensor")

    def __init__(self, call: Call, tensor: Tensor) -> None:
        self.call = call
        self.tensor = tensor


class Call:
    """The marks of one forward of a unit. Autograd's graph owns it."""

    __slots__ = (
        "__weakref__",
        "around",
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
        self.first_node = torch_autograd.sequence_number()  # later ones are the module's
        self.last_marked = self.first_node - 1
        self.given: Any = None  # arguments, while the forward runs
        self.has_leaf = False  # an output that no operation made, or one without a gradient
        self.views: list[tuple[Tensor, Any]] | None = None  # marked inputs, and each mark's node
        self.saves: saved_tensors_hooks | None = None  # while nodes save by our hooks
        self.saved_by_hooks = False  # they did, or do
        self.around: Call | None  # the next call outside of it whose nodes do, if its own do

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
        if torch_modes.is_under_modes():
            torch_modes.run_aside(runtime.arrive, visit)
        else:
            runtime.arrive(visit)

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
        arrive = functools.partial(self.runtime.arrive, self.visit, is_in_order)
        if torch_modes.is_under_modes():
            torch_modes.run_aside(arrive)
        else:
            arrive()

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
        if torch_modes.is_under_modes():
            torch_modes.run_aside(runtime.depart, visit)
        else:
            runtime.depart(visit)

    def mark_input(self, tensor: Tensor, cast: Tensor) -> Tensor:
        """Put a node between the caller's tensor and the module, with post-backward on it."""
        is_view = cast is tensor
        if is_view:
            cast = torch_modes.unseen_view(tensor)
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
        around: Call | None = self.runtime.saving  # type: ignore[assignment]  # ours
        if torch_autograd.may_pack_saved_tensors(None if around is None else around._pack):
            self.saved_by_hooks = True
            self.around, self.runtime.saving = around, self
            self.saves = saved_tensors_hooks(self._pack, _unpack)
            self.saves.__enter__()

    def end_saving(self) -> None:
        """Let nodes save as they did before."""
        if self.saves is not None:
            self.saves.__exit__()
            self.saves, self.runtime.saving = None, self.around

    @torch_compiler.always_eager
    def _pack(self, tensor: Tensor) -> Any:
        if tensor.grad_fn is not None:  # a node that saves what it made would own itself
            tensor = tensor.detach()
        call: Call | None = self
        while call is not None:
            if call.visit.unit.holds(tensor):
                return _Saved(call, tensor)
            call = call.around
        return tensor

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
        mark = self._mark_layers if torch_modes.is_under_transforms() else self._mark
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
        # Nodes of a function that runs modules are older than theirs, so no mark bounds them.
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
            mark = self._mark_layers if torch_modes.is_under_transforms() else self._mark
            visit_tensors(lambda grad: mark(grad, self.come_back), grads)
            self.last_marked = last  # of the forward

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


@torch_compiler.always_eager
def _unpack(saved: Any) -> Any:
    """Give a node what it saved."""
    if type(saved) is not _Saved:
        return saved
    saved.call.read()
    return saved.tensor


def mark_beginning(runtime: Runtime, output: Any) -> None:
    """Let a backward begin at the outputs of a root that has no parameters.

    Where it begins it ends. A hook on what a unit returned may run a backward inside of it, and
    that would be where it begins, and ends, if nothing was marked before.
    """
    if torch_modes.is_under_transforms():
        return

    @torch_compiler.always_eager
    def begin(_grads: tuple[Tensor | None, ...]) -> None:
        runtime.begin_backward()

    def mark(tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begin)

    visit_tensors(mark, output)
