"""Promise: scales of blocks of an optimizer's states are those of the whole parameter.

With `fsdp2.Aligned` no shard divides a block: steps have the bits of the unsharded model, and a
checkpoint loads on other layouts. `tests/ecosystem` shows it of torchao and bitsandbytes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2._core.base import torch_dtensor
from tests.kit.in_turn import shard_each
from tests.kit.models import seeded
from tests.kit.parity import make_mesh, whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow

BLOCK, LEAST = 8, 24

pytestmark = pytest.mark.skipif(
    not torch_dtensor.asks_subclasses(), reason="this torch asks no subclass of DTensor"
)


class Codes(Tensor):
    """Codes of one byte and a scale for each block, in a tensor that wraps them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type[Codes], codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.default:
            return Codes(args[0].codes.view(args[1]), args[0].scale)
        if func is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is kept in bytes, with a scale for each block of eight elements.

    Small tensors, and those that blocks do not divide, keep theirs in fp32, as torchao's do.
    """

    def __init__(self, params: Any, lr: float = 0.1, wraps: bool = False) -> None:
        super().__init__(params, {"lr": lr, "wraps": wraps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, numel = self.state[param], param.numel()
                is_small = numel < LEAST or numel % BLOCK != 0
                if not state:
                    state["step"] = torch.zeros(())
                    state.update(self._empty(param, is_small, group["wraps"]))
                state["step"] += 1
                if "momentum" in state and not isinstance(state["momentum"], Codes):
                    state["momentum"].mul_(0.9).add_(param.grad)
                    param.sub_(state["momentum"], alpha=group["lr"])
                    continue
                kept = state["momentum"] if group["wraps"] else None
                codes = state["codes"] if kept is None else kept.codes
                scale = state["scale"] if kept is None else kept.scale
                values = (codes.view(-1, BLOCK).float() - 128) * scale[:, None]
                values = values * 0.9 + param.grad.reshape(-1, BLOCK)
                scale.copy_(values.abs().amax(1) / 127)
                rounded = torch.round(values / scale.clamp(min=1e-12)[:, None]) + 128
                codes.copy_(rounded.to(torch.uint8).view(codes.shape))
                param.sub_(values.view(param.shape), alpha=group["lr"])

    def _empty(self, param: Tensor, is_small: bool, wraps: bool) -> dict[str, Tensor]:
        if is_small:
            return {"momentum": torch.zeros_like(param)}
        codes = torch.full(param.shape, 128, dtype=torch.uint8)
        scale = torch.zeros(param.numel() // BLOCK)
        if wraps:
            return {"momentum": Codes(codes, scale)}
        return {"codes": codes, "scale": scale, "qmap": torch.arange(256.0)}


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 29), nn.Linear(29, 24), nn.Linear(24, 8, bias=False))
    model.append(nn.Linear(8, 1))
    return model


def choose(param: nn.Parameter) -> Any:
    if param.numel() % BLOCK:
        return fsdp2.Whole()
    return fsdp2.Aligned(None, multiple_of=BLOCK, at_least=LEAST)


def sharded(seed: int, mesh: Any) -> nn.Module:
    model = seeded(build, seed)
    shard_each(*model, mesh=mesh, shard_placement_fn=choose)
    return fsdp2.fully_shard(model, mesh=mesh)


def optimizer_of(model: nn.Module, wraps: bool) -> Any:
    params = model.parameters()
    return fsdp2.optim.local(Momentum, params, elementwise=True, lr=0.1, wraps=wraps)


def give_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 8)).tanh().square().mean().backward()


@pytest.mark.parametrize("wraps", [False, True])
@ranks(slow(2), 3, slow(4))
def test_steps_and_checkpoints_are_those_of_the_unsharded_model(
    wraps: bool, tmp_path: Path
) -> None:
    """Thirty steps, in the middle of which blocks come to lie on other ranks, by a checkpoint.

    Replicas of two on four ranks go on where one axis of four left off, and the other way round.
    """
    layouts = [(4,), (2, 2)] if torch.distributed.get_world_size() == 4 else [()]
    for number, layout in enumerate(layouts):
        plain, model = seeded(build), sharded(1, make_mesh(*layout))
        reference = Momentum(plain.parameters(), wraps=wraps)
        optimizer = optimizer_of(model, wraps)
        for step in range(30):
            give_gradients(model, step)
            for leaf, param in zip(plain.parameters(), model.parameters(), strict=True):
                leaf.grad = whole(param.grad).clone()
            optimizer.step()
            reference.step()
            model.zero_grad()
            for (name, leaf), param in zip(
                plain.named_parameters(), model.parameters(), strict=True
            ):
                assert torch.equal(whole(param), leaf), (name, step)
            if step == 12:
                folder = tmp_path / str(number)
                fsdp2.checkpoint.save(folder, model, optimizer)
                model = sharded(2, make_mesh(*layouts[number - 1]))
                optimizer = optimizer_of(model, wraps)
                fsdp2.checkpoint.load(folder, model, optimizer)
        full = fsdp2.checkpoint.full_state(model, optimizer, rank0_only=False)
        for name, leaf in plain.named_parameters():
            entry, state = full["optimizer"]["state"][name], reference.state[leaf]
            kept = state.get("momentum")
            if isinstance(kept, Codes):
                state = {"momentum.codes": kept.codes, "momentum.scale": kept.scale, **state}
            found = {key for key, value in entry.items() if value.dim()}
            assert found == {
                key
                for key, value in state.items()
                if value.dim() and key != "qmap" and type(value) is Tensor
            }
            for key in found:
                assert torch.equal(entry[key], state[key]), (name, key)


@ranks(2)
def test_a_state_loads_before_a_step_and_is_saved_again(tmp_path: Path) -> None:
    """What was loaded is saved as it is, also where nothing stepped; and a full state loads."""
    model = sharded(1, make_mesh())
    optimizer = optimizer_of(model, False)
    give_gradients(model, 0)
    optimizer.step()
    full = fsdp2.checkpoint.full_state(model, optimizer, rank0_only=False)
    fsdp2.checkpoint.save(tmp_path / "a", model, optimizer)
    states = []
    for way in ("files", "full"):
        other = sharded(2, make_mesh())
        its = optimizer_of(other, False)
        if way == "files":
            fsdp2.checkpoint.load(tmp_path / "a", other, its)
        else:
            fsdp2.checkpoint.load_full_state(other, full, its)
        states.append(fsdp2.checkpoint.full_state(other, its, rank0_only=False))
    for state in states:
        for name, entry in full["optimizer"]["state"].items():
            for key, value in entry.items():
                there = state["optimizer"]["state"][name][key]
                assert torch.equal(there, value), (name, key)
                assert there.dtype == value.dtype


@ranks(3)
def test_a_state_of_a_model_whose_blocks_lie_on_other_ranks() -> None:
    """`load_state_dict` redistributes it, also where a rank has nothing of a parameter."""
    models = [sharded(1, make_mesh()) for _ in range(3)]  # none runs: blocks go on going round
    optimizers = [optimizer_of(model, False) for model in models]
    for step in range(2):
        give_gradients(models[0], step)
        optimizers[0].step()
        models[0].zero_grad()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        model.load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    drawn = torch.get_rng_state()
    optimizers[0].state_dict()
    assert torch.equal(torch.get_rng_state(), drawn)
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 7)
        optimizer.step()
    for model in models[1:]:
        for mine, param in zip(model.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(whole(mine), whole(param), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_shards_that_divide_blocks_are_told(tmp_path: Path) -> None:
    """The parameter, what is divided, and what to do: on all ranks, and nothing is written."""

    def stepped(columns: int, rows: int) -> tuple[Any, Any]:
        model = fsdp2.fully_shard(nn.Linear(columns, rows, bias=False), mesh=make_mesh())
        optimizer = optimizer_of(model, False)
        model(torch.randn(4, columns)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    # five rows of twelve: no block of eight ends there, and the class keeps no blocks of the shard
    model, optimizer = stepped(12, 10)
    optimizer.state[model.weight]["scale"] = torch.ones(7)
    with pytest.raises(
        fsdp2.UnsupportedError, match=r"(scale have neither|different layouts).*local_state"
    ):
        fsdp2.checkpoint.save(tmp_path / "a", model, optimizer)
    # four rows and three, 32 and 24 elements: rows are whole blocks
    fsdp2.checkpoint.save(tmp_path / "b", *stepped(8, 7))
    short, optimizer = stepped(8, 5)  # three rows, and two, of which the class keeps fp32
    with pytest.raises(fsdp2.UnsupportedError, match=r"weight: .*different layouts.*Aligned"):
        fsdp2.checkpoint.save(tmp_path / "c", short, optimizer)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


class Moody(torch.optim.Optimizer):
    """Steps in training alone, as optimizers without schedules do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"trains": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("not in training")
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("z", torch.clone(param)).sub_(param.grad)
                    param.sub_(param.grad)


@ranks(3)
def test_a_class_that_refuses_to_step_is_saved() -> None:
    """Two rows over three ranks: the rank without one asks the class what states would be."""
    model = nn.Linear(4, 2)
    fsdp2.fully_shard(model)
    optimizer = fsdp2.optim.local(Moody, model.parameters(), elementwise=True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = optimizer.state_dict()["state"]
    for group in optimizer.param_groups:
        group["trains"] = False
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, entry in found.items():
        assert entry.keys() == expected[number].keys()
