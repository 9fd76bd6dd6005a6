"""What travels in 8 bits: bytes, errors, host instructions, and the loss of the example.

    python -m benchmarks.step.low_bits
    python -m benchmarks.step.low_bits --curves              also trains the example, 800 steps each

Bytes are what the kernel counts as sent, as in `wire`. The error of gradients is that of all of
them as one vector, after one step, over those of bf16 gathers and fp32 reductions; beside it that
of bf16 itself over fp32. Host instructions are those of `host`, with parameters in fp8 and without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.kit.host_run import run_workers
from benchmarks.kit.host_worker import Request
from benchmarks.kit.models import CODED, MEDIUM, OURS, Stack, _find_units, make_input, make_step
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.step.host import fit_instructions
from benchmarks.step.wire import STEPS, WARMUP, bytes_sent

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
FP8 = torch.float8_e4m3fn
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "bf16": (BF16, None),
    "fp8 gathers, a scale a row": ({**BF16, "gather_dtype": FP8}, None),
    "fp8 gathers, a scale a shard": ({**BF16, "gather_dtype": FP8, "gather_scale": "tensor"}, None),
    "int8 gradients": (BF16, {"dtype": torch.int8}),
    "fp8 gradients": (BF16, {"dtype": FP8}),
    "bf16 gradients": (BF16, {"dtype": torch.bfloat16}),
    "fp8 gathers, int8 gradients": ({**BF16, "gather_dtype": FP8}, {"dtype": torch.int8}),
    "fp32": ({}, None),
}
CURVES = [("fp32", "fp32"), ("bf16", "fp32"), ("fp8", "fp32"), ("bf16", "int8"), ("bf16", "fp8")]
CURVES.append(("fp8", "int8"))


def measure(arguments: argparse.Namespace) -> Measured:
    figures = []
    for ranks in arguments.world_sizes:
        per_rank = run_on_ranks(measure_rank, ranks, list(WAYS))
        for index, way in enumerate(WAYS):
            sent = sum(found[index][0] for found in per_rank) / ranks
            base = sum(found[0][0] for found in per_rank) / ranks
            case = f"N={ranks}"
            figures += [
                Figure(case, way, "MB a rank", sent / 1e6),
                Figure(case, way, "over bf16", sent / base),
                Figure(case, way, "gathered over bf16", per_rank[0][index][1]),
                Figure(case, way, "error of gradients", per_rank[0][index][2]),
            ]
    figures += instructions(arguments)
    notes = []
    if arguments.curves:
        figures += curves(arguments.steps)
        notes.append(
            f"loss: of `examples/train_lm.py`, {arguments.steps} steps on two ranks: means of the "
            "50 steps before each eighth, and at the end that of held-out text, in nats a byte"
        )
    return Measured(figures, {"numel": MEDIUM.numel, "steps": STEPS}, notes)


def measure_rank(rank: int, world_size: int, ways: list[str]) -> list[tuple[float, float, float]]:
    """Return bytes sent in a step, gathered bytes over those of bf16, and the gradients' error."""
    from fsdp2._core.base import events

    mesh = init_device_mesh("cpu", (world_size,))
    found, exact, gathered_by_bf16 = [], None, 0.0
    for way in ways:
        model = build(way, mesh)
        step = make_step(model, make_input(OURS, MEDIUM, bf16=True))
        seen: list[events.Event] = []
        with events.listen(seen.append):
            step()
        gradients = torch.cat([local(p.grad) for p in model.parameters()])
        exact = gradients if exact is None else exact
        error = torch.stack([(gradients - exact).square().sum(), exact.square().sum()])
        dist.all_reduce(error)
        gathered = float(sum(event.nbytes for event in seen if event.kind == "unshard"))
        gathered_by_bf16 = gathered_by_bf16 or gathered
        for _ in range(WARMUP):
            step()
        dist.barrier()
        before = bytes_sent()
        for _ in range(STEPS):
            step()
        dist.barrier()
        sent = (bytes_sent() - before) / STEPS
        found.append((sent, gathered / gathered_by_bf16, float((error[0] / error[1]).sqrt())))
    return found


def local(grad: Any) -> Tensor:
    part: Tensor = grad.to_local()
    return part.flatten()


def build(way: str, mesh: Any) -> torch.nn.Module:
    import fsdp2

    policy, compress = WAYS[way]
    torch.manual_seed(0)
    model = Stack(MEDIUM)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": fsdp2.MixedPrecisionPolicy(**policy)}
    for unit in _find_units(model, False, 1):
        fsdp2.fully_shard(unit[0], **settings)
    fsdp2.fully_shard(model, **settings)
    if compress is not None:
        fsdp2.register_comm_hook(model, fsdp2.Compress(**compress))
    return model


def instructions(arguments: argparse.Namespace) -> list[Figure]:
    """Return host instructions a block over the plain model's, bf16 parameters."""
    settings = {"depths": [4, 8], "steps": 4, "warmup": 3, "world_size": 8}
    with tempfile.TemporaryDirectory() as name:
        requests = [
            Request(mode="count", libraries=[library], precisions=["fp32", "bf16"], **settings)
            for library in ("plain", OURS, CODED)
        ]
        outcomes = run_workers(requests, Path(name))
    costs = fit_instructions(outcomes, settings["depths"], settings["steps"])
    plain = costs["plain", "fp32"]
    return [
        Figure(
            "host", library, "M instr. a block", (costs[library, "bf16"] - plain).per_block / 1e6
        )
        for library in (OURS, CODED)
        if (library, "bf16") in costs
    ]


def curves(steps: int) -> list[Figure]:
    """Train the example once for each way; return the curve of losses, and the one held out."""
    figures = []
    with tempfile.TemporaryDirectory() as name:
        for dtype, gradients in CURVES:
            folder = Path(name, f"{dtype}-{gradients}")
            command = [sys.executable, "examples/train_lm.py", "--ranks", "2", "--size", "small"]
            command += ["--steps", str(steps), "--dtype", dtype, "--gradients", gradients]
            command += ["--metrics", f"{folder}.jsonl", "--checkpoint-dir", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            held_out = [line for line in done.stdout.splitlines() if "held-out loss" in line][-1]
            lines = Path(f"{folder}.jsonl").read_text().splitlines()
            losses = [json.loads(line)["loss"] for line in lines]
            case, way = "loss", f"{dtype} parameters, {gradients} gradients"
            value = float(held_out.split(": ")[1].split()[0])
            figures += [
                Figure(case, way, f"50 to {end}", sum(losses[end - 50 : end]) / 50)
                for end in range(steps // 8, steps + 1, steps // 8)
            ]
            figures.append(Figure(case, way, "held out", value))
    return figures


if __name__ == "__main__":
    parser = make_parser("low_bits", __doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3], metavar="N")
    parser.add_argument("--curves", action="store_true", help="train the example, too")
    parser.add_argument("--steps", type=int, default=800, help="steps of the example")
    run("low_bits", __doc__, measure, parser)
