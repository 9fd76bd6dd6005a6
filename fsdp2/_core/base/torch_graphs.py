"""Device graphs: capture, and cleanup after a failed capture.

A call that is not permitted during capture invalidates the capture. torch's ``capture_end`` then
raises before it restores the current stream, the allocator's memory pool and the random number
generator. Any later use of the generator would then raise. ``capture`` restores all three.
``_cuda_endAllocateToPool`` is private in torch 2.11 to 2.15. Other devices do not need this call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def graphs_of(device: torch.device) -> Any:
    """Return a device's torch module, such as ``torch.cuda``; None if the module has no graphs."""
    module = torch.get_device_module(device.type)
    return module if hasattr(module, "CUDAGraph") else None


@contextlib.contextmanager
def capture(graph: Any, module: Any, stream: Any) -> Iterator[None]:
    """Capture the operations inside the context on a stream, with a separate memory pool."""
    pool = module.graph_pool_handle()
    generators = list(getattr(module, "default_generators", ()))[stream.device_index :][:1]
    before = [generator.clone_state() for generator in generators]
    try:
        # The outer context restores the stream even if the inner one does not. The mode is
        # "thread_local" because NCCL's watchdog thread queries events during the capture.
        with (
            module.stream(module.current_stream()),
            module.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    except BaseException:
        for generator, state in zip(generators, before, strict=True):
            generator.graphsafe_set_state(state)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if module is torch.cuda and end is not None:
            with contextlib.suppress(RuntimeError):  # raised if the capture has ended
                end(stream.device_index, pool)
        raise
