"""Promise: torchao's float8, int8 and ternary weights, and its QAT, train on fsdp2's units.

Their weights are tensor subclasses that say themselves what is gathered. Weights and losses are
torch's own, to the bit.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from tests.ecosystem._clients import Ran, run_program
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slow import slow

pytest.importorskip("torchao", reason="the package torchao is not installed")

import torchao.prototype.quantized_training as quantized
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim.adam import _AdamW
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

pytestmark = pytest.mark.ecosystem

WIDTH, ROWS = 32, 16
BF16, FP32 = torch.bfloat16, torch.float32


@functools.cache
def torchs_own() -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        return run_program("with_torchao", "torch", folder)


@pytest.mark.parametrize("way", ["-m fsdp2", "imported before"])
def test_the_program_trains_as_with_torchs_own(way: str, tmp_path: Path) -> None:
    """Float8 all-gather with scales computed ahead, and on from a checkpoint."""
    ours = run_program("with_torchao", way, str(tmp_path), client="torchao.float8")
    theirs = torchs_own()
    assert (theirs.implementation, ours.implementation) == ("torch", "fsdp2")
    assert ours.losses == theirs.losses
    assert len(ours.losses) == 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def float8(model: nn.Module) -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)


def qat(model: nn.Module) -> None:
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=WIDTH)
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def rounding_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make torchao's AdamW, which updates int8 weights with stochastic rounding."""
    return _AdamW(parameters, lr=1e-2, bf16_stochastic_round=False)


@dataclass(frozen=True)
class Kind:
    """What is done to a model before it is sharded, and what trains it."""

    convert: Callable[[nn.Module], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    after_step: Callable[[nn.Module], Any] = lambda model: None
    own_dtypes: bool = True  # trains without param_dtype too


KINDS = {
    "float8": Kind(float8),
    "float8_scales_ahead": Kind(float8, after_step=precompute_float8_dynamic_scale_for_fsdp),
    "qat": Kind(qat),
    "int8_weights": Kind(
        lambda model: quantize_(model, quantized.int8_weight_only_quantized_training()),
        rounding_adamw,
    ),
    "int8_products": Kind(
        lambda model: quantize_(model, quantized.int8_mixed_precision_training()),
        own_dtypes=False,
    ),
    "bitnet": Kind(lambda model: quantize_(model, quantized.bitnet_training())),
}


def prepare(kind: Kind, policy: dict[str, Any], mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(build)
    kind.convert(model)
    for part in (*model, model):
        torch_fsdp.fully_shard(part, mesh=mesh, mp_policy=torch_fsdp.MixedPrecisionPolicy(**policy))
    return model, kind.optimizer(model.parameters())


def train(
    kind: Kind, model: Any, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype
) -> list[Tensor]:
    losses = []
    for step in steps:
        torch.manual_seed(step)  # for stochastic rounding
        source = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(ROWS, WIDTH, generator=source)
        loss = (model(inputs.to(dtype)).float() - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kind.after_step(model)
        losses.append(loss.detach())
    return losses


def values(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a shard consists of."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return [local.detach().clone()]
    names, _ = local.__tensor_flatten__()
    return [getattr(local, name).detach().clone() for name in names]


def of_both(run: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
    with fsdp2.replace_torch():
        losses, shards = run()
    gc.collect()
    expected_losses, expected_shards = run()
    gc.collect()
    assert len(losses) == len(expected_losses) > 0
    assert all(map(torch.equal, losses, expected_losses)), (losses, expected_losses)
    assert len(shards) == len(expected_shards)
    assert all(map(torch.equal, shards, expected_shards))


@pytest.mark.parametrize("in_bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", KINDS)
@ranks(2)
def test_training_is_that_on_torchs_own(name: str, in_bf16: bool) -> None:
    """Losses and shards of four steps, to the bit."""
    kind = KINDS[name]
    policy = {"param_dtype": BF16, "reduce_dtype": FP32} if in_bf16 else {}

    def run() -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = prepare(kind, policy, shared_mesh((dist.get_world_size(),)))
        losses = train(kind, model, optimizer, range(4), BF16 if in_bf16 else FP32)
        return losses, [part for param in model.parameters() for part in values(param)]

    of_both(run)


@pytest.mark.parametrize("name", ["float8_scales_ahead", slow("int8_weights")])
@ranks(4)
def test_replicas_of_shards(name: str) -> None:
    """HSDP over two by two ranks."""
    kind = KINDS[name]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = prepare(
            kind,
            {"param_dtype": BF16, "reduce_dtype": FP32},
            shared_mesh((2, 2), ("replicate", "shard")),
        )
        losses = train(kind, model, optimizer, range(3), BF16)
        return losses, [part for param in model.parameters() for part in values(param)]

    of_both(run)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "bitnet"])
@ranks(3)
def test_ranks_that_do_not_divide_a_weight(name: str) -> None:
    """Outputs and input gradients are the unsharded model's; torch's own leaves padding to torchao.

    torchao does none: there the ranks send pieces of several sizes, and one aborts. The scale of
    BitNet is the mean of the ranks' own means, which is another number where pieces differ.
    """
    kind = KINDS[name]
    plain = seeded(build)
    kind.convert(plain)
    with fsdp2.replace_torch():
        model, _ = prepare(kind, {"param_dtype": FP32}, shared_mesh((3,)))
    assert WIDTH % 3
    found = []
    for one in (model, plain):
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        outputs = one(inputs.requires_grad_())
        outputs.square().mean().backward()
        found.append((outputs.detach(), inputs.grad))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    """A distributed checkpoint of float8 weights, and of what was computed, is read by either."""
    kind, mesh = KINDS["float8_scales_ahead"], shared_mesh((2,))
    paths: list[Path] = []

    def save_and_resume() -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = prepare(kind, {}, mesh)
        train(kind, model, optimizer, range(2), FP32)
        paths.append(tmp_path / f"{len(paths)}")
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=paths[-1])
        expected = train(kind, model, optimizer, range(2, 4), FP32)
        losses, shards = resume(paths[-1])
        assert all(map(torch.equal, losses, expected))
        return losses, shards

    def resume(path: Path) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = prepare(kind, {}, mesh)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        kind.after_step(model)
        losses = train(kind, model, optimizer, range(2, 4), FP32)
        return losses, [part for param in model.parameters() for part in values(param)]

    of_both(save_and_resume)
    of_both(lambda: resume(paths.pop()))


@ranks(2)
def test_int8_weights_cannot_be_saved(tmp_path: Path) -> None:
    """Their class has no `is_pinned`, which a distributed checkpoint asks for, with either."""

    def run() -> None:
        model, _ = prepare(KINDS["int8_weights"], {}, shared_mesh((2,)))
        with pytest.raises(CheckpointException, match="is_pinned"):
            dcp.save(model.state_dict(), checkpoint_id=tmp_path)

    with fsdp2.replace_torch():
        run()
    run()
    gc.collect()


@ranks(2)
def test_float8_is_what_is_gathered() -> None:
    """The local shard of a weight is gathered as bytes; scales ahead save each an all-reduce."""
    kind = KINDS["float8_scales_ahead"]
    with fsdp2.replace_torch():
        model, _ = prepare(kind, {"param_dtype": BF16}, shared_mesh((2,)))
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    reductions = []
    for _ in range(2):
        with CommDebugMode() as seen, torch.no_grad():
            model(torch.randn(ROWS, WIDTH, dtype=BF16))
        reductions.append(
            sum(n for op, n in seen.get_comm_counts().items() if "all_reduce" in str(op))
        )
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert reductions == [len(weights), 0]


@ranks(2)
def test_units_of_float8_alone_over_gloo() -> None:
    """Torch's own sends them as they are, without a bias beside them, and gloo has no float8."""

    def run() -> Tensor:
        model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
        whole = model[0].weight.detach().clone()
        float8(model)
        torch_fsdp.fully_shard(model, mesh=shared_mesh((2,)))
        found = model(torch.eye(WIDTH))
        torch.testing.assert_close(found, whole.T, atol=0.02, rtol=0.1)
        return found

    with fsdp2.replace_torch():
        run()
    gc.collect()
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        run()
    gc.collect()
