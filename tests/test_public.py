"""The public surface: what `import fsdp2` offers, and that torch's names keep their signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from expecttest import assert_expected_inline

import fsdp2

SHARED_METHODS = sorted(
    name
    for name, value in vars(fsdp2.FSDPModule).items()
    if callable(value) and not name.startswith("_") and hasattr(torch_fsdp.FSDPModule, name)
)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def text_of(function: Callable[..., Any]) -> str:
    """Return the signature without annotations; a long one has a line for each parameter."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    text = function.__qualname__ + text
    return text if len(text) < 90 else re.sub(r", (?=[\w*]+[=,)])", ",\n    ", text)


def public_methods(cls: type) -> list[str]:
    return [n for n, value in vars(cls).items() if callable(value) and not n.startswith("_")]


def test_all() -> None:
    assert_expected_inline(
        "\n".join(fsdp2.__all__),
        """\
ConfigError
DataParallelMeshDims
FSDPError
FSDPModule
MixedPrecisionPolicy
OffloadPolicy
ShardPlacementResult
StateError
UnshardHandle
UnsupportedError
fully_shard
register_fsdp_forward_method""",
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
        fsdp2.MixedPrecisionPolicy,
        fsdp2.OffloadPolicy,
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
    cast_forward_inputs=True),
    offload_policy=OffloadPolicy(),
    ignored_params=None,
    dp_mesh_dims=None)
register_fsdp_forward_method(module, method_name)
MixedPrecisionPolicy(param_dtype=None,
    reduce_dtype=None,
    output_dtype=None,
    cast_forward_inputs=True)
OffloadPolicy()
DataParallelMeshDims(shard=None, replicate=None)
ShardPlacementResult(placement, mesh_info=None)
UnshardHandle.wait(self)""",
    )


def test_signatures_of_the_modules_methods() -> None:
    methods = [getattr(fsdp2.FSDPModule, name) for name in public_methods(fsdp2.FSDPModule)]
    assert_expected_inline(
        "\n".join(text_of(method) for method in methods),
        """\
FSDPModule.zero_grad(self, set_to_none=True)
FSDPModule.unshard(self, async_op=False)
FSDPModule.reshard(self)
FSDPModule.reset_iter_state(self)
FSDPModule.set_is_last_backward(self, is_last_backward)
FSDPModule.set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True)
FSDPModule.set_requires_all_reduce(self, requires_all_reduce, *, recurse=True)
FSDPModule.set_reshard_after_forward(self, reshard_after_forward, recurse=True)
FSDPModule.set_reshard_after_backward(self, reshard_after_backward, *, recurse=True)
FSDPModule.set_modules_to_forward_prefetch(self, modules)
FSDPModule.set_modules_to_backward_prefetch(self, modules)""",
    )


@pytest.mark.parametrize("name", SHARED_METHODS)
def test_methods_have_torchs_parameters(name: str) -> None:
    ours = parameters(getattr(fsdp2.FSDPModule, name))
    theirs = parameters(getattr(torch_fsdp.FSDPModule, name))
    assert list(ours) == list(theirs)
    for key, parameter in theirs.items():
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default), key


def test_the_methods_compared_are_all_of_them() -> None:
    newer = {"reset_iter_state"}  # torch 2.11 has no such method
    ours = {"zero_grad"}  # nn.Module's, with one more duty
    assert set(public_methods(fsdp2.FSDPModule)) - set(SHARED_METHODS) <= newer | ours


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method"])
def test_functions_have_torchs_parameters(name: str) -> None:
    """Names, order, kinds and defaults; torch may have more at the end."""
    ours, theirs = parameters(getattr(fsdp2, name)), parameters(getattr(torch_fsdp, name))
    assert list(theirs)[: len(ours)] == list(ours)
    for key, parameter in ours.items():
        assert parameter.kind == theirs[key].kind
        if parameter.default is None or isinstance(parameter.default, bool | int):
            assert parameter.default == theirs[key].default, key
        elif parameter.default is not inspect.Parameter.empty:  # a policy, of the same name
            assert type(parameter.default).__name__ == type(theirs[key].default).__name__, key


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy"])
def test_policies_have_torchs_fields_and_defaults(name: str) -> None:
    ours, theirs = getattr(fsdp2, name), getattr(torch_fsdp, name)
    assert vars(ours()) == vars(theirs())
    assert list(parameters(ours)) == list(parameters(theirs))


def test_policies_are_frozen() -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="cannot assign"):
        policy.param_dtype = None  # type: ignore[misc]  # the point of the test
    assert policy.param_dtype is torch.bfloat16
    assert hash(policy) == hash(fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
