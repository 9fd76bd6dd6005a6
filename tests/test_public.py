"""The public surface: what `import fsdp2` offers, and that torch's names keep their signatures."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp._fully_shard as torch_fsdp2
import torch.distributed.fsdp._fully_shard._fsdp_api as torch_fsdp_api
from expecttest import assert_expected_inline

import fsdp2
from fsdp2._api.settings import ControlSurface


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def text_of(function: Callable[..., Any]) -> str:
    """Return the signature without annotations; a long one has a line for each parameter."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    text = function.__qualname__ + text
    return text if len(text) < 90 else re.sub(r", (?=[\w*]+[=,)])", ",\n    ", text)


def public_methods(*classes: type) -> list[str]:
    return [
        name
        for cls in classes
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    ]


def test_all() -> None:
    assert_expected_inline(
        "\n".join(fsdp2.__all__),
        """\
AllGather
CPUOffloadPolicy
Comm
CompiledModel
Compress
ConfigError
DataParallelMeshDims
FSDPError
FSDPModule
GroupInfo
MixedPrecisionPolicy
OffloadPolicy
ReduceScatter
ShardInfo
ShardPlacementResult
StateError
UnitInfo
UnshardHandle
UnsupportedError
clip_grad_norm_
compile
full_params
fully_shard
materialize
no_sync
register_comm_hook
register_fsdp_forward_method
share_comm_ctx
summon_full_params
sync_from_rank0
units""",
    )


def test_everything_in_all_exists_and_is_public_of_this_package() -> None:
    for name in fsdp2.__all__:
        assert getattr(fsdp2, name).__module__.startswith("fsdp2."), name


def test_nothing_public_is_missing_from_all() -> None:
    found = {
        name
        for name, value in vars(fsdp2).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert found == set(fsdp2.__all__)


def test_signatures_of_the_functions_and_classes() -> None:
    functions = [
        fsdp2.fully_shard,
        fsdp2.register_fsdp_forward_method,
        fsdp2.share_comm_ctx,
        fsdp2.MixedPrecisionPolicy,
        fsdp2.OffloadPolicy,
        fsdp2.CPUOffloadPolicy,
        fsdp2.DataParallelMeshDims,
        fsdp2.ShardPlacementResult,
        fsdp2.UnshardHandle.wait,
    ]
    assert_expected_inline(
        "\n".join(text_of(function) for function in functions),
        """\
fully_shard(module,
    *,
    mesh=None,
    reshard_after_forward=None,
    shard_placement_fn=None,
    mp_policy=MixedPrecisionPolicy(param_dtype=None,
    reduce_dtype=None,
    output_dtype=None,
    cast_forward_inputs=True,
    cast_root_forward_inputs=False,
    buffer_dtype=None,
    keep_low_precision_grads=False,
    full_precision_in_eval=False),
    offload_policy=OffloadPolicy(),
    ignored_params=None,
    dp_mesh_dims=None,
    conditional=False,
    ignored_states=None)
register_fsdp_forward_method(module, method_name)
share_comm_ctx(modules)
MixedPrecisionPolicy(param_dtype=None,
    reduce_dtype=None,
    output_dtype=None,
    cast_forward_inputs=True,
    *,
    cast_root_forward_inputs=False,
    buffer_dtype=None,
    keep_low_precision_grads=False,
    full_precision_in_eval=False)
OffloadPolicy()
CPUOffloadPolicy(pin_memory=True)
DataParallelMeshDims(shard=None, replicate=None)
ShardPlacementResult(placement, mesh_info=None)
UnshardHandle.wait(self)""",
    )


def test_signatures_of_the_modules_methods() -> None:
    """Every method that a sharded module gains; those that torch lacks are ours."""
    names = public_methods(fsdp2.FSDPModule, ControlSurface)
    methods = [getattr(fsdp2.FSDPModule, name) for name in names]
    assert_expected_inline(
        "\n".join(text_of(method) for method in methods),
        """\
FSDPModule.load_state_dict(self, state_dict, *args, **kwargs)
FSDPModule.train(self, mode=True)
FSDPModule.zero_grad(self, set_to_none=True)
FSDPModule.unshard(self, async_op=False)
FSDPModule.reshard(self)
FSDPModule.reset_iter_state(self)
ControlSurface.set_is_last_backward(self, is_last_backward)
ControlSurface.set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True)
ControlSurface.set_requires_all_reduce(self, requires_all_reduce, *, recurse=True)
ControlSurface.set_reshard_after_forward(self, reshard_after_forward, recurse=True)
ControlSurface.set_reshard_after_backward(self, reshard_after_backward, *, recurse=True)
ControlSurface.set_memory(self, memory)
ControlSurface.set_unshard_in_backward(self, unshard_in_backward)
ControlSurface.set_modules_to_forward_prefetch(self, modules)
ControlSurface.set_modules_to_backward_prefetch(self, modules)
ControlSurface.set_gradient_divide_factor(self, factor)
ControlSurface.set_reduce_scatter_divide_factor(self, factor)
ControlSurface.set_gradient_reduction(self, reduction, *, recurse=True)
ControlSurface.set_force_sum_reduction_for_comms(self, enable)
ControlSurface.set_reduce_scatter_unused_params(self,
    reduce_scatter_unused_params,
    *,
    recurse=True)
ControlSurface.set_all_reduce_hook(self, hook, *, stream=None)
ControlSurface.set_custom_all_gather(self, comm)
ControlSurface.set_custom_reduce_scatter(self, comm)
ControlSurface.set_allocate_memory_from_process_group_for_comm(self, enable)
ControlSurface.set_symm_mem_for_comm(self, backend='NCCL')
ControlSurface.set_separate_reduce_scatter_group(self, enable=True, *, recurse=True)
ControlSurface.set_reduce_scatter_max_input_buffers(self,
    max_input_buffers,
    *,
    recurse=True)
ControlSurface.set_copy_free_min_bytes(self, min_bytes, *, recurse=True)
ControlSurface.set_gradient_wire_dtype(self, dtype, *, recurse=True)
ControlSurface.set_post_optim_event(self, event)""",
    )


# --- everything that torch has --------------------------------------------------------------------

BUILT_BY_USERS = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


OWN_FIELDS = {
    "cast_root_forward_inputs": False,
    "buffer_dtype": None,
    "keep_low_precision_grads": False,
    "full_precision_in_eval": False,
}
"""Of `MixedPrecisionPolicy`, ours alone: keywords whose defaults leave torch's meaning as it is."""


def torchs_methods(cls: type) -> list[str]:
    """Return the methods of torch's own that users call or implement."""
    return [name for name, value in vars(cls).items() if callable(value) and is_public(name)]


def default_of(parameter: inspect.Parameter) -> object:
    """Return a default as a value that can be compared over packages: policies by their fields."""
    default = parameter.default
    if not hasattr(default, "__dict__"):
        return default
    return type(default).__name__, {k: v for k, v in vars(default).items() if k not in OWN_FIELDS}


def assert_takes(ours: Callable[..., Any], theirs: Callable[..., Any], name: str) -> None:
    """Assert that every call of `theirs` is a call of `ours`; ours may have more keywords."""
    expected = parameters(theirs)
    actual = parameters(ours)
    own = {key: actual.pop(key) for key in list(actual) if key not in expected}
    assert list(actual) == list(expected), name
    for key, parameter in expected.items():
        assert actual[key].kind is parameter.kind, f"{name}: {key}"
        if parameter.default is not inspect.Parameter.empty:
            assert default_of(actual[key]) == default_of(parameter), f"{name}: {key}"
        else:
            assert actual[key].default is inspect.Parameter.empty, f"{name}: {key}"
    for key, parameter in own.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{name}: {key} is ours"
        assert parameter.default is not inspect.Parameter.empty, f"{name}: {key} is ours"


@pytest.mark.parametrize("name", torch_fsdp2.__all__)
def test_every_name_of_torchs_is_here(name: str) -> None:
    """A program that imports a name from torch can import it from here, and use it alike."""
    assert name in fsdp2.__all__
    ours, theirs = getattr(fsdp2, name), getattr(torch_fsdp, name)
    assert isinstance(ours, type) == isinstance(theirs, type)
    if not isinstance(theirs, type) or name in BUILT_BY_USERS:
        assert_takes(ours, theirs, name)
    if isinstance(theirs, type):
        for method in torchs_methods(theirs):
            assert_takes(getattr(ours, method), getattr(theirs, method), f"{name}.{method}")


@pytest.mark.parametrize("name", ["Comm", "AllGather", "ReduceScatter"])
def test_collectives_have_torchs_methods(name: str) -> None:
    """A collective written for torch's interface satisfies ours: the same abstract methods."""
    ours, theirs = getattr(fsdp2, name), getattr(torch_fsdp_api, name)
    assert ours.__abstractmethods__ == theirs.__abstractmethods__
    for method in theirs.__abstractmethods__:
        assert_takes(getattr(ours, method), getattr(theirs, method), f"{name}.{method}")


def test_the_accessor_of_the_state() -> None:
    """`fully_shard.state(module)` is there, as torch's composable decorator puts it there."""
    assert_takes(fsdp2.fully_shard.state, torch_fsdp.fully_shard.state, "fully_shard.state")


@pytest.mark.parametrize("name", sorted(BUILT_BY_USERS))
def test_policies_have_torchs_fields_and_defaults(name: str) -> None:
    """Policies hold what torch's hold, and are values: frozen, comparable, hashable."""
    theirs = getattr(torch_fsdp, name, None)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    kwargs = {"shard": ("a", "b")} if name == "DataParallelMeshDims" else {}
    ours = getattr(fsdp2, name)(**kwargs)
    expected = vars(theirs(**kwargs))
    own = OWN_FIELDS if name == "MixedPrecisionPolicy" else {}
    assert vars(ours) == {**expected, **own}
    assert ours == getattr(fsdp2, name)(**kwargs)
    assert hash(ours) == hash(getattr(fsdp2, name)(**kwargs))


def test_policies_are_frozen() -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="cannot assign"):
        policy.param_dtype = None  # type: ignore[misc]  # the point of the test
    assert policy.param_dtype is torch.bfloat16
    assert hash(policy) == hash(fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@pytest.mark.parametrize("name", fsdp2.__all__)
def test_annotations_can_be_read(name: str) -> None:
    """Programs that make options of dataclasses ask for types; pickles move classes elsewhere."""
    found = getattr(fsdp2, name)
    assert typing.get_type_hints(found.__init__ if isinstance(found, type) else found) is not None
    if isinstance(found, type):
        assert typing.get_type_hints(found) is not None
