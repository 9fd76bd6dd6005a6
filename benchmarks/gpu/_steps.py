"""Models of the stages, each as a library shards it, with collectives that one device emulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.gpu import _machine
from benchmarks.kit import llama as _llama
from benchmarks.kit import noop
from benchmarks.kit.emulated import EmulatedGroup
from benchmarks.kit.models import Size, build, make_input

LIBRARIES = ("torch", "torch tuned", "fsdp2")
SMALL, LARGE, BLOCKS_8B = "32 small blocks", "0.9 B", "four 8B blocks"
SIZES = {
    SMALL: Size(depth=32, width=256, hidden=768, vocabulary=4096, tokens=64),
    LARGE: Size(depth=16, width=2048, hidden=5504, vocabulary=32000, tokens=2048),
    BLOCKS_8B: Size(depth=4, width=4096, hidden=14336, vocabulary=32000, tokens=2048),
}
TINY = Size(depth=2, width=16, hidden=32, vocabulary=64, tokens=4)
TINY_LLAMA = _llama.Shape("tiny", 64, 128, 4, 2, 2, 64)
Step = Callable[[], object]


@contextmanager
def emulated(ranks: int, link: float = 0.0) -> Iterator[DeviceMesh]:
    """Be rank 0 of so many. ``link``: microseconds that each collective takes besides."""
    # a cycle of the sleep kernel is one of the clock's
    cycles = int(link * _machine.clock_mhz())

    def make(rank: int, size: int) -> EmulatedGroup:
        return EmulatedGroup(rank, size, cycles)

    with noop.ranks(ranks, make, device=_machine.KIND) as (_, mesh):
        yield mesh


def size_of(title: str) -> Size:
    return TINY if _machine.REHEARSES else SIZES[title]


def llama(blocks: int, vocabulary: int = 32000) -> _llama.Shape:
    """Return a decoder with blocks of Llama 8B."""
    if _machine.REHEARSES:
        return TINY_LLAMA
    return replace(_llama.SHAPES["8B"], blocks=blocks, vocabulary=vocabulary)


def make_step(library: str, size: Size, mesh: DeviceMesh, *, optimizer: bool = False) -> Step:
    """Return a step in bf16 with fp32 reduction; both libraries get torch's own AdamW."""
    model = build(library, size, mesh, bf16=True)
    x = make_input(library, size, bf16=True, device=mesh.device_type)
    optim: Any = None
    if optimizer:
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        if optim is not None:
            optim.step()

    return step


def warm_up(step: Step, count: int = 5) -> Step:
    for _ in range(2 if _machine.REHEARSES else count):
        step()
    return step
