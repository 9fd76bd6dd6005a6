"""Passes over a compiler's graphs: when collectives start, and when they are waited for.

Owns the order of nodes. It must not know groups or parameters: it sees the operations of functional
collectives only, so it serves the forward and the backward graph alike.

[Note: prefetch in a graph]
A graph runs its nodes in order. As traced, every all-gather is waited for at once. ``overlap``
moves *starts* up and *waits* down: the all-gather of a unit starts where the unit before it begins
to use its own, so that one is in flight beside the compute and no more than two are whole; a
reduction is waited for where the next one starts, or its result is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.fx import Graph, Node

from fsdp2._base import torch_compiler

_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


def overlap(graph: Graph) -> None:
    """Start each all-gather one group ahead, and wait for every collective where it is needed."""
    sink_waits(graph)
    prefetch_gathers(graph)
    graph.lint()


def sink_waits(graph: Graph) -> None:
    """Move every wait down to the first use of its result, or to where the next reduction starts.

    A reduction holds its input until it is waited for: one is in flight, and the next one's packed.
    """
    next_reduction: Node | None = None
    for node in reversed(list(graph.nodes)):
        if is_reduction(node):
            next_reduction = node
        if torch_compiler.collective_of(node) != "wait_tensor" or not node.users:
            continue
        targets = list(node.users)
        if next_reduction is not None and is_reduction(node.all_input_nodes[0]):
            targets.append(next_reduction)
        position = _positions(graph)
        first = min(targets, key=position.__getitem__)
        if first is not node.next:
            first.prepend(node)


def prefetch_gathers(graph: Graph) -> None:
    """Move every all-gather, and what only it needs, up to the wait of the one before."""
    starts = [node for node in graph.nodes if torch_compiler.collective_of(node) in _GATHERS]
    for before, node in itertools.pairwise(starts):
        target = next(iter(before.users))  # its wait
        inputs = list(_needed(node, {target}))
        if any(needed is target for needed in inputs):
            continue  # it gathers what was just gathered: the second half of a gather in two
        position = _positions(graph)
        if position[target] > position[node]:
            continue
        for needed in [*sorted(inputs, key=position.__getitem__), node]:
            if position[needed] > position[target]:
                target.prepend(needed)


def _needed(node: Node, stop: set[Node], seen: set[Node] | None = None) -> Iterator[Node]:
    """Yield what a node is computed from."""
    seen = set() if seen is None else seen
    for needed in node.all_input_nodes:
        if needed not in seen:
            seen.add(needed)
            if needed not in stop:
                yield from _needed(needed, stop, seen)
            yield needed


def _positions(graph: Graph) -> dict[Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def is_reduction(node: Node) -> bool:
    """True if a node starts a reduction over the shard axis."""
    return torch_compiler.collective_of(node) == "reduce_scatter_tensor"
