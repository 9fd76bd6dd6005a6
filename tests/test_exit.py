"""How a program ends: with its own status, whatever its last line was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests._pool import find_free_port

RANKS = 4
PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from fsdp2 import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
for unit in (*model, model):
    fully_shard(unit)
sys.setswitchinterval(1000)  # no other thread gets the interpreter unless this one lets go of it
for _ in range(5):
    model(torch.ones(4, 16))
"""


def test_a_program_may_end_right_after_a_gather(tmp_path: Path) -> None:
    """Threads of the backend still hold what was gathered last; see `_torch.pause_at_exit`.

    Without the pause about one rank in three aborts.
    """
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    root = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    printed = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, printed
