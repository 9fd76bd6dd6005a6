"""Pages to draw: a small one, a large one, an empty one, and one whose names attack its reader."""

from __future__ import annotations

from fsdp2._tools.pages.content import (
    COMPUTE,
    GATHER,
    KINDS,
    REDUCE,
    Advice,
    Fact,
    MemoryTab,
    Moment,
    Page,
    Span,
    Table,
    TimeLine,
    UnitArea,
)

MB = 1 << 20
LANES = (COMPUTE, GATHER, REDUCE)
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>'&amp;{b}"


def unit(name: str, numel: int, ranks: int = 4, padding: int = 0, parameters: int = 9) -> UnitArea:
    """A unit of fp32 parameters: all sizes follow from its elements."""
    whole = 4 * numel
    return UnitArea(
        name=name,
        parameters=parameters,
        numel=numel,
        dtypes=("float32",),
        whole_nbytes=whole,
        shard_nbytes=(whole + padding) // ranks,
        padding_nbytes=padding,
        gather_nbytes=whole + padding,
        reduce_nbytes=whole + padding,
        shard_ranks=ranks,
    )


def memory_tab(name: str, blocks: int, block_nbytes: int, kept: int, **more: object) -> MemoryTab:
    """A step of blocks in a row: activations grow in forward, gradients in backward.

    ``kept``: how many blocks stay gathered.
    """
    shards, moments = blocks * block_nbytes // 4, []
    for at in range(2 * blocks + 1):
        done = at if at <= blocks else 2 * blocks - at
        phase = "forward" if at < blocks else "backward"
        gathered = min(kept, done + 1) * block_nbytes if at < 2 * blocks else 0
        grads = max(0, at - blocks) * block_nbytes // 4
        label = f"{phase}: block {min(done, blocks - 1)}" if at < 2 * blocks else "end"
        activations = done * block_nbytes // 2
        nbytes = (shards, 2 * shards, grads, gathered, block_nbytes // 2, activations, 0)
        if at == blocks:  # a peak that lasts no time
            highest = (*nbytes[:-2], nbytes[-2] + block_nbytes, 0)
            moments.append(Moment(at * 1e-3, f"before {label}", highest))
        moments.append(Moment(at * 1e-3, label, nbytes))
    measured = tuple(Moment(m.time, m.label, (int(sum(m.nbytes) * 1.02),)) for m in moments)
    values = {"limit_nbytes": None, "measured": measured, "measured_name": "measured", **more}
    return MemoryTab(name, KINDS, tuple(moments), is_timed=True, **values)  # type: ignore[arg-type]


def time_line(name: str, blocks: int, late: float = 0.0) -> TimeLine:
    """Forward and backward of blocks, each gathered before it; every third gather is late."""
    spans: list[Span] = []
    now = 0.0
    for at in range(2 * blocks):
        number = at if at < blocks else 2 * blocks - 1 - at
        block = f"blocks.{number}"
        takes = 1e-3 if at < blocks else 2e-3
        gap = (0.2e-3 + late) if at % 3 == 0 else 0.0
        begin = max(0.0, now - takes / 2)
        spans.append(Span(GATHER, block, begin, now + gap, 24 * MB, note="4 ranks"))
        if gap:
            cause = f"{'all_gather' if at < blocks else 'reduce_scatter'} {block}"
            spans.append(Span(COMPUTE, "", now, now + gap, cause=cause))
        spans.append(Span(COMPUTE, block, now + gap, now + gap + takes))
        now += gap + takes
        if at >= blocks:
            spans.append(Span(REDUCE, block, now, now + takes * 0.8, 48 * MB))
    return TimeLine(name, LANES, tuple(spans))


SMALL = Page(
    title="A small transformer over 4 ranks",
    subtitle="mesh 4, fp32, AdamW, batch 8 x 128; predicted for an H100",
    facts=(
        Fact("parameters", "3.46 M", "9 units"),
        Fact("peak memory", "31.2 MiB", "of 80 GiB"),
        Fact("step", "11.9 ms", "predicted, 82 % compute"),
        Fact("all-gathers", "23", "25.1 MiB a step"),
    ),
    advice=(
        Advice(
            "refused",
            "head.weight",
            "has 29 rows over 4 ranks and a kernel that wants equal shards.",
            "shard_placement_fn=lambda p: Shard(1)",
        ),
        Advice(
            "slow",
            "blocks.0",
            "waits 0.20 ms for its gather, 1.7 % of the step.",
            'model.set_memory("fast")',
            "0.18 ms less a step, 1.1 MiB more",
        ),
        Advice("memory", "embed", "has 31 % padding, 0.4 MiB over all ranks.", "pad it to 32 rows"),
        Advice("note", "blocks.3", "is gathered again in backward, as the others are.", ""),
    ),
    units=(
        unit("", 4_096, parameters=2),
        unit("embed", 900_000, padding=400_000, parameters=1),
        unit("head", 450_000, parameters=1),
        *(unit(f"blocks.{i}", 420_000) for i in range(5)),
    ),
    memory=(
        memory_tab("balanced", 5, 3 * MB, 2, limit_nbytes=28 * MB),
        memory_tab("low", 5, 3 * MB, 1, measured=()),
        memory_tab("fast", 5, 3 * MB, 4, limit_nbytes=80 << 30),
    ),
    time_lines=(time_line("predicted", 5), time_line("rank 0, measured", 5, 0.1e-3)),
    tables=(
        Table(
            "Collectives of a step",
            ("kind", "number", "bytes", "time"),
            (
                ("all_gather", "23", "25.1 MiB", "1.9 ms"),
                ("reduce_scatter", "9", "13.2 MiB", "1 ms"),
            ),
        ),
    ),
    notes=("Times come from a table of an H100.", "Memory counts tensors alone."),
)

BLOCKS = 126
LARGE = Page(
    title="A transformer of 405 G parameters over 4 ranks",
    subtitle="126 blocks",
    facts=SMALL.facts,
    units=(
        unit("", 16_384),
        unit("model.embed", 2_101_000_000),
        *(unit(f"model.layers.{i}", 3_188_000_000) for i in range(BLOCKS)),
        unit("head", 2_101_000_000),
    ),
    memory=tuple(
        memory_tab(f"rank {rank}", BLOCKS, 1 << 30, 2 + rank, limit_nbytes=80 << 30)
        for rank in range(4)
    ),
    time_lines=tuple(time_line(f"rank {rank}", 400, rank * 0.1e-3) for rank in range(4)),
)

RECORDED = Page(
    title="A run of four ranks",
    subtitle="steps 3 to 8; rank 3 is slow",
    facts=(
        Fact("step", "19.6 ms", "median of 6"),
        Fact("straggler", "rank 3", "last to 21 of 32 collectives"),
        Fact("peak", "29.8 MiB", "rank 3"),
    ),
    memory=tuple(memory_tab(f"rank {rank}", 5, 3 * MB, 2 + rank // 3) for rank in range(4)),
    time_lines=tuple(time_line(f"rank {rank}", 5, rank * 0.1e-3) for rank in range(4)),
)

DEEP = Page(
    title="Units in units",
    subtitle="more than can be read at once: blocks are shown closed",
    units=tuple(unit(f"blocks.{i}.part_{j}", 1_000 + j) for i in range(100) for j in range(6)),
)

EMPTY = Page(title="Nothing", subtitle="")

HOSTILE_PAGE = Page(
    title=HOSTILE,
    subtitle=HOSTILE,
    facts=(Fact(HOSTILE, HOSTILE, HOSTILE),),
    advice=(Advice(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
    units=(unit(HOSTILE, 100), unit(f"blocks.{HOSTILE}", 200), unit("\ud800.__proto__", 300)),
    memory=(
        MemoryTab(HOSTILE, (HOSTILE,), (Moment(0, HOSTILE, (5,)), Moment(1, HOSTILE, (7,))), False),
        MemoryTab(f"2 {HOSTILE}", (HOSTILE,), (Moment(0, HOSTILE, (5,)),), False),
    ),
    time_lines=(
        TimeLine(
            HOSTILE,
            (HOSTILE, "constructor"),
            (
                Span(HOSTILE, HOSTILE, 0.0, 1.0, 5, "", HOSTILE),
                Span("constructor", HOSTILE, 0.0, 1.0, 5, HOSTILE, HOSTILE),
            ),
        ),
    ),
    tables=(Table(HOSTILE, (HOSTILE,), ((HOSTILE,),)),),
    notes=(HOSTILE,),
)

ALL = {"small": SMALL, "large": LARGE, "deep": DEEP, "empty": EMPTY, "hostile": HOSTILE_PAGE}
