"""How a program ends: with its own status, whatever its last line was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.pool import find_free_port

RANKS = 4
PROGRAM = """
import gc, os, sys, torch, torch.distributed as dist
import torch._dynamo  # seconds, which each rank would spend else
from torch import nn
from fsdp2 import fully_shard

gc.freeze()  # each rank's end looks at what it made, not at all of torch
ranks = range(int(os.environ["WORLD_SIZE"]))
children = []
for rank in ranks:
    child = os.fork()
    if child == 0:
        break  # and be that rank
    children.append(child)
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))

dist.init_process_group("gloo", rank=rank)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
for unit in (*model, model):
    fully_shard(unit)
sys.setswitchinterval(1000)  # no other thread gets the interpreter unless this one lets go of it
for _ in range(5):
    model(torch.ones(4, 16))
"""


def test_a_program_may_end_right_after_a_gather(tmp_path: Path) -> None:
    """Threads of the backend still hold what was gathered last; see `torch_comm.pause_at_exit`.

    Without the pause about one rank in three aborts. The ranks are forks of one interpreter, and
    each ends as an interpreter does.
    """
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ended = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ
        | meeting
        | {"WORLD_SIZE": str(RANKS), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
