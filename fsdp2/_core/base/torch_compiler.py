"""Private torch API for the compiler: functions that it may trace, and graphs that it creates.

Comments say why each name is needed. Tested: torch 2.11.0, 2.13.0, 2.15.0. No unit or group code.
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
Compiler = Callable[..., Any]  # called with a graph and its inputs

# Compilation. The public ``torch.compiler.disable`` imports the compiler, which takes seconds, and
# wraps every call. These decorators set the same flags, without overhead per call.


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
"""Decorator: break the graph at each call; compile the function's callees, but not the function."""

always_eager = _not_compiled(with_callees=True, breaks_graph=True)
"""Decorator: like ``never_traced``, but do not compile callees either."""

eager_unless_inlined = _not_compiled(with_callees=True, breaks_graph=False)
"""Decorator: trace the function within its caller; do not compile it or its callees separately."""

inlined_or_eager = _not_compiled(with_callees=False, breaks_graph=False)
"""Decorator: like ``eager_unless_inlined``, but compile callees. For thin wrappers."""

compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter("_compiled_call_impl")
"""The function created by ``module.compile()``, which runs the module's hooks and forward."""

call_with_hooks: Callable[..., Any] = nn.Module._call_impl
"""The body of ``nn.Module.__call__``. Calling it directly saves a stack frame per nested unit."""


def region_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a compile region for a module's forward; None if the forward is not marked as a region
    (``nested_compile_region``; the mark has no public name). The region's arguments are the module,
    the tensors registered on the module, args and kwargs. A compiler reuses a region only if its
    tensors are inputs of the graph or arguments of the region; gathered tensors are not inputs."""
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

    # a separate function per forward: compilers identify regions by their code
    code = run.__code__.replace()
    own = FunctionType(code, run.__globals__, run.__name__, None, run.__closure__)
    limit = getattr(forward, "__marked_compile_region_max_reuse_entries__", None)  # since 2.13
    options: Any = {} if limit is None else {"max_reuse_entries": limit}
    return cast(Callable[..., Any], torch.compiler.nested_compile_region(own, **options))


class GraphPass(Protocol):
    """Changes a forward or backward graph. ``uuid`` identifies the pass in on-disk graph caches."""

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str: ...


def find_compiler(
    backend: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> Compiler:
    """Return the function that ``torch.compile`` calls with each graph. There is no public API."""
    if backend == "inductor":
        compiler: Compiler = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        return compiler
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


def with_passes(
    compiler: Compiler,
    backend: Any,
    joint: GraphPass,
    change: GraphPass | None,
) -> Compiler:
    """Return a compiler with passes, for the backends ``"inductor"`` and ``"aot_eager"``. ``joint``
    runs on joint graphs before partitioning; ``change``, if any, runs on forward and backward
    graphs before lowering. Inductor's reordering for peak memory, which runs after all passes and
    would undo ``change``, is disabled unless the user requests it."""
    if backend != "inductor":
        return _changed_aot_eager(joint, change)
    options = dict(compiler.config)  # type: ignore[attr-defined]  # the wrapper's attribute
    passes = {"joint_custom_pre_pass": joint}
    if change is not None:
        options.setdefault("reorder_for_peak_memory", False)
        passes["post_grad_custom_post_pass"] = change
    for name, one in passes.items():
        options[name] = _as_inductors(one, options.get(name))
    dynamic = compiler.dynamic  # type: ignore[attr-defined]
    return cast(Compiler, torch._TorchCompileInductorWrapper(None, options, dynamic))


def _as_inductors(change: GraphPass, chosen: Any) -> Any:
    """Wrap a pass in the class that inductor's caches require; it runs after the user's pass."""
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


def _changed_aot_eager(joint: GraphPass, change: GraphPass | None) -> Compiler:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        if change is not None:
            change(graph.graph)
            graph.recompile()

        def run(arguments: list[Any]) -> Any:
            held = list(arguments)
            arguments.clear()  # so that the caller keeps none of them alive
            return graph(*held)

        run._boxed_call = True  # type: ignore[attr-defined]  # it accepts a list
        return run

    def part(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint(graph.graph)
        graph.recompile()
        return min_cut_rematerialization_partition(graph, *args, **kwargs)

    return cast(Compiler, aot_autograd(fw_compiler=keep, partition_fn=part))


def region_called(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """Return the graph of the region that a node calls, or None."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    body: Any = node.args[0]
    owner: Any = node.graph.owning_module
    return cast(torch.fx.GraphModule, owner.get_submodule(body.target))


def is_view(node: torch.fx.Node) -> bool:
    """Return True if a node of a forward or backward graph returns a view of its first input."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)


def collective_of(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        return target._schema.name.split("::")[1]
    return ""


def operation_of(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return target._schema.name.split("::")[1]
    return ""


def has_effects(node: torch.fx.Node) -> bool:
    """Return True if a graph node may modify its inputs or generate random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    if target.namespace == "_c10d_functional":
        return False
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def switches_gradients(node: torch.fx.Node) -> bool:
    """Return True if a node of a traced graph enables or disables gradient recording."""
    name = getattr(node.target, "__name__", "")
    return name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def switches_off(node: torch.fx.Node) -> bool:
    """Return True if a node for which ``switches_gradients`` is true disables recording."""
    name, args = getattr(node.target, "__name__", ""), node.args
    return args[0] is False if name == "_set_grad_enabled" else name == "_enter_inference_mode"


def views_or_wraps(node: torch.fx.Node) -> bool:
    """Return True if a node of a traced graph indexes a list, creates a DTensor or calls ``to``."""
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return node.target is operator.getitem or name == "prim_from_local"
    return node.op == "call_method" and node.target == "to"


def switches_of_steps() -> AbstractContextManager[Any]:
    """Patch compiler settings for functional steps. The compiler then traces writes to modules
    inside ``torch.utils.checkpoint`` and omits them from recomputation, which is correct because
    parameters are registered before a module runs and dropped afterwards. It also guards on each
    module's hooks. Without these guards, after a graph break, code compiled for a unit without
    hooks could run for a unit with hooks, because all units share one code object for forward."""
    from torch._dynamo.config import patch

    return cast(
        AbstractContextManager[Any],
        patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True, skip_nnmodule_hook_guards=False),
    )


def recompute_in_backward(node: torch.fx.Node) -> None:
    """Mark a node for recomputation with the tags of selective checkpointing. Its region number is
    above the user's numbers, because a tensor used in a later region would be saved instead."""
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30
