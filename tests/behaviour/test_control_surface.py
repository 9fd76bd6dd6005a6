"""Promise: every setting of a sharded module does what its name says, and nothing else.

What `test_control` and `test_accumulation` show already is not repeated; custom collectives are in
`test_custom_comms`.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import units_of
from tests.kit.models import (
    CASES,
    VOCAB,
    WIDTH,
    Block,
    Case,
    Stack,
    floats,
    loss_of,
    seeded,
    tokens,
)
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    make_mesh,
    replicas_of_four,
    shard,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow

FINE = 4e-6
"""Tolerance where the reference divides at another place than the reduction."""


OF_ROOT = ("inp.", "out.")
"""How the names of the root's own parameters begin."""


def check_scaled(pair: Pair, factors: dict[Any, float], rtol: float = FINE) -> None:
    """Compare gradients with scaled ones of the reference, and clear them.

    Args:
        factors: By how names of parameters begin; one string, or several.
        rtol: Of the comparison.
    """
    for name, parameter in pair.reference.named_parameters():
        for prefix, factor in factors.items():
            if name.startswith(prefix) and parameter.grad is not None:
                parameter.grad.mul_(factor)
    assert_same_gradients(pair.model, pair.reference, rtol)
    pair.zero_grad()


# --- what a gradient is ---------------------------------------------------------------------------


@ranks(1, 2, slow(4))
def test_a_divide_factor_is_of_one_unit(world_size: int) -> None:
    """The sum over all ranks is divided by the factor, in this unit and not in those below it."""
    pair = Pair("stack", mesh=replicas_of_four())
    pair.model.blocks[1].set_gradient_divide_factor(5.0)
    pair.model.set_gradient_divide_factor(0.5)
    for _ in range(2):
        pair.backward()
        check_scaled(pair, {"blocks.1.": world_size / 5.0, OF_ROOT: world_size / 0.5})


@pytest.mark.parametrize(
    ("reduce_dtype", "rtol"), [(torch.float16, 8e-3), (torch.bfloat16, 4e-2), (None, FINE)]
)
@ranks(2, slow(4))
def test_a_divide_factor_in_every_reduce_dtype(
    reduce_dtype: torch.dtype | None, rtol: float, world_size: int
) -> None:
    """fp16 divides in two steps, before and after the sum; the result is the same."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    pair = Pair("stack", mesh=replicas_of_four(), mp_policy=policy)
    for unit in units_of(pair.model):
        unit.set_gradient_divide_factor(float(4 * world_size))
    pair.backward()
    check_scaled(pair, {"": 0.25}, rtol)


@ranks(2)
def test_the_old_name_of_the_divide_factor() -> None:
    """It warns, and does the same."""
    pair = Pair("stack")
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        pair.model.blocks[0].set_reduce_scatter_divide_factor(1.0)
    pair.backward()
    check_scaled(pair, {"blocks.0.": 2.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.model.blocks[0].set_gradient_divide_factor(2.0)


@pytest.mark.parametrize(("reduction", "per_rank"), [("mean", 0.0), ("sum", 1.0), (8, 0.125)])
@ranks(2, slow(4))
def test_a_reduction_of_the_whole_tree(
    reduction: str | float, per_rank: float, world_size: int
) -> None:
    """Mean, sum, or a divisor of the sum, with and without replicas, accumulated or not."""
    factors = {"": per_rank * world_size or 1.0}
    pair = Pair("stack", mesh=replicas_of_four())
    pair.model.set_gradient_reduction(reduction)
    pair.backward()
    check_scaled(pair, factors)
    pair.accumulate(2)
    check_scaled(pair, factors)
    if world_size == 4:
        pair.accumulate(2, "set_requires_all_reduce")
        check_scaled(pair, factors)
    pair.model.set_gradient_reduction("mean")
    pair.train(steps=1)


@ranks(2)
def test_a_reduction_of_one_unit() -> None:
    """Without recursion the units below keep theirs; a later call replaces an earlier one."""
    pair = Pair("stack")
    pair.model.set_gradient_reduction("sum")
    pair.model.set_gradient_reduction("mean", recurse=False)
    pair.backward()
    check_scaled(pair, {"blocks.": 2.0})


@ranks(2)
def test_a_reduction_in_bf16_compute() -> None:
    """Gradients of bf16 parameters, summed in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [shard(seeded(Stack), CASES["stack"], mp_policy=policy) for _ in "ab"]
    models[1].set_gradient_reduction("sum")
    x = floats(4).args[0]
    for model in models:
        loss_of(model(x)).backward()
    for mean, total in zip(*(m.parameters() for m in models), strict=True):
        assert_same(total.grad, mean.grad * 2, "grad")


@ranks(2, slow(4))
def test_only_sums_give_the_same_numbers() -> None:
    """A mean by hand is the mean; custom collectives see the difference."""
    pair = Pair("stack", mesh=replicas_of_four())
    for unit in units_of(pair.model):
        unit.set_force_sum_reduction_for_comms(True)
    pair.train(steps=2)


@ranks(2)
def test_gradients_of_unused_parameters() -> None:
    """None by default, zeros on demand; a unit that did not run has none in either case."""
    pair = Pair("unused_parts")
    unused = {"unused", "blocks.1.spare.weight", "blocks.1.spare.bias"}
    pair.model.set_reduce_scatter_unused_params(True)
    pair.backward()
    for name, parameter in pair.model.named_parameters():
        if name in unused:
            assert parameter.grad is not None, name
            assert not parameter.grad.to_local().any(), name
            parameter.grad = None
    pair.step()
    pair.model.set_reduce_scatter_unused_params(False, recurse=False)
    pair.backward()
    assert pair.model.unused.grad is None
    assert pair.model.blocks[1].spare.weight.grad is not None
    pair.zero_grad()
    pair.model.set_reduce_scatter_unused_params(False)
    pair.train(steps=1)


# --- the hook on reduced gradients ----------------------------------------------------------------


@ranks(4)
def test_a_hook_may_reduce_over_another_group() -> None:
    """Sharding over one axis of a mesh, and a mean over the other in the hook: HSDP by hand."""
    mesh = make_mesh(2, 2)
    pair = Pair("stack", mesh=mesh["shard"])
    seen: list[Tensor] = []

    def mean_over_replicas(reduced: Tensor) -> None:
        seen.append(reduced)
        dist.all_reduce(reduced, group=mesh.get_group("replicate"))
        reduced.div_(2)

    for unit in units_of(pair.model):
        unit.set_all_reduce_hook(mean_over_replicas)
    pair.train(steps=2)
    assert len(seen) == 2 * 4
    assert all(reduced.dim() == 1 and reduced.dtype is torch.float32 for reduced in seen)


@ranks(4)
def test_with_replicas_the_hook_follows_their_all_reduce() -> None:
    """It sees what every replica sees, in the reduce dtype, and what it writes is stored."""
    mesh = make_mesh(2, 2)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    pair = Pair("stack", mesh=mesh, mp_policy=policy)
    seen: list[Tensor] = []

    def triple(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(3)

    pair.model.blocks[2].set_all_reduce_hook(triple)
    pair.backward()
    check_scaled(pair, {"blocks.2.": 3.0})
    (own,) = seen
    assert own.dtype is torch.float64
    both = [torch.empty_like(own), torch.empty_like(own)]
    dist.all_gather(both, own, group=mesh.get_group("replicate"))
    assert torch.equal(*both)


@ranks(2, 4)
def test_a_hook_with_a_stream(world_size: int) -> None:
    """A stream is for a hook that follows no all-reduce: with replicas it is refused."""
    pair = Pair("stack", mesh=replicas_of_four())
    stream = torch.Stream(device="cpu")
    if world_size == 4:
        with pytest.raises(fsdp2.ConfigError, match="replicate axis"):
            pair.model.set_all_reduce_hook(lambda reduced: reduced.zero_(), stream=stream)
    else:
        pair.model.set_all_reduce_hook(lambda reduced: reduced.mul_(2), stream=stream)
        pair.backward()
        check_scaled(pair, {OF_ROOT: 2.0})
        pair.model.set_all_reduce_hook(lambda reduced: None)
    pair.train(steps=1)


# --- when things happen ---------------------------------------------------------------------------


class Event:
    """What the CPU path needs of an event: the host waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@ranks(2)
def test_the_event_after_the_optimizer_is_waited_for_once() -> None:
    """The next forward waits for it, before it gathers, and forgets it."""
    pair = Pair("stack")
    for _ in range(2):
        event = Event()
        pair.model.set_post_optim_event(event)
        with CommDebugMode() as comm:
            assert event.waits == 0
            event.synchronize = lambda event=event: setattr(  # type: ignore[method-assign]
                event, "waits", event.waits + 1 + 100 * comm.get_total_counts()
            )
            pair.model(*pair.local(pair.batch()).args)
        assert event.waits == 1
        pair.train(steps=2)
        assert event.waits == 1


@ranks(2)
def test_on_a_cpu_no_event_is_nothing_to_wait_for() -> None:
    """What a portable program passes: a CPU's streams record no events."""
    pair = Pair("stack")
    waiting = Event()
    for _ in range(2):
        pair.model.set_post_optim_event(waiting)
        pair.model.set_post_optim_event(torch.cpu.current_stream().record_event())
        pair.train(steps=1)
    assert waiting.waits == 0


EMBEDDED = Case(
    lambda: nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), nn.Linear(WIDTH, 3)),
    lambda model: [model[0], model[1]],  # type: ignore[index]  # a Sequential
    tokens,
)
"""With an embedding as a unit: its backward reads no parameter."""


def gathers_in_backward(pair: Pair) -> int:
    losses = pair.losses()
    with CommDebugMode() as comm:
        losses.backward()
    return sum(n for op, n in comm.get_comm_counts().items() if "gather" in str(op))


@ranks(2, slow(4))
def test_a_unit_that_backward_need_not_gather() -> None:
    """An embedding's all-gather is saved, only its own, and the numbers are the same."""
    pair = Pair(EMBEDDED, mesh=replicas_of_four())
    for is_gathered in (True, False, False, True):
        pair.model[0].set_unshard_in_backward(is_gathered)
        assert gathers_in_backward(pair) == 1 + is_gathered
        pair.finish()


@ranks(2)
def test_flags_of_one_unit_alone() -> None:
    """Without recursion a setting leaves the units below as they are."""
    pair = Pair("stack", reshard_after_forward=False)
    pair.model.set_reshard_after_backward(False, recurse=False)
    pair.backward()
    root, *blocks = fsdp2.units(pair.model)
    assert [group.state for group in root.groups] == ["unsharded"]
    assert {group.state for unit in blocks for group in unit.groups} == {"sharded"}
    assert_sharded(pair.model)
    pair.model.set_reshard_after_backward(True)
    pair.model.reshard()
    pair.finish()


@ranks(4)
def test_the_all_reduce_of_one_unit_may_be_put_off_alone() -> None:
    """The root waits for its all-reduce, the blocks get theirs in every backward."""
    pair = Pair("stack", mesh=make_mesh(2, 2))
    pair.model.set_requires_all_reduce(False, recurse=False)
    pair.backward()
    assert pair.model.inp.weight.grad is None
    assert pair.model.blocks[0].up.weight.grad is not None
    pair.model.set_requires_all_reduce(True)
    pair.backward()
    pair.finish()


@ranks(2)
def test_a_handle_outlives_what_it_waits_for() -> None:
    """Waiting after a reshard, or after the forward, does nothing."""
    pair = Pair("stack")
    handle = pair.model.blocks[0].unshard(async_op=True)
    pair.model.blocks[0].reshard()
    handle.wait()
    assert isinstance(pair.model.blocks[0].up.weight, DTensor)
    handle = pair.model.blocks[1].unshard(async_op=True)
    pair.train(steps=1)
    handle.wait()
    assert isinstance(pair.model.blocks[1].up.weight, DTensor)


@ranks(2)
def test_reset_iter_state_before_the_first_forward() -> None:
    """There is nothing to reset, and that is fine."""
    pair = Pair("stack")
    pair.model.reset_iter_state()
    pair.model.blocks[0].reset_iter_state()
    pair.train(steps=1)


# --- several roots --------------------------------------------------------------------------------


@pytest.mark.parametrize("already_ran", [False, True])
@ranks(2)
def test_roots_that_share_their_streams(already_ran: bool) -> None:
    """Roots share the lanes for collectives, before and after their first forward, and train."""
    stages = [Pair("stack"), Pair("few_rows")]
    if already_ran:
        for stage in stages:
            stage.train(steps=1)
        assert len({id(unit_of(stage.model).runtime.context.streams) for stage in stages}) == 2
    fsdp2.share_comm_ctx([stage.model for stage in stages])
    for stage in stages:
        stage.train(steps=2)
    first, second = (unit_of(stage.model).runtime for stage in stages)
    assert first is not second
    assert first.context.streams is second.context.streams
    groups = [g for unit in (*first.units, *second.units) for g in unit.own_groups]
    assert all(group.context.streams is first.context.streams for group in groups)


@ranks(1)
def test_sharing_streams_of_nothing_and_of_plain_modules() -> None:
    """An empty list is fine; a plain module is refused by its class."""
    fsdp2.share_comm_ctx([])
    model = fsdp2.fully_shard(Block())
    for wrong in ([model, nn.Linear(2, 2)], [nn.Linear(2, 2)], nn.Linear(2, 2)):
        with pytest.raises(fsdp2.ConfigError, match="Linear"):
            fsdp2.share_comm_ctx(wrong)  # type: ignore[arg-type, list-item]  # the point of the test


# --- composition ----------------------------------------------------------------------------------


@ranks(2)
def test_the_state_of_a_module() -> None:
    """`fully_shard.state` is the same for all modules of one call; None for others."""
    model = Stack()
    fsdp2.fully_shard([model.blocks[0], model.blocks[1]])
    state = fsdp2.fully_shard.state
    assert state(model.blocks[0]) is state(model.blocks[1])
    assert state(model.blocks[0]) is not None
    assert state(model) is None
    assert state(model.blocks[0].up) is None


# --- wrong arguments ------------------------------------------------------------------------------

FACTORS: list[Any] = [0, -1.0, float("nan"), float("inf"), "two", True]
COUNTS: list[Any] = [0, -1, 1.5, "2", True]
WRONG: dict[str, list[Any]] = {
    "set_gradient_divide_factor": FACTORS,
    "set_gradient_reduction": [0, -2, "average", None, True, float("nan"), ["mean"]],
    "set_all_reduce_hook": ["all_reduce", 3],
    "set_all_reduce_hook, stream": ["stream", 0],
    "set_custom_all_gather": [None, 1, dist.all_gather],
    "set_custom_reduce_scatter": [None, 1, dist.all_reduce],
    "set_reduce_scatter_max_input_buffers": [*COUNTS, None],
    "set_memory": ["much", 0, -1, 1.5, None, True],
    "set_post_optim_event": ["event", 1],
    "set_symm_mem_for_comm": ["NVSHMEM", "nccl", None],
    "set_copy_free_min_bytes": COUNTS,
    "set_gradient_wire_dtype": ["bf16", torch.int32, 2],
    "set_modules_to_forward_prefetch": [None, [None], [nn.Tanh()], "block"],
    "set_modules_to_backward_prefetch": [None, [None], [nn.Tanh()], "block"],
} | {
    f"set_{name}": [1, None, "yes"]
    for name in (
        "is_last_backward",
        "requires_gradient_sync",
        "requires_all_reduce",
        "reshard_after_forward",
        "reshard_after_backward",
        "keep_unsharded_storage",
        "manual_backward_finalization",
        "unshard_in_backward",
        "force_sum_reduction_for_comms",
        "reduce_scatter_unused_params",
        "separate_reduce_scatter_group",
        "allocate_memory_from_process_group_for_comm",
    )
}


@ranks(2)
def test_wrong_arguments_are_named() -> None:
    """Every setter refuses what it cannot use, says what it found, and changes nothing."""
    model = fsdp2.fully_shard(seeded(Block))
    unit = unit_of(model)
    (group,) = unit.own_groups
    before = (unit.settings, group.wire.gather, group.reducer.hook)
    for name, values in WRONG.items():
        method, _, keyword = name.partition(", ")
        for value in values:
            given, named = ((print,), {keyword: value}) if keyword else ((value,), {})
            with pytest.raises(fsdp2.ConfigError) as caught:
                getattr(model, method)(*given, **named)
            found = [repr(value), type(value).__name__]
            found += [type(value[0]).__name__] if isinstance(value, list) else []
            assert any(text in str(caught.value) for text in found), (name, value, caught.value)
    assert (unit.settings, group.wire.gather, group.reducer.hook) == before
    assert unit.post_optim_event is None
    loss_of(model(torch.randn(4, WIDTH))).backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_every_setter_has_wrong_arguments() -> None:
    """The table above forgets no method."""
    setters = {name for name in dir(fsdp2.FSDPModule) if name.startswith("set_")}
    setters -= {"set_submodule", "set_extra_state"}  # nn.Module's
    setters -= {"set_reduce_scatter_divide_factor"}  # calls set_gradient_divide_factor
    assert setters == {name.split(",")[0] for name in WRONG}


# --- None -----------------------------------------------------------------------------------------


NONE = {
    "set_all_reduce_hook": "hook",
    "set_all_reduce_hook, stream": "stream",
    "set_gradient_divide_factor": "factor",
    "set_reduce_scatter_divide_factor": "factor",
    "set_post_optim_event": "event",
    "register_fsdp_forward_method": "module",
}
"""Methods and functions to which torch's own take None, beside `fully_shard`; flags are no such."""

REFUSED_BY_TORCH = {
    "set_custom_all_gather": "comm",
    "set_custom_reduce_scatter": "comm",
    "set_modules_to_forward_prefetch": "modules",
    "set_modules_to_backward_prefetch": "modules",
    "set_reduce_scatter_max_input_buffers": "max_input_buffers",
    "set_symm_mem_for_comm": "backend",
    "share_comm_ctx": "modules",
}
"""By method or function, the argument that gets None."""


def pass_none(name: str, argument: str, library: Any, model: nn.Module) -> None:
    if name == "register_fsdp_forward_method":
        library.register_fsdp_forward_method(None, "forward")
    elif name == "share_comm_ctx":
        library.share_comm_ctx(None)
    else:
        hook = (print,) if argument == "stream" else ()
        getattr(model, name.partition(",")[0])(*hook, **{argument: None})


def gradients_of(library: Any, call: Any = None, **keywords: Any) -> list[Tensor]:
    """Return whole gradients of one step of a model that a library shards, after a call."""
    model: Any = seeded(Block)
    library.fully_shard(model, **keywords)
    if call is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            call(library, model)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, WIDTH)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@ranks(2)
def test_none_means_what_it_means_to_torch() -> None:
    """For each argument of `fully_shard`, of methods and functions; what torch refuses, we do."""
    optional = [
        name
        for name, parameter in inspect.signature(torch_fsdp.fully_shard).parameters.items()
        if name not in ("module", "mp_policy")
    ]
    assert {"mesh", "offload_policy", "ignored_params", "shard_placement_fn"} <= {*optional}
    expected = gradients_of(torch_fsdp)
    for name in optional:
        for library in (torch_fsdp, fsdp2):
            found = gradients_of(library, **{name: None})
            assert all(map(torch.equal, found, expected)), (name, library)
    for name in NONE:
        for library in (torch_fsdp, fsdp2):
            found = gradients_of(library, partial(pass_none, name, NONE[name]))
            assert all(map(torch.equal, found, expected)), (name, library)
    for call in itertools.starmap(partial(partial, pass_none), REFUSED_BY_TORCH.items()):
        with pytest.raises((AttributeError, TypeError, AssertionError)):
            gradients_of(torch_fsdp, call)
        with pytest.raises(fsdp2.ConfigError):
            gradients_of(fsdp2, call)
    with pytest.raises(AttributeError):
        gradients_of(torch_fsdp, mp_policy=None)
    with pytest.raises(fsdp2.ConfigError):
        gradients_of(fsdp2, mp_policy=None)


@ranks(1)
def test_none_takes_back_what_was_set() -> None:
    """A hook, a factor and an event are gone after None."""
    model = fsdp2.fully_shard(seeded(Block))
    unit, event = unit_of(model), Event()
    model.set_all_reduce_hook(print)
    model.set_gradient_divide_factor(7.0)
    model.set_post_optim_event(event)
    model.set_all_reduce_hook(None)
    model.set_gradient_divide_factor(None)
    model.set_post_optim_event(None)
    assert unit.own_groups[0].reducer.hook is None
    assert unit.settings.divide_by is None
    model(torch.ones(2, WIDTH)).sum().backward()
    assert event.waits == 0


def test_every_argument_is_one_that_torch_takes_none_for_or_not() -> None:
    """The two tables have each method of torch's class that is set by more than a flag."""
    listed = {name.split(",")[0] for name in NONE.keys() | REFUSED_BY_TORCH.keys()}
    for name in vars(torch_fsdp.FSDPModule):
        method = getattr(torch_fsdp.FSDPModule, name)
        if not name.startswith("set_"):
            continue
        parameters = inspect.signature(method).parameters.values()
        is_flag = all(p.annotation in ("bool", p.empty) for p in parameters)
        assert is_flag or name in listed, name
