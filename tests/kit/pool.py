"""Test bodies on rank processes: `ranks(...)`, and the pools that run them ahead of their tests.

Importing torch costs seconds a process, so ranks are forked from one process that has imported
what they need (`tests.kit.preload`), are kept from body to body, and a rank that hung, died or
failed is simply replaced. From the outside in:

- ``ranks(...)``: the decorator that turns a plain function into a test that runs on each rank;
- ``Pools``: a few ``RankPool`` at work side by side, because ranks wait for each other most of the
  time. It takes the bodies of all tests before the first one runs, so that pytest, which
  goes through its tests one by one, finds their outcomes ready;
- ``RankPool``: starts, feeds, times and replaces up to ``MAX_RANKS`` processes;
- ``tests.kit.rank``: what runs in each of them.

A rank that hangs is ended with SIGABRT, at which it writes the traceback of every thread to its
log.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import multiprocessing as mp
import multiprocessing.connection
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kit.graphs_on_disk import folder_of_graphs
from tests.kit.meshes import DEVICE
from tests.kit.rank import GRACE_S, Reply, Request, Task, serve

MAX_RANKS = 4
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # A connection to a store asks for the name of a loopback address. Where the resolver drops some
    # of the questions, each of these takes five seconds without this.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "FSDP2_WARNINGS": "every_rank",  # each rank looks at its own
    # Inductor keeps graphs and kernels on disk: ranks and later runs take those of this source.
    "TORCHINDUCTOR_CACHE_DIR": str(folder_of_graphs()),
}
PORTS = range(21_000, 32_000)  # below those that a kernel gives to whoever connects


@dataclass(frozen=True)
class Outcome:
    """How a body ended: ``passed``, ``skipped`` or ``failed``, and what its ranks said."""

    kind: str
    text: str
    replies: Sequence[Reply]  # of the ranks that lived
    wall_s: float


class _Rank:
    """One rank process, its pipe and its log."""

    def __init__(self, context: Any, log_path: Path) -> None:
        self.conn, theirs = context.Pipe()
        self.log_path = log_path
        log_path.write_bytes(b"")
        self.process = context.Process(target=serve, args=(theirs, str(log_path)), daemon=True)
        self.process.start()
        theirs.close()
        self._log_start = 0
        self.device: str | None = None  # of its bodies: a device stays in a process for good

    def send(self, task: Task) -> None:
        self.device = task.request.device
        self._log_start = self.log_path.stat().st_size
        self.conn.send(task)

    def receive(self) -> Reply | None:
        """Return the reply that is ready, or None if the process died before sending one."""
        try:
            return self.conn.recv() if self.conn.poll() else None
        except (EOFError, OSError):
            return None

    def output(self) -> str:
        """Return what the rank printed since the last ``send``."""
        return (
            self.log_path.read_bytes()[self._log_start :].decode(errors="replace")[-8000:].strip()
        )

    def end(self) -> None:
        """End a busy process; it writes the traceback of every thread to its log first."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(GRACE_S)
            if self.process.is_alive():
                self.process.kill()
        self.process.join()
        self.conn.close()

    def close(self) -> None:
        """Let an idle process run out."""
        self.conn.close()
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()


class RankPool:
    """Up to ``MAX_RANKS`` processes that are started when first needed and kept until ``close``."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._ranks: list[_Rank | None] = [None] * MAX_RANKS
        self._world: tuple[str, int, float] | None = None  # of a group that is kept
        self._is_busy = False

    def run(self, request: Request) -> Outcome:
        """Run the body on its ranks. A rank that dies is a failure, whatever it did before."""
        started = time.monotonic()
        for index in range(request.world_size):
            rank = self._ranks[index]
            if request.forks or (rank is not None and rank.device != request.device):
                self._replace(index)
        ranks = [self._rank(index) for index in range(request.world_size)]
        prefix, port = self._run.meeting(request)
        limit_s = request.limit_s * self._run.patience
        world = None
        if request.with_process_group:
            world = (request.device, request.world_size, request.limit_s)
        keeps_world = world is not None and world == self._world and request.shares_world
        for index, rank in enumerate(ranks):
            rank.send(
                Task(
                    request,
                    index,
                    limit_s,
                    self._run.store.port,
                    prefix,
                    keeps_world,
                    port,
                    time.monotonic(),
                    self._run.notes_reach,
                )
            )
        self._is_busy = True
        replies, hung = self._wait(ranks, limit_s)
        self._is_busy = False
        outputs = [rank.output() for rank in ranks]
        for index, reply in enumerate(replies):
            if reply is None or not reply.reusable:
                self._replace(index)
        lived = [reply for reply in replies if reply is not None]
        kept = len(lived) == len(replies) and all(r.kept_world and r.reusable for r in lived)
        self._world = world if kept else None
        kind, text = "failed", ""
        if len(lived) == len(replies) and len({reply.outcome for reply in lived}) == 1:
            kind, text = lived[0].outcome, lived[0].text
        if kind == "failed":
            text = _report(replies, outputs, hung, limit_s)
        return Outcome(kind, text, lived, time.monotonic() - started)

    def interrupt(self) -> None:
        """End the body that is running, from another thread; it fails."""
        for rank in self._ranks:
            if self._is_busy and rank is not None:
                rank.process.kill()

    def close(self) -> None:
        for rank in self._ranks:
            if rank is not None:
                rank.close()

    def _rank(self, index: int) -> _Rank:
        rank = self._ranks[index]
        if rank is not None and not rank.process.is_alive():
            rank.end()
            rank = None
        if rank is None:
            rank = self._ranks[index] = self._run.start_rank()
        return rank

    def _replace(self, index: int) -> None:
        rank = self._ranks[index]
        if rank is not None:
            rank.close() if rank.process.is_alive() else rank.end()
            self._ranks[index] = None

    def _wait(self, ranks: list[_Rank], limit_s: float) -> tuple[list[Reply | None], set[int]]:
        """Collect a reply from each rank: None if it died or had to be ended (the set)."""
        replies: list[Reply | None] = [None] * len(ranks)
        waiting = dict(enumerate(ranks))
        deadline = time.monotonic() + limit_s
        while waiting:
            handles = [h for rank in waiting.values() for h in (rank.conn, rank.process.sentinel)]
            ready = set(mp.connection.wait(handles, timeout=max(0.0, deadline - time.monotonic())))
            if not ready:
                break
            for index, rank in list(waiting.items()):
                if rank.conn not in ready and rank.process.sentinel not in ready:
                    continue
                del waiting[index]
                reply = replies[index] = rank.receive()
                if reply is None or reply.outcome == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            rank.end()
        return replies, set(waiting)


class _Run:
    """What the pools of one run share: a store, ports, a folder of logs, and how ranks start."""

    def __init__(self, notes_reach: bool, patience: float) -> None:
        import torch.distributed as dist

        os.environ.update(ENVIRONMENT)
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        self._context: Any = mp.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["tests.kit.preload"])
        self.notes_reach = notes_reach
        self.patience = patience  # the limit of a body is this many times what it is alone
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # pools ask from their own threads

    def meeting(self, request: Request) -> tuple[str, int]:
        """Return where the ranks of a body meet: a prefix in the store, and a port of their own."""
        with self._lock:
            port = 0 if request.with_process_group else find_free_port()
            return f"body-{next(self._numbers)}", port

    def start_rank(self) -> _Rank:
        with self._lock:
            return _Rank(self._context, self._folder / f"rank-{next(self._numbers)}.log")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Kind(NamedTuple):
    """What bodies have in common that had better follow each other on one pool."""

    batch: int  # of tests that are drawn together; 0 where none are
    module: str
    size: int


@dataclass(frozen=True)
class Job:
    request: Request
    outcome: Future[Outcome]
    is_urgent: bool  # pytest waits for it
    batch: int = 0
    until: float = math.inf  # when it is too late to begin, by `time.time`

    @property
    def kind(self) -> Kind:
        return Kind(self.batch, self.request.module, self.request.world_size)


class _Queue:
    """Jobs for the pools.

    A pool goes on with the bodies of one file on one number of ranks while there are any: its ranks
    have learnt the plans and kept the process group that the next one needs.
    """

    def __init__(self) -> None:
        self._urgent: deque[Job] = deque()
        self._waiting: dict[Kind, deque[Job]] = defaultdict(deque)
        self._served: Counter[Kind] = Counter()  # how many pools are at it
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, job: Job) -> None:
        with self._changed:
            (self._urgent if job.is_urgent else self._waiting[job.kind]).append(job)
            self._changed.notify()

    def get(self, last: Kind | None) -> Job | None:
        """Return the next job for a pool that did one of this kind; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._urgent or self._waiting)
            if self._is_closed:
                return None
            if self._urgent:
                return self._urgent.popleft()
            kind = last if last in self._waiting else self._choose()
            if kind is not last:
                self._served.subtract(filter(None, [last]))
                self._served[kind] += 1
            job = self._waiting[kind].popleft()
            if not self._waiting[kind]:
                del self._waiting[kind]
            return job

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _choose(self) -> Kind:
        """Choose the first kind that no pool is at; if there is none, help where most is left."""
        for kind in self._waiting:
            if not self._served[kind]:
                return kind
        return max(self._waiting, key=lambda kind: len(self._waiting[kind]))


class Pools:
    """A few pools side by side, a thread for each, fed from one queue."""

    def __init__(self, count: int, notes_reach: bool = False) -> None:
        self._count = count
        self._notes_reach = notes_reach
        self._queue = _Queue()
        self._ahead: dict[str, Future[Outcome]] = {}
        self._threads: list[threading.Thread] = []
        self._pools: list[RankPool] = []
        self._run: _Run | None = None

    def take(self, requests: Iterable[Request], batches: Mapping[str, int], until: float) -> None:
        """Run these bodies when there is nothing more urgent; `outcome` will ask for them.

        The first batches come first, and no body begins after ``until``.
        """
        for request in requests:
            job = Job(request, Future(), False, batches.get(request.name, 0), until)
            self._ahead[request.name] = self._submit(job)

    def gives_up(self, name: str) -> bool:
        """Say if the body of this name has not begun, which then it never does."""
        future = self._ahead.get(name)
        return future is None or future.cancel()

    def outcome(self, request: Request) -> Outcome:
        """Return how the body ended; wait for it, and run it first if nobody has asked for it."""
        future = self._ahead.pop(request.name, None)
        if future is not None:
            with contextlib.suppress(CancelledError):  # too late to begin ahead, and now it must
                return future.result()
        return self._submit(Job(request, Future(), is_urgent=True)).result()

    def close(self) -> None:
        """Forget what has not begun, end what has, and let the other ranks run out."""
        self._queue.close()
        for pool in self._pools:
            pool.interrupt()
        for thread in self._threads:
            thread.join()
        if self._run is not None:
            self._run.close()

    def _submit(self, job: Job) -> Future[Outcome]:
        if self._run is None:
            self._run = _Run(self._notes_reach, patience=self._count)
        self._queue.put(job)
        if len(self._threads) < self._count:
            self._pools.append(RankPool(self._run))
            self._threads.append(threading.Thread(target=self._work, args=(self._pools[-1],)))
            self._threads[-1].start()
        return job.outcome

    def _work(self, pool: RankPool) -> None:
        last: Kind | None = None
        while (job := self._queue.get(last)) is not None:
            last = last if job.is_urgent else job.kind
            if time.time() > job.until:
                job.outcome.cancel()
            if not job.outcome.set_running_or_notify_cancel():
                continue
            try:
                job.outcome.set_result(pool.run(job.request))
            except BaseException as error:
                job.outcome.set_exception(error)
        pool.close()


def _report(
    replies: Sequence[Reply | None], outputs: Sequence[str], hung: set[int], limit_s: float
) -> str:
    parts = []
    for index, (reply, output) in enumerate(zip(replies, outputs, strict=True)):
        if reply is not None:
            outcome = reply.outcome
        elif index in hung:
            outcome = f"still running when the others had ended or {limit_s:g} s were over; ended"
        else:
            outcome = "died"
        parts.append(f"{f' rank {index} of {len(replies)}: {outcome} ':=^100}")
        if reply is not None and reply.text:
            twin = next(i for i, r in enumerate(replies) if r is not None and r.text == reply.text)
            parts.append(reply.text.rstrip() if twin == index else f"the same as rank {twin}")
        if output and (reply is None or reply.outcome == "failed"):
            parts.append(f"{f' output of rank {index} ':-^100}\n{output}")
    return "\n".join(parts)


def find_free_port() -> int:
    """Return a port that nobody uses, another one each time."""
    return next(filter(_is_free, _ports))


_ports = itertools.cycle(PORTS)


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


RunOnRanks = Callable[[Request], None]  # the fixture; fails or skips the test as its ranks did


def make_request(
    body: Callable[..., None],
    name: str,
    world_size: int,
    kwargs: Mapping[str, Any],
    *,
    limit_s: float = 60.0,
    with_process_group: bool = True,
    shares_world: bool = False,
    device: str | None = None,
    forks: bool = False,
) -> Request:
    """Return the request for a body; `name` seeds its random numbers."""
    return Request(
        name,
        body.__module__,
        body.__qualname__,
        kwargs,
        world_size,
        limit_s,
        with_process_group,
        shares_world,
        device or DEVICE,
        forks,
    )


def ranks(
    *world_sizes: Any,
    limit_s: float = 60.0,
    with_process_group: bool = True,
    shares_world: bool = False,
    device: str | None = None,
    forks: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated function on every rank of a gloo group, once for each world size.

    A world size may be marked (`tests.kit.slow.slow(4)`).
    The function is an ordinary pytest test: its arguments are what ``parametrize`` and fixtures
    give (they are pickled) and, if it names them, ``rank`` and ``world_size``. Random seeds follow
    from the test's name and are equal on all ranks.
    Each body has a process group of its own, unless it ``shares_world`` with others that do: that
    saves DTensor's learning its plans anew, where an optimizer steps DTensors. Such a body leaves
    nothing behind: no message that nobody received, no ranks that went different ways.
    With ``with_process_group=False`` the ranks have only the environment that a launcher would set.
    Their tensors are on ``device``, by default that of FSDP2_TEST_DEVICE.
    With ``forks`` they are new ones: where torch has CUDA, a backward starts threads, and a process
    with such threads cannot be forked.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        passed_on = [
            p for name, p in signature.parameters.items() if name not in ("rank", "world_size")
        ]

        def ask(name: str, given: Mapping[str, Any]) -> Request:
            return make_request(
                body,
                name,
                given["world_size"],
                {key: value for key, value in given.items() if key != "world_size"},
                limit_s=limit_s,
                with_process_group=with_process_group,
                shares_world=shares_world,
                device=device,
                forks=forks,
            )

        @functools.wraps(body)
        def test(run_on_ranks: RunOnRanks, request: Any, **given: Any) -> None:
            run_on_ranks(ask(request.node.nodeid, given))

        own = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("run_on_ranks", "request", "world_size")
        ]
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in passed_on]
        test.__signature__ = signature.replace(parameters=own + keyword_only)  # type: ignore[attr-defined]  # for pytest
        test.body = body  # type: ignore[attr-defined]  # what a rank looks for
        test.ask = ask  # type: ignore[attr-defined]  # for `AheadOfTests`
        return pytest.mark.parametrize("world_size", world_sizes, ids=lambda n: f"w{n}")(test)

    return decorate


ranks_that_share = functools.partial(ranks, shares_world=True)
