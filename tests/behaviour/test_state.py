"""Promise: a sharded model's state can be read, saved, loaded, moved and changed as usual."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES, WIDTH, Case, loss_of, seeded
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_parameters,
    assert_sharded,
    names_of,
    shard,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import with_slow

NAMES = ["stack", "tied_lm", "scalars", "nested_units", "one_group", "non_contiguous", "containers"]


@pytest.mark.parametrize(
    "name", with_slow(NAMES, ["tied_lm", "nested_units", "one_group", "containers"])
)
@ranks(2)
def test_names_are_those_of_the_plain_model(name: str) -> None:
    pair = Pair(name)
    for _ in range(2):
        assert list(pair.model.state_dict()) == list(pair.reference.state_dict())
        for walk in ("named_parameters", "named_modules", "named_buffers"):
            found, expected = ([*dict(getattr(m, walk)())] for m in (pair.model, pair.reference))
            assert found == expected, walk
        pair.train(steps=1)


@pytest.mark.parametrize("name", with_slow(NAMES, ["tied_lm", "scalars", "non_contiguous"]))
@ranks(2)
def test_the_full_state_fits_a_plain_model(name: str) -> None:
    pair = Pair(name)
    pair.train(steps=2)
    full = {key: whole(value) for key, value in pair.model.state_dict().items()}
    plain = seeded(pair.case.build, seed=99)
    plain.load_state_dict(full)
    batch = pair.batch()
    assert_same(pair.run(plain, batch), pair.run(pair.reference, batch), "loss", 3e-6)
    assert_same_parameters(plain, pair.reference, 2e-6)


@ranks(2)
def test_a_state_dict_shares_memory_with_the_shards() -> None:
    pair = Pair("stack")
    state = pair.model.state_dict()
    pair.train(steps=1)
    for name, parameter in names_of(pair.model).items():
        assert torch.equal(state[name].to_local(), parameter.to_local()), name
        assert not state[name].requires_grad


@products(
    [
        ("stack", False, True),
        ("tied_lm", True, False),
        ("tied_lm", False, False),
        ("scalars", True, True),
    ],
    name=["stack", "tied_lm", "scalars"],
    assign=[False, True],
    trained_before=[False, True],
)
@ranks(2)
def test_load_state_dict(name: str, assign: bool, trained_before: bool) -> None:
    """Shards of another model are loaded, into a new model or into one that has trained."""
    pair = Pair(name)
    if trained_before:
        pair.train(steps=1)
    donor = shard(seeded(pair.case.build, seed=7), pair.case)
    state = {key: value.clone() for key, value in donor.state_dict().items()}
    pair.model.load_state_dict(state, assign=assign)
    pair.reference.load_state_dict(seeded(pair.case.build, seed=7).state_dict())
    assert_sharded(pair.model)
    assert_same_parameters(pair.model, pair.reference)
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    pair.train(steps=2)


@pytest.mark.parametrize("trained_before", [False, True])
@ranks(2)
def test_to_another_dtype(trained_before: bool) -> None:
    pair = Pair("stack")
    if trained_before:
        pair.train(steps=1)
    pair.model.to(torch.float64)
    pair.reference.to(torch.float64)
    assert all(p.dtype is torch.float64 for p in pair.model.parameters())
    assert_sharded(pair.model)
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    for _ in range(2):
        batch = pair.batch()
        x = batch.args[0].double()
        loss_of(pair.model(*pair.local(type(batch)((x,), {})).args)).backward()
        loss_of(pair.reference(x)).backward()
        pair.step()
    pair.check()


@ranks(2)
def test_one_module_to_another_dtype() -> None:
    pair = Pair("stack")
    for model in (pair.model, pair.reference):
        block = model.blocks[1].to(torch.float64)
        block.register_forward_pre_hook(lambda m, args: (args[0].double(),))
        block.register_forward_hook(lambda m, args, out: out.float())
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    pair.train(steps=2)
    assert pair.model.blocks[1].up.weight.dtype is torch.float64


def on_meta(case: Case) -> nn.Module:
    with torch.device("meta"):
        return case.build()


@products(
    name=["stack", "scalars", "tied_lm"],
    assign=[False, True],
    default=[(n, a) for n in ("stack", "scalars", "tied_lm") for a in (False, True)],
)
@ranks(2, 3)
def test_from_the_meta_device(name: str, assign: bool) -> None:
    """Whole values are copied into shards that got memory, or come as shards and are assigned."""
    pair = Pair(name)
    model = shard(on_meta(pair.case), pair.case)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    if not assign:
        model.to_empty(device=DEVICE)
        assert_sharded(model)
        if name == "tied_lm":  # `to_empty` is allowed to break ties; tying again is usual
            model.head.proj.weight = model.embed.weight
    own = model.state_dict()
    state = {
        key: distribute_tensor(value, own[key].device_mesh, own[key].placements)
        if isinstance(own[key], DTensor)
        else value
        for key, value in pair.reference.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    pair.model = model
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    pair.train(steps=2)


@ranks(2)
def test_initialisation_on_shards() -> None:
    """`nn.init` functions work on the DTensors, and what they write is what the forward sees."""
    case = CASES["stack"]
    model = shard(on_meta(case), case).to_empty(device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
    seen: list[bool] = []
    model.blocks[0].register_forward_hook(
        lambda m, args, out: seen.extend((p == 0.25).all().item() for p in m.parameters()),
        prepend=True,
    )
    model(torch.randn(4, WIDTH))
    assert len(seen) == 8
    assert all(seen)


@ranks(2)
def test_parameters_replaced_before_the_first_forward() -> None:
    pair = Pair("stack")
    for name, parameter in list(pair.model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        module = pair.model.get_submodule(module_name)
        setattr(module, leaf, nn.Parameter(parameter.detach() * 2))
    with torch.no_grad():
        for parameter in pair.reference.parameters():
            parameter.mul_(2)
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    pair.train(steps=2)


@ranks(2)
def test_share_memory_of_buffers_and_their_updates() -> None:
    """A buffer that the forward updates is the module's own."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("scratch", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.linear(x)

    model = Counting()
    steps = model.steps
    fsdp2.fully_shard(model)
    for _ in range(3):
        model(torch.randn(2, WIDTH)).sum().backward()
    assert model.steps is steps
    assert steps.item() == 3
    assert list(model.state_dict()) == ["steps", "linear.weight", "linear.bias"]
