"""A rank of a replica group under torchft's manager: a program that may be killed, and come again.

    python -m tests.ecosystem._replica SETTINGS     (JSON; see `Settings`)

It shards a small model over the ranks of its group, and lets the manager average the shards'
gradients over whichever groups take part in the step. It prints one JSON line a step. A run has
three groups; it is over when one was away, and all three have made two steps again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2 import checkpoint

WIDTH = 6
ROWS = 4  # of a rank's batch
LIMIT = timedelta(seconds=90)  # for others to be there
SILENCE = timedelta(seconds=20)  # in a step
GROUPS = 3
DIES_IN, WAITS_IN = 2, 4
"""The step in which a group leaves, and the one before which the others wait for its return."""


@dataclass(frozen=True)
class Settings:
    """What the test says to a rank."""

    name: str  # of the replica group
    replica: int  # whose batches it takes, whoever takes part
    folder: str  # where a group says that it lives
    replicas: int  # with fewer no step is committed
    seed: int = 0  # of the first weights
    is_async: bool = False  # the quorum is looked for while forward runs
    is_divided_by: float | None = None
    dies_at: str = ""  # before the step, in its forward or in its second reduction
    rank_dies: int = -1  # the rank that does; -1: all


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 3))


def batch_of(step: int, replica: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * replica + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def wait_for_groups(folder: Path, lives: int) -> None:
    """Wait until as many lives of groups have begun."""
    while len(list(folder.glob("group_*-*"))) < lives:
        time.sleep(0.05)


def main(settings: Settings) -> None:
    import torchft

    folder = Path(settings.folder)
    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    torch.manual_seed(settings.seed)
    model = build()
    for layer in (model[0], model[2], model):
        fsdp2.fully_shard(layer)
    optimizer = optimizer_of(model)

    def die_in(where: str, step: int) -> None:
        is_it = settings.rank_dies in (-1, rank)
        if (where, step) == (settings.dies_at, DIES_IN) and is_it:
            os.kill(os.getpid(), signal.SIGKILL)

    held: dict[str, Any] = {}  # what the manager may read in its own thread
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=SILENCE),
        load_state_dict=lambda state: checkpoint.load_local_state(model, state, optimizer),
        state_dict=lambda: held["state"],
        min_replica_size=settings.replicas,
        use_async_quorum=settings.is_async,
        # Else torchft has each rank ask a replica of its own in the first step, and a load of ours
        # is for all ranks of a group.
        init_sync=False,
        replica_id=settings.name,
        hostname="localhost",
        timeout=SILENCE,
        quorum_timeout=LIMIT,
    )
    calls: list[int] = []

    def average(reduced: Tensor) -> None:
        calls.append(reduced.numel())
        if len(calls) == 2:
            die_in("reduction", manager.current_step())
        manager.allreduce(reduced).wait()

    (folder / f"{settings.name}-{settings.seed}").touch()
    for layer in (model[0], model[2], model):
        layer.set_all_reduce_hook(average)
        if settings.is_divided_by is not None:
            layer.set_gradient_divide_factor(settings.is_divided_by)
    steps_again = 0
    while steps_again < 2:
        is_waiting = manager.current_step() == WAITS_IN
        wait_for_groups(folder, GROUPS + 1 if is_waiting else GROUPS)
        die_in("before", manager.current_step())
        calls.clear()
        held["state"] = checkpoint.local_state(model, optimizer)
        manager.start_quorum()
        optimizer.zero_grad()
        step = manager.current_step()
        loss = loss_of(model, batch_of(step, settings.replica, rank))
        die_in("forward", step)
        loss.backward()
        if settings.is_async:
            step = manager.current_step()  # a group that comes back has the others' now
        takes_part, count = manager.is_participating(), manager.num_participants()
        if is_committed := manager.should_commit():
            optimizer.step()
            steps_again += step >= DIES_IN and count == GROUPS
        whole = checkpoint.full_state(model)
        if rank == 0:
            said = {
                "step": step,
                "committed": is_committed,
                "takes_part": takes_part,
                "participants": count,
                "weights": {name: value.tolist() for name, value in whole["model"].items()},
            }
            print(json.dumps(said), flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
