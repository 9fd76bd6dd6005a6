"""Allocated and reserved memory over many steps of uneven batches: nothing grows.

Each row is a process of its own, because the allocator reads its settings once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows
from benchmarks.gpu._steps import TINY, emulated
from benchmarks.kit.models import Size, build

STEPS = 6 if _machine.REHEARSES else 200
SIZE = Size(depth=8, width=2048, hidden=5504, vocabulary=16000, tokens=2048)
TOKENS = (512, 1536, 129, 2048, 1000, 777, 2048, 64, 1999, 1)
SETTINGS = {"segments": "", "expandable segments": "expandable_segments:True"}
GROWTH = 1.02
"""What may be reserved after the last steps, over what was after the first half."""


def train(library: str, title: str) -> None:
    """Run in a process of its own; its row is what it prints."""
    rows = Rows()
    size = TINY if _machine.REHEARSES else SIZE
    found = []
    with emulated(8) as mesh:
        model = build(library, size, mesh, bf16=True)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        for number in range(STEPS):
            tokens = min(TOKENS[number * number % len(TOKENS)], 64 if _machine.REHEARSES else 2048)
            x = torch.ones(tokens, size.vocabulary, device=_machine.device())
            model(x).sum().backward()
            optim.step()
            optim.zero_grad()
            if number + 1 in (STEPS // 4, STEPS // 2, STEPS):
                _machine.wait()
                found.append((_machine.allocated(), _machine.reserved()))
    (first, half, last), gb = found, _machine.GB
    verdict = "ok" if last[1] <= GROWTH * half[1] and last[0] <= GROWTH * half[0] else "failed"
    rows.add(
        "",
        what=f"{library}, {title}",
        verdict=verdict,
        **{
            "allocated GB": last[0] / gb,
            "peak GB": _machine.peak() / gb,
            "reserved GB, a quarter": first[1] / gb,
            "half": half[1] / gb,
            "end": last[1] / gb,
            "reserved over peak": last[1] / max(_machine.peak(), 1),
        },
    )


def ask(library: str, title: str, limit: float) -> dict[str, Any] | None:
    environment = dict(os.environ)
    if SETTINGS[title]:  # torch 2.10 renamed it
        names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
        environment |= dict.fromkeys(names, SETTINGS[title])
    command = [sys.executable, "-m", "benchmarks.gpu.memory", library, title]
    subprocess.run(command, env=environment, timeout=limit, check=True)
    return None


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    for library in ("fsdp2",) if _machine.REHEARSES else ("fsdp2", "torch"):
        for title in SETTINGS:
            limit = max(1.0, rows.seconds_left)
            rows.ask("processes", f"{library}, {title}", partial(ask, library, title, limit), 6.0)
    rows.end()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        main()
