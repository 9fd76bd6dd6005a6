"""What only a device shows: streams and events, no synchronisation with the host, memory.

One process and one GPU. Several ranks are simulated with the loopback of `tests/unit`: they share
one stream for each lane, as the groups of one rank do.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2._base.containers import map_tensors
from fsdp2._base.policy import MixedPrecisionPolicy
from fsdp2._comm.streams import DeviceStreams, streams_for
from fsdp2._param_group.group import ParamGroup
from tests._models import CASES, Case, loss_of, seeded
from tests._parity import assert_same
from tests.unit._loopback import LoopbackGroup, chunk_of, fake_process_group, local_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

BUSY_CYCLES = 50_000_000  # tens of milliseconds: what is not ordered behind it runs before it
MODELS = ["stack", "nested_units", "tied_lm", "partly_frozen"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of one rank on NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Let meshes of four simulated ranks exist."""
    with fake_process_group(4):
        yield


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def keep_compute_busy() -> None:
    """Delay the current stream, to widen the window of a missing order between streams."""
    torch.cuda._sleep(BUSY_CYCLES)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Turn every wait of the host for the device into an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def shard(model: nn.Module, case: Case, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    for unit in case.units(model):
        fsdp2.fully_shard(unit, mesh=mesh, **kwargs)
    return fsdp2.fully_shard(model, mesh=mesh, **kwargs)


def batch_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = case.batch(8)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(here())

    return map_tensors(move, batch.args), map_tensors(move, batch.kwargs)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_of_a_plain_model(
    mesh: DeviceMesh, name: str, reshard_after_forward: bool
) -> None:
    case = CASES[name]
    reference = seeded(case.build).to(here())
    model = shard(
        seeded(case.build).to(here()), case, mesh, reshard_after_forward=reshard_after_forward
    )
    optimizers = [optimizer_of(model), optimizer_of(reference)]
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    for _ in range(4):
        args, kwargs = batch_of(case)
        losses = [loss_of(m(*args, **kwargs)) for m in (model, reference)]
        for loss in losses:
            loss.backward()
        assert_same(losses[0], losses[1], "loss", 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        assert parameter.device == here()
        assert_same(local_of(parameter), expected[key], key, 1e-5)
    assert any(
        not torch.equal(parameter, old)
        for parameter, old in zip(reference.parameters(), start, strict=True)
    )


def test_bf16_training_equals_master_weights_by_hand(mesh: DeviceMesh) -> None:
    """Compute in bf16, keep and step in fp32: cast, run, cast the gradients back, step."""
    case = CASES["stack"]
    reference = seeded(case.build).to(here())
    model = shard(seeded(case.build).to(here()), case, mesh, mp_policy=BF16)
    optimizers = [optimizer_of(model), optimizer_of(reference)]
    for _ in range(4):
        args, _ = batch_of(case)
        low = copy.deepcopy(reference).bfloat16()
        output = model(*args)
        assert output.dtype is torch.bfloat16
        losses = [loss_of(output), loss_of(low(args[0].bfloat16()))]
        for loss in losses:
            loss.backward()
        assert_same(losses[0], losses[1], "loss", 1e-2)
        for ours, theirs in zip(reference.parameters(), low.parameters(), strict=True):
            assert theirs.grad is not None
            ours.grad = theirs.grad.float()
        sharded = dict(model.named_parameters())
        for key, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert sharded[key].grad.dtype is torch.float32
            assert_same(local_of(sharded[key].grad), parameter.grad, f"{key}.grad", 1e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_steady_step_never_waits_for_the_device(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    case = CASES["stack"]
    model = shard(
        seeded(case.build).to(here()),
        case,
        mesh,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
    )
    optimizer = optimizer_of(model)
    args, kwargs = batch_of(case)

    def step() -> None:
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with no_synchronisation():
        for _ in range(2):
            step()
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        torch.ones(1, device=here()).item()  # the check itself works


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_offloaded_training_equals_that_on_the_device(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy, pin_memory: bool
) -> None:
    """Shards, gradients and optimizer state are on the CPU; the numbers are the same."""
    case = CASES["stack"]
    offload = fsdp2.CPUOffloadPolicy(pin_memory=pin_memory)
    model = shard(seeded(case.build), case, mesh, mp_policy=policy, offload_policy=offload)
    reference = shard(seeded(case.build), case, mesh, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(4):
        args, kwargs = batch_of(case)
        for part in range(2):  # accumulate over two backwards, on shards or unsharded
            for m in (model, reference):
                m.set_requires_gradient_sync(step % 2 == 0 or part == 1)  # type: ignore[operator]
                keep_compute_busy()
                loss_of(m(*args, **kwargs)).backward()
        whole = dict(reference.named_parameters())
        for key, parameter in model.named_parameters():
            assert parameter.device.type == "cpu"
            assert parameter.grad is not None
            assert local_of(parameter).is_pinned() == pin_memory
            assert_same(local_of(parameter.grad).cuda(), local_of(whole[key].grad), key, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    for key, expected in reference.state_dict().items():
        assert state[key].device.type == "cpu"
        assert_same(local_of(state[key]).cuda(), local_of(expected), key, 1e-4)
    model.load_state_dict(state)
    args, kwargs = batch_of(case)
    assert_same(loss_of(model(*args, **kwargs)), loss_of(reference(*args, **kwargs)), "loss", 1e-4)


def test_an_offloaded_optimizer_in_backward_sees_finished_gradients(mesh: DeviceMesh) -> None:
    """A hook that runs when a gradient has arrived reads it on the host: the copy is over."""
    case = CASES["stack"]
    offload = fsdp2.CPUOffloadPolicy()
    model = shard(seeded(case.build), case, mesh, offload_policy=offload)
    reference = shard(seeded(case.build), case, mesh)
    seen: dict[str, Tensor] = {}
    for key, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, key=key: seen.__setitem__(key, local_of(p.grad).clone())
        )
    args, kwargs = batch_of(case)
    for m in (model, reference):
        keep_compute_busy()
        loss_of(m(*args, **kwargs)).backward()
    for key, parameter in reference.named_parameters():
        assert_same(seen[key].cuda(), local_of(parameter.grad), key, 1e-5)


def test_an_exception_in_backward_and_training_on(mesh: DeviceMesh) -> None:
    case = CASES["stack"]
    reference = seeded(case.build).to(here())
    model = shard(seeded(case.build).to(here()), case, mesh)
    args, kwargs = batch_of(case)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    handle = model.blocks[1].register_forward_hook(
        lambda module, given, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        loss_of(model(*args, **kwargs)).backward()
    handle.remove()
    model.zero_grad()
    losses = [loss_of(m(*args, **kwargs)) for m in (model, reference)]
    for loss in losses:
        loss.backward()
    assert_same(losses[0], losses[1], "loss")
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        assert_same(local_of(parameter.grad), expected[key].grad, f"{key}.grad")


def test_memory_returns(mesh: DeviceMesh) -> None:
    case = CASES["stack"]
    args, kwargs = batch_of(case)

    def train(sharded: bool) -> list[weakref.ref[Any]]:
        model = seeded(case.build).to(here())
        if sharded:
            shard(model, case, mesh)
        for _ in range(2):
            loss_of(model(*args, **kwargs)).backward()
        return [weakref.ref(model), *[weakref.ref(p) for p in model.parameters()]]

    train(sharded=False)  # what libraries allocate once and keep
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    references = train(sharded=True)
    gc.collect()
    torch.cuda.synchronize()
    assert [reference() for reference in references] == [None] * len(references)
    assert torch.cuda.memory_allocated() == before


def test_a_forward_without_gradients_leaves_the_shards_only(mesh: DeviceMesh) -> None:
    """A unit that is over holds nothing but its shard; one more unit's gather may be retired."""
    width, count = 1024, 6
    blocks = [nn.Linear(width, width, bias=False) for _ in range(count)]
    model = nn.Sequential(*blocks).to(here())
    nbytes = width * width * 4
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    x = torch.ones(1, width, device=here())
    gc.collect()
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 4 * nbytes


# --- several ranks on one device: the order of streams --------------------------------------------


class Blob(nn.Module):
    """Large enough that copies take a while, and uneven over any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(1021, 517))
        self.column = nn.Parameter(torch.randn(517, 301).t())
        self.small = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.randn(()))


LOOPBACKS: dict[str, dict[str, Any]] = {
    "two ranks": {"shard": 2},
    "three ranks": {"shard": 3},
    "2 replicas of 2": {"shard": 2, "replicate": 2},
    "bf16": {"shard": 3, "policy": BF16},
}


def simulate(name: str) -> LoopbackGroup:
    torch.manual_seed(5)
    module = Blob().to(here())
    return LoopbackGroup(module, device=str(here()), streams=streams_for(here()), **LOOPBACKS[name])


def assert_whole(ranks: LoopbackGroup, factor: float = 1.0) -> None:
    dtype = ranks.groups[0].policy.param_dtype or torch.float32
    expected = dict(ranks.original.named_parameters())
    for module in ranks.modules:
        for name, param in module.named_parameters():
            assert torch.equal(param, (expected[name] * factor).to(dtype)), name


def order_gathers(ranks: LoopbackGroup) -> None:
    """Do what the beginning of a forward does."""
    ranks.groups[0].streams.order_after_compute("gather")


def test_a_device_has_lanes() -> None:
    streams = streams_for(here())
    assert isinstance(streams, DeviceStreams)
    assert not streams.async_op


@pytest.mark.parametrize("name", LOOPBACKS)
@pytest.mark.usefixtures("four_ranks")
def test_gathered_parameters_are_whole_however_busy_compute_is(name: str) -> None:
    ranks = simulate(name)
    for _ in range(3):
        order_gathers(ranks)
        keep_compute_busy()
        ranks.gather()
        assert_whole(ranks)
        ranks.reshard()
        sizes = {
            param.unsharded.untyped_storage().nbytes()
            for group in ranks.groups
            for param in group.params
        }
        assert sizes == {0}


@pytest.mark.usefixtures("four_ranks")
def test_a_gather_sees_what_compute_wrote_before() -> None:
    ranks = simulate("three ranks")
    factor = 1.0
    for _ in range(3):
        keep_compute_busy()
        with torch.no_grad():
            for rank in range(3):
                for param in ranks.parameters(rank):
                    local_of(param).mul_(2.0)
        factor *= 2.0
        order_gathers(ranks)
        ranks.gather()
        assert_whole(ranks, factor)
        ranks.reshard()


@pytest.mark.usefixtures("four_ranks")
def test_a_gather_buffer_is_not_reused_while_compute_still_reads_it() -> None:
    """The unpack is delayed; the next gather, of other values, must not take its buffer."""
    first, second = simulate("three ranks"), simulate("three ranks")
    streams = first.groups[0].streams
    for group in second.groups:
        group.streams = streams
    with torch.no_grad():
        for rank in range(3):
            for param in second.parameters(rank):
                local_of(param).zero_()
    for _ in range(3):
        order_gathers(first)
        first.each(ParamGroup.inspect)
        first.each(ParamGroup.unshard)
        keep_compute_busy()
        first.wait()
        second.gather()
        assert_whole(first)
        assert_whole(second, 0.0)
        first.reshard()
        second.reshard()


@pytest.mark.parametrize("name", LOOPBACKS)
@pytest.mark.usefixtures("four_ranks")
def test_reduced_gradients_are_chunks_of_the_mean_however_busy_compute_is(name: str) -> None:
    ranks = simulate(name)
    count = len(ranks.groups)
    for step in range(3):
        order_gathers(ranks)
        ranks.gather()
        keep_compute_busy()
        for rank, module in enumerate(ranks.modules):
            for param in module.parameters():
                param.grad = torch.full_like(param, float(1 + rank + step))
        ranks.reduce()
        ranks.reshard()
        mean = sum(1 + rank + step for rank in range(count)) / count
        for group in ranks.groups:
            for param in group.params:
                layout = param.placement.layout
                whole = torch.full(layout.shape, mean, device=here())
                expected = chunk_of(whole, layout.dim, group.data.shard.rank, layout.size)
                torch.testing.assert_close(local_of(param.sharded.grad), expected)
                param.sharded.grad = None


@pytest.mark.usefixtures("four_ranks")
def test_a_group_never_waits_for_the_device() -> None:
    ranks = simulate("2 replicas of 2")

    def step() -> None:
        order_gathers(ranks)
        ranks.gather()
        for module in ranks.modules:
            for param in module.parameters():
                param.grad = torch.ones_like(param)
        ranks.reshard()
        ranks.reduce()
        for module in ranks.modules:
            module.zero_grad()

    for _ in range(2):
        step()
    with no_synchronisation():
        step()
