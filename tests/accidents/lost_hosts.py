"""Lose hosts, and go on from the copies in the memory of the others.

    python -m tests.accidents.lost_hosts [--width 512] [--layers 14]

Each rank has a folder in memory of its own, as if it were a host. A job trains, keeps copies at
neighbours every two steps, and saves to a file once at the beginning. All of its processes are
killed at once, the folders of the lost hosts removed, and ranks are started on what is left: the
next losses must be those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint

STEPS, FILE_AT, EVERY, KILLED_AT = 10, 1, 2, 7
BATCH = 12


class Accident(NamedTuple):
    """Which hosts are lost, whether copies are kept, and on how many ranks the job goes on."""

    lost: tuple[int, ...]
    with_copies: bool = True
    ranks_after: int = 4


ACCIDENTS = {
    "nobody": Accident(()),
    "one host": Accident((1,)),
    "one host, three ranks go on": Accident((1,), ranks_after=3),
    "two that are no neighbours": Accident((0, 1)),
    "two neighbours": Accident((1, 3)),
    "one host, files only": Accident((1,), with_copies=False),
}
RANKS, DISTANCE = 4, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            *(nn.Linear(width, width) for _ in range(2)),
        )

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


def make(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 13))


def batch(step: int, width: int) -> torch.Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))


class Told(NamedTuple):
    """What a rank says: losses by step, seconds, bytes, warnings."""

    losses: dict[int, float]
    load_s: float
    step_s: float
    sent_nbytes: int
    began_at: int
    warned: list[str]


def train(
    rank: int, ranks: int, top: Path, memory: Path, given: Any, accident: Accident, told: Any
) -> None:
    """Train up to the end, or to the step where all are killed, which says so before."""
    is_second = told is not None
    torch.set_num_threads(1)
    store = f"file://{top}/store-{is_second}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    model = make(given.width, given.layers)
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    copies = None
    if accident.with_copies:
        copies = checkpoint.NeighbourCopies(
            "tried", memory=memory, distance=DISTANCE if ranks == RANKS else 1
        )
    dist.barrier()
    start_s = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = checkpoint.load_latest(
            top / "run", model, optimizer, default={"step": 0}, copies=copies
        )["step"]
    load_s = time.perf_counter() - start_s
    losses: dict[int, float] = {}
    step_s = 0.0
    for step in range(first, STEPS):
        rows = batch(step, given.width).chunk(ranks)[rank]
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        losses[step] = total.item()
        step_s = step_s or time.perf_counter() - start_s
        done = {"step": step + 1}
        if copies is not None and (step + 1) % EVERY == 0:
            copies.save(model, optimizer, extra=done)
        if step == FILE_AT:
            place = top / "run" / f"step-{step}"
            checkpoint.save(place, model, optimizer, extra=done, background=True).wait()
        if step == KILLED_AT and not is_second:
            if copies is not None:
                copies.wait()
            dist.barrier()
            (top / f"ready-{rank}").touch()
            time.sleep(60)
    if is_second:
        if copies is not None:
            copies.wait()
        sent = 0 if copies is None else copies.sent_nbytes
        said = [
            str(one.message)
            for one in seen
            if "fsdp2" in str(one.message) or "FS6" in str(one.message)
        ]
        told.send(Told(losses, load_s, step_s, sent, first, said))
    if copies is not None:
        copies.remove()
    dist.destroy_process_group()


def tried(name: str, given: Any) -> tuple[Told, list[str]]:
    """Do an accident; return what the first rank of the second start said, and what is left."""
    accident, context = ACCIDENTS[name], mp.get_context("fork")
    top = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        homes = [top / f"host{rank}" for rank in range(RANKS)]
        for home in homes:
            home.mkdir()
        started = [
            context.Process(
                target=train, args=(rank, RANKS, top, homes[rank], given, accident, None)
            )
            for rank in range(RANKS)
        ]
        for process in started:
            process.start()
        while len([*top.glob("ready-*")]) < RANKS:
            time.sleep(0.01)
            assert all(process.is_alive() for process in started), "a rank failed"
        for process in started:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        for rank in accident.lost:
            shutil.rmtree(homes[rank])
            homes[rank].mkdir()
        left = [homes[rank] for rank in range(RANKS) if rank not in accident.lost]
        ranks = accident.ranks_after
        homes = homes if ranks == RANKS else left
        told, end = context.Pipe(duplex=False)
        _, other = context.Pipe(duplex=False)
        started = [
            context.Process(
                target=train,
                args=(rank, ranks, top, homes[rank], given, accident, other if rank else end),
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        end.close()
        found: Told = told.recv()
        for process in started:
            process.join()
        remains = [str(path.relative_to(top)) for path in top.glob("host*/*")]
        return found, remains
    finally:
        shutil.rmtree(top)


def wanted(given: Any) -> dict[int, float]:
    """Return the losses of one process without accidents."""
    torch.set_num_threads(1)
    model = make(given.width, given.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: dict[int, float] = {}
    for step in range(STEPS):
        loss = model(batch(step, given.width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.accidents.lost_hosts", description=__doc__
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=14)
    given = parser.parse_args(arguments)
    right = wanted(given)
    size = sum(p.numel() for p in make(given.width, given.layers).parameters())
    print(f"{size:,} parameters, AdamW, {RANKS} ranks; killed after step {KILLED_AT + 1}")
    print("| lost | goes on at step | load s | to the next step s | sent MB | losses differ by |")
    print("|---|---:|---:|---:|---:|---:|")
    bad = 0
    for name in ACCIDENTS:
        found, remains = tried(name, given)
        worst = max(abs(loss / right[step] - 1) for step, loss in found.losses.items())
        print(
            f"| {name} | {found.began_at} | {found.load_s:.2f} | {found.step_s:.2f} | "
            f"{found.sent_nbytes / 1e6:.1f} | {worst:.1e} |",
            flush=True,
        )
        for text in found.warned:
            print(f"  {text}")
        bad += worst > 1e-4 or bool(remains)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
