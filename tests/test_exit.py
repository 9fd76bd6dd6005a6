"""How a program ends: with its own status, whatever its last line was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [sys.executable, *launcher, str(path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
