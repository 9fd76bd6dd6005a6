"""Peak memory of a step above its start, counted from the allocator's own events.

    python -m benchmarks.step.peak

torch.profiler reports every allocation and release of the CPU allocator, those inside kernels and
those by resizing a storage too. A step's running sum starts at 0 after `zero_grad`, so parameters
are not in it, and gradients, activations and buffers are. One process plays rank 0 of 64 over
collectives that do nothing, with six blocks of 3.4 MB and a root of 8.4 MB (in fp32); `split root`
makes the input projection and the head groups of their own; in `embedding` the input projection is
an `nn.Embedding`. `fsdp2` is the setting `balanced`; the others are named. MB are 10^6 bytes.

The limit that an overlap implies, with d groups gathered ahead and r reductions in flight: gradient
shards + activations + the larger of (1+d) B b_p + (1+r) B b_r, in backward, and (K + (1+d) C) b_p,
in forward. B is the numel of the largest group (the input projection, or the head), C that of a
block, K that of a root that stays whole in forward, b_p and b_r are the bytes an element of the
compute parameter and of the reduced gradient. Activations are what the plain model holds at the end
of its forward. A library can be below: where a reduction has ended, as here, its input is free.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.kit import noop
from benchmarks.kit.models import (
    GROUPINGS,
    MEDIUM,
    OURS,
    PRECISION_NAMES,
    PRECISIONS,
    applies,
    build,
    make_input,
)
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run

WARMUP = 2
EMBEDDING = "embedding"
OVERLAPS = {"low": (0, 0), "balanced": (1, 1), "fast": (2, 3)}
"""Units gathered ahead and reductions in flight, by the name of the setting."""
STARTED, FORWARD_DONE, DONE = "step started", "forward done", "step done"


@dataclass(frozen=True)
class Peak:
    """Bytes above the start of the step: the most, and what was held when forward was done."""

    highest: int
    after_forward: int


def measure(arguments: argparse.Namespace) -> Measured:
    figures, quantity = [], "peak above step start, MB"
    for precision in PRECISIONS:
        bf16 = precision == "bf16"
        for grouping in (*GROUPINGS, EMBEDDING):
            case = f"{PRECISION_NAMES[precision]}, {grouping}"
            options = {
                "bf16": bf16,
                "split_root": grouping == "split root",
                "embedding": grouping == EMBEDDING,
            }
            for library in arguments.libraries:
                if not applies(library, precision):
                    continue
                if grouping != GROUPINGS[0] and library in ("plain", "ddp", "fsdp1"):
                    continue
                found = find_peak(library, arguments.world_size, **options)
                value = found.highest / 1e6
                figures.append(Figure(case, library, quantity, value, gated(library)))
            if OURS in arguments.libraries:
                for memory in ("low", "fast"):
                    found = find_peak(OURS, arguments.world_size, memory=memory, **options)
                    value = found.highest / 1e6
                    figures.append(Figure(case, f"{OURS}, {memory}", quantity, value, True))
            plain = find_peak("plain", arguments.world_size, bf16=bf16)
            for name, (ahead, running) in OVERLAPS.items():
                nbytes = limit_of(
                    arguments.world_size,
                    plain,
                    ahead,
                    running,
                    bf16=bf16,
                    is_split=grouping == "split root",
                )
                figures.append(Figure(case, f"limit, {name}", quantity, nbytes / 1e6))
    return Measured(figures, {"world_size": arguments.world_size, "numel": MEDIUM.numel})


def limit_of(
    ranks: int, plain: Peak, ahead: int, running: int, *, bf16: bool, is_split: bool
) -> float:
    """Return the bytes of the formula above."""
    largest = max(MEDIUM.root_numel // 2, MEDIUM.block_numel)
    b_p, b_r, b_s = (2 if bf16 else 4), 4, 4
    backward = (1 + ahead) * largest * b_p + (1 + running) * largest * b_r
    kept = 0 if is_split else MEDIUM.root_numel
    forward = (kept + (1 + ahead) * MEDIUM.block_numel) * b_p
    return MEDIUM.numel * b_s / ranks + plain.after_forward + max(backward, forward)


def find_peak(
    library: str,
    ranks: int,
    *,
    bf16: bool,
    split_root: bool = False,
    embedding: bool = False,
    memory: str | int | None = None,
) -> Peak:
    """Run a variant and return the peak of one step after the warm-up.

    `memory` is what a model of ours is told with `set_memory`.
    """
    with noop.ranks(ranks) as (_, mesh):
        model: Any = build(
            library, MEDIUM, mesh, bf16=bf16, split_root=split_root, embedding=embedding
        )
        if memory is not None:
            model.set_memory(memory)
        x = make_input(library, MEDIUM, bf16=bf16, embedding=embedding)
        # The allocator reports a release only if the profiler saw the allocation.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(WARMUP + 1):
                model.zero_grad(set_to_none=True)
                gc.collect()
                with record_function(STARTED):
                    pass
                loss = model(x).sum()
                with record_function(FORWARD_DONE):
                    pass
                loss.backward()
                del loss
                with record_function(DONE):
                    pass
    return read(profiler)


def read(profiler: profile) -> Peak:
    """Sum up the allocator's events of the last step."""
    live = highest = after_forward = 0
    assert profiler.profiler is not None
    found = profiler.profiler.kineto_results
    assert found is not None
    for event in sorted(found.events(), key=lambda event: event.start_ns()):
        name = event.name()
        if name == STARTED:
            live = highest = 0
        elif name == FORWARD_DONE:
            after_forward = live
        elif name == DONE:
            peak = Peak(highest, after_forward)
        elif name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            highest = max(highest, live)
    return peak


if __name__ == "__main__":
    parser = make_parser("peak", __doc__)
    parser.add_argument("--world-size", type=int, default=64)
    run("peak", __doc__, measure, parser)
