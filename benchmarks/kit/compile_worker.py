"""One process that compiles one model and says how long it took: started by `compile_time`.

    python -m benchmarks.kit.compile_worker '{"depth": 4, "nested": false, "stubbed": false}'

Prints one line of JSON, an `Outcome`. The folder of the caches is what the environment says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from benchmarks.kit import noop
from benchmarks.kit.models import OURS, Block, Size, build, make_input, make_step

RANKS = 8
CACHES = {
    "AOTAutograd": ("aot_autograd", "autograd_cache_"),
    "FX graph": ("inductor", "fxgraph_cache_"),
}


@dataclass(frozen=True)
class Task:
    """How many blocks to compile, whether as nested regions, whether with stubs for kernels."""

    depth: int
    nested: bool = False
    stubbed: bool = False


@dataclass
class Outcome:
    """What it took. `seconds` by part; `nodes` of graphs; `caches`: hits, misses and bypasses.

    Parts that a process did not come to (a warm one lowers nothing) are absent. `nodes` of forward
    and backward are those that inductor lowered, in all graphs inside too; a graph that was lowered
    once counts once.
    """

    error: str = ""
    first_s: float = 0.0
    first_cpu_s: float = 0.0
    second_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)


def run(task: Task) -> Outcome:
    """Compile and run a step twice."""
    import fsdp2
    from tests.kit.emitted import stubbed_kernels

    if task.nested:
        Block.forward = torch.compiler.nested_compile_region(Block.forward)  # type: ignore[method-assign]
    size, outcome = Size(depth=task.depth), Outcome()
    stubs = stubbed_kernels() if task.stubbed else contextlib.nullcontext()
    with noop.ranks(RANKS) as (_, mesh), stubs, counted_nodes(outcome.nodes):
        warm_up()
        outcome.nodes.clear()
        model = fsdp2.compile(build(OURS, size, mesh, bf16=False), fullgraph=True)
        step = make_step(model, make_input(OURS, size, bf16=False))
        start, cpu = time.perf_counter(), time.process_time()
        try:
            step()
        except Exception as error:
            outcome.error = describe(error)
        outcome.first_s = time.perf_counter() - start
        outcome.first_cpu_s = time.process_time() - cpu
        if not outcome.error:
            start = time.perf_counter()
            step()
            outcome.second_s = time.perf_counter() - start
    outcome.seconds = split()
    outcome.caches = {name: state_of(*where) for name, where in CACHES.items()}
    metrics = torch._dynamo.utils.get_compilation_metrics()
    found = [getattr(one, "graph_node_count", None) or 0 for one in metrics]
    outcome.nodes["dynamo"] = sum(found)
    return outcome


def describe(error: Exception) -> str:
    """Return the type and the first lines of an error, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = " ".join(lines[:3]).split()
    return f"{type(error).__name__}: {' '.join(word for word in words if '/' not in word)}"[:300]


@contextlib.contextmanager
def counted_nodes(nodes: dict[str, int]) -> Iterator[None]:
    """Count the nodes that inductor lowers, and the graphs."""
    from torch._inductor.graph import GraphLowering

    lower = GraphLowering.run

    def run(self: Any, *args: Any) -> Any:
        name = "backward" if self.is_backward else "forward"
        nodes[name] = nodes.get(name, 0) + len(self.graph.nodes)
        nodes[f"{name} graphs"] = nodes.get(f"{name} graphs", 0) + 1
        return lower(self, *args)

    with mock.patch.object(GraphLowering, "run", run):
        yield


def warm_up() -> None:
    """Compile something else first: compilers look at the machine once."""
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    for forget in (torch._dynamo.utils.compilation_time_metrics, torch._dynamo.utils.counters):
        forget.clear()


def split() -> dict[str, float]:
    """Split the time of compilers, as torch measured it, into parts that add up.

    The backward is compiled when it runs first, outside of the time of dynamo's backend.
    """
    measured = torch._dynamo.utils.compilation_time_metrics

    def total(name: str) -> float:
        return float(sum(measured.get(name, ())))

    backend = total("OutputGraph.call_user_compiler")
    inductor, kernels = total("compile_fx_inner"), total("async_compile.wait")
    return {
        "dynamo": total("_compile.compile_inner") - backend,
        "AOT": backend + total("backward._backward_impl") - inductor,
        "inductor": inductor - kernels,
        "kernels": kernels,
    }


def state_of(counters: str, prefix: str) -> str:
    """Return what a cache counted, as `1 hit, 2 miss`."""
    found = torch._dynamo.utils.counters[counters]
    kinds = [(kind, found[prefix + kind]) for kind in ("hit", "miss", "bypass", "guard_miss")]
    return ", ".join(f"{count} {kind}" for kind, count in kinds if count) or "not asked"


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.disable()
    print(json.dumps(dataclasses.asdict(run(Task(**json.loads(sys.argv[1]))))))
