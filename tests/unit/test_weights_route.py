"""`fsdp2.weights`: layouts and routes: every byte once, none missing, in bounded memory."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.rows import EVERYTHING, Deal
from fsdp2._core.params.layout import align
from fsdp2._core.transfer.chunk_plan import Blocks, CutOf, overlap
from fsdp2.weights import Box, Figures, Spec
from fsdp2.weights._route import ALIGNED, Buffer, Route, Source

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_blocks(chance: random.Random, shape: tuple[int, ...]) -> Blocks:
    """Return a tensor cut over a grid as shards of one or two dims, dealt rows, or replicas."""
    counts = chance.choice([(8,), (4, 2), (2, 2, 2), (3, 2), (1,)])
    cuts = []
    for axis in range(len(counts)):
        way = chance.choice(["shard", "shard", "replicate", "deal", "owner"])
        dim = chance.randrange(len(shape))
        if way == "shard":
            cuts.append(CutOf(axis, dim))
        elif way == "deal":
            cuts.append(
                CutOf(axis, dim, Deal(chance.randint(1, 3), chance.randrange(counts[axis])))
            )
        elif way == "owner":
            cuts.append(CutOf(axis, 0, Deal(EVERYTHING, chance.randrange(counts[axis]))))
    return Blocks(shape, counts, tuple(cuts))


def random_sources(chance: random.Random, count: int = 3) -> list[Source]:
    found = []
    for index in range(count):
        shape = tuple(chance.randint(1, 13) for _ in range(chance.choice([1, 2, 2, 3])))
        blocks = random_blocks(chance, shape)
        ranks = list(range(math.prod(blocks.counts)))
        chance.shuffle(ranks)
        found.append(Source(f"p{index}", shape, chance.choice(DTYPES), blocks, tuple(ranks)))
    return found


def random_cuts(chance: random.Random, size: int) -> list[tuple[int, int]]:
    marks = sorted({0, size, *(chance.randint(0, size) for _ in range(2))})
    return list(itertools.pairwise(marks))


def random_layout(chance: random.Random, sources: Sequence[Source]) -> dict[str, Spec]:
    """Return tensors: boxes side by side, transposed ones, zeros, Specs in Specs."""
    layout = {}
    for index in range(3):
        source = chance.choice(sources)
        dtype = chance.choice(DTYPES)
        box = [random_cuts(chance, size)[0] for size in source.shape]
        start, shape = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        turns = len(shape) > 1 and chance.random() < 0.4
        whole = Box(source.name, start, shape, turns)
        dim = chance.randrange(len(shape))
        there = dim if not turns or dim < len(shape) - 2 else 2 * len(shape) - 3 - dim
        parts: list[Box | Spec] = []
        for low, high in random_cuts(chance, whole.made[dim]):
            begin = [*start]
            begin[there] += low
            size = [*shape]
            size[there] = high - low
            part: Box | Spec = Box(source.name, tuple(begin), tuple(size), turns)
            parts.append(part if chance.random() < 0.5 else Spec(part.made, dtype, [part]))
        made = [*whole.made]
        if chance.random() < 0.3:
            padding = [*whole.made]
            padding[dim] = 2
            parts.append(Box(None, (), tuple(padding)))
            made[dim] += 2
        spec = Spec(tuple(made), dtype, parts, dim)
        if chance.random() < 0.3:  # stacked, as experts are
            spec = Spec((1, *made), dtype, [spec])
        layout[f"t{index}"] = spec
    return layout


def whole_of(source: Source) -> torch.Tensor:
    return (torch.arange(math.prod(source.shape)) % 251).view(source.shape).to(source.dtype)


def expected(part: Box | Spec, wholes: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return what an engine's tensor is to be, computed with whole tensors."""
    if isinstance(part, Spec):
        parts = [expected(inner, wholes, dtype) for inner in part.boxes]
        parts = [p.reshape((1,) * (len(part.shape) - p.dim()) + tuple(p.shape)) for p in parts]
        return torch.cat(parts, part.dim)
    if part.name is None:
        return torch.zeros(part.shape, dtype=dtype)
    where = tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))
    values = wholes[part.name][where].to(dtype)
    return values.transpose(-1, -2) if part.transposed else values


def packed(route: Route, wholes: dict[str, torch.Tensor], trainer: int, buffer: Buffer) -> bytes:
    """Return a buffer's bytes, read from the shard of one trainer: nothing else is there."""
    memory = torch.zeros(buffer.nbytes, dtype=torch.uint8)
    for piece, offset in buffer.entries:
        source = route.sources[piece.name]
        place = list(itertools.product(*map(range, source.blocks.counts)))[
            source.ranks.index(trainer)
        ]
        held = overlap(source.blocks.block(place), piece.region)
        assert held == piece.region, "a trainer sends what it does not hold"
        values = wholes[piece.name][piece.region.slices]
        values = values.transpose(-1, -2) if piece.transposed else values
        room = memory[offset : offset + piece.nbytes].view(piece.dtype).view(piece.made)
        room.copy_(values)
    return bytes(memory.numpy())


NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.mark.parametrize("seed", range(60))
def test_every_byte_travels_once_and_a_reader_with_numpy_puts_it_in_place(seed: int) -> None:
    chance = random.Random(seed)
    sources = random_sources(chance)
    destination = [random_layout(chance, sources) for _ in range(chance.randint(1, 4))]
    max_bytes = chance.choice([8192, 4096, 1 << 20])
    nodes = [chance.randrange(2) for _ in range(8 + len(destination))]
    route = Route(
        sources, destination, trainers=8, max_bytes=max_bytes, nodes=chance.choice([None, nodes])
    )
    wholes = {source.name: whole_of(source) for source in sources}
    told = json.loads(route.to_json(None))
    for engine, layout in enumerate(destination):
        own = told["of"][str(engine)]
        tensors = [np.zeros(shape, NUMPY[dtype]) for _, shape, dtype, _ in own["tensors"]]
        times = [np.zeros(shape, int) for _, shape, _, _ in own["tensors"]]
        for trainer, buffers in route.buffers(engine).items():
            for buffer, (nbytes, entries) in zip(
                buffers, own["senders"][str(trainer)], strict=True
            ):
                assert buffer.nbytes == nbytes == sum(c.nbytes for c, _ in buffer.entries)
                memory = packed(route, wholes, trainer, buffer)
                for index, start, shape, dtype, offset in entries:
                    where = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                    count = math.prod(shape)
                    values = np.frombuffer(memory, NUMPY[dtype], count, offset).reshape(shape)
                    if dtype == "bfloat16" and own["tensors"][index][2] != dtype:
                        values = (values.astype(np.uint32) << 16).view(np.float32)
                    tensors[index][where] = values
                    times[index][where] += 1
        for (name, spec), tensor, count in zip(layout.items(), tensors, times, strict=True):
            right = expected(spec, wholes, spec.dtype)
            bits = right.view(torch.uint16) if spec.dtype is BF16 else right
            assert np.array_equal(tensor, bits.numpy()), name
            assert count.max(initial=0) <= 1
            assert count.sum() == sum(
                math.prod(p.shape) for p in _leaves(spec) if p.name is not None
            )


def _leaves(spec: Spec) -> list[Box]:
    found: list[Box] = []
    for part in spec.boxes:
        found += _leaves(part) if isinstance(part, Spec) else [part]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rounds_keep_to_max_bytes_on_both_sides(seed: int) -> None:
    chance = random.Random(seed)
    sources = random_sources(chance, 6)
    destination = [random_layout(chance, sources) for _ in range(3)]
    route = Route(sources, destination, trainers=8, max_bytes=4096)
    sides: tuple[Counter[tuple[int, int]], ...] = (Counter(), Counter())
    for engine in range(3):
        for trainer, buffers in route.buffers(engine).items():
            for number, buffer in enumerate(buffers):
                sides[0][trainer, number] += align(buffer.nbytes, ALIGNED)
                sides[1][engine, number] += align(buffer.nbytes, ALIGNED)
    assert max((*sides[0].values(), *sides[1].values()), default=0) <= 2048
    figures = Figures(route)
    assert max(max(side) for side in figures.peaks) <= 4096


def test_of_replicas_the_one_that_sent_least_sends_and_one_of_the_same_node_first() -> None:
    blocks = Blocks((1024, 64), (4,), ())
    sources = [Source(f"w{n}", (1024, 64), FP32, blocks, (0, 1, 2, 3)) for n in range(8)]
    layout = {s.name: Spec(s.shape, BF16, [Box(s.name, (0, 0), s.shape)]) for s in sources}
    route = Route(sources, [layout, layout], trainers=4, max_bytes=1 << 20)
    assert Figures(route).busiest < 1.1
    near = Route(sources, [layout, layout], trainers=4, max_bytes=1 << 20, nodes=[0, 0, 1, 1, 0, 1])
    assert {pair for pair, nbytes in near.pairs.items() if nbytes} == {
        (0, 0), (1, 0), (2, 1), (3, 1)
    }  # fmt: skip
    assert Figures(near).busiest == 1.0


SOURCES = [
    Source("a", (8, 4), FP32, Blocks((8, 4), (2,), (CutOf(0, 0),)), (0, 1)),
    Source("i", (8,), torch.int64, Blocks((8,), (2,), ()), (0, 1)),
]


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        (Spec((8, 4), BF16, [Box("b", (0, 0), (8, 4))]), "FS631", "refers to b, which the model"),
        (Spec((8, 4), BF16, [Box("a", (1, 0), (8, 4))]), "FS631", "which has shape (8, 4)"),
        (Spec((8, 4), BF16, [Box("a", (0, 0), (7, 4))]), "FS632", "parts of total size 7"),
        (Spec((8, 4), BF16, [Box("a", (0, 0), (8, 3))]), "FS632", "a part of shape (8, 3)"),
        (Spec((16, 4), BF16, [Box("a", (0, 0), (8, 4))] * 2), "FS632", "elements of a twice"),
        (Spec((8,), BF16, [Box("i", (0,), (8,))]), "FS633", "i has torch.int64"),
        (Spec((8,), BF16, [Spec((8,), FP32, [])]), "FS633", "one of its parts has torch.float32"),
    ],
)  # fmt: skip
def test_a_destination_that_does_not_fit_is_refused_by_name(
    spec: Spec, code: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Route(SOURCES, [{"there": spec}], trainers=2, max_bytes=1 << 20)
    assert caught.value.code == code
    assert "there of engine rank 0" in str(caught.value)
    assert words in str(caught.value)


def test_max_bytes_has_room_for_all_peers() -> None:
    layout = {"a": Spec((8, 4), BF16, [Box("a", (0, 0), (8, 4))])}
    with pytest.raises(ConfigError, match="at least 1024"):
        Route(SOURCES, [layout] * 4, trainers=2, max_bytes=512)
