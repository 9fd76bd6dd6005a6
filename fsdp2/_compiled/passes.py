"""The order of nodes in a compiler's graphs: where collectives start, and where they end.

Owns two passes. ``place_gathers`` works on the graph that was traced, for every backend: a unit is
gathered where it is first used. ``Overlapped`` works on the forward and the backward graph that a
compiler made of it, and lets collectives run beside the compute. They must not know groups or
parameters: they see the operations of functional collectives only.

[Note: overlap in a graph]
A graph runs its nodes in order, and as traced every collective is waited for at once. The pass
writes the order anew. Compute keeps its own. Views of what a collective returned, and its waits,
come where something needs them. An all-gather starts where the one ``prefetch`` before it is
first needed, so that it runs beside the compute in between, and as many more units are whole. A
reduction is waited for where its result is needed or where the one ``reductions`` after it
starts: until then it holds its input. There a reduction over replicas starts, which is waited for
as many reductions later. What else is done with a reduced gradient waits with it.

With ``prefetch`` or ``reductions`` 0 the collective is waited for where it starts, as in eager
mode: these are the numbers of the memory setting.
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
    """A gather of a traced graph: by which plan, and which of the graph's inputs it is of."""

    key: str
    place: int | None  # None: it is in a graph inside of the graph


def place_gathers(graph: GraphModule) -> list[Gathered]:
    """Gather each unit where it is first used, in all graphs inside too; return what is gathered.

    Backward gathers again what its unit does not keep. What is used nowhere is not gathered.
    """
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
    """Move gathers, and what only views or wraps the result, down to their first use."""
    held: set[Node] = set()
    for node in graph.nodes:
        gathers = _is_operation(node, unshard) or _is_operation(node, outer_gather)
        views = torch_compiler.views_or_wraps(node)
        if gathers or (views and any(one in held for one in node.all_input_nodes)):
            held.add(node)
    _emit(graph, Order(held, _used_in_modes(graph, held)))


def _used_in_modes(graph: Graph, held: set[Node]) -> dict[Node, list[Node]]:
    """Return, for each node that switches gradients off, what is used from there to the next one.

    A gather that was recorded must not come where nothing is.
    """
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
    """How nodes are placed anew: all others keep their order."""

    held: set[Node]  # each comes where something needs it
    before: dict[Node, list[Node]]  # what is to come before a node, beside what it is computed from
    first: list[Node] = field(default_factory=list)  # before everything but inputs


def _emit(graph: Graph, order: Order) -> None:
    """Write a graph's nodes in an order."""
    done: set[Node] = set()
    asked: set[Node] = set()
    placed: list[Node] = []

    def emit(wanted: Node) -> None:
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            ahead = [] if node in asked else order.before.get(node, [])
            asked.add(node)  # once: what it wishes may need the node itself
            needed = [one for one in (*ahead, *node.all_input_nodes) if one not in done]
            if needed:
                stack.extend(reversed(needed))
                continue
            stack.pop()
            done.add(node)
            placed.append(node)

    nodes = list(graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            emit(node)
    for node in order.first:
        emit(node)
    output = nodes[-1]
    for node in nodes[:-1]:
        if node not in order.held:
            emit(node)
    emit(output)
    for node in nodes[:-1]:  # held for nobody: what only has an effect, as a wait has
        if node not in done:
            emit(node)
    placed.remove(output)
    for node in placed:
        output.prepend(node)


class SeenThrough:
    """A pass over the graph of forward and backward: no region hands over views of its inputs.

    A region of the forward saves for backward what its backward needs: of a weight, a view. So a
    partitioner would keep the weight, whole, where it can gather it again. Outside of the region
    the same view is made of what the region got.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            region = torch_compiler.region_called(node)
            if region is None:
                continue
            bodys = list(region.graph.nodes)
            inputs = dict(
                zip((n for n in bodys if n.op == "placeholder"), node.args[2:], strict=True)
            )
            outputs = bodys[-1].args[0]
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
        """Say what the pass does: its source."""
        return SOURCE


class Overlapped:
    """A pass over a forward or a backward graph: see [Note: overlap in a graph].

    Compilers that keep graphs on disk ask ``uuid`` what it does.
    """

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap

    def __call__(self, graph: Graph) -> None:
        _emit(graph, overlapped(list(graph.nodes), self.overlap))
        graph.lint()

    def uuid(self) -> str:
        """Say what the pass does: its source, and how much overlap."""
        return f"{SOURCE} {self.overlap.prefetch} {self.overlap.reductions}"


@dataclass
class Found:
    """The collectives of a graph, and what is computed around them."""

    gathers: list[Node] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    of: dict[Node, Node] = field(default_factory=dict)  # by a wait, or what is behind: which one
    free: set[Node] = field(default_factory=set)  # computed from inputs only
    gathered: set[Node] = field(default_factory=set)  # views and copies of what came, and starts
    reduced: set[Node] = field(default_factory=set)  # computed from reductions only


def find(nodes: Iterable[Node]) -> Found:
    """Sort the nodes of a graph."""
    found = Found()
    free, gathered, of = found.free, found.gathered, found.of
    known: set[Node] = set()  # reductions, and what is computed from them
    for node in nodes:
        kind = torch_compiler.collective_of(node).removesuffix("_coalesced")
        inputs = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
            continue
        if node.op != "call_function" or torch_compiler.has_effects(node):
            continue
        one = next((of[needed] for needed in inputs if needed in of), None)
        # What gathers what was gathered stays: to start it ahead would wait for the other.
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
    """Return the order of [Note: overlap in a graph]."""
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
    """Return the gathers in the order in which they are needed."""
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
    """Return, for the start of a reduction, what of earlier ones has to be over before."""
    places = {start: place for place, start in enumerate(found.reductions)}
    ends: dict[Node, list[Node]] = {}
    stages: dict[Node, int] = {}  # of what is reduced over replicas too: 1 from its wait on
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
    """Return what of ``known`` nodes is computed, and only computed, for these."""
    found: set[Node] = set()
    stack = [one for start in starts for one in start.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in found or node in starts or node not in known or node.op == "placeholder":
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


_MOVES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "slice",
        "narrow",
        "select",
        "split",
        "split_with_sizes",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "as_strided",
        "alias",
        "detach",
        "clone",
        "_to_copy",
        "convert_element_type",
        "constant_pad_nd",
        "cat",
        "copy",
    ]
)


def _moves_only(node: Node, kind: str) -> bool:
    """True if a node computes nothing: a wait, a view, a copy, a cast."""
    if kind == "wait_tensor" or node.target is operator.getitem:
        return True
    return torch_compiler.operation_of(node) in _MOVES


def _nbytes_sent(start: Node) -> int:
    values = [one.meta.get("val") for one in start.all_input_nodes]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
