"""How long a sharded model takes to compile, and what of it a second process finds in caches.

    python -m benchmarks.start.compile_time [--depths 4,16,64] [--variants flat,nested] [--stubs]

Each case is a fresh process, rank 0 of 8, that runs `fsdp2.compile(model, fullgraph=True)`: tiny
blocks, the backend inductor, empty caches. `again` is a second process, which finds what the first
one left. `first step` is its wall time and `CPU` the process's own CPU time of it (kernels are
compiled in other processes); `dynamo`, `AOT` (autograd and its passes), `inductor` and `kernels`
(waiting for the C++ compiler) are torch's own measurements. Nodes are those of dynamo's graph, and
those that inductor lowered for forward and for backward. `nested` is with
`torch.compiler.nested_compile_region` on the forward of every block. Notes say what the caches
counted. With `--stubs` no kernel is compiled, and caches are off, so there is no second process.
Times are never gated; nodes are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from itertools import product

from benchmarks.kit.compile_worker import Outcome, Task
from benchmarks.kit.report import REPOSITORY, Figure, Measured, run

DEPTHS = (4, 16, 64)
TIME_LIMIT_S = 1800
VARIANTS = {"flat": False, "nested": True}


def measure(arguments: argparse.Namespace) -> Measured:
    figures, notes = [], []
    for depth, (name, nested) in product(arguments.depths, VARIANTS.items()):
        if name not in arguments.variants:
            continue
        task = Task(depth, nested, arguments.stubs)
        with tempfile.TemporaryDirectory() as folder:
            first = start(task, folder)
            runs = {"": first}
            if not first.error and not task.stubbed:
                runs[", again"] = start(task, folder)
        for suffix, outcome in runs.items():
            case, variant = f"{depth} blocks", name + suffix
            figures += figures_of(case, variant, outcome)
            notes += notes_of(f"{case}, {variant}", outcome)
        print(f"{depth} blocks, {name}: {first.first_s:.0f} s", file=sys.stderr)
    return Measured(figures, {"depths": list(arguments.depths)}, notes)


def start(task: Task, folder: str) -> Outcome:
    """Run a task in a process of its own, with its caches in a folder."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    text = json.dumps(dataclasses.asdict(task))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kit.compile_worker", text],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        capture_output=True,
        timeout=TIME_LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{task} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def figures_of(case: str, variant: str, outcome: Outcome) -> list[Figure]:
    """Return one row; none if it failed, which the notes say."""
    if outcome.error:
        return []
    values = {
        "first step s": outcome.first_s,
        "CPU s": outcome.first_cpu_s,
        **{f"{part} s": seconds for part, seconds in outcome.seconds.items()},
    }
    nodes = {f"nodes, {part}": float(count) for part, count in outcome.nodes.items()}
    order = [f"nodes, {part}" for part in ("dynamo", "forward", "backward")]
    return [
        *(Figure(case, variant, quantity, value) for quantity, value in values.items()),
        *(Figure(case, variant, name, nodes[name], True) for name in order if name in nodes),
    ]


def notes_of(row: str, outcome: Outcome) -> list[str]:
    if outcome.error:
        return [f"{row}: failed. {outcome.error}"]
    caches = "; ".join(f"{name} cache: {state}" for name, state in outcome.caches.items())
    graphs = [f"{count} {name}" for name, count in outcome.nodes.items() if "graphs" in name]
    lowered = f"lowered {', '.join(graphs)}" if graphs else "lowered nothing"
    return [f"{row}: {caches}; {lowered}"]


def parse_depths(text: str) -> list[int]:
    return [int(depth) for depth in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start.compile_time", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--depths", type=parse_depths, default=list(DEPTHS))
    parser.add_argument("--stubs", action="store_true", help="compile no kernels")
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), default=list(VARIANTS), help="flat, nested"
    )
    run("compile_time", __doc__, measure, parser)
