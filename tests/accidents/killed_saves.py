"""Kill processes while they save in the background, and look at what a load finds then.

    python -m tests.accidents.killed_saves --count 200 [--ranks 2] [--seed 0]

Each round starts ranks that fill a model and its optimizer's states with a number, save it in the
background, and go on with the next number, until one of them, or all, get SIGKILL at a random
moment. Then another process loads the newest checkpoint. It must be whole: one number everywhere,
the one that its `extra` names, and not older than the last one whose `wait` had returned.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint

FORMS = ("one folder", "series")


def make(*, shards: bool) -> tuple[nn.Module, Any]:
    """Return a model of a megabyte in odd shapes, and its optimizer with all of its states."""
    model = nn.Sequential(*(nn.Linear(229, 113) for _ in range(6)), nn.Linear(13, 1))
    if shards:
        fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return model, optimizer


def fill(model: nn.Module, optimizer: Any, number: float) -> None:
    for param in model.parameters():
        nn.init.constant_(param, number)
        for key in ("exp_avg", "exp_avg_sq"):
            nn.init.constant_(optimizer.state[param][key], number)


def save_on(rank: int, ranks: int, folder: Path, form: str, first: int) -> None:
    """Save one number after the other, until somebody kills this process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}-store-{first}", rank=rank, world_size=ranks
    )
    model, optimizer = make(shards=True)
    for number in range(first, first + 1000):
        fill(model, optimizer, number)
        place = folder / "saved" if form == "one folder" else folder / f"step-{number}"
        keep_last = None if form == "one folder" else 2
        handle = checkpoint.save(
            place, model, optimizer, extra=number, background=True, keep_last=keep_last
        )
        fill(model, optimizer, -1)  # what comes next is not in it
        handle.wait()
        if rank == 0:
            (folder / ".sure.new").write_text(str(number))
            os.replace(folder / ".sure.new", folder / ".sure")


def look(folder: Path, told: Any) -> None:
    """Load the newest one, and send its number, or what is wrong."""
    model, optimizer = make(shards=False)
    found = checkpoint.load_latest(folder, model, optimizer)
    values = [*model.parameters()]
    values += [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    if found is not None and not all((value == found).all() for value in values):
        told.send(f"it says {found}, and holds {sorted({v.flatten()[0].item() for v in values})}")
    else:
        told.send(found)


@dataclass(frozen=True)
class Round:
    """What came of one kill."""

    who: str
    problem: str | None
    was_writing: bool


def kill_once(context: Any, chance: random.Random, folder: Path, form: str, ranks: int) -> Round:
    sure = folder / ".sure"
    before = int(sure.read_text()) if sure.exists() else 0
    first = before + 1000
    started = [
        context.Process(target=save_on, args=(rank, ranks, folder, form, first), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    limit = time.monotonic() + 60
    while not any(".tmp-" in name for name in os.listdir(folder)):
        if time.monotonic() > limit:
            raise RuntimeError("no save began within a minute")
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.8))
    victims = chance.choice([[0], [1], [*range(ranks)]])
    for number in victims:
        os.kill(started[number].pid, signal.SIGKILL)
    was_writing = any(".tmp-" in name for name in os.listdir(folder))
    for process in started:
        process.join(0.01)
        process.kill()
        process.join()
    Path(f"{folder}-store-{first}").unlink(missing_ok=True)
    told, end = context.Pipe(duplex=False)
    looker = context.Process(target=look, args=(folder, end), daemon=True)
    looker.start()
    end.close()
    try:
        found = told.recv()
    except EOFError:
        found = "the load failed"
    looker.join()
    known = int(sure.read_text()) if sure.exists() else 0
    problem = None
    if isinstance(found, str):
        problem = found
    elif (found or 0) < known:
        problem = f"loaded {found}, and {known} was there before"
    return Round("rank " + ", ".join(map(str, victims)), problem, was_writing)


def run(count: int, ranks: int, seed: int) -> list[Round]:
    """Kill so many times, each form of a checkpoint in turn."""
    context, chance = mp.get_context("fork"), random.Random(seed)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as top:
        folders = {form: Path(top, form.replace(" ", "-")) for form in FORMS}
        for folder in folders.values():
            folder.mkdir()
        for number in range(count):
            form = FORMS[number % len(FORMS)]
            rounds.append(kill_once(context, chance, folders[form], form, ranks))
            if rounds[-1].problem:
                print(f"round {number}, {form}, {rounds[-1].who}: {rounds[-1].problem}", flush=True)
        for form, folder in folders.items():
            print(f"left in the folder ({form}): {sorted(os.listdir(folder))}")
    return rounds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.accidents.killed_saves", description=__doc__
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    rounds = run(given.count, given.ranks, given.seed)
    bad = [one for one in rounds if one.problem]
    writing = sum(one.was_writing for one in rounds)
    print(f"{len(rounds)} kills, {writing} of them while a save was being written, {len(bad)} bad")
    print(", ".join(f"{who}: {n}" for who, n in sorted(Counter(r.who for r in rounds).items())))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
