"""Promise: a rank that is killed, stopped or interrupted is an error with a name on the others.

The ranks here are forks of a rank process, which may die. One of them dies (or stands still, or is
interrupted) right before its n-th collective of an operation. The other must raise a `StateError`
that names the operation: no text of the backend alone, and no hang.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import fsdp2
from fsdp2 import checkpoint
from fsdp2._core.base import torch_comm
from fsdp2.checkpoint import _files
from fsdp2.optim import EMA
from tests.kit.in_turn import shard_each
from tests.kit.meshes import DEVICE
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

STOPPED_S = 2.0
"""How long a rank waits for one that stands still."""

LIMIT_S = 40.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> Any:
    torch.manual_seed(0)
    model = Net()
    shard_each(*model.blocks, model)
    return model


def full_params(w: World, **kwargs: Any) -> None:
    for _ in fsdp2.full_params(w.model, max_bytes=200, **kwargs):
        pass


def summon(w: World) -> None:
    with fsdp2.summon_full_params(w.model, with_grads=True):
        pass


def materialize(w: World, *init: Callable[[nn.Module], None]) -> None:
    with torch.device("meta"):
        model = Net()
    fsdp2.fully_shard(model)
    fsdp2.materialize(model, DEVICE, *init)


def check_order(w: World) -> None:
    check = fsdp2.debug.check_order(w.model)
    with torch.no_grad():
        w.model(w.x)
    check.remove()


def load_ema(w: World) -> None:
    averages = {k: v.redistribute(placements=[dist.tensor.Replicate()]) for k, v in w.averages()}
    w.ema.load_state_dict({"updates": 1, "averages": averages})


class World:
    """What operations work on."""

    def __init__(self, folder: str, operation: str) -> None:
        self.x = torch.ones(2, 5)
        self.model = build()
        self.model(self.x).sum().backward()
        self.optimizer = fsdp2.optim.local(torch.optim.AdamW, self.model.parameters())
        self.optimizer.step()
        self.ema = EMA(self.model)
        self.path = f"{folder}/saved"
        self.tensors = f"{folder}/tensors"
        self.full: Any = None
        if operation == "load":
            checkpoint.save(self.path, self.model, self.optimizer)
        if operation == "load_safetensors":
            checkpoint.save_safetensors(self.tensors, self.model)
        if operation == "load_full_state":
            self.full = checkpoint.full_state(self.model, self.optimizer)

    def averages(self) -> list[tuple[str, Any]]:
        return list(self.ema.state_dict()["averages"].items())


OPERATIONS: dict[str, Callable[[World], object]] = {
    "clip_grad_norm_": lambda w: fsdp2.clip_grad_norm_(w.model.parameters(), 1.0),
    "EMA.load_state_dict": load_ema,
    "check_order": check_order,
    "forward": lambda w: w.model(w.x),
    "full_params": full_params,
    "full_state": lambda w: checkpoint.full_state(w.model, w.optimizer, max_bytes=200),
    "hybrid_mesh": lambda w: fsdp2.wrap.hybrid_mesh(),
    "load": lambda w: checkpoint.load(w.path, w.model, w.optimizer),
    "load_full_state": lambda w: checkpoint.load_full_state(w.model, w.full, w.optimizer),
    "load_local_state": lambda w: checkpoint.load_local_state(
        w.model, checkpoint.local_state(w.model)
    ),
    "load_safetensors": lambda w: checkpoint.load_safetensors(w.tensors, w.model),
    "load_sharded_state": lambda w: checkpoint.load_sharded_state(
        w.model, checkpoint.sharded_state(w.model)
    ),
    "materialize": materialize,
    "save": lambda w: checkpoint.save(w.path, w.model, w.optimizer, extra={"step": 1}),
    "save_safetensors": lambda w: checkpoint.save_safetensors(w.tensors, w.model, max_bytes=200),
    "sync_from_rank0": lambda w: fsdp2.sync_from_rank0(Net()),
    "summon_full_params": summon,
}
COLLECTIVES = (
    "all_gather_object",
    "all_reduce",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)


def before_collective(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Do something right before this process's next collective but ``number``; return the undo."""
    left = [number]

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                act()
            return function(*args, **kwargs)

        return call

    places: list[tuple[Any, str]] = [(dist, name) for name in COLLECTIVES]
    places += [(torch_comm, name) for name in ("all_gather_single", "reduce_scatter_single")]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in before:
        setattr(place, name, wrapped(function))

    def undo() -> None:
        for place, name, function in before:
            setattr(place, name, function)

    return undo


def run_forks(body: Callable[[int, str], str], only_first: bool = False) -> list[str]:
    """Run ``body(rank, folder)`` on two forks of this process; return what each says of itself.

    With ``only_first`` nobody waits for the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = [], []
        for rank in range(2):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                _be_rank(body, rank, folder, write)
            os.close(write)
            children.append(child)
            pipes.append(read)
        try:
            first = _read(pipes[0])
            return [first, "" if only_first else _read(pipes[1])]
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _be_rank(body: Callable[[int, str], str], rank: int, folder: str, write: int) -> None:
    # A CUDA build starts several threads for a backward. The first use of torch's pool of threads
    # after a fork makes it anew, which two of these may not do at once: they abort the process.
    torch.set_num_threads(1)
    said = ""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", 2),  # a port might be another test's too
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=LIMIT_S),
        )
        said = body(rank, folder)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    os.write(write, json.dumps(said).encode())
    os.close(write)
    time.sleep(LIMIT_S)  # its end would be seen by the other
    os._exit(0)


def _read(pipe: int) -> str:
    """Return what came through a pipe; "died" if it was closed first, "hangs" after the limit."""
    ready, _, _ = select.select([pipe], [], [], LIMIT_S)
    data = os.read(pipe, 1 << 16) if ready else b'"hangs"'
    os.close(pipe)
    return json.loads(data) if data else "died"


def outcome(run: Callable[[], object]) -> str:
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def assert_names(said: str, operation: str, known: str) -> None:
    """What is known comes before any guess at the program."""
    if not (operation in ("forward", "check_order") and said.startswith("StateError: blocks.")):
        assert said.startswith(f"LostRank: {operation}"), said
    assert f"another rank did not take part: {known}" in said, said
    assert said.index(known) < said.index("rank == 0")


@pytest.mark.parametrize("number", with_slow([0, 1, 2, 3, 5, 8], [2]))
@pytest.mark.parametrize(
    "operation",
    with_slow(
        list(OPERATIONS),
        [
            "clip_grad_norm_",
            "EMA.load_state_dict",
            "forward",
            "full_params",
            "hybrid_mesh",
            "load_sharded_state",
            "materialize",
            "save",
        ],
    ),
)
@ranks(1, with_process_group=False, limit_s=90, forks=True)
def test_a_rank_that_is_killed(operation: str, number: int) -> None:
    """Before its first collective of the operation, or a later one."""

    def body(rank: int, folder: str) -> str:
        world = World(folder, operation)
        if rank == 1:
            before_collective(number, lambda: os._exit(9))
        return outcome(lambda: OPERATIONS[operation](world))

    first, second = run_forks(body)
    if second == "went through":  # it has fewer collectives
        assert first == "went through"
        return
    assert second == "died"
    if first != "went through":  # it was done when the other died
        assert_names(first, operation, "it closed the connection")


FEW = ("clip_grad_norm_", "full_params", "save")


@pytest.mark.parametrize("operation", with_slow(list(OPERATIONS), FEW))
@ranks(1, with_process_group=False, limit_s=90, forks=True)
def test_a_rank_that_stands_still(operation: str) -> None:
    """The others wait as long as their process group allows."""

    def body(rank: int, folder: str) -> str:
        world = World(folder, operation)
        dist.barrier()
        if rank == 1:
            before_collective(0, lambda: time.sleep(LIMIT_S))
        else:  # only now: a busy machine is slow to come here
            _set_pg_timeout(timedelta(seconds=STOPPED_S))
        return outcome(lambda: OPERATIONS[operation](world))

    first, second = run_forks(body, only_first=True)
    assert second == ""
    assert_names(first, operation, f"no data arrived from it for {STOPPED_S:g} s")


# --- interrupts -----------------------------------------------------------------------------------


def interrupt(*args: object, **kwargs: object) -> Any:
    raise KeyboardInterrupt


class Interrupting:
    """What cannot be pickled: somebody presses Ctrl-C meanwhile."""

    __reduce__ = interrupt


def materialize_interrupted(w: World, is_victim: bool) -> None:
    calls: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        calls.append(module)
        if is_victim and len(calls) == 2:
            interrupt()
        module.reset_parameters()  # type: ignore[operator]  # a Linear's

    materialize(w, init)


def full_params_interrupted(w: World, is_victim: bool) -> None:
    full_params(w, callback=interrupt if is_victim else lambda name, tensor: tensor)


def save_interrupted(w: World, is_victim: bool) -> None:
    if is_victim:
        torch.save = interrupt  # what DCP writes tensors with
    checkpoint.save(w.path, w.model, w.optimizer)


def load_interrupted(w: World, is_victim: bool) -> None:
    if is_victim:
        _files.read_torch_file = interrupt
    checkpoint.load(w.path, w.model, w.optimizer)


def save_safetensors_interrupted(w: World, is_victim: bool) -> None:
    package = pytest.importorskip("safetensors.torch")
    if is_victim:
        package.save_file = interrupt
    checkpoint.save_safetensors(w.tensors, w.model, max_bytes=200)


INTERRUPTED: dict[str, Callable[[World, bool], None]] = {
    "full_params": full_params_interrupted,
    "load": load_interrupted,
    "materialize": materialize_interrupted,
    "save": save_interrupted,
    "save_safetensors": save_safetensors_interrupted,
    "save, extra": lambda w, is_victim: checkpoint.save(
        w.path, w.model, extra=Interrupting() if is_victim else 1
    ),
}


@pytest.mark.parametrize(
    "operation", with_slow(list(INTERRUPTED), ["load", "materialize", "save, extra"])
)
@ranks(1, with_process_group=False, limit_s=90, forks=True)
def test_a_rank_that_is_interrupted(operation: str) -> None:
    """It goes on with its KeyboardInterrupt; the others hear of it, and go on together."""

    def body(rank: int, folder: str) -> str:
        world = World(folder, operation)
        said = outcome(lambda: INTERRUPTED[operation](world, rank == 0))
        norm = fsdp2.clip_grad_norm_(world.model.parameters(), 1.0)  # ranks are in step
        return f"{said}; {norm.isfinite().item()}"

    first, second = run_forks(body)
    assert first == "KeyboardInterrupt: ; True"
    assert second.startswith("StateError: ")
    assert second.endswith("; True")
    assert "rank 0" in second


OUTSIDE = [name for name in OPERATIONS if name not in ("check_order", "forward")]


@pytest.mark.parametrize("operation", with_slow(OUTSIDE, (*FEW, "load", "summon_full_params")))
@ranks(1, with_process_group=False, limit_s=90, forks=True)
def test_ctrl_c_in_a_transfer(operation: str) -> None:
    """Before every collective of an operation: ranks stay in step, and nobody waits for it.

    The others hear of it, or all of them had come through: then it is raised on that rank alone.
    """

    def body(rank: int, folder: str) -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
        world = World(folder, operation)
        others: list[str] = []
        for number in range(100):
            pressed: list[int] = []

            def press(pressed: list[int] = pressed) -> None:
                pressed.append(1)
                signal.raise_signal(signal.SIGINT)

            _set_pg_timeout(timedelta(seconds=LIMIT_S / 4))
            undo = before_collective(number, press if rank == 0 else lambda: None)
            said = outcome(lambda: OPERATIONS[operation](world))
            undo()
            told: list[Any] = [None, None]
            dist.all_gather_object(told, [said, bool(pressed)])
            (first, was_pressed), (second, _) = told
            if not was_pressed:
                assert (first, second) == ("went through", "went through")
                break
            assert first == "KeyboardInterrupt: ", first
            heard = second.startswith("StateError: ") and "rank 0 failed with Keyboard" in second
            assert heard or second == "went through", second
            others.append(second)
            for _, param in world.model.named_parameters():
                assert isinstance(param, dist.tensor.DTensor)
        world.model(world.x).sum().backward()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return f"{len(others)} times"

    first, second = run_forks(body)
    assert first == second
    assert first.endswith(" times"), first
    assert first != "0 times"
