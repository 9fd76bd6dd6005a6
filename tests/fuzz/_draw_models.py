"""Hypothesis strategies of models, setups, and of what ranks do in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz._program import Block, Call, Model, Setup

HAVE_ANOTHER_SET = ("linear", "scalars", "row", "branch")
MAX_LAYERS = 6


def mostly(usual: Any, *others: Any, weight: int = 3) -> st.SearchStrategy[Any]:
    """Draw `usual` as often as `weight` others; shrink to it."""
    return st.sampled_from([usual] * (weight if others else 1) + list(others))


# --- setups and models ----------------------------------------------------------------------------


@st.composite
def setups(draw: st.DrawFn, ranks: int) -> Setup:
    tensor = draw(mostly(1, 2, weight=6)) if ranks % 2 == 0 else 1
    data = ranks // tensor
    replicas = draw(mostly(0, *[n for n in (1, 2, 3, 4) if data % n == 0], weight=4))
    shards = data // max(replicas, 1)
    ints = [n for n in (1, 2, 3, 4) if shards % n == 0]
    plain = tensor == 1
    return Setup(
        ranks=ranks,
        replicas=replicas,
        tensor=tensor,
        by_dims=plain and draw(mostly(False, True, weight=8)),
        reshard=draw(mostly(None, True, False, *ints, weight=3)),
        place=draw(mostly("rows", "columns", "whole", "mixed", weight=6)) if plain else "rows",
        precision=draw(mostly("same", "single", "reduce", weight=8)),
        offload=draw(mostly(False, True, weight=12)),
        part_nbytes=draw(mostly(1 << 20, 64, weight=2)),
        optimizer=draw(mostly("sgd", "adamw", "fused", *["torch"] * plain, weight=4)),
    )


@st.composite
def blocks(draw: st.DrawFn, setup: Setup, gain: str, depth: int = 0) -> Block:
    kinds = ["linear", "mlp", "norm", "scalars", "row", "few", "transposed", "branch", "empty"]
    kinds += ["single", "buffer"] if setup.precision == "same" else []
    checkpoint = draw(mostly("no", "saved", *["reentrant"] * (gain == "first"), weight=6))
    boxed = draw(mostly(False, True, weight=6)) if checkpoint != "reentrant" else False
    inner: tuple[Block, ...] = ()
    if depth < 2 and draw(mostly(False, True, weight=3)):
        inner = settled(draw(st.lists(blocks(setup, gain, depth + 1), min_size=1, max_size=2)))
    return Block(
        kind=draw(st.sampled_from(kinds)),
        unit=draw(mostly("own", "none", "body", "conditional", "next", weight=4)),
        hidden=draw(st.sampled_from([5, 1, 2, 7, 12])),
        checkpoint=checkpoint,
        hook=draw(mostly("no", "pre", "post", "tensor", "full", weight=12)),
        boxed=boxed,
        frozen=draw(mostly(False, True, weight=5)),
        inner=inner,
    )


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
        roots=draw(mostly(1, 2, weight=6)) if len(drawn) > 1 else 1,
    )
    return Model(model.blocks, model.width, gain, draw(ties(model, setup)), model.roots)


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
        self.recomputed: set[int] = set()
        self.is_recomputed = any(block.checkpoint != "no" for block in self.layers)
        place = 0
        for index, block in enumerate(model.blocks):
            # Where no gradient goes further, a graph through two roots is cut: docs/differences.md.
            # So is what a frozen unit is given, which needs a gradient on all ranks or on none.
            self._must_agree = model.gain == "last" and (
                index < model.cut < len(model.blocks) or any(block.frozen for block in self.layers)
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
        self.on_all += [(place, way) for way in ("skip", "twice", "detach", "around", "as_input")]
        self.on_all += [(place, "other")] * (2 * other)
        in_place = ["inplace"] if checkpoint == "no" and block.hook == "no" else []
        self.on_all += [(place, way) for way in in_place]
        is_always_called = block.unit != "body" or free
        own = ["around"] * is_always_called
        own += ["other"] * (2 * other * (is_always_called or block.kind != "linear"))
        own += ["skip", "twice"] if skippable else []
        if several or self._must_agree:  # ranks may begin to recompute at other places
            own = []
        elif not self.is_recomputed and self.model.roots == 1:  # as docs/differences.md says
            own += ["detach", *in_place] if is_always_called else []
            own += ["as_input"] if free or not has_units_inside(block) else []
        self.on_one += [(place, way) for way in own]
        at = place + 1
        for inner in block.inner:
            at = self._add(inner, at, free, checkpoint, several)
        return at


def count_units(block: Block) -> int:
    return (block.unit != "none") + sum(map(count_units, block.inner))


def has_units(block: Block) -> bool:
    return block.unit != "none" or has_units_inside(block)


def has_units_inside(block: Block) -> bool:
    return block.unit == "body" or any(has_units(inner) for inner in block.inner)


@st.composite
def calls(draw: st.DrawFn, choices: Choices, alike: bool = False) -> Call:
    ways = []
    for _ in range(draw(mostly(0, 1, 2, weight=2))):
        one = choices.on_one if not alike and draw(st.booleans()) else []
        rank = draw(st.integers(0, choices.setup.data_ranks - 1)) if one else -1
        layer, way = draw(st.sampled_from(one or choices.on_all))
        if all(other != layer for _, other, _ in ways):
            ways.append((rank, layer, way))
    return Call(
        rows=draw(st.sampled_from([2, 1, 3])),
        ways=tuple(ways),
        empty=draw(mostly(-1, *range(choices.setup.data_ranks), weight=8)),
    )
