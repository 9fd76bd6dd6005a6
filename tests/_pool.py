"""One pool of rank processes for the whole pytest run.

Importing torch costs seconds a process, so ranks are started once, when the first test asks for
them, and every test body is sent to them by import path. The pieces, from the outside in:

- ``ranks(...)``: the decorator that turns a plain function into a test that runs on each rank;
- ``RankPool``: starts, feeds, times and replaces the processes;
- ``_serve``: the loop in each process; ``_run_body``: one body, with a process group of its own.

A rank process is forked from a server that has imported torch already, so a rank that hung, died
or failed is simply replaced. A rank that hangs is ended with SIGABRT, at which it writes the
traceback of every thread to its own log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing as mp
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

MAX_RANKS = 4
GRACE_S = 5.0  # what the other ranks get to finish once one rank has failed
MAX_GLOO_THREADS = (
    32  # torch's own caches keep some process groups alive; a rank with this many is retired
)
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.testing",
    "pytest",
]
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Task:
    """What one rank is asked to run."""

    module: str
    qualname: str
    kwargs: Mapping[str, Any]
    rank: int
    world_size: int
    store_port: int  # where the pool keeps a store
    prefix: str  # of this body's keys in it
    seed: int
    limit_s: float
    with_process_group: bool
    port: int  # where ranks meet that make their own process group, as a launcher would tell them


@dataclass(frozen=True)
class Reply:
    """How a body ended (``passed``, ``skipped``, ``failed``), and if the rank may run more."""

    outcome: str
    text: str = ""
    reusable: bool = True


# --------------------------------------------------------------------------------------------------
# In the rank process
# --------------------------------------------------------------------------------------------------


def _serve(conn: mp.connection.Connection, log_path: str, rewrite_asserts: bool) -> None:
    """Run the bodies that come through ``conn`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends ranks; Ctrl-C is for pytest
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2, all_threads=True)
    if rewrite_asserts:
        _show_values_in_asserts()

    import torch

    torch.set_num_threads(1)
    _freeze_modules()
    while True:
        try:
            task: Task = conn.recv()
        except EOFError:
            return
        reply = _run_body(task)
        conn.send(reply)


_frozen_modules = 0


def _freeze_modules() -> None:
    """Spare the collections after each body what imports left behind."""
    global _frozen_modules
    if len(sys.modules) != _frozen_modules:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def _show_values_in_asserts() -> None:
    """Install pytest's rewriting of ``assert``, so that a failure shows the values compared."""
    with contextlib.suppress(
        Exception
    ):  # a nicety, on private pytest names: without it a bare assert still fails
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config([])).mark_rewrite("tests")


def _run_body(task: Task) -> Reply:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(task.rank), WORLD_SIZE=str(task.world_size), LOCAL_RANK=str(task.rank)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    world: Any = None
    reply = Reply("passed")
    try:
        if task.with_process_group:
            dist.init_process_group(
                "gloo",
                store=_connect(task),
                rank=task.rank,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.limit_s),
            )
            world = dist.group.WORLD
        body = _find_body(task)
        random.seed(task.seed)
        torch.manual_seed(task.seed)
        given = {"rank": task.rank, "world_size": task.world_size}
        wanted = inspect.signature(body).parameters
        body(**task.kwargs, **{name: value for name, value in given.items() if name in wanted})
        _check_left_as_found(world)
    except (pytest.skip.Exception, pytest.xfail.Exception) as reason:
        reply = Reply("skipped", str(reason))
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _skip_own_frames(error)))
        reply = Reply("failed", text, reusable=False)
        del error
    return _clean_up(task, reply)


def _connect(task: Task) -> Any:
    """Return the pool's store. It tells at once what others set; one in a file is polled."""
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        task.store_port,
        timeout=timedelta(seconds=task.limit_s),
        wait_for_workers=False,
    )
    return dist.PrefixStore(task.prefix, store)


def _find_body(task: Task) -> Callable[..., None]:
    found: Any = importlib.import_module(task.module)
    for name in task.qualname.split("."):
        found = getattr(found, name)
    return found.body


def _skip_own_frames(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames or error.__traceback__


def _check_left_as_found(world: Any) -> None:
    import torch
    import torch.distributed as dist

    if world is not None:
        assert dist.is_initialized(), "the body destroyed the default process group"
        assert dist.group.WORLD is world, "the body replaced the default process group"
    assert torch.is_grad_enabled(), "the body left gradients disabled"
    assert torch.get_default_dtype() is torch.float32, "the body left another default dtype"
    assert torch.get_default_device().type == "cpu", "the body left another default device"


def _clean_up(task: Task, reply: Reply) -> Reply:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    try:
        gc.collect()
        if task.with_process_group and reply.outcome != "failed":
            _wait_for_others(task)
        if dist.is_initialized():
            dist.destroy_process_group()
        if reply.outcome == "passed" and c10d._world.pg_map:
            reply = Reply(
                "failed", f"process groups survived destruction: {list(c10d._world.pg_map)}", False
            )
        _forget_meshes()
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
        gc.collect()
        _freeze_modules()
    except Exception:
        return Reply("failed", reply.text + traceback.format_exc(), reusable=False)
    if _count_gloo_threads() > MAX_GLOO_THREADS:
        return Reply(reply.outcome, reply.text, reusable=False)
    return reply


def _forget_meshes() -> None:
    """Empty torch's caches of DTensor plans: they hold meshes, and so names of groups now gone.

    A mesh of the next body may equal one of this body while its process groups have other names.
    """
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    debug = sys.modules.get("torch.distributed.tensor.debug")
    for module, name in (
        (redistribute, "clear_redistribute_planner_cache"),
        (debug, "_clear_sharding_prop_cache"),
    ):
        getattr(module, name, lambda: None)()
    plans = getattr(redistribute, "_gen_transform_infos", None)
    if plans is not None:
        plans.cache_clear()


def _wait_for_others(task: Task) -> None:
    """Keep the connections until no rank needs them; one that failed closes its own at once."""
    import torch.distributed as dist

    store = _connect(task)
    store.set(f"passed-{task.rank}", "")
    with contextlib.suppress(dist.DistStoreError):
        store.wait([f"passed-{r}" for r in range(task.world_size)], timedelta(seconds=GRACE_S))


def _count_gloo_threads() -> int:
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            count += "gloo" in name.read_text()
    return count


# --------------------------------------------------------------------------------------------------
# In the pytest process
# --------------------------------------------------------------------------------------------------


class _Rank:
    """One rank process, its pipe and its log."""

    def __init__(self, context: Any, log_path: Path, rewrite_asserts: bool) -> None:
        self.conn, theirs = context.Pipe()
        self.log_path = log_path
        log_path.write_bytes(b"")
        self.process = context.Process(
            target=_serve, args=(theirs, str(log_path), rewrite_asserts), daemon=True
        )
        self.process.start()
        theirs.close()
        self._log_start = 0

    def send(self, task: Task) -> None:
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

    def __init__(self, rewrite_asserts: bool = True) -> None:
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        self._context: Any = mp.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self._ranks: list[_Rank | None] = [None] * MAX_RANKS
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._rewrite_asserts = rewrite_asserts
        self._started = 0
        self._ran = 0
        self._store: Any = None

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        kwargs: Mapping[str, Any],
        *,
        name: str,
        limit_s: float,
        with_process_group: bool = True,
    ) -> None:
        """Run ``body`` on the ranks; fail with every rank's traceback unless all pass.

        [Note: a rank that dies] A rank that has made and destroyed hundreds of gloo groups was seen
        to abort in malloc, about once in ten runs of the suite. The cause is not known; no checker
        of memory found one. A body that killed a rank runs once more, on fresh ranks, with a
        warning: what the body itself does wrong it does again.
        """
        outcome = self._run_once(body, world_size, kwargs, name, limit_s, with_process_group)
        replies, outputs, hung = outcome
        if any(reply is None and index not in hung for index, reply in enumerate(replies)):
            warnings.warn(
                f"a rank died in {name}; the body runs once more, on fresh ranks:\n"
                f"{_report(replies, outputs, hung, limit_s)}",
                stacklevel=2,
            )
            for index in range(world_size):
                self._replace(index)
            outcome = self._run_once(body, world_size, kwargs, name, limit_s, with_process_group)
            replies, outputs, hung = outcome
        if all(reply is not None and reply.outcome == "passed" for reply in replies):
            return
        if all(reply is not None and reply.outcome == "skipped" for reply in replies):
            pytest.skip(next(reply.text for reply in replies if reply is not None))
        pytest.fail(_report(replies, outputs, hung, limit_s), pytrace=False)

    def _run_once(
        self,
        body: Callable[..., Any],
        world_size: int,
        kwargs: Mapping[str, Any],
        name: str,
        limit_s: float,
        with_process_group: bool,
    ) -> Any:
        """Send the body to the ranks; return replies, outputs and the ranks that hung."""
        self._ran += 1
        if self._store is None:
            self._store = _make_store()
        ranks = [self._rank(index) for index in range(world_size)]
        port = 0 if with_process_group else _find_free_port()
        for index, rank in enumerate(ranks):
            seed = zlib.crc32(name.encode())
            rank.send(
                Task(
                    body.__module__,
                    body.__qualname__,
                    kwargs,
                    index,
                    world_size,
                    self._store.port,
                    f"body-{self._ran}",
                    seed,
                    limit_s,
                    with_process_group,
                    port,
                )
            )
        replies, hung = self._wait(ranks, limit_s)
        outputs = [rank.output() for rank in ranks]
        for index, reply in enumerate(replies):
            if reply is None or not reply.reusable:
                self._replace(index)
        return replies, outputs, hung

    def close(self) -> None:
        for rank in self._ranks:
            if rank is not None:
                rank.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _rank(self, index: int) -> _Rank:
        rank = self._ranks[index]
        if rank is not None and not rank.process.is_alive():
            rank.end()
            rank = None
        if rank is None:
            self._started += 1
            log_path = self._folder / f"rank-{index}-{self._started}.log"
            with _environment(THREADS):
                rank = _Rank(self._context, log_path, self._rewrite_asserts)
            self._ranks[index] = rank
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


def _report(replies: list[Reply | None], outputs: list[str], hung: set[int], limit_s: float) -> str:
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


def _make_store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def ranks(
    *world_sizes: int, limit_s: float = 60.0, with_process_group: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated function on every rank of a gloo group, once for each world size.

    The function is an ordinary pytest test: its arguments are what ``parametrize`` and fixtures
    give (they are pickled) and, if it names them, ``rank`` and ``world_size``. Random seeds follow
    from the test's name and are equal on all ranks.
    With ``with_process_group=False`` the ranks have only the environment that a launcher would set.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        passed_on = [
            p for name, p in signature.parameters.items() if name not in ("rank", "world_size")
        ]

        @functools.wraps(body)
        def test(rank_pool: RankPool, request: Any, world_size: int, **kwargs: Any) -> None:
            rank_pool.run(
                body,
                world_size,
                kwargs,
                name=request.node.nodeid,
                limit_s=limit_s,
                with_process_group=with_process_group,
            )

        own = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("rank_pool", "request", "world_size")
        ]
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in passed_on]
        test.__signature__ = signature.replace(parameters=own + keyword_only)  # type: ignore[attr-defined]  # for pytest
        test.body = body  # type: ignore[attr-defined]  # what a rank looks for
        return pytest.mark.parametrize(
            "world_size", world_sizes, ids=[f"w{n}" for n in world_sizes]
        )(test)

    return decorate
