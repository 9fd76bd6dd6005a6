"""Promise: `full_params` yields every whole parameter, bit for bit, in bounded memory."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import ShardPlacementResult
from tests.kit.allocations import peak_of
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES, VOCAB, WIDTH, seeded
from tests.kit.parity import bits, make_mesh, shard
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow


class Odd(nn.Module):
    """Shapes and dtypes of every kind; the last matrix is larger than the small caps below."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.two = nn.Parameter(torch.randn(2, 3, 5))
        self.turned = nn.Parameter(torch.randn(29, WIDTH).t())
        self.narrow = nn.Parameter(torch.randn(7, 2).bfloat16())
        self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.count = nn.Parameter(torch.arange(11), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(6) % 2 == 0, requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.large = nn.Parameter(torch.randn(31, 29))
        self.tied = self.large
        self.register_buffer("steps", torch.tensor(3))


def columns(parameter: nn.Parameter) -> Any:
    return Shard(1) if parameter.dim() > 1 else Replicate()


def assert_same_values(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that these are plain tensors of the same names in order, and bits."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        tensor = found[name]
        assert type(tensor) is Tensor, name
        assert not tensor.requires_grad, name
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(tensor), bits(value)), name


def assert_all(model: nn.Module, reference: nn.Module, **kwargs: Any) -> None:
    found = dict(fsdp2.full_params(model, **kwargs))
    assert_same_values(found, dict(reference.named_parameters()))


def by_index(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(index): tensor for index, tensor in enumerate(tensors)}


@pytest.mark.parametrize("mesh", [(), slow((2, 2)), slow((1, 3))])
@ranks(slow(2), 3, slow(4))
def test_every_kind_of_parameter(mesh: tuple[int, ...], world_size: int) -> None:
    if mesh and mesh[0] * mesh[1] != world_size:
        pytest.skip("another world size")
    reference = seeded(Odd)
    for placement_fn in (None, columns):
        model = seeded(Odd)
        fsdp2.fully_shard(model, mesh=make_mesh(*mesh), shard_placement_fn=placement_fn)
        for max_bytes in (40, 10**6):
            assert_all(model, reference, max_bytes=max_bytes)


@pytest.mark.parametrize("name", ["stack", "tied_lm", "nested_units", "mixed_dtypes"])
@ranks(3)
def test_models(name: str) -> None:
    case = CASES[name]
    model, reference = shard(seeded(case.build), case), seeded(case.build)
    assert_all(model, reference, max_bytes=2000)
    state = list(model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in state)


@pytest.mark.parametrize("rows", with_slow([12, 13], [13]))
@ranks(4)
def test_tensor_parallel_parameters_are_whole(rows: int) -> None:
    """Rows over both axes, even or not; columns over one; replicated over one."""
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    whole = [torch.randn(rows, WIDTH) for _ in range(4)] + [torch.randn(rows)]
    module = nn.ParameterList([whole[0]])
    placements = (Shard(0), Shard(1), Replicate(), Shard(0))
    for tensor, placement in zip(whole[1:], placements, strict=True):
        module.append(nn.Parameter(distribute_tensor(tensor, mesh["tensor"], [placement])))
    fsdp2.fully_shard(module, mesh=mesh["data"])
    for max_bytes in (64, 10**6):
        assert_same_values(dict(fsdp2.full_params(module, max_bytes=max_bytes)), by_index(whole))


@ranks(4)
def test_one_rank_gets_and_gives_what_lies_over_two_axes(rank: int) -> None:
    """Shards are collected along one axis, then along the other, and handed out in turn."""
    for shape in ((2, 2), (1, 4), (4, 1)):
        torch.manual_seed(0)
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("data", "tensor"))
        module = nn.ParameterList()
        whole = [torch.randn(13, WIDTH), torch.randn(12, WIDTH), torch.randn(29)]
        for tensor, dim in zip(whole, (0, 1, 0), strict=True):
            module.append(nn.Parameter(distribute_tensor(tensor, mesh["tensor"], [Shard(dim)])))
        fsdp2.fully_shard(module, mesh=mesh["data"])
        for max_bytes in (64, 10**6):
            state = fsdp2.checkpoint.full_state(module, max_bytes=max_bytes)
            if rank == 0:
                assert_same_values(state["model"], by_index(whole))
            whole = [tensor + 1 for tensor in whole]
            given = {"model": by_index(whole)} if rank == 0 else {}
            fsdp2.checkpoint.load_full_state(module, given, max_bytes=max_bytes)
            found = dict(fsdp2.full_params(module, max_bytes=max_bytes))
            assert_same_values(found, by_index(whole))


@ranks(4)
def test_parameters_on_meshes_of_their_own(rank: int) -> None:
    """A mesh of the same ranks, a slice of it, and ranks that are no axis of it."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    other = init_device_mesh(DEVICE, (4,))
    model, reference = seeded(Odd), seeded(Odd)
    chosen = {id(model.large): other, id(model.turned): mesh["shard"]}

    def choose(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), chosen.get(id(parameter)))

    del model.scalar
    del reference.scalar
    fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=choose)
    assert model.large.device_mesh.ndim == 1
    assert_all(model, reference, max_bytes=900)
    state = fsdp2.checkpoint.full_state(model, max_bytes=900)
    if rank == 0:
        assert_same_values(state["model"], reference.state_dict())
    pairs = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("pair", "place"))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    fsdp2.fully_shard(model[1], mesh=pairs["place"])
    fsdp2.fully_shard(model, mesh=mesh)
    with pytest.raises(fsdp2.UnsupportedError, match=r"1.weight is on 2 of 4 ranks"):
        fsdp2.checkpoint.full_state(model)


@ranks(2)
def test_a_root_that_stayed_whole_after_its_forward() -> None:
    case = CASES["stack"]
    model, reference = shard(seeded(case.build), case), seeded(case.build)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert_all(model, reference, max_bytes=10**5)
    model(torch.ones(2, WIDTH))
    assert_all(model, reference, max_bytes=10**5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(3)
def test_dtypes_are_cast_on_the_way(dtype: torch.dtype) -> None:
    model, reference = seeded(Odd), seeded(Odd)
    fsdp2.fully_shard(model, mesh=make_mesh())
    found = dict(fsdp2.full_params(model, max_bytes=500, dtype=dtype))
    params = dict(reference.named_parameters())
    cast = {n: p.to(dtype) if p.is_floating_point() else p for n, p in params.items()}
    assert_same_values(found, cast)


@ranks(2)
def test_names_buffers_and_a_callback_that_merges_adapters() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, VOCAB)
            self.lora_a = nn.Parameter(torch.randn(3, WIDTH))
            self.lora_b = nn.Parameter(torch.randn(VOCAB, 3))
            self.register_buffer("seen", torch.ones(2))

    model, plain = seeded(Adapted), seeded(Adapted)
    fsdp2.fully_shard(model, mesh=make_mesh())
    adapters = dict(fsdp2.full_params(model, max_bytes=999, names=lambda n: "lora_" in n))
    assert list(adapters) == ["lora_a", "lora_b"]

    def merge(name: str, tensor: Tensor) -> Tensor | None:
        if name in adapters:
            return None
        return tensor + adapters["lora_b"] @ adapters["lora_a"] if name == "base.weight" else tensor

    merged = dict(fsdp2.full_params(model, max_bytes=999, callback=merge, buffers=True))
    assert list(merged) == ["base.weight", "base.bias", "seen"]
    expected = plain.base.weight + plain.lora_b @ plain.lora_a
    torch.testing.assert_close(merged["base.weight"], expected.detach())


@pytest.mark.parametrize(("count", "max_bytes"), [(20, 8000), (20, 30000), (1, 1000)])
@ranks(slow(2), 3)
def test_no_more_than_max_bytes_is_alive(count: int, max_bytes: int) -> None:
    model = nn.Sequential(*(nn.Linear(29, 31, bias=False) for _ in range(count)))
    fsdp2.fully_shard(model, mesh=make_mesh())
    largest = 29 * 33 * 4
    held = sum(p.to_local().nbytes for p in model.parameters())
    assert held < largest * count
    seen = peak_of(lambda: sum(1 for _ in fsdp2.full_params(model, max_bytes=max_bytes)))
    limit = max(max_bytes, largest + max_bytes) if max_bytes < 3 * largest else max_bytes
    assert seen <= limit + largest + 4096  # the loop's own variable, and alignment


@ranks(2)
def test_what_the_caller_lets_go_of_is_freed_before_the_next_gather() -> None:
    model = nn.Sequential(*(nn.Linear(129, 131, bias=False) for _ in range(5)))
    fsdp2.fully_shard(model, mesh=make_mesh())
    values = fsdp2.full_params(model, max_bytes=10_000)
    assert peak_of(lambda: collections.deque(values, 0)) <= 129 * 132 * 4 + 10_000 + 4096


@pytest.mark.parametrize("max_bytes", [2000, 10**6])
@ranks(3, slow(4))
def test_a_rank_that_leaves_alone_takes_the_others_with_it(
    max_bytes: int, rank: int, world_size: int
) -> None:
    model, reference = seeded(Odd), seeded(Odd)
    fsdp2.fully_shard(model, mesh=make_mesh() if world_size == 3 else make_mesh(2, 2))

    def fail(name: str, at: str) -> None:
        if rank == 1 and name == at:
            raise KeyError("no room")

    def consume(at: str) -> None:
        for name, _ in fsdp2.full_params(model, max_bytes=max_bytes):
            fail(name, at)

    for at in ("scalar", "narrow", "large"):  # the first, one in the middle, the last

        def callback(name: str, tensor: Tensor, at: str = at) -> Tensor:
            fail(name, at)
            return tensor

        with pytest.raises(Exception, match="no room") as caught:
            list(fsdp2.full_params(model, max_bytes=max_bytes, callback=callback))
        assert caught.type is (KeyError if rank == 1 else fsdp2.StateError)
        with pytest.raises(KeyError if rank == 1 else fsdp2.StateError) as caught:
            consume(at)
        assert rank == 1 or f"rank 1 stopped at {at}" in str(caught.value)
        seen = []
        with pytest.raises(fsdp2.StateError) if rank != 1 else contextlib.nullcontext():
            for name, _ in fsdp2.full_params(model, max_bytes=max_bytes):
                seen.append(name)
                if rank == 1 and name == at:
                    break
        assert at in seen
    for name, _ in fsdp2.full_params(model, max_bytes=max_bytes):  # all of them: no error
        if name == "narrow":
            break
    assert_all(model, reference, max_bytes=max_bytes)


@ranks(2)
def test_a_rank_without_memory_is_everybodys_error(rank: int) -> None:
    model, reference = seeded(Odd), seeded(Odd)
    fsdp2.fully_shard(model, mesh=make_mesh())

    def out_of_memory(on: int) -> Any:
        error = MemoryError("that much")
        full = mock.patch.object(torch, "empty_strided", side_effect=error)
        return full if rank == on else contextlib.nullcontext()

    def refused(message: str) -> Any:
        return pytest.raises(fsdp2.StateError, match=message)

    with refused("full_params: rank 1 failed with MemoryError: that much"), out_of_memory(1):
        list(fsdp2.full_params(model, max_bytes=2000))
    with refused("full_state: rank 0 failed with MemoryError"), out_of_memory(0):
        fsdp2.checkpoint.full_state(model)
    entered = fsdp2.summon_full_params(model)
    with refused("summon_full_params: rank 1 failed"), out_of_memory(1), entered:
        pass
    assert_all(model, reference, max_bytes=2000)


@ranks(2)
def test_refusals() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    fsdp2.fully_shard(model, mesh=make_mesh())
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    partial = nn.Module()
    partial.sum = nn.Parameter(DTensor.from_local(torch.ones(3), make_mesh(), [Partial()]))
    refusals: list[tuple[Any, Any, dict[str, Any], str]] = [
        (fsdp2.ConfigError, model, {"dtype": torch.int32}, "dtype"),
        (fsdp2.ConfigError, [model], {}, "expected the model to be"),
        (fsdp2.StateError, empty, {}, "weight is on the meta device"),
        (fsdp2.UnsupportedError, partial, {}, "sum is a partial sum"),
    ]
    for wrong in (0, -1, 1.5, True, None):
        refusals.append((fsdp2.ConfigError, model, {"max_bytes": wrong}, "max_bytes"))
    for error, module, options, said in refusals:
        with pytest.raises(error, match=said):
            fsdp2.full_params(module, **{"max_bytes": 10, **options})
    inside: list[str] = []

    def hook(module: nn.Module, args: Any) -> None:
        with pytest.raises(fsdp2.StateError, match="<root> is inside a forward"):
            fsdp2.full_params(model, max_bytes=10)
        inside.append("forward")

    handle = model.register_forward_pre_hook(hook)
    model(torch.ones(1, WIDTH)).sum().backward()
    handle.remove()
    assert inside == ["forward"]
