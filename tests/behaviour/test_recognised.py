"""Promise: whoever asks `isinstance(module, torch.distributed.fsdp.FSDPModule)` is told yes.

And whatever is then called on the module is ours, or is not there.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

import fsdp2
from fsdp2._core.api.settings import ControlSurface
from fsdp2._core.base import torch_modules
from fsdp2._core.engine.between_steps import TorchState, View
from tests.behaviour.test_lifetime import COPIES
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import CASES, WIDTH, Block, seeded
from tests.kit.parity import assert_same_gradients, sharded
from tests.kit.pool import ranks

THEIRS = sorted(vars(torch_fsdp.FSDPModule))
OURS = vars(fsdp2.FSDPModule).keys() | vars(ControlSurface).keys()
OFFERED = [n for n in THEIRS if n in OURS and hasattr(fsdp2.FSDPModule, n)]


def accessor(module: nn.Module) -> Any:
    return torch_fsdp.fully_shard.state(module)  # type: ignore[attr-defined]  # the decorator's


def owner(cls: type, name: str) -> type:
    """Return the class in which a look-up of the name ends."""
    return next(base for base in cls.__mro__ if name in vars(base))


@pytest.mark.parametrize("name", THEIRS)
def test_nothing_of_torchs_class_is_inherited(name: str) -> None:
    """Each name of torch's class is ours, `nn.Module`'s, or absent; private names too."""
    assert owner(fsdp2.FSDPModule, name) in (fsdp2.FSDPModule, ControlSurface, nn.Module)
    found = inspect.getattr_static(fsdp2.FSDPModule, name)
    if callable(found):
        assert found is not vars(torch_fsdp.FSDPModule)[name]
    if name not in OFFERED and not hasattr(nn.Module, name):
        assert not hasattr(fsdp2.FSDPModule, name)


def test_what_is_left_out_is_looked_for() -> None:
    """The walk above meets methods that are ours and names that are hidden."""
    assert {"unshard", "reshard", "set_requires_gradient_sync", "_apply", "__new__"} <= {*OFFERED}

    class Theirs:
        def kept(self) -> None: ...

        def hidden(self) -> None: ...

    class Ours(Theirs):
        def kept(self) -> None: ...

    torch_modules.hide_torchs_own(Ours, Theirs)
    assert hasattr(Ours(), "kept")
    for found in (Ours, Ours()):
        assert not hasattr(found, "hidden")
        with pytest.raises(AttributeError, match="'Ours' has no attribute 'hidden'"):
            found.hidden()  # type: ignore[attr-defined]  # it is hidden
    assert issubclass(fsdp2.FSDPModule, torch_fsdp.FSDPModule)
    assert issubclass(fsdp2.UnshardHandle, torch_fsdp.UnshardHandle)


@ranks(2)
def test_every_unit_is_recognised() -> None:
    """Units have torch's class as their last base."""
    model = sharded("stack")
    for module in (model, *model.blocks):
        kind, plain = type(module), type(module).__mro__[2]
        assert isinstance(module, torch_fsdp.FSDPModule)
        assert kind.__mro__[1] is fsdp2.FSDPModule
        assert plain in (type(seeded(CASES["stack"].build)), Block)
        assert kind.__mro__[-2:] == (torch_fsdp.FSDPModule, object)
    assert not isinstance(model.inp, torch_fsdp.FSDPModule)
    assert isinstance(model.blocks[0].unshard(async_op=True), torch_fsdp.UnshardHandle)


@ranks(2)
def test_torch_and_users_find_one_state() -> None:
    """Torch's accessor and ours return one object, which has what torch's pipelining reads.

    What else tools read of torch's own state is an error that says where to look.
    """
    model = sharded("stack")
    for module in (model, *model.blocks):
        state = fsdp2.fully_shard.state(module)  # type: ignore[attr-defined]  # set on it
        assert type(state) is TorchState
        assert accessor(module) is module._get_fsdp_state() is state
        assert list(state._state_ctx.all_states) == []
        assert _get_module_state(module) is _get_module_fsdp_state(module) is state
        with pytest.raises(AttributeError, match=r"no '_training_state'.*fsdp2\.units\(module"):
            _ = state._training_state
    assert accessor(model.inp) is None
    assert _get_module_state(model.inp) is None


@pytest.mark.parametrize("name", sorted(vars(FSDPState)))
def test_nothing_of_torchs_state_is_inherited(name: str) -> None:
    """The state is an `FSDPState`: torch's getters ask; each name of it is ours or missing."""
    if not hasattr(object, name):
        owner = next(base for base in TorchState.__mro__ if name in vars(base))
        assert owner in (TorchState, View)


def facts(module: Any) -> list[Any]:
    """Return what programs read of a unit's state."""
    state = _get_module_fsdp_state(module)
    group = state._fsdp_param_group
    read = [state._mp_policy.param_dtype, state._mp_policy.output_dtype, state._is_root]
    if group is None:
        return read
    info = group.mesh_info
    read += [type(info), info.mesh, info.shard_mesh_size, info.shard_mesh_rank]
    read += [dist.get_process_group_ranks(info.shard_process_group)]
    if isinstance(info, HSDPMeshInfo):
        read += [info.replicate_mesh_size, info.replicate_mesh_rank]
    for param in group.fsdp_params:
        read += [param._orig_size, param.sharded_size, param.sharded_param.to_local().shape]
        read += [param.sharded_param.placements]
    return read


@pytest.mark.parametrize("replicates", [False, True])
@ranks(4)
def test_what_programs_read_of_a_state_is_true(replicates: bool) -> None:
    """Names that public programs read say of our units what they say of torch's own."""
    mesh = shared_mesh((2, 2), ("replicate", "shard")) if replicates else shared_mesh((4,), ("d",))
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    seen = []
    for library in (torch_fsdp, fsdp2):
        model: Any = seeded(CASES["stack"].build)
        shard_each(*model.blocks, model, library=library, mesh=mesh, mp_policy=policy)
        before = [facts(module) for module in (*model.blocks, model)]
        model._get_fsdp_state()._lazy_init()
        model(torch.ones(2, WIDTH))
        model._set_unshard_async_op(True)
        seen.append((before, [facts(module) for module in (*model.blocks, model)]))
    assert seen[0] == seen[1]


@ranks(2)
def test_views_of_a_state_stay_and_are_read_only() -> None:
    """Programs use groups and parameters as keys; a write, or what torch alone has, is an error."""
    model: Any = fsdp2.fully_shard(nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2)))
    group = model._get_fsdp_state()._fsdp_param_group
    assert model._get_fsdp_state()._fsdp_param_group is group
    params = group.fsdp_params
    assert [id(param) for param in params] == [id(param) for param in group.fsdp_params]
    assert [param.sharded_param for param in params] == list(model.parameters())
    assert [param._param_fqn for param in params] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(AttributeError, match="'post_forward_mesh_info' was set"):
        group.post_forward_mesh_info = None
    with pytest.raises(AttributeError, match=r"parameter group.*no 'post_backward'"):
        group.post_backward()
    with pytest.raises(AttributeError, match=r"parameter state.*no '_sharded_param_data'"):
        _ = params[0]._sharded_param_data
    assert not hasattr(params[0], "_unsharded_param")


@ranks(4)
def test_parameters_on_several_meshes_are_several_groups() -> None:
    """As of torch's own: the name of one group is an error, the name of all lists them."""
    meshes = shared_mesh((4,), ("d",)), shared_mesh((2, 2), ("replicate", "shard"))
    model: Any = nn.Linear(WIDTH, 3)
    chosen = {id(model.weight): meshes[0], id(model.bias): meshes[1]}
    fsdp2.fully_shard(
        model,
        mesh=meshes[0],
        shard_placement_fn=lambda p: fsdp2.ShardPlacementResult(None, chosen[id(p)]),
    )
    state = model._get_fsdp_state()
    assert [g.mesh_info.mesh for g in state._fsdp_param_groups] == [*meshes]
    with pytest.raises(fsdp2.UnsupportedError, match="'_fsdp_param_groups'"):
        _ = state._fsdp_param_group


@ranks(2)
def test_who_asks_first_shards_once() -> None:
    """Programs that shard what the getters find no state of shard nothing twice."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))
    for _ in range(2):
        for module in (model[0], model):
            if _get_module_fsdp_state(module) is None:
                fsdp2.fully_shard(module)
    assert len(fsdp2.units(model)) == 2
    assert model(torch.ones(2, WIDTH)).shape == (2, 2)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@ranks(2)
def test_copies_are_recognised(make: Any) -> None:
    """A copy is of the same class, and torch's accessor leads to the copy, not to the original."""
    model = sharded("stack")
    twin = make(model)
    assert type(twin) is type(model)
    assert isinstance(twin.blocks[1], torch_fsdp.FSDPModule)
    for one in (model, twin):
        one.set_requires_gradient_sync(False)
        one(torch.ones(4, WIDTH)).sum().backward()
        one.set_requires_gradient_sync(True)
        assert [p for p in one.parameters() if p.grad is not None] == []
        assert _get_module_state(one) is one._get_fsdp_state()
    accessor(twin)._root_post_backward_final_callback()
    assert [n for n, p in twin.named_parameters() if p.grad is None] == []
    assert [n for n, p in model.named_parameters() if p.grad is not None] == []
    accessor(model)._root_post_backward_final_callback()
    assert_same_gradients(twin, model)


@ranks(2)
def test_a_class_swapped_in_over_ours() -> None:
    """Software that subclasses a module's class once more does not confuse slices and copies."""
    model = fsdp2.fully_shard(nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1)))

    class Traced(type(model)):  # type: ignore[misc]  # a class made at run time
        pass

    model.__class__ = Traced
    assert type(model[:2]) is nn.Sequential
    twin = copy.deepcopy(model)
    assert type(twin) is Traced
    x: Tensor = torch.ones(2, WIDTH)
    assert torch.equal(twin(x), model(x))


@ranks(2)
def test_two_libraries_on_one_module() -> None:
    """Torch's own `fully_shard` refuses a module of ours."""
    model = fsdp2.fully_shard(nn.Linear(WIDTH, 3))
    with pytest.raises(AssertionError, match="has already been applied"):
        torch_fsdp.fully_shard(model)
    assert model(torch.ones(2, WIDTH)).shape == (2, 3)


@ranks(2)
def test_torchs_own_refuses_a_tree_with_units_of_ours() -> None:
    """With a sentence; and what composable APIs ask besides is answered as before."""
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(3, 3)))
    fsdp2.fully_shard(model[1])
    with pytest.raises(fsdp2.ConfigError, match=r"sharded by fsdp2.*fsdp2\.replace_torch\(\)"):
        torch_fsdp.fully_shard(model)
    for module in (model[1], copy.deepcopy(model)[1]):
        registry = _get_registry(module)
        assert "fully_shard" in registry
        assert "replicate" not in registry
