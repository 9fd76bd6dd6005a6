"""One process of `benchmarks.step.host`: run the models of some libraries and count.

`python -m benchmarks.kit.host_worker REQUEST`, where REQUEST is a `Request` as JSON. It prints one
line of JSON; mode `count` closes one callgrind window a model instead of returning results, and the
parent reads the dumps. Not meant to be called by hand.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit import callgrind, models, noop
from benchmarks.kit.dispatch import OpCounter

CALLS_TIMED = 16


@dataclass(frozen=True)
class Request:
    """What one worker process does."""

    mode: str  # "count", "ops" or "profile"
    libraries: list[str]
    precisions: list[str]
    depths: list[int]
    steps: int
    warmup: int
    world_size: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"{self.mode} of {', '.join(self.libraries)}"


def make_label(library: str, precision: str, depth: int) -> str:
    """Name one model's result."""
    return f"{library}, {precision}, {depth}"


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    group, mesh = noop.start(request.world_size)
    gc.disable()
    if request.mode == "count" and "plain" in request.libraries:
        _count_collectives(request.world_size)
    results: dict[str, Any] = {}
    for library in request.libraries:
        for precision in request.precisions:
            if not models.applies(library, precision):
                continue
            for depth in request.depths:
                size, bf16 = models.Size(depth), precision == "bf16"
                step = models.prepare_step(library, size, mesh, bf16=bf16)
                for _ in range(request.warmup):
                    step()
                label = make_label(library, precision, depth)
                if request.mode == "count":
                    with callgrind.Counter().window(label):
                        for _ in range(request.steps):
                            step()
                elif request.mode == "ops":
                    results[label] = _count_ops(step, group)
                else:
                    results[label] = _profile(step, request.steps)
    print(json.dumps({"results": results, "is_foreign": _is_foreign()}))


def _count_collectives(world_size: int) -> None:
    """Close a window each over calls of the two collectives, to show what a no-op one costs."""
    whole, shard = torch.zeros(world_size * 8), torch.zeros(8)
    # torch 2.13 renamed both functions and deprecated the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: gather(whole, shard),
        "reduce_scatter": lambda: scatter(shard, whole),
    }
    for label, call in calls.items():
        call()
        with callgrind.Counter().window(label):
            for _ in range(CALLS_TIMED):
                call()


def _count_ops(step: Callable[[], None], group: noop.NoopGroup) -> dict[str, Any]:
    before = group.calls
    with OpCounter() as counter:
        step()
    return {"ops": dict(counter.names), "collectives": group.calls - before}


def _profile(step: Callable[[], None], steps: int) -> dict[str, list[float]]:
    """Return `{function: [calls, own seconds, cumulative seconds]}` a step."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # not in the stubs
    rows = {}
    for (path, line, name), (_, calls, own, cumulative, _callers) in stats.items():
        rows[_name_function(path, line, name)] = [calls / steps, own / steps, cumulative / steps]
    return rows


def _name_function(path: str, line: int, name: str) -> str:
    if path == "~":
        return name
    for root in sorted(sys.path, key=len, reverse=True):
        if root and path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    return f"{path}:{line} {name}"


def _is_foreign() -> bool:
    """Return True if `fsdp2` is not of this repository: a placeholder or an installed copy."""
    if "fsdp2" not in sys.modules:
        return False
    expected = Path(__file__).resolve().parents[2] / "fsdp2" / "__init__.py"
    return Path(sys.modules["fsdp2"].__file__ or "").resolve() != expected


if __name__ == "__main__":
    main()
