"""Promise: an all-gather extension may be methods, set on plain tensors or on a bare subclass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.extensions import (
    MIDDLES,
    WIDTH,
    Bare,
    BareToPad,
    Dense,
    Int8Weight,
    PaddedInt8Weight,
    make,
    make_even,
    refused,
    set_methods,
    shard,
    step,
    train,
    values_of,
)
from tests.kit.meshes import DEVICE
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

# Methods on a plain tensor.


class Rounded(Dense):
    """What a gather in bf16 means, in one process."""

    def __init__(self, middle: int) -> None:
        super().__init__(middle, None)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (p + (p.bfloat16().float() - p).detach() for p in (self.up, self.down))
        return x + F.linear(F.relu(F.linear(x, up, self.bias)), down)


@pytest.mark.parametrize("reshard_after_forward", with_slow([True, False], [False]))
@ranks(slow(2), 3)
def test_methods_set_on_the_local_tensors(reshard_after_forward: bool) -> None:
    """Methods that were set on local tensors before the first forward are used from then on."""
    torch.manual_seed(0)
    reference = nn.Sequential(*(Rounded(middle) for middle in MIDDLES))
    model = shard(make(kind=None), reshard_after_forward=reshard_after_forward)
    for block in model:
        for param in (block.up, block.down):
            set_methods(param)
    held = [param for block in model for param in (block.up, block.down)]
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        parts = torch.randn(12, WIDTH).chunk(size)
        model(parts[rank]).square().mean().backward()
        torch.stack([reference(part).square().mean() for part in parts]).mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-3, atol=1e-4)
    assert all(
        a is b for a, b in zip(held, (p for b in model for p in (b.up, b.down)), strict=True)
    )


@ranks(2)
def test_methods_that_a_copy_lost() -> None:
    """A copy without the methods is refused by name, and works once it has them again."""
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    step(model)
    model.double()
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH).double())
    set_methods(model[0].up)
    model(torch.randn(4, WIDTH).double()).sum().backward()
    assert model[0].up.grad.dtype is torch.float64


@ranks(2)
def test_a_copy_of_methods_works_on_the_copy() -> None:
    """After a deepcopy, methods that were bound to a local tensor gather the copy's values."""
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].up.fill_(2)
    other[0].unshard()
    assert torch.equal(other[0].up, torch.full((13, WIDTH), 2.0))
    model[0].unshard()
    torch.testing.assert_close(model[0].up, make((13,), kind=None)[0].up.bfloat16().float())


# Methods on a subclass that has none.


def extend(model: Any, how: str = "method") -> Any:
    """Set the methods on the local tensors of all shards of `Bare`, as torch's own takes them."""
    for param in model.parameters():
        local = param._local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if has_codes(local) else ():
            function = getattr(PaddedInt8Weight if how == "padded" else Int8Weight, name)
            bound = partial(function, local) if how == "partial" else MethodType(function, local)
            setattr(local, name, bound)
    return model


def has_codes(local: Tensor) -> bool:
    return isinstance(local, Bare)


@pytest.mark.parametrize(
    ("how", "reshard_after_forward"), [("method", True), ("partial", False), ("padded", None)]
)
@ranks(slow(2), 3)
def test_a_subclass_gets_its_extension_after_sharding(
    how: str, reshard_after_forward: bool | None
) -> None:
    """Even, uneven, one-row and empty shards of a bare subclass train as in one process."""
    kind = BareToPad if how == "padded" else Bare
    model = shard(make(kind=kind), reshard_after_forward=reshard_after_forward)
    assert type(model[0].up._local_tensor) is kind
    train(extend(model, how), make(kind=kind))
    assert type(model[0].up._local_tensor) is kind


@ranks(4)
def test_a_bare_subclass_on_a_replicate_axis() -> None:
    train(extend(shard(make(kind=Bare), mesh=make_mesh(2, 2))), make(kind=Bare), steps=2)


@pytest.mark.parametrize("how", ["method", "partial"])
@ranks(2, 4)
def test_torchs_own_takes_a_bare_subclass_too(how: str, world_size: int) -> None:
    """Both train to the same codes, on two ranks and on 2 x 2.

    Rows are even: of uneven shards torch makes new local tensors, without the methods.
    """
    sizes = (2, 2) if world_size == 4 else (2,)
    ours, theirs = (
        extend(shard(make_even((12, 2), Bare), library, mesh=make_mesh(*sizes)), how)
        for library in (fsdp2, torch_fsdp)
    )
    for model in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            model(torch.randn(5, WIDTH + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.placements == other.placements
        a, b = mine._local_tensor, other._local_tensor
        assert type(a) is type(b)
        if isinstance(b, Bare):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["everywhere", "one rank", "half"])
@ranks(2, slow(3))
def test_a_subclass_that_has_no_extension_when_it_is_gathered(where: str, rank: int) -> None:
    """Every rank says so with the full name, at the first unshard; later it works."""
    model = shard(make(kind=Bare))
    assert [type(p._local_tensor) for p in model[0].parameters()] == [Bare, Bare, Tensor]
    if where == "half" or (where == "one rank" and rank > 0):
        extend(model)
    if where == "half" and rank == 0:
        del model[0].up._local_tensor.fsdp_post_all_gather
    lacking = {"everywhere": "on rank 0, 1", "one rank": "on rank 0,", "half": "failed on rank 0"}
    for call in (lambda: model(torch.randn(4, WIDTH)), model[0].unshard):
        with refused(fsdp2.StateError, "0.up: ", lacking[where]):
            call()
        assert isinstance(model[0].up, DTensor)
    train(extend(model), make(kind=Bare), steps=2)


@ranks(4)
def test_a_subclass_that_has_no_extension_on_one_replica(rank: int) -> None:
    model = shard(make((13,), kind=Bare), mesh=make_mesh(2, 2))
    if rank < 2:
        extend(model)
    with refused(fsdp2.StateError, "0.up", "extension" if rank >= 2 else "another replica"):
        model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("how", ["method", "partial"])
@ranks(2)
def test_copies_and_states_of_a_bare_subclass(how: str) -> None:
    """A deepcopy carries the methods, bound to its own; a state loads; a cast loses them."""
    model = extend(shard(make(kind=Bare)), how)
    for _ in range(2):  # before the first step, and after it
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.fill_(2)
        other[0].unshard()
        assert other[0].up.values().unique().tolist() == [2.0]
        other[0].reshard()
        other.load_state_dict(model.state_dict())
        x = torch.ones(2, WIDTH)
        assert torch.equal(other(x), model(x))
        step(model)
        model.zero_grad()
    model.double()
    with refused(fsdp2.StateError, "0.up", "again after what copies them"):
        model(torch.randn(4, WIDTH).double())
    extend(model, how)(torch.randn(4, WIDTH).double()).sum().backward()
    assert model[0].up.grad.dtype is torch.float64


@ranks(2)
def test_optimizers_and_averages_of_a_bare_subclass() -> None:
    """They may be made before it has an extension."""
    model = shard(make(kind=Bare))
    optimizer = fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1)
    average = fsdp2.optim.EMA(model, 0.5)
    before = values_of(model[0].up).clone()
    step(extend(model))
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update()
    assert not torch.equal(values_of(model[0].up), before)


@pytest.mark.parametrize("extended", [False, True])
@ranks(2)
def test_whole_values_of_a_bare_subclass_are_refused_by_name(
    extended: bool, tmp_path: Path
) -> None:
    def new() -> Any:
        model = shard(make(kind=Bare))
        return extend(model) if extended else model

    def summon(model: Any) -> None:
        with fsdp2.summon_full_params(model):
            raise AssertionError

    calls: list[Callable[[Any], Any]] = [
        summon,
        lambda model: list(fsdp2.full_params(model, max_bytes=10**6)),
        fsdp2.checkpoint.full_state,
        fsdp2.checkpoint.local_state,
        lambda model: fsdp2.checkpoint.save_safetensors(tmp_path / "s", model),
        fsdp2.compile,
    ]
    for call in calls:
        with refused(fsdp2.UnsupportedError, "0.up"):
            call(new())
    with torch.device("meta"):
        model = shard(make(kind=Bare))
    with refused(fsdp2.UnsupportedError, "0.up", "to_empty"):
        fsdp2.materialize(model, DEVICE, init=lambda module: None)
    assert type(model[0].up._local_tensor) is Bare
    model.to_empty(device=DEVICE)
    extend(model).load_state_dict(new().state_dict())
    step(model)
