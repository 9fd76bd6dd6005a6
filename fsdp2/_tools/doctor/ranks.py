"""The ranks of the doctor: rendezvous, exchange of measurements, and waits with a time limit.

[Note: answers go through the store]
A process group with a stopped or failed rank is unusable, so measurements are exchanged through a
separate store. Each rank writes its answer, waits for the answers of the others, and then proposes
the set of answers that it found. All ranks use the first proposal, and so the same set of answers.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public, not listed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from fsdp2._core.comm.mesh import default_device_type

Values = dict[str, Any]
"""One rank's measurements: JSON values, so that they can be exchanged and saved."""
GRACE = timedelta(seconds=5)
"""Time to wait for an answer in addition to the timeout of a collective."""


class LostRankError(RuntimeError):
    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from {list(ranks)}")
        self.ranks = tuple(ranks)


class Ranks:
    """This rank and its connection to the other ranks. ``options``: of the command. ``patience``:
    the time limit of a collective. ``hosts``: the host number of each rank."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.patience = timedelta(seconds=options.timeout)
        self.device = torch.device(default_device_type())
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:  # started without a launcher
            self.rank, self.size = 0, 1
            self._store: Any = HashStore()
        else:
            self._store, self.rank, self.size = next(rendezvous("env://", timeout=self.patience))
            self._store.set_timeout(self.patience)
        if self.device.type == "cuda":
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        self.hosts: tuple[int, ...] = ()
        self._asked = 0  # number of checks so far
        self._exchanges = 0  # number of exchanges in this check; a rank that raises skips some
        self._generation = 0

    @property
    def is_large(self) -> bool:
        """Return True if the device can run large models."""
        return self.device.type == "cuda"

    @property
    def hosts_alike(self) -> int:
        """The number of hosts if it divides the number of ranks, else 1."""
        hosts = len(set(self.hosts))
        return hosts if self.size % hosts == 0 else 1

    def meet(self) -> None:
        """Create the process group, or replace it after an error; determine the ranks' hosts."""
        if dist.is_initialized():
            with suppress(Exception):  # a group whose ranks failed may not shut down cleanly
                dist.destroy_process_group()
        self._generation += 1
        kind = self.device.type
        backends = {one: dist.get_default_backend_for_device(one) for one in ("cpu", kind)}
        named = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        dist.init_process_group(
            named if len(backends) > 1 else backends["cpu"],
            store=PrefixStore(f"doctor-{self._generation}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.patience,
        )
        if not self.hosts:
            names = self.exchange(os.environ.get("GROUP_RANK", "") + "@" + socket.gethostname())
            numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
            self.hosts = tuple(numbers[name] for name in names)

    def mesh(self, *shape: int) -> DeviceMesh:
        """Return a mesh of all ranks. A shape of two sizes is (replicas, shards)."""
        names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
        made = init_device_mesh(self.device.type, shape or (self.size,), mesh_dim_names=names)
        for name in names:  # the groups of a mesh do not inherit the default group's timeout
            made.get_group(name).set_timeout(self.patience)
        return made

    def barrier(self) -> None:
        """Wait for all ranks and the device."""
        self.synchronize()
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))

    def most(self, *found: float) -> list[float]:
        """Return the maximum of each number over the ranks."""
        values = torch.tensor(found, dtype=torch.float64, device="cpu")
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        numbers: list[float] = values.tolist()
        return numbers

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. See [Note: answers go through the store].
        Raise LostRankError, on every remaining rank, if a rank did not answer in time."""
        self._exchanges += 1
        return self._conclude(f"{self._asked}-{self._exchanges}", value)

    def _conclude(self, topic: str, value: Any) -> list[Any]:
        try:
            answers = self._settle(topic, json.dumps(value))
        except dist.DistError as error:  # rank 0, which hosts the store, has exited
            raise LostRankError([0]) from error
        missing = [rank for rank in range(self.size) if str(rank) not in answers]
        if missing:
            raise LostRankError(missing)
        return [json.loads(answers[str(rank)]) for rank in range(self.size)]

    def _settle(self, topic: str, mine: str) -> dict[str, str]:
        """Return the answers that all ranks agree to use, keyed by rank."""
        keys = [f"answer-{topic}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], mine)
        with suppress(dist.DistStoreError):  # the conclusion shows which ranks are missing
            self._store.wait(keys, self.patience + GRACE)
        found = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
        offer = json.dumps({rank: self._store.get(key).decode() for rank, key in found.items()})
        agreed = self._store.compare_set(f"conclusion-{topic}", "", offer)
        answers: dict[str, str] = json.loads(agreed.decode())
        return answers

    def ask(
        self,
        measure: Callable[[Ranks], Values],
        limit_s: float,
        give_up: Callable[[Callable[[], list[Values]]], None],
    ) -> list[Values]:
        """Run ``measure`` and return every rank's result, which has ``error`` if the rank raised.
        If ``measure`` hangs, for example in a collective on a device, another thread calls
        ``give_up`` after ``limit_s`` plus the collective timeout and budget; its argument returns
        the answers. Raise LostRankError, as this argument does, if a rank did not answer;
        collectives then no longer work."""
        self._asked, self._exchanges = self._asked + 1, 0
        limit = limit_s + self.options.timeout + self.options.seconds
        begun = time.monotonic()
        hung = {"error": f"did not return within {limit:.0f} s", "after_s": limit}
        topic = str(self._asked)
        timer = threading.Timer(limit, give_up, [partial(self._conclude, topic, hung)])
        timer.daemon = True
        timer.start()
        try:
            mine = measure(self)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            mine = {"error": said, "after_s": time.monotonic() - begun}
        finally:
            timer.cancel()
        return self._conclude(topic, mine)

    def wait_for_teller(self, tells: bool) -> None:
        """Wait for the rank that prints: when one rank exits, a launcher terminates the others."""
        with suppress(Exception):
            if tells:
                self._store.set("told", "")
            else:
                self._store.wait(["told"], GRACE)

    def leave(self) -> None:
        """Destroy the process group on all ranks together, once no rank needs it."""
        with suppress(Exception):
            self.exchange("leave")
        with suppress(Exception):
            dist.destroy_process_group()
