"""Ranks that share one GPU over NCCL (in a rehearsal: gloo), and are asked one question at a time.

They are forked, because torch takes seconds to import; so the parent must not touch CUDA. A world
in which a rank raised, died or did not answer is ended, and a new one answers the next question.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Skipped
from tests.kit import meshes

Question = Callable[[Path], Any]
START_S = 60.0


class World:
    """``size`` ranks of one process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(START_S)

    def ask(self, question: Question, limit_s: float) -> list[Any]:
        """Return each rank's answer; raise what went wrong, and on which ranks."""
        for pipe in self._pipes:
            pipe.send(question)
        return self._answers(limit_s)

    def close(self, tells: bool = False) -> None:
        """End all ranks; if ``tells``, each writes first where it is."""
        for process in self._processes:
            if tells and process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
                process.join(2)
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _answers(self, limit_s: float) -> list[Any]:
        ends = time.monotonic() + limit_s
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, ends - time.monotonic())):
                found.append(("failed", f"rank {rank} hangs: no answer in {limit_s:.0f} s"))
                continue
            try:
                found.append(pipe.recv())
            except (EOFError, OSError):
                found.append(("failed", f"rank {rank} died"))
        if all(kind == "skipped" for kind, _ in found):
            raise Skipped(found[0][1])
        wrong = [value for kind, value in found if kind != "ok"]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {self.size} ranks: {wrong[0]}")
        return [value for _, value in found]


def _serve(pipe: Any, rank: int, size: int, folder: str) -> None:
    faulthandler.enable()
    with suppress(EOFError):
        pipe.send(_answer(lambda: _enter(rank, size, folder), rank))
        for number in range(1_000_000):
            question = pipe.recv()
            own = Path(folder) / str(number)
            own.mkdir(exist_ok=True)
            torch.manual_seed(0)  # batches are the same on all ranks
            pipe.send(_answer(lambda q=question, at=own: q(at), rank))  # type: ignore[misc]
    os._exit(0)  # what a communicator still does is of no use


def _answer(work: Callable[[], Any], rank: int) -> tuple[str, Any]:
    try:
        return "ok", work()
    except Skipped as reason:
        return "skipped", str(reason)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"rank {rank}: {type(error).__name__}: {str(error)[:400]}"


def _enter(rank: int, size: int, folder: str) -> str:
    torch.set_num_threads(1)
    meshes.BACKEND = _machine.BACKEND
    meshes.use_device(_machine.KIND)
    dist.init_process_group(
        meshes.backend_of(_machine.KIND),
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    value = torch.ones(1, device=_machine.device())
    dist.all_reduce(value)
    assert value.item() == size
    return "ready"


class Worlds:
    """Ask questions on worlds of some size, each made when it is needed."""

    def __init__(self) -> None:
        self._world: World | None = None

    def ask(self, size: int, question: Question, limit_s: float, afresh: bool = False) -> list[Any]:
        """``afresh``: the question leaves ranks in a state that no other one may begin with."""
        if self._world is not None and self._world.size != size:
            self.close()
        try:
            self._world = self._world or World(size)
            answers = self._world.ask(question, limit_s)
        except Skipped:
            raise
        except BaseException:
            self.close(tells=True)
            raise
        if afresh:
            self.close()
        return answers

    def close(self, tells: bool = False) -> None:
        if self._world is not None:
            self._world.close(tells)
        self._world = None
