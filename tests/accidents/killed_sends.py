"""Ranks that are killed while weights go to an engine: no engine rank has a mixed version.

    python -m tests.accidents.killed_sends [--trials 50] [--side trainer engine] [--seed 0]

Two trainers send to two engine ranks, over gloo. In the second update one rank of a side kills
itself at a random moment. Every survivor must end within the group's timeout: with the new version
on all engine ranks that are left, or with an error and the old one on all of them. Each tensor is
filled with the number of its version, so that a mixture is seen. It prints how trials ended, and
ends with 1 if one of them broke this promise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import weights
from fsdp2.weights import Box, Spec

TRAINERS, ENGINES, LAYERS, WIDTH = 2, 2, 12, 128
TIMEOUT = timedelta(seconds=8)


def layout() -> list[dict[str, Spec]]:
    half = WIDTH // ENGINES
    return [
        {
            f"{n}.weight": Spec(
                (half, WIDTH), torch.bfloat16, [Box(f"{n}.weight", (half * e, 0), (half, WIDTH))]
            )
            for n in range(LAYERS)
        }
        for e in range(ENGINES)
    ]


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def die_after(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def run_rank(rank: int, folder: Path, victim: int, share: float) -> None:
    """One rank of a trial; what it found goes into a file."""
    torch.set_num_threads(1)
    world = TRAINERS + ENGINES
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    text: list[str] = [""]
    if rank < TRAINERS:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        fsdp2.fully_shard(model, mesh=mesh)
        plan = weights.plan(model, layout(), max_bytes=16384)
        text = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    receiver = weights.Receiver(text[0], rank - TRAINERS) if rank >= TRAINERS else None
    error = ""
    took = 0.0
    for update in (1, 2):
        if rank < TRAINERS:
            fill(model, update)
        dist.barrier()
        if update == 2:
            (folder / "begun").touch()
        start = time.monotonic()
        if update == 2 and rank == victim:
            die_after(share * took)
        try:
            if receiver is None:
                plan.send(dist.group.WORLD, list(range(TRAINERS, world)))
            else:
                receiver.receive(dist.group.WORLD)
        except Exception as caught:
            error = f"{type(caught).__name__}: {str(caught)[:100]}"
        took = time.monotonic() - start
    if rank == victim:
        time.sleep(5)  # until it is killed
    tensors = receiver.tensors.values() if receiver is not None else ()
    found = {
        "error": error,
        "took": took,
        "version": receiver.version if receiver is not None else plan.version,
        "values": sorted({float(v) for tensor in tensors for v in tensor.unique()}),
    }
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"{rank}.json")
    os._exit(0)


def trial(victim: int, share: float) -> tuple[str, str]:
    """Return how a trial ended, and what is wrong with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(TRAINERS + ENGINES):
            child = os.fork()
            if child == 0:
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
                try:
                    run_rank(rank, folder, victim, share)
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        if not (folder / "begun").exists():
            return "did not begin", ""  # a machine under load
        found = {
            rank: json.loads((folder / f"{rank}.json").read_text())
            for rank in range(TRAINERS + ENGINES)
            if (folder / f"{rank}.json").exists()
        }
    survivors = {rank for rank in range(TRAINERS + ENGINES) if rank != victim}
    if set(found) - {victim} != survivors:
        return "broken", f"ranks {sorted(survivors - set(found))} did not end well"
    engines = [found[rank] for rank in sorted(survivors) if rank >= TRAINERS]
    versions = {one["version"] for one in engines}
    if len(versions) != 1 or any(one["values"] != [one["version"]] for one in engines):
        return "broken", f"a mixed version: {engines}"
    slow = max(one["took"] for rank, one in found.items() if rank != victim)
    if slow > 3 * TIMEOUT.total_seconds():
        return "broken", f"a survivor took {slow:.1f} s"
    told = all(found[rank]["error"] for rank in survivors)
    if versions == {2}:
        return "new version, told on all" if told else "new version", ""
    return ("old version, told on all", "") if told else ("broken", f"not told: {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--side", nargs="+", default=["trainer", "engine"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, status = random.Random(arguments.seed), 0
    for side in arguments.side:
        ends: Counter[str] = Counter()
        for number in range(arguments.trials):
            first, count = (0, TRAINERS) if side == "trainer" else (TRAINERS, ENGINES)
            victim, share = first + chance.randrange(count), chance.uniform(0, 1.3)
            end, wrong = trial(victim, share)
            ends[end] += 1
            if wrong:
                status = 1
                print(f"{side} {number}: rank {victim} at {share:.2f}: {wrong}", flush=True)
        print(f"{side}: {dict(ends)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
