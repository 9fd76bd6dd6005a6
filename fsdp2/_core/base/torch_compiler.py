"""Private torch API, by subject: the compiler: what it may trace, and the graphs that it makes.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn as nn

Function = TypeVar("Function", bound=Callable[..., Any])


# Compilation. The public ``torch.compiler.disable`` imports the compiler, which takes seconds, and
# puts a wrapper around every call. These decorators set what it sets, and cost a call nothing.


def _not_compiled(*, with_callees: bool, breaks_graph: bool) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        callees = skip if with_callees else frames._FrameAction.DEFAULT
        code = function.__code__
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, callees))
        if breaks_graph:
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # on a function
        return function

    return decorate


never_traced = _not_compiled(with_callees=False, breaks_graph=True)
"""Let the compiler break its graph at a call, and not compile it; what it calls is compiled."""

always_eager = _not_compiled(with_callees=True, breaks_graph=True)
"""As ``never_traced``, and what the function calls is not compiled either."""

eager_unless_inlined = _not_compiled(with_callees=True, breaks_graph=False)
"""Let the compiler trace a function as a part of a graph only.

Called on its own while the compiler is running, it is not compiled, nor is what it calls.
"""

inlined_or_eager = _not_compiled(with_callees=False, breaks_graph=False)
"""As ``eager_unless_inlined``, but what the function calls is compiled, if that is not traced.

For what stands around a user's module: on its own it is not worth a graph.
"""


compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter("_compiled_call_impl")
"""What ``module.compile()`` made, which runs the module's hooks and forward."""


call_with_hooks: Callable[..., Any] = nn.Module._call_impl
"""What ``nn.Module.__call__`` calls: one stack frame less for each unit inside another."""


def region_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a region for what a module's forward does, if that was marked as one.

    (``torch.compiler.nested_compile_region``; the mark has no public name.) It takes the module,
    tensors that are registered on it, and what forward takes. A compiler knows again a tensor that
    a region uses if it is an input of the graph or an argument of the region, and what is gathered
    in the graph is no input.
    """
    marked = forward = type(module).forward
    while hasattr(forward, "__marked_compile_region_fn__"):
        forward = forward.__marked_compile_region_fn__
    if forward is marked or "forward" in vars(module):
        return None
    if forward not in _regions:
        _regions[forward] = _make_region(forward)
    return _regions[forward]


_regions: dict[Callable[..., Any], Callable[..., Any]] = {}


def _make_region(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: nn.Module, wholes: object, args: Any, kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    # of its own for each forward: compilers know regions again by their code
    code = run.__code__.replace()
    own = FunctionType(code, run.__globals__, run.__name__, None, run.__closure__)
    limit = getattr(forward, "__marked_compile_region_max_reuse_entries__", None)  # since 2.13
    options: Any = {} if limit is None else {"max_reuse_entries": limit}
    made: Callable[..., Any] = torch.compiler.nested_compile_region(own, **options)
    return made


class GraphPass(Protocol):
    """Changes a forward or a backward graph. ``uuid`` says how: graphs are kept on disk by it."""

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str: ...


def find_compiler(
    backend: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """Return what ``torch.compile`` would call with each graph. No public way exists."""
    if backend == "inductor":
        compiler: Callable[..., Any] = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        return compiler
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


def with_passes(
    compiler: Callable[..., Any], backend: Any, joint: GraphPass, change: GraphPass | None
) -> Callable[..., Any]:
    """Return a compiler that changes graphs, for the backends ``"inductor"`` and ``"aot_eager"``.

    ``joint`` changes the graph of forward and backward before it is parted, ``change`` each of the
    two before it is lowered; None: as it is. Inductor sorts nodes by memory behind every pass,
    which undoes what that one does, so it is off then, unless the user asks for it.
    """
    if backend != "inductor":
        return _changed_aot_eager(joint, change)
    options = dict(compiler.config)  # type: ignore[attr-defined]  # of the wrapper
    passes = {"joint_custom_pre_pass": joint}
    if change is not None:
        options.setdefault("reorder_for_peak_memory", False)
        passes["post_grad_custom_post_pass"] = change
    for name, one in passes.items():
        options[name] = _as_inductors(one, options.get(name))
    changed: Callable[..., Any] = torch._TorchCompileInductorWrapper(
        None,
        options,
        compiler.dynamic,  # type: ignore[attr-defined]
    )
    return changed


def _as_inductors(change: GraphPass, chosen: Any) -> Any:
    """Wrap a pass, behind the one of the user's, in the class that inductor's caches ask."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if chosen is not None:
                chosen(graph)
            change(graph)

        def uuid(self) -> Any:
            if chosen is None:
                return change.uuid()
            known = chosen.uuid() if isinstance(chosen, CustomGraphPass) else None
            return None if known is None else (known, change.uuid())

    return Pass()


def _changed_aot_eager(joint: GraphPass, change: GraphPass | None) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        if change is not None:
            change(graph.graph)
            graph.recompile()

        def run(arguments: list[Any]) -> Any:
            held = list(arguments)
            arguments.clear()  # the caller keeps none of them alive
            return graph(*held)

        run._boxed_call = True  # type: ignore[attr-defined]  # says that it takes a list
        return run

    def part(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint(graph.graph)
        graph.recompile()
        return min_cut_rematerialization_partition(graph, *args, **kwargs)

    made: Callable[..., Any] = aot_autograd(fw_compiler=keep, partition_fn=part)
    return made


def region_called(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """Return the graph of the region that a node calls; None: it calls none."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    body, owner = node.args[0], node.graph.owning_module
    assert isinstance(body, torch.fx.Node)
    assert isinstance(body.target, str)
    assert owner is not None
    return cast(torch.fx.GraphModule, owner.get_submodule(body.target))


def is_view(node: torch.fx.Node) -> bool:
    """True if a node of a forward or backward graph views its first input."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)


def collective_of(node: torch.fx.Node) -> str:
    """Return the name of the functional collective that a node is, or an empty string."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        return target._schema.name.split("::")[1]
    return ""


def operation_of(node: torch.fx.Node) -> str:
    """Return the name of the operation of torch's that a node is, or an empty string."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return target._schema.name.split("::")[1]
    return ""


def has_effects(node: torch.fx.Node) -> bool:
    """True if a node of a compiler's graph may change its inputs, or takes random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    if target.namespace == "_c10d_functional":
        return False
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def switches_gradients(node: torch.fx.Node) -> bool:
    """True if a node of a traced graph says whether gradients are recorded from there on."""
    name = getattr(node.target, "__name__", "")
    return name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def switches_off(node: torch.fx.Node) -> bool:
    """True if gradients are not recorded from such a node on."""
    name, args = getattr(node.target, "__name__", ""), node.args
    return args[0] is False if name == "_set_grad_enabled" else name == "_enter_inference_mode"


def views_or_wraps(node: torch.fx.Node) -> bool:
    """True if a node of a traced graph takes a tensor out of a list, or makes a DTensor of it."""
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return node.target is operator.getitem or name == "prim_from_local"
    return node.op == "call_method" and node.target == "to"


def switches_of_steps() -> AbstractContextManager[Any]:
    """Switch the compiler's settings as functional steps need them.

    It traces writes to modules inside ``torch.utils.checkpoint``, whose recomputation leaves them
    out: right for parameters that are registered before a module runs and forgotten after it. And
    it looks at the hooks of each module: our call of a unit's forward is one piece of code for all
    units, and where a graph breaks in it, one without hooks would be used for one with them.
    """
    import torch._dynamo.config as config

    patched: AbstractContextManager[Any] = config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True, skip_nnmodule_hook_guards=False
    )
    return patched


def recompute_in_backward(node: torch.fx.Node) -> None:
    """Let the partitioner compute a node of a compiler's graph again in backward.

    The tags are those of selective checkpointing. The number is larger than that of any region of a
    user's checkpoint, because what is used in a later region would be saved instead.
    """
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30
