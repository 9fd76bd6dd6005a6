"""Speed checks: time steps with fsdp2, with torch's FSDP2 and without sharding, and plan a step.
Each round runs all variants, in rotating order, so that other load affects all of them equally."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._core.base import torch_comm, torch_modules
from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.doctor.machine import seconds_of
from fsdp2._tools.doctor.ranks import Ranks, Values
from fsdp2._tools.doctor.verdicts import FAST, NOT_MEASURED, OK, TOO_FEW, WARNING, Check, Verdict

OURS, TORCHS, ALONE, SILENT = "fsdp2", "torch's FSDP2", "unsharded", "without communication"
LOW, FASTEST, PACKED = "set_memory('low')", "set_memory('fast')", "set_copy_free_min_bytes(None)"
WARMUP, FEWEST, MOST = 3, 5, 60
NEAR_NBYTES = 1 << 24
MARK = "fsdp2 doctor: a step"
SHARE = 0.5
"""Fraction of the requested time budget that the timed rounds may use."""
SLOWER, BUSIER = 1.1, 1.25
"""Limits of the step time and the host time, as multiples of the times of torch's FSDP2. A larger
median ratio causes a warning if fsdp2 is slower in three quarters of the rounds."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and the shape of each rank's batch (``rows``, ``tokens``)."""

    depth: int
    width: int
    hidden: int
    vocabulary: int
    rows: int
    tokens: int


ODD = Size(depth=2, width=13, hidden=29, vocabulary=31, rows=3, tokens=5)
"""Sizes for correctness checks: most dims do not split evenly, and one parameter has one row."""
SMALL = Size(depth=4, width=256, hidden=768, vocabulary=1024, rows=2, tokens=32)
LARGE = Size(depth=8, width=2048, hidden=8192, vocabulary=16384, rows=4, tokens=1024)
"""SMALL, for CPUs, has 4 million parameters. LARGE, for GPUs and bf16, has 470 million."""


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
        x = x + self.out(weights @ value)
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.start = nn.Parameter(torch.randn(1, size.width, device=self.embed.weight.device))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words[:, :-1]) + self.start
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), words[:, 1:].flatten())


def build(size: Size, device: torch.device) -> Model:
    """Return a model whose values, generated on the host, are the same on every rank."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        with torch.device("cpu"):
            model = Model(size)
    return model.to(device)


def batch(size: Size, ranks: int, device: torch.device, step: int = 0) -> Tensor:
    """Return the tokens of all ranks: ``[ranks * rows, tokens + 1]``, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(1000 + step)
    shape = (ranks * size.rows, size.tokens + 1)
    words = torch.randint(size.vocabulary, shape, generator=generator, device="cpu")
    return words.to(device)


def shard(
    model: Model,
    mesh: DeviceMesh,
    *,
    by_torch: bool = False,
    bf16: bool = False,
) -> None:
    """Shard each block and the root, with torch's ``fully_shard`` or fsdp2's."""
    library: Any = torch_modules if by_torch else fsdp2
    policy = library.MixedPrecisionPolicy
    precision = {"mp_policy": policy(torch.bfloat16, torch.float32)} if bf16 else {}
    apply = partial(library.fully_shard, mesh=mesh, **precision)
    for block in model.blocks:
        apply(block)
    apply(model)


def _variants(ranks: Ranks, size: Size, stack: ExitStack) -> dict[str, Model | str]:
    """Return the model of each variant, or the reason why it could not be sharded."""
    mesh, bf16 = ranks.mesh(), ranks.device.type != "cpu"
    found: dict[str, Model | str] = {}
    for name in (OURS, SILENT, LOW, FASTEST, PACKED, TORCHS, ALONE):
        model = build(size, ranks.device)
        found[name] = model
        if name == ALONE:
            if bf16:
                model.to(torch.bfloat16)
            continue
        try:
            shard(model, mesh, by_torch=name == TORCHS, bf16=bf16)
        except Exception as error:
            if name != TORCHS:
                raise
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        root: Any = model
        if name in (LOW, FASTEST):
            root.set_memory("low" if name == LOW else "fast")
        elif name == PACKED:
            root.set_copy_free_min_bytes(None)
        elif name == SILENT:
            with warnings.catch_warnings():
                # the warning is about wrong results, which are not used here
                warnings.simplefilter("ignore")
                stack.enter_context(fsdp2.debug.without_communication(model))
    return found


def measure_steps(ranks: Ranks) -> Values:
    """Time all variants in rounds, then profile one step of each of three variants."""
    size = LARGE if ranks.is_large else SMALL
    words = batch(size, ranks.size, ranks.device).chunk(ranks.size)[ranks.rank]
    with ExitStack() as stack:
        models = _variants(ranks, size, stack)
        refused = {name: why for name, why in models.items() if isinstance(why, str)}
        steps = {
            name: _step_of(model, words) for name, model in models.items() if name not in refused
        }
        walls: dict[str, list[float]] = {name: [] for name in steps}
        hosts: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARMUP):
            begun = time.perf_counter()
            for step in steps.values():
                step()
                ranks.synchronize()
        (slowest,) = ranks.most(time.perf_counter() - begun)
        rounds = int(SHARE * ranks.options.seconds / slowest)
        for index in range(min(max(rounds, FEWEST), MOST)):
            names = list(steps)
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                wall, host = _time(ranks, steps[name])
                walls[name].append(wall)
                hosts[name].append(host)
        looks = {name: _look(ranks, steps[name]) for name in (OURS, TORCHS, ALONE) if name in steps}
    return {
        "device": ranks.device.type, "ranks": ranks.size, "seconds": walls, "host": hosts,
        "looks": looks, "refused": refused,
    }  # fmt: skip


def _step_of(model: Any, words: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(words).backward()
        for param in model.parameters():
            param.grad = None

    return step


def _time(ranks: Ranks, step: Callable[[], None]) -> tuple[float, float]:
    """Return a step's duration and its host time (on a CPU, the CPU time of all threads)."""
    ranks.barrier()
    used, begun = time.process_time(), time.perf_counter()
    step()
    issued = time.perf_counter()
    ranks.synchronize()
    ended = time.perf_counter()
    host = time.process_time() - used if ranks.device.type == "cpu" else issued - begun
    return ended - begun, host


def _look(ranks: Ranks, step: Callable[[], None]) -> Values:
    """Count the operations, launches and collectives of one step, and measure its peak memory."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    is_cuda = ranks.device.type == "cuda"
    peak: int | None = None
    if is_cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        ranks.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    try:
        with torch.profiler.profile(activities=kinds, profile_memory=not is_cuda) as profile:
            for _ in range(2):  # the profiler reports a release only if it saw the allocation
                with torch.profiler.record_function(MARK):
                    pass
                step()
                ranks.synchronize()
    except RuntimeError as error:  # some device types have no profiler
        return {"refused": f"{type(error).__name__}: {error}".partition("\n")[0]}
    seen: Any = profile.events()
    begun = max(event.time_range.start for event in seen if event.name == MARK)
    events = [event for event in seen if event.time_range.start > begun]
    outer = [e for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten")]
    if ranks.device.type == "cpu":
        peak = _peak(profile)
    return {
        "operations": sum(event.name.startswith("aten::") for event in outer),
        "collectives": sum(event.name.startswith(("gloo:", "nccl:")) for event in events),
        "launches": sum("LaunchKernel" in event.name for event in events) if is_cuda else None,
        "peak": peak,
    }


def _peak(profile: Any) -> int:
    """Return the peak memory allocated since the beginning of the last step, in bytes."""
    live = highest = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == MARK:
            live = highest = 0
        elif event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


def rounds_of(found: Sequence[Values], name: str, what: str = "seconds") -> list[float]:
    """Return each round's time on the slowest rank, or no times if the variant did not run."""
    times = [one[what].get(name, []) for one in found]
    return [max(of_ranks) for of_ranks in zip(*times, strict=True)]


def ratio(left: Sequence[float], right: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of the ratios, one per round."""
    ratios = sorted(one / other for one, other in zip(left, right, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _of(seconds: Sequence[float]) -> str:
    return _ms(statistics.median(seconds))


def judge_steps(found: Sequence[Values]) -> Iterator[Verdict]:
    ours, peers = rounds_of(found, OURS), rounds_of(found, TORCHS)
    alone, silent = rounds_of(found, ALONE), rounds_of(found, SILENT)
    refused = found[0]["refused"].get(TORCHS, "")
    said = f"{_of(ours)} per step (forward, backward), unsharded model {_of(alone)}"
    if peers:
        low, middle, _ = ratio(ours, peers)
        said += f", torch's FSDP2 {_of(peers)}: fsdp2 takes {middle:.3g} times as long"
        is_slower = middle > SLOWER and low > 1
        yield Verdict(FAST, "step", WARNING if is_slower else OK, said)
    else:
        yield Verdict(FAST, "step", OK, f"{said}; torch's FSDP2 not measured: {refused}")
    yield _exposed(found, ours, silent)
    what = "CPU time of a rank" if found[0]["device"] == "cpu" else "until the step is issued"
    host, of_peer = rounds_of(found, OURS, "host"), rounds_of(found, TORCHS, "host")
    said = f"{_of(host)} ({what})"
    if of_peer:
        low, middle, _ = ratio(host, of_peer)
        said += f", torch's FSDP2 {_of(of_peer)}: ratio {middle:.3g}"
    is_slower = bool(of_peer) and middle > BUSIER and low > 1
    yield Verdict(FAST, "host time", WARNING if is_slower else OK, said)
    yield from _counts(found[0]["looks"])


def _exposed(found: Sequence[Values], ours: Sequence[float], silent: Sequence[float]) -> Verdict:
    name = "exposed communication"
    if found[0]["ranks"] == 1:
        return Verdict(FAST, name, NOT_MEASURED, TOO_FEW)
    exposed = statistics.median(a - b for a, b in zip(ours, silent, strict=True))
    share = exposed / statistics.median(ours)
    said = f"{_ms(max(exposed, 0.0))}, {max(share, 0.0):.0%} of the step"
    if found[0]["device"] == "cpu":
        return Verdict(FAST, name, OK, f"{said}; the ranks share the cores with gloo")
    if share > 0.25:
        said += ": this check's model is small; a larger batch per rank hides more communication"
        return Verdict(FAST, name, WARNING, said)
    return Verdict(FAST, name, OK, said)


def _counts(looks: dict[str, Values]) -> Iterator[Verdict]:
    mine, peer = looks[OURS], looks.get(TORCHS, {})
    for key in ("launches", "operations", "peak"):
        if mine.get(key) is None:
            why = "not counted on this device" if key == "launches" else "no allocator statistics"
            yield Verdict(FAST, key, NOT_MEASURED, mine.get("refused", why))
            continue
        shown = nbytes_text if key == "peak" else str
        where = "more than before the step" if key == "peak" else "per step"
        said = f"{shown(mine[key])} {where}"
        if key == "operations" and mine["collectives"]:
            said += f", {mine['collectives']} gloo or NCCL calls"
        more = peer.get(key)
        if more is not None:
            said += f"; torch's FSDP2 {shown(more)}"
        is_more = more is not None and key != "operations" and mine[key] > SLOWER * more
        yield Verdict(FAST, key, WARNING if is_more else OK, said)


def measure_plan(ranks: Ranks) -> Values:
    """Measure the machine, and plan the step that ``measure_steps`` timed."""
    size = LARGE if ranks.is_large else SMALL
    machine = fsdp2.plan.measure("doctor")  # type: ignore[attr-defined]  # set on a function
    hosts = ranks.hosts_alike
    if 1 < hosts < ranks.size:
        each = ranks.size // hosts
        machine = replace(machine, ranks_per_node=each, near=_near(ranks, hosts, each))
    words = batch(size, 1, torch.device("cpu"))
    keywords: dict[str, Any] = {"mesh": ranks.size, "policy": {Block}, "hardware": machine}
    if ranks.device.type != "cpu":
        keywords["mp_policy"] = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = Model(size)
    step = fsdp2.plan(model, batch=words, **keywords).step
    assert step is not None  # a batch was given
    return {
        "hardware": machine.to_values(),
        "seconds": step.seconds,
        "waits": step.waiting_seconds,
        "peak": step.peak_nbytes - step.start_nbytes,
        "collectives": len(step.collectives),
    }


def _near(ranks: Ranks, hosts: int, each: int) -> float:
    """Return a rank's bandwidth within its host, in bytes per second, on the slowest host."""
    group = ranks.mesh(hosts, each).get_group("shard")
    sent = torch.ones(NEAR_NBYTES, dtype=torch.uint8, device=ranks.device)
    gathered = sent.repeat(each)
    gather = partial(torch_comm.all_gather_single, gathered, sent, group)
    (slowest,) = ranks.most(min(seconds_of(ranks, gather)))
    return (each - 1) * NEAR_NBYTES / slowest


def judge_plan(found: Sequence[Values]) -> Iterator[Verdict]:
    one = found[0]
    said = f"predicts {_ms(one['seconds'])} per step (including {_ms(one['waits'])} of waiting), "
    said += f"{nbytes_text(one['peak'])} of memory, and {one['collectives']} collectives"
    yield Verdict(FAST, "plan", OK, said)


CHECKS = (
    Check(FAST, "steps", measure_steps, judge_steps, limit_s=600.0),
    Check(FAST, "plan", measure_plan, judge_plan, ranks=2),
)
