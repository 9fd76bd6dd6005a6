"""Training on one GPU: the numbers of a plain model, no synchronisation with the host, memory.

One process, one rank, NCCL.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._core.base.policy import MixedPrecisionPolicy
from tests.gpu._device import (
    BF16,
    ON_A_GPU,
    batch_of,
    here,
    keep_compute_busy,
    no_synchronisation,
    optimizer_of,
    shard,
)
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import assert_same
from tests.unit._loopback import local_of

pytestmark = ON_A_GPU


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("name", CASES)
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
        # AdamW on the CPU may differ in the last bit, which rounds a bf16 weight another way
        for key, parameter in model.named_parameters():
            expected = local_of(whole[key])
            assert_same(local_of(parameter).cuda(), expected, key, 1e-4)
            with torch.no_grad():
                local_of(parameter).copy_(expected)
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


def test_the_host_may_write_offloaded_shards_once_a_forward_is_over(mesh: DeviceMesh) -> None:
    """Without gradients nothing waits for the device: a copy may still read the pinned shards."""
    case = CASES["stack"]
    model = shard(seeded(case.build), case, mesh, offload_policy=fsdp2.CPUOffloadPolicy())
    args, kwargs = batch_of(case)
    with torch.no_grad():
        expected = loss_of(model(*args, **kwargs))
        for _ in range(3):
            keep_compute_busy()
            output = model(*args, **kwargs)
            old = [local_of(parameter).clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                local_of(parameter).fill_(7.0)
            torch.testing.assert_close(loss_of(output), expected)
            for parameter, value in zip(model.parameters(), old, strict=True):
                local_of(parameter).copy_(value)


@pytest.mark.parametrize("kind", [torch.Event, torch.cuda.Event])
def test_a_forward_waits_for_the_optimizers_event(mesh: DeviceMesh, kind: Any) -> None:
    case = CASES["stack"]
    model = shard(seeded(case.build).to(here()), case, mesh)
    args, kwargs = batch_of(case)
    loss_of(model(*args, **kwargs)).backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        keep_compute_busy()
        for parameter in model.parameters():
            local_of(parameter).fill_(0.25)
        event = kind()
        event.record(side)
    model.set_post_optim_event(event)  # type: ignore[operator]
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda module, _: seen.extend(p.detach().clone() for p in module.parameters())
        )
    model(*args, **kwargs)
    assert seen
    for value in seen:
        assert torch.equal(value, torch.full_like(value, 0.25))


@pytest.mark.parametrize("kind", [torch.Stream, torch.cuda.Stream])
def test_gradients_wait_for_a_hook_in_a_stream_of_the_users(mesh: DeviceMesh, kind: Any) -> None:
    case = CASES["stack"]
    model = shard(seeded(case.build).to(here()), case, mesh)
    args, kwargs = batch_of(case)

    def clear(reduced: Tensor) -> None:
        keep_compute_busy()
        reduced.zero_()

    stream = kind(device=here())
    model.set_all_reduce_hook(clear, stream=stream)  # type: ignore[operator]
    for _ in range(2):
        loss_of(model(*args, **kwargs)).backward()
        own = [p for name, p in model.named_parameters() if "blocks" not in name]
        assert own
        for parameter in own:
            assert torch.equal(local_of(parameter.grad), torch.zeros_like(local_of(parameter)))
        model.zero_grad()


@pytest.mark.parametrize("reduce_unused", [True, False])
def test_parameters_that_nobody_used(mesh: DeviceMesh, reduce_unused: bool) -> None:
    """Nothing waits if they get zeros; else they get None, which the host has to learn."""
    case = CASES["unused_parts"]
    model = shard(seeded(case.build).to(here()), case, mesh)
    reference = seeded(case.build).to(here())
    model.set_reduce_scatter_unused_params(reduce_unused)  # type: ignore[operator]
    args, kwargs = batch_of(case)
    for _ in range(2):
        loss_of(model(*args, **kwargs)).backward()
        model.zero_grad()
    if reduce_unused:
        with no_synchronisation():
            loss_of(model(*args, **kwargs)).backward()
    else:
        loss_of(model(*args, **kwargs)).backward()
    loss_of(reference(*args, **kwargs)).backward()
    absent = 0
    for key, parameter in reference.named_parameters():
        grad = dict(model.named_parameters())[key].grad
        if parameter.grad is not None:
            assert_same(local_of(grad), parameter.grad, key, 1e-5)
        elif not reduce_unused:
            assert grad is None, key
            absent += 1
    assert reduce_unused or absent


class Permuted(nn.Module):
    """Gradients that are dense in another order of dims than the parameters' own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3)
        self.transposed = nn.Parameter(torch.randn(29, 13).t())
        self.row = nn.Parameter(torch.randn(1, 29))

    def forward(self, x: Tensor) -> Tensor:
        channels = self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3))
        return channels @ (self.transposed * self.row).t().t()


@pytest.mark.parametrize("channels_last", [True, False])
def test_permuted_gradients_of_one_rank_come_out_in_order(
    mesh: DeviceMesh, channels_last: bool
) -> None:
    reference = seeded(Permuted).to(here())
    if channels_last:
        reference.to(memory_format=torch.channels_last)
    model = fsdp2.fully_shard(copy.deepcopy(reference), mesh=mesh)
    x = torch.randn(4, 3, 9, 9, device=here())
    for _ in range(2):
        for m in (model, reference):
            loss_of(m(x)).backward()
    for key, parameter in model.named_parameters():
        assert_same(
            local_of(parameter.grad), dict(reference.named_parameters())[key].grad, key, 1e-4
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["stack", "one_row", "tied_lm"])
def test_steps_on_local_shards(mesh: DeviceMesh, name: str, fused: bool) -> None:
    """Gradients lie in memory that was given back in between."""
    case = CASES[name]
    reference = seeded(case.build).to(here())
    model = shard(seeded(case.build).to(here()), case, mesh)
    options = {"lr": 0.01, "eps": 1e-4, "fused": fused}
    optimizers = (
        fsdp2.optim.local(torch.optim.AdamW, model.parameters(), **options),
        torch.optim.AdamW(reference.parameters(), **options),
    )
    torch.manual_seed(3)
    for step in range(5):
        args, kwargs = batch_of(case)
        losses = [loss_of(m(*args, **kwargs)) for m in (model, reference)]
        assert_same(losses[0], losses[1], f"loss {step}", 1e-4)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


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


def test_a_gradient_of_a_backward_that_failed_is_not_set_later(mesh: DeviceMesh) -> None:
    """The host looks late at what nobody had a gradient for; what it finds then is dropped."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(13, 13), nn.Linear(13, 13)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    model = nn.Sequential(nn.Linear(13, 13), Half(), Half()).to(here())
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    x = torch.ones(3, 13, device=here())
    handle = model[0].register_forward_hook(
        lambda module, given, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        loss_of(model(x)).backward()
    handle.remove()
    model.zero_grad()
    with torch.no_grad():
        model(x)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []


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


def test_cleared_gradients_take_no_memory_in_a_forward(mesh: DeviceMesh) -> None:
    """Their memory is used again, and given back until then; what the user holds stays."""
    width, count = 1024, 6
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)]).to(here())
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    x = torch.ones(1, width, device=here())
    loss_of(nn.Linear(width, width, device=here())(x)).backward()  # cuBLAS's memory is there
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(torch.cuda.memory_allocated()))
    for _ in range(4):
        loss_of(model(x)).backward()
        model.zero_grad()
    assert seen[1] - seen[0] < width * width * 4  # not the gradients of six layers
    assert seen[3] == seen[1]
    loss_of(model(x)).backward()
    kept = model[1].weight.grad
    held = local_of(kept).clone()
    model.zero_grad()
    loss_of(model(2 * x)).backward()
    assert torch.equal(local_of(kept), held)
    assert not torch.equal(local_of(model[1].weight.grad), held)


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
