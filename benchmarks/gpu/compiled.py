"""Compiled steps: blocks, the whole model in one graph, CUDA graphs of blocks; a captured step.

One rank over NCCL. ``loss`` is after the same steps from the same start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows, Skipped
from benchmarks.gpu._steps import llama
from benchmarks.kit.llama import Decoder

BACKEND = "aot_eager" if _machine.REHEARSES else "inductor"
TOKENS = 32 if _machine.REHEARSES else 4096
STEPS = 4 if _machine.REHEARSES else 8
NEAR = 2e-2  # bf16, and a compiler that fuses casts

_losses: dict[str, float] = {}


def make(library: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = llama(2)
    with torch.device(_machine.device()):
        model = Decoder(shape, shape.blocks)
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh(_machine.KIND, (1,))
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, mp_policy=policy)
    library.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def blocks(model: nn.Module, **kwargs: Any) -> Any:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=BACKEND, **kwargs)
    return model


def whole(model: nn.Module) -> Any:
    return fsdp2.compile(model, fullgraph=True, backend=BACKEND)


def eager(model: nn.Module) -> Any:
    return model


def run(name: str, library: Any, prepare: Callable[[nn.Module], Any]) -> dict[str, Any]:
    torch.compiler.reset()
    model = make(library)
    called = prepare(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.arange(TOKENS, device=_machine.device())[None] % 64
    losses: list[Any] = []

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = called(batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach().clone())

    began = time.perf_counter()
    step()
    _machine.wait()
    first = time.perf_counter() - began
    took = [_machine.time_once(step) for _ in range(STEPS)]
    peak = _machine.find_peak(step)
    loss = float(losses[STEPS])
    _losses[name] = loss
    expected = _losses.get("eager", loss)
    assert abs(loss - expected) <= NEAR * abs(expected), (loss, expected)
    steady = took[len(took) // 2 :]
    return {
        "step ms": statistics.median(one.device_ms for one in steady),
        "host ms": statistics.median(one.host_ms for one in steady),
        "first s": first,
        "peak GB": peak / _machine.GB,
        "loss": loss,
    }


def captured() -> dict[str, Any]:
    """Forward and backward in one CUDA graph by hand, after steps that warm up."""
    if _machine.REHEARSES:
        raise Skipped("a CPU captures nothing")
    model = make(fsdp2)
    optim: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.arange(TOKENS, device=_machine.device())[None] % 64
    side = torch.cuda.Stream()
    losses = []

    def step() -> Any:
        loss = model(batch)
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=False)
        return loss.detach()

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            losses.append(float(step()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        static = step()
    for _ in range(STEPS - 4 + 1):
        graph.replay()
        losses.append(float(static))
    expected = _losses.get("eager")
    found = losses[STEPS]
    ms = statistics.median(_machine.time_once(graph.replay).device_ms for _ in range(5))
    assert expected is None or abs(found - expected) <= NEAR * abs(expected), (found, expected)
    return {"step ms": ms, "loss": found}


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    graphs = blocks if _machine.REHEARSES else partial(blocks, mode="reduce-overhead")
    ways: dict[str, tuple[Any, Callable[[nn.Module], Any]]] = {
        "eager": (fsdp2, eager),
        "torch's, eager": (torch_fsdp, eager),
        "blocks": (fsdp2, blocks),
        "torch's, blocks": (torch_fsdp, blocks),
        "the whole model": (fsdp2, whole),
        'blocks, mode="reduce-overhead"': (fsdp2, graphs),
    }
    if _machine.REHEARSES:
        del ways["torch's, blocks"], ways["torch's, eager"]  # the code is the same
    with _machine.one_rank():
        for name, (library, prepare) in ways.items():
            rows.ask("", name, partial(run, name, library, prepare), 8.0)
            _machine.empty()
        rows.ask("", "a step captured by hand", captured, 5.0)
    rows.end()


if __name__ == "__main__":
    main()
