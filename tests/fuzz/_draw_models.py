"""Hypothesis strategies of models, setups, and of what ranks do in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz._program import IN_PLACE, OPAQUE, SOLVERS, Block, Call, Model, Setup

HAVE_ANOTHER_SET = ("linear", "scalars", "row", "branch")
MAX_LAYERS = 6
Pinned = tuple[tuple[str, Any], ...]
"""Fields of a `Setup`, and their values."""


def mostly(usual: Any, *others: Any, weight: int = 3) -> st.SearchStrategy[Any]:
    """Draw `usual` as often as `weight` others; shrink to it."""
    return st.sampled_from([usual] * (weight if others else 1) + list(others))


# --- setups and models ----------------------------------------------------------------------------


@st.composite
def setups(draw: st.DrawFn, ranks: int, pinned: Pinned = ()) -> Setup:
    """Draw a setup; `pinned` are the fields that are not drawn."""
    given = dict(pinned)

    def field(name: str, *usual_and_others: Any, weight: int) -> Any:
        return given.get(name, draw(mostly(*usual_and_others, weight=weight)))

    tensor = field("tensor", 1, *[2] * (ranks % 2 == 0), weight=6)
    data = ranks // tensor
    replicas = field("replicas", 0, *[n for n in (1, 2, 3, 4) if data % n == 0], weight=4)
    shards = data // max(replicas, 1)
    plain = tensor == 1
    places = ["columns", "whole", "mixed"] if plain else []
    ints = [n for n in (1, 2, 3, 4) if shards % n == 0]
    return Setup(
        ranks=ranks,
        replicas=replicas,
        tensor=tensor,
        by_dims=field("by_dims", False, *[True] * plain, weight=8),
        reshard=field("reshard", None, True, False, *ints, weight=3),
        place=field("place", "rows", *places, weight=6),
        precision=field("precision", "same", "single", "reduce", "half", weight=8),
        offload=field("offload", False, True, weight=12),
        part_nbytes=field("part_nbytes", 1 << 20, 64, weight=2),
        optimizer=field("optimizer", "sgd", "adamw", "fused", *["torch"] * plain, weight=4),
    )


@st.composite
def blocks(draw: st.DrawFn, setup: Setup, gain: str, depth: int = 0) -> Block:
    kinds = ["linear", "mlp", "norm", "scalars", "row", "few", "transposed", "branch", "empty"]
    kinds += ["single", "buffer"] if setup.precision == "same" else []
    checkpoint = "no"
    if setup.precision != "half":  # the plain model has other values then, but not in backward
        checkpoint = draw(mostly("no", "saved", *["reentrant"] * (gain == "first"), weight=6))
    hook = draw(mostly("no", "pre", "post", "tensor", "full", weight=12))
    box = draw(mostly("no", *boxes(checkpoint, hook), weight=12))
    is_plain = checkpoint == hook == "no" and box not in ("dict", "list")
    inner: tuple[Block, ...] = ()
    if depth < 2 and draw(mostly(False, True, weight=3)):
        inner = settled(draw(st.lists(blocks(setup, gain, depth + 1), min_size=1, max_size=2)))
    return Block(
        kind=draw(st.sampled_from(kinds)),
        unit=draw(mostly("own", "none", "body", "conditional", "next", weight=4)),
        hidden=draw(st.sampled_from([5, 1, 2, 7, 12])),
        checkpoint=checkpoint,
        hook=hook,
        box=box,
        hides=draw(mostly("no", *OPAQUE, weight=100)) if is_plain else "no",
        frozen=draw(mostly(False, True, weight=5)),
        inner=inner,
    )


def boxes(checkpoint: str, hook: str) -> list[str]:
    """Return what a layer may be given its input in."""
    if checkpoint == "reentrant":
        return []
    # Hooks look into dicts only, and a recomputation finds a generator used.
    return ["dict", "dict", *["list", *OPAQUE] * (checkpoint == hook == "no")]


def settled(drawn: Sequence[Block]) -> tuple[Block, ...]:
    """Return siblings of which each that is a unit with the next one has one."""
    found: list[Block] = []
    for block in drawn:
        follows = bool(found) and found[-1].unit == "next"
        found.append(replace(block, unit="own") if follows else block)
    if found[-1].unit == "next":
        found[-1] = replace(found[-1], unit="own")
    return tuple(found)


@st.composite
def models(draw: st.DrawFn, setup: Setup) -> Model:
    gain = draw(mostly("first", "last", weight=3))
    drawn = draw(st.lists(blocks(setup, gain), min_size=1, max_size=4))
    while len(drawn) > 1 and len(Model(tuple(drawn)).layers()) > MAX_LAYERS:
        drawn.pop()
    model = Model(
        blocks=settled(drawn),
        width=draw(st.sampled_from([4, 1, 3, 5, 8, 13])),
        gain=gain,
        roots=draw(mostly(1, 2, weight=3)) if len(drawn) > 1 else 1,
        hides=draw(mostly("no", "attribute", *OPAQUE, weight=60)),
    )
    return replace(model, tied=draw(ties(model, setup)))


@st.composite
def ties(draw: st.DrawFn, model: Model, setup: Setup) -> tuple[tuple[int, int], ...]:
    layers = model.layers()
    same = [
        (i, j)
        for j, two in enumerate(layers)
        for i, one in enumerate(layers[:j])
        if one.kind == two.kind and one.hidden == two.hidden and one.kind != "empty"
        if not (setup.tensor > 1 and one.kind == "mlp")
    ]
    if not same or model.roots == 2 or not draw(mostly(False, True, weight=2)):
        return ()
    return (draw(st.sampled_from(same)),)


# --- what ranks do in a forward -------------------------------------------------------------------


class Choices:
    """Which ways a layer of a model may go, on all ranks and on one."""

    def __init__(self, model: Model, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.layers = model.layers()
        self.on_all: list[tuple[int, str]] = []
        self.on_one: list[tuple[int, str]] = []
        self.writing: list[tuple[int, str]] = []  # on all, where a graph holds nothing older
        self.solvers: list[tuple[int, str]] = []  # on all, where nobody differs
        self.recomputed: set[int] = set()
        self.inside: dict[int, range] = {}  # the layers inside of each
        self.has_frozen = any(block.frozen for block in self.layers)
        self.is_recomputed = any(block.checkpoint != "no" for block in self.layers)
        place = 0
        for index, block in enumerate(model.blocks):
            # Where no gradient goes further, a graph through two roots is cut: docs/differences.md.
            # So is what a frozen unit is given, which needs a gradient on all ranks or on none.
            self._must_agree = model.gain == "last" and (
                index < model.cut < len(model.blocks) or self.has_frozen
            )
            place = self._add(block, place, False, "no", False)

    def _add(self, block: Block, place: int, free: bool, checkpoint: str, several: bool) -> int:
        """Add the layers of a block; `several`: inside of a checkpoint of several units."""
        free = free or block.unit == "conditional"
        if block.checkpoint != "no":
            checkpoint = block.checkpoint
            several = several or count_units(block) > 1
        if checkpoint != "no":
            self.recomputed.add(place)
        skippable = free or not has_units(block)
        other = block.kind in HAVE_ANOTHER_SET
        self.on_all += [(place, way) for way in ("skip", "twice", "detach", "around")]
        if block.hook != "tensor":  # which would be on its input: docs/differences.md
            self.on_all.append((place, "as_input"))
        self.on_all += [(place, "other")] * (2 * other)
        self.on_all += [(place, "fed")] * (checkpoint == "no")
        in_place = IN_PLACE if checkpoint == "no" and block.hook == "no" else ()
        self.on_all += [(place, way) for way in in_place]
        if not self.is_recomputed:
            self.on_all.append((place, "aside"))
            if self.setup.precision != "half":  # what a solver makes of roundings is far off
                self.solvers += [(place, way) for way in SOLVERS]
        # Where its unit is inside of it, a layer would write to the shard.
        if self.setup.precision == "same" and self.setup.tensor == 1 and not self.model.tied:
            if block.kind != "empty" and block.unit != "body":
                self.writing.append((place, "clamps"))
            if block.kind == "buffer":
                self.writing.append((place, "clamps_buffer"))
        is_always_called = block.unit != "body" or free
        own = ["around"] * is_always_called
        own += ["other"] * (2 * other * (is_always_called or block.kind != "linear"))
        own += ["skip", "twice"] if skippable else []
        if several or self._must_agree:  # ranks may begin to recompute at other places
            own = []
        elif not self.is_recomputed and self.model.roots == 1:  # as docs/differences.md says
            own += ["detach", *in_place] if is_always_called else []
            is_hooked = block.hook == "tensor"
            own += ["as_input"] if (free or not has_units_inside(block)) and not is_hooked else []
        self.on_one += [(place, way) for way in own]
        at = place + 1
        for inner in block.inner:
            at = self._add(inner, at, free, checkpoint, several)
        self.inside[place] = range(place + 1, at)
        return at

    def is_cut_off(self, place: int, ways: Sequence[tuple[int, int, str]]) -> bool:
        """True if the output of a layer around this one has no part in the loss.

        A loss that this one keeps is then the only way in, which is found if the first forward
        has it: docs/differences.md.
        """
        return any(way == "detach" and place in self.inside[layer] for _, layer, way in ways)


def count_units(block: Block) -> int:
    return (block.unit != "none") + sum(map(count_units, block.inner))


def has_units(block: Block) -> bool:
    return block.unit != "none" or has_units_inside(block)


def has_units_inside(block: Block) -> bool:
    return block.unit == "body" or any(has_units(inner) for inner in block.inner)


@st.composite
def calls(
    draw: st.DrawFn,
    choices: Choices,
    alike: bool = False,
    solves: bool = False,
    writes: bool = False,
    empties: bool = True,
) -> Call:
    ways: list[tuple[int, int, str]] = []
    if solves and choices.solvers and draw(mostly(False, True, weight=12)):
        ways.append((-1, *draw(st.sampled_from(choices.solvers))))
        alike = True
    if writes and choices.writing and draw(mostly(False, True, weight=20)):
        ways.append((-1, *draw(st.sampled_from(choices.writing))))
    is_solved = any(way in SOLVERS for _, _, way in ways)
    for _ in range(draw(mostly(0, 1, 2, 3, weight=3))):
        one = choices.on_one if not alike and draw(st.booleans()) else []
        rank = draw(st.integers(0, choices.setup.data_ranks - 1)) if one else -1
        layer, way = draw(st.sampled_from(one or choices.on_all))
        if is_solved and way == "aside":  # which would free what is solved with
            continue
        if all(other != layer for _, other, _ in ways):
            ways.append((rank, layer, way))
    written = {layer for _, layer, way in ways if (layer, way) in choices.writing}
    ways = [
        (rank, layer, way)
        for rank, layer, way in ways
        if (way != "aside" or not choices.is_cut_off(layer, ways))
        # all ranks have to write, or none
        and (way != "skip" or rank == -1 or written.isdisjoint(choices.inside[layer]))
    ]
    if choices.has_frozen and any(way == "fed" for _, _, way in ways):
        # Else what is inside may need a gradient on some ranks only: docs/differences.md.
        ways = [each for each in ways if each[0] == -1]
    return Call(
        rows=draw(st.sampled_from([2, 1, 3])),
        ways=tuple(ways),
        empty=draw(mostly(-1, *range(choices.setup.data_ranks), weight=8)) if empties else -1,
    )
