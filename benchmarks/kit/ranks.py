"""Run one function on several gloo ranks of this machine, and collect what each returns."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)


def run_on_ranks(
    body: Callable[..., Any], world_size: int, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Return `body(rank, world_size, *arguments)` of every rank; an exception of one is raised.

    Each rank is a fresh process with one thread of compute, without garbage collection.
    ``backend``: of the process group.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world_size, mp_context=context) as pool,
    ):
        store = str(Path(folder) / "store")
        tasks = [
            pool.submit(_enter, body, rank, world_size, store, arguments, backend)
            for rank in range(world_size)
        ]
        return [task.result() for task in tasks]


def _enter(
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    arguments: tuple[Any, ...],
    backend: str,
) -> Any:
    torch.set_num_threads(1)
    gc.disable()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),  # a store over TCP would be on the wire too
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        return body(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()
