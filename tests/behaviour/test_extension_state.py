"""Promise: states, copies and casts know parameters with an all-gather extension."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.extensions import WIDTH, Int8Weight, compare, make, refused, shard, step, train
from tests.kit.meshes import DEVICE
from tests.kit.pool import ranks
from tests.kit.slow import slow


@ranks(slow(2), 3)
def test_state_dict_shows_the_subclass_and_loads_by_copy_and_by_assignment() -> None:
    """A state dict holds DTensors around the subclass, and loads into another model, both ways."""
    source = shard(make())
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(2)
    state = source.state_dict()
    assert isinstance(state["0.up"], DTensor)
    assert isinstance(state["0.up"]._local_tensor, Int8Weight)
    expected = source(torch.ones(2, WIDTH))
    for assign in (False, True):
        model = shard(make())
        step(model)
        model.load_state_dict(state if not assign else copy.deepcopy(state), assign=assign)
        assert torch.equal(model(torch.ones(2, WIDTH)), expected)
        step(model)
        assert model[0].up.grad is not None


@ranks(2)
def test_our_checkpoints_refuse_what_they_could_not_load(tmp_path: Path) -> None:
    """A tensor that wraps others is refused by `save`: torch would write it, we not read it."""
    model = shard(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(fsdp2.UnsupportedError, "up", "Int8Weight", "torch.distributed.checkpoint"):
        fsdp2.checkpoint.save(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_a_whole_subclass_parameter_assigned_later() -> None:
    """A whole parameter put in the place of a sharded one is sharded through the subclass."""
    model, other = shard(make()), make()
    step(model)
    model.zero_grad()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(3)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), other(x))
    assert isinstance(model[0].up, DTensor)
    assert isinstance(model[0].up._local_tensor, Int8Weight)
    plain = make(kind=None)
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model.load_state_dict(plain.state_dict(), assign=True)


@ranks(2)
def test_parameters_that_become_extended_later() -> None:
    """Quantized weights assigned to a model that was sharded plain are extended from then on."""
    model, other = shard(make(kind=None)), make()
    step(model)
    model.zero_grad()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    train(model, other, steps=2)


@ranks(2)
def test_copies() -> None:
    """A deepcopy of a sharded model trains like the original."""
    model = shard(make())
    step(model)
    model.zero_grad()
    train(copy.deepcopy(model), make(), steps=2)


@ranks(2)
def test_another_dtype() -> None:
    """After .to(dtype) the outer dtype, the gathered one and the gradients' are the new one."""
    model, reference = shard(make()), make()
    step(model)
    model.zero_grad()
    model.double()
    reference.double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for m in (model, reference):
        m(x).square().mean().backward()
    assert model[0].up.dtype is torch.float64
    compare(model, reference, grads=True, exact=True)


@ranks(2, slow(3))
def test_from_the_meta_device() -> None:
    """A subclass on meta is sharded there, and trains once it has memory and values."""
    with torch.device("meta"):
        model = make()
    assert model[0].up.is_meta
    shard(model)
    assert isinstance(model[0].up._local_tensor, Int8Weight)
    assert model[0].up._local_tensor.codes.is_meta
    model.to_empty(device=DEVICE)
    model.load_state_dict(shard(make()).state_dict())
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(model(x), make()(x))
    step(model)


@ranks(2)
def test_frozen_extended_parameters() -> None:
    """Frozen quantized weights are gathered and get no gradients."""
    model = make()
    for block in model:
        block.up.requires_grad_(False)
    shard(model)
    step(model)
    assert model[0].up.grad is None
    assert model[0].down.grad is not None
