"""Steps captured by ``fsdp2.graphed`` beside eager ones: values, what leaves a graph, and times.

On one rank, and on two NCCL ranks of one GPU. A rehearsal takes eager steps in place of graphs: a
CPU has none. ``why`` of a question that failed has its traceback, and what was logged.
"""

from __future__ import annotations

import logging
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks.gpu import _machine
from benchmarks.gpu._ranks import Worlds
from benchmarks.gpu._rows import Rows, Skipped
from benchmarks.gpu._steps import BLOCKS_8B, SMALL, emulated, size_of
from benchmarks.kit.models import Size, build, make_input

STEPS = 6 if _machine.REHEARSES else 20
WARMUP = 3
WIDTH = 16 if _machine.REHEARSES else 128
NEAR = {"fp32": 1e-4, "bf16": 2e-2}
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3, capturable=not _machine.REHEARSES)
FUSED = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3, fused=True, capturable=True)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


class EagerStep:
    """The step that ``fsdp2.graphed`` captures, in a user's own words."""

    def __init__(self, model: Any, optim: Any, loss: Any, max_norm: float | None) -> None:
        self.model, self.optim, self.loss, self.max_norm = model, optim, loss, max_norm
        self.why_eager, self.captures, self.replays = "a CPU", 0, 0

    def __call__(self, *batch: Tensor) -> Tensor:
        found = self.accumulate(*batch, is_last=True)
        if self.optim is not None:
            if self.max_norm is not None:
                fsdp2.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optim.step()
            self.optim.zero_grad()
        return found

    def accumulate(self, *batch: Tensor, is_last: bool = False) -> Tensor:
        self.model.set_requires_gradient_sync(is_last)
        loss = self.loss(self.model, *batch)
        loss.backward()
        found: Tensor = loss.detach()
        return found


def graphed(model: Any, optim: Any, loss: Any, max_norm: float | None = None) -> Any:
    if _machine.REHEARSES:
        return EagerStep(model, optim, loss, max_norm)
    return fsdp2.graphed(model, optim, loss=loss, max_norm=max_norm, warmup=WARMUP)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.recomputes: bool | None = None  # with random numbers as they were, or not
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes is None:
            return self._run(x)
        found: Tensor = checkpoint(
            self._run, x, use_reentrant=False, preserve_rng_state=self.recomputes
        )
        return found

    def _run(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def make(precision: str, dropout: float = 0.0, shape: tuple[int, ...] = ()) -> Any:
    torch.manual_seed(1)
    with torch.device(_machine.device()):
        model = nn.Sequential(*(Block(dropout) for _ in range(3)), nn.Linear(WIDTH, 13))
    policy = fsdp2.MixedPrecisionPolicy()
    if precision == "bf16":
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sizes = shape or (dist.get_world_size(),)
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(_machine.KIND, sizes, mesh_dim_names=names)
    for block in model[:3]:
        fsdp2.fully_shard(block, mesh=mesh, mp_policy=policy)
    return fsdp2.fully_shard(model, mesh=mesh, mp_policy=policy)


def loss_of(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).float().square().mean()
    return found


def batches(count: int, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(7 + dist.get_rank())
    made = [torch.randn(rows, WIDTH, generator=generator, device="cpu") for _ in range(count)]
    return [batch.to(_machine.device()) for batch in made]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference, of each tensor's largest value."""
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        if one.numel():
            scale = max(float(other.abs().max()), 1e-30)
            worst = max(worst, float((one - other).abs().max()) / scale)
    return worst


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[operator]


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what ``graphed`` logs, tracebacks too."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(logging.Formatter().format(record))

    logger, handler = logging.getLogger("fsdp2"), Handler(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def told(work: Callable[[], Any], _folder: Path | None = None) -> Any:
    """Run a question; an error has its traceback and the log in its text."""
    with logged() as lines:
        try:
            return work()
        except Skipped:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-2500:]
            return {"failed": "\n".join([text, *lines])[-6000:]}


def parity(
    precision: str,
    optimizer: Any = ADAMW,
    *,
    max_norm: float | None = None,
    micro: int = 1,
    dropout: float = 0.0,
    schedule: bool = False,
    shape: tuple[int, ...] = (),
    captures: int = 1,
    recomputes: bool | None = None,
) -> dict[str, Any]:
    """Compare losses and parameters of captured steps with eager ones.

    ``captures``: how many graphs are expected.
    """
    found = {}
    for way, maker in {"eager": EagerStep, "captured": graphed}.items():
        model = make(precision, dropout, shape)
        for block in model[:3]:
            block.recomputes = recomputes
        optim = optimizer(model.parameters())
        rates = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
        step = maker(model, optim, loss_of, max_norm)  # type: ignore[operator]
        given, losses = batches(STEPS * micro), []
        torch.manual_seed(3)
        for index in range(STEPS):
            for at in range(micro - 1):
                step.accumulate(given[index * micro + at])
            losses.append(step(given[(index + 1) * micro - 1]))
            if schedule:
                rates.step()
        _machine.wait()
        found[way] = torch.stack(losses), locals_of(model), step
    (eager, own, _), (seen, theirs, step) = found["eager"], found["captured"]
    values = {
        "losses": difference([seen], [eager]),
        "parameters": difference(theirs, own),
        "replays": step.replays,
        "captures": step.captures,
    }
    limit = NEAR[precision]
    is_near = values["losses"] <= limit and values["parameters"] <= limit
    assert is_near or dropout, values
    if not _machine.REHEARSES:
        expected = (STEPS - WARMUP) * micro, captures
        assert (step.replays, step.captures) == expected, (values, step.why_eager)
    return {**values, "note": step.why_eager[:200]}


def leaves() -> dict[str, Any]:
    """Leave a graph in each way, and go back to it; values stay those of eager steps."""
    found, seen = {}, []
    for way, maker in {"eager": EagerStep, "captured": graphed}.items():
        model = make("fp32")
        optim = ADAMW(model.parameters())
        step = maker(model, optim, loss_of, None)  # type: ignore[operator]
        given, short, losses = batches(40), batches(8, rows=5), []

        def take(batch: Tensor) -> None:
            losses.append(step(batch))  # noqa: B023
            if way == "captured":  # noqa: B023
                seen.append(step.why_eager)  # noqa: B023

        for batch in given[:5]:
            take(batch)
        take(short[0])
        take(given[5])
        state = optim.state_dict()
        optim.load_state_dict(state)
        for batch in given[6:9]:
            take(batch)
        with fsdp2.summon_full_params(model):
            pass
        take(given[9])
        model.set_modules_to_forward_prefetch([])
        model[0].set_reshard_after_backward(False)
        model[0].set_reshard_after_backward(True)
        take(given[10])
        with suppress(RuntimeError):
            step(torch.zeros(3, WIDTH + 1, device=_machine.device()))
        for batch in given[11:14]:
            take(batch)
        found[way] = torch.stack(losses), locals_of(model), step
    (eager, own, _), (losses, theirs, step) = found["eager"], found["captured"]
    values = {"losses": difference([losses], [eager]), "parameters": difference(theirs, own)}
    assert max(values.values()) <= NEAR["fp32"], (values, seen)
    return {**values, "replays": step.replays, "captures": step.captures, "note": "; ".join(seen)}


def fails() -> dict[str, Any]:
    """Captures that are not allowed: the step goes on eagerly, and is captured later."""
    found, seen = {}, []
    for way, maker in {"eager": EagerStep, "captured": graphed}.items():
        model = make("fp32")
        optim = ADAMW(model.parameters())
        reads = True

        def loss(model: Any, x: Tensor) -> Tensor:
            value = loss_of(model, x)
            if reads:  # noqa: B023
                assert value.item() == value.item()
            return value

        step = maker(model, optim, loss, None)  # type: ignore[operator]
        losses = []
        for index, batch in enumerate(batches(12)):
            reads = index < 6
            losses.append(step(batch))
            seen.append(step.why_eager[:80])
        found[way] = torch.stack(losses), locals_of(model), step
    (eager, own, _), (losses, theirs, step) = found["eager"], found["captured"]
    values = {"losses": difference([losses], [eager]), "parameters": difference(theirs, own)}
    assert max(values.values()) <= NEAR["fp32"], (values, seen)
    if not _machine.REHEARSES:
        assert step.replays == 6, (step.replays, seen)
    return {**values, "replays": step.replays, "captures": step.captures}


VALUES: dict[str, Any] = {
    "fp32": partial(parity, "fp32"),
    "bf16": partial(parity, "bf16"),
    "fp32, clipped": partial(parity, "fp32", max_norm=0.05),
    "bf16, clipped": partial(parity, "bf16", max_norm=0.05),
    "4 micro-batches": partial(parity, "fp32", micro=4, captures=3),
    "bf16, 4 micro-batches": partial(parity, "bf16", micro=4, captures=3),
    "a schedule": partial(parity, "fp32", schedule=True),
    "fused": partial(parity, "bf16", FUSED, max_norm=0.05, schedule=True),
    "SGD": partial(parity, "fp32", SGD),
    "dropout": partial(parity, "fp32", dropout=0.1),
    "checkpoints": partial(parity, "bf16", recomputes=False),
    "checkpoints that keep random numbers": partial(parity, "bf16", recomputes=True),
    "leaves": leaves,
    "a capture that fails": fails,
}
TWO = {**VALUES, "two replicas": partial(parity, "fp32", shape=(2, 1))}
REHEARSED = ("bf16, clipped", "checkpoints", "4 micro-batches", "leaves", "a capture that fails")


# Times.


def times(title: str, optimizer: Any) -> list[dict[str, Any]]:
    """Time steps of rank 0 of eight, whose collectives this device emulates."""
    rows = []
    for way in ("plain", "eager", "captured"):
        with emulated(8) as mesh:
            rows.append({"way": way, **_time(way, size_of(title), mesh, optimizer)})
        _machine.empty()
    return rows


def _time(way: str, size: Size, mesh: Any, optimizer: Any) -> dict[str, Any]:
    library = "plain" if way == "plain" else "fsdp2"
    model: Any = build(library, size, mesh, bf16=True)
    x = make_input(library, size, bf16=True, device=mesh.device_type)
    optim = optimizer(model.parameters())

    def loss(model: Any, x: Tensor) -> Tensor:
        found: Tensor = model(x).sum()
        return found

    step: Any
    if way == "captured":
        step = graphed(model, optim, loss, 1.0)
    elif way == "plain":
        step = PlainStep(model, optim, loss)
    else:
        step = EagerStep(model, optim, loss, 1.0)
    for _ in range(2 if _machine.REHEARSES else 6):
        step(x)
    took = [_machine.time_once(lambda: step(x)) for _ in range(1 if _machine.REHEARSES else 9)]
    values = {
        "step ms": statistics.median(one.device_ms for one in took),
        "host ms": statistics.median(one.host_ms for one in took),
        "peak GB": _machine.find_peak(lambda: step(x)) / _machine.GB,
        "reserved GB": _machine.reserved() / _machine.GB,
    }
    if way == "captured" and not _machine.REHEARSES:
        values["replays"] = step.replays
        assert step.replays > 0, step.why_eager
    return values


class PlainStep(EagerStep):
    """A model that is not sharded."""

    def __init__(self, model: Any, optim: Any, loss: Any) -> None:
        super().__init__(model, optim, loss, None)

    def __call__(self, *batch: Tensor) -> Tensor:
        loss = self.loss(self.model, *batch)
        loss.backward()
        params = list(self.model.parameters())
        nn.utils.clip_grad_norm_(params, 1.0)
        self.optim.step()
        self.optim.zero_grad()
        found: Tensor = loss.detach()
        return found


def main() -> None:
    rows, worlds = Rows(), Worlds()
    limit = 60.0 if _machine.REHEARSES else 30.0

    def ask(size: int, work: Any) -> dict[str, Any]:
        answers = worlds.ask(size, partial(told, work), min(limit, rows.seconds_left))
        failed = [answer["failed"] for answer in answers if "failed" in answer]
        if failed:
            worlds.close()  # what a failure leaves is no start for another question
            raise RuntimeError(failed[0])
        found: dict[str, Any] = answers[0]
        return found

    def ask_all(size: int, questions: dict[str, Any]) -> None:
        for name, work in questions.items():
            if not _machine.REHEARSES or name in REHEARSED:
                table = "one rank" if size == 1 else f"{size} ranks"
                rows.ask(table, name, partial(ask, size, work), 4.0)
        worlds.close()

    ask_all(1, VALUES)
    ask_all(2, TWO)
    _machine.need_a_gpu()
    for title in (SMALL, BLOCKS_8B):
        rows.ask("times, N=8, AdamW, clipped", title, partial(told_rows, title, ADAMW), 6.0)
        if not _machine.REHEARSES:
            rows.ask("times, N=8, fused AdamW", title, partial(told_rows, title, FUSED), 6.0)
    rows.end()


def told_rows(title: str, optimizer: Any) -> list[dict[str, Any]]:
    found = told(partial(times, title, optimizer))
    if isinstance(found, dict):
        raise RuntimeError(found["failed"])
    rows: list[dict[str, Any]] = found
    return rows


if __name__ == "__main__":
    main()
