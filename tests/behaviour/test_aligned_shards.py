"""Promise: with `fsdp2.Aligned` no shard cuts a block of a parameter, and all else is as ever.

The reference is an unsharded model on the global batch.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import ConfigError, UnsupportedError
from fsdp2._core.base import torch_dtensor
from fsdp2._core.comm.wire import DefaultAllGather
from fsdp2._core.params.deals import start_anew
from fsdp2.optim import EMA
from tests.kit.in_turn import advance
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import (
    ROWS,
    Pair,
    assert_same,
    assert_same_parameters,
    assert_values,
    local_loss,
    make_mesh,
    names_of,
    shard,
    values_of,
    whole,
)
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import Transformer, Twin, mesh_of, sequence_parallel, tokens

pytestmark = pytest.mark.skipif(
    not torch_dtensor.asks_subclasses(), reason="this torch asks no subclass of DTensor"
)


def blocks(param: nn.Parameter) -> fsdp2.Aligned | None:
    """Blocks of four rows, of matrices and vectors."""
    return fsdp2.Aligned(0, multiple_of=4) if param.dim() else None


def columns(param: nn.Parameter) -> fsdp2.Aligned | None:
    """Blocks of three columns of matrices; everything else in rows."""
    return fsdp2.Aligned(-1, multiple_of=3) if param.dim() > 1 else None


def elements(param: nn.Parameter) -> fsdp2.Aligned | None:
    """Blocks of eight elements, in whatever rows they lie."""
    return fsdp2.Aligned(None, multiple_of=8) if param.dim() else None


def mixed(param: nn.Parameter) -> Any:
    """Blocks, whole ones and rows in one group."""
    choices = [fsdp2.Aligned(0, multiple_of=2), fsdp2.Whole(), None]
    return choices[param.numel() % 3] if param.dim() else None


def spans(param: Tensor) -> list[tuple[int, int]]:
    """Return what each rank has: the elements of the flattened tensor, from the first to the last.

    By what it holds itself, and not by what the placement says.
    """
    numels: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numels, param.to_local().numel())
    ends = [sum(numels[: rank + 1]) for rank in range(len(numels))]
    return [(end - numel, end) for end, numel in zip(ends, numels, strict=True)]


SHAPES = [(13, 5), (29,), (1, 7), (16, 3), (8, 4), (13, 29), (40, 2), (64, 8), (96,)]


def aligned(dim: int | None, count: int, **kwargs: Any) -> list[tuple[Any, int]]:
    """Return parameters of many shapes that are whole what they were, and elements of a row."""
    model = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
    expected = values_of(model)
    choice = fsdp2.Aligned(dim, multiple_of=count, **kwargs)
    fsdp2.fully_shard(model, mesh=make_mesh(), shard_placement_fn=lambda _: choice)
    assert_values(model, expected)
    for name, param in model.named_parameters():
        assert torch.equal(whole(pickle.loads(pickle.dumps(param.data))), expected[name])
    return [(p, p.numel() // p.shape[0] if dim == 0 else 1) for p in model.parameters()]


@ranks(2, 3, slow(4))
def test_no_rank_has_a_part_of_a_block() -> None:
    """Every shard ends where a block does, or the tensor; ranks differ by one block at most."""
    for dim, count in ((0, 4), (0, 7), (None, 8), (None, 30)):
        for param, row in aligned(dim, count):
            block = count * row
            found = spans(param)
            assert found[-1][1] == param.numel()
            for _, end in found:
                assert end % block == 0 or end == param.numel(), (dim, count, param.shape, found)
            counts = [-(-(end - start) // block) for start, end in found]
            if dim == 0 and type(param.placements[0]) is not Shard:
                assert max(counts) - min(counts) <= 1


@ranks(3)
def test_no_rank_has_less_than_is_asked_for() -> None:
    """The short block at the end lies with the one before it; what is short is whole somewhere."""
    for dim, count, least in ((0, 4, 10), (None, 8, 32), (None, 16, 16), (0, 1, 5)):
        for param, row in aligned(dim, count, at_least=least):
            for start, end in spans(param):
                assert start % (count * row) == 0 or start == param.numel()
                assert start == end or end - start >= min(least * row, param.numel())


HARD = ["few_rows", "non_contiguous", "partly_frozen", "tied_lm", "unused_parts", "one_row"]
HARD += ["stack", "tied_blocks", "scalars", "mixed_dtypes"]


@pytest.mark.parametrize("choose", [blocks, columns, elements, mixed])
@pytest.mark.parametrize("case", with_slow(HARD, ["mixed_dtypes", "non_contiguous"]))
@ranks(slow(2), 3, slow(4))
def test_a_model_is_trained_alike(choose: Any, case: str) -> None:
    """Losses, gradients and parameters are those of one process."""
    Pair(case, shard_placement_fn=choose).train(3)


@ranks(4)
def test_replicas_and_tensor_parallelism() -> None:
    """Over two axes, and beside tensor parallelism on another dim."""
    Pair("stack", mesh=make_mesh(2, 2), shard_placement_fn=blocks).train(3)
    Pair("few_rows", mesh=make_mesh(2, 2), shard_placement_fn=columns).train(3)

    def other_dim(param: nn.Parameter) -> fsdp2.Aligned | None:
        if not isinstance(param, DTensor) or param.dim() < 2:
            return None
        placement = param.placements[0]
        dim = 1 - placement.dim if isinstance(placement, Shard) else 0
        return fsdp2.Aligned(dim, multiple_of=3)

    mesh = mesh_of(data=2, tensor=2)
    Twin(Transformer(), mesh, sequence_parallel, batch=tokens, shard_placement_fn=other_dim).train(
        3
    )
    weight = distribute_tensor(torch.zeros(14, 6), mesh["tensor"], [Shard(0)])
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    with pytest.raises(ConfigError, match="weight is dealt in blocks of 4 rows"):
        fsdp2.fully_shard(model, mesh=mesh["data"], shard_placement_fn=blocks)


ADAMW = functools.partial(torch.optim.AdamW, eps=1e-4)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "loop": lambda params, lr: ADAMW(params, lr / 10, foreach=False),
    "foreach": lambda params, lr: ADAMW(params, lr / 10, foreach=True),
    "fused": lambda params, lr: ADAMW(params, lr / 10, fused=True, amsgrad=True),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr / 10, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", with_slow(OPTIMIZERS, ["foreach", "fused"]))
@ranks(3)
def test_torchs_own_optimizers_step_where_the_elements_are(name: str) -> None:
    """Their states lie as the parameters do; norms are those of the whole model."""
    for choose in (blocks, columns):
        pair = Pair("stack", optimizer=OPTIMIZERS[name], shard_placement_fn=choose)
        for order in (2.0, 1.0, float("inf")):
            pair.backward()
            for most, kind in ((1e9, order), (0.5, 2.0)):
                norms = [
                    torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type=kind)
                    for model in (pair.model, pair.reference)
                ]
                assert_same(whole(norms[0]), norms[1], "norm", 1e-6)
            pair.step()
        pair.check()
        for param in pair.model.parameters():
            for key, value in pair.optimizer.state[param].items():
                if value.dim():
                    assert value.to_local().shape == param.to_local().shape, key  # type: ignore[attr-defined]


@ranks(3)
def test_our_own_optimizers_clipping_averages_and_scaling() -> None:
    """`optim.local`, `clip_grad_norm_`, `EMA` and torch's scaler see what they always see."""

    def adamw(params: Any, **_: Any) -> Any:
        params = list(params)
        if any(isinstance(param, DTensor) for param in params):
            return fsdp2.optim.local(torch.optim.AdamW, params, lr=0.01, fused=True)
        return torch.optim.AdamW(params, lr=0.01)

    pair = Pair("stack", optimizer=adamw, shard_placement_fn=blocks)
    averages = EMA(pair.model, 0.5), EMA(pair.reference, 0.5)
    for _ in range(3):
        pair.backward()
        norm = fsdp2.clip_grad_norm_(pair.model.parameters(), 0.5)
        assert_same(
            whole(norm), torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.5), "norm"
        )
        pair.step()
        for average in averages:
            average.update()
    pair.check()
    found, expected = (average.state_dict() for average in averages)
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.dim():
            assert_same(found[name], value, name, 1e-6)


@ranks(3)
def test_whole_matrices_step() -> None:
    """`optim.whole` brings blocks together as it does rows."""

    def muon(params: Any, **_: Any) -> Any:
        params = [param for param in params if param.dim() == 2]
        if any(isinstance(param, DTensor) for param in params):
            return fsdp2.optim.whole(torch.optim.Muon, params, lr=0.1)
        return torch.optim.Muon(params, lr=0.1)

    case = CASES["few_rows"]
    model = shard(seeded(case.build), case, shard_placement_fn=blocks)
    plain = seeded(case.build)
    ours, theirs = muon(model.parameters()), muon(plain.parameters())
    for _ in range(3):
        local_loss(model, case).backward()
        for param, leaf in zip(model.parameters(), plain.parameters(), strict=True):
            leaf.grad = None if param.grad is None else whole(param.grad).clone()
        advance(ours, theirs)
        assert_values(model, {n: leaf for n, leaf in plain.named_parameters() if leaf.dim() == 2})
        model.zero_grad()


def stepped(
    seed: int, choose: Any, make: Callable[..., torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, after a step."""
    case = CASES["stack"]
    model = shard(seeded(case.build, seed), case, shard_placement_fn=choose)
    optimizer = make(model.parameters(), lr=0.1)
    local_loss(model, case).backward()
    optimizer.step()
    return model, optimizer


def assert_same_moments(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for ours, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        own, other = found[1].state[ours]["exp_avg"], expected[1].state[theirs]["exp_avg"]
        assert torch.equal(whole(own), whole(other))


@ranks(3)
def test_states_go_through_dcp_and_come_back_in_any_placement(tmp_path: Path) -> None:
    """Files hold whole tensors with right offsets; optimizer states too; full states as well."""
    model, optimizer = stepped(1, blocks, torch.optim.AdamW)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=str(tmp_path / "dcp"))
    expected = values_of(model)
    plain = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": plain}, checkpoint_id=str(tmp_path / "dcp"))
    for name, value in expected.items():
        assert torch.equal(plain[name], value), name
    for choose in (columns, None, mixed, blocks):
        other, its = stepped(2, choose, torch.optim.AdamW)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
        dcp.load(states, checkpoint_id=str(tmp_path / "dcp"))
        set_model_state_dict(other, states["model"])
        set_optimizer_state_dict(other, its, states["optimizer"])
        assert_values(other, expected)
        assert_same_moments((other, its), (model, optimizer))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in expected.items():
        assert torch.equal(full[name], value), name
    other, _ = stepped(3, blocks, torch.optim.AdamW)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if dist.get_rank() == 0 else {}, options=options)
    assert_values(other, expected)


@ranks(3)
def test_our_checkpoints_copies_and_whole_parameters(tmp_path: Path) -> None:
    """Sharded and full states load again; so do copies, pickles and what `full_params` yields."""
    local = functools.partial(fsdp2.optim.local, torch.optim.AdamW)
    model, optimizer = stepped(1, blocks, local)
    fsdp2.checkpoint.save(tmp_path / "ours", model, optimizer)
    expected = values_of(model)
    for choose in (columns, elements, None):
        other, its = stepped(2, choose, local)
        fsdp2.checkpoint.load(tmp_path / "ours", other, its)
        assert_values(other, expected)
        assert_same_moments((other, its), (model, optimizer))
    full = fsdp2.checkpoint.full_state(model, rank0_only=True)
    if dist.get_rank() == 0:
        assert all(torch.equal(full["model"][name], expected[name]) for name in expected)
    other, _ = stepped(3, columns, local)
    fsdp2.checkpoint.load_full_state(other, full)
    assert_values(other, expected)
    with fsdp2.summon_full_params(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = {name: value * 2 for name, value in expected.items()}
    for max_bytes in (100, 1 << 20):
        for name, value in fsdp2.full_params(model, max_bytes=max_bytes):
            assert torch.equal(value, doubled[name]), name
    assert_values(copy.deepcopy(model), doubled)
    for from_rank0 in (False, True):
        with torch.device("meta"):
            late = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fsdp2.fully_shard(late, mesh=make_mesh(), shard_placement_fn=blocks)
        torch.manual_seed(4)
        fsdp2.materialize(late, "cpu", sync_from_rank0=from_rank0)
        torch.manual_seed(4)
        assert_same_parameters(late, nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    for param in model.parameters():
        again = pickle.loads(pickle.dumps(param.placements))
        assert [str(p) for p in again] == [str(p) for p in param.placements]


@ranks(3)
def test_low_precision_offload_accumulation_and_skipped_reductions() -> None:
    """The other ways of a step: each is compared with rows of the same dtypes."""
    case = CASES["stack"]
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    narrow, offload = {"mp_policy": policy}, {"offload_policy": fsdp2.CPUOffloadPolicy(False)}
    settings: list[dict[str, Any]] = [narrow, offload, narrow | offload]
    for kwargs in (*settings, {"reshard_after_forward": False}):
        dealt = shard(seeded(case.build), case, shard_placement_fn=mixed, **kwargs)
        rows = shard(seeded(case.build), case, **kwargs)
        for step in range(4):
            batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
            for model in (dealt, rows):
                model.set_requires_gradient_sync(step % 2 == 1)
                loss_of(model(*batch.args, **batch.kwargs)).backward()
            for name, param in rows.named_parameters():
                ours = names_of(dealt)[name]
                assert (ours.grad is None) == (param.grad is None), name
                if param.grad is not None:
                    assert_same(whole(ours.grad), whole(param.grad), name, 1e-5)


@ranks(2)
def test_what_is_not_for_aligned_parameters_is_told() -> None:
    """Each says which parameter, and what to do; nothing was changed before."""
    mesh = make_mesh()
    model = fsdp2.fully_shard(nn.Linear(3, 13), mesh=mesh, shard_placement_fn=blocks)
    calls: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: model.set_custom_all_gather(DefaultAllGather()), ConfigError),
        (lambda: fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16)), ConfigError),
        (lambda: fsdp2.compile(model), UnsupportedError),
    ]
    for call, error in calls:
        with pytest.raises(error, match="weight is dealt in blocks of 4 rows"):
            call()
    weight = model.weight
    assert isinstance(weight, DTensor)
    for view in (lambda: weight[3], lambda: weight.view(-1), lambda: weight.diagonal()):
        with pytest.raises(UnsupportedError, match="does not support this view"):
            view()
    with pytest.raises(UnsupportedError, match="torch's own functions cannot distribute"):
        weight.placements[0]._split_tensor(torch.zeros(4), 2)  # type: ignore[attr-defined]
    for wrong in ({"dim": 1.5}, {"dim": 0, "multiple_of": 0}, {"dim": 0, "at_least": 2.0}):
        with pytest.raises(ConfigError, match="Aligned"):
            fsdp2.Aligned(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"weight: shard_placement_fn returned Aligned\(2\)"):
        fsdp2.fully_shard(nn.Linear(3, 5), mesh=mesh, shard_placement_fn=lambda _: fsdp2.Aligned(2))


@ranks(4)
def test_a_smaller_mesh_cannot_keep_aligned_parameters() -> None:
    with pytest.raises(ConfigError, match="weight is dealt in blocks of 4 rows"):
        fsdp2.fully_shard(
            nn.Linear(3, 10), mesh=make_mesh(), shard_placement_fn=blocks, reshard_after_forward=2
        )


@ranks(3)
def test_blocks_that_are_left_over_go_round_and_even_ones_are_plain_shards() -> None:
    """Calls go on where the ones before left off; where chunks cut no block, nothing changes."""
    mesh = make_mesh()
    start_anew(mesh.get_group())  # other tests' models, that never ran, do not count
    layers = nn.Sequential(*(nn.Linear(4, 16, bias=False) for _ in range(3)))
    rows = [0, 0, 0]
    for layer in layers:
        fsdp2.fully_shard(layer, mesh=mesh, shard_placement_fn=blocks)
        found = [(end - start) // 4 for start, end in spans(layer.weight)]  # type: ignore[arg-type]
        assert sorted(found) == [4, 4, 8]
        rows = [one + more for one, more in zip(rows, found, strict=True)]
    assert rows == [16, 16, 16]
    (unit,) = fsdp2.units(layers[1])
    (info,) = unit.groups[0].shards
    assert (info.block, info.owner, info.dim) == (4, None, 0)
    even = fsdp2.fully_shard(nn.Linear(4, 24), mesh=mesh, shard_placement_fn=blocks)
    assert [type(p) for param in even.parameters() for p in param.placements] == [Shard, Shard]  # type: ignore[attr-defined]
    odd = nn.Module()
    odd.none, odd.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(()))
    fsdp2.fully_shard(odd, mesh=mesh, shard_placement_fn=lambda _: fsdp2.Aligned(None))


@ranks(3)
def test_operations_on_aligned_tensors_are_those_of_whole_ones() -> None:
    """What works element by element stays where it is; anything else is done on the whole."""
    model = fsdp2.fully_shard(
        nn.Linear(6, 13), mesh=make_mesh(), shard_placement_fn=lambda _: fsdp2.Aligned(0, 4)
    )
    for weight in (model.weight, model.weight.detach().T):
        full = whole(weight).clone()
        assert isinstance(weight, DTensor)
        other = torch.arange(full.shape[1]).float()
        operations: list[Callable[[Any], Any]] = [
            lambda w: w * 2 + w,
            lambda w: w.sum(),
            lambda w: w.mean(0),
            lambda w: w.abs().max(),
            lambda w: torch.zeros_like(w),
            lambda w: w.new_zeros(w.shape),
            lambda w: w.to(torch.float64),
            lambda w: torch.where(w > 0, w, 0.0),
            lambda w: torch.equal(w, w),
            lambda w, other=other: w * other,
            lambda w: w.unsqueeze(1),
            lambda w: w.view(w.shape),
            lambda w: w.mT,
        ]
        norms: list[Callable[[Any], Any]] = [
            lambda w: w.norm(),
            lambda w: torch.stack(torch._foreach_norm([w, w], 1.0)),
            lambda w: torch.linalg.vector_norm(w, 0),
            lambda w: torch.linalg.vector_norm(w, float("-inf")),
        ]
        with torch.no_grad():
            for operation in operations:
                found, expected = operation(weight), operation(full)
                if isinstance(expected, Tensor):
                    assert torch.equal(whole(found), expected)
                else:
                    assert found == expected
            for operation in norms:
                torch.testing.assert_close(whole(operation(weight)), operation(full))
            copied = weight.clone()
            copied.normal_()
            copied.copy_(weight)
            assert torch.equal(whole(copied), full)
            assert torch.equal(whole(copied.redistribute(placements=[Shard(0)])), full)
            weight.T.add_(1)
            assert torch.equal(whole(weight), full + 1)
    weight = model.weight
    (weight.full_tensor() ** 2).sum().backward()
    assert torch.equal(whole(weight.grad), 2 * whole(weight))


@pytest.mark.parametrize("kind", ["whole", "rows", "replicated"])
@ranks(3)
def test_gradients_that_users_put_there_are_added_to(kind: str) -> None:
    """What they put there, in any placement, is a summand, and is not written to itself."""
    mesh, seen = make_mesh(), torch.arange(52.0).view(13, 4)
    build = functools.partial(nn.Linear, 4, 13)
    model, plain = seeded(build), seeded(build)
    fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=blocks)
    model.weight.grad_dtype = None
    given: Tensor = seen.clone()
    if kind != "whole":
        placement = Shard(0) if kind == "rows" else Replicate()
        given = distribute_tensor(seen.clone(), mesh, [placement])
    model.weight.grad, plain.weight.grad = given, seen.clone()
    x = torch.randn(3, 4)
    for one in (model, plain):
        one(x).sum().backward()
    assert_same(whole(model.weight.grad), plain.weight.grad, "gradient", 1e-6)
    assert torch.equal(whole(given), seen)


@ranks(3)
def test_complex_parameters_step() -> None:
    """Optimizers view them as real numbers, where they are."""
    build = functools.partial(nn.Linear, 4, 13, dtype=torch.complex64)
    model, plain = seeded(build), seeded(build)
    fsdp2.fully_shard(model, mesh=make_mesh(), shard_placement_fn=blocks)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.complex64)
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one(x).abs().sum().backward()
            advance(optimizer)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole(names_of(model)[name]), param.detach())


@ranks(2)
def test_norms_of_a_list_in_another_dtype() -> None:
    """A rank without rows tells its norm in this dtype, too."""
    model = fsdp2.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: fsdp2.Whole(0))
    for order in (0, 2):
        for norm in torch._foreach_norm(list(model.parameters()), order, dtype=torch.float64):
            assert norm.dtype is norm.full_tensor().dtype is torch.float64
