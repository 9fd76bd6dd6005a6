"""Private torch API, by subject: autograd: the running backward, hooks of parameters, versions.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # for preserved_versions

# Autograd.


queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Let the engine call something once the running backward is over. No public way exists."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The running backward's number in this thread, -1 outside of any."""


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that autograd gives to the next node that this thread makes."""

age_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of a node: of two of one thread, the one with the higher is younger."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of autograd that is running, or whose hooks are, in this thread."""


def nodes_between(first: int, last: int, node: Any, owner: object) -> Iterator[Any]:
    """Walk from a node to those that made its inputs, as far as their numbers are in a range.

    Yields each node once for an owner, and none that accumulates the gradient of a leaf.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        is_outside = not first <= age_of(node) <= last  # a leaf's has the highest number there is
        if is_outside or owner in node.metadata:
            continue
        node.metadata[owner] = True
        yield node
        waiting.extend(before for before, _ in node.next_functions if before is not None)


def node_before(number: int, tensor: torch.Tensor) -> Any:
    """Return the node of a tensor's history from before the one of a number. None: there is none.

    An update in place makes a node whose first edge leads to the history until then.
    """
    node = tensor.grad_fn
    while node is not None and age_of(node) >= number:
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def computes_gradient(param: torch.Tensor) -> bool:
    """True if the running backward computes the gradient of a leaf. The public API does not tell.

    The engine refuses to answer about leaves that ``torch.autograd.grad`` was asked for by name.
    """
    accumulate = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return True


base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of."""


def apply_gradient_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a leaf's ``register_hook`` hooks, which autograd runs for gradients that it computes."""
    for hook in (param._backward_hooks or {}).values():
        replaced = hook(grad)
        if replaced is not None:
            grad = replaced
    return grad


gradient_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks that ``register_hook`` left on a leaf, or None."""

accumulate_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks that ``register_post_accumulate_grad_hook`` left on a leaf, or None."""


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Run a leaf's ``register_post_accumulate_grad_hook`` hooks, as autograd would."""
    for hook in tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give hooks that the user put on a parameter to the one that takes its place."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


@torch.inference_mode(False)
def accumulators_of(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the nodes that accumulate the gradients of leaves; each owns its leaf."""
    edge = torch.autograd.graph.get_gradient_edge
    return [edge(t).node for t in tensors if t is not None and t.requires_grad]


packing_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the innermost hooks on saved tensors, if any, as under checkpointing. Give it False."""


@contextmanager
def without_packing() -> Iterator[None]:
    """Take hooks on saved tensors off their stack for a while.

    A work holds the state of the thread that issued it, these hooks with it, and they own a graph.
    Gloo's own thread lets go of a work some time after it has ended: until then the graph would
    live, and hooks of the user's might be freed in that thread.
    """
    autograd: Any = torch._C._autograd  # its stub lacks names
    hooks = []
    while (top := packing_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


def stop_packing(pack: Callable[..., Any]) -> None:
    """Take the innermost hooks on saved tensors off their stack that pack so; others stay."""
    autograd: Any = torch._C._autograd  # its stub lacks two of the names
    inside: list[Any] = []
    while (top := packing_hooks(False)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        if top[0] == pack:
            break
        inside.append(top)
    for pair in reversed(inside):
        autograd._push_saved_tensors_default_hooks(*pair)


def may_pack_saved_tensors(own: Callable[..., Any] | None) -> bool:
    """True if hooks on saved tensors would hide none, or only those that pack by ``own``."""
    autograd: Any = torch._C._autograd  # its stub lacks a name
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    top = packing_hooks(False)
    return top is None or top[0] == own


packing_is_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]  # its stub lacks it
"""False where hooks on saved tensors would raise, as in some transforms."""


def is_in_checkpoint() -> bool:
    """True if the innermost hooks on saved tensors are those of ``torch.utils.checkpoint``."""
    top = packing_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def own_grad_dtype(param: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Return whether somebody set ``grad_dtype`` on a leaf, and what it is.

    Before torch 2.15 one that is set to the leaf's own dtype looks like none.
    """
    is_set = getattr(param, "_has_grad_dtype_override", None)
    dtype = param.grad_dtype
    return (dtype is not param.dtype if is_set is None else bool(is_set)), dtype


version_of = attrgetter("_version")
"""How often a tensor was written in place; for ``map``: a step asks for hundreds."""


preserved_versions: Callable[..., AbstractContextManager[Any]] = _unsafe_preserve_version_counter
"""Hide in-place writes from autograd: what it saved is being filled again with its values."""
