"""Promise: what a user does to parameters and gradients behind our back is taken over if it is well
defined, and otherwise an error at the next use that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2._core.base import torch_dtensor
from tests.kit.models import CASES, Stack, seeded
from tests.kit.parity import assert_same, make_mesh, shard, whole
from tests.kit.pool import ranks

SEEN = torch.arange(13 * 13, dtype=torch.float32).view(13, 13) / 99


def trained(place: Any = None) -> nn.Module:
    model = shard(seeded(Stack), CASES["stack"], shard_placement_fn=place)
    model(torch.ones(4, 13)).sum().backward()
    model.zero_grad()
    return model


def distributed(value: Tensor, *placements: Replicate | Shard) -> DTensor:
    return distribute_tensor(value, make_mesh(), placements or [Shard(0)])


def replace_by_whole(model: nn.Module) -> None:
    model.inp.weight = nn.Parameter(SEEN.clone())


def replace_by_sharded(model: nn.Module) -> None:
    model.inp.weight = nn.Parameter(distributed(SEEN))


def replace_local(model: nn.Module) -> None:
    model.inp.weight._local_tensor = distributed(SEEN).to_local().clone()


def write_local(model: nn.Module) -> None:
    with torch.no_grad():
        model.inp.weight.to_local().copy_(distributed(SEEN).to_local())


def delete_and_register(model: nn.Module) -> None:
    del model.inp.weight
    model.inp.register_parameter("weight", nn.Parameter(SEEN.clone()))


TAKEN_OVER = [
    replace_by_whole, replace_by_sharded, replace_local, write_local, delete_and_register
]  # fmt: skip


@pytest.mark.parametrize("change", TAKEN_OVER, ids=lambda f: f.__name__)
@ranks(3)
def test_parameters_that_are_taken_over(change: Callable[[nn.Module], None]) -> None:
    """The next forward computes with the new values, and gradients arrive."""
    model, plain = trained(), seeded(Stack)
    change(model)
    with torch.no_grad():
        plain.inp.weight.copy_(SEEN)
    x = torch.randn(4, 13)
    for m in (model, plain):
        m(x).sum().backward()
    assert_same(model.inp.weight, SEEN, "weight")
    assert_same(model.inp.weight.grad, plain.inp.weight.grad, "gradient", 1e-5)


def wrong_shape(model: nn.Module) -> None:
    model.inp.weight = nn.Parameter(torch.ones(5, 13))


def wrong_local_shape(model: nn.Module) -> None:
    model.inp.weight._local_tensor = torch.ones(2, 13)


def sparse_local(model: nn.Module) -> None:
    model.inp.weight._local_tensor = model.inp.weight._local_tensor.to_sparse()


def no_parameter(model: nn.Module) -> None:
    model.inp.weight = None


def on_meta(model: nn.Module) -> None:
    model.inp.weight._local_tensor = model.inp.weight._local_tensor.to("meta")


def data_of_another_dtype(model: nn.Module) -> None:
    model.inp.weight.data = model.inp.weight.data.double()


def data_of_another_shape(model: nn.Module) -> None:
    model.inp.weight.data = distributed(torch.ones(5, 13))


def data_multiplied(model: nn.Module) -> None:
    model.inp.weight.data = model.inp.weight.data * 3


REFUSED = [
    wrong_shape, wrong_local_shape, sparse_local, no_parameter, on_meta, data_of_another_dtype,
    data_of_another_shape, data_multiplied,
]  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
@ranks(2)
def test_parameters_that_cannot_be_taken_over(change: Callable[[nn.Module], None]) -> None:
    model = trained()
    change(model)
    x = torch.ones(4, 13)
    with pytest.raises(fsdp2.StateError, match=r"inp\.weight|parameters of one group"):
        model(x).sum().backward()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sharded": lambda g: distributed(g),
    "replicated": lambda g: distributed(g, Replicate()),
    "whole": lambda g: g,
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("is_owned", [False, True])
@ranks(3)
def test_gradients_that_are_added_to(kind: str, is_owned: bool) -> None:
    """A gradient that the user put there, sharded, replicated or whole, is one more summand.

    It is not written to itself. So for parameters in rows, and for those that one rank owns.
    """
    if is_owned and not torch_dtensor.asks_subclasses():
        pytest.skip("this torch asks no subclass of DTensor")
    model = trained((lambda param: fsdp2.Whole(owner=1)) if is_owned else None)
    plain = seeded(Stack)
    given = GRADIENTS[kind](SEEN.clone())
    if kind == "whole":
        model.inp.weight.grad_dtype = None
    model.inp.weight.grad, plain.inp.weight.grad = given, SEEN.clone()
    x = torch.randn(4, 13)
    for m in (model, plain):
        m(x).sum().backward()
    assert isinstance(model.inp.weight.grad, DTensor)
    assert_same(whole(model.inp.weight.grad), plain.inp.weight.grad, "gradient", 1e-5)
    if is_owned:
        assert torch.equal(whole(given), SEEN)


@ranks(2)
def test_gradients_that_cannot_be_added_to() -> None:
    """Another shape on this rank is an error with the parameter's name, and no broadcast."""
    model = trained()
    model.inp.weight.grad = distributed(SEEN)
    model.inp.weight.grad._local_tensor = torch.ones(1, 13)
    with pytest.raises(fsdp2.StateError, match=r"inp.weight: its gradient, .*\(1, 13\) here"):
        model(torch.ones(4, 13)).sum().backward()
