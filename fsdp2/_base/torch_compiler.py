"""Private torch API, by subject: the compiler: what it may trace, and the graphs that it makes.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

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


def find_compiler(
    backend: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
    change: Callable[[torch.fx.Graph], None] | None = None,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """Return what ``torch.compile`` would call with each graph. No public way exists.

    ``change`` sees the forward and the backward graph before they are lowered (``"inductor"``) or
    run (``"aot_eager"``).
    """
    if backend == "inductor":
        compiler = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        return compiler if change is None else _changed_inductor(compiler, change)
    if change is None:
        return torch._TorchCompileWrapper(backend, mode, options, dynamic)
    return _changed_aot_eager(change)


def _changed_inductor(
    compiler: Callable[..., Any], change: Callable[[torch.fx.Graph], None]
) -> Callable[..., Any]:
    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        import torch._inductor.config as config

        with config.patch(post_grad_custom_post_pass=change):
            return compiler(graph, inputs)

    return compile_graph


def _changed_aot_eager(change: Callable[[torch.fx.Graph], None]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        change(graph.graph)
        graph.recompile()

        def run(arguments: list[Any]) -> Any:
            held = list(arguments)
            arguments.clear()  # the caller keeps none of them alive
            return graph(*held)

        run._boxed_call = True  # type: ignore[attr-defined]  # says that it takes a list
        return run

    made: Callable[..., Any] = aot_autograd(
        fw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    return made


def collective_of(node: torch.fx.Node) -> str:
    """Return the name of the functional collective that a node is, or an empty string."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        return target._schema.name.split("::")[1]
    return ""


def writes_in_checkpoints() -> AbstractContextManager[Any]:
    """Let the compiler trace writes to modules inside ``torch.utils.checkpoint``.

    Its recomputation leaves them out, which is right for parameters that are registered before a
    module runs and forgotten after it.
    """
    import torch._dynamo.config as config

    patched: AbstractContextManager[Any] = config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True
    )
    return patched


def recompute_in_backward(node: torch.fx.Node) -> None:
    """Let the partitioner compute a node of a compiler's graph again in backward.

    The tags are those of selective checkpointing. The number is larger than that of any region of a
    user's checkpoint, because what is used in a later region would be saved instead.
    """
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30
