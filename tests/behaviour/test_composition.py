"""Promise: what else programs put on a model composes with ours, before and after `fully_shard`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.utils as nn_utils
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

import fsdp2
from fsdp2._core.base import events
from tests.kit.in_turn import advance, reshard_all, shard_each
from tests.kit.models import Batch, Block, Case, Stack, each_block, floats, loss_of, seeded, stack
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    global_mean,
    make_mesh,
    names_of,
    shard,
    values_of,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

# --- torch.func and forward-mode differentiation --------------------------------------------------


def rows_of_this_rank(pair: Pair) -> Tensor:
    return pair.local(pair.batch()).args[0]


def loss_by_values(model: nn.Module, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a function of what stands in the places of the model's parameters."""
    return lambda values: loss_of(torch.func.functional_call(model, values, (x,)))


@pytest.mark.parametrize("reshard_after_forward", with_slow([True, False], [False]))
@ranks(2)
def test_jvp_without_gradients(reshard_after_forward: bool) -> None:
    """Forward-mode derivatives along an input direction are those of the plain model."""
    pair = Pair("stack", reshard_after_forward=reshard_after_forward)
    for _ in range(2):
        x = rows_of_this_rank(pair)
        direction = torch.randn_like(x)
        with torch.no_grad():
            actual = torch.func.jvp(pair.model, (x,), (direction,))
            expected = torch.func.jvp(pair.reference, (x,), (direction,))
        for index, what in enumerate(("output", "tangent")):
            assert_same(actual[index], expected[index], what)
    reshard_all(pair.model)
    assert_sharded(pair.model)
    pair.train(steps=2)


@pytest.mark.parametrize(
    ("way", "what"),
    with_slow(itertools.product(["jvp", "dual"], [0, 1, None]), [("jvp", 0), ("dual", 1)]),
)
@ranks(2)
def test_reverse_through_jvp(way: str, what: int | None) -> None:
    """A loss on a derivative, on an output or on both trains the parameters of both."""

    def loss(results: Any) -> Tensor:
        return loss_of(results if what is None else results[what])

    def run(model: nn.Module, x: Tensor, direction: Tensor) -> Tensor:
        if way == "jvp":
            return loss(torch.func.jvp(model, (x,), (direction,)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            return loss(torch.autograd.forward_ad.unpack_dual(model(dual)))

    pair = Pair("stack")
    for _ in range(3):
        x = pair.batch().args[0]
        parts = list(zip(x.chunk(2), torch.randn_like(x).chunk(2), strict=True))
        run(pair.model, *parts[torch.distributed.get_rank()]).backward()
        (sum(run(pair.reference, *part) for part in parts) / 2).backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize(
    "transform",
    with_slow(["grad", "vjp", "vmap", "jacrev", "jacfwd", "hessian"], ["vjp", "vmap", "jacfwd"]),
)
@ranks(2)
def test_function_transforms_over_inputs(transform: str) -> None:
    """Transforms of a function of the input give what they give for the plain model."""
    pair = Pair("stack")

    def run(model: nn.Module, x: Tensor) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda y: model(y).square().sum())(x)
        if transform == "vjp":
            output, pull = torch.func.vjp(model, x)
            return pull(torch.ones_like(output))[0]
        if transform == "vmap":
            return torch.func.vmap(model)(x.unflatten(0, (2, 3)))
        if transform == "hessian":
            return torch.func.hessian(lambda y: model(y).square().sum())(x[:1])
        return getattr(torch.func, transform)(model)(x[:2])

    for _ in range(2):
        x = rows_of_this_rank(pair)
        assert_same(run(pair.model, x), run(pair.reference, x), transform, 5e-6)
        reshard_all(pair.model)
        assert_sharded(pair.model)
    pair.train(steps=2)


@ranks(2)
def test_vmap_with_gradients() -> None:
    """A loss of a batched forward trains the parameters."""
    pair = Pair("stack")
    pair.call = lambda x: torch.func.vmap(pair.model)(x.unflatten(0, (2, 3)))
    pair.train(steps=2)


@ranks(2)
def test_functional_grad_of_whole_parameters() -> None:
    """`torch.func.grad` over whole tensors in the parameters' places gives local gradients."""
    pair = Pair("stack")
    x = rows_of_this_rank(pair)
    values = {name: whole(p) * 0.5 for name, p in pair.model.named_parameters()}
    actual = torch.func.grad(loss_by_values(pair.model, x))(values)
    expected = torch.func.grad(loss_by_values(pair.reference, x))(values)
    for name, gradient in expected.items():
        assert_same(actual[name], gradient, name, 2e-6)
    reshard_all(pair.model)
    assert_sharded(pair.model)
    pair.train(steps=1)


@ranks(2)
def test_functional_grad_of_shards() -> None:
    """`torch.func.grad` over sharded parameters is right, or refused with the parameter's name."""
    pair = Pair("stack")
    loss = loss_by_values(pair.model, rows_of_this_rank(pair))
    values = {name: p.detach() for name, p in pair.model.named_parameters()}
    with pytest.raises(fsdp2.UnsupportedError, match=r"inp\.weight: found a DTensor in its place"):
        torch.func.grad(loss)(values)
    pair.train(steps=2)


@ranks(2, slow(4))
def test_changes_are_seen_under_a_transform() -> None:
    """What the user did to the parameters counts in a forward under `torch.func.grad` too."""
    smaller = 2 if torch.distributed.get_world_size() == 4 else True
    pair = Pair("stack", reshard_after_forward=smaller)

    def change(name: str) -> None:
        for model in (pair.model, pair.reference):
            param = model.get_parameter("inp.weight")
            if name == "replace":
                model.get_submodule("inp").weight = nn.Parameter(param.detach() * 0.5)
            else:
                param.requires_grad_(name == "thaw")

    for name in ("freeze", "thaw", "replace"):
        x = rows_of_this_rank(pair)
        change(name)
        actual = torch.func.grad(lambda y: pair.model(y).square().sum())(x)
        expected = torch.func.grad(lambda y: pair.reference(y).square().sum())(x)
        assert_same(actual, expected, name, 5e-6)
        reshard_all(pair.model)
        assert_sharded(pair.model)
        assert pair.model.get_parameter("inp.weight").requires_grad is (name != "freeze")


@ranks(2)
def test_functional_grad_of_another_dtype() -> None:
    """A placeholder that a transform could not follow through a cast is refused by name."""
    pair = Pair("stack", mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = rows_of_this_rank(pair)
    values = {name: whole(p) for name, p in pair.model.named_parameters()}
    with pytest.raises(fsdp2.UnsupportedError, match=r"inp\.weight.*bfloat16"):
        torch.func.grad(loss_by_values(pair.model, x))(values)
    pair.run(pair.model, Batch((x,), {})).backward()
    assert_sharded(pair.model)


# --- loss scaling, clipping, optimizers -----------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_fused": lambda p, lr: torch.optim.AdamW(p, lr=lr / 10, fused=True),
    "adamw_foreach": lambda p, lr: torch.optim.AdamW(p, lr=lr / 10, foreach=True),
    "adamw_plain": lambda p, lr: torch.optim.AdamW(p, lr=lr / 10, foreach=False),
    "sgd_momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", with_slow(OPTIMIZERS, ["adamw_fused"]))
@ranks(2)
def test_optimizers(name: str) -> None:
    """Every implementation of an optimizer steps on shards as on whole parameters."""
    pair = Pair("stack", optimizer=OPTIMIZERS[name])
    pair.later_rtol = 2e-5  # fused and plain kernels round differently, and Adam divides
    pair.train(steps=3)


@ranks(2)
def test_learning_rate_schedulers() -> None:
    """A scheduler drives the optimizer of a sharded model as that of a plain one."""
    pair = Pair("stack", optimizer=OPTIMIZERS["sgd_momentum"])
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6)
        for o in (pair.optimizer, pair.reference_optimizer)
    ]
    rates = []
    for _ in range(5):
        pair.backward()
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append([s.get_last_lr()[0] for s in schedulers])
    assert all(ours == theirs for ours, theirs in rates)
    assert len({ours for ours, _ in rates}) == 5
    pair.check()


@pytest.mark.parametrize("norm_type", with_slow([2.0, 1.0, float("inf")], [2.0]))
@ranks(2)
def test_clipping_by_norm(norm_type: float) -> None:
    """Torch's `clip_grad_norm_` finds the norm over all ranks and scales every shard by it."""
    pair = Pair("stack")
    for _ in range(2):
        pair.backward()
        norms = [
            nn_utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=norm_type)
            for m in (pair.model, pair.reference)
        ]
        assert_same(norms[0], norms[1], "norm", 2e-6)
        assert norms[1] > 0.05
        pair.steps += 1  # a norm is a sum in another order: exact no longer
        pair.step()
    pair.check()


@ranks(2)
def test_the_scaler_skips_a_step_on_every_rank(rank: int) -> None:
    """An overflow in one rank's rows makes every rank skip the step and halve the scale."""
    pair = Pair("stack")
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    optimizers = [pair.optimizer, pair.reference_optimizer]
    for step, scale in enumerate((256.0, 512.0, 256.0, 256.0, 512.0)):
        batch = pair.batch()
        if step == 2:
            batch.args[0][0] = float("inf")  # the first row is rank 0's
        before = values_of(pair.model)
        losses = pair.run(pair.model, pair.local(batch)), pair.run_reference(batch)
        for scaler, loss, optimizer in zip(scalers, losses, optimizers, strict=True):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if step != 2:
            assert_same_gradients(pair.model, pair.reference, 2e-6)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        after = values_of(pair.model)
        assert any(not torch.equal(after[n], before[n]) for n in before) is (step != 2)
        assert [scaler.get_scale() for scaler in scalers] == [scale, scale]
    pair.steps = 1
    pair.check()


@pytest.mark.parametrize(
    "kind", with_slow(["adamw_plain", "sgd_momentum", "adamw_foreach"], ["sgd_momentum"])
)
@ranks(2)
def test_optimizers_that_step_in_backward(kind: str) -> None:
    """An optimizer for each parameter, stepped when its gradient arrives, equals one for all."""
    pair = Pair("stack", optimizer=OPTIMIZERS[kind])
    for parameter in pair.model.parameters():
        optimizer = OPTIMIZERS[kind]([parameter], 0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert isinstance(parameter.grad, DTensor)
            advance(optimizer)

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        pair.backward()
        assert all(p.grad is None for p in pair.model.parameters())
        pair.steps += 1
        advance(pair.reference_optimizer)
    pair.later_rtol = 2e-5
    pair.check()


# --- compilation ----------------------------------------------------------------------------------


def compile_block(model: Any, index: int, how: str, **kwargs: Any) -> None:
    """Compile one block in the way named."""
    block = model.blocks[index]
    if how == "method":
        block.compile(**kwargs)
    elif how == "forward":
        block.forward = torch.compile(block.forward, **kwargs)
    else:
        model.blocks[index] = torch.compile(block, **kwargs)


@pytest.mark.parametrize(
    ("how", "backend", "when"),
    [
        *with_slow(
            itertools.product(
                ["method", "wrapper", "forward"], ["eager", "aot_eager"], ["before", "after"]
            ),
            [("wrapper", "aot_eager", "before"), ("forward", "eager", "before")],
        ),
        slow("method", "inductor", "after"),
    ],
)
@ranks(2, limit_s=400)
def test_compiled_blocks(how: str, backend: str, when: str) -> None:
    """A compiled block is one graph without a break, which all steps and equal blocks share.

    It trains as a plain one, and gathers ahead as an eager one does.
    """
    graphs = CompileCounterWithBackend(backend)

    def compile_all(model: Any) -> None:
        for index in range(len(model.blocks)):
            compile_block(model, index, how, backend=graphs, fullgraph=True)

    pair = Pair("stack")
    if when == "after":
        compile_all(pair.model)
    else:
        pair.model = seeded(pair.case.build)
        compile_all(pair.model)
        shard(pair.model, pair.case)
        pair.optimizer = pair._optimizers()[0]
    pair.steps, pair.later_rtol = 1, 2e-6
    names = [name.replace("_orig_mod.", "") for name in names_of(pair.model)]
    assert names == list(names_of(pair.reference))
    for _ in range(3):
        seen: list[str] = []
        with events.listen(lambda event, seen=seen: seen.append(str(event))):
            pair.backward()
        for (name, ours), theirs in zip(
            names_of(pair.model).items(), pair.reference.parameters(), strict=True
        ):
            assert_same(ours.grad, theirs.grad, name, 1e-5)  # type: ignore[arg-type]  # not None
        advance(pair.optimizer, pair.reference_optimizer)
    assert graphs.frame_count == 1
    assert sum("forward: prefetch" in event for event in seen) == 3
    assert sum("backward: prefetch" in event for event in seen) == 3


@pytest.mark.parametrize("how", with_slow(["method", "wrapper"], ["method"]))
@ranks(2)
def test_compiled_models(how: str) -> None:
    """A compiled root gives right numbers; its graph breaks at units, which are compiled too."""
    pair = Pair("stack")
    graphs = CompileCounterWithBackend("aot_eager")
    if how == "method":
        pair.model.compile(backend=graphs)
    else:
        pair.call = torch.compile(pair.model, backend=graphs)
    pair.steps = 1  # it rounds otherwise than an eager one from the first step on
    counts = []
    for _ in range(3):
        pair.backward()
        pair.finish()
        counts.append(graphs.frame_count)
    assert counts[0] == counts[2] > 0
    with torch.no_grad():
        pair.losses()


@ranks(2)
def test_compiled_units_with_units_inside() -> None:
    """A compiled unit breaks its graph at the units inside it, which gather for themselves."""

    pair = Pair("nested_units")
    for block in pair.model.blocks:
        block.compile(backend="aot_eager")
    pair.steps, pair.later_rtol = 1, 2e-6
    pair.train(steps=3)


@ranks(2)
def test_a_compiled_block_that_raises() -> None:
    """After an exception inside a compiled block the next step is right."""

    class Picky(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("as asked")
            return super().forward(x)

    pair = Pair(Case(stack(Picky), each_block, floats))
    for block in pair.model.blocks:
        block.compile(backend="eager")
    pair.train(steps=1)
    pair.model.blocks[1].fails = True
    with pytest.raises(ValueError, match="as asked"):
        pair.run(pair.model, pair.local(pair.batch()))
    pair.model.blocks[1].fails = False
    pair.train(steps=1)


@ranks(2)
def test_hooks_of_users_on_compiled_units() -> None:
    """Hooks on a compiled unit see whole parameters and run once a forward."""
    pair = Pair("stack")
    seen: list[str] = []
    block = pair.model.blocks[0]
    block.register_forward_pre_hook(
        lambda module, args: seen.append(f"before {type(module.up.weight).__name__}")
    )
    block.register_forward_hook(lambda module, args, output: seen.append("after"))
    block.compile(backend="aot_eager")
    for _ in range(2):
        pair.backward()
        pair.step()
    assert seen == ["before Parameter", "after"] * 2


# --- parametrizations -----------------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


PARAMETRIZE: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "old_weight_norm": nn_utils.weight_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


class Parametrized(Stack):
    def __init__(self, kind: str) -> None:
        super().__init__()
        for block in self.blocks:
            PARAMETRIZE[kind](block.mid)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("kind", "cached"),
    with_slow(
        itertools.product(PARAMETRIZE, [False, True]),
        [("weight_norm", True), ("orthogonal", False), ("spectral_norm", True), ("own", True)],
    ),
)
@ranks(2)
def test_parametrized_before_sharding(kind: str, cached: bool) -> None:
    """Computed weights follow the unsharded originals, whose shards get the gradients."""
    pair = Pair(Case(lambda: Parametrized(kind), each_block, floats))
    pair.later_rtol = 5e-6
    for _ in range(3):
        batch = pair.batch()
        # One forward of the reference a step: a spectral norm iterates in every one of them.
        with parametrize.cached() if cached else torch.enable_grad():
            loss = pair.run(pair.model, pair.local(batch))
            expected = pair.run(pair.reference, batch)
        loss.backward()
        expected.backward()
        assert_same(global_mean(loss), expected, "loss", 5e-6)
        pair.steps += 1
        pair.step()
    pair.check()


@pytest.mark.parametrize(
    "kind", with_slow(["own", "weight_norm", "old_weight_norm"], ["weight_norm"])
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@ranks(2)
def test_parametrized_after_sharding(kind: str) -> None:
    """The next forward says which parameter is gone from its place."""
    pair = Pair("stack")
    pair.train(steps=1)
    PARAMETRIZE[kind](pair.model.blocks[1].mid)
    with pytest.raises(fsdp2.StateError, match=r"mid\.weight"):
        pair.run(pair.model, pair.local(pair.batch()))


# --- DistributedDataParallel and replicate --------------------------------------------------------


def beside_shards(model: nn.Module, count: int) -> DistributedDataParallel:
    """Return DDP around a model, which leaves alone that many parameters: the sharded ones."""
    names = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert len(names) == count
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


@ranks(2)
def test_ddp_around_sharded_units() -> None:
    """DDP reduces the root's plain parameters and leaves alone the units that it is told to."""
    model = seeded(Stack)
    shard_each(*model.blocks, mesh=make_mesh())
    train_replicated(beside_shards(model, 3 * 8), model)


@ranks(2)
def test_ddp_for_ignored_parameters() -> None:
    """Parameters left out of `fully_shard` may be reduced by DDP around the whole model."""
    model = seeded(Stack)
    plain = {*model.inp.parameters(), model.blocks[1].up.weight}
    shard_each(*model.blocks, model, mesh=make_mesh(), ignored_params=plain)
    train_replicated(beside_shards(model, 3 * 8 + 4 - 3), model)


@ranks(2)
def test_composable_replicate_around_sharded_units() -> None:
    """`replicate` on the root reduces what is plain and skips our units."""
    model = seeded(Stack)
    shard_each(*model.blocks, mesh=make_mesh())
    replicate(model)
    train_replicated(model, model)
    taken = {id(p) for p in replicate.state(model)._param_list}
    assert taken == {id(p) for m in (model.inp, model.out) for p in m.parameters()}


def train_replicated(call: nn.Module, model: nn.Module) -> None:
    """Train three steps through `call`, which wraps `model`, beside an unsharded copy."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reference = seeded(Stack)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        batch = floats(12)
        loss_of(call(*batch.chunk(rank, count).args)).backward()
        loss_of(reference(*batch.args)).backward()
        assert_same_gradients(model, reference, 2e-6)
        advance(*optimizers)
    assert_same_parameters(model, reference, 2e-6)
    assert any(isinstance(p, DTensor) for p in model.parameters())


@ranks(2)
def test_a_module_has_one_composable_api() -> None:
    """`fully_shard` beside `replicate` on one module is refused and changes nothing."""
    model = seeded(stack())
    fsdp2.fully_shard(model.blocks[0], mesh=make_mesh())
    replicate(model.blocks[1])
    replicated = type(model.blocks[1])
    with pytest.raises(fsdp2.ConfigError, match="replicate"):
        fsdp2.fully_shard(model.blocks[1], mesh=make_mesh())
    assert type(model.blocks[1]) is replicated
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model.blocks[0])
