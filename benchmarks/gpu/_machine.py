"""The device that stages run on, and a CPU in its place in a rehearsal.

Stages call CUDA through this file. Times in ms, memory in bytes. A CPU knows its time and nothing
of its memory.
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.kit.emulated import GATHER_KERNEL, SCATTER_KERNEL

REHEARSES = os.environ.get("FSDP2_GPU_REHEARSES") == "1"
KIND = "cpu" if REHEARSES else "cuda"
BACKEND = "gloo" if REHEARSES else "nccl"
MB, GB = 1e6, 1e9
# The first that matches a kernel's name is its kind.
KINDS = {
    "emulated collectives": f"{GATHER_KERNEL}|{SCATTER_KERNEL}",
    "matrix products": r"gemm|cutlass|nvjet|cublas|splitK|flash|fmha",
    "copies": r"[Mm]emcpy|copy|[Cc]at|split_with_sizes|chunk|foreach_copy",
    "optimizer": r"[Aa]dam",
    "fills": r"[Mm]emset|[Ff]ill",
    "other": "",
}


def device() -> torch.device:
    return torch.device("cpu") if REHEARSES else torch.device("cuda", 0)


def need_a_gpu() -> None:
    """End the stage as skipped where there is no GPU, and this is no rehearsal."""
    if not REHEARSES and not torch.cuda.is_available():
        print("no GPU here")
        sys.exit(77)
    if REHEARSES:
        torch.set_num_threads(1)


def name() -> str:
    return "a CPU" if REHEARSES else torch.cuda.get_device_name()


def clock_mhz() -> float:
    """Return cycles a microsecond of the device's clock."""
    return 0.0 if REHEARSES else torch.cuda.get_device_properties(0).clock_rate / 1e3


def wait() -> None:
    if not REHEARSES:
        torch.cuda.synchronize()


def allocated() -> int:
    return 0 if REHEARSES else torch.cuda.memory_allocated()


def reserved() -> int:
    return 0 if REHEARSES else torch.cuda.memory_reserved()


def peak() -> int:
    return 0 if REHEARSES else torch.cuda.max_memory_allocated()


def forget_peak() -> None:
    if not REHEARSES:
        torch.cuda.reset_peak_memory_stats()


def empty() -> None:
    gc.collect()
    if not REHEARSES:
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Took:
    """``device_ms`` between events, ``host_ms`` until everything was enqueued."""

    device_ms: float
    host_ms: float


def time_once(work: Callable[[], object]) -> Took:
    """Time work that starts on an idle device."""
    wait()
    began = time.perf_counter()
    if REHEARSES:
        work()
        took = (time.perf_counter() - began) * 1e3
        return Took(took, took)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    host = (time.perf_counter() - began) * 1e3
    end.synchronize()
    return Took(start.elapsed_time(end), host)


def median_ms(work: Callable[[], object], rounds: int = 5) -> float:
    work()
    return statistics.median(time_once(work).device_ms for _ in range(1 if REHEARSES else rounds))


def find_peak(step: Callable[[], None]) -> int:
    """Return the most bytes allocated in one step above its start."""
    step()
    wait()
    forget_peak()
    before = allocated()
    step()
    wait()
    return peak() - before


def side_stream(priority: int = -1) -> Any:
    return None if REHEARSES else torch.cuda.Stream(priority=priority)


@contextmanager
def beside(stream: Any) -> Iterator[None]:
    """Run what follows in a stream, behind what is in the current one; see ``join``."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def join(stream: Any) -> None:
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def profiled(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the events of one step's trace, as Chrome's format has them."""
    activities = [ProfilerActivity.CPU]
    if not REHEARSES:
        activities.append(ProfilerActivity.CUDA)
    wait()
    with profile(activities=activities) as profiler:
        step()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(kernel: str) -> str:
    return next(kind for kind, names in KINDS.items() if re.search(names, kernel))


def kernel_ms(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return sums of the kernels' times by kind; kernels of one kind may overlap others."""
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ON_DEVICE:
            times[kind_of(event["name"])] += event["dur"] / 1e3
    return {f"{kind}, ms": times[kind] for kind in KINDS}


@contextmanager
def one_rank() -> Iterator[None]:
    """Be the only rank of a process group of the device's backend."""
    if not REHEARSES:
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
