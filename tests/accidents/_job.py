"""The example on two agents of torchrun, each of which stands for a machine.

Owns the processes, and when a step of new workers is seen. It must not know accidents.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.accidents import _program
from tests.kit.pool import find_free_port

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 40
SAVE_EVERY = 4
TIMEOUT_S = 15  # of the process group: for how long a stopped worker is not noticed
LOOK_EVERY_S = 0.02
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}


@dataclass(frozen=True)
class Line:
    """A step as the metrics have it."""

    step: int
    loss: float
    ranks: int


def write_text(folder: Path) -> None:
    """Write a small text to train on."""
    folder.mkdir(parents=True)
    for index in range(80):
        lines = (f"def add_{index}_{n}(x: int) -> int:\n    return x + {n}\n" for n in range(20))
        (folder / f"module_{index}.py").write_text("\n".join(lines))


class Job:
    """A run of the example under ``torchrun --nnodes 1:2 --max-restarts 3``."""

    def __init__(self, folder: Path, *, nodes: int, nproc: int, stop_at: int = STEPS) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.started_s = time.monotonic()
        port = find_free_port()
        self.agents = [self._start(node, port, nproc, stop_at) for node in range(nodes)]

    def _start(self, node: int, port: int, nproc: int, stop_at: int) -> subprocess.Popen[bytes]:
        # short waits for machines that are gone: a keep-alive a second, and 5 s for latecomers
        conf = f"is_host={int(node == 0)},keep_alive_interval=1,last_call_timeout=5"
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", str(nproc), "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "accidents"),
            *("--rdzv-conf", conf, "--local-addr", "127.0.0.1", _program.__file__),
        ]
        text = self.folder.parent / "text"
        example = [
            *("--size", "tiny", "--steps", str(STEPS), "--stop-at", str(stop_at)),
            *("--save-every", str(SAVE_EVERY), "--timeout", str(TIMEOUT_S), "--device", "cpu"),
            *("--recorded-steps", "0", "--sample-bytes", "0", "--held-out-batches", "1"),
            *("--corpus", str(text), "--cache-dir", str(self.folder.parent / "cache")),
            *("--checkpoint-dir", str(self.folder / "run"), "--metrics", str(self.metrics)),
        ]
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
        environment |= {"PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"node{node}.log").open("ab") as log:
            return subprocess.Popen(launcher + example, env=environment, stdout=log, stderr=log)

    # What it does.

    def lines(self) -> list[Line]:
        if not self.metrics.exists():
            return []
        return [Line(**json.loads(line)) for line in self.metrics.read_text().splitlines()]

    def workers(self, node: int | None = None) -> list[int]:
        """Return the processes of ranks that live, of one node or of all."""
        agents = self.agents if node is None else [self.agents[node]]
        mine = {agent.pid for agent in agents}
        return sorted(pid for pid, parent in _programs().items() if parent in mine)

    def is_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents)

    def wait_for_step(self, step: int, limit_s: float) -> None:
        """Return when a step was made, when the job has ended, or after so many seconds."""
        deadline = time.monotonic() + limit_s
        while self.is_running() and time.monotonic() < deadline:
            lines = self.lines()
            if lines and lines[-1].step >= step:
                return
            time.sleep(LOOK_EVERY_S)

    def wait_for_workers(self, limit_s: float) -> list[int]:
        deadline = time.monotonic() + limit_s
        while self.is_running() and time.monotonic() < deadline:
            found = self.workers()
            if found:
                return found
            time.sleep(LOOK_EVERY_S)
        return []

    def next_step(self, old: list[int], deadline: float) -> float | None:
        """Return when a worker that is none of the old ones had made a step; None if none did."""
        known, are_gone = len(self.lines()), False
        while time.monotonic() < deadline:
            is_last_look = not self.is_running()
            found = len(self.lines())
            if found > known and are_gone:
                return time.monotonic()
            if not are_gone and not _programs().keys() & set(old):
                are_gone = True
                found = len(self.lines())  # the last ones of the old workers
            known = found
            if is_last_look:
                return None
            time.sleep(LOOK_EVERY_S)
        return None

    def wait(self, limit_s: float) -> list[int | None]:
        """Return the status of each agent; None for one that had not ended, which is killed."""
        deadline = time.monotonic() + limit_s
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return [agent.poll() for agent in self.agents]

    def end(self) -> None:
        """Kill what is left; workers say where they are first."""
        for number in (signal.SIGCONT, signal.SIGABRT):
            for pid in self.workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for node, agent in enumerate(self.agents):
            left = self.workers(node)
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _programs() -> dict[int, int]:
    """Return processes that run the program and have not ended, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                words = (entry / "cmdline").read_bytes().split(b"\0")
                is_agent = b"torch.distributed.run" in words
                if state != "Z" and not is_agent and _program.__file__.encode() in words:
                    found[int(entry.name)] = int(parent)
    return found
