"""The figures of ``fsdp2._tools.plan.costs`` that one GPU can tell, and plans beside measured
steps."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows
from benchmarks.gpu._steps import llama, warm_up
from benchmarks.kit import llama as _llama
from fsdp2._tools.plan import costs
from fsdp2._tools.plan.hardware import HARDWARE, Hardware

ROUNDS = 1 if _machine.REHEARSES else 7
BF16 = torch.bfloat16
PRODUCTS = {  # columns of what is multiplied, and of the product: those of an 8 B model
    "q, o": (4096, 4096),
    "k, v": (4096, 1024),
    "w1, w3": (4096, 14336),
    "w2": (14336, 4096),
    "head": (4096, 128256),
}
LARGE = 1 << 30
HOST_CALLS = 1000
ATTENTIONS = ((1, 1024), (1, 4096), (2, 4096))
"""Sequences and their tokens: 32 heads of 128, causal."""
VECTOR = 1 << 28


def machine() -> Hardware:
    """Return the data sheet of the card."""
    name = _machine.name().lower()
    return next(
        (HARDWARE[k] for k in HARDWARE if k.split("-")[0] in name), HARDWARE["h100-nvlink-ib"]
    )


def scale(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, 64) for size in shape) if _machine.REHEARSES else shape


def row(found: float, assumed: float, unit: str) -> dict[str, Any]:
    return {"measured": found, "assumed": assumed, "unit": unit, "ratio": found / assumed}


def seconds(work: Callable[[], object]) -> float:
    return _machine.median_ms(work, ROUNDS) / 1e3


def product_rate(*shape: int) -> float:
    """Return operations a second of a product in bf16, of random numbers, ten in a row."""
    rows, inner, columns = scale(shape)
    left, right = (
        torch.randn(sizes, dtype=BF16, device=_machine.device())
        for sizes in ((rows, inner), (inner, columns))
    )

    def work() -> None:
        for _ in range(10):
            torch.mm(left, right)

    return 10 * 2.0 * rows * inner * columns / seconds(work)


def product(*shape: int) -> dict[str, Any]:
    share = product_rate(*shape) / machine().flops[BF16]
    return row(share, costs.SHARE_OF_PRODUCTS, "share of peak")


def attention(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    batch, tokens = scale(shape)
    q = torch.randn(
        batch, 32, tokens, 128, dtype=BF16, device=_machine.device(), requires_grad=True
    )
    grad = torch.ones_like(q)
    forward = functools.partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    out = forward()
    # two products over the half of the scores that is not masked; the backward has five
    flops = 2 * 2 * batch * 32 * tokens * tokens * 128 / 2
    backward = functools.partial(out.backward, grad, retain_graph=True)
    peak = machine().flops[BF16]
    ways: dict[str, tuple[Callable[[], object], float]] = {
        "forward": (forward, flops),
        "backward": (backward, 2.5 * flops),
    }
    return [
        {
            "way": name,
            **row(
                f / _machine.median_ms(w, ROUNDS) * 1e3 / peak,
                costs.SHARE_OF_PRODUCTS,
                "share of peak",
            ),
        }
        for name, (w, f) in ways.items()
    ]


def moved() -> list[dict[str, Any]]:
    """Kernels that only move memory: what share of the data sheet's bandwidth they reach."""
    count = VECTOR >> 12 if _machine.REHEARSES else VECTOR
    fp32 = torch.ones(count, device=_machine.device())
    bf16 = fp32.to(BF16)
    table = fp32.view(-1, 4096)
    norm = functools.partial(F.rms_norm, bf16.view(-1, 4096), (4096,))
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: fp32.clone(), 8),
        "cast fp32 to bf16": (lambda: bf16.copy_(fp32), 6),
        "cast bf16 to fp32": (lambda: fp32.copy_(bf16), 6),
        "RMSNorm of bf16": (norm, 4),
        "strided copy": (lambda: table[:, :2048].clone(), 4),
    }
    found = []
    for name, (work, nbytes) in ways.items():
        rate = nbytes * count / _machine.median_ms(work, ROUNDS) * 1e3
        found.append(
            {
                "way": name,
                **row(rate / machine().memory_bandwidth, costs.SHARE_OF_MEMORY, "share of peak"),
            }
        )
    return found


def adamw() -> list[dict[str, Any]]:
    """AdamW on 64 shards: fused moves 28 bytes an element, foreach more often."""
    count = VECTOR >> (14 if _machine.REHEARSES else 2)
    found = []
    for name, choice in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        params = [
            torch.ones(count // 64, device=_machine.device(), requires_grad=True) for _ in range(64)
        ]
        for param in params:
            param.grad = torch.ones_like(param)
        optim = torch.optim.AdamW(params, **choice)  # type: ignore[arg-type]
        rate = 28 * count / _machine.median_ms(optim.step, ROUNDS) * 1e3  # type: ignore[arg-type]
        found.append(
            {
                "way": f"AdamW, {name}",
                **row(
                    rate / machine().memory_bandwidth,
                    costs.SHARE_OF_MEMORY,
                    "share of peak, of 28 bytes an element",
                ),
            }
        )
        del optim, params
    return found


def links() -> list[dict[str, Any]]:
    if _machine.REHEARSES:
        return []
    found = []
    for name, seconds in between_host().items():
        found.append({"way": name, **row(LARGE / seconds / 1e9, costs.HOST_LINK / 1e9, "GB/s")})
    return found


def host() -> list[dict[str, Any]]:
    if _machine.REHEARSES:
        return []
    assumed = {
        "launch": costs.LAUNCH,
        "launch, recorded for backward": costs.LAUNCH,
        "collective": costs.LAUNCH_COLLECTIVE,
        "event recorded and waited for, each": costs.EVENT,
        "call of Python": costs.CALL,
    }
    times = host_times()
    return [
        {"way": name, **row(took * 1e6, assumed[name] * 1e6, "us")} for name, took in times.items()
    ]


def shortest() -> dict[str, Any]:
    if _machine.REHEARSES:
        return {}
    return row(shortest_kernel() * 1e6, costs.SHORTEST_KERNEL * 1e6, "us")


def shortest_kernel() -> float:
    """Return what each of many dependent kernels of one element takes, replayed as a graph."""
    value = torch.zeros(1, dtype=torch.float32, device=_machine.device())
    value.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(HOST_CALLS):
            value.add_(1)
    return seconds(graph.replay) / HOST_CALLS


def copy_on_device() -> float:
    source, target = (
        torch.ones(LARGE, dtype=torch.uint8, device=_machine.device()) for _ in range(2)
    )
    return seconds(lambda: target.copy_(source))


def between_host() -> dict[str, float]:
    on_device = torch.ones(LARGE, dtype=torch.uint8, device=_machine.device())
    pinned = torch.ones(LARGE, dtype=torch.uint8, device="cpu", pin_memory=True)
    return {
        "to the device": seconds(lambda: on_device.copy_(pinned, non_blocking=True)),
        "from the device": seconds(lambda: pinned.copy_(on_device, non_blocking=True)),
    }


def host_times() -> dict[str, float]:
    """Return the host's seconds of one call of each kind, in a loop that waits for nothing."""
    value = torch.zeros(16, 16, dtype=torch.float32, device="cuda")
    weight = torch.zeros(16, 16, dtype=torch.float32, device="cuda", requires_grad=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]

    def recorded() -> None:
        with torch.enable_grad():
            torch.mul(value, weight)

    def event() -> None:  # two calls: they count as one of each
        events[0].record(streams[0])
        streams[1].wait_event(events[0])

    def call(argument: int) -> int:
        return argument

    kinds: dict[str, Callable[[], object]] = {
        "launch": lambda: value.add_(1),
        "launch, recorded for backward": recorded,
        "collective": lambda: dist.all_reduce(value, async_op=True),
        "event recorded and waited for, each": event,
        "call of Python": lambda: call(1),
    }
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS + 1):
        for name, work in kinds.items():
            count = HOST_CALLS // 10  # what is queued stays short: a full queue makes hosts wait
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                work()
            found.setdefault(name, []).append((time.perf_counter() - start) / count)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    empty = medians["call of Python"] / 2  # of the two calls that a loop makes for each
    for name in ("launch", "collective"):
        medians[name] -= empty
    medians["event recorded and waited for, each"] /= 2
    medians["call of Python"] = empty
    return medians


def predicted(blocks: int, tokens: int) -> list[dict[str, Any]]:
    """A decoder on one rank, with AdamW: measured, and planned with two sets of figures."""
    shape = llama(blocks)
    tokens = 32 if _machine.REHEARSES else tokens
    policy = fsdp2.MixedPrecisionPolicy(BF16, torch.float32)
    with torch.device(_machine.device()):
        model = _llama.Decoder(shape, shape.blocks)
    mesh = init_device_mesh(_machine.KIND, (1,))
    fsdp2.wrap.shard_model(model, {_llama.Block}, mesh=mesh, mp_policy=policy)
    optim: Any = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=1e-4, fused=True)
    batch = torch.zeros(1, tokens, dtype=torch.int64, device=_machine.device())

    def step() -> None:
        model(batch).backward()
        optim.step()
        optim.zero_grad()

    warm_up(step, 3)
    took = _machine.median_ms(step, ROUNDS)
    with torch.device("meta"):
        bare = _llama.Decoder(shape, shape.blocks)
    rows = [{"figures": "measured", "ms": took, "over measured": 1.0}]
    card = machine()
    for name, hardware in {
        "data sheet": card,
        "costs.py": costs.sustained(card),
        "measured here": measured_machine(card),
    }.items():
        planned: Any = fsdp2.plan(
            bare,
            mesh=1,
            policy={_llama.Block},
            batch=torch.zeros(1, tokens, dtype=torch.int64),
            optimizer=functools.partial(torch.optim.AdamW, fused=True),
            hardware=hardware,
            mp_policy=policy,
        ).step
        ms = planned.seconds * 1e3
        rows.append({"figures": name, "ms": ms, "over measured": ms / took})
    return rows


def measured_machine(card: Hardware) -> Hardware:
    """Return the card with the shares of a product of a block and of a copy, as they are here."""
    if _machine.REHEARSES:
        return card
    with torch.no_grad():
        compute = product_rate(4096, 4096, 14336) / card.flops[BF16]
        memory = 2 * LARGE / copy_on_device() / card.memory_bandwidth
    return card.scaled(compute=compute, memory=memory)


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    with _machine.one_rank():
        for blocks, tokens in ((4, 4096), (4, 1024))[: 1 if _machine.REHEARSES else 2]:
            rows.ask(
                "plan",
                f"{blocks} 8B blocks, {tokens} tokens",
                functools.partial(predicted, blocks, tokens),
                8.0,
            )
        with torch.no_grad():
            for name, work in (
                ("shortest kernel", shortest),
                ("host", host),
                ("memory", moved),
                ("link", links),
            ):
                rows.ask("figures", name, work)
            for name, sizes in PRODUCTS.items():
                for tokens in (1024, 4096):
                    ask = functools.partial(product, tokens, *sizes)
                    rows.ask("figures", f"{name}, {tokens} tokens", ask)
        for shape in ATTENTIONS:
            rows.ask(
                "figures",
                f"attention, {shape[0]} x {shape[1]}",
                functools.partial(attention, shape),
            )
        rows.ask("figures", "optimizer", adamw)
    rows.end()


if __name__ == "__main__":
    main()
