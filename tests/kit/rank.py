"""In a rank process: the loop that runs bodies, one after the other, each on a group of its own.

`tests.kit.pool` starts these processes and sends the bodies; `serve` is where they begin.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing.connection
import os
import random
import resource
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kit import meshes
from tests.kit import sim as simulator
from tests.lab.reach import Entered
from tests.lab.where import Stopwatch

PRELOADED = "FSDP2_PRELOADED"  # names of the modules that ranks are born with, with commas
GRACE_S = 5.0  # what the other ranks get to finish once one rank has failed
MAX_GROUPS = 24  # of a world that goes on; a body may leave some behind
MAX_GLOO_THREADS = 80  # torch's own caches keep some groups alive; a rank with this many retires


@dataclass(frozen=True)
class Request:
    """A body to run on ranks, by import path."""

    name: str  # of the test
    module: str
    qualname: str
    kwargs: Mapping[str, Any]
    world_size: int
    limit_s: float  # alone on the machine
    with_process_group: bool
    shares_world: bool  # its process group may be one that others used, and serve others
    device: str = "cpu"  # where its tensors are
    forks: bool = False  # it forks its ranks, which must not have run a backward in a CUDA build


@dataclass(frozen=True)
class Task:
    """What one rank is asked to run."""

    request: Request
    rank: int
    limit_s: float
    store_port: int  # where the store of the run is
    prefix: str  # of this body's keys in it
    keeps_world: bool  # the ranks still have the process group of the body before
    port: int  # where ranks meet that make their own process group, as a launcher would tell them
    sent_at: float  # by the clock that all processes share
    notes_reach: bool


@dataclass(frozen=True)
class Reply:
    """How a body ended (``passed``, ``skipped``, ``failed``), and if the rank may run more."""

    outcome: str
    text: str = ""
    reusable: bool = True
    kept_world: bool = False  # the process group may serve the next body
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # see `Stopwatch`
    entered: frozenset[str] = frozenset()  # see `Entered`


def serve(conn: multiprocessing.connection.Connection, log_path: str) -> None:
    """Run the bodies that come through ``conn`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends ranks; Ctrl-C is for pytest
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2, all_threads=True)

    import torch

    torch.set_num_threads(1)
    arrival = "start"
    while True:
        try:
            task: Task = conn.recv()
        except EOFError:
            return
        watch = Stopwatch(task.sent_at)
        watch.lap(arrival)
        arrival = "hand over"
        entered = Entered()
        with entered if task.notes_reach else contextlib.nullcontext():
            reply = _run_body(task, watch)
        conn.send(replace(reply, spent=watch.spent, entered=frozenset(entered.functions())))


def _run_body(task: Task, watch: Stopwatch) -> Reply:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(task.rank), WORLD_SIZE=str(task.request.world_size), LOCAL_RANK=str(task.rank)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    world: Any = None
    reply = Reply("passed")
    try:
        meshes.use_device(task.request.device)
        if not task.keeps_world:
            _leave_world()
        if task.request.with_process_group:
            if not task.keeps_world:
                dist.init_process_group(
                    meshes.backend_of(task.request.device),
                    store=_connect(task),
                    rank=task.rank,
                    world_size=task.request.world_size,
                    timeout=timedelta(seconds=task.limit_s),
                )
            world = dist.group.WORLD
        watch.lap("meet")
        body = _find_body(task)
        watch.lap("import")
        seed = zlib.crc32(task.request.name.encode())
        random.seed(seed)
        torch.manual_seed(seed)
        given = {"rank": task.rank, "world_size": task.request.world_size}
        wanted = inspect.signature(body).parameters
        body(
            **task.request.kwargs,
            **{name: value for name, value in given.items() if name in wanted},
        )
        _check_left_as_found(world, task.request.device)
        if task.request.device == "sim":
            simulator.check()
    except simulator.NoCompilerError as reason:
        reply = Reply("skipped", f"no simulator: {reason}")
    except (pytest.skip.Exception, pytest.xfail.Exception) as reason:
        reply = Reply("skipped", str(reason))
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _skip_own_frames(error)))
        reply = Reply("failed", text, reusable=False)
        del error
    watch.lap("body")
    return _clean_up(task, reply, watch)


def _connect(task: Task) -> Any:
    """Return the body's part of the pool's store."""
    import torch.distributed as dist

    store = _connect_once(task.store_port)
    store.set_timeout(timedelta(seconds=task.limit_s))
    return dist.PrefixStore(task.prefix, store)


@functools.cache
def _connect_once(port: int) -> Any:
    """Return the one connection of this rank to the store of its pool.

    Each new one asks the resolver for the name of a loopback address, and a resolver that drops
    a question costs the rank five seconds. A store in a file would be polled.
    """
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)


def _find_body(task: Task) -> Callable[..., None]:
    found: Any = importlib.import_module(task.request.module)
    for name in task.request.qualname.split("."):
        found = getattr(found, name)
    return found.body


def _skip_own_frames(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames or error.__traceback__


def _check_left_as_found(world: Any, device: str) -> None:
    import torch
    import torch.distributed as dist

    if world is not None:
        assert dist.is_initialized(), "the body destroyed the default process group"
        assert dist.group.WORLD is world, "the body replaced the default process group"
    assert torch.is_grad_enabled(), "the body left gradients disabled"
    assert torch.get_default_dtype() is torch.float32, "the body left another default dtype"
    assert torch.get_default_device().type == device, "the body left another default device"


def _clean_up(task: Task, reply: Reply, watch: Stopwatch) -> Reply:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    try:
        gc.collect()
        watch.lap("garbage")
        kept = (
            task.request.with_process_group
            and dist.is_initialized()
            and reply.outcome != "failed"
            and _agree_to_keep_world(task)
        )
        if not kept:
            _leave_world()
        if reply.outcome == "passed" and not kept and c10d._world.pg_map:
            reply = Reply(
                "failed", f"process groups survived destruction: {list(c10d._world.pg_map)}", False
            )
        watch.lap("leave")
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
        watch.lap("forget")
        gc.collect()
        gc.freeze()  # what lives on are modules and caches: later collections need not look
        watch.lap("garbage")
    except Exception:
        return Reply("failed", reply.text + traceback.format_exc(), reusable=False)
    if _count_gloo_threads() > MAX_GLOO_THREADS:
        return replace(reply, reusable=False)
    return replace(reply, kept_world=kept)


def _agree_to_keep_world(task: Task) -> bool:
    """Wait until no rank needs the connections; say if all found the world fit for another body.

    It is if there are not too many groups in it and all ranks counted the same collectives. What is
    saved is less the group than DTensor's plans: these hold meshes, and so process groups.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    world = c10d._get_default_group()
    fit = (
        task.request.shares_world
        and len(c10d._world.pg_map) <= MAX_GROUPS
        and _count_gloo_threads() <= MAX_GLOO_THREADS
    )
    kinds = {"cpu", task.request.device}  # a simulated device has a backend beside the host's
    backends = {world._get_backend(torch.device(kind)) for kind in kinds}
    mine = f"{fit} {sum(each._get_sequence_number_for_group() for each in backends)}"
    store = _connect(task)
    store.set(f"passed-{task.rank}", mine)
    others = [f"passed-{rank}" for rank in range(task.request.world_size)]
    try:
        store.wait(others, timedelta(seconds=GRACE_S))
        return fit and all(store.get(other).decode() == mine for other in others)
    except dist.DistStoreError:  # one that failed closes its own at once
        return False


def _leave_world() -> None:
    """Destroy the process groups, and what holds on to them: DTensor's plans hold meshes."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    meshes.forget_meshes()
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


def _count_gloo_threads() -> int:
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            count += "gloo" in name.read_text()
    return count
