"""Promise: deleting a model frees every tensor; copies and pickles are models of their own."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.models import CASES, WIDTH, Case, floats, loss_of, no_units
from tests.kit.parity import Pair, assert_sharded, bits, make_mesh, names_of, sharded
from tests.kit.pool import ranks
from tests.kit.slow import with_slow


def tensors_alive() -> set[int]:
    """Return the ids of tensors that the collector can see."""
    gc.collect()
    return {id(o) for o in gc.get_objects() if isinstance(o, Tensor)}


def let_go() -> None:
    """Collect, once gloo's threads have let go of the tensors of collectives that are done.

    They do so a moment after a `wait` returns; each further collective passes through their lock.
    """
    for _ in range(8):
        dist.barrier()
    gc.collect()


def storages_of(model: nn.Module) -> list[Tensor]:
    held = [*model.parameters(), *model.buffers()]
    held += [p.grad for p in model.parameters() if p.grad is not None]
    return held + [t.to_local() for t in held if isinstance(t, DTensor)]


@pytest.mark.parametrize(
    ("name", "ending"),
    with_slow(
        itertools.product(
            ["stack", "tied_lm", "nested_units"],
            ["new", "forward", "no_grad", "trained", "unsynced", "failed"],
        ),
        [
            ("stack", "new"),
            ("stack", "forward"),
            ("tied_lm", "no_grad"),
            ("stack", "trained"),
            ("nested_units", "unsynced"),
            ("tied_lm", "failed"),
        ],
    ),
)
@ranks(2)
def test_deleting_a_model_frees_its_tensors(name: str, ending: str) -> None:
    case = CASES[name]
    mesh = make_mesh()
    sharded(case, mesh=mesh)  # fills the caches of torch that are made once
    before = tensors_alive()
    model = sharded(case, mesh=mesh)
    unit_state = weakref.ref(model)
    whole: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        whole.extend(weakref.ref(p) for p in module.parameters())

    model.blocks[0].register_forward_hook(note, prepend=True)
    batch = case.batch(4)
    if ending == "forward":
        loss = model(*batch.args)
        del loss
    elif ending == "no_grad":
        with torch.no_grad():
            model(*batch.args)
    elif ending == "failed":
        handle = model.blocks[1].register_forward_hook(lambda m, args, out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(*batch.args)
        handle.remove()
        del handle
    elif ending != "new":
        model.set_requires_gradient_sync(ending != "unsynced")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss_of(model(*batch.args)).backward()
            optimizer.step()
        del optimizer
    assert bool(whole) is (ending != "new")
    references = [weakref.ref(t) for t in storages_of(model)]
    assert len(references) > 10
    del model, batch
    let_go()
    assert unit_state() is None, "the module is alive"
    assert [r() for r in references if r() is not None] == []
    assert [r() for r in whole if r() is not None] == [], "unsharded parameters are alive"
    for _ in range(4):  # gloo's threads drop a finished work's buffers before they take the next
        dist.barrier()
    left = [o for o in gc.get_objects() if isinstance(o, Tensor) and id(o) not in before]
    assert [tuple(t.shape) for t in left] == []


@ranks(2)
def test_deleting_a_model_needs_no_collector_for_its_big_buffers() -> None:
    """A parameter that outlives its model is whole; the others die."""
    case = CASES["stack"]
    model = sharded(case)
    loss_of(model(*case.batch(4).args)).backward()
    kept = model.blocks[0].up.weight
    reference = weakref.ref(model.blocks[1].up.weight)
    del model
    gc.collect()
    assert reference() is None
    assert kept.full_tensor().shape == (29, 13)


def through_pickle(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle}


@pytest.mark.parametrize(
    ("kind", "name"),
    with_slow(
        itertools.product(COPIES, ["stack", "tied_lm", "scalars", "quantised", "nested_units"]),
        [("deepcopy", "scalars"), ("pickle", "tied_lm")],
    ),
)
@ranks(2)
def test_a_copy_trains_on_its_own(kind: str, name: str) -> None:
    pair = Pair(name)
    pair.train(steps=1)
    twin = COPIES[kind](pair.model)
    assert isinstance(twin, fsdp2.FSDPModule)
    assert type(twin) is type(pair.model)
    assert_sharded(twin)
    values = {n: p.to_local().clone() for n, p in names_of(pair.model).items()}
    original, pair.model = pair.model, twin
    pair.optimizer, _ = pair._optimizers()
    pair.train(steps=2)
    for fqn, parameter in names_of(original).items():
        assert torch.equal(bits(parameter.to_local()), bits(values[fqn])), f"{fqn} changed"
        assert names_of(twin)[fqn] is not parameter


@pytest.mark.parametrize("kind", COPIES)
@ranks(2, 4)
def test_a_copy_made_before_the_first_forward(kind: str, world_size: int) -> None:
    """On four ranks with a replicate axis."""
    pair = Pair("stack", mesh=make_mesh(2, 2) if world_size == 4 else None)
    pair.model = COPIES[kind](pair.model)
    pair.optimizer, _ = pair._optimizers()
    pair.train(steps=2)


@ranks(2)
def test_the_original_trains_on_after_a_copy() -> None:
    pair = Pair("stack")
    pair.train(steps=1)
    average = copy.deepcopy(pair.model)
    for _ in range(2):
        pair.train(steps=1)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), pair.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
    batch = pair.batch()
    with torch.no_grad():
        output = average(*pair.local(batch).args)
    assert output.isfinite().all()
    assert_sharded(average)


@ranks(2)
def test_a_copy_keeps_policy_and_settings() -> None:
    case = Case(CASES["stack"].build, no_units, floats)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = copy.deepcopy(sharded(case, mp_policy=policy))
    seen: list[torch.dtype] = []
    model.blocks[0].register_forward_hook(
        lambda m, args, out: seen.append(m.up.weight.dtype), prepend=True
    )
    assert model(torch.randn(4, WIDTH)).dtype is torch.float64
    assert seen == [torch.bfloat16]
