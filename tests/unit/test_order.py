"""The order of what the engine does, pinned: unshard, prefetch, reshard, reduce, recover.

Traces are the same on one rank and on two, and on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fsdp2
from fsdp2._core.base import events
from tests.kit.models import seeded
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks


class Net(nn.Module):
    """Two blocks that are units, and a head that belongs to the root."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 4)
        self.head = nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.a, x, use_reentrant=False) if self.checkpointed else self.a(x)
        return self.head(self.b(x))


def sharded(checkpointed: bool = False, **kwargs: Any) -> nn.Module:
    model = seeded(lambda: Net(checkpointed))
    for unit in (model.a, model.b, model):
        fsdp2.fully_shard(unit, mesh=make_mesh(), **kwargs)
    return model


def stepped(**kwargs: Any) -> nn.Module:
    """Return a model whose order of units is known: it has done a step."""
    model = sharded(**kwargs)
    model(inputs()).sum().backward()
    return model


def inputs(grad: bool = True) -> Tensor:
    return torch.ones(3, 4, requires_grad=grad)


@contextmanager
def trace() -> Iterator[list[str]]:
    """Collect one line an event."""
    lines: list[str] = []
    with events.listen(lambda event: lines.append(str(event))):
        yield lines


def told(lines: list[str]) -> str:
    """Write events in their order, one line for each run of events of one unit in one phase."""
    runs: list[str] = []
    for line in lines:
        phase, _, event = line.partition(": ")
        kind, _, unit = event.partition(" ")
        head = f"{phase} {unit}:"
        if event and runs and runs[-1].startswith(head):
            runs[-1] += f" {kind}"
        else:
            runs.append(f"{head} {kind}" if event else line)
    return "\n".join(runs)


def step_of(model: nn.Module, grad: bool = True) -> str:
    with trace() as lines:
        model(inputs(grad)).sum().backward()
    return told(lines)


@ranks(1, 2)
def test_the_first_step() -> None:
    """Forward is not predicted yet; backward is, by the forward that it undoes."""
    assert_expected_inline(
        step_of(sharded()),
        """\
forward <root>: unshard wait_for_unshard
forward a: unshard wait_for_unshard reshard
forward b: unshard wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(1, 2)
def test_the_second_step_prefetches_in_forward_too() -> None:
    model = stepped()
    assert_expected_inline(
        step_of(model),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_every_later_step_is_the_second() -> None:
    model = stepped()
    second = step_of(model)
    assert [step_of(model) for _ in range(2)] == [second] * 2


@ranks(2)
def test_inputs_without_gradients() -> None:
    """The first unit has no marked input: the end of backward reshards and reduces it."""
    model = stepped()
    assert_expected_inline(
        step_of(model, grad=False),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reduce reshard
backward <root>: reduce reshard wait_for_reduce""",
    )


@ranks(1, 2)
def test_without_reshard_after_forward() -> None:
    """Backward gathers nothing."""
    model = stepped(reshard_after_forward=False)
    assert_expected_inline(
        step_of(model),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard wait_for_unshard
backward b: reshard reduce
backward a: reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_the_root_told_to_reshard_after_forward() -> None:
    model = stepped(reshard_after_forward=True)
    assert_expected_inline(
        step_of(model),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
forward <root>: reshard
backward <root>: unshard wait_for_unshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_resharding_to_neighbours() -> None:
    """With one neighbour and with all ranks: the ints 1 and W mean False and True."""
    assert step_of(sharded(reshard_after_forward=1)) == step_of(
        sharded(reshard_after_forward=False)
    )
    assert step_of(sharded(reshard_after_forward=2)) == step_of(sharded(reshard_after_forward=True))


@ranks(1, 2)
def test_accumulation_without_sync() -> None:
    """Nothing is reduced until the step that syncs."""
    model = stepped()
    model.set_requires_gradient_sync(False)
    with trace() as lines:
        model(inputs()).sum().backward()
        model.set_requires_gradient_sync(True)
        lines.append("--- sync")
        model(inputs()).sum().backward()
    assert_expected_inline(
        told(lines),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard
backward a: wait_for_unshard reshard
backward <root>: reshard wait_for_reduce
--- sync
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_without_reshard_after_backward() -> None:
    """The step after it gathers nothing in forward."""
    model = stepped()
    model.set_reshard_after_backward(False)
    with trace() as lines:
        model(inputs()).sum().backward()
        model.set_reshard_after_backward(True)
        lines.append("--- the next step")
        model(inputs()).sum().backward()
    assert_expected_inline(
        told(lines),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reduce
backward a: wait_for_unshard reduce
backward <root>: reduce wait_for_reduce
--- the next step
forward a: reshard
forward b: reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(1, 2)
def test_a_forward_without_gradients() -> None:
    """The root reshards too, so that parameters are sharded afterwards."""
    model = sharded()
    with trace() as lines, torch.no_grad():
        model(inputs())
        lines.append("--- again")
        model(inputs())
    assert_expected_inline(
        told(lines),
        """\
forward <root>: unshard wait_for_unshard
forward a: unshard wait_for_unshard reshard
forward b: unshard wait_for_unshard reshard
forward <root>: reshard
--- again
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
forward <root>: reshard""",
    )


@pytest.mark.parametrize("early_stop", [True, False])
@ranks(2)
def test_checkpointing_around_a_unit(early_stop: bool) -> None:
    """Backward runs the unit's forward again, between its unshard and its reshard: nothing more."""
    plain, model = sharded(), sharded(checkpointed=True)
    with set_checkpoint_early_stop(early_stop):
        for _ in range(3):
            assert step_of(model) == step_of(plain)


@ranks(1)
def test_a_penalty_leaves_a_unit_at_an_input_that_it_updated() -> None:
    """The update replaces the marked node; a second backward must not keep the unit to its end."""

    class Scaled(nn.Linear):
        def __init__(self, in_place: bool) -> None:
            super().__init__(4, 2)
            self.in_place = in_place

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5) if self.in_place else x * 0.5).square()

    def penalized(in_place: bool) -> str:
        model = seeded(lambda: Scaled(in_place))
        fsdp2.fully_shard(model)
        given = inputs()
        with trace() as lines:
            (grad,) = torch.autograd.grad(model(given * 1.0).sum(), given, create_graph=True)
            grad.sum().backward()
        return told(lines)

    assert penalized(in_place=True) == penalized(in_place=False)


@ranks(2)
def test_prefetch_lists_replace_the_recorded_order() -> None:
    model = sharded()
    model.set_modules_to_forward_prefetch([model.b, model.a])
    model.b.set_modules_to_backward_prefetch([])
    model(inputs()).sum().backward()
    assert_expected_inline(
        step_of(model),
        """\
forward <root>: unshard wait_for_unshard
forward b: prefetch unshard
forward a: prefetch unshard wait_for_unshard reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard reshard reduce
backward a: unshard wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_a_prefetch_that_nobody_used_is_dropped() -> None:
    """It would hold old values: the optimizer steps before the next forward."""
    model = sharded()
    model.b.set_modules_to_forward_prefetch([model.a])
    with torch.no_grad():
        model(inputs())
        for param in model.a.parameters():
            param.zero_()
        with trace() as lines:
            output = model(inputs())
    assert output.eq(model(inputs() * 3)).all()
    assert "forward: unshard a" in lines[: lines.index("forward: wait_for_unshard a")]


@ranks(2)
def test_two_forwards_before_a_backward_reduce_once() -> None:
    """The second gathers the root again: nobody can see whether it was written to in between."""
    model = stepped()
    with trace() as lines:
        (model(inputs()).sum() + model(inputs()).sum()).backward()
    assert_expected_inline(
        told(lines),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
forward <root>: reshard unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard
backward a: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward a: wait_for_unshard reshard reduce
backward <root>: reshard reduce wait_for_reduce""",
    )


@ranks(2)
def test_unshard_and_reshard_by_hand() -> None:
    model = stepped()
    with trace() as lines:
        handle = model.a.unshard(async_op=True)
        handle.wait()
        handle.wait()
        model.b.unshard()
        model.b.reshard()
        model.b.reshard()
        lines.append("--- forward")
        with torch.no_grad():
            model(inputs())
    assert_expected_inline(
        told(lines),
        """\
idle a: unshard wait_for_unshard
idle b: unshard wait_for_unshard reshard
--- forward
forward <root>: unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
forward <root>: reshard""",
    )


class Provoked(Exception):  # noqa: N818  # not an error of the model's
    """Raised by the tests."""


@ranks(1, 2)
def test_an_exception_in_forward_and_the_recovery() -> None:
    model = stepped()
    clean = step_of(model)

    def fail(*_: Any) -> None:
        raise Provoked

    handle = model.b.register_forward_hook(fail)
    with trace() as lines:
        with pytest.raises(Provoked):
            model(inputs())
        handle.remove()
        lines.append("--- the next step")
        model(inputs()).sum().backward()
    assert_expected_inline(
        told(lines[: lines.index("--- the next step") + 4]),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
idle <root>: reshard
--- the next step
idle <root>: recover
forward <root>: unshard wait_for_unshard""",
    )
    assert step_of(model) == clean


@ranks(1, 2)
def test_an_exception_in_backward_and_the_recovery() -> None:
    model = stepped()
    clean = step_of(model)

    def fail(grad: Tensor) -> None:
        raise Provoked

    handle = model.a.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
    with trace() as lines:
        with pytest.raises(Provoked):
            model(inputs()).sum().backward()
        handle.remove()
        lines.append("--- the next step")
        model(inputs()).sum().backward()
    assert_expected_inline(
        told(lines[: lines.index("--- the next step") + 5]),
        """\
forward <root>: unshard wait_for_unshard
forward a: prefetch unshard wait_for_unshard
forward b: prefetch unshard
forward a: reshard
forward b: wait_for_unshard reshard
backward b: prefetch unshard wait_for_unshard
backward a: prefetch unshard
backward b: reshard reduce
backward <root>: reshard
--- the next step
backward <root>: recover
forward <root>: unshard wait_for_unshard
forward a: prefetch""",
    )
    assert step_of(model) == clean


@ranks(2)
def test_bytes_of_a_step() -> None:
    """Received: padded. Freed: aligned. Contributed: padded, with a count for each parameter."""
    model = sharded()
    seen: list[events.Event] = []
    with events.listen(seen.append):
        model(inputs()).sum().backward()
    lines = [f"{e.kind} {e.fqn or '<root>'} {e.nbytes}" for e in seen if e.nbytes]
    assert_expected_inline(
        "\n".join(lines),
        """\
unshard <root> 256
unshard a 256
reshard a 128
unshard b 256
reshard b 112
unshard b 256
unshard a 256
reshard b 112
reduce b 1024
reshard a 128
reduce a 1024
reshard <root> 48
reduce <root> 768""",
    )


@ranks(1, 2)
def test_the_root_is_gathered_once_for_the_backwards_of_two_forwards() -> None:
    model = sharded()
    losses = [model(inputs(grad=False)).sum() for _ in range(2)]
    with trace() as lines:
        (losses[0] + losses[1]).backward()
    moves = [line.removeprefix("backward: ") for line in lines if "prefetch" not in line]
    assert moves.count("unshard <root>") + moves.count("reshard <root>") == 1
    assert moves.count("reduce <root>") == moves.count("reduce a") == moves.count("reduce b") == 1
