"""The public surface: what `import fsdp2` offers, and that torch's names keep their signatures."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

import fsdp2
from fsdp2._core.api.collect import check_comm
from fsdp2._core.api.settings import ControlSurface
from fsdp2._core.comm.wire import DefaultAllGather, DefaultReduceScatter
from tests.lab.torch_surface import (
    BUILT_BY_USERS,
    PINNED_VERSION,
    installed_surface,
    pinned_surface,
    surface_of,
)


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
Aligned
AllGather
CPUOffloadPolicy
Comm
CompiledModel
Compress
ConfigError
ConfigTypeError
DataParallelMeshDims
FSDPError
FSDPModule
GradientReductionHandle
GraphedStep
LostRank
MixedPrecisionPolicy
OffloadPolicy
ReduceScatter
ShardPlacementResult
StateError
UnshardHandle
UnsupportedError
Whole
clip_grad_norm_
compile
full_params
fully_shard
graphed
materialize
mean_over_slots
no_sync
offload_activations
plan
read_recordings
record
register_comm_hook
register_fsdp_forward_method
replace_torch
reproducible
share_comm_ctx
summon_full_params
sync_from_rank0
units""",
    )


def public_objects() -> dict[str, Any]:
    """Return all that can be imported, by its name below ``fsdp2``."""
    found = {name: getattr(fsdp2, name) for name in fsdp2.__all__}
    for module in fsdp2._SUBMODULES:
        values = getattr(fsdp2, module)
        found |= {f"{module}.{name}": getattr(values, name) for name in values.__all__}
    return found


def test_all_of_the_modules() -> None:
    """What a training step needs is on top; what plans and recordings return is in modules."""
    assert_expected_inline(
        "\n".join(name for name in public_objects() if "." in name),
        """\
checkpoint.IncompatibleKeys
checkpoint.NeighbourCopies
checkpoint.SaveHandle
checkpoint.full_state
checkpoint.load
checkpoint.load_full_state
checkpoint.load_latest
checkpoint.load_local_state
checkpoint.load_safetensors
checkpoint.load_sharded_state
checkpoint.local_state
checkpoint.rekey
checkpoint.save
checkpoint.save_safetensors
checkpoint.sharded_state
debug.BitsRecording
debug.GroupInfo
debug.OrderCheck
debug.SameBits
debug.ShardInfo
debug.UnitInfo
debug.check_order
debug.record_bits
debug.same_bits
debug.without_communication
optim.EMA
optim.Owners
optim.from_owners
optim.local
optim.offload_states
optim.plan_owners
optim.to_owners
optim.whole
plans.Advice
plans.Collective
plans.GroupPlan
plans.Hardware
plans.MemoryPoint
plans.ParamPlan
plans.Plan
plans.StepPlan
plans.Suggestion
plans.Verdict
recordings.Arrivals
recordings.ClockOffset
recordings.RecordedStep
recordings.Recording
recordings.Recordings
weights.Box
weights.Cut
weights.Figures
weights.Files
weights.Plan
weights.Receiver
weights.SendHandle
weights.Spec
weights.plan
weights.tensor_parallel
wrap.hybrid_mesh
wrap.shard_model
wrap.strategy""",
    )


def test_everything_in_all_exists_and_is_public_of_this_package() -> None:
    for name, value in public_objects().items():
        assert value.__module__.partition(".")[0] == "fsdp2", name


@pytest.mark.parametrize("name", fsdp2.__all__)
def test_errors_and_policies_print_under_the_name_that_users_know(name: str) -> None:
    value = getattr(fsdp2, name)
    if isinstance(value, type) and issubclass(value, (fsdp2.FSDPError, fsdp2.OffloadPolicy)):
        assert str(value) == f"<class 'fsdp2.{name}'>"


def test_nothing_has_two_public_names() -> None:
    found = [id(value) for value in public_objects().values()]
    assert len(found) == len(set(found))


def test_nothing_public_is_missing_from_all() -> None:
    found = {
        name
        for name in dir(fsdp2)
        if not name.startswith("_") and not inspect.ismodule(getattr(fsdp2, name))
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
        fsdp2.Whole,
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
    param_dtype_override_fn=None,
    cast_root_forward_inputs=False,
    buffer_dtype=None,
    keep_low_precision_grads=False,
    full_precision_in_eval=False,
    gather_dtype=None,
    gather_scale='row'),
    offload_policy=OffloadPolicy(),
    ignored_params=None,
    dp_mesh_dims=None,
    conditional=False,
    ignored_states=None,
    shard='parameters',
    shard_outer=None)
register_fsdp_forward_method(module, method_name)
share_comm_ctx(modules)
MixedPrecisionPolicy(param_dtype=None,
    reduce_dtype=None,
    output_dtype=None,
    cast_forward_inputs=True,
    *,
    param_dtype_override_fn=None,
    cast_root_forward_inputs=False,
    buffer_dtype=None,
    keep_low_precision_grads=False,
    full_precision_in_eval=False,
    gather_dtype=None,
    gather_scale='row')
OffloadPolicy()
CPUOffloadPolicy(pin_memory=True)
DataParallelMeshDims(shard=None, replicate=None)
ShardPlacementResult(placement, mesh_info=None)
Whole(owner=None)
UnshardHandle.wait(self)""",
    )


def test_signatures_of_the_modules_methods() -> None:
    """Every method that a sharded module gains; those that torch lacks are ours."""
    names = public_methods(fsdp2.FSDPModule, ControlSurface)
    methods = [getattr(fsdp2.FSDPModule, name) for name in names]
    assert_expected_inline(
        "\n".join(text_of(method) for method in methods),
        """\
FSDPModule.state_dict(self, *args, **kwargs)
FSDPModule.load_state_dict(self, state_dict, *args, **kwargs)
FSDPModule.train(self, mode=True)
FSDPModule.extra_repr(self)
FSDPModule.zero_grad(self, set_to_none=True)
FSDPModule.unshard(self, async_op=False)
FSDPModule.reshard(self)
FSDPModule.finalize_backward(self, *, async_op=False)
FSDPModule.set_manual_backward_finalization(self, enabled)
FSDPModule.reset_iter_state(self)
ControlSurface.set_is_last_backward(self, is_last_backward)
ControlSurface.set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True)
ControlSurface.set_requires_all_reduce(self, requires_all_reduce, *, recurse=True)
ControlSurface.set_reshard_after_forward(self, reshard_after_forward, recurse=True)
ControlSurface.set_reshard_after_backward(self, reshard_after_backward, *, recurse=True)
ControlSurface.set_keep_unsharded_storage(self, keep, *, recurse=True)
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

OWN_FIELDS = {
    "cast_root_forward_inputs": "False",
    "buffer_dtype": "None",
    "keep_low_precision_grads": "False",
    "full_precision_in_eval": "False",
    "gather_dtype": "None",
    "gather_scale": "'row'",
}
"""Of `MixedPrecisionPolicy`, ours alone: keywords whose defaults leave torch's meaning as it is."""

PINNED = pinned_surface()
TORCHS = {"installed": installed_surface(), PINNED_VERSION: PINNED}
OURS = surface_of(fsdp2, [name for name in PINNED.names if name in fsdp2.__all__], fsdp2, PINNED)


def of_each_torch(part: str) -> pytest.MarkDecorator:
    """Run a test for each entry of a part of torch's surface: the installed one's, the list's."""
    return pytest.mark.parametrize(
        ("version", "name"),
        [(version, name) for version, surface in TORCHS.items() for name in getattr(surface, part)],
    )


@of_each_torch("names")
def test_every_name_of_torchs_is_here(version: str, name: str) -> None:
    """A program that imports a name from torch can import it from here, and use it alike."""
    assert name in fsdp2.__all__
    assert OURS.names[name] == TORCHS[version].names[name]


@of_each_torch("calls")
def test_every_call_of_torchs_is_one_of_ours(version: str, name: str) -> None:
    """Functions, methods and policies take what torch's take; ours may have more keywords."""
    assert name in OURS.calls
    ours = dict(OURS.calls[name])
    theirs = TORCHS[version].calls[name]
    expected = list(theirs)
    own = {key: ours.pop(key) for key in list(ours) if key not in theirs}
    assert list(ours) == expected
    assert ours == {key: theirs[key] for key in expected}
    for key, kind in own.items():
        assert kind.startswith("keyword-only = "), f"{key} is ours"


@of_each_torch("abstract")
def test_collectives_have_torchs_methods(version: str, name: str) -> None:
    """A collective written for torch's interface satisfies ours: the same abstract methods."""
    assert OURS.abstract[name] == TORCHS[version].abstract[name]


@of_each_torch("fields")
def test_policies_have_torchs_fields_and_defaults(version: str, name: str) -> None:
    """Policies hold what torch's hold, what newer ones hold, and what is listed as ours."""
    theirs, newest = TORCHS[version].fields[name], PINNED.fields[name]
    fields = newest | theirs
    own = OWN_FIELDS if name == "MixedPrecisionPolicy" else {}
    assert OURS.fields[name] == {**fields, **own}


@pytest.mark.parametrize("name", sorted(BUILT_BY_USERS))
def test_policies_are_values(name: str) -> None:
    ours, same = (getattr(fsdp2, name)(**BUILT_BY_USERS[name]) for _ in range(2))
    assert ours == same
    assert hash(ours) == hash(same)


@pytest.mark.skipif(
    not torch.__version__.startswith(f"{PINNED_VERSION}."), reason=f"asks torch {PINNED_VERSION}"
)
def test_the_list_is_that_of_the_torch_it_names() -> None:
    """What is kept in `torch_2_15.json` is what that torch has."""
    assert TORCHS["installed"] == PINNED


def test_policies_are_frozen() -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="cannot assign"):
        policy.param_dtype = None  # type: ignore[misc]  # the point of the test
    assert policy.param_dtype is torch.bfloat16
    assert hash(policy) == hash(fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@pytest.mark.parametrize("name", public_objects())
def test_annotations_can_be_read(name: str) -> None:
    """Programs that make options of dataclasses ask for types; pickles move classes elsewhere."""
    found = public_objects()[name]
    assert typing.get_type_hints(found.__init__ if isinstance(found, type) else found) is not None
    if isinstance(found, type):
        assert typing.get_type_hints(found) is not None


@pytest.mark.parametrize("name", ["set_custom_all_gather", "set_custom_reduce_scatter"])
def test_an_annotation_refuses_what_the_check_refuses(name: str) -> None:
    """A plain function has no `allocate`; torch's own classes do, and are none of ours."""
    taken = typing.get_type_hints(getattr(ControlSurface, name))["comm"]
    own = {
        "set_custom_all_gather": DefaultAllGather,
        "set_custom_reduce_scatter": DefaultReduceScatter,
    }
    assert isinstance(own[name](), taken)
    assert not isinstance(dist.all_gather, taken)
    with pytest.raises(fsdp2.ConfigError, match="allocate"):
        check_comm(name, dist.all_gather)
