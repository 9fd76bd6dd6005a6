"""Promise: `fsdp2.optim.local` computes what the plain optimizer computes, bit for bit.

`Twins` trains two sharded models of one seed, one with the plain optimizer on DTensors and one with
ours, and compares parameters and states as bytes.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import advance, assert_tensors, shard_each
from tests.kit.meshes import DEVICE, random_numbers
from tests.kit.models import CASES, Block, Case, each_block, floats, loss_of, stack
from tests.kit.parity import ROWS, bits, make_mesh, names_of, sharded, whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import FeedForward, colwise_then_rowwise

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True, "betas": (0.4, 0.3)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adamax": [{}],
    "NAdam": [{"momentum_decay": 0.01}],
    "RAdam": [{"weight_decay": 0.1}],
    "ASGD": [{"t0": 2.0}],
    "Rprop": [{}],
}
NOT_ON_DTENSORS = (("SGD", "fused"), ("Adagrad", "fused"), ("Rprop", ""), ("Rprop", "foreach"))
"""Where torch has no DTensor kernels: the reference steps on leaves that share the shards."""
WITH_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
PADDED = Case(stack(Block, 2), each_block, floats)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equal(actual: Any, expected: Any, what: str) -> None:
    """Assert equality of local values bit for bit, and of types and placements."""
    if not isinstance(expected, Tensor):
        assert actual == expected, what
        return
    assert isinstance(actual, DTensor) == isinstance(expected, DTensor), what
    if isinstance(expected, DTensor):
        assert actual.placements == expected.placements, what
        assert actual.shape == expected.shape, what
        assert actual.device_mesh == expected.device_mesh, what
    mine, other = local_of(actual).detach(), local_of(expected).detach()
    assert (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device), what
    assert torch.equal(bits(mine.contiguous()), bits(other.contiguous())), f"{what} differs"


def assert_same_state(
    actual: dict[str, Any], expected: dict[str, Any], on_leaves: bool = False
) -> None:
    """Assert that two optimizer state dicts have the same keys, in order, and the same bytes."""
    assert actual["param_groups"] == expected["param_groups"]
    assert list(actual["state"]) == list(expected["state"])
    for index, entry in expected["state"].items():
        assert list(actual["state"][index]) == list(entry)
        for key, value in entry.items():
            mine = actual["state"][index][key]
            mine = local_of(mine) if on_leaves else mine
            assert_equal(mine, value, f"state {index}, {key}")


def flat_sizes(optimizer: Any) -> list[int]:
    """Return how many parameters each tensor that steps covers."""
    return [len(run.members) for plan in optimizer._plans for run in plan.runs]


class Twins:
    """Two sharded models of one seed and their optimizers: plain, and ours."""

    def __init__(
        self,
        case: Case | str,
        cls: type[Optimizer] = torch.optim.AdamW,
        groups: Callable[[nn.Module], Any] | None = None,
        options: dict[str, Any] | None = None,
        on_leaves: bool = False,
        elementwise: bool = False,
        **kwargs: Any,
    ) -> None:
        self.case = CASES[case] if isinstance(case, str) else case
        self.plain = sharded(self.case, **(options or {}))
        self.ours = sharded(self.case, **(options or {}))
        choose = groups or (lambda m: [p for p in m.parameters() if p.requires_grad])
        self.leaves: list[tuple[Tensor, Tensor]] = []
        chosen = choose(self.plain)
        if on_leaves:
            self.leaves = [(local_of(p.detach()), p) for p in chosen]
            chosen = [leaf for leaf, _ in self.leaves]
        self.plain_optimizer = cls(chosen, **copy.deepcopy(kwargs))
        self.optimizer = fsdp2.optim.local(
            cls, choose(self.ours), elementwise=elementwise, **copy.deepcopy(kwargs)
        )

    @property
    def pairs(self) -> list[tuple[nn.Module, Optimizer]]:
        return [(self.plain, self.plain_optimizer), (self.ours, self.optimizer)]

    def backward(self, without: tuple[str, ...] = ()) -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        batch = self.case.batch(ROWS).chunk(rank, size)
        for model, _ in self.pairs:
            loss_of(model(*batch.args, **batch.kwargs)).backward()
            for name, param in names_of(model).items():
                if name.startswith(without or ("nothing",)):
                    param.grad = None

    def update(self) -> None:
        advance(*(optimizer for _, optimizer in self.pairs))

    def step(self, steps: int = 1, without: tuple[str, ...] = ()) -> None:
        for _ in range(steps):
            self.backward(without)
            for leaf, param in self.leaves:
                leaf.grad = None if param.grad is None else local_of(param.grad)
            for model, optimizer in self.pairs:
                advance(optimizer)
                model.zero_grad()
            self.check_parameters()

    def check_parameters(self) -> None:
        expected = names_of(self.plain)
        for name, param in names_of(self.ours).items():
            assert_equal(param, expected[name], name)

    def check(self) -> None:
        self.check_parameters()
        expected = self.plain_optimizer.state_dict()
        assert_same_state(self.optimizer.state_dict(), expected, bool(self.leaves))


# --- every class, every model ---------------------------------------------------------------------


def modes_of(name: str) -> Iterator[tuple[dict[str, bool], bool]]:
    """Yield how a class may step, and whether its reference steps on leaves then."""
    for mode in ("", "foreach", *(["fused"] if name in WITH_FUSED else [])):
        yield ({mode: True} if mode else {}), (name, mode) in NOT_ON_DTENSORS


@pytest.mark.parametrize("name", with_slow(OPTIMIZERS, ("Adagrad", "Rprop")))
@ranks(2)
def test_every_class_computes_the_same_bits(name: str) -> None:
    """Loop, foreach and fused of every element-wise class equal the plain ones in every bit."""
    cls = getattr(torch.optim, name)
    for kwargs in OPTIMIZERS[name]:
        for mode, on_leaves in modes_of(name):
            twins = Twins(PADDED, cls, on_leaves=on_leaves, **kwargs, **mode)
            twins.step(3)
            if "fused" not in mode:
                assert max(flat_sizes(twins.optimizer)) == 8
            twins.check()
            twins.step(2)
            twins.check()


HARD = ["few_rows", "scalars", "mixed_dtypes", "tied_lm"]
ODD = [
    "non_contiguous",
    "quantised",
    "partly_frozen",
    "one_row",
    "unused_parts",
    "one_group",
]


@pytest.mark.parametrize(
    ("case", "name"),
    with_slow(
        [*itertools.product(HARD, OPTIMIZERS), *itertools.product(ODD, ["AdamW"])],
        [
            ("scalars", "AdamW"),
            ("one_row", "AdamW"),
            ("few_rows", "AdamW"),
            ("mixed_dtypes", "AdamW"),
        ],
    ),
)
@ranks(slow(2), 3)
def test_every_class_on_hard_models(case: str, name: str) -> None:
    """Scalars, empty and uneven shards, mixed dtypes, frozen neighbours and ties step alike."""
    for mode, on_leaves in modes_of(name):
        twins = Twins(case, getattr(torch.optim, name), on_leaves=on_leaves, **mode)
        twins.step(3)
        twins.check()


@pytest.mark.parametrize("case", with_slow(["few_rows", "stack"], ["few_rows"]))
@pytest.mark.parametrize("shape", [(2, 2), slow((4,))])
@ranks(4)
def test_replicate_axis_and_many_ranks(shape: tuple[int, ...], case: str) -> None:
    """A replicate axis changes nothing, and neither does a rank that holds no rows."""
    twins = Twins(case, options={"mesh": make_mesh(*shape)}, lr=0.1)
    twins.step(3)
    twins.check()


@ranks(4)
def test_tensor_parallel_parameters() -> None:
    """Tensor-parallel parameters on a 2-D mesh step beside sharded ones on a 1-D mesh."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    models, optimizers = [], []
    for make in (torch.optim.AdamW, lambda p, **kw: fsdp2.optim.local(torch.optim.AdamW, p, **kw)):
        torch.manual_seed(0)
        model = nn.Sequential(FeedForward(13, 30), nn.LayerNorm(13), FeedForward(13, 30))
        for block in (model[0], model[2]):
            colwise_then_rowwise(block, mesh["tensor"])
        shard_each(*model, model, mesh=mesh["data"])
        models.append(model)
        # one group a mesh: torch's own foreach and fused take one mesh a call, the loop any
        optimizers.append(make(model.parameters(), lr=0.1))
    for step in range(3):
        batch = torch.randn(4, 13, generator=random_numbers(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch).square().mean().backward()
            advance(optimizer)
    for ours, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(ours, plain, "parameter")
    assert max(flat_sizes(optimizers[1])) > 1
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())


# --- flat steps -----------------------------------------------------------------------------------


@ranks(2)
def test_neighbours_step_as_one_tensor() -> None:
    """A unit of eight parameters is one tensor to the step, and no operation sees a DTensor."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(str(func))
            assert not any(issubclass(t, DTensor) for t in types)
            return func(*args, **(kwargs or {}))

    twins = Twins(PADDED, lr=0.1)
    twins.step()
    twins.backward()
    seen: list[str] = []
    with Watch():
        twins.optimizer.step()
    assert sorted(flat_sizes(twins.optimizer)) == [4, 8, 8]
    assert 20 < len(seen) < 80, len(seen)


@ranks(2)
def test_gradient_buffers_are_used_again() -> None:
    """The optimizer keeps no gradient: reductions write to the same memory in every step."""
    twins = Twins(PADDED, lr=0.1)
    addresses = []
    for _ in range(4):
        twins.backward()
        addresses.append([local_of(p.grad).data_ptr() for p in twins.ours.parameters()])  # type: ignore[arg-type]
        twins.optimizer.step()
        assert all(run.tensor.grad is None for p in twins.optimizer._plans for run in p.runs)
        twins.optimizer.zero_grad()
        twins.plain_optimizer.zero_grad()
        gc.collect()
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]


@pytest.mark.parametrize("fused", [False, True])
@ranks(2)
def test_gradients_whose_memory_was_given_back(fused: bool) -> None:
    """What a forward does on a device: gradients come back to the same tensors, and are stepped."""
    twins = Twins(PADDED, lr=0.1, fused=fused)
    for _ in range(3):
        twins.backward()
        twins.update()
        for module in twins.ours.modules():
            unit = unit_of(module)
            for group in () if unit is None else unit.own_groups:
                buffer = group.reducer._buffer
                assert buffer.is_free
                buffer.release()
    twins.check()


@ranks(3)
def test_what_lies_in_padding_stays_there() -> None:
    """With eps=0 padding becomes nan; no parameter, gradient or state ever shows it."""
    twins = Twins("few_rows", torch.optim.RMSprop, lr=0.01, eps=0.0, momentum=0.5)
    twins.step(4)
    twins.check()
    for param in twins.ours.parameters():
        assert whole(param).isfinite().all()


@ranks(2)
def test_parameters_without_gradient_are_left_alone() -> None:
    """A parameter without gradient does not step, and counts its own steps ever after."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    twins.step(1, without=("blocks.0.mid", "out.bias"))
    sizes = flat_sizes(twins.optimizer)
    twins.step(1)
    twins.step(1, without=("blocks.0",))
    twins.step(2)
    twins.check()
    assert sorted(sizes) == [2, 3, 4, 8]
    steps = {int(s["step"]) for s in twins.optimizer.state.values()}
    assert steps == {5, 6, 7}


@ranks(2)
def test_gradients_from_elsewhere() -> None:
    """A gradient that the user made, or accumulated, steps as the reduced one does."""
    twins = Twins(PADDED, lr=0.1)
    twins.step()
    twins.backward()
    twins.backward()  # accumulates in the first buffer
    for model, _ in twins.pairs:
        weight = model.blocks[0].up.weight  # type: ignore[index, union-attr]
        weight.grad = weight.grad * 0.5
    for _, optimizer in twins.pairs:
        optimizer.step()
    twins.check()
    twins.step(2)
    twins.check()


# --- what optimizers are used with ----------------------------------------------------------------


def decayed_and_not(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


@ranks(2)
def test_param_groups_and_schedulers() -> None:
    """Groups with hyper-parameters of their own, schedulers and late groups work as ever."""
    late = ("out.weight", "out.bias")

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        kept = {id(model.get_parameter(name)) for name in late}
        chosen = decayed_and_not(model)
        for group in chosen:
            group["params"] = [p for p in group["params"] if id(p) not in kept]
        return chosen

    twins = Twins(PADDED, groups=groups, lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10) for _, o in twins.pairs
    ]
    for step in range(4):
        if step == 2:
            for model, optimizer in twins.pairs:
                params = [model.get_parameter(name) for name in late]
                optimizer.add_param_group(
                    {"params": params, "lr": 0.3, "max_lr": 0.3, "min_lr": 0.1, "initial_lr": 0.1,
                     "max_momentum": 0.9, "base_momentum": 0.8}
                )  # fmt: skip
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    assert len(flat_sizes(twins.optimizer)) > 3
    twins.check()


@ranks(2)
def test_closures_hooks_and_tensor_learning_rates() -> None:
    """A closure runs once with gradients, hooks run once a step, a tensor `lr` is read anew."""
    twins = Twins(PADDED, torch.optim.SGD, lr=torch.tensor(0.1), momentum=0.9)
    batch = torch.randn(4, 13)
    calls: list[str] = []
    losses = []
    for (model, optimizer), name in zip(twins.pairs, ("plain", "ours"), strict=True):
        optimizer.register_step_pre_hook(lambda *_, n=name: calls.append(f"{n} before"))
        optimizer.register_step_post_hook(lambda *_, n=name: calls.append(f"{n} after"))

        def closure(model: nn.Module = model, name: str = name) -> Tensor:
            calls.append(f"{name} closure")
            assert torch.is_grad_enabled()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"].fill_(0.01)
    assert calls == [f"{n} {w}" for n in ("plain", "ours") for w in ("before", "closure", "after")]
    assert torch.equal(losses[0], losses[1])
    twins.step(2)
    twins.check()


@pytest.mark.parametrize("fused", [False, True])
@ranks(2)
def test_a_graph_of_before_a_step_is_refused(fused: bool) -> None:
    """What saved the shards cannot be differentiated with their values after a step."""
    twins = Twins(PADDED, lr=0.1, fused=fused)
    twins.step(1)  # it makes the state, which is the class's own business
    loss_of(twins.ours(torch.randn(4, 13))).backward()
    penalties = [parameter.square().sum() for parameter in twins.ours.parameters()]
    twins.optimizer.step()
    for penalty in penalties:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()


@pytest.mark.parametrize("fused", with_slow([False, True], [True]))
@ranks(2)
def test_gradient_scaling(fused: bool) -> None:
    """GradScaler unscales, skips a step with an infinite gradient, and goes on, on every rank."""
    twins = Twins(PADDED, lr=0.1, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(4):
        batch = torch.randn(4, 13)
        for (model, optimizer), scaler in zip(twins.pairs, scalers, strict=True):
            scaler.scale(loss_of(model(batch))).backward()
            if step == 1:
                local_of(model.inp.bias.grad).fill_(torch.inf)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    twins.check()
    assert int(twins.optimizer.state[twins.ours.inp.weight]["step"]) == 3  # type: ignore[index, union-attr]


@pytest.mark.parametrize("decoupled", with_slow([False, True], [True]))
@ranks(2)
def test_the_fused_kernel_takes_over_and_gives_back(decoupled: bool) -> None:
    """One kernel call steps all runs while it may; what it may not, the class does, bit for bit."""
    twins = Twins(PADDED, torch.optim.Adam, lr=0.1, fused=True, decoupled_weight_decay=decoupled)
    for steps, changes, kernels in (
        (3, {}, 1),
        (1, {"lr": 0.01}, 1),
        (2, {"lr": torch.tensor(0.02)}, 0),
        (2, {"lr": 0.03, "maximize": True}, 1),
        (1, {"fused": False, "foreach": False}, 0),
        (2, {"fused": True}, 1),
    ):
        for _, optimizer in twins.pairs:
            optimizer.param_groups[0].update(changes)
        twins.step(steps)
        assert len(twins.optimizer._kernels) == kernels
    twins.check()  # reads the state
    twins.step(2)
    assert len(twins.optimizer._kernels) == 1
    for _, optimizer in twins.pairs:
        optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    twins.step(1)
    for _, optimizer in twins.pairs:
        optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    twins.step(1)
    for _, optimizer in twins.pairs:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    twins.step(2)
    assert len(twins.optimizer._kernels) == 1
    twins.step(1, without=("inp",))  # these count on their own from now on
    twins.step(2)
    assert not twins.optimizer._kernels
    twins.check()


@ranks(2)
def test_gradients_that_a_user_keeps() -> None:
    """A gradient kept across steps keeps its values, though steps read the buffer as one tensor."""
    twins = Twins(PADDED, lr=0.1)
    kept = []
    for step in range(5):
        twins.backward()
        if step in (1, 2):
            grad = twins.ours.inp.weight.grad  # type: ignore[union-attr]
            kept.append((grad, local_of(grad).clone()))  # type: ignore[arg-type]
        twins.update()
        twins.check_parameters()
    for grad, values in kept:
        assert torch.equal(local_of(grad), values)  # type: ignore[arg-type]


@ranks(2)
def test_own_classes() -> None:
    """A class of the user's runs if he vouches for it, and keeps what it writes to its groups."""

    class Sign(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "count": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] += 1
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.5 + p.grad
                        p.sub_(state["mean"].sign() * group["lr"])

    with pytest.raises(fsdp2.ConfigError, match="Sign is not known to be element-wise"):
        Twins(PADDED, Sign, lr=0.1)
    twins = Twins(PADDED, Sign, elementwise=True, lr=0.1)
    for index in range(3):
        twins.step()
        if index:  # the first step shows that states can be told apart, the next ones join them
            assert max(flat_sizes(twins.optimizer)) > 1
    assert twins.optimizer.param_groups[0]["count"] == 3
    twins.check()


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_classes_that_mix_elements_are_refused(name: str) -> None:
    """A class that is not element-wise is refused by its name before anything is built.

    `elementwise=True` is refused where it is known to be wrong: nobody would notice.
    """
    cls, params = getattr(torch.optim, name), [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(fsdp2.ConfigError, match=f"{name} is not known to be element-wise"):
        fsdp2.optim.local(cls, params)
    if name != "SparseAdam":
        with pytest.raises(
            fsdp2.ConfigError, match=f"elementwise=True does not make {name} element-wise"
        ):
            fsdp2.optim.local(cls, params, elementwise=True)


def test_classes_that_compute_the_loss_within_a_step_are_refused() -> None:
    """A `step` that must have a closure moves parameters before it asks for gradients."""

    class Looking(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
            return closure()

    with pytest.raises(fsdp2.UnsupportedError, match=r"Looking\.step requires a closure"):
        fsdp2.optim.local(Looking, [nn.Parameter(torch.ones(2))], elementwise=True)


class Blockwise(Optimizer):
    """Momentum in eight bits, as quantised optimizers keep it: codes, and a scale for each block.

    `size`: how many elements a block has. The table of codes is one tensor for all parameters.
    """

    def __init__(self, params: Any, lr: float = 0.1, size: int = 16) -> None:
        super().__init__(params, {"lr": lr})
        self.size = size
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    blocks = -(-p.numel() // self.size)
                    state["codes"] = torch.full_like(p, 128, dtype=torch.uint8)
                    state["scales"] = torch.zeros(blocks)
                    state["table"] = self.table
                indices = torch.arange(p.numel()) // self.size
                scales = state["scales"][indices].view(p.shape)
                mean = self.table[state["codes"].long()] * scales * 0.9 + p.grad
                peaks = torch.zeros_like(state["scales"])
                state["scales"] = peaks.scatter_reduce(0, indices, mean.abs().flatten(), "amax")
                scaled = mean / state["scales"][indices].view(p.shape).clamp(min=1e-30)
                state["codes"] = ((scaled + 1) * 127.5).round().to(torch.uint8)
                p.sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize("looks", [False, True])
@ranks(2, 3)
def test_states_that_belong_to_a_shard(looks: bool) -> None:
    """Scales of blocks stay with their parameter, looked at or not, and go to no other rank."""
    twins = Twins("one_row", Blockwise, on_leaves=True, elementwise=True)
    for _ in range(3):
        twins.step()
        if looks:
            assert all("scales" in twins.optimizer.state[p] for p in twins.ours.parameters())
    full_state = fsdp2.checkpoint.full_state
    for ask in (twins.optimizer.state_dict, lambda: full_state(twins.ours, twins.optimizer)):
        with pytest.raises(fsdp2.UnsupportedError, match=r"Blockwise.*(scales|table).*local_state"):
            ask()
    twins.step()
    state = copy.deepcopy(fsdp2.checkpoint.local_state(twins.ours, twins.optimizer))
    twins.ours = sharded(twins.case, 2)
    twins.optimizer = fsdp2.optim.local(Blockwise, twins.ours.parameters(), elementwise=True)
    fsdp2.checkpoint.load_local_state(twins.ours, state, twins.optimizer)
    twins.step()


def test_what_else_is_refused() -> None:
    """Things that are no optimizer, and flags that local steps cannot keep, are refused."""
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(fsdp2.ConfigError, match="subclass of torch"):
        fsdp2.optim.local(nn.Linear, params)
    with pytest.raises(fsdp2.UnsupportedError, match=r"Adam.*differentiable=True"):
        fsdp2.optim.local(torch.optim.Adam, params, differentiable=True)
    optimizer = fsdp2.optim.local(torch.optim.Adam, params)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(fsdp2.UnsupportedError, match=r"Adam.*capturable=True"):
        optimizer.step()


def test_plain_parameters() -> None:
    """Without any sharding it is the plain optimizer, complex parameters included."""
    values = [torch.randn(3, 2), torch.randn(2, dtype=torch.complex64), torch.tensor(0.5)]
    results = []
    for make in (torch.optim.AdamW, lambda p: fsdp2.optim.local(torch.optim.AdamW, p)):
        params = [nn.Parameter(v.clone()) for v in values]
        optimizer = make(params)
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([p.abs().square().sum() for p in params]).sum().backward()
            optimizer.step()
        results.append((params, optimizer.state_dict()))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert_same_state(results[1][1], results[0][1])
    for ours, plain in zip(results[1][0], results[0][0], strict=True):
        assert torch.equal(ours, plain)


# --- states and checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("name", with_slow(["AdamW", "SGD", "Adagrad", "ASGD"], ["SGD"]))
@ranks(2)
def test_state_dicts_interchange(name: str) -> None:
    """What either optimizer saved, the other loads, and both go on in the same bits."""
    kwargs = OPTIMIZERS[name][-1]
    twins = Twins(PADDED, getattr(torch.optim, name), **kwargs)
    twins.step(2)
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in twins.pairs]
    assert_same_state(saved[1], saved[0])
    twins.optimizer.load_state_dict(saved[0])
    twins.plain_optimizer.load_state_dict(saved[1])
    twins.check()
    twins.step(2)
    twins.check()
    again = pickle.loads(pickle.dumps(twins.optimizer.state_dict()))
    assert_same_state(again, twins.plain_optimizer.state_dict())


@pytest.mark.parametrize("full", with_slow([False, True], [True]))
@ranks(2)
def test_distributed_checkpoints(rank: int, full: bool) -> None:
    """torch.distributed.checkpoint's functions read and write its state, whole or sharded."""
    options = StateDictOptions(full_state_dict=full)
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    dicts = [get_optimizer_state_dict(m, o, options=options) for m, o in twins.pairs]
    for name, entry in dicts[0]["state"].items():
        for key, value in entry.items():
            assert_equal(dicts[1]["state"][name][key], value, f"{name}, {key}")
    fresh = Twins(PADDED, lr=0.1)
    for (model, optimizer), theirs in zip(fresh.pairs, reversed(dicts), strict=True):
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(theirs), options=options)
    fresh.check()
    state, kept = fresh.optimizer.state_dict(), twins.optimizer.state_dict()
    assert_same_state({**state, "param_groups": 0}, {**kept, "param_groups": 0})  # betas: a list
    fresh.step(2)
    fresh.check()


def kinds_of(optimizer: Optimizer) -> list[dict[str, type]]:
    return [{k: type(v) for k, v in entry.items()} for entry in optimizer.state.values()]


@pytest.mark.parametrize("name", with_slow(["AdamW", "SGD", "NAdam", "ASGD"], ["NAdam"]))
@ranks(2)
def test_whole_states_of_scalars_are_placed_as_these_are(name: str) -> None:
    """A whole state dict brings plain 0-dim tensors: states, and counters, which stay plain."""
    options = StateDictOptions(full_state_dict=True)
    twins = Twins("scalars", getattr(torch.optim, name), **OPTIMIZERS[name][-1])
    twins.step(2)
    kept = kinds_of(twins.optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(twins.ours, twins.optimizer, options=options))
    set_optimizer_state_dict(twins.ours, twins.optimizer, saved, options=options)
    assert kinds_of(twins.optimizer) == kept
    twins.step(2)


@pytest.mark.parametrize("name", with_slow(["AdamW", "SGD", "NAdam", "ASGD"], ["AdamW"]))
@ranks(2)
def test_our_checkpoints_keep_counters_of_scalars_plain(name: str, tmp_path: Path) -> None:
    """A number of steps has the shape of a 0-dim parameter, and is not placed as that is."""
    cls, options = getattr(torch.optim, name), OPTIMIZERS[name][-1]
    twins = Twins("scalars", cls, **options)
    twins.step(2)

    states = []
    for index, (model, optimizer) in enumerate(twins.pairs):
        states.append(fsdp2.checkpoint.full_state(model, optimizer, rank0_only=False))
        fsdp2.checkpoint.save(tmp_path / str(index), model, optimizer)
    fresh, from_files = Twins("scalars", cls, **options), Twins("scalars", cls, **options)
    for index, (model, optimizer) in enumerate(fresh.pairs):
        fsdp2.checkpoint.load_full_state(model, states[index], optimizer, from_rank0=False)
    for index, (model, optimizer) in enumerate(from_files.pairs):
        fsdp2.checkpoint.load(tmp_path / str(index), model, optimizer)
    for index, (model, optimizer) in enumerate(twins.pairs):  # over a state that is there
        fsdp2.checkpoint.load_full_state(model, states[index], optimizer, from_rank0=False)
    for loaded in (fresh, from_files, twins):
        found = kinds_of(loaded.optimizer)
        assert found == kinds_of(loaded.plain_optimizer) == kinds_of(twins.optimizer)
        assert not any(kind.get("step") is DTensor for kind in found)
        torch.manual_seed(0)
        loaded.step(2)
        loaded.check()


@ranks(2)
def test_checkpoint_files(tmp_path: Path) -> None:
    """A checkpoint on disk that one optimizer wrote is read in place by the other."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    dcp.save({"o": twins.optimizer.state_dict()}, checkpoint_id=tmp_path)
    before = copy.deepcopy(twins.plain_optimizer.state_dict())
    twins.step(1)
    target = twins.optimizer.state_dict()
    dcp.load({"o": target}, checkpoint_id=tmp_path)
    twins.optimizer.load_state_dict(target)
    assert_same_state(twins.optimizer.state_dict(), before)
    twins.plain_optimizer.load_state_dict(before)
    twins.step(1)
    twins.check()


@ranks(2)
def test_state_can_be_read_and_changed() -> None:
    """`state` shows what is, keeps no second copy, and what the user writes there counts."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    shown = twins.optimizer.state[twins.ours.blocks[0].up.weight]["exp_avg"]  # type: ignore[index, union-attr]
    twins.step(1)
    again = twins.optimizer.state[twins.ours.blocks[0].up.weight]["exp_avg"]  # type: ignore[index, union-attr]
    assert shown is again
    assert torch.equal(local_of(shown), local_of(again))
    twins.step(1)
    assert sorted(flat_sizes(twins.optimizer)) == [4, 8, 8]
    for model, optimizer in twins.pairs:
        first, second = model.blocks[0].up.weight, model.blocks[1].mid.bias  # type: ignore[index, union-attr]
        optimizer.state[first]["exp_avg"].zero_()  # type: ignore[index]
        optimizer.state[second]["step"] = torch.tensor(7.0)  # type: ignore[index]
        optimizer.state[model.inp.weight].clear()  # type: ignore[index, union-attr]
    twins.step(2)
    twins.check()
    for _, optimizer in twins.pairs:
        optimizer.state.clear()
    twins.step(2)
    twins.check()


@ranks(2)
def test_copies_and_pickles_of_the_optimizer() -> None:
    """A copy of model and optimizer together trains on as the original does."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    twins.ours, twins.optimizer = copy.deepcopy((twins.ours, twins.optimizer))
    twins.step(2)
    assert sorted(flat_sizes(twins.optimizer)) == [4, 8, 8]
    twins.check()
    restored = pickle.loads(pickle.dumps(twins.optimizer))
    assert type(restored) is type(twins.optimizer)
    assert_same_state(restored.state_dict(), twins.optimizer.state_dict())


# --- beside the sharded module --------------------------------------------------------------------


@ranks(2)
def test_whole_parameters_are_gathered_again() -> None:
    """Parameters that stayed whole after a forward get the stepped values in the next one."""
    twins = Twins(PADDED, options={"reshard_after_forward": False}, lr=0.1)
    twins.step(2)
    for model, _ in twins.pairs:
        model(torch.randn(4, 13, generator=random_numbers(0)))
    twins.step(2)
    for model, _ in twins.pairs:
        model.set_reshard_after_backward(False)  # type: ignore[operator]
    twins.step(3)
    twins.check()


@ranks(2)
def test_parameters_that_change_place() -> None:
    """After `.to()` and `load_state_dict` the same objects step on their new memory."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    values = {name: p.detach().clone() for name, p in names_of(twins.plain).items()}
    for model, _ in twins.pairs:
        model.load_state_dict({name: value.clone() for name, value in values.items()})
    twins.step(1)
    for model, _ in twins.pairs:
        model.to(torch.float64)
    twins.case = Case(PADDED.build, each_block, lambda rows: floats64(rows))
    for _, optimizer in twins.pairs:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # states to float64
    twins.step(2)
    twins.check()


def floats64(rows: int) -> Any:
    batch = floats(rows)
    return type(batch)(tuple(a.double() for a in batch.args), {})


@ranks(2)
def test_replaced_parameters_are_not_followed() -> None:
    """A replaced parameter is another object: the optimizer leaves it alone, as the plain does."""
    twins = Twins(PADDED, lr=0.1)
    twins.step(2)
    values = {name: p.detach().clone() for name, p in names_of(twins.plain).items()}
    for model, _ in twins.pairs:
        model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    before = {name: whole(p).clone() for name, p in names_of(twins.ours).items()}
    twins.step(1)
    assert_tensors(names_of(twins.ours).items(), before)
    for model, optimizer in twins.pairs:
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": list(model.parameters())})
    twins.step(2)
    twins.check_parameters()


@ranks(2)
def test_partial_gradients() -> None:
    """A gradient that is a sum over ranks is summed before it is used."""
    mesh = make_mesh()
    values = [torch.randn(5, 3), torch.randn(4)]
    results = []
    for make in (torch.optim.AdamW, lambda p: fsdp2.optim.local(torch.optim.AdamW, p)):
        params = [nn.Parameter(distribute_tensor(v.clone(), mesh, [Replicate()])) for v in values]
        optimizer = make(params)
        for step in range(3):
            for param, value in zip(params, values, strict=True):
                local = value * (step + torch.distributed.get_rank())
                param.grad = DTensor.from_local(local, mesh, [Partial()])
            optimizer.step()
        results.append((params, optimizer.state_dict()))
    assert_same_state(results[1][1], results[0][1])
    for ours, plain in zip(results[1][0], results[0][0], strict=True):
        assert_equal(ours, plain, "parameter")


@pytest.mark.parametrize("kernel", ["for-loop", "foreach", "fused"])
@ranks(2)
def test_gradients_are_zeroed_in_place(kernel: str) -> None:
    """Of sharded and of plain parameters, of two dtypes: the tensors stay, their values go."""
    model = sharded("stack")
    plain = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 3).double(), nn.Linear(2, 2)])
    params = [*model.parameters(), *plain.parameters()]
    flags = {} if kernel == "for-loop" else {kernel: True}
    optimizer = fsdp2.optim.local(torch.optim.AdamW, params, **flags)
    for param in params[:-2]:
        param.grad = torch.ones_like(param)
    before = [param.grad for param in params]
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(params, before, strict=True):
        assert param.grad is grad
        assert grad is None or not local_of(grad).any()
    assert before[-1] is None
    advance(optimizer)
    assert all(param.grad is None for param in params)


class ScalesOfLargeShards(torch.optim.SGD):
    """Keeps a state in no parameter's shape, on ranks with more than one row only."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and len(param) > 1:
                    self.state[param]["scales"] = torch.ones(2)
        return loss


@pytest.mark.parametrize("way", ["save", "full_state"])
@ranks(2)
def test_a_state_that_one_rank_alone_refuses(way: str) -> None:
    """Three rows over two ranks: one has such a state, and every rank hears of it at once."""
    model = fsdp2.fully_shard(nn.Linear(5, 3, bias=False))
    optimizer = fsdp2.optim.local(ScalesOfLargeShards, model.parameters(), lr=0.1, elementwise=True)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    checkpoint = fsdp2.checkpoint
    with tempfile.TemporaryDirectory() as folder:
        act = {
            "save": lambda: checkpoint.save(f"{folder}/saved", model, optimizer),
            "full_state": lambda: checkpoint.full_state(model, optimizer),
        }[way]
        with pytest.raises(fsdp2.FSDPError, match="scales"):
            act()
