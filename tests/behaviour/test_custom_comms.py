"""Promise: users may send the collectives themselves, over memory and groups of their choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_api as torch_fsdp_api
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.base import torch_comm
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import units_of
from tests.kit.models import Case, each_block, floats, loss_of, stack
from tests.kit.parity import Pair, assert_same, assert_same_gradients, make_mesh, replicas_of_four
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

LIBRARIES = {"ours": fsdp2, "torch's": torch_fsdp_api}


class Watched:
    """A work that knows whether somebody waited for it."""

    def __init__(self, work: Any, owner: Recorder) -> None:
        self.work = work
        self.owner = owner

    def wait(self) -> None:
        self.owner.in_flight -= 1
        self.work.wait()


class Recorder:
    """Mixed into a collective: remembers what it was asked for.

    Args:
        persistent: give the same memory for every buffer of one size, dtype and place.
        blocking: wait inside the call, and return no work.
    """

    def __init__(self, persistent: bool = False, blocking: bool = False) -> None:
        self.persistent, self.blocking = persistent, blocking
        self.groups: list[Any] = []
        self.ops: list[Any] = []
        self.asynchronous: list[bool] = []
        self.allocated: list[Tensor] = []
        self.in_flight = self.most_in_flight = 0
        self._kept: dict[Any, Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (tuple(size), dtype, device)
        if not self.persistent or key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        self._kept[key].view(torch.uint8).fill_(0xA5)  # nobody may rely on what was there
        self.allocated.append(self._kept[key])
        return self._kept[key]

    def owns(self, tensor: Tensor) -> bool:
        """True if the tensor lies in memory that this object gave."""
        start = tensor.untyped_storage().data_ptr()
        return any(start == t.untyped_storage().data_ptr() for t in self.allocated)

    def finish(self, work: Any, group: Any, async_op: bool) -> Any:
        self.groups.append(group)
        self.asynchronous.append(async_op)
        if self.blocking or not async_op:
            work.wait()
            return None
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Watched(work, self)


class Gather(Recorder):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        assert self.owns(output_tensor)
        rank, numel = dist.get_rank(group), input_tensor.numel()
        own = output_tensor[rank * numel : (rank + 1) * numel]
        assert input_tensor.data_ptr() == own.data_ptr(), "the input is a slice of the output"
        assert output_tensor.numel() == numel * dist.get_world_size(group)
        work = torch_comm.all_gather_single(output_tensor, input_tensor, group, True)
        return self.finish(work, group, async_op)


class Scatter(Recorder):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert self.owns(input_tensor)
        assert input_tensor.numel() == output_tensor.numel() * dist.get_world_size(group)
        self.ops.append(op)
        work = torch_comm.reduce_scatter_single(output_tensor, input_tensor, op, group, True)
        return self.finish(work, group, async_op)


def gather(library: Any = fsdp2, **kwargs: Any) -> Any:
    return type("CustomGather", (Gather, library.AllGather), {})(**kwargs)


def scatter(library: Any = fsdp2, **kwargs: Any) -> Any:
    return type("CustomScatter", (Scatter, library.ReduceScatter), {})(**kwargs)


def group_of(model: nn.Module) -> Any:
    """Return the process group that a model is sharded over."""
    unit = unit_of(model)
    return unit.own_groups[0].data.shard.pg


def carry(model: nn.Module, gather: Any = None, scatter: Any = None) -> None:
    """Let collectives of the user carry what all units of a model send."""
    for unit in units_of(model):
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if scatter is not None:
            unit.set_custom_reduce_scatter(scatter)


def keep_one_buffer_each(pair: Pair) -> None:
    for unit in units_of(pair.model):
        unit.set_custom_all_gather(gather(persistent=True))
        unit.set_custom_reduce_scatter(scatter(persistent=True))


def check_same_shards(pair: Pair, usual: Pair) -> None:
    """Run a forward and backward of both sharded models, and compare what each rank gets."""
    batch = pair.local(pair.batch())
    for model in (usual.model, pair.model):
        loss_of(model(*batch.args)).backward()
    for own, other in zip(pair.model.parameters(), usual.model.parameters(), strict=True):
        assert torch.equal(own.grad.to_local(), other.grad.to_local())


# --- custom collectives ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "blocking"),
    with_slow(
        itertools.product(list(LIBRARIES), [False, True]), [("ours", False), ("torch's", True)]
    ),
)
@ranks(2, slow(4))
def test_custom_collectives(library: str, blocking: bool) -> None:
    """Their memory is used, they are called over the right group, and the numbers are right."""
    pair = Pair("stack", mesh=replicas_of_four())
    comms = [make(LIBRARIES[library], blocking=blocking) for make in (gather, scatter)]
    carry(pair.model.blocks[0], *comms)
    pair.train(steps=3)
    group = group_of(pair.model)
    assert comms[0].groups == [group] * 2 * 3  # forward and backward
    assert comms[1].groups == [group] * 3
    assert all(comm.in_flight == 0 and all(comm.asynchronous) for comm in comms)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    with_slow(
        itertools.product([torch.float32, torch.bfloat16, torch.float16], [None, 2.0, 3.0]),
        [(torch.bfloat16, 2.0)],
    ),
)
@ranks(slow(2), 4)
def test_no_reduction_is_a_scaled_sum(
    dtype: torch.dtype, factor: float | None, world_size: int
) -> None:
    """Up to torch 2.13 NCCL's scaled sum reads factors as 0 in bf16 (pytorch#190745)."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model: Any = fsdp2.fully_shard(nn.Linear(13, 29), mesh=replicas_of_four(), mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    scatters = mock.patch.object(
        torch_comm, "reduce_scatter_single", wraps=torch_comm.reduce_scatter_single
    )
    with (
        scatters as scattered,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed,
    ):
        model(torch.ones(2, 13)).sum().backward()
    ops = [call.args[2] for call in scattered.call_args_list]
    ops += [call.args[1] for call in summed.call_args_list]
    assert len(ops) == (2 if world_size == 4 else 1)  # a reduction for each axis
    assert all(op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) for op in ops)
    expected = torch.full((29,), 2.0 * world_size / (factor or world_size))
    torch.testing.assert_close(model.bias.grad.full_tensor(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "name",
    with_slow(
        ["few_rows", "mixed_dtypes", "non_contiguous", "tied_lm"],
        ["mixed_dtypes", "non_contiguous"],
    ),
)
@ranks(2)
def test_custom_collectives_that_keep_one_buffer_each(name: str) -> None:
    """A unit asks for memory again only when it has done with what it got before."""
    pair = Pair(name)
    keep_one_buffer_each(pair)
    pair.train(steps=3)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@ranks(2, slow(4))
def test_gradients_that_wait_lie_in_memory_of_their_own(reduce_dtype: torch.dtype | None) -> None:
    """Collectives with one buffer each, and gradients that accumulate between reductions."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    pair = Pair("stack", mesh=replicas_of_four(), mp_policy=policy)
    keep_one_buffer_each(pair)
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
        pair.accumulate(3, method)
        assert_same_gradients(pair.model, pair.reference, 4e-6)
        pair.step()


@pytest.mark.parametrize("library", with_slow(list(LIBRARIES), ["torch's"]))
@pytest.mark.parametrize("asynchronous", [True, False])
@ranks(2, slow(4))
def test_a_reduce_scatter_that_returns_nothing(asynchronous: bool, library: str) -> None:
    """Whatever it is asked for, None says that the result is there: gradients are the same."""
    usual, pair = (Pair("stack", mesh=replicas_of_four()) for _ in "ab")
    comm = scatter(LIBRARIES[library], blocking=True)
    carry(pair.model, scatter=comm)
    for _ in range(2):
        check_same_shards(pair, usual)
        for model in (usual.model, pair.model):
            model.zero_grad()
            for unit in units_of(model):
                for group in unit_of(unit).own_groups:
                    group.context.streams.async_op = asynchronous  # as on a device
    assert comm.asynchronous[-1] is asynchronous


@ranks(2)
def test_a_lone_unit_has_one_reduction_at_a_time() -> None:
    """Several backwards before the last one: each reduction has the buffers for itself."""
    pair = Pair("root_only")
    comm = scatter(persistent=True)
    pair.model.set_custom_reduce_scatter(comm)
    pair.accumulate(3, "set_is_last_backward")
    assert comm.most_in_flight == 1
    pair.step()


@ranks(2)
def test_placeholders_and_one_buffer() -> None:
    """Gradients of tensors that stand in for parameters are no views of the wire's memory."""
    pair = Pair("root_only")
    keep_one_buffer_each(pair)
    batch = pair.batch()
    given = {n: p.detach().clone().requires_grad_() for n, p in pair.model.named_parameters()}
    output = torch.func.functional_call(pair.model, given, pair.local(batch).args)
    loss_of(output).backward()
    pair.run_reference(batch).backward()
    for name, parameter in pair.reference.named_parameters():
        assert_same(given[name].grad, parameter.grad, name, 4e-6, 0.1)


@ranks(2)
def test_custom_collectives_in_mixed_precision() -> None:
    """What is sent has the compute dtype, what is reduced the reduce dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    usual, pair = (Pair("stack", mp_policy=policy) for _ in "ab")
    comms = gather(), scatter()
    carry(pair.model, *comms)
    check_same_shards(pair, usual)
    assert {t.dtype for t in comms[0].allocated} == {torch.bfloat16}
    assert {t.dtype for t in comms[1].allocated} == {torch.float32}


@ranks(2)
def test_custom_collectives_and_unshard_by_hand() -> None:
    """A handle waits for the work that the custom all-gather returned."""
    pair = Pair("stack")
    comm = gather()
    pair.model.blocks[0].set_custom_all_gather(comm)
    handle = pair.model.blocks[0].unshard(async_op=True)
    assert comm.in_flight == 1
    handle.wait()
    assert comm.in_flight == 0
    assert torch.equal(pair.model.blocks[0].up.weight, pair.reference.blocks[0].up.weight)
    pair.train(steps=1)


@pytest.mark.parametrize("world", with_slow(["FSDP", "HSDP"], ["HSDP"]))
@ranks(4)
def test_the_operation_that_a_reduce_scatter_is_asked_for(world: str) -> None:
    """A mean by default; a sum if only sums are wanted, or if the unit scales by hand."""
    pair = Pair("stack", mesh=make_mesh(2, 2) if world == "HSDP" else make_mesh())
    comm = scatter()
    block = pair.model.blocks[1]
    block.set_custom_reduce_scatter(comm)
    pair.train(steps=1)
    block.set_force_sum_reduction_for_comms(True)
    pair.train(steps=1)
    block.set_force_sum_reduction_for_comms(False)
    block.set_gradient_divide_factor(4.0)
    pair.train(steps=1)
    average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    assert comm.ops == [average, total, total]


@ranks(2)
def test_fp16_is_always_summed() -> None:
    """Its mean is taken in two steps, around a sum."""
    pair = Pair("stack", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    comm = scatter()
    pair.model.set_custom_reduce_scatter(comm)
    pair.backward()
    assert comm.ops == [dist.ReduceOp.SUM]


# --- buffers in flight, groups of their own -------------------------------------------------------


@pytest.mark.parametrize("count", with_slow([None, 1, 2, 3], [None, 2]))
@ranks(2, slow(4))
def test_how_many_reductions_hold_their_inputs(count: int | None) -> None:
    """At most the configured number, and exactly it if there are enough units. The default is two.

    A limit on one unit alone holds when that unit reduces.
    """
    case = Case(stack(count=5), each_block, floats)
    pair = Pair(case, mesh=replicas_of_four())
    comm = scatter()
    if count is not None:
        pair.model.set_reduce_scatter_max_input_buffers(count)
    carry(pair.model, scatter=comm)
    pair.train(steps=2)
    assert comm.most_in_flight == (count or 2)
    pair.model.set_reduce_scatter_max_input_buffers(4, recurse=False)
    pair.train(steps=1)
    assert comm.most_in_flight <= 4


@pytest.mark.parametrize("world", with_slow(["FSDP", "HSDP"], ["HSDP"]))
@ranks(slow(2), 4)
def test_reductions_over_a_group_of_their_own(world: str, world_size: int) -> None:
    """One more group over the same ranks, shared by all units; and back again."""
    if world == "HSDP" and world_size == 2:
        pytest.skip("two ranks are no two replicas of shards")
    pair = Pair("stack", mesh=make_mesh(2, 2) if world == "HSDP" else make_mesh())
    comms = gather(), scatter()
    carry(pair.model, *comms)
    pair.train(steps=1)
    usual = group_of(pair.model)
    assert {*comms[0].groups, *comms[1].groups} == {usual}
    own = []
    for enable in (True, False, True):
        comms[1].groups.clear()
        pair.model.set_separate_reduce_scatter_group(enable)
        pair.train(steps=2)
        (group,) = set(comms[1].groups)
        assert (group is not usual) is enable
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(usual)
        own.append(group)
    assert own[0] is own[2], "the group is made once"
    assert set(comms[0].groups) == {usual}


@ranks(2)
def test_a_group_of_its_own_for_one_unit() -> None:
    """Without recursion the other units stay where they are."""
    pair = Pair("stack")
    comms = scatter(), scatter()
    pair.model.set_custom_reduce_scatter(comms[0])
    pair.model.blocks[0].set_custom_reduce_scatter(comms[1])
    pair.model.set_separate_reduce_scatter_group(recurse=False)
    pair.train(steps=2)
    assert set(comms[0].groups) != set(comms[1].groups) == {group_of(pair.model)}


# --- whose memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has_allocator", [True, False])
@ranks(2)
def test_memory_of_the_process_group(has_allocator: bool) -> None:
    """Buffers of the unit, and only of it, come from its group's allocator where it has one."""
    pair = Pair("stack")
    asked: list[tuple[Any, int]] = []

    def allocate(group: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Any:
        asked.append((group, numel))
        return torch.full((numel,), 9.0, dtype=dtype, device=device) if has_allocator else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_comm, "allocate_from_group", allocate)
        pair.model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
        pair.train(steps=2)
        assert {group for group, _ in asked} == {group_of(pair.model)}
        asked_for = len(asked)
        assert asked_for >= 2 * (2 + 1)  # two gathers and one reduction a step
        pair.model.blocks[0].set_allocate_memory_from_process_group_for_comm(False)
        pair.train(steps=1)
        assert len(asked) == asked_for
    pair.model.blocks[1].set_allocate_memory_from_process_group_for_comm(True)
    pair.train(steps=1)  # gloo has none


@ranks(2)
def test_a_custom_collective_allocates_for_itself() -> None:
    """So it cannot be combined with memory of the group, nor with symmetric memory."""
    pair = Pair("stack")
    comms = gather(), scatter()
    pair.model.blocks[0].set_custom_all_gather(comms[0])
    pair.model.blocks[1].set_custom_reduce_scatter(comms[1])
    for block in pair.model.blocks[:2]:
        for method in ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"):
            argument = True if "allocate" in method else "NCCL"
            with pytest.raises(fsdp2.ConfigError, match="custom"):
                getattr(block, method)(argument)
    pair.train(steps=1)
    assert comms[0].groups
    assert comms[1].groups


@ranks(2)
def test_symmetric_memory_needs_nccl() -> None:
    """On another backend it is refused by name, and everything stays as it was."""
    pair = Pair("stack")
    unit = unit_of(pair.model.blocks[0])
    before = unit.own_groups[0].wire.gather
    with pytest.raises(fsdp2.UnsupportedError, match="gloo"):
        pair.model.blocks[0].set_symm_mem_for_comm()
    assert unit.own_groups[0].wire.gather is before
    pair.train(steps=1)


@ranks(4)
def test_a_custom_all_gather_over_the_smaller_mesh() -> None:
    """After forward parameters lie on fewer ranks: backward gathers over their group."""
    pair = Pair("stack", reshard_after_forward=2)
    comm = gather()
    pair.model.blocks[0].set_custom_all_gather(comm)
    pair.train(steps=2)
    whole, part = comm.groups[:2]
    assert comm.groups == [whole, part] * 2
    assert whole == group_of(pair.model)
    assert dist.get_world_size(part) == 2


@ranks(4)
def test_a_hook_waits_for_the_all_reduce() -> None:
    """While the all-reduce is put off there is nothing that the hook could see."""
    pair = Pair("stack", mesh=make_mesh(2, 2))
    calls: list[int] = []
    pair.model.set_all_reduce_hook(lambda reduced: calls.append(reduced.numel()))
    for last in (False, False, True):
        pair.model.set_requires_all_reduce(last)
        pair.backward()
        assert len(calls) == int(last)
    pair.step()


@ranks(2)
def test_factors_without_a_shard_axis() -> None:
    """Replicas alone: nothing is scattered, and the factor divides the sum over replicas."""
    pair = Pair("stack", mesh=make_mesh(2, 1))
    pair.model.set_gradient_reduction("sum")
    pair.backward()
    for parameter in pair.reference.parameters():
        parameter.grad.mul_(2)
    assert_same_gradients(pair.model, pair.reference, 4e-6)
