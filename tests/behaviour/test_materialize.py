"""Promise: `materialize` gives a meta model the values of one process, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from tests.kit.allocations import peak_of
from tests.kit.in_turn import assert_tensors, shard_each
from tests.kit.meshes import DEVICE
from tests.kit.models import HIDDEN, VOCAB, WIDTH
from tests.kit.parity import bits, make_mesh, names_of, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow


class Table(nn.Module):
    """Own parameters and a buffer beside a child; the constructor leaves nothing to chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.empty(()))
        self.row = nn.Parameter(torch.empty(1, WIDTH))
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.row)
        self.scale.data.fill_(0.5)
        self.angles.copy_(torch.arange(5.0))
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale).sum() + (x * self.row).sum() + self.angles.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.tables = nn.ModuleList(Table() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(3, 7, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def tie(self) -> Net:
        self.head.weight = self.embed.weight
        return self


def on_meta(tied: bool = False) -> Net:
    with torch.device("meta"):
        return Net().tie() if tied else Net()


def sharded(model: nn.Module, mesh: Any, **kwargs: Any) -> nn.Module:
    return shard_each(*model.tables, model, mesh=mesh, **kwargs)  # type: ignore[misc]


def one_process(tied: bool = False) -> Net:
    torch.manual_seed(5)
    if not tied:
        return Net()
    model = on_meta().to_empty(device=DEVICE).tie()
    for module in (model.embed, *(m for t in model.tables for m in (t.inner, t))):
        module.reset_parameters()
    for module in (model.norm, model.conv, model.head):
        module.reset_parameters()
    return model


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    for name, parameter in names_of(expected).items():
        found = names_of(model)[name]
        assert found.requires_grad is parameter.requires_grad
        assert torch.equal(bits(whole(found)), bits(parameter)), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(bits(model.get_buffer(name)), bits(buffer)), name


@pytest.mark.parametrize(("tied", "sync"), [(False, False), (True, True)])
@pytest.mark.parametrize("mesh", [(), (2, 2)])
@ranks(1, slow(2), 3, slow(4))
def test_values_are_those_of_one_process(
    mesh: tuple[int, ...], tied: bool, sync: bool, world_size: int
) -> None:
    """Bit for bit, and so is the next random number, on every rank."""
    if mesh and world_size != 4:
        pytest.skip("another world size")
    expected = one_process(tied)
    after = torch.rand(3)
    model = sharded(on_meta(tied), make_mesh(*mesh))
    torch.manual_seed(5 + (dist.get_rank() if sync else 0))
    assert fsdp2.materialize(model, DEVICE, sync_from_rank0=sync) is model
    assert torch.equal(torch.rand(3), after)
    assert_same_values(model, expected)
    names = names_of(model)
    assert (names["head.weight"] is names["embed.weight"]) is tied
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH)
    model.tables[0](x).backward()  # type: ignore[index]
    expected.tables[0](x).backward()
    for name, parameter in expected.tables[0].named_parameters():
        torch.testing.assert_close(whole(names[f"tables.0.{name}"].grad), parameter.grad)
    optimizer.step()


@ranks(2)
def test_columns_tensor_parallel_and_plain_models(rank: int) -> None:
    expected = one_process()
    for placement in (lambda p: Shard(1) if p.dim() > 1 else None, None):
        torch.manual_seed(5)
        model = sharded(on_meta(), make_mesh(), shard_placement_fn=placement)
        assert_same_values(fsdp2.materialize(model, DEVICE), expected)
    torch.manual_seed(5)
    assert_same_values(fsdp2.materialize(on_meta(), DEVICE), expected)


@ranks(4)
def test_tensor_parallel() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, HIDDEN))
    for layer, dim in zip(model, (0, 1), strict=True):
        made = distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(dim)])
        layer.weight = nn.Parameter(made)
    fsdp2.fully_shard(model, mesh=mesh["data"])
    torch.manual_seed(3)
    fsdp2.materialize(model, DEVICE)
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, HIDDEN))
    found = dict(fsdp2.full_params(model, max_bytes=10**6))
    assert_tensors(expected.named_parameters(), found)


@ranks(2)
def test_init_is_called_for_each_module_that_needs_it(rank: int) -> None:
    """What is not on meta keeps its values, and is moved to the device."""
    called: list[str] = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(2)

    model = on_meta()
    torch.manual_seed(0)
    model.head = nn.Linear(WIDTH, VOCAB)
    kept = model.head.weight.detach().clone()
    model.norm.running_mean = torch.full((WIDTH,), 7.0)
    fsdp2.fully_shard(model.head, mesh=make_mesh())
    sharded(model, make_mesh())
    fsdp2.materialize(model, DEVICE, init)
    assert called == ["Embedding", *["Linear", "FSDPTable"] * 2, "BatchNorm1d", "Conv1d"]
    assert torch.equal(whole(model.head.weight), kept)
    assert model.norm.running_mean.tolist() == [7.0] * WIDTH
    assert whole(model.tables[1].inner.weight).unique().tolist() == [2.0]
    assert model.tables[1].count.item() == 2


@ranks(2)
def test_sync_from_rank0_makes_what_was_real_equal_too(rank: int) -> None:
    model = on_meta()
    model.register_buffer("scale", torch.full((3,), float(rank)))
    ignored = nn.Parameter(torch.full((2,), float(rank)))
    model.extra = ignored
    shard_each(*model.tables, mesh=make_mesh())
    fsdp2.fully_shard(model, mesh=make_mesh(), ignored_params={ignored})
    fsdp2.materialize(model, DEVICE, sync_from_rank0=True)
    assert model.scale.tolist() == [0.0] * 3
    assert model.extra.tolist() == [0.0] * 2
    replicated = nn.Linear(5, 3)
    nn.init.constant_(replicated.weight, float(rank))
    fsdp2.fully_shard(replicated, mesh=make_mesh(2, 1))
    fsdp2.materialize(replicated, DEVICE, sync_from_rank0=True)
    assert replicated.weight.to_local().unique().tolist() == [0.0]


@ranks(2)
def test_wrong_inits_name_the_module_on_every_rank(rank: int) -> None:
    def leaves_meta(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"))

    def changes_shape(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros(2, 2))

    def changes_dtype(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros_like(module.weight).double())

    def writes_a_part(module: nn.Module) -> None:
        nn.init.zeros_(module.bias)
        module.weight[2:].zero_()

    def raises_on_rank_1(module: nn.Module) -> None:
        module.reset_parameters()
        if rank == 1:
            raise OSError("no such weights")

    def removes(module: nn.Module) -> None:
        del module.weight

    def draws_more_on_rank_1(module: nn.Module) -> None:
        module.reset_parameters()
        torch.rand(1 + rank)

    cases: list[tuple[Any, type[Exception], str]] = [
        (leaves_meta, fsdp2.ConfigError, r"init of 0 \(Linear\).*left parameter weight on meta"),
        (changes_shape, fsdp2.ConfigError, r"init of 0 \(Linear\).*shape \(2, 2\)"),
        (changes_dtype, fsdp2.ConfigError, r"init of 0 \(Linear\).*float64"),
        (removes, fsdp2.ConfigError, r"init of 0 \(Linear\).*left parameter weight unset"),
        (lambda module: None, fsdp2.ConfigError, "did not write parameter bias; did not write"),
        (writes_a_part, fsdp2.ConfigError, r"weight: 26 of 377 elements"),
        (raises_on_rank_1, fsdp2.StateError, r"init of 0 \(Linear\): rank 1 failed with OSError"),
        (draws_more_on_rank_1, fsdp2.ConfigError, "different random numbers on some ranks"),
    ]
    for init, error, message in cases:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3))
        fsdp2.fully_shard(model, mesh=make_mesh())
        with pytest.raises(error, match=message):
            fsdp2.materialize(model, DEVICE, init)
        assert all(isinstance(p, DTensor) for p in model.parameters())


@ranks(2)
def test_what_cannot_be_initialised_is_listed(rank: int) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    with torch.device("meta"):
        model, rotary = nn.Sequential(Bare(), nn.Linear(2, 2), Bare()), nn.Sequential(Rotary())
    fsdp2.fully_shard(model, mesh=make_mesh())
    with pytest.raises(fsdp2.ConfigError, match=r"on 0 \(Bare\), 2 \(Bare\)"):
        fsdp2.materialize(model, DEVICE)
    fsdp2.fully_shard(rotary, mesh=make_mesh())
    with pytest.raises(fsdp2.ConfigError, match=r"0 \(Rotary\) did not write buffer angles"):
        fsdp2.materialize(rotary, DEVICE)

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.own = nn.Parameter(torch.empty(2))

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.own)
            self.write(self.inner.weight)

    def greedy_with(write: Any) -> nn.Module:
        with torch.device("meta"):
            greedy = Greedy()
        greedy.write = write
        fsdp2.fully_shard(greedy, mesh=make_mesh())
        return greedy

    for name in ("normal_", "kaiming_uniform_"):
        with pytest.raises(fsdp2.UnsupportedError, match=rf"\(Greedy\) wrote \({name}\)"):
            fsdp2.materialize(greedy_with(getattr(nn.init, name)), DEVICE)
    zeroed = fsdp2.materialize(greedy_with(nn.init.zeros_), DEVICE)  # a constant is right on shards
    assert not whole(zeroed.inner.weight).any()
    with pytest.raises(fsdp2.UnsupportedError, match=r"\(Greedy\) wrote \(zeros?_\)"):
        fsdp2.materialize(greedy_with(nn.init.zeros_), DEVICE, sync_from_rank0=True)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 3))
    if rank == 1:
        other = nn.Sequential(nn.Linear(3, 3))
    fsdp2.fully_shard(other, mesh=make_mesh())
    with pytest.raises(fsdp2.ConfigError, match=r"0.bias on meta on rank 0, but not on rank 1"):
        fsdp2.materialize(other, DEVICE)
    with pytest.raises(fsdp2.ConfigError, match="expected device to be a"):
        fsdp2.materialize(model, "cuda")


@ranks(1, slow(2), 3, slow(4))
def test_peak_memory_is_the_shards_and_the_largest_module(world_size: int) -> None:
    layers = [nn.Linear(300, 300, bias=False, device="meta") for _ in range(8)]
    layers.insert(3, nn.Linear(300, 700, bias=False, device="meta"))
    model = nn.Sequential(*layers)
    shard_each(*layers[::2], model, mesh=make_mesh())
    highest = peak_of(lambda: fsdp2.materialize(model, DEVICE))
    held = sum(p.to_local().nbytes for p in model.parameters())
    shards = max(held, 4 * sum(-(-p.shape[0] // world_size) * 300 for p in model.parameters()))
    scratch = 2**17  # what looks for unwritten elements, and small tensors
    assert highest <= shards + 4 * 300 * 700 + scratch


@ranks(2)
def test_what_was_frozen_on_meta_stays_frozen() -> None:
    model = on_meta()
    model.embed.requires_grad_(False)
    model.tables[0].row.requires_grad_(False)  # type: ignore[union-attr]
    frozen = {name for name, p in names_of(model).items() if not p.requires_grad}
    fsdp2.materialize(sharded(model, make_mesh()), DEVICE)
    assert {name for name, p in names_of(model).items() if not p.requires_grad} == frozen
