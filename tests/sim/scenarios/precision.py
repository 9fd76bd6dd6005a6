"""Dtypes: of compute, reductions, outputs, inputs, buffers and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2 import MixedPrecisionPolicy
from tests.kit.in_turn import shard_each
from tests.kit.models import Block as PlainBlock
from tests.kit.models import loss_of, no_units, stack
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import Training, each_step, train, trained, training

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COARSE = 2e-2  # of bf16: sums are made in another order, and round at 2 ** -8
FINE = 2e-3  # of fp16
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


trained("fp32")
trained("bf16_reduced_in_fp32", tolerance=COARSE, mp_policy=MIXED)
# Gradients are reduced in the dtype of the shards, which is fp32.
trained("bf16", slow=True, tolerance=COARSE, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
trained(
    "bf16_throughout",
    slow=True,
    tolerance=COARSE,
    mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
)
trained("bf16_accumulated", tolerance=COARSE, mp_policy=MIXED, microbatches=3)
# Codes are encoded and decoded on the gather's lane, and the host waits for neither.
trained(
    "parameters_in_codes",
    tolerance=8e-2,
    mp_policy=MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn),
)
# Reduced gradients lie in memory of the reduce lane, and are copied to narrower ones.
trained("reduced_in_fp64", slow=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP64))


@scenario(2, slow=True, tolerance=COARSE)
def inputs_as_they_are(world: World) -> Values:
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=FP32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=True,
    )
    return train(world, mp_policy=policy)


@scenario(2, slow=True, tolerance=COARSE)
def outputs_in_fp32(world: World) -> Values:
    """The root's outputs are cast; what blocks give each other is not."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)

    def prepare(model: Any) -> None:
        shard_each(*model.blocks, mesh=world.mesh(), mp_policy=MIXED)

    return train(world, units=no_units, prepare=prepare, mp_policy=policy)


@scenario(2, tolerance=COARSE)
def some_parameters_in_fp32(world: World) -> Values:
    """A group of several dtypes: gathered as bytes, gradients packed from two dtypes."""
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=FP32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=True,
        param_dtype_override_fn=lambda param: FP32 if param.dim() == 1 else None,
    )

    def prepare(model: Any) -> None:
        shard_each(*model.blocks, mesh=world.mesh(), mp_policy=policy)

    return train(world, stack(CastsItself), units=no_units, prepare=prepare, mp_policy=MIXED)


class CastsItself(PlainBlock):
    """Norms and biases may be in another dtype than weights."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        for layer in (self.up, self.mid, self.down):
            weight, bias = layer.weight, layer.bias
            hidden = torch.tanh((hidden.to(weight.dtype) @ weight.t()).to(bias.dtype) + bias)
        return x + (hidden * self.norm.weight + self.norm.bias).to(x.dtype)


@scenario(2, slow=True, tolerance=COARSE)
def gradients_stay_narrow(world: World) -> Values:
    """The optimizer gets gradients in the dtype of the reduction."""
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True
    )
    run = training(world, mp_policy=policy)
    for step in run.steps():
        loss_of(run.model(run.inputs[step])).backward()
        with torch.no_grad():
            for param in run.model.parameters():
                assert param.grad.dtype is BF16
                param.to_local().sub_(param.grad.to_local().float(), alpha=0.05)
                param.grad = None
    return run.values()


@scenario(2, tolerance=COARSE)
def grad_dtypes(world: World) -> Values:
    """Gradients that users let be narrower than their parameters, and of any dtype."""

    def set_up(model: Any) -> None:
        for position, param in enumerate(model.blocks.parameters()):
            param.grad_dtype = (BF16, None)[position % 2]

    policy = MixedPrecisionPolicy(param_dtype=BF16)

    def update(run: Any) -> None:
        with torch.no_grad():
            for param in run.model.parameters():
                param.to_local().sub_(param.grad.to_local().to(param.dtype), alpha=0.05)
                param.grad = None

    return train(world, mp_policy=policy, set_up=set_up, update=update)


class WithBuffer(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 13))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


@scenario(2, tolerance=COARSE)
def buffers_in_bf16(world: World) -> Values:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16)
    return train(world, stack(WithBuffer), mp_policy=policy)


@each_step(
    slow=True,
    tolerance=COARSE,
    unsteady=99,  # memory of plans is filled from the host
    mp_policy=MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32, full_precision_in_eval=True
    ),
)
def evaluation_in_fp32(run: Training, step: int) -> Values:
    """Units are planned again at each change between training and evaluation."""
    run.model.train()
    run.train(step)
    run.model.eval()
    with torch.no_grad():
        return {"output": run.model(run.inputs[step])}


@scenario(2, slow=True, tolerance=FINE)
def fp16_with_a_fixed_scale(world: World) -> Values:
    """Reductions in fp16 are divided in two steps."""
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)

    def update(run: Any) -> None:
        for param in run.model.parameters():
            param.grad.to_local().mul_(1 / 64)
        run.update()

    return train(
        world, mp_policy=policy, each=lambda m, x: (loss_of(m(x)) * 64).backward(), update=update
    )


@scenario(2, tolerance=FINE, may_wait="GradScaler reads found_inf on the host in each step")
def fp16_with_a_scaler(world: World) -> Values:
    run = training(world, mp_policy=MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32))
    scaler = torch.amp.GradScaler(world.kind, init_scale=2.0**8, growth_interval=2)
    for step in run.steps():
        scaler.scale(loss_of(run.model(run.inputs[step]))).backward()
        scaler.step(run.optim)
        scaler.update()
        run.optim.zero_grad()
    return run.values()


# Shards of three dtypes in one group.
trained("mixed_dtypes", case="mixed_dtypes", mp_policy=MixedPrecisionPolicy(reduce_dtype=FP64))
# Frozen int8 and float8 weights, with adapters that are trained.
trained("quantised", case="quantised", slow=True)


@scenario(2, tolerance=COARSE)
def autocast(world: World) -> Values:
    def each(model: nn.Module, x: Tensor) -> None:
        with torch.autocast(world.kind, dtype=BF16):
            loss = loss_of(model(x))
        loss.backward()

    return train(world, each=each)
