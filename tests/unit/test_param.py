"""The table of moves, and the forms of one parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._core.base.errors import StateError
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.registration import (
    FORM_IN,
    GATHERING,
    RELEASED,
    SHARDED,
    SMALLER,
    TRANSITIONS,
    WHOLE,
    GroupState,
    ParamState,
    Registration,
    Site,
)
from tests.unit._loopback import data_meshes, fake_process_group, local_of, make_params


@pytest.fixture(autouse=True, scope="module")
def _meshes() -> Iterator[None]:
    with fake_process_group(2):
        yield


LEGAL = {
    (SHARDED, GATHERING),
    (SMALLER, GATHERING),
    (SMALLER, SHARDED),
    (GATHERING, WHOLE),
    (GATHERING, SHARDED),
    (GATHERING, SMALLER),
    (WHOLE, SHARDED),
    (WHOLE, SMALLER),
    (WHOLE, RELEASED),
    (RELEASED, SHARDED),
}


def test_the_table_lists_the_legal_moves() -> None:
    assert {(state, to) for state, targets in TRANSITIONS.items() for to in targets} == LEGAL
    assert set(TRANSITIONS) == set(GroupState)


@pytest.mark.parametrize(("state", "target"), list(product(GroupState, GroupState)))
def test_moves(state: GroupState, target: GroupState) -> None:
    registration = Registration(())
    registration.state = state
    if (state, target) in LEGAL:
        registration.move(target, "block")
        assert registration.state is target
        return
    with pytest.raises(StateError, match=rf"block: .* from {state.name} to {target.name}\."):
        registration.move(target, "block")
    assert registration.state is state, "an illegal move changed the state"


def test_a_gather_leaves_the_form_that_is_registered() -> None:
    registration = Registration(())
    assert registration.form is ParamState.SHARDED
    for state in (GATHERING, WHOLE, SMALLER, GATHERING):
        registration.move(state, "")
        if state is not GATHERING:
            assert registration.form is FORM_IN[state]
    assert registration.form is ParamState.SHARDED_POST_FORWARD


def test_a_group_starts_sharded_and_names_the_root() -> None:
    registration = Registration(())
    assert registration.state is SHARDED
    with pytest.raises(StateError, match="<root>"):
        registration.move(SMALLER, "")


def one_param(module: nn.Module) -> FSDPParam:
    return make_params(module, data_meshes(2)[0])[0]


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float16, torch.float16),
        (torch.int64, torch.bfloat16, torch.int64),
        (torch.bool, torch.bfloat16, torch.bool),
        (torch.complex64, torch.bfloat16, torch.complex64),
        (torch.float8_e4m3fn, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_compute_dtype(
    dtype: torch.dtype, param_dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    param = one_param(module)
    param.chosen.param_dtype = param_dtype
    assert param.compute_dtype is expected


def test_the_sharded_parameter_carries_what_the_user_put_on_the_original() -> None:
    module = nn.Linear(3, 4, bias=False)
    module.weight.tag = "kept"
    hooked: list[str] = []
    module.weight.register_hook(lambda grad: hooked.append("hook"))
    module.weight.register_post_accumulate_grad_hook(lambda p: hooked.append("post"))
    module.weight.requires_grad_(True)
    param = one_param(module)
    original = param.sharded
    param.set_shard(torch.ones(2, 3), None)
    assert param.sharded is not original
    assert isinstance(param.sharded, DTensor)
    assert isinstance(param.sharded, nn.Parameter)
    assert param.sharded.tag == "kept"
    assert param.sharded.requires_grad
    assert param.sharded.shape == (4, 3)
    param.sharded.sum().backward()
    assert hooked == ["hook", "post"]


def test_a_registered_parameter_keeps_its_identity_and_moves_its_values() -> None:
    param = one_param(nn.Linear(3, 4, bias=False))
    param.set_shard(torch.ones(2, 3), None)
    registered = param.sharded
    elsewhere = torch.full((2, 3), 5.0)
    param.set_shard(elsewhere, registered)
    assert param.sharded is registered
    assert local_of(registered).data_ptr() == elsewhere.data_ptr()
    assert param.local is elsewhere


def test_another_dtype_of_the_shard_is_the_new_storage_dtype() -> None:
    param = one_param(nn.Linear(3, 4, bias=False))
    param.set_shard(torch.ones(2, 3, dtype=torch.float64), None)
    assert param.storage_dtype is torch.float64
    assert param.sharded.dtype is torch.float64


def test_requires_grad_reaches_every_form() -> None:
    param = one_param(nn.Linear(3, 4, bias=False))
    param.set_shard(torch.ones(2, 3), None)
    param.set_unsharded(torch.ones(4, 3))
    param.set_post_forward(torch.ones(2, 3), param.placement)
    assert param.unsharded is not None
    assert param.post_forward is not None
    assert param.unsharded.requires_grad
    assert param.post_forward.requires_grad
    param.sharded.requires_grad_(False)
    param.toggle()
    assert not param.trainable
    assert not param.unsharded.requires_grad
    assert not param.post_forward.requires_grad


def test_a_copy_holds_no_memory_of_the_group() -> None:
    param = one_param(nn.Linear(3, 4, bias=False))
    param.set_shard(torch.ones(2, 3), None)
    param.set_unsharded(torch.ones(4, 3))
    copied = copy.deepcopy(param)
    assert copied.unsharded is None
    assert copied.local is None
    assert copied.post_forward is None
    assert copied.fqn == param.fqn
    assert copied.placement is param.placement
    assert copied.sharded is not param.sharded
    assert param.unsharded is not None


def test_a_site_reads_what_is_registered_now() -> None:
    module = nn.Linear(2, 2)
    site = Site(module, "weight")
    assert site.registered is module.weight
    module.weight = None
    assert site.registered is None
    assert site != Site(module, "weight"), "sites are places, compared by identity"


def test_meta_parameters_are_seen_at_their_site() -> None:
    module = nn.Linear(2, 2, bias=False, device="meta")
    param = one_param(module)
    assert param.is_on_meta
    module.to_empty(device="cpu")
    assert not param.is_on_meta
