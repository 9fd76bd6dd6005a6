"""Promise: with `fsdp2.Whole` a parameter lies whole on one rank, and all else is as ever.

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
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import ConfigError, UnsupportedError
from fsdp2._core.base import torch_dtensor
from fsdp2._core.comm.wire import DefaultAllGather
from fsdp2._core.params.deals import start_anew
from fsdp2.optim import EMA
from tests.behaviour.test_whole import both
from tests.kit.in_turn import advance, assert_tensors, shard_each
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import (
    ROWS,
    Pair,
    assert_same,
    assert_same_parameters,
    backward_on,
    bits,
    make_mesh,
    names_of,
    shard_owner,
    sharded,
    whole,
)
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import Transformer, Twin, mesh_of, sequence_parallel, tokens

needs_subclasses = pytest.mark.skipif(
    not torch_dtensor.asks_subclasses(), reason="this torch asks no subclass of DTensor"
)
pytestmark = needs_subclasses


@ranks(2)
def test_a_torch_that_asks_no_subclass_is_told() -> None:
    """torch 2.11 would compute with chunks of wrong sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dtensor, "asks_subclasses", lambda: False)
        with pytest.raises(UnsupportedError, match=r"weight: .* Use torch 2\.12 or later"):
            fsdp2.fully_shard(nn.Linear(3, 5), mesh=make_mesh(), shard_placement_fn=matrices)


def matrices(param: nn.Parameter) -> fsdp2.Whole | None:
    """Let matrices lie whole, and everything else in rows."""
    return fsdp2.Whole() if param.dim() > 1 else None


def everything(param: nn.Parameter) -> fsdp2.Whole:
    return fsdp2.Whole()


HARD = ["few_rows", "non_contiguous", "partly_frozen", "tied_lm", "unused_parts", "one_row"]
HARD += ["stack", "tied_blocks", "scalars", "mixed_dtypes"]


def owned_by(rank: int) -> Any:
    """Return a layer that lies whole on a rank."""
    place = lambda param: fsdp2.Whole(owner=rank)  # noqa: E731  # short
    return fsdp2.fully_shard(nn.Linear(4, 5), mesh=make_mesh(), shard_placement_fn=place)


def owner_of(param: Tensor) -> int | None:
    return next((o for o in map(shard_owner, param.placements) if o is not None), None)


@pytest.mark.parametrize("choose", [matrices, everything])
@pytest.mark.parametrize("case", with_slow(HARD, ["few_rows", "mixed_dtypes", "tied_lm"]))
@ranks(slow(2), 3, slow(4))
def test_a_model_is_trained_alike(choose: Any, case: str) -> None:
    """Each owner has all rows, the others none; losses, gradients and parameters are the same."""
    pair = Pair(case, shard_placement_fn=choose)
    rank = dist.get_rank()
    owned = [p for p in pair.model.parameters() if owner_of(p) is not None]
    assert owned
    for param in owned:
        rows = param.shape[0] if owner_of(param) == rank else 0
        assert param.to_local().shape == (rows, *param.shape[1:])
    pair.train(3)


@ranks(4)
def test_replicas_and_tensor_parallelism() -> None:
    """Over two axes, and beside tensor parallelism, an owner has all that its line has."""
    Pair("stack", mesh=make_mesh(2, 2), shard_placement_fn=matrices).train(3)
    mesh = mesh_of(data=2, tensor=2)
    twin = Twin(Transformer(), mesh, sequence_parallel, batch=tokens, shard_placement_fn=matrices)
    twin.train(3)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, mesh, {"0": style})

    # a column that one tensor-parallel rank has none of
    draw = functools.partial(torch.randint, 30, (ROWS, 5))
    table = nn.Sequential(nn.Embedding(30, 1))
    Twin(table, mesh, parallelize, batch=draw, shard_placement_fn=matrices).train()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "loop": lambda params, **_: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "foreach": lambda params, **_: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params, **_: torch.optim.AdamW(params, lr=0.01, fused=True, amsgrad=True),
    "momentum": lambda params, **_: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "radam": lambda params, **_: torch.optim.RAdam(params, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", with_slow(OPTIMIZERS, ["foreach", "fused"]))
@ranks(3)
def test_torchs_own_optimizers_step_where_the_elements_are(name: str) -> None:
    """Their states lie as the parameters do; norms are those of the whole model."""
    pair = Pair("stack", optimizer=OPTIMIZERS[name], shard_placement_fn=matrices)
    for _ in range(3):
        pair.backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for model in (pair.model, pair.reference)
        ]
        assert_same(whole(norms[0]), norms[1], "norm", 1e-6)
        pair.step()
    pair.check()
    for param in pair.model.parameters():
        for key, value in pair.optimizer.state[param].items():
            if value.dim():
                assert owner_of(value) == owner_of(param), key
                assert value.to_local().shape == param.to_local().shape  # type: ignore[attr-defined]


@ranks(3)
def test_our_own_optimizers_clipping_averages_and_scaling() -> None:
    """`optim.local`, `clip_grad_norm_`, `EMA` and torch's scaler see what they always see."""

    def adamw(params: Any, **_: Any) -> Any:
        params = list(params)
        if any(isinstance(param, DTensor) for param in params):
            return fsdp2.optim.local(torch.optim.AdamW, params, lr=0.01, fused=True)
        return torch.optim.AdamW(params, lr=0.01)

    pair = Pair("stack", optimizer=adamw, shard_placement_fn=matrices)
    averages = EMA(pair.model, 0.5), EMA(pair.reference, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
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
    # one rank's infinity is seen by all
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    before = {name: whole(param).clone() for name, param in pair.model.named_parameters()}
    scaler.scale(pair.run(pair.model, pair.local(pair.batch()))).backward()
    owned = next(p for p in pair.model.parameters() if owner_of(p) == 1)
    if dist.get_rank() == 1:
        owned.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_tensors(pair.model.named_parameters(), before)


@ranks(3)
def test_whole_matrices_step_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optim.whole` has its matrices where they are, and gives each result to nobody."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.numel())
        return exchange(received, given, *args, **kwargs)

    case = CASES["few_rows"]
    model = sharded(case, shard_placement_fn=matrices)
    plain = seeded(case.build)
    ours, theirs = (
        both(torch.optim.Muon)([p for p in m.parameters() if p.dim() == 2], lr=0.1)
        for m in (model, plain)
    )
    monkeypatch.setattr(dist, "all_to_all_single", counted)
    for _ in range(3):
        backward_on(case, model)
        for param, leaf in zip(model.parameters(), plain.parameters(), strict=True):
            leaf.grad = None if param.grad is None else whole(param.grad).clone()
        ours.step()
        theirs.step()
        for name, leaf in plain.named_parameters():
            if leaf.dim() == 2:
                assert torch.equal(bits(whole(names_of(model)[name])), bits(leaf)), name
        model.zero_grad()
    assert sent == []


def stepped(seed: int, choose: Any, make: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer, after a step."""
    model = sharded("stack", seed, shard_placement_fn=choose)
    optimizer = make(model.parameters(), lr=0.1)
    backward_on("stack", model)
    optimizer.step()
    return model, optimizer


def assert_same_moments(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for ours, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        own, other = found[1].state[ours]["exp_avg"], expected[1].state[theirs]["exp_avg"]
        assert torch.equal(whole(own), whole(other))


@ranks(3)
def test_states_go_through_dcp_and_come_back_in_any_placement(tmp_path: Path) -> None:
    """Files hold whole tensors with right offsets; optimizer states too; full states as well."""
    model, optimizer = stepped(1, matrices, torch.optim.AdamW)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=str(tmp_path / "dcp"))
    expected = {name: whole(param).clone() for name, param in model.named_parameters()}
    plain = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": plain}, checkpoint_id=str(tmp_path / "dcp"))
    assert_tensors(expected.items(), plain)
    for choose in (everything, None, matrices):
        other, its = stepped(2, choose, torch.optim.AdamW)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
        dcp.load(states, checkpoint_id=str(tmp_path / "dcp"))
        set_model_state_dict(other, states["model"])
        set_optimizer_state_dict(other, its, states["optimizer"])
        assert_tensors(other.named_parameters(), expected)
        assert_same_moments((other, its), (model, optimizer))
    # torch's full state: gathered, and handed out again by one rank
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_tensors(expected.items(), full)
    other = sharded("stack", 3, shard_placement_fn=matrices)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if dist.get_rank() == 0 else {}, options=options)
    assert_tensors(other.named_parameters(), expected)


@pytest.mark.parametrize("library", ["torch's", slow("ours")])
@ranks(3)
def test_states_that_torch_loads_in_rows(library: str) -> None:
    """A full optimizer state that torch's helper loads lies in rows; the next step places it."""
    pairs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        for place, layer in enumerate(model):
            choose = [fsdp2.Whole(owner=2 - place)]
            fsdp2.fully_shard(layer, mesh=make_mesh(), shard_placement_fn=lambda _, c=choose: c[0])
        fsdp2.fully_shard(model, mesh=make_mesh())
        make = functools.partial(fsdp2.optim.local, torch.optim.AdamW)
        optimizer = (torch.optim.AdamW if library == "torch's" else make)(
            model.parameters(), lr=0.1
        )
        pairs.append((model, optimizer))
    pairs[1][0].load_state_dict(pairs[0][0].state_dict())
    full = StateDictOptions(full_state_dict=True)
    for step in range(3):
        for model, optimizer in pairs:
            torch.manual_seed(step)
            model(torch.randn(2, 4)).square().sum().backward()
            advance(optimizer)
        state = get_optimizer_state_dict(*pairs[1], options=full)
        set_optimizer_state_dict(*pairs[1], state, options=full)
    assert_same_parameters(pairs[0][0], pairs[1][0])


@ranks(3)
def test_our_checkpoints(tmp_path: Path) -> None:
    """Sharded, full and rank-local states, of a model and of its optimizers, load again."""
    local = functools.partial(fsdp2.optim.local, torch.optim.AdamW)
    model, optimizer = stepped(1, matrices, local)
    fsdp2.checkpoint.save(tmp_path / "ours", model, optimizer)
    expected = {name: whole(param).clone() for name, param in model.named_parameters()}
    for choose in (everything, None):
        other, its = stepped(2, choose, local)
        fsdp2.checkpoint.load(tmp_path / "ours", other, its)
        assert_tensors(other.named_parameters(), expected)
        assert_same_moments((other, its), (model, optimizer))
    full = fsdp2.checkpoint.full_state(model, rank0_only=True)
    if dist.get_rank() == 0:
        assert_tensors(expected.items(), full["model"])
    other, _ = stepped(3, matrices, local)
    fsdp2.checkpoint.load_full_state(other, full)
    assert_tensors(other.named_parameters(), expected)


@ranks(3)
def test_whole_parameters_on_every_rank_and_written_ones() -> None:
    """`full_params`, `summon_full_params`, `materialize`, copies and pickles of owned shards."""
    case = CASES["stack"]
    model = sharded(case, shard_placement_fn=matrices)
    expected = dict(seeded(case.build).named_parameters())
    assert_tensors(fsdp2.full_params(model, max_bytes=1 << 20), expected)
    with fsdp2.summon_full_params(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    for name, value in fsdp2.full_params(model, max_bytes=100):
        assert torch.equal(value, expected[name] * 2), name
    other = copy.deepcopy(model)
    for name, param in other.named_parameters():
        assert owner_of(param) == owner_of(names_of(model)[name])
        assert torch.equal(whole(param), expected[name] * 2)
    batch = case.batch(ROWS)
    with torch.no_grad():
        first, second = (loss_of(m(*batch.args, **batch.kwargs)) for m in (model, other))
    assert torch.equal(first, second)
    for from_rank0 in (False, True):
        with torch.device("meta"):
            late = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fsdp2.fully_shard(late, mesh=make_mesh(), shard_placement_fn=matrices)
        torch.manual_seed(4)
        fsdp2.materialize(late, "cpu", sync_from_rank0=from_rank0)
        torch.manual_seed(4)
        assert_same_parameters(late, nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    param = next(p for p in model.parameters() if owner_of(p) is not None)
    again = pickle.loads(pickle.dumps(param.placements))
    assert [shard_owner(p) for p in again] == [shard_owner(p) for p in param.placements]


@ranks(3)
def test_low_precision_offload_accumulation_and_skipped_reductions() -> None:
    """The other ways of a step: each is compared with rows of the same dtypes."""
    case = CASES["stack"]
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    narrow = {"mp_policy": policy}
    offload = {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)}
    settings: list[dict[str, Any]] = [narrow, offload, narrow | offload]
    for kwargs in (*settings, {"reshard_after_forward": False}):
        owned = sharded(case, shard_placement_fn=matrices, **kwargs)
        rows = sharded(case, **kwargs)
        for step in range(4):
            for model in (owned, rows):
                model.set_requires_gradient_sync(step % 2 == 1)
            backward_on(case, owned, rows)
            for name, param in rows.named_parameters():
                ours = names_of(owned)[name]
                assert (ours.grad is None) == (param.grad is None), name
                if param.grad is not None:
                    assert_same(whole(ours.grad), whole(param.grad), name, 1e-5)


@ranks(2)
def test_what_is_not_for_owned_parameters_is_told() -> None:
    """Each says which parameter, and what to do; nothing was changed before."""
    mesh = make_mesh()

    def linear(**kwargs: Any) -> nn.Module:
        return fsdp2.fully_shard(nn.Linear(3, 5), mesh=mesh, shard_placement_fn=matrices, **kwargs)

    with pytest.raises(ConfigError, match=r"weight: shard_placement_fn returned Whole\(owner=2\)"):
        owned_by(2)
    model = linear()
    for call, error in (
        (lambda: model.set_custom_all_gather(DefaultAllGather()), ConfigError),
        (lambda: fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16)), ConfigError),
        (lambda: fsdp2.compile(model), UnsupportedError),
    ):
        with pytest.raises(error, match="weight is stored on one rank"):
            call()
    weight = next(p for p in model.parameters() if owner_of(p) is not None)
    with pytest.raises(UnsupportedError, match="does not support this view"):
        weight[0, 0]
    with pytest.raises(UnsupportedError, match="torch's own functions cannot distribute"):
        weight.placements[0]._split_tensor(torch.zeros(4), 2)  # type: ignore[attr-defined]


@ranks(4)
def test_a_smaller_mesh_cannot_keep_owned_parameters() -> None:
    with pytest.raises(ConfigError, match=r"weight is stored on one rank .*, so"):
        fsdp2.fully_shard(
            nn.Linear(3, 5), mesh=make_mesh(), shard_placement_fn=matrices, reshard_after_forward=2
        )


@ranks(3)
def test_owners_are_chosen_over_all_calls_and_may_be_named() -> None:
    """Blocks of one matrix each go round; a tensor of no rows or dims is laid out as ever."""
    mesh = make_mesh()
    start_anew(mesh.get_group())  # other tests' models, that never ran, do not count
    blocks = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    shard_each(*blocks, mesh=mesh, shard_placement_fn=matrices)
    owners = [owner_of(block.weight) for block in blocks]  # type: ignore[arg-type]
    assert sorted(owners, key=str) == [0, 0, 1, 1, 2, 2]
    named = owned_by(1)
    assert [owner_of(param) for param in named.parameters()] == [1, 1]
    odd = nn.Module()
    odd.none, odd.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(()))
    fsdp2.fully_shard(odd, mesh=mesh, shard_placement_fn=everything)
    assert [owner_of(param) for param in odd.parameters()] == [None, None]
    infos = [info for unit in fsdp2.units(named) for group in unit.groups for info in group.shards]
    assert [info.owner for info in infos] == [1, 1]


@ranks(3)
def test_operations_on_owned_tensors_are_those_of_whole_ones() -> None:
    """What works element by element stays where it is; anything else is done on the whole."""
    model = owned_by(2)
    weight, full = model.weight, whole(model.weight)
    assert isinstance(weight, DTensor)
    operations: list[Callable[[Any], Any]] = [
        lambda w: w * 2 + w,
        lambda w: w.sum(),
        lambda w: w.mean(0),
        lambda w: w.norm(),
        lambda w: w.abs().max(),
        lambda w: torch.zeros_like(w),
        lambda w: w.new_zeros(w.shape),
        lambda w: w.to(torch.float64),
        lambda w: w @ w.T.contiguous() if not isinstance(w, DTensor) else w @ w.full_tensor().T,
        lambda w: torch.stack(torch._foreach_norm([w, w])),
        lambda w: torch.where(w > 0, w, 0.0),
        lambda w: torch.equal(w, w),
    ]
    with torch.no_grad():
        for operation in operations[:8] + operations[9:]:
            found, expected = operation(weight), operation(full)
            if isinstance(expected, Tensor):
                assert torch.equal(whole(found), expected)
            else:
                assert found == expected
        copied = weight.detach().clone()
        copied.normal_()
        copied.copy_(weight)
        assert torch.equal(whole(copied), full)
        assert torch.equal(whole(copied.redistribute(placements=[Shard(0)])), full)
    (weight.full_tensor() ** 2).sum().backward()
    assert torch.equal(whole(weight.grad), 2 * full)


@ranks(3)
def test_what_is_whole_is_a_copy_and_views_are_the_owners_memory() -> None:
    """A full tensor does not change with the parameter, nor the other way round; a view does."""
    model = owned_by(1)
    weight = model.weight
    with torch.no_grad():
        full, replicated = weight.full_tensor(), weight.redistribute(placements=[Replicate()])
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        before = full.clone()
        weight.mul_(2)
        for kept in (full, replicated.to_local(), state["weight"]):
            assert torch.equal(kept, before)
        full.zero_()
        assert torch.equal(whole(weight), 2 * before)
        for view, expected in (
            (weight.view(-1), before.view(-1)),
            (weight.T, before.T),
            (weight[1], before[1]),
            (weight[:, 2:], before[:, 2:]),
            (weight.split(2)[1], before.split(2)[1]),
        ):
            assert torch.equal(whole(view), 2 * expected)
        weight.view(-1).add_(1)
        weight[3].zero_()
        expected = 2 * before + 1
        expected[3] = 0
        assert torch.equal(whole(weight), expected)


@ranks(3)
def test_lists_that_are_written_to_beside_owned_tensors() -> None:
    """An average that lies otherwise is written to, on every rank, or the operation is refused."""
    mesh = make_mesh()
    model = owned_by(1)
    weight, full = model.weight, whole(model.weight).clone()
    with torch.no_grad():
        average = distribute_tensor(torch.zeros(5, 4), mesh, [Replicate()])
        torch._foreach_lerp_([average], [weight], 0.5)
        assert torch.equal(whole(average), full / 2)
        with pytest.raises(RuntimeError, match="mixed"):
            torch._foreach_lerp_([torch.zeros(5, 4)], [weight], 0.5)
        rows = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])
        rows.copy_(weight)
        assert torch.equal(whole(rows), full)
        torch._foreach_copy_([weight], [average])
        assert torch.equal(whole(weight), full / 2)


@ranks(3)
def test_complex_parameters_step() -> None:
    """Optimizers view them as real numbers, where they are."""
    build = functools.partial(nn.Linear, 4, 5, dtype=torch.complex64)
    model, plain = seeded(build), seeded(build)
    fsdp2.fully_shard(model, mesh=make_mesh(), shard_placement_fn=lambda _: fsdp2.Whole(owner=2))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.complex64)
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one(x).abs().sum().backward()
            advance(optimizer)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole(names_of(model)[name]), param.detach())
