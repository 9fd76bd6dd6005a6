"""Promise: `fsdp2.weights` brings each engine rank what it asks for, whole or not at all."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import weights
from fsdp2._core.base.errors import LostRank, StateError
from fsdp2.checkpoint._save import Room
from fsdp2.weights import Box, Spec
from tests.kit.engine import (
    Net,
    assert_same,
    changed,
    engine_layout,
    expected,
    whole_values,
    write,
)
from tests.kit.pool import ranks

BF16, FP32 = torch.bfloat16, torch.float32

# In one process: the trainer alone, engine ranks as threads, buffers in queues.


class Killed(BaseException):
    """A rank ends in the middle of a message."""


class Queues:
    """A caller's transport between threads: a send blocks until it is received, if asked to."""

    def __init__(self, blocks: bool = False) -> None:
        self.blocks, self.nbytes = blocks, 0
        self.dead: set[int] = set()
        self.waiting: dict[tuple[int, int], queue.Queue[Any]] = {}

    def between(self, sender: int, receiver: int) -> queue.Queue[Any]:
        """Return one queue, whichever of two threads asks first."""
        return self.waiting.setdefault((sender, receiver), queue.Queue())

    def of(self, me: int, dies_at: int = -1) -> Queue:
        return Queue(self, me, dies_at)


class Queue:
    def __init__(self, shared: Queues, me: int, dies_at: int) -> None:
        self.shared, self.me, self.dies_at = shared, me, dies_at
        self.damages = self.messages = 0

    def _count(self) -> None:
        if self.messages == self.dies_at:
            self.shared.dead.add(self.me)
            raise Killed
        self.messages += 1

    def send(self, rank: int, buffer: torch.Tensor) -> None:
        self._count()
        taken = threading.Event()
        copied = buffer.clone()
        if self.damages and buffer.numel() != 48:
            copied[0] ^= 1
        self.shared.nbytes += buffer.numel()
        self.shared.between(self.me, rank).put((copied, taken))
        if self.shared.blocks and not taken.wait(20):
            raise TimeoutError("nobody receives")

    def receive(self, rank: int, buffer: torch.Tensor) -> None:
        self._count()
        sent, taken = self._next(self.shared.between(rank, self.me), rank)
        assert sent.numel() == buffer.numel()
        buffer.copy_(sent)
        taken.set()

    def _next(self, messages: queue.Queue[Any], rank: int) -> Any:
        due = time.monotonic() + 5
        while time.monotonic() < due:
            is_dead = rank in self.shared.dead  # nothing comes later than this
            try:
                return messages.get(timeout=0.01)
            except queue.Empty:
                if is_dead:
                    raise ConnectionResetError(f"rank {rank} is gone") from None
        raise TimeoutError(f"nothing comes from rank {rank}")


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Return what functions returned or raised, each in a thread."""
    found: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except (Exception, Killed) as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


class Full(Room):
    """Host memory that is exhausted."""

    def copies_of(self, tensors: Any) -> Any:
        raise MemoryError


class Job:
    """A model in this process, and engine ranks in threads."""

    def __init__(self, size: int, *, max_bytes: int = 4096, blocks: bool = False) -> None:
        self.model, self.values = Net(), whole_values()
        self.write(self.values)
        self.layout = engine_layout(size, BF16)
        self.plan = weights.plan(self.model, self.layout, max_bytes=max_bytes)
        self.queues = Queues(blocks)
        self.trainer = self.queues.of(0)
        self.receivers = [weights.Receiver(self.plan.to_json(), index) for index in range(size)]

    def write(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        write(self.model, values)

    def update(self, **how: Any) -> list[Any]:
        """Send once; return what the trainer and each engine rank got, or raised."""
        self.queues.waiting.clear()
        receives = [
            lambda index=index, receiver=receiver: receiver.receive(self.queues.of(1 + index))
            for index, receiver in enumerate(self.receivers)
        ]
        return in_threads(lambda: self.plan.send(self.trainer, **how), *receives)

    def check(self, found: list[Any]) -> None:
        for layout, tensors in zip(self.layout, found[1:], strict=True):
            if isinstance(tensors, BaseException):
                raise tensors
            assert_same(tensors, expected(layout, self.values))


@pytest.mark.parametrize("blocks", [False, True])
def test_a_transport_of_the_callers_whose_sends_block(blocks: bool) -> None:
    job = Job(3, blocks=blocks)
    job.check(job.update())
    assert job.plan.version == 1
    assert {r.version for r in job.receivers} == {1}
    job.write(changed(job.values, 1))
    job.check(job.update(version=7))
    assert job.plan.version == 7


def test_only_blocks_that_changed_are_sent_and_a_receiver_that_restarts_gets_all() -> None:
    job = Job(2, max_bytes=1 << 20)
    big = nn.Linear(64, 512)
    job.model = nn.Sequential(big)
    job.values = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    job.layout = [{"w": Spec((512, 64), FP32, [Box("0.weight", (0, 0), (512, 64))])}] * 2
    job.plan = weights.plan(job.model, job.layout, max_bytes=1 << 20)
    job.receivers = [weights.Receiver(job.plan.to_json(), index) for index in range(2)]

    def update() -> int:
        job.queues.nbytes = 0
        found = job.update(since=job.plan.version)
        for tensors in found[1:]:
            assert torch.equal(tensors["w"], big.weight)
        return job.queues.nbytes

    everything = update()
    assert update() < 1000  # nothing changed
    with torch.no_grad():
        big.weight[5, 5] += 1
        big.weight[-1, -1] += 1
    assert 2 * 2 * 256 < update() < 2 * (2 * 256 + 512) + 1000
    with torch.no_grad():
        big.weight[::2] += 1  # half of the blocks: with their map it is more than half
    assert update() == everything
    job.receivers[1] = weights.Receiver(job.plan.to_json(), 1)
    assert everything / 2 < update() < everything / 2 + 1000
    assert update() < 1000


def test_a_wrong_checksum_leaves_the_version_before_whole_on_all() -> None:
    job = Job(2)
    before = job.update()
    job.trainer.damages = 1
    right = [expected(layout, job.values) for layout in job.layout]
    job.write(changed(job.values, 1))
    for error in job.update():
        assert isinstance(error, StateError)
        assert error.code == "FS635"
    for receiver, whole, was in zip(job.receivers, right, before[1:], strict=True):
        assert receiver.version == 1
        assert_same(receiver.tensors, whole)
        assert_same(was, whole)
    job.trainer.damages = 0
    job.check(job.update(since=1))


def test_a_callback_changes_boxes_and_its_error_is_everybodys() -> None:
    job = Job(2)
    added = {name: torch.randn_like(value) for name, value in job.values.items()}

    def merge(name: str, start: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        where = tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))
        return values + added[name][where]

    def fail(name: str, start: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(name)

    found = job.update(callback=merge)
    job.values = {name: value + added[name] for name, value in job.values.items()}
    job.check(found)
    errors = job.update(callback=fail)
    assert isinstance(errors[0], ZeroDivisionError)
    assert all(isinstance(error, StateError) for error in errors[1:])
    assert "trainer 0 failed" in str(errors[1])
    assert [receiver.version for receiver in job.receivers] == [1, 1]


def test_in_the_background_the_moment_of_the_call_is_sent() -> None:
    job = Job(2)
    values = job.values
    begin = threading.Event()

    def train() -> None:
        handle = job.plan.send(job.trainer, background=True)
        assert not handle.done()  # no engine rank is there yet
        job.write(changed(values, 3))
        begin.set()
        handle.wait(30)
        assert handle.version == 1
        assert handle.nbytes > 0

    def receive(index: int) -> Any:
        begin.wait(30)
        return job.receivers[index].receive(job.queues.of(1 + index))

    found = in_threads(train, lambda: receive(0), lambda: receive(1))
    job.values = values
    job.check(found)


def test_after_a_copy_in_the_background_fails_the_next_send_works() -> None:
    job = Job(2)
    room, job.plan._room = job.plan._room, Full()
    with pytest.raises(MemoryError):
        job.plan.send(job.trainer, background=True)
    job.plan._room = room
    job.check(job.update())
    assert job.plan.version == 1


def test_ranks_of_another_plan_are_told() -> None:
    job = Job(2)
    other = weights.plan(job.model, engine_layout(2, FP32), max_bytes=4096)
    job.receivers = [weights.Receiver(other.to_json(), index) for index in range(2)]
    for error in job.update():
        assert isinstance(error, StateError)
        assert error.code == "FS634"
        assert "plans" in str(error)


def kill_in_an_update(number: int, dies_at: int) -> int:
    """Kill one rank at a message of the second update; return how many it would have."""
    job = Job(3)
    job.check(job.update())
    before = [expected(layout, job.values) for layout in job.layout]
    job.write(changed(job.values, 1))
    after = [expected(layout, job.values) for layout in job.layout]
    ends = [job.queues.of(rank, dies_at if rank == number else -1) for rank in range(4)]
    found = in_threads(
        lambda: job.plan.send(ends[0], since=1),
        *(lambda r=r, e=e: r.receive(e) for r, e in zip(job.receivers, ends[1:], strict=True)),
    )
    alive = [index for index in range(3) if index + 1 != number]
    versions = {job.receivers[index].version for index in alive}
    assert len(versions) == 1, f"survivors of message {dies_at} have {versions}"
    for index in alive:
        whole = after if versions == {2} else before
        assert_same(job.receivers[index].tensors, whole[index])
        assert versions == {2} or isinstance(found[index + 1], fsdp2.StateError | LostRank)
    if number == 0 or found[number] is None:
        return ends[number].messages
    job.queues.dead.clear()  # an engine rank comes back, and knows nothing
    job.receivers[number - 1] = weights.Receiver(job.plan.to_json(), number - 1)
    job.check(job.update(since=job.plan.version))
    return ends[number].messages


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_dies_leaves_no_engine_with_half_of_a_version(number: int) -> None:
    for dies_at in (0, 3, 9):
        kill_in_an_update(number, dies_at)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_rank_that_dies_at_any_message(number: int) -> None:
    messages = kill_in_an_update(number, -1)
    assert messages > 12
    for dies_at in range(messages):
        assert kill_in_an_update(number, dies_at) == dies_at


@pytest.mark.parametrize("receivers", [[], [1], [1, 1], [1, 2, 3]])
def test_receivers_are_one_rank_for_each_engine_rank(receivers: list[int]) -> None:
    job = Job(2)
    with pytest.raises(fsdp2.ConfigError, match="receivers"):
        job.plan.send(job.queues.of(0), receivers)


# On ranks: see also test_weights_on_ranks.py.


@pytest.mark.parametrize("trainers", [1, 2])  # of a group of three: one too many, and enough
@ranks(3)
def test_a_group_that_is_not_the_plans_is_an_error_on_all(rank: int, trainers: int) -> None:
    layout = engine_layout(1, BF16)
    text: list[Any] = [None]
    mesh = DeviceMesh("cpu", list(range(trainers)))
    if rank < trainers:
        model = fsdp2.fully_shard(Net(), mesh=mesh)
        plan = weights.plan(model, layout, max_bytes=4096)
        text = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    if rank < trainers:
        part = lambda: plan.send(dist.group.WORLD, [1])  # noqa: E731
    else:
        part = lambda: weights.Receiver(text[0], 0).receive(dist.group.WORLD)  # noqa: E731
    with pytest.raises(StateError, match=r"in the order of the destination.*FS634"):
        part()


# Jobs of their own.

ENGINE = """
import sys, torch
from pathlib import Path
from fsdp2 import weights
folder, index = Path(sys.argv[1]), int(sys.argv[2])
receiver = weights.Receiver((folder / "plan.json").read_text(), index)
for update in range(2):
    tensors = receiver.receive(weights.Files(folder / "buffers", timeout=60))
torch.save(tensors, folder / f"{index}.pt")
"""


@pytest.mark.slow
def test_trainer_and_engine_are_jobs_of_their_own(tmp_path: Path) -> None:
    model, values = Net(), whole_values()
    write(model, values)
    layout = engine_layout(2, BF16)
    plan = weights.plan(model, layout, max_bytes=4096)
    (tmp_path / "plan.json").write_text(plan.to_json())
    engines = [
        subprocess.Popen([sys.executable, "-c", ENGINE, str(tmp_path), str(index)])
        for index in range(2)
    ]
    plan.send(weights.Files(tmp_path / "buffers", timeout=60))
    values = changed(values, 1)
    write(model, values)
    plan.send(weights.Files(tmp_path / "buffers", timeout=60), since=1)
    assert [engine.wait(60) for engine in engines] == [0, 0]
    for index, one in enumerate(layout):
        assert_same(torch.load(tmp_path / f"{index}.pt"), expected(one, values))


READER = """
import json, struct, sys, time
from pathlib import Path
import numpy as np

folder = Path(sys.argv[1])
told = json.loads((folder / "plan.json").read_text())

def take(count):
    place = folder / "buffers" / "0-to-1"
    while not place.exists():
        time.sleep(0.001)
    data = place.read_bytes()
    assert len(data) == count
    place.unlink()
    return data

def ints(count):
    return struct.unpack(f"<{count}q", take(8 * count))

def tell(*numbers):
    (folder / "buffers" / "part").write_bytes(struct.pack(f"<{len(numbers)}q", *numbers))
    (folder / "buffers" / "part").rename(folder / "buffers" / "1-to-0")

(folder / "buffers").mkdir(exist_ok=True)
ints(6)
tell(1, 0, told["plan"], 0, 0, -1)
own = told["of"]["0"]
tensors = [np.zeros(shape, np.uint16) for _, shape, _, _ in own["tensors"]]
for nbytes, entries in own["senders"]["0"]:
    plan, version, _, kind, sent, _ = ints(6)
    assert (plan, kind, sent) == (told["plan"], 0, nbytes)
    data = take(nbytes)
    for index, start, shape, dtype, offset in entries:
        assert dtype == "bfloat16"
        where = tuple(slice(s, s + n) for s, n in zip(start, shape))
        values = np.frombuffer(data, np.uint16, int(np.prod(shape)), offset)
        tensors[index][where] = values.reshape(shape)
tell(version, version)
assert "torch" not in sys.modules
np.savez(folder / "read.npz", *tensors)
"""


@pytest.mark.slow
def test_a_reader_without_torch_takes_part(tmp_path: Path) -> None:
    model = Net()
    write(model, whole_values())
    layout = engine_layout(1, BF16)
    plan = weights.plan(model, layout, max_bytes=2048)
    (tmp_path / "plan.json").write_text(plan.to_json())
    reader = subprocess.Popen([sys.executable, "-c", READER, str(tmp_path)])
    plan.send(weights.Files(tmp_path / "buffers", timeout=60))
    assert reader.wait(60) == 0
    right = expected(layout[0], whole_values())
    with np.load(tmp_path / "read.npz") as found:
        for tensor, values in zip(right.values(), found.values(), strict=True):
            assert np.array_equal(tensor.view(torch.uint16).numpy(), values)
