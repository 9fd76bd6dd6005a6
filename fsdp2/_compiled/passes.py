"""The order of nodes in a compiler's graphs: where collectives start and end.

Owns the passes over graphs with functional collectives. Independent of groups and parameters.
For every backend, ``place_gathers`` moves each unit's gather to the first use of its result.
``Overlapped`` overlaps collectives with compute in the forward and backward graphs.

[Note: overlap in a graph]
A graph runs its nodes in order. In a traced graph, each collective is directly followed by its
wait. The pass keeps the order of compute nodes and moves other nodes. Waits, and views of a
collective's result, move to their first use. Each all-gather starts where the graph first uses the
result of the all-gather ``prefetch`` positions earlier, and overlaps with compute until the first
use of its own result. This keeps ``prefetch`` more units unsharded. The wait for a reduction frees
the reduction's input. This wait moves to the first use of the reduction's result or to the start of
the reduction ``reductions`` positions later, whichever comes first. An all-reduce over replicas
starts at this wait. The wait for the all-reduce, and then the processing of the gradient, follow
``reductions`` positions later. The memory setting determines both numbers; 0 disables overlap.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from fsdp2._compiled.ops import outer_gather, unshard
from fsdp2._compiled.plan import SOURCE, plans
from fsdp2._core.base import torch_compiler
from fsdp2._core.base.policy import Overlap
from fsdp2._core.params.reduce import SMALL_NBYTES

_SECOND = ("all_reduce", "all_reduce_coalesced")


@dataclass(frozen=True)
class Gathered:
    """A gather in a traced graph."""

    key: str  # key of the gather's plan
    place: int | None  # index of the graph input that it gathers; None in a nested graph


def place_gathers(graph: GraphModule) -> list[Gathered]:
    """Move gathers to their first use and remove unused gathers, also in nested graphs; return the
    rest. Gathers of units that reshard after forward are marked for recomputation in backward."""
    found: list[Gathered] = []
    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in reversed(list(module.graph.nodes)):
            if not _is_operation(node, unshard):
                continue
            if all(not user.users for user in node.users):
                for user in [*node.users, node]:
                    module.graph.erase_node(user)
            elif plans[node.args[0]].recompute:
                torch_compiler.recompute_in_backward(node)
        _sink(module.graph)
        module.recompile()
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        places = {node: place for place, node in enumerate(inputs)} if module is graph else {}
        for node in module.graph.nodes:
            if _is_operation(node, unshard):
                found.append(Gathered(str(node.args[0]), places.get(node.args[-1][0])))
    return found


def _is_operation(node: Node, packet: object) -> bool:
    target = node.target
    return target is packet or getattr(target, "overloadpacket", None) is packet


def _sink(graph: Graph) -> None:
    """Move gathers, and views or wrappers of their results, down to their first use."""
    held: set[Node] = set()
    for node in graph.nodes:
        gathers = _is_operation(node, unshard) or _is_operation(node, outer_gather)
        views = torch_compiler.views_or_wraps(node)
        if gathers or (views and any(one in held for one in node.all_input_nodes)):
            held.add(node)
    _emit(graph, Order(held, _used_in_modes(graph, held)))


def _used_in_modes(graph: Graph, held: set[Node]) -> dict[Node, list[Node]]:
    """Map each node that turns grad mode off to the ``held`` nodes used before the mode is switched
    again. A gather that autograd records must not move into a range where grad mode is off."""
    used: dict[Node, list[Node]] = {}
    switch: Node | None = None
    for node in graph.nodes:
        if torch_compiler.switches_gradients(node):
            switch = node if torch_compiler.switches_off(node) else None
        elif switch is not None and node not in held:
            used.setdefault(switch, []).extend(one for one in node.all_input_nodes if one in held)
    return used


@dataclass(frozen=True)
class Order:
    """A new placement of some nodes; the others keep their order."""

    held: set[Node]  # placed where they are first needed
    before: dict[Node, list[Node]]  # predecessors of a node, in addition to its inputs
    first: list[Node] = field(default_factory=list)  # placed right after the graph's inputs


def _emit(graph: Graph, order: Order) -> None:
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    others = [node for node in nodes if node not in order.held]
    # at the end: held nodes without users, such as waits
    stack = [*inputs, *order.first, *others, *nodes][::-1]
    placed: dict[Node, None] = {}  # an ordered set
    asked: set[Node] = set()
    while stack:
        node = stack[-1]
        if node in placed:
            stack.pop()
            continue
        ahead = [] if node in asked else order.before.get(node, [])
        asked.add(node)  # add ``ahead`` only once: its nodes may depend on ``node``
        needed = [one for one in (*ahead, *node.all_input_nodes) if one not in placed]
        if needed:
            stack.extend(reversed(needed))
        else:
            placed[stack.pop()] = None
    output = nodes[-1]
    del placed[output]
    for node in placed:
        output.prepend(node)


class SeenThrough:
    """A pass over the joint graph of forward and backward. It keeps regions from returning views of
    their inputs: if a region saved a view of a weight for its backward, the partitioner would keep
    the unsharded weight. The pass recreates the view outside of the region, from the input."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            region = torch_compiler.region_called(node)
            if region is None:
                continue
            inner = list(region.graph.nodes)
            placeholders = [one for one in inner if one.op == "placeholder"]
            inputs = dict(zip(placeholders, node.args[2:], strict=True))
            outputs = inner[-1].args[0]
            for user in list(node.users):
                if user.target is operator.getitem:
                    found = outputs[user.args[1]]
                    if isinstance(found, Node):
                        self._replace(user, found, dict(inputs))
        graph.lint()

    def _replace(self, user: Node, found: Node, known: dict[Node, Node]) -> None:
        chain = [found]
        while chain[-1] not in known:
            if not torch_compiler.is_view(chain[-1]) or len(chain[-1].all_input_nodes) != 1:
                return
            chain.append(chain[-1].all_input_nodes[0])
        with user.graph.inserting_before(user):
            for inner in reversed(chain[:-1]):
                known[inner] = user.graph.node_copy(inner, known.__getitem__)
        user.replace_all_uses_with(known[found])
        user.graph.erase_node(user)

    def uuid(self) -> str:
        return SOURCE


class Overlapped:
    """A pass over a forward or a backward graph: see [Note: overlap in a graph]. ``uuid`` is part
    of the key of the compiler's on-disk cache."""

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap

    def __call__(self, graph: Graph) -> None:
        _emit(graph, overlapped(list(graph.nodes), self.overlap))
        graph.lint()

    def uuid(self) -> str:
        return f"{SOURCE} {self.overlap.prefetch} {self.overlap.reductions}"


@dataclass
class Found:
    """The collectives of a graph, and the nodes around them."""

    gathers: list[Node] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    of: dict[Node, Node] = field(default_factory=dict)  # the collective that a node depends on
    free: set[Node] = field(default_factory=set)  # nodes computed from inputs only
    gathered: set[Node] = field(default_factory=set)  # gathers; views and copies of their results
    reduced: set[Node] = field(default_factory=set)  # nodes computed from reductions only


def find(nodes: Iterable[Node]) -> Found:
    found = Found()
    free, gathered, of = found.free, found.gathered, found.of
    known: set[Node] = set()  # reductions, and nodes computed from them
    for node in nodes:
        kind = torch_compiler.collective_of(node).removesuffix("_coalesced")
        inputs = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
            continue
        if node.op != "call_function" or torch_compiler.has_effects(node):
            continue
        one = next((of[needed] for needed in inputs if needed in of), None)
        # A gather of gathered values stays in place: it depends on another gather.
        if kind == "all_gather_into_tensor" and _all_in(inputs, free):
            found.gathers.append(node)
            of[node] = node
            gathered.add(node)
        elif kind in ("reduce_scatter_tensor", "all_to_all_single") and one is None:
            found.reductions.append(node)
            of[node] = node
            known.add(node)
        elif one is not None and one in gathered:
            if _moves_only(node, kind) and _all_in(inputs, free, gathered):
                of[node] = one
                gathered.add(node)
        elif one is not None and _all_in(inputs, known):
            of[node] = max((of[needed] for needed in inputs), key=found.reductions.index)
            found.reduced.add(node)
            known.add(node)
        elif inputs and _all_in(inputs, free) and _moves_only(node, kind):
            free.add(node)
    return found


def overlapped(nodes: list[Node], overlap: Overlap) -> Order:
    """Return the order that [Note: overlap in a graph] describes."""
    found, depth = find(nodes), overlap.prefetch
    starts = set(found.gathers)
    held = found.gathered - starts
    if depth:
        held |= starts | _cone(starts, found.free)
    if overlap.reductions:
        held |= found.reduced
    gathers = _by_use(found, nodes, held)
    place = {gather: place for place, gather in enumerate(gathers)}
    before = _ends(found, nodes, overlap.reductions) if overlap.reductions else {}
    for node in found.gathered - starts:
        at = place[found.of[node]]
        before[node] = gathers[at : at + 1 + depth]
    return Order(held, before, gathers[:depth])


def _by_use(found: Found, nodes: list[Node], held: set[Node]) -> list[Node]:
    """Return the gathers in the order of their first use."""
    first: dict[Node, int] = {}
    for position, node in enumerate(nodes):
        if node in held:
            continue
        seen: set[Node] = set()
        stack = [one for one in node.all_input_nodes if one in found.of]
        while stack:
            one = stack.pop()
            if one not in seen:
                seen.add(one)
                first.setdefault(found.of[one], position)
                stack.extend(needed for needed in one.all_input_nodes if needed in found.of)
    return sorted(found.gathers, key=lambda gather: first.get(gather, len(nodes)))


def _ends(found: Found, nodes: list[Node], reductions: int) -> dict[Node, list[Node]]:
    """Map the start of a reduction to the nodes of earlier reductions that must run before it."""
    places = {start: place for place, start in enumerate(found.reductions)}
    ends: dict[Node, list[Node]] = {}
    stages: dict[Node, int] = {}  # number of all-reduces over replicas before a node
    for node in nodes:
        if node not in found.reduced:
            continue
        start = found.of[node]
        stages[node] = max(
            stages.get(one, 0) + (torch_compiler.collective_of(one) in _SECOND)
            for one in node.all_input_nodes
        )
        limit = reductions + (_nbytes_sent(start) < SMALL_NBYTES)
        behind = places[start] + limit * (1 + stages[node])
        if behind < len(found.reductions):
            ends.setdefault(found.reductions[behind], []).append(node)
    return ends


def _all_in(nodes: Iterable[Node], *known: set[Node]) -> bool:
    return all(any(node in one for one in known) for node in nodes)


def _cone(starts: set[Node], known: set[Node]) -> set[Node]:
    """Return the ``known`` nodes that are inputs of ``starts``, directly or indirectly."""
    found: set[Node] = set()
    stack = [one for start in starts for one in start.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in found or node in starts or node not in known or node.op == "placeholder":
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


_MOVES = (
    "view", "_unsafe_view", "reshape", "slice", "narrow", "select", "split", "split_with_sizes",
    "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "as_strided", "alias", "detach",
    "clone", "_to_copy", "convert_element_type", "constant_pad_nd", "cat", "copy",
)  # fmt: skip


def _moves_only(node: Node, kind: str) -> bool:
    """Return True if a node does no arithmetic: a wait, a view, a copy, or a cast."""
    is_trivial = kind == "wait_tensor" or node.target is operator.getitem
    return is_trivial or torch_compiler.operation_of(node) in _MOVES


def _nbytes_sent(start: Node) -> int:
    values = [one.meta.get("val") for one in start.all_input_nodes]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
