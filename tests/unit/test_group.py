"""Groups of several ranks in one process, moved by hand in lockstep (see `_loopback`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2._core.base import events
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.registration import GATHERING, RELEASED, SHARDED, SMALLER, WHOLE
from tests.unit._loopback import (
    LoopbackGroup,
    chunk_of,
    fake_process_group,
    local_of,
    same_bits,
)

WORLD = 6


@pytest.fixture(autouse=True, scope="module")
def _meshes() -> Iterator[None]:
    with fake_process_group(WORLD):
        yield


class Odd(nn.Module):
    """Every kind of parameter that a group may hold."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.matrix = nn.Parameter(torch.randn(13, 29, generator=generator))
        self.column = nn.Parameter(torch.randn(29, 5, generator=generator).t())
        self.row = nn.Parameter(torch.randn(1, 7, generator=generator))
        self.scalar = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(5, generator=generator).double())
        self.narrow = nn.Parameter(torch.randn(9, 2, generator=generator).bfloat16())
        self.table = nn.Parameter(torch.arange(11), requires_grad=False)
        self.quantised = nn.Parameter(
            torch.randn(7, generator=generator).to(torch.float8_e4m3fn), requires_grad=False
        )
        self.frozen = nn.Parameter(torch.randn(3, 3, generator=generator), requires_grad=False)
        self.tied = self.matrix


def dims_of(param: nn.Parameter) -> Any:
    """Shard some parameters off dim 0 and keep one whole."""
    return {(13, 29): Shard(1), (9, 2): Replicate(), (5, 29): Shard(-1)}.get(tuple(param.shape))


CASES: dict[str, dict[str, Any]] = {
    "one rank": {"shard": 1},
    "two ranks": {"shard": 2},
    "three ranks": {"shard": 3},
    "six ranks": {"shard": 6},
    "2 replicas of 3": {"shard": 3, "replicate": 2},
    "any dim": {"shard": 4, "placement_fn": dims_of},
    "bf16": {"shard": 3, "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}
KINDS = pytest.mark.parametrize("case", CASES)


def build(case: str) -> LoopbackGroup:
    return LoopbackGroup(Odd(), **CASES[case])


def linear(shard: int = 2, **kwargs: Any) -> LoopbackGroup:
    torch.manual_seed(3)
    return LoopbackGroup(nn.Linear(4, 5), shard, **kwargs)


def full_nbytes(group: ParamGroup) -> set[int]:
    """Return the sizes of the storages behind the unsharded parameters."""
    return {p.unsharded.untyped_storage().nbytes() for p in group.params if p.unsharded is not None}


def states(ranks: LoopbackGroup) -> set[Any]:
    return set(ranks.each(lambda group: group.state))


def give(ranks: LoopbackGroup, weight: float, bias: float | None = None) -> None:
    """Give the unsharded parameters of every rank gradients of one value."""
    for module in ranks.modules:
        module.weight.grad = torch.full_like(module.weight, weight)
        if bias is not None:
            module.bias.grad = torch.full_like(module.bias, bias)


def assert_reduced(ranks: LoopbackGroup, weight: Any, bias: float | None = None) -> None:
    """Assert that the shards' gradients have these values everywhere; no bias: it has none."""
    for group in ranks.groups:
        first, second = (param.sharded.grad for param in group.params)
        assert local_of(first).eq(weight).all()
        assert second is None if bias is None else local_of(second).eq(bias).all()


def assert_no_gradients(ranks: LoopbackGroup) -> None:
    assert all(p.sharded.grad is None for group in ranks.groups for p in group.params)


def assert_whole(ranks: LoopbackGroup, name: str = "weight") -> None:
    """Assert that every rank has the original parameter."""
    for module in ranks.modules:
        assert same_bits(getattr(module, name), getattr(ranks.original, name))


def set_trained(ranks: LoopbackGroup, trained: bool) -> None:
    for module in ranks.modules:
        module.weight.requires_grad_(trained)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# --- sharding -------------------------------------------------------------------------------------


@KINDS
def test_shards_are_chunks(case: str) -> None:
    ranks = build(case)
    original = dict(ranks.original.named_parameters())
    placement_fn = CASES[case].get("placement_fn", lambda param: None)
    for group, module in zip(ranks.groups, ranks.modules, strict=True):
        assert states(ranks) == {SHARDED}
        for name, param in module.named_parameters():
            assert isinstance(param, DTensor)
            assert isinstance(param, nn.Parameter)
            chosen = placement_fn(original[name])
            dim = 0 if original[name].dim() else None
            if isinstance(chosen, Shard):
                dim = chosen.dim % original[name].dim()
            elif isinstance(chosen, Replicate):
                dim = None
            axis = group.data.shard
            expected = chunk_of(original[name], dim, axis.rank, axis.size)
            assert same_bits(local_of(param), expected), name
            assert param.shape == original[name].shape
            assert param.requires_grad == original[name].requires_grad


def test_shards_are_copies_and_all_lie_in_one_buffer() -> None:
    ranks = build("three ranks")
    for group, module in zip(ranks.groups, ranks.modules, strict=True):
        assert group.buffers.home is not None
        start = group.buffers.home.flat.data_ptr()
        end = start + group.buffers.home.flat.numel()
        pointers = [local_of(p).data_ptr() for p in module.parameters() if local_of(p).numel()]
        assert pointers
        assert all(start <= pointer < end for pointer in pointers)


def test_ties_stay_one_object() -> None:
    ranks = build("two ranks")
    for module in ranks.modules:
        assert module.tied is module.matrix
    ranks.gather()
    for module in ranks.modules:
        assert module.tied is module.matrix
        assert not isinstance(module.tied, DTensor)


# --- unshard and reshard --------------------------------------------------------------------------


@KINDS
def test_unshard_gives_back_the_original_parameters(case: str) -> None:
    ranks = build(case)
    ranks.gather()
    assert states(ranks) == {WHOLE}
    original = dict(ranks.original.named_parameters())
    compute = ranks.groups[0].policy.param_dtype
    for module in ranks.modules:
        parameters = dict(module.named_parameters())
        assert list(parameters) == list(original)
        for name, param in parameters.items():
            expected = original[name]
            if compute is not None and expected.is_floating_point() and expected.itemsize > 1:
                expected = expected.to(compute)
            assert not isinstance(param, DTensor)
            assert same_bits(param, expected), name
            assert param.requires_grad == expected.requires_grad
            if expected.numel():
                assert param.stride() == original[name].stride()


@KINDS
def test_reshard_registers_the_shards_and_frees_the_rest(case: str) -> None:
    ranks = build(case)
    before = [ranks.parameters(rank) for rank in range(len(ranks.groups))]
    for _ in range(2):
        ranks.gather()
        assert all(size > 0 for group in ranks.groups for size in full_nbytes(group))
        ranks.reshard()
        assert states(ranks) == {SHARDED}
        assert all(full_nbytes(group) == {0} for group in ranks.groups)
        for rank, params in enumerate(before):
            now = ranks.parameters(rank)
            assert len(now) == len(params)
            assert all(new is old for new, old in zip(now, params, strict=True))


def test_one_unsharded_parameter_for_life() -> None:
    ranks = build("three ranks")
    ranks.gather()
    first = [ranks.parameters(rank) for rank in range(3)]
    for _ in range(3):
        ranks.reshard()
        ranks.gather()
        for rank, params in enumerate(first):
            now = ranks.parameters(rank)
            assert all(new is old for new, old in zip(now, params, strict=True))
            assert all(param._version == 0 for param in now)


def test_unshard_sees_what_the_optimizer_wrote() -> None:
    ranks = linear(3)
    ranks.gather()
    ranks.reshard()
    for rank in range(3):
        with torch.no_grad():
            for param in ranks.parameters(rank):
                param.mul_(2.0)
    ranks.gather()
    for module in ranks.modules:
        assert torch.equal(module.weight, ranks.original.weight * 2.0)
        assert torch.equal(module.bias, ranks.original.bias * 2.0)


def test_saved_tensors_survive_the_freed_storage() -> None:
    """Autograd saves the weight for the gradient of the input; its memory is freed in between."""
    ranks = linear(2)
    ranks.gather()
    x = torch.randn(3, 4, requires_grad=True)
    losses = [F.linear(x, module.weight, module.bias).square().sum() for module in ranks.modules]
    ranks.reshard()
    ranks.gather()
    expected_x = x.detach().clone().requires_grad_()
    ranks.original(expected_x).square().sum().backward()
    for loss, module in zip(losses, ranks.modules, strict=True):
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, expected_x.grad)
        assert torch.equal(module.weight.grad, ranks.original.weight.grad)


def test_one_all_gather_an_unshard_however_often_it_is_asked_for() -> None:
    ranks = linear(2)
    ranks.gather()
    ranks.each(ParamGroup.unshard)
    ranks.wait()
    assert ranks.wire().kinds == ["all_gather"]
    ranks.reshard()
    ranks.each(ParamGroup.unshard)
    ranks.each(ParamGroup.unshard)
    assert [group.state is GATHERING for group in ranks.groups] == [True, True]
    ranks.wait()
    assert [group.state is GATHERING for group in ranks.groups] == [False, False]
    assert ranks.wire().kinds == ["all_gather"] * 2


def test_waiting_without_an_unshard_issues_it() -> None:
    ranks = LoopbackGroup(nn.Linear(4, 5), 1)
    ranks.wait()
    assert states(ranks) == {WHOLE}
    assert_whole(ranks)


def test_one_rank_sends_nothing() -> None:
    ranks = linear(1)
    ranks.gather()
    give(ranks, 1.0, 1.0)
    ranks.reduce()
    assert ranks.wire().kinds == []
    assert ranks.groups[0].params[0].sharded.grad is not None


def test_parameters_are_registered_only_once_they_are_whole() -> None:
    ranks = linear(2)
    ranks.groups[0].unshard()
    assert isinstance(ranks.modules[0].weight, DTensor)
    assert ranks.groups[0].state is GATHERING
    with pytest.raises(AssertionError, match="not every rank has joined"):
        ranks.groups[0].wait_for_unshard()
    assert ranks.groups[0].state is GATHERING
    assert isinstance(ranks.modules[0].weight, DTensor)
    ranks.groups[1].unshard()
    ranks.wait()
    assert_whole(ranks)


def test_reshard_while_gathering_finishes_and_drops_the_gather() -> None:
    """The buffers of a collective must live until it is over."""
    ranks = linear(2)
    ranks.groups[0].unshard()
    with pytest.raises(AssertionError, match="not every rank has joined"):
        ranks.groups[0].reshard()
    ranks.groups[1].unshard()
    ranks.reshard()
    assert states(ranks) == {SHARDED}
    assert not any(group.state is GATHERING for group in ranks.groups)
    ranks.gather()
    assert_whole(ranks)


def test_reshard_of_sharded_parameters_does_nothing() -> None:
    ranks = linear(2)
    seen: list[events.Event] = []
    with events.listen(seen.append):
        ranks.reshard()
    assert seen == []
    assert states(ranks) == {SHARDED}


def test_what_a_release_decided_holds_on_ranks_that_keep_the_memory() -> None:
    """A part that backward reads on no rank is not gathered there, freed or not."""
    ranks = linear(2)
    for group in ranks.groups:
        group.early.become_part("part").is_called = True
    ranks.gather()
    kept = ranks.modules[1].weight.view(-1)
    ranks.each(lambda group: group.release_early(skips_backward=True))
    assert states(ranks) == {SHARDED, RELEASED}
    ranks.each(lambda group: group.release_early(skips_backward=False))
    assert [group.early.skips_backward for group in ranks.groups] == [True, True]
    assert not any(group.is_unsharded for group in ranks.groups)
    assert same_bits(kept, ranks.original.weight.view(-1))


def test_events_carry_the_name_and_the_bytes() -> None:
    ranks = linear(2)
    seen: list[events.Event] = []
    for group in ranks.groups:
        group.fqn = "layer"
    with events.listen(seen.append):
        ranks.gather()
        ranks.reshard()
    padded = 2 * 4 * (3 * 4 + 3)  # 2 ranks, 4 bytes, pieces of 3 rows of 4 and of 3
    assert seen[:2] == [events.Event("unshard", "layer", "idle", padded)] * 2
    assert [event.kind for event in seen[2:]] == ["wait_for_unshard"] * 2 + ["reshard"] * 2


# --- the smaller mesh -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("shard", "smaller"), [(4, 2), (6, 3), (6, 2)])
def test_resharding_to_neighbours(shard: int, smaller: int, dtype: torch.dtype | None) -> None:
    ranks = LoopbackGroup(Odd(), shard, policy=MixedPrecisionPolicy(param_dtype=dtype))
    ranks.each(lambda group: group.reshard_to(smaller))
    ranks.gather()
    whole = [[p.detach().clone() for p in ranks.parameters(rank)] for rank in range(shard)]
    unsharded = [ranks.parameters(rank) for rank in range(shard)]
    ranks.each(ParamGroup.reshard_post_forward)
    assert states(ranks) == {SMALLER}
    assert all(full_nbytes(group) == {0} for group in ranks.groups)
    for rank in range(shard):
        for param, values in zip(ranks.parameters(rank), whole[rank], strict=True):
            assert isinstance(param, DTensor)
            assert param.device_mesh.mesh.shape == (shard // smaller, smaller)
            dim = 0 if values.dim() else None
            expected = chunk_of(values, dim, rank % smaller, smaller)
            assert same_bits(local_of(param), expected)
    ranks.each(ParamGroup.unshard)
    ranks.wait()
    assert ranks.wire().kinds == ["all_gather"], "the second gather must stay among neighbours"
    waiting = [group.buffers.post_forward.buffer for group in ranks.groups]
    assert [w.flat.untyped_storage().nbytes() for w in waiting if w is not None] == [0] * shard
    for rank in range(shard):
        now = ranks.parameters(rank)
        assert all(new is old for new, old in zip(now, unsharded[rank], strict=True))
        assert all(same_bits(n, w) for n, w in zip(now, whole[rank], strict=True))
    ranks.reshard()
    assert states(ranks) == {SHARDED}
    assert all(full_nbytes(group) == {0} for group in ranks.groups)


def test_from_the_smaller_mesh_back_to_the_whole_axis() -> None:
    ranks = linear(4)
    ranks.each(lambda group: group.reshard_to(2))
    ranks.gather()
    ranks.each(ParamGroup.reshard_post_forward)
    ranks.reshard()
    assert states(ranks) == {SHARDED}
    waiting = [group.buffers.post_forward.buffer for group in ranks.groups]
    assert [w.flat.untyped_storage().nbytes() for w in waiting if w is not None] == [0] * 4
    ranks.gather()
    assert ranks.wire().kinds == ["all_gather"] * 2
    assert_whole(ranks)


def test_without_a_smaller_mesh_parameters_reshard_fully() -> None:
    ranks = linear(2)
    ranks.gather()
    ranks.each(ParamGroup.reshard_post_forward)
    assert states(ranks) == {SHARDED}


# --- reduction ------------------------------------------------------------------------------------


def whole_gradients(ranks: LoopbackGroup) -> list[dict[str, torch.Tensor]]:
    """Give every trainable unsharded parameter a gradient of small whole numbers."""
    given = []
    for rank, module in enumerate(ranks.modules):
        torch.manual_seed(50 + rank)
        grads = {}
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.grad = torch.randint(-4, 5, param.shape).to(param.dtype)
                grads[name] = param.grad
        given.append(grads)
    return given


@KINDS
def test_reduced_gradients_are_chunks_of_the_mean(case: str) -> None:
    ranks = build(case)
    ranks.gather()
    unsharded = [dict(module.named_parameters()) for module in ranks.modules]
    given = whole_gradients(ranks)
    ranks.reshard()
    ranks.reduce()
    count = len(ranks.groups)
    for group, module in zip(ranks.groups, ranks.modules, strict=True):
        by_name = {param.fqn: param for param in group.params}
        for name, param in module.named_parameters():
            if not param.requires_grad:
                assert param.grad is None
                continue
            total = sum(grads[name].double() for grads in given) / count
            layout = by_name[name].placement.layout
            expected = chunk_of(total, layout.dim, group.data.shard.rank, layout.size)
            assert isinstance(param.grad, DTensor)
            assert param.grad.dtype == param.dtype
            assert param.grad.placements == param.placements
            assert param.grad.shape == param.shape
            torch.testing.assert_close(
                local_of(param.grad).double(), expected, rtol=1e-2, atol=1e-6
            )
    assert all(p.grad is None for params in unsharded for p in params.values())


def test_collectives_of_a_reduction() -> None:
    ranks = linear(3, replicate=2)
    ranks.gather()
    whole_gradients(ranks)
    ranks.reduce()
    assert ranks.wire().kinds == ["all_gather", "reduce_scatter"]
    assert ranks.replicate_wire().kinds == ["all_reduce"]
    for rank in range(3):
        for one, other in zip(
            ranks.groups[rank].params, ranks.groups[rank + 3].params, strict=True
        ):
            assert same_bits(local_of(one.sharded.grad), local_of(other.sharded.grad))


def test_who_had_a_gradient_travels_along() -> None:
    """The weight on one rank only, the bias on none: a quarter of the sum, and still None."""
    ranks = linear(4)
    ranks.gather()
    ranks.modules[2].weight.grad = torch.full((5, 4), 8.0)
    ranks.reduce()
    assert_reduced(ranks, 2.0)


def test_ranks_without_any_gradient_join_the_collective() -> None:
    ranks = linear(2)
    ranks.gather()
    ranks.reduce()
    assert ranks.wire().kinds == ["all_gather", "reduce_scatter"]
    assert_no_gradients(ranks)


def test_gradients_of_two_backwards_add_up() -> None:
    ranks = linear(2)
    for _ in range(2):
        ranks.gather()
        give(ranks, 1.0)
        ranks.reshard()
        ranks.reduce()
    assert_reduced(ranks, 2.0)


def test_accumulation_without_sync_sends_nothing_and_adds_up_exactly() -> None:
    """In the reduce dtype: 1 + 2^-9 four times is lost in bf16, not in fp32."""
    ranks = linear(2, policy=LOW)
    for step in range(4):
        ranks.gather()
        for module in ranks.modules:
            grad = torch.full((5, 4), 1.0 if step % 2 else 2.0**-9).bfloat16()
            (module.weight * grad).sum().backward()
        ranks.reshard()
        ranks.reduce(Settings(reduce_grads=step == 3, all_reduce_grads=step == 3))
        if step < 3:
            assert "reduce_scatter" not in ranks.wire().kinds
            assert_no_gradients(ranks)
    assert_reduced(ranks, 2.0 + 2.0**-8)
    for group in ranks.groups:
        assert group.params[0].sharded.grad.dtype == torch.float32


def test_without_all_reduce_partial_sums_wait() -> None:
    ranks = linear(2, replicate=2)
    for last in (False, True):
        ranks.gather()
        for rank, module in enumerate(ranks.modules):
            module.weight.grad = torch.full((5, 4), float(1 + rank))
        ranks.reshard()
        ranks.reduce(Settings(all_reduce_grads=last))
        if not last:
            assert ranks.replicate_wire().kinds == []
            assert_no_gradients(ranks)
    assert ranks.replicate_wire().kinds == ["all_reduce"]
    assert_reduced(ranks, 2 * (1 + 2 + 3 + 4) / 4)


def test_discard_forgets_unreduced_gradients() -> None:
    ranks = linear(2, policy=LOW)
    ranks.gather()
    whole_gradients(ranks)
    ranks.reduce(Settings(reduce_grads=False))
    assert all(group.reducer.has_local_gradients for group in ranks.groups)
    ranks.each(lambda group: group.reducer.discard())
    assert not any(group.reducer.has_local_gradients for group in ranks.groups)
    ranks.reduce()
    assert_no_gradients(ranks)


@pytest.mark.parametrize("ranks_count", [2, 3])
def test_fp16_gradients_near_the_end_of_the_range_do_not_overflow(ranks_count: int) -> None:
    ranks = LoopbackGroup(nn.Linear(4, 5).half(), 2, replicate=ranks_count)
    ranks.gather()
    for module in ranks.modules:
        module.weight.grad = torch.full((5, 4), 30000.0, dtype=torch.float16)
    ranks.reduce()
    for group in ranks.groups:
        torch.testing.assert_close(
            local_of(group.params[0].sharded.grad).float(),
            torch.full(local_of(group.params[0].sharded).shape, 30000.0),
            rtol=2e-3,
            atol=0,
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beside_it", [False, True])
def test_complex_gradients_keep_their_imaginary_part(
    beside_it: bool, reduce_dtype: torch.dtype | None
) -> None:
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
    if beside_it:
        model.real = nn.Parameter(torch.zeros(3))
    ranks = LoopbackGroup(model, 2, policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    ranks.gather()
    for rank, module in enumerate(ranks.modules):
        module.wave.grad = torch.full((3, 2), complex(1 + rank, 2 + rank), dtype=torch.complex64)
        if beside_it:
            module.real.grad = torch.full((3,), 2.0, dtype=module.real.grad_dtype)
    ranks.reduce()
    for group in ranks.groups:
        assert local_of(group.params[0].sharded.grad).eq(complex(1.5, 2.5)).all()
        assert all(local_of(param.sharded.grad).eq(2.0).all() for param in group.params[1:])


def test_fp32_is_scaled_once_exactly() -> None:
    ranks = linear(3)
    ranks.gather()
    give(ranks, 0.1)
    ranks.reduce()
    assert_reduced(ranks, (torch.tensor(0.1) + torch.tensor(0.1) + torch.tensor(0.1)) / 3)


# --- what users do between steps ------------------------------------------------------------------


def replace_everything(module: nn.Module, how: str) -> nn.Module:
    if how == "to":
        return module.double()
    if how == "assign":
        state = {name: value * 3.0 for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        return module
    if how == "whole parameters":
        for name, param in list(module.named_parameters()):
            value = torch.full(param.shape, 0.5, dtype=param.dtype)
            setattr(module, name, nn.Parameter(value))
        return module
    module.to_empty(device="cpu")
    for param in module.parameters():
        nn.init.constant_(param, 0.25)
    return module


@pytest.mark.parametrize("how", ["to", "assign", "whole parameters", "to_empty"])
def test_replaced_parameters_are_adopted(how: str) -> None:
    ranks = linear(3)
    ranks.gather()
    ranks.reshard()
    for module in ranks.modules:
        replace_everything(module, how)
    registered = [ranks.parameters(rank) for rank in range(3)]
    seen: list[str] = []
    with events.listen(lambda event: seen.append(event.kind)):
        ranks.gather()
    assert seen[:3] == ["adopt"] * 3
    expected = {
        "to": ranks.original.weight.double(),
        "assign": ranks.original.weight * 3.0,
        "whole parameters": torch.full((5, 4), 0.5),
        "to_empty": torch.full((5, 4), 0.25),
    }[how]
    for module in ranks.modules:
        assert same_bits(module.weight, expected)
    ranks.reshard()
    for rank, params in enumerate(registered):
        now = ranks.parameters(rank)
        assert all(isinstance(param, DTensor) for param in now)
        if how != "whole parameters":  # the optimizer may hold what `.to()` left
            assert all(new is old for new, old in zip(now, params, strict=True))
    seen.clear()
    with events.listen(lambda event: seen.append(event.kind)):
        ranks.gather()
    assert "adopt" not in seen


def test_what_cannot_be_adopted_is_refused_and_named() -> None:
    ranks = linear(1)
    module = ranks.modules[0]
    module.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(StateError, match=r"weight was replaced by Parameter of shape \(2, 2\)"):
        ranks.gather()
    module.weight = nn.Parameter(torch.zeros(5, 4))
    ranks.gather()
    assert module.weight.eq(0).all()


def test_requires_grad_is_carried_over() -> None:
    ranks = linear(2)
    ranks.gather()
    ranks.reshard()
    set_trained(ranks, False)
    ranks.gather()
    for module in ranks.modules:
        assert not module.weight.requires_grad
        assert module.bias.requires_grad
        module.bias.grad = torch.ones(5)
    ranks.reduce()
    for group in ranks.groups:
        assert group.params[0].sharded.grad is None
        assert local_of(group.params[1].sharded.grad).eq(1.0).all()
    ranks.reshard()
    set_trained(ranks, True)
    ranks.gather()
    assert all(module.weight.requires_grad for module in ranks.modules)


def waiting_gradients(**kwargs: Any) -> LoopbackGroup:
    """Leave gradients of 1 without sync: autograd keeps them in the unsharded parameters."""
    ranks = linear(2, **kwargs)
    ranks.gather()
    give(ranks, 1.0, 1.0)
    ranks.reshard()
    ranks.reduce(Settings(reduce_grads=False))
    return ranks


def test_gradients_that_wait_for_sync_survive_a_new_plan() -> None:
    ranks = waiting_gradients()
    for module in ranks.modules:
        replace_everything(module, "to")
    ranks.gather()
    for module in ranks.modules:
        module.weight.grad.add_(2.0)
    ranks.reshard()
    ranks.reduce()
    assert_reduced(ranks, 3.0, 1.0)
    for group in ranks.groups:
        assert group.params[0].sharded.grad.dtype == group.params[0].sharded.dtype


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), LOW], ids=["fp32", "bf16"])
def test_freezing_while_gradients_wait_is_refused(
    policy: MixedPrecisionPolicy,
) -> None:
    """In fp32 they wait in the unsharded parameters, and in bf16 as sums in the reduce dtype."""
    ranks = waiting_gradients(policy=policy)
    set_trained(ranks, False)
    for group in ranks.groups:
        for _ in range(2):  # asking twice does not make it legal
            with pytest.raises(StateError, match="run a backward with gradient sync"):
                group.inspect()
        assert group.state is SHARDED
    set_trained(ranks, True)
    ranks.gather()
    ranks.reduce()
    assert_reduced(ranks, 1.0, 1.0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_values_of_their_own(how: str) -> None:
    ranks = linear(1)
    ranks.gather()
    ranks.reshard()
    source = (ranks.modules[0], ranks.groups[0])
    if how == "deepcopy":
        module, group = copy.deepcopy(source)
    else:
        data = ranks.groups[0].data
        object.__setattr__(data, "shard", type(data.shard)("shard", 1, 0, None))
        module, group = pickle.loads(pickle.dumps(source))
    with torch.no_grad():
        ranks.modules[0].weight.zero_()
    group.inspect()
    group.unshard()
    group.wait_for_unshard()
    assert same_bits(module.weight, ranks.original.weight)
    group.reshard()
    assert isinstance(module.weight, DTensor)


def test_a_group_gives_parameters_up_to_another() -> None:
    ranks = linear(2)
    others = LoopbackGroup(nn.Linear(3, 2), 2)
    weights = [module.weight for module in ranks.modules]
    for group, other in zip(ranks.groups, others.groups, strict=True):
        taken = [group.params[0]]
        group.release(taken)
        other.shard(taken)
    for module, weight in zip(ranks.modules, weights, strict=True):
        assert module.weight is weight
    others.gather()
    for module in ranks.modules:
        assert same_bits(module.weight, ranks.original.weight)
        assert isinstance(module.bias, DTensor)
    ranks.gather()
    assert_whole(ranks, "bias")
    others.reshard()
    for module, weight in zip(ranks.modules, weights, strict=True):
        assert module.weight is weight
        assert not isinstance(module.bias, DTensor)


def test_parameters_of_one_group_on_two_devices_are_refused() -> None:
    ranks = linear(1)
    module = ranks.modules[0]
    module.weight = nn.Parameter(torch.empty(5, 4, device="meta"))
    with pytest.raises(StateError, match=r"weight on meta.*bias on cpu"):
        ranks.gather()
