"""Promise: `shard=` says what is sharded; training is that of an unsharded model in every mode."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.base import events
from fsdp2._core.base.events import Event
from fsdp2._core.engine.between_steps import units_below
from tests.behaviour.test_recovery import PHASES, fail
from tests.kit.in_turn import advance
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_parameters,
    make_mesh,
    names_of,
    sharded,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

MODES = ["parameters", "gradients", "optimizer"]
WHOLE = MODES[1:]
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count events by kind, and the bytes of each kind under its name and `nbytes`."""
    seen: Counter[str] = Counter()

    def hear(event: Event) -> None:
        seen[event.kind] += 1
        seen[f"{event.kind} nbytes"] += event.nbytes

    with events.listen(hear):
        yield seen


def micro_batches(pair: Pair, count: int, puts_off: bool = True) -> list[tuple[int, int]]:
    """Run backwards of one step; return how many gathers and reductions each of them issued."""
    found = []
    for micro in range(count):
        is_last = micro == count - 1
        pair.model.set_requires_gradient_sync(is_last or not puts_off)  # type: ignore[operator]
        with counted() as seen:
            pair.backward(scale=1 / count)
        found.append((seen["unshard"], seen["reduce"]))
    return found


UNITS = 4  # of the case "stack": three blocks and the root


@pytest.mark.parametrize("mode", with_slow(WHOLE, ["gradients"]))
@ranks(2)
def test_a_step_gathers_once(mode: str) -> None:
    """The first micro-batch gathers every unit; ZeRO-1 reduces with the last, ZeRO-2 with each."""
    pair = Pair("stack", shard=mode)
    for _ in range(3):
        found = micro_batches(pair, 4)
        assert [gathers for gathers, _ in found] == [UNITS, 0, 0, 0]
        each = 0 if mode == "optimizer" else UNITS
        assert [reductions for _, reductions in found] == [each, each, each, UNITS]
        pair.step()
    for _ in range(2):  # each backward may be followed by a step
        assert micro_batches(pair, 3, puts_off=False) == [(UNITS, UNITS)] * 3
        pair.step()
    pair.check()


def train_with(pair: Pair, make: Callable[..., Any], count: int, rtol: float) -> None:
    """Take three steps of `count` micro-batches, clipped, and compare."""
    reference = torch.optim.AdamW if make is KINDS["local"] else make
    ours = make(pair.model.parameters(), lr=0.02)
    theirs = reference(pair.reference.parameters(), lr=0.02)
    for _ in range(3):
        pair.accumulate(count, scale=1 / count)
        norm = fsdp2.clip_grad_norm_(pair.model.parameters(), 0.05)
        expected = nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.05)
        assert_same(whole(norm), expected, "norm", 1e-5)
        pair.steps += 1
        advance(ours, theirs)
    assert_same_parameters(pair.model, pair.reference, rtol)


KINDS: dict[str, Callable[..., Any]] = {
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "local": partial(fsdp2.optim.local, torch.optim.AdamW),
}
SGD = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", [*KINDS, "SGD"])
@pytest.mark.parametrize("mode", WHOLE)
@ranks(slow(2), slow(3), slow(4))
def test_parity_with_an_unsharded_model(mode: str, kind: str, count: int) -> None:
    """Steps, with clipping, are those of the unsharded model; on a mesh with replicas, too."""
    world = dist.get_world_size()
    for shape in [(world,)] + [(2, 2)] * (world == 4):
        pair = Pair("stack", mesh=make_mesh(*shape), shard=mode)
        pair.later_rtol = 1e-4  # AdamW divides small gradients by small ones
        train_with(pair, KINDS.get(kind, SGD), count, 1e-5 if kind == "SGD" else 1e-4)


def bf16_run(count: int, puts_off: bool = True, **kwargs: Any) -> list[Tensor]:
    """Train in bf16; return the losses of this rank, and the whole parameters."""
    case = CASES["stack"]
    model = sharded(case, mp_policy=POLICY, **kwargs)
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.02)
    found = []
    torch.manual_seed(5)
    for _ in range(3):
        for micro in range(count):
            is_last = micro == count - 1
            model.set_requires_gradient_sync(is_last or not puts_off)  # type: ignore[operator]
            batch = case.batch(12).chunk(dist.get_rank(), dist.get_world_size())
            loss = loss_of(model(*batch.args, **batch.kwargs))
            (loss / count).backward()
            found.append(loss.detach())
        fsdp2.clip_grad_norm_(model.parameters(), 0.05)
        advance(optimizer)
    return [*found, *(whole(p) for p in model.parameters())]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("mode", WHOLE)
@ranks(2, 3, 4)
def test_bf16_steps_are_those_of_sharded_parameters(mode: str, count: int) -> None:
    """Bit for bit: gathers bring the same values, and gradients add up in the same order."""
    world = dist.get_world_size()
    for shape in [(world,)] + [(2, 2)] * (world == 4):
        mesh, puts_off = make_mesh(*shape), mode == "optimizer"
        found = bf16_run(count, mesh=mesh, shard=mode)
        is_split = mode == "gradients" and len(shape) == 2
        if is_split:  # sums in a replica come first, as with set_requires_all_reduce(False)
            continue
        expected = bf16_run(count, puts_off, mesh=mesh)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


NAMES = [
    "stack",
    "few_rows",
    "scalars",
    "tied_lm",
    "partly_frozen",
    "all_frozen_blocks",
    "unused_parts",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", WHOLE)
@ranks(slow(2), slow(3))
def test_any_parameter(mode: str, name: str) -> None:
    pair = Pair(name, shard=mode)
    for _ in range(2):
        micro_batches(pair, 3)
        pair.step()
    pair.check()
    gathers = [found for found, _ in micro_batches(pair, 3)]
    assert gathers[1:] == [0, 0], f"what stayed was gathered again: {gathers}"


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def written(**kwargs: Any) -> tuple[nn.Module, Tensor]:
    case = CASES["stack"]
    model = sharded(case, **kwargs)
    x = case.batch(4).args[0]
    with fsdp2.no_sync(model):
        for _ in range(2):
            loss_of(model(x)).backward()
    return model, x


def expected_output(model: nn.Module, x: Tensor) -> Tensor:
    """Run an unsharded model on what the shards have now."""
    plain = seeded(CASES["stack"].build)
    with torch.no_grad():
        for name, param in names_of(plain).items():
            param.copy_(whole(names_of(model)[name]))
        return plain(x)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: [p.mul_(1.5) for p in m.parameters()],
    "local tensors": lambda m: [p.to_local().mul_(1.5) for p in m.parameters()],  # type: ignore[attr-defined]
    "data, gradients dropped": lambda m: [
        (p.data.mul_(1.5), setattr(p, "grad", None)) for p in m.parameters()
    ],
    "numpy, zero_grad": lambda m: [
        [p.to_local().detach().numpy().__imul__(1.5) for p in m.parameters()],  # type: ignore[attr-defined]
        m.zero_grad(),
    ],
    "foreach, gradients dropped": lambda m: [
        torch._foreach_mul_(list(m.parameters()), 1.5),
        m.zero_grad(set_to_none=False),
    ],
    "fused step": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step(),
    "local step": lambda m: fsdp2.optim.local(torch.optim.SGD, m.parameters(), lr=0.1).step(),
    "load": lambda m: m.load_state_dict({n: p.detach() * 1.5 for n, p in m.state_dict().items()}),
    "assigned load": lambda m: m.load_state_dict(
        {n: p.detach() * 1.5 for n, p in m.state_dict().items()}, assign=True
    ),
    "replaced": lambda m: [
        setattr(b.norm, "weight", nn.Parameter(torch.full_like(b.norm.weight.full_tensor(), 3.0)))
        for b in m.blocks  # type: ignore[union-attr]
    ],
    "reset": lambda m: [p.data.mul_(1.5) for p in m.parameters()] + [m.reset_iter_state()],
}


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("mode", with_slow(WHOLE, ["optimizer"]))
@ranks(2)
def test_no_write_is_missed(mode: str, kind: str) -> None:
    """Between a backward and the next forward, while gradients accumulate."""
    if mode == "optimizer" and kind == "data, gradients dropped":
        return  # those that wait are whole: only the model's `zero_grad` drops them
    for evaluates_first in (False, True):
        model, x = written(shard=mode)
        with counted() as seen:
            model(x)
        assert seen["unshard"] == 0
        with torch.no_grad():
            WRITES[kind](model)
        expected = expected_output(model, x)
        if evaluates_first:
            assert_same(output_of(model, x), expected, kind)
        assert_same(model(x).detach(), expected, kind)


@pytest.mark.parametrize("mode", WHOLE)
@ranks(2)
def test_averages_swapped_in_by_data_are_used(mode: str) -> None:
    """Such a swap counts no version: behind a step, or in the middle of an accumulation."""
    for steps, zeros in ((True, True), (True, False), (False, False)):
        model, x = written(shard=mode)
        if steps:
            loss_of(model(x)).backward()
            optimizer = fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1)
            optimizer.step()
        if zeros:
            model.zero_grad()
        trained = output_of(model, x)
        for p in model.parameters():
            p.data.mul_(2)
        swapped = output_of(model, x)
        assert_same(swapped, expected_output(model, x), "with the average")
        assert not torch.allclose(swapped, trained)
        for p in model.parameters():
            p.data.mul_(0.5)
        assert_same(model(x).detach(), trained, "trained again")


@pytest.mark.parametrize("mode", WHOLE)
@ranks(2)
def test_evaluation_between_micro_batches(mode: str) -> None:
    """It gathers for itself, and leaves nothing whole."""
    pair = Pair("stack", shard=mode)
    for _ in range(2):
        pair.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        pair.backward(scale=0.5)
        with counted() as seen, torch.no_grad():
            pair.losses(pair.batch())
        assert seen["unshard"] == UNITS
        assert whole_nbytes(pair.model) == 0
        pair.model.set_requires_gradient_sync(True)  # type: ignore[operator]
        pair.backward(scale=0.5)
        pair.step()
    pair.check()


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_an_update_by_hand_before_gradients_are_cleared(mode: str) -> None:
    """Gradients are cleared between forward and backward, and `.data` counts no version."""
    pair = Pair("stack", shard=mode)
    params = [list(model.parameters()) for model in (pair.model, pair.reference)]
    for _ in range(4):
        for own, loss in zip(params, pair.losses(pair.batch()), strict=True):
            for p in own:
                p.grad = None
            loss.backward()
            for p in own:
                p.data.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        pair.steps += 1
    pair.check()


LAYOUTS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "states over all ranks": {"mesh": (2, 2), "shard_outer": "optimizer"},
}
STAYING: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "gradients of replicas": {"mesh": (2, 2), "shard": "gradients"},
    "smaller mesh": {"reshard_after_forward": 2},
}


def placed(how: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of `shard` with a mesh in the place of its shape."""
    return {**how, "mesh": make_mesh(*how.get("mesh", ()))}


@pytest.mark.parametrize("kept", STAYING)
@ranks(4)
def test_gradients_of_inputs_leave_nothing_to_use(kept: str) -> None:
    """Forces are evaluated with averages and without sync: the next step is not on the averages."""
    case = CASES["stack"]
    model = sharded(case, **placed(STAYING[kept]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = case.batch(4).args[0]
    loss_of(model(x)).backward()  # its gradients are still there in the evaluation
    for factor in (2.0, 0.5):
        for p in model.parameters():
            p.data.mul_(factor)
        with fsdp2.no_sync(model):
            positions = x.clone().requires_grad_()
            output = model(positions)
            assert_same(output.detach(), expected_output(model, x), f"times {factor}")
            torch.autograd.grad(output.sum(), positions)
    assert_same(model(x).detach(), expected_output(model, x), "next step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor do gradients wait
        optimizer.step()


@pytest.mark.parametrize("of", ["one rank", "shards"])
@ranks(2)
def test_steps_of_other_optimizers(of: str) -> None:
    """A model that one rank fits alone changes no gather; plain tensors in the shards do."""
    model, x = written(shard="optimizer")
    if of == "one rank":
        others = [nn.Parameter(torch.ones(3))] if dist.get_rank() == 0 else []
    else:
        others = [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    for plain in others:
        plain.grad = torch.ones_like(plain)
    if others:
        torch.optim.AdamW(others, lr=0.1, fused=True).step()  # counts no version
    with counted() as seen:
        output = model(x)
    assert seen["unshard"] == (0 if of == "one rank" else UNITS)
    assert_same(output.detach(), expected_output(model, x), of)


KEPT: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "after backward": {},
}


@pytest.mark.parametrize("kept", KEPT)
@ranks(2)
def test_writes_of_a_recomputation_do_not_undo_a_step(kept: str) -> None:
    """They reach the shards with the backward, so the optimizer steps from there."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 5)).double()
    model = fsdp2.fully_shard(copy.deepcopy(reference), **KEPT[kept])
    if kept == "after backward":
        model.set_reshard_after_backward(False)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)  # type: ignore[index,union-attr]
            model[1].bias.mul_(0.9)  # type: ignore[index,union-attr]
        return nn.Sequential.forward(model, x)  # type: ignore[arg-type]

    for each in (model, reference):
        each.forward = partial(checkpoint, partial(run, each), use_reentrant=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        x = torch.randn(4, 13, dtype=torch.float64)
        model.set_requires_gradient_sync(kept == "after backward")
        for _ in range(2):
            loss_of(model(x)).backward()
            loss_of(reference(x)).backward()
            assert_same_parameters(model, reference)
        model.set_requires_gradient_sync(True)
        loss_of(model(x)).backward()
        loss_of(reference(x)).backward()
        advance(*optimizers)
        assert_same_parameters(model, reference)
        with torch.no_grad():
            assert_same(model(x), reference(x), f"step {step}")


def whole_nbytes(model: nn.Module) -> int:
    """Return the bytes of whole parameters that are in memory."""
    groups = [group for unit in units_below(model) for group in unit.own_groups]
    memories = [group.buffers.whole_memory for group in groups]
    return sum(m.untyped_storage().nbytes() for m in memories if m is not None)


@pytest.mark.parametrize("mode", WHOLE)
@ranks(2)
def test_an_exception_leaves_no_trace(mode: str) -> None:
    pair = Pair("stack", shard=mode)
    pair.backward()
    pair.step()
    for phase in PHASES:
        pair.backward(scale=0.5)
        fail(pair, "blocks.1", phase)
        pair.model.reset_iter_state()  # type: ignore[operator]
        pair.reference.zero_grad()
        for _ in range(2):
            pair.backward(scale=0.5)
        pair.step()
    pair.check()


@pytest.mark.parametrize("mode", WHOLE)
@ranks(2)
def test_several_forwards_before_a_backward(mode: str) -> None:
    pair = Pair("stack", shard=mode)
    for _ in range(2):
        losses = [pair.losses(pair.batch()) for _ in range(3)]
        for ours, theirs in losses:
            ours.backward()
            theirs.backward()
        pair.step()
    pair.check()


@ranks(2)
def test_parameters_are_shards_between_backwards() -> None:
    """So states, averages and checkpoints are those of the default mode; memory is not."""
    for mode in WHOLE:
        pair = Pair("stack", shard=mode)
        pair.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        pair.backward()
        assert whole_nbytes(pair.model) >= sum(p.numel() * 4 for p in pair.model.parameters())
        assert all(isinstance(p, DTensor) for p in pair.model.parameters())
        state = pair.model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        pair.model.set_requires_gradient_sync(True)  # type: ignore[operator]
        pair.backward()
        assert whole_nbytes(pair.model) == 0


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        *itertools.permutations(
            {**LAYOUTS, "parameters": {}, "replicas": {"mesh": (2, 2)}}.items(), 2
        )
    ],
    ids=lambda layout: layout[0],
)
@ranks(slow(4))
def test_checkpoints_move_between_layouts(saved_in: Any, loaded_in: Any, tmp_path: Path) -> None:
    case = CASES["stack"]
    models = [sharded(case, **placed(how)) for _, how in (saved_in, loaded_in)]
    made = [fsdp2.optim.local(torch.optim.AdamW, m.parameters(), lr=0.02) for m in models]

    def step(index: int, batch: Any) -> None:
        model, optimizer = models[index], made[index]
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            (loss_of(model(*batch.args)) / 2).backward()
        fsdp2.clip_grad_norm_(model.parameters(), 0.05)
        advance(optimizer)

    batches = [case.batch(12).chunk(dist.get_rank(), 4) for _ in range(4)]
    for batch in batches[:2]:
        step(0, batch)
    loss_of(models[1](*batches[3].args)).backward()  # something to be forgotten
    models[1].zero_grad()
    shared = [str(tmp_path)]
    dist.broadcast_object_list(shared)
    fsdp2.checkpoint.save(f"{shared[0]}/step", models[0], made[0])
    fsdp2.checkpoint.load(f"{shared[0]}/step", models[1], made[1])
    for batch in batches[2:]:
        step(0, batch)
        step(1, batch)
    rtol = 1e-6 if "mesh" not in {**saved_in[1], **loaded_in[1]} else 1e-5  # other orders of sums
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same(ours, whole(theirs), "after a load", rtol)
