"""Private torch API for autograd: the running backward, hooks on parameters, version counters.

Comments say why each name is needed. Tested: torch 2.11.0, 2.13.0, 2.15.0. No unit or group code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # for preserved_versions

queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Run a callback after the running backward. There is no public API."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward running in this thread; -1 outside of a backward."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The sequence number of the next node that this thread creates."""

age_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""A node's sequence number; within a thread, later nodes have higher numbers."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The autograd node that is running in this thread, or whose hooks are running."""


def nodes_between(first: int, last: int, node: Any, owner: object) -> Iterator[Any]:
    """Yield a node and its predecessors in a range of sequence numbers, once per ``owner``."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if first <= age_of(node) <= last and owner not in node.metadata:  # leaves: above any range
            node.metadata[owner] = True
            yield node
            waiting.extend(before for before, _ in node.next_functions if before is not None)


def node_before(number: int, tensor: torch.Tensor) -> Any:
    """Return the first node in a tensor's history whose number is below ``number``, or None."""
    node = tensor.grad_fn
    while node is not None and age_of(node) >= number:
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def computes_gradient(param: torch.Tensor) -> bool:
    """Return True if the running backward computes a leaf's gradient. There is no public API. For a
    leaf that was passed to ``torch.autograd.grad``, the engine raises an error: return True."""
    accumulate = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return True


base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
gradient_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""A leaf's ``register_hook`` hooks, or None."""

accumulate_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""A leaf's ``register_post_accumulate_grad_hook`` hooks, or None."""


def apply_gradient_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a leaf's ``register_hook`` hooks, as autograd does for gradients that it computes."""
    for hook in (param._backward_hooks or {}).values():
        replaced = hook(grad)
        if replaced is not None:
            grad = replaced
    return grad


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Run a leaf's ``register_post_accumulate_grad_hook`` hooks, as autograd does."""
    for hook in tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the user's hooks from a parameter to its replacement."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


@torch.inference_mode(False)
def accumulators_of(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the gradient accumulators of leaves; each keeps its leaf alive."""
    edge = torch.autograd.graph.get_gradient_edge
    return [edge(t).node for t in tensors if t is not None and t.requires_grad]


packing_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the innermost saved-tensor hooks, or None. Call it with False."""

packing_is_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]  # not in the type stub
"""Return False if saved-tensor hooks would raise an error, as in some transforms."""


@contextmanager
def without_packing() -> Iterator[None]:
    """Temporarily pop all saved-tensor hooks. A ``Work`` captures the state of the issuing thread,
    including these hooks, which keep a graph alive. Gloo's thread releases a ``Work`` only some
    time after completion. The graph would stay alive until then, and that thread might free the
    user's hooks."""
    autograd: Any = torch._C._autograd  # the type stub lacks some names
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
    """Pop the innermost saved-tensor hooks with this pack function; keep the others."""
    autograd: Any = torch._C._autograd  # the type stub lacks two names
    inside: list[Any] = []
    while (top := packing_hooks(False)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        if top[0] == pack:
            break
        inside.append(top)
    for pair in reversed(inside):
        autograd._push_saved_tensors_default_hooks(*pair)


def may_pack_saved_tensors(own: Callable[..., Any] | None) -> bool:
    """Return True if new saved-tensor hooks would shadow no hooks but those that call ``own``."""
    if not packing_is_enabled():
        return False
    top = packing_hooks(False)
    return top is None or top[0] == own


def is_in_checkpoint() -> bool:
    """Return True if the innermost saved-tensor hooks are those of ``torch.utils.checkpoint``."""
    top = packing_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def own_grad_dtype(param: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Return whether ``grad_dtype`` was set (before torch 2.15: was changed), and its value."""
    is_set = getattr(param, "_has_grad_dtype_override", None)
    dtype = param.grad_dtype
    return (dtype is not param.dtype if is_set is None else bool(is_set)), dtype


version_of = attrgetter("_version")
"""A tensor's version counter; read in C, because a step reads hundreds of them."""

preserved_versions: Callable[..., AbstractContextManager[Any]] = _unsafe_preserve_version_counter
"""Context manager that hides in-place writes from autograd; used to restore saved values."""
