"""Tensor parallelism inside, sharding outside: losses, gradients and weights of the plain model."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import TORCH_2_15
from tests.kit.parity import assert_same, assert_same_gradients, assert_same_parameters, whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import (
    ROWS,
    RTOL,
    WIDTH,
    FeedForward,
    Transformer,
    Twin,
    colwise_then_rowwise,
    distribute_as,
    mesh_of,
    sequence_parallel,
    tokens,
    whole_inside,
)

Axes = dict[str, int]
SHARDED: Axes = {"data": 2, "tensor": 2}
TURNED: Axes = {"tensor": 2, "data": 2}
HYBRID: list[Axes] = [
    {"replicate": 2, "data": 1, "tensor": 2},
    {"replicate": 1, "data": 2, "tensor": 2},
    {"replicate": 2, "data": 2, "tensor": 1},
]


def in_short(axes: Axes) -> str:
    return "x".join(f"{name[0]}{size}" for name, size in axes.items())


def features(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(ROWS, width, dtype=torch.float64)


def last_dim(param: nn.Parameter) -> Placement:
    return Shard(param.dim() - 1)


# --- the plans of torch's parallelize_module ------------------------------------------------------


SIZES = [(8, 16), (13, 30), (30, 13), (3, 1)]


@pytest.mark.parametrize("placement_fn", with_slow([None, last_dim], [last_dim]))
@ranks(4)
def test_a_hidden_size_that_no_axis_divides(
    placement_fn: Callable[[nn.Parameter], Placement] | None,
) -> None:
    """Rows and columns may be split by both axes, uneven, one row, or no row on a rank."""
    mesh = mesh_of(**SHARDED)
    for width, hidden in SIZES:
        Twin(
            FeedForward(width, hidden),
            mesh,
            colwise_then_rowwise,
            batch=features(width),
            shard_placement_fn=placement_fn,
        ).train(2)


@pytest.mark.parametrize("choice", with_slow([None, True, False], [True]))
@pytest.mark.parametrize("axes", with_slow([SHARDED, TURNED, *HYBRID], [SHARDED]), ids=in_short)
@ranks(4)
def test_a_transformer_with_sequence_parallel(axes: Axes, choice: bool | None) -> None:
    """A whole plan, with norms whose gradients are partial sums, on sharded and hybrid meshes.

    The order of the axes in the user's mesh does not matter.
    """
    model = Transformer(blocks=1 if choice is None else 2)
    kwargs = {"batch": tokens, "reshard_after_forward": choice}
    twin = Twin(model, mesh_of(**axes), sequence_parallel, **kwargs)
    twin.train(2)
    data = [name for name in axes if name != "tensor"]
    assert twin.model.head.weight.device_mesh.mesh_dim_names == (*data, "tensor")


@ranks(4)
def test_resharding_to_fewer_ranks_after_forward() -> None:
    """Between forward and backward tensor-parallel parameters may wait on a smaller mesh."""
    twin = Twin(
        Transformer(),
        mesh_of(data=4, tensor=1),
        sequence_parallel,
        batch=tokens,
        reshard_after_forward=2,
    )
    loss = twin.model(twin.local(tokens())).sum()
    waiting = twin.model.blocks[0].feed.up.weight
    assert waiting.to_local().shape == (15, WIDTH)
    loss.backward()
    twin.optimizers[0].zero_grad()
    twin.train()


class Lookup(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


@pytest.mark.parametrize("style", with_slow([RowwiseParallel, ColwiseParallel], [ColwiseParallel]))
@ranks(4)
def test_an_embedding_split_by_rows_or_columns(style: Any) -> None:
    """An embedding trains as the plain one, whichever dim is split."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        plan = style(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, mesh, {"table": plan})

    mesh = mesh_of(**SHARDED)
    for rows, width in [(29, 13), (30, 1), (13, 30)]:
        draw = functools.partial(torch.randint, rows, (ROWS, 5))
        Twin(Lookup(rows, width), mesh, parallelize, batch=draw).train()


@ranks(4)
def test_a_tied_embedding_and_head() -> None:
    """One tensor-parallel parameter under two names stays one, with the sum of both gradients."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        sequence_parallel(model, mesh)
        model.head.weight = model.embed.weight  # type: ignore[union-attr]  # a Transformer

    model = Transformer(blocks=1)
    model.head.weight = model.embed.weight
    twin = Twin(model, mesh_of(**SHARDED), parallelize, batch=tokens)
    assert twin.model.head.weight is twin.model.embed.weight
    twin.train()


# --- several inner axes ---------------------------------------------------------------------------


class Deep(nn.Module):
    """Parameters that are whole only while they are used, so that they may be placed anyhow."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.enter = nn.Parameter(torch.randn(rows, WIDTH) / 4)
        self.shift = nn.Parameter(torch.randn(rows) / 4)
        self.leave = nn.Parameter(torch.randn(WIDTH, rows) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, whole_inside(self.enter), whole_inside(self.shift))
        return x + F.linear(torch.tanh(hidden), whole_inside(self.leave))


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 1, "expert": 2, "tensor": 2},
        slow({"data": 2, "expert": 1, "tensor": 2}),
        slow({"expert": 2, "data": 2, "tensor": 1}),
        pytest.param(
            {"data": 2, "context": 1, "expert": 2, "tensor": 1}, marks=pytest.mark.slow
        ),  # full_tensor() plans its collectives by a search, which takes seconds over four axes
    ],
    ids=in_short,
)
@ranks(4)
def test_parameters_over_several_inner_axes(axes: Axes) -> None:
    """Inner axes split the same dim, different dims or nothing, however many there are."""
    mesh = mesh_of(**axes)
    inner = [name for name in axes if name != "data"]
    count = len(inner)
    same: list[Placement] = [Shard(0)] * count
    other: list[Placement] = [*[Shard(0)] * (count - 1), Shard(1)]
    vector: list[Placement] = [Replicate(), *[Shard(0)] * (count - 1)]
    for rows, placement_fn in [(30, None), (13, last_dim), (1, None)]:
        Twin(
            Deep(rows),
            mesh,
            distribute_as(enter=same, shift=vector, leave=other),
            inner=inner,
            shard_placement_fn=placement_fn,
        ).train(2)


@ranks(4)
def test_plain_parameters_beside_tensor_parallel_ones() -> None:
    """A group may hold both kinds; each is a DTensor on the axes that it lies on."""
    mesh = mesh_of(**SHARDED)
    placements: dict[str, list[Placement]] = {
        "enter": [Shard(0)],
        "shift": [Replicate()],
        "leave": [Shard(1)],
    }
    for plain in placements:
        split = {name: where for name, where in placements.items() if name != plain}
        twin = Twin(Deep(13), mesh, distribute_as(**split))
        twin.train(2)
        for name, param in twin.model.named_parameters():
            assert param.device_mesh.ndim == (1 if name == plain else 2)


# --- gradients in other placements ----------------------------------------------------------------


class _Arrive(torch.autograd.Function):
    """The identity; its gradient has the placement given."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, placement: Placement, seen: list[Any]) -> Tensor:
        ctx.call = placement, seen
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        placement, seen = ctx.call
        if placement.is_partial():
            local = grad.redistribute(placements=[Replicate()]).to_local() / grad.device_mesh.size()
            grad = DTensor.from_local(local, grad.device_mesh, [placement], run_check=False)
        else:
            grad = grad.redistribute(placements=[placement])
        seen.append(grad.placements)
        return grad, None, None


class Arriving(nn.Module):
    def __init__(self, rows: int, placement: Placement) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) / 4)
        self.placement = placement
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = _Arrive.apply(weight, self.placement, self.seen)  # type: ignore[no-untyped-call,assignment]
        return F.linear(x, whole_inside(weight))


@pytest.mark.parametrize(
    "arriving",
    with_slow([Partial(), Replicate(), Shard(0), Shard(1)], [Partial()]),
    ids=str,
)
@ranks(4)
def test_gradients_that_arrive_in_another_placement(arriving: Placement) -> None:
    """Whatever the placements of a gradient, it is reduced to those of its parameter."""
    mesh = mesh_of(**SHARDED)
    for rows, own in itertools.product((13, 1), (Shard(0), Shard(1), Replicate())):
        twin = Twin(Arriving(rows, arriving), mesh, distribute_as(weight=[own]))
        twin.train(2)
        assert twin.model.seen == [(arriving,)] * 2


class _Late(torch.autograd.Function):
    """The identity; its gradient is the mean over an axis, on its way when backward goes on."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, mesh: DeviceMesh, seen: list[Any]) -> Tensor:
        ctx.call = mesh, seen
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        mesh, seen = ctx.call
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        late = funcol.all_reduce(local / mesh.size(), "sum", mesh.get_group())
        seen.append(type(late))
        if isinstance(grad, DTensor):
            late = DTensor.from_local(late, grad.device_mesh, grad.placements, run_check=False)
        return late, None, None


class Delayed(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.split = nn.Parameter(torch.randn(13, WIDTH) / 4)
        self.plain = nn.Parameter(torch.randn(13) / 4)
        self.mesh: DeviceMesh | None = mesh
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        split, plain = self.split, self.plain
        if isinstance(split, DTensor):
            split = _Late.apply(split, self.mesh, self.seen)  # type: ignore[no-untyped-call,assignment]
            plain = _Late.apply(plain, self.mesh, self.seen)  # type: ignore[no-untyped-call,assignment]
        return F.linear(x, whole_inside(split), plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Delayed:
        other = Delayed(self.mesh)
        other.load_state_dict(self.state_dict())
        return other.to(self.split.dtype)


@ranks(4)
def test_gradients_that_are_still_under_way() -> None:
    """A gradient that an asynchronous collective computes is waited for before it is reduced."""
    mesh = mesh_of(**SHARDED)
    twin = Twin(Delayed(mesh["tensor"]), mesh, distribute_as(split=[Replicate()]))
    twin.train()
    assert twin.model.seen == [funcol.AsyncCollectiveTensor] * 6


# --- control --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", with_slow([SHARDED, HYBRID[0]], [HYBRID[0]]), ids=in_short)
@ranks(slow(4))
def test_accumulation_without_sync(axes: Axes) -> None:
    """Partial sums over the tensor axis may wait on the unsharded parameters for the last batch."""
    twin = Twin(Transformer(blocks=1), mesh_of(**axes), sequence_parallel, batch=tokens)
    for _ in range(2):
        for index in range(3):
            twin.model.set_requires_gradient_sync(index == 2)
            twin.backward()
            if index < 2:
                assert all(param.grad is None for param in twin.model.blocks[0].parameters())
        twin.check_gradients()
        twin.update()
    assert_same_parameters(twin.model, twin.reference, RTOL)


@ranks(4)
def test_reduction_over_replicas_may_wait() -> None:
    """Gradients reduced over the shard axis alone wait for the all-reduce of a later backward."""
    twin = Twin(Transformer(), mesh_of(**HYBRID[0]), sequence_parallel, batch=tokens)
    for index in range(3):
        twin.model.set_requires_all_reduce(index == 2)
        twin.backward()
    twin.check_gradients()


@ranks(4)
def test_frozen_parameters() -> None:
    """A frozen tensor-parallel parameter gets no gradient and keeps its values bit for bit."""

    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_("attention" not in name and "embed" not in name)

    twin = Twin(Transformer(), mesh_of(**SHARDED), sequence_parallel, batch=tokens, prepare=freeze)
    twin.train()
    frozen = [(n, p) for n, p in twin.model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 11
    expected = dict(twin.reference.named_parameters())
    for name, param in frozen:
        assert param.grad is None, name
        assert torch.equal(whole(param), expected[name]), name


@pytest.mark.parametrize(
    "axes", [SHARDED, pytest.param(HYBRID[0], marks=pytest.mark.slow)], ids=in_short
)
@ranks(4)
def test_clipping_the_norm_of_gradients(axes: Axes) -> None:
    """torch's own clip_grad_norm_ sees every parameter on one mesh, and the norm of the whole."""
    twin = Twin(Transformer(blocks=1), mesh_of(**axes), sequence_parallel, batch=tokens)
    for norm_type in (1.0, 2.0, float("inf")):
        twin.backward()
        norms = [
            nn.utils.clip_grad_norm_(m.parameters(), 1e-4, norm_type=norm_type)
            for m in (twin.model, twin.reference)
        ]
        assert_same(norms[0], norms[1], "norm", RTOL)
        assert norms[1] > 1e-4
        assert_same_gradients(twin.model, twin.reference, RTOL)
        twin.update()
    assert_same_parameters(twin.model, twin.reference, RTOL)


@pytest.mark.skipif(
    not TORCH_2_15, reason="torch up to 2.14 sums tensor-parallel partial gradients in bfloat16"
)
@pytest.mark.parametrize("reduce_dtype", with_slow([None, torch.float32], [torch.float32]))
@ranks(4)
def test_mixed_precision_is_torchs(reduce_dtype: torch.dtype | None) -> None:
    """Computing in bfloat16 gives the losses, shards and gradients of torch's own fully_shard."""
    mesh, models = mesh_of(**SHARDED), []
    for library in (fsdp2, torch_fsdp):
        torch.manual_seed(0)
        model = Transformer().float()
        sequence_parallel(model, mesh["tensor"])
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        shard_each(*model.blocks, model, library=library, mesh=mesh["data"], mp_policy=policy)
        models.append((model, torch.optim.SGD(model.parameters(), lr=0.5)))
    for _ in range(3):
        batch, losses = tokens().chunk(2)[mesh.get_local_rank("data")], []
        for model, _ in models:
            losses.append(model(batch).square().mean())
            losses[-1].backward()
        assert losses[0].dtype is torch.bfloat16
        assert torch.equal(losses[0], losses[1])
        for (name, ours), theirs in zip(
            models[0][0].named_parameters(), models[1][0].parameters(), strict=True
        ):
            assert ours.dtype is ours.grad.dtype is torch.float32
            assert ours.grad.placements == theirs.grad.placements, name
            torch.testing.assert_close(
                ours.grad.to_local(), theirs.grad.to_local(), rtol=1e-6, atol=1e-7, msg=name
            )
        for _, optimizer in models:
            advance(optimizer)


# --- the user's doings ----------------------------------------------------------------------------


@ranks(4)
def test_a_copy_trains_on() -> None:
    """A deep copy of a sharded tensor-parallel model is one itself, with its own gradients."""
    twin = Twin(Deep(13), mesh_of(**SHARDED), distribute_as(enter=[Shard(0)], leave=[Shard(1)]))
    twin.train(1)
    original, twin.model = twin.model, copy.deepcopy(twin.model)
    twin.backward()
    twin.check_gradients()
    assert all(param.grad is None for param in original.parameters())


@pytest.mark.parametrize("assign", with_slow([False, True], [True]))
@ranks(4)
def test_loading_the_state_of_another_model(assign: bool) -> None:
    """A sharded state dict loads in place or by assignment, and training goes on from it."""
    mesh = mesh_of(**SHARDED)
    parallelize = distribute_as(enter=[Shard(0)], shift=[Shard(0)], leave=[Shard(1)])
    twin, other = (Twin(Deep(29), mesh, parallelize) for _ in range(2))
    other.train(1)
    twin.model.load_state_dict(copy.deepcopy(other.model.state_dict()), assign=assign)
    twin.reference.load_state_dict(other.reference.state_dict())
    twin.backward()
    twin.check_gradients()


@ranks(4)
def test_an_assigned_tensor_parallel_parameter_is_sharded() -> None:
    """A parameter that is whole over the data axes, as before fully_shard, is taken over."""
    twin = Twin(Deep(13), mesh_of(**SHARDED), distribute_as(enter=[Shard(0)], leave=[Shard(1)]))
    values = torch.randn(13, WIDTH, dtype=torch.float64)
    twin.reference.enter = nn.Parameter(values)
    distribute_as(enter=[Shard(0)])(twin.reference, mesh_of(**SHARDED)["tensor"])
    twin.model.enter, twin.reference.enter = twin.reference.enter, nn.Parameter(values)
    twin.backward()
    twin.check_gradients()


@ranks(4)
def test_an_assigned_parameter_in_another_placement_is_refused() -> None:
    """A plain tensor is no shard of a tensor axis; every rank says so, and what would fit."""
    twin = Twin(Deep(13), mesh_of(**SHARDED), distribute_as(enter=[Shard(0)], leave=[Shard(1)]))
    rows = twin.model.enter.to_local().shape[0]
    twin.model.enter = nn.Parameter(torch.randn(2 * rows, WIDTH, dtype=torch.float64))
    with pytest.raises(fsdp2.StateError, match=r"enter was replaced by Parameter .*Shard"):
        twin.model(features(WIDTH)())


@ranks(4)
def test_parameters_of_a_functional_call() -> None:
    """Shards given to functional_call are gathered, and gradients reduced, as the module's own."""
    twin = Twin(Transformer(blocks=1), mesh_of(**SHARDED), sequence_parallel, batch=tokens)
    batch, call = tokens(), torch.func.functional_call
    scaled, expected = (
        {name: param * 2 for name, param in model.named_parameters()}
        for model in (twin.model, twin.reference)
    )
    call(twin.model, scaled, (twin.local(batch),)).square().mean().backward()
    call(twin.reference, expected, (batch,)).square().mean().backward()
    twin.check_gradients()


@ranks(2)
def test_a_mesh_that_overlaps_is_refused() -> None:
    """Data and tensor parallelism over the same ranks is an error that names the parameter."""
    model = FeedForward(8, 16)
    colwise_then_rowwise(model, mesh_of(tensor=2))
    with pytest.raises(fsdp2.ConfigError, match=r"up\.weight.*init_device_mesh"):
        fsdp2.fully_shard(model, mesh=mesh_of(data=2))
    assert type(model) is FeedForward
