"""Others' buckets: what inductor's own bucketing makes of our graphs, and of a parametrized model.

    python -m benchmarks.compiled.buckets [--world-size 2,4,8] [--variants "bucket=False,
    parametrized"]

The model, the reader of emitted code and most columns are those of `benchmarks.compiled.emitted`;
`sent` are bytes that a rank sends (rings), over the model's, `compile` is CPU time of a first step
without its kernels. `parametrized` is `kit/parametrized.py`: our own small version of the idea of
torchtitan's SimpleFSDP, not its code. Where a variant says `fx buckets`, inductor's passes put
collectives of a block's bytes together and reorder them; where it says `scheduled`, its overlap
scheduler does. That one asks how long operations take: on a CPU it is told that each collective and
each product takes 1 ms, and other operations nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn as nn

import fsdp2
from benchmarks.kit import noop
from benchmarks.kit.models import (
    PRECISION_NAMES,
    PRECISIONS,
    Size,
    Stack,
    build,
    make_input,
    make_step,
)
from benchmarks.kit.parametrized import parametrize
from benchmarks.kit.report import Figure, Measured, run
from tests.kit.emitted import BACKWARD, FORWARD, Step, emitted_by, read_step

SIZE = Size(depth=4, width=64, hidden=192, vocabulary=512, tokens=8)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Variant:
    """A way to compile. ``bucket`` is for ours; None: the parametrized model."""

    bucket: bool | None
    options: Callable[[float, float], dict[str, Any]] = lambda *_: {}


def fx_buckets(gathered_mb: float, reduced_mb: float) -> dict[str, Any]:
    """Return options of inductor that bucket up to these sizes, and reorder for overlap."""
    moves = "reorder_communication_preserving_peak_memory"
    return {
        "bucket_all_gathers_fx": "only_fsdp",
        "bucket_all_gathers_fx_bucket_size_determinator": lambda _: gathered_mb,
        "bucket_reduce_scatters_fx": "only_fsdp",
        "bucket_reduce_scatters_fx_bucket_size_determinator": lambda _: reduced_mb,
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [moves, "sink_waits_iterative", moves],
    }


def scheduled(gathered_mb: float, _reduced_mb: float) -> dict[str, Any]:
    """Return options of inductor that bucket up to one size, and schedule what comes of it."""
    options = {
        "enable_overlap_scheduling": True,
        "collective_bucketing": False,  # no larger ones than these:
        "pre_bucketing_fsdp_collectives_bucket_cap_mb": gathered_mb,
        "enable_fusion_regions": False,
        "compute_estimator": "analytical",  # ranks need not agree on what they measured
        "custom_runtime_estimation": _estimate,
    }
    return {f"aten_distributed_optimizations.{name}": value for name, value in options.items()}


def _estimate(node: torch.fx.Node, _numel: int | None = None) -> float:
    """Return milliseconds."""
    schema = getattr(node.target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema else ("", "", "")
    if space == "_c10d_functional":
        return 0.0 if name == "wait_tensor" else 1.0
    return 1.0 if name in PRODUCTS else 0.0


VARIANTS = {
    "fsdp2.compile": Variant(True),
    "bucket=False": Variant(False),
    "bucket=False, fx buckets": Variant(False, fx_buckets),
    "bucket=False, scheduled": Variant(False, scheduled),
    "parametrized": Variant(None),
    "parametrized, fx buckets": Variant(None, fx_buckets),
    "parametrized, scheduled": Variant(None, scheduled),
}


def compiled_step(variant: Variant, world_size: int, *, bf16: bool, size: Size = SIZE) -> Step:
    """Compile and run a step of the stack as rank 0; return what was emitted."""
    itemsize = 2 if bf16 else 4
    block_mb = 1.05 * size.block_numel / 2**20  # of bytes; and some padding
    options = variant.options(block_mb * itemsize, block_mb * 4)
    with noop.ranks(world_size) as (_, mesh):
        model: nn.Module
        if variant.bucket is None:
            torch.manual_seed(0)
            model = parametrize(Stack(size, embedding=True), mesh, bf16=bf16)
            compiled: Any = torch.compile(model, fullgraph=True, options=options)
        else:
            model = build("fsdp2", size, mesh, bf16=bf16, embedding=True)
            overlap = None if variant.bucket else False
            compiled = fsdp2.compile(
                model, fullgraph=True, bucket=variant.bucket, overlap=overlap, options=options
            )
        x = make_input("fsdp2", size, bf16=bf16, embedding=True)
        codes = emitted_by(make_step(compiled, x))
    return read_step(codes, model_nbytes=size.numel * itemsize)


def measure(arguments: argparse.Namespace) -> Measured:
    figures, notes = [], []
    sizes = [int(one) for one in arguments.world_size.split(",")]
    for world_size, precision in product(sizes, PRECISIONS):
        case = f"{world_size} ranks, {PRECISION_NAMES[precision]}"
        for name, variant in VARIANTS.items():
            if any(word not in name for word in arguments.variants.split(", ")):
                continue
            start = time.process_time()
            step = compiled_step(variant, world_size, bf16=precision == "bf16")
            figures += figures_of(case, name, step, world_size, time.process_time() - start)
            notes += [f"{case}, {name}: {one} is unknown" for one in step.unknown]
    return Measured(figures, {"numel": SIZE.numel}, notes)


def figures_of(
    case: str, variant: str, step: Step, world_size: int, seconds: float
) -> list[Figure]:
    """Return one row of figures."""

    def count(graph: str, kind: str) -> int:
        found = (one for one in step.collectives if one.graph == graph)
        return sum(kind in one.event.name for one in found)

    nbytes = step.model_nbytes
    sent = sum(one.event.nbytes for one in step.collectives) * (world_size - 1) / world_size
    quantities = {
        "gathers, forward": count(FORWARD, "all_gather"),
        "gathers, backward": count(BACKWARD, "all_gather"),
        "reductions": count(FORWARD, "reduce_scatter") + count(BACKWARD, "reduce_scatter"),
        "sent": sent / nbytes,
        "overlapped": step.overlapped_share,
        "copies": step.passes("copy"),
        "casts": step.passes("cast"),
        "kept": step.kept_nbytes / nbytes,
        "peak": step.peak_nbytes / nbytes,
        "compile (s)": seconds,
    }
    return [Figure(case, variant, name, value) for name, value in quantities.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.buckets", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--world-size", default="2,4,8", metavar="N,N", help="ranks")
    parser.add_argument("--variants", default="", metavar="WORDS", help="those with these words")
    run("buckets", __doc__, measure, parser)
