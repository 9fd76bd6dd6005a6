"""Promise: torchft may take replicas of a sharded model away and give them back between steps.

Groups of two ranks each; fsdp2 shards inside a group, torchft's manager averages over the groups
that take part, in the hook behind a reduction. Every step that was committed is compared with an
unsharded model on the batches of those that took part in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor

from tests.ecosystem._replica import (
    DIES_IN,
    WAITS_IN,
    Settings,
    batch_of,
    build,
    loss_of,
    optimizer_of,
)
from tests.kit.pool import ENVIRONMENT
from tests.kit.slow import slow

pytest.importorskip("torchft", reason="the package torchft is not installed")

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
RANKS = 2
LIMIT_S = 240


class Group:
    """The processes of a replica group, and what its first rank said."""

    def __init__(self, settings: Settings, lighthouse: str, folder: Path) -> None:
        self.settings = settings
        self.outputs: list[TextIO] = []
        self.processes = []
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        for rank in range(RANKS):
            output = (folder / f"output-{len(list(folder.iterdir()))}").open("w+")
            environment = {
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "TORCHFT_LIGHTHOUSE": lighthouse,
            }
            words = json.dumps(dataclasses.asdict(settings))
            command = [sys.executable, "-m", "tests.ecosystem._replica", words]
            self.processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
                )
            )
            self.outputs.append(output)

    def wait(self) -> list[int]:
        return [process.wait(LIMIT_S) for process in self.processes]

    def text(self, rank: int) -> str:
        self.outputs[rank].seek(0)
        return self.outputs[rank].read()

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(0).splitlines() if line.startswith('{"')]

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for output in self.outputs:
            output.close()


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """Give a function that starts a replica group beside a lighthouse; end what it started."""
    from torchft.coordination import LighthouseServer

    # Whoever is alive is waited for, and who gives no sign for 2 s is not: no step has fewer.
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=2_000
    )
    groups: list[Group] = []
    port = lighthouse.address().rpartition(":")[2]
    with tempfile.TemporaryDirectory() as folder:

        def start(replica: int, **settings: Any) -> Group:
            chosen = Settings(f"group_{replica}", replica, folder, **settings)
            groups.append(Group(chosen, f"http://localhost:{port}", Path(folder)))
            return groups[-1]

        try:
            yield start
        finally:
            for group in groups:
                group.end()
            lighthouse.shutdown()


def expected(lives: list[Group], scale: float) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Step an unsharded model; give each step, how many took part, and its weights after it."""
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_of(model)
    last = max(said["step"] for life in lives for said in life.steps())
    for step in range(last + 1):
        took_part = {
            life.settings.replica
            for life in lives
            for said in life.steps()
            if said["step"] == step and said["committed"] and said["takes_part"]
        }
        optimizer.zero_grad()
        for replica in sorted(took_part):
            for rank in range(RANKS):
                loss = loss_of(model, batch_of(step, replica, rank))
                (loss * scale / (RANKS * len(took_part))).backward()
        optimizer.step()
        yield step, len(took_part), {name: p.detach() for name, p in model.named_parameters()}


def check(lives: list[Group], scale: float) -> list[int]:
    """Compare all weights after steps that were committed; return how many took part in each."""
    counts = []
    for step, count, weights in expected(lives, scale):
        for life in lives:
            for said in life.steps():
                if said["step"] != step or not said["committed"]:
                    continue
                assert said["participants"] == count, (step, life.settings.name)
                for name, value in weights.items():
                    torch.testing.assert_close(torch.tensor(said["weights"][name]), value)
        counts.append(count)
    return counts


WAYS = [
    ("before", -1, False, None),
    slow("reduction", -1, False, None),
    slow("reduction", 1, False, None),
    slow("forward", 0, False, None),
    slow("before", -1, True, None),
    slow("reduction", -1, True, None),
    slow("reduction", -1, False, 1.0),
]


@pytest.mark.parametrize(("where", "rank", "is_async", "divided_by"), WAYS)
def test_a_replica_leaves_and_comes_back(
    where: str, rank: int, is_async: bool, divided_by: float | None
) -> None:
    """It is killed before its third step or inside of it; three become two, and three again."""
    with started() as start:
        common: dict[str, Any] = {
            "replicas": 2,
            "is_async": is_async,
            "is_divided_by": divided_by,
        }
        stay = [start(replica, **common) for replica in range(2)]
        leaves = start(2, **common, dies_at=where, rank_dies=rank)
        ended = leaves.wait()
        for one, code in enumerate(ended):
            if rank in (-1, one):
                assert code == -signal.SIGKILL, leaves.text(one)
            else:  # the other rank of its group hears of it, in the step or when it is over
                assert code == 1
                said = leaves.text(one)
                assert "another rank did not participate" in said or "should_commit" in said, said
        returned = start(2, **common, seed=1)  # the weights that it begins with are others
        for group in (*stay, returned):
            assert group.wait() == [0, 0], group.text(0) + group.text(1)
        lives = [*stay, leaves, returned]
        counts = check(lives, scale=1.0 if divided_by is None else RANKS / divided_by)
        assert counts[0] == 3
        assert counts[DIES_IN] == 2
        assert counts[-2:] == [3, 3]
        back = [said["step"] for said in returned.steps()]
        assert back[0] >= WAITS_IN, back  # it goes on where the others are
