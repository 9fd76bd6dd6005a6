"""A simulated accelerator: a device of torch in the host's memory that checks what waits for what.

`load` makes the device "sim" known to torch in this process: its streams, events, allocator and
process group run unmodified programs. Kernels are the host's and run at once, so values are those
of the host; what is checked is the *order* (csrc/order.h). What is found:

- RACE: two accesses to the same bytes, at least one a write, that nothing orders.
- REUSE: memory that was freed, or freshly allocated, while another stream may still use it.
- HOST: pinned memory that the host wrote to while the device was copying it.
- GRAPH: memory that a replay of a captured step uses, and that was freed since (csrc/graph.h).

Host waits are listed beside these: where the program stopped until the device had caught up.
No GPU takes part: neither the speed of kernels nor what NCCL does inside is simulated.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.kit.sim._build import NoCompilerError, build

DEVICE = "sim"
_ROOT = f"{Path(__file__).parents[3]}/"  # left out of what people read


@dataclass(frozen=True)
class Found:
    """Something that the simulator has to say: what kind, where, and how often."""

    kind: str
    text: str
    times: int

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.kind}{often}: {self.text.replace(_ROOT, '')}"


@functools.cache
def load() -> Any:
    """Make the device known to torch, in this process and for good; return the simulator."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    path = build()
    spec = importlib.util.spec_from_file_location("fsdp2_sim", path)
    assert spec is not None
    assert spec.loader is not None
    simulator = importlib.util.module_from_spec(spec)
    sys.modules["fsdp2_sim"] = simulator
    spec.loader.exec_module(simulator)
    torch._register_device_module(DEVICE, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(
        DEVICE, functools.partial(_make_group, simulator), devices=[DEVICE]
    )
    return simulator


def _device_module() -> types.ModuleType:
    """Return what torch.cuda is for a GPU, as far as torch asks for it."""
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.manual_seed = module.manual_seed_all = lambda seed: None  # the host's numbers are ours
    module.get_rng_state = _get_rng_state
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream  # torch.Stream is a context manager itself
    module.CUDAGraph, module.graph = CapturedGraph, Capture
    module.graph_pool_handle = lambda: (0, 0)
    module.is_current_stream_capturing = lambda: load().is_capturing()
    return module


def _get_rng_state(device: Any = None) -> torch.Tensor:
    if load().is_capturing():  # aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, current_seed
        raise RuntimeError("sim: the state of a generator cannot be read during a capture")
    return torch.get_rng_state()


class CapturedGraph:
    """What ``torch.cuda.CUDAGraph`` is for a GPU. See csrc/graph.h."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._randomness = torch.get_rng_state()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._randomness = torch.get_rng_state()
        self._graph = load().begin_capture()

    def capture_end(self) -> None:
        torch.set_rng_state(self._randomness)  # nothing was drawn
        load().end_capture()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None


class Capture:
    """What ``torch.cuda.graph`` is for a GPU."""

    def __init__(
        self,
        cuda_graph: CapturedGraph,
        pool: Any = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._stream = torch.Stream(DEVICE) if stream is None else stream

    def __enter__(self) -> None:
        torch.accelerator.synchronize()
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._stream.__exit__(*error)


def _make_group(simulator: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
    prefixed = dist.PrefixStore("sim", store)
    return simulator.make_group(dist.ProcessGroupGloo(prefixed, rank, size, timeout), rank, size)


def reports() -> list[Found]:
    """Return what is wrong so far, in this process."""
    return [Found(*found) for found in load().reports()]


def waits() -> list[Found]:
    """Return where the host has waited for the device so far."""
    return [Found(*found) for found in load().waits()]


def finish() -> None:
    """Let the device finish; what the host wrote too early to pinned memory is found by it."""
    load().finish()


def name_lanes(streams: Any) -> None:
    """Let reports call the streams of a tree by the names of their lanes."""
    for name, stream in getattr(streams, "_lanes", {}).items():
        load().name_stream(stream.stream_id, f"lane {name}")


def check() -> None:
    """Raise AssertionError with all that is wrong, and forget it."""
    finish()
    found = reports()
    load().forget()
    assert not found, "\n\n".join(map(str, found))


__all__ = [
    "DEVICE",
    "Found",
    "NoCompilerError",
    "check",
    "finish",
    "load",
    "name_lanes",
    "reports",
    "waits",
]
