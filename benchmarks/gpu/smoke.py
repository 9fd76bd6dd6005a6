"""What is there: versions, NCCL, two ranks on the GPU, and one step of each library."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp

import fsdp2
from benchmarks.gpu import _machine
from benchmarks.gpu._ranks import Worlds
from benchmarks.gpu._rows import Rows
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import ROWS, shard


def versions() -> list[dict[str, Any]]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if not _machine.REHEARSES:
        found |= {
            "CUDA": torch.version.cuda,
            "card": torch.cuda.get_device_name(),
            "GiB": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
            "capability": torch.cuda.get_device_capability(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return [{"what": name, "value": str(value)} for name, value in found.items()]


def step_each_way(folder: Path) -> float:
    """Return this rank's loss after a step; both libraries have the same."""
    losses = []
    case = CASES["stack"]
    for library in (fsdp2, torch_fsdp):
        model = shard(seeded(case.build), case, library)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        torch.manual_seed(0)
        batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
        for _ in range(2):
            loss = loss_of(model(*batch.args, **batch.kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[1]), losses
    return losses[0]


def main() -> None:
    rows, worlds = Rows(), Worlds()
    # before the parent touches CUDA: ranks are forked
    rows.ask("", "two ranks, a step each way", lambda: worlds.ask(2, step_each_way, 30) and None)
    worlds.close()
    _machine.need_a_gpu()
    rows.ask("", "versions", versions)
    rows.ask("", "one rank", one_rank)
    rows.end(f"{_machine.name()}, torch {torch.__version__}")


def one_rank() -> None:
    with _machine.one_rank():
        model = fsdp2.fully_shard(torch.nn.Linear(29, 13, device=_machine.device()))
        model(torch.ones(3, 29, device=_machine.device())).sum().backward()
        _machine.wait()


if __name__ == "__main__":
    main()
