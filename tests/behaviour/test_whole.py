"""Promise: `fsdp2.optim.whole` computes what its class computes in one process, each matrix once.

The reference is an unsharded model on the global batch, under the class itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp2
from fsdp2 import StateError
from fsdp2._core.base import torch_dtensor
from tests.kit.in_turn import advance, assert_same_bits, shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import CASES, Case, loss_of, seeded
from tests.kit.parity import (
    ROWS,
    Pair,
    assert_same,
    assert_same_parameters,
    backward_on,
    bits,
    make_mesh,
    names_of,
    sharded,
    whole,
)
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import Transformer, Twin, mesh_of, sequence_parallel, tokens


class Factors(Optimizer):
    """Preconditions by whole matrices, with states of other shapes than the parameter's, in lists.

    Every element of an update depends on every element of the gradient, as in Shampoo.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                entry, columns = self.state[param], param.shape[-1] if param.dim() > 1 else -1
                grad = param.grad.reshape(-1 if param.dim() > 1 else 1, columns)
                if not entry:
                    rows, columns = grad.shape
                    eye = [torch.eye(n, dtype=grad.dtype) for n in (rows, columns)]
                    entry.update(factors=eye, mean=torch.zeros_like(param), calls=0)
                    entry["step"] = torch.zeros(())
                left, right = entry["factors"]
                entry["calls"] += 1
                entry["step"] += 1
                left.lerp_(grad @ grad.T, 0.3)
                right.lerp_(grad.T @ grad, 0.3)
                update = left @ grad @ right / (left.norm() * right.norm() + 1)
                entry["mean"].lerp_(update.reshape(param.shape), 0.5)
                param.add_(entry["mean"], alpha=-group["lr"])
            self.after(group)

    def after(self, group: dict[str, Any]) -> None:
        """Do what a class of the tests does after it has stepped a group."""


def give_gradients(model: nn.Module, leaves: Sequence[Tensor]) -> None:
    """Give plain tensors the gradients of a sharded model, whole."""
    for param, leaf in zip(model.parameters(), leaves, strict=True):
        leaf.grad = whole(param.grad).clone()


def assert_are(model: nn.Module, values: Iterable[Tensor]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(whole(param), value)


def assert_shards_are(model: nn.Module, values: Iterable[Tensor]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param.to_local(), value)  # type: ignore[attr-defined]


def both(cls: Callable[..., Optimizer], **how: Any) -> Callable[..., Any]:
    """Return what makes `whole(cls)` for a sharded model, and `cls` for a plain one."""

    def make(params: Any, **kwargs: Any) -> Any:
        params = list(params)
        if any(isinstance(param, DTensor) for param in params):
            return fsdp2.optim.whole(cls, params, **how, **kwargs)
        return cls(params, **kwargs)

    return make


HARD = ["few_rows", "non_contiguous", "partly_frozen", "tied_lm", "unused_parts", "one_row"]
HARD += ["stack", "tied_blocks", "scalars", "mixed_dtypes"]


@pytest.mark.parametrize(
    "case", with_slow(HARD, ["few_rows", "non_contiguous", "partly_frozen", "tied_lm"])
)
@ranks(slow(2), 3, slow(4))
def test_a_whole_model_is_trained_alike(case: str) -> None:
    """Uneven, empty, transposed, tied, frozen and unused parameters step as whole ones do."""
    Pair(case, optimizer=both(Factors)).train(3)


class Apart(Factors):
    """Makes a param group of each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": [param]} for param in params], lr)


@ranks(2)
def test_groups_that_a_class_makes_itself() -> None:
    """Each rank owns one parameter, and so has one of the groups."""
    model = shard_each(seeded(lambda: nn.Linear(4, 4)), mesh=make_mesh())
    model(torch.ones(2, 4)).sum().backward()
    before = whole(model.bias).clone()
    fsdp2.optim.whole(Apart, model.parameters()).step()
    assert not torch.equal(whole(model.bias), before)


CLASSES: dict[str, dict[str, Any]] = {
    "Adafactor": {"weight_decay": 0.1},
    "NAdam": {"momentum_decay": 0.01},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Muon": {"weight_decay": 0.1},
}


@products(
    [
        ("Adafactor", "unused_parts"),
        ("Adafactor", "mixed_dtypes"),
        ("Adagrad", "scalars"),
        ("Muon", "few_rows"),
        ("Muon", "non_contiguous"),
    ],
    name=CLASSES,
    case=HARD,
)
@ranks(slow(2), 3, slow(4))
def test_a_class_computes_the_same_bits_from_the_same_gradients(name: str, case: str) -> None:
    """The class in one process is given the gradients that the ranks have, whole."""
    cls, kwargs = getattr(torch.optim, name), CLASSES[name]
    model = sharded(case)
    params = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    plain_model = seeded(CASES[case].build)  # laid out as the sharded one was
    leaves = [p for p in plain_model.parameters() if name != "Muon" or p.dim() == 2]
    ours = fsdp2.optim.whole(cls, params, lr=0.05, **kwargs)
    plain = cls(leaves, lr=0.05, **kwargs)
    for _ in range(3):
        backward_on(CASES[case], model)
        for param, leaf in zip(params, leaves, strict=True):
            leaf.grad = None
            if param.grad is not None:
                leaf.grad = torch.empty_like(leaf).copy_(whole(param.grad))
        ours.step()
        plain.step()
        for param, leaf in zip(params, leaves, strict=True):
            assert torch.equal(bits(whole(param)), bits(leaf))
        model.zero_grad()


def everything(param: nn.Parameter) -> fsdp2.Whole | None:
    return fsdp2.Whole() if torch_dtensor.asks_subclasses() else None


@pytest.mark.parametrize("place", [None, everything])
@ranks(4)
def test_replicas_share_the_work(place: Any) -> None:
    """On two axes each matrix has one owner among all ranks, and steps there once in all.

    A matrix that lies whole on one rank of each replica is stepped in one of the replicas.
    """
    steps: list[int] = []

    class Counted(Factors):
        def step(self, closure: Any = None) -> None:
            steps.append(sum(len(group["params"]) for group in self.param_groups))
            super().step(closure)

    pair = Pair("stack", optimizer=both(Counted), mesh=make_mesh(2, 2), shard_placement_fn=place)
    counts = torch.zeros(4, dtype=torch.int64)
    steps.clear()
    pair.backward()
    pair.optimizer.step()
    counts[dist.get_rank()] = sum(steps)
    pair.reference_optimizer.step()
    dist.all_reduce(counts)
    assert counts.sum() == len(list(pair.model.parameters()))
    assert counts.min() > 0
    pair.zero_grad()
    pair.train(3)


@ranks(4)
def test_tensor_parallel_matrices_are_whole_over_all_axes() -> None:
    """A parameter over FSDP's and tensor parallelism's axes comes together on one rank."""
    mesh = mesh_of(data=2, tensor=2)
    twin = Twin(Transformer(), mesh, sequence_parallel, batch=tokens)
    for kind, place in ((both(Factors), 0), (Factors, 1)):
        model = (twin.model, twin.reference)[place]
        twin.optimizers[place] = kind(list(model.parameters()), lr=0.1)
    twin.train(3)


class Experts(nn.Module):
    """A batch of matrices as one parameter, beside a router and a bias."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(count, 7, 13, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("emn,bn->bem", self.experts, x.double()) + self.bias)


class Matrices(Factors):
    """Takes matrices alone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if any(param.dim() != 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("expected matrices")


@pytest.mark.parametrize("count", [5, slow(2), slow(1)])
@ranks(3)
def test_the_matrices_of_a_batch_step_one_by_one(count: int) -> None:
    """With `batches` each matrix of a 3-D parameter has an owner; its state loads again."""
    model, plain = seeded(lambda: Experts(count)), seeded(lambda: Experts(count))
    fsdp2.fully_shard(model, mesh=make_mesh())
    slices = [nn.Parameter(one.detach().clone()) for one in plain.experts]
    reference = Matrices(slices)
    ours = fsdp2.optim.whole(Matrices, [model.experts], batches=True)
    with torch.no_grad():
        plain.experts.copy_(torch.stack([one.detach() for one in slices]))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        x = torch.randn(ROWS, 13)
        model(x.chunk(size)[rank]).pow(2).mean().backward()
        plain(x).pow(2).mean().backward()
        for one, grad in zip(slices, plain.experts.grad, strict=True):
            one.grad = grad
        ours.step()
        reference.step()
        with torch.no_grad():
            plain.experts.copy_(torch.stack([one.detach() for one in slices]))
        model.zero_grad()
        plain.zero_grad()
        assert_same(model.experts, plain.experts, "experts", 1e-12)
        if step == 2:
            state = ours.state_dict()
            ours = fsdp2.optim.whole(Matrices, [model.experts], batches=True)
            ours.load_state_dict(state)
    owners = {one.cargo.owner for fleet in ours._fleets for one in fleet.owned}
    assert len(owners) == min(count, size)


@ranks(2)
def test_muon_takes_batches_as_matrices() -> None:
    """`torch.optim.Muon` refuses 3-D parameters; here each of their matrices is stepped."""
    model = fsdp2.fully_shard(seeded(Experts), mesh=make_mesh())
    ours = fsdp2.optim.whole(torch.optim.Muon, [model.experts], lr=0.1)
    model(torch.randn(ROWS, 13)).pow(2).mean().backward()
    before = whole(model.experts).clone()
    slices = [nn.Parameter(one) for one in before.clone()]
    for one, grad in zip(slices, whole(model.experts.grad), strict=True):
        one.grad = grad.clone()
    ours.step()
    torch.optim.Muon(slices, lr=0.1).step()
    assert torch.equal(whole(model.experts), torch.stack([one.detach() for one in slices]))
    with pytest.raises(fsdp2.ConfigError, match="Muon rejected its arguments"):
        fsdp2.optim.whole(torch.optim.Muon, [model.bias])


# --- one optimizer of several classes -------------------------------------------------------------


def mixed_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() < 2], "cls": torch.optim.AdamW, "lr": 0.01},
        {"params": [p for p in params if p.dim() == 2], "lr": 0.05},
    ]


class Mixed:
    """Two optimizers on a plain model, as one process would have them."""

    def __init__(self, model: nn.Module) -> None:
        vectors, matrices = mixed_groups(model)
        del vectors["cls"]
        self.each = [torch.optim.AdamW([vectors]), Factors([matrices])]

    def step(self) -> None:
        for one in self.each:
            one.step()


@ranks(3)
def test_param_groups_of_other_classes() -> None:
    """Groups with a `cls` of their own step by that, behind one object, one state, one schedule."""
    case = CASES["few_rows"]
    model, plain = sharded(case), seeded(case.build)
    ours, reference = fsdp2.optim.whole(Factors, mixed_groups(model)), Mixed(plain)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 2, 0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in reference.each]
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        batch = case.batch(ROWS)
        own = batch.chunk(rank, size)
        loss_of(model(*own.args, **own.kwargs)).backward()
        loss_of(plain(*batch.args, **batch.kwargs)).backward()
        ours.step()
        reference.step()
        for one in (schedule, *schedules):
            one.step()
        ours.zero_grad()
        plain.zero_grad()
        assert_same_parameters(model, plain, 1e-5)
        if step == 2:
            state = ours.state_dict()
            assert len(state["param_groups"]) == 2
            assert [key for key in state["param_groups"][0] if key == "cls"] == []
            ours = fsdp2.optim.whole(Factors, mixed_groups(model))
            ours.load_state_dict(state)
            schedule.optimizer = ours
            full = fsdp2.checkpoint.full_state(model, ours, rank0_only=False)["optimizer"]
            saved = {"model": plain.state_dict(), "optimizer": full}
            fsdp2.checkpoint.load_full_state(model, saved, ours)


# --- what users do between steps ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["copy", "data", "load", "local"])
@ranks(2)
def test_what_users_write_between_steps_is_taken(way: str) -> None:
    """However a parameter was changed, on one rank or on all, its owner steps what there is."""
    pair = Pair("few_rows", optimizer=both(Factors))
    for step in range(4):
        pair.backward()
        pair.step()
        if step != 1:
            continue
        names = names_of(pair.model)
        with torch.no_grad():
            for name, param in names_of(pair.reference).items():
                if way == "local" and dist.get_rank() == 0:
                    names[name].to_local().mul_(1.5)  # type: ignore[attr-defined]
                elif way == "data":
                    param.data.mul_(1.5)
                    names[name].data.mul_(1.5)
                elif way == "copy":
                    param.copy_(param * 1.5)
                    names[name].copy_(names[name] * 1.5)
        if way == "load":
            state = {name: value * 1.5 for name, value in pair.reference.state_dict().items()}
            pair.reference.load_state_dict(state)
            fsdp2.checkpoint.load_full_state(pair.model, {"model": state})
        if way == "local":
            full = {name: whole(param).clone() for name, param in names.items()}
            pair.reference.load_state_dict(full)
    pair.check()


@ranks(2)
def test_in_little_memory_and_in_one_round_the_same_bits_come_out() -> None:
    """`max_bytes` decides how many rounds there are, and nothing else."""
    models = [sharded("stack") for _ in range(2)]
    few, many = (
        fsdp2.optim.whole(Factors, model.parameters(), max_bytes=limit)
        for model, limit in zip(models, (1 << 30, 1), strict=True)
    )
    for _ in range(3):
        backward_on("stack", *models)
        advance(few, many)
    assert len(few._fleets[0].rounds) == 1
    assert len(many._fleets[0].rounds) == len(list(models[0].parameters()))
    assert_same_bits(models[0], models[1])


@ranks(2)
def test_gradients_may_travel_in_fewer_bits() -> None:
    """`wire_dtype` rounds gradients, and parameters come back as they are."""
    model = sharded("stack")
    optimizer = fsdp2.optim.whole(
        torch.optim.SGD, model.parameters(), lr=1.0, wire_dtype=torch.bfloat16
    )
    backward_on("stack", model)
    expected = [whole(p) - whole(p.grad).bfloat16().to(p.dtype) for p in model.parameters()]
    optimizer.step()
    assert_are(model, expected)


# --- state ----------------------------------------------------------------------------------------


def trained(steps: int, mesh: Any = None) -> tuple[nn.Module, Any]:
    model = sharded("few_rows", mesh=mesh)
    optimizer = fsdp2.optim.whole(Factors, model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    case = CASES["few_rows"]
    is_sharded = any(isinstance(param, DTensor) for param in model.parameters())
    for step in range(steps):
        batch = seeded_batch(case, step)
        if is_sharded:
            batch = batch.chunk(dist.get_rank(), dist.get_world_size())
        loss_of(model(*batch.args, **batch.kwargs)).backward()
        advance(optimizer)


def seeded_batch(case: Case, step: int) -> Any:
    torch.manual_seed(step)
    return case.batch(ROWS)


@ranks(3)
def test_a_state_has_shards_whatever_shape_it_has() -> None:
    """States of the parameter's shape lie as it does, others in rows; numbers are on every rank."""
    model, optimizer = trained(3)
    state = optimizer.state_dict()["state"]
    params = list(model.parameters())
    assert list(state) == list(range(len(params)))
    for number, param in enumerate(params):
        entry = state[number]
        assert entry["mean"].placements == param.placements
        assert entry["mean"].shape == param.shape
        assert all(isinstance(one, DTensor) for one in entry["factors"])
        assert entry["calls"] == 3
        assert entry["step"].item() == 3
    case = CASES["few_rows"]
    plain = seeded(case.build)
    reference = Factors(plain.parameters(), lr=0.1)
    train(plain, reference, 3)
    expected = reference.state_dict()["state"]
    for number, entry in state.items():
        assert_same(entry["mean"], expected[number]["mean"], "mean", 1e-5)
        for one, other in zip(entry["factors"], expected[number]["factors"], strict=True):
            assert_same(one, other, "factor", 1e-5)


@ranks(3)
def test_states_go_to_a_plain_optimizer_and_come_back() -> None:
    """A full state loads into the class in one process, trains on there, and loads here again."""
    model, optimizer = trained(2)
    state = fsdp2.checkpoint.full_state(model, optimizer, rank0_only=False, optim_keys="id")
    plain = seeded(CASES["few_rows"].build)
    plain.load_state_dict(state["model"])
    reference = Factors(plain.parameters(), lr=0.1)
    reference.load_state_dict(state["optimizer"])
    train(plain, reference, 2)
    train(model, optimizer, 2)
    assert_same_parameters(model, plain, 1e-5)
    other, fresh = trained(0)
    back = {"model": plain.state_dict(), "optimizer": reference.state_dict()}
    fsdp2.checkpoint.load_full_state(other, back, fresh)
    train(other, fresh, 2)
    train(model, optimizer, 2)
    assert_same_parameters(other, plain_of(model), 1e-5)


def plain_of(model: nn.Module) -> nn.Module:
    plain = seeded(CASES["few_rows"].build)
    plain.load_state_dict({name: whole(param) for name, param in names_of(model).items()})
    return plain


@pytest.mark.parametrize("way", ["ours", "dcp"])
@ranks(4)
def test_a_checkpoint_loads_on_other_ranks(way: str, tmp_path: Path) -> None:
    """Saved on four ranks and as replicas, it goes on with the same bits wherever it loads."""
    path = tmp_path / "saved"
    model, optimizer = trained(3)
    if way == "ours":
        fsdp2.checkpoint.save(path, model, optimizer)
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=path)
    for mesh in (make_mesh(2, 2), shared_mesh((4,))):
        other, fresh = trained(1 if way == "dcp" else 0, mesh)
        if way == "ours":
            fsdp2.checkpoint.load(path, other, fresh)
        else:
            state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
            dcp.load(state, checkpoint_id=path)
            fresh.load_state_dict(state["optimizer"])
        assert_same_bits(other, model)
        train(other, fresh, 2)
        plain = seeded(CASES["few_rows"].build)
        reference = Factors(plain.parameters(), lr=0.1)
        train(plain, reference, 3)
        train(plain, reference, 2)
        assert_same_parameters(other, plain, 1e-5)


# --- errors ---------------------------------------------------------------------------------------


class Fails(Factors):
    """Raises on one rank, after it has written to some matrices."""

    on: int | None = None

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if dist.get_rank() == Fails.on:
            raise ValueError("no inverse")


@ranks(3)
def test_a_rank_that_fails_fails_the_step_everywhere_and_nothing_is_written() -> None:
    model = sharded("stack")
    optimizer = fsdp2.optim.whole(Fails, model.parameters(), max_bytes=1)
    Fails.on = None
    train_on(model, optimizer)
    before = [param.to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
    Fails.on = 1
    with pytest.raises(StateError, match="rank 1 failed with ValueError: no inverse"):
        train_on(model, optimizer)
    assert_shards_are(model, before)
    Fails.on = None
    optimizer.zero_grad()
    train_on(model, optimizer)
    assert not torch.equal(next(iter(model.parameters())).to_local(), before[0])  # type: ignore[attr-defined]


def train_on(model: nn.Module, optimizer: Any) -> None:
    backward_on(CASES["stack"], model)
    advance(optimizer)


@ranks(2)
def test_ranks_that_differ_are_told() -> None:
    """Which parameters have gradients, and options, must be the same on all ranks."""
    model = sharded("stack")
    optimizer = fsdp2.optim.whole(Factors, model.parameters())
    train_on(model, optimizer)
    if dist.get_rank():
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(fsdp2.ConfigError, match="options of param group 0"):
        train_on(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    params = list(model.parameters())
    optimizer.zero_grad()
    backward_on("stack", model)
    params[dist.get_rank()].grad = None
    with pytest.raises(fsdp2.ConfigError, match="parameters with gradients"):
        optimizer.step()


class Replaces(Factors):
    def after(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            param.data = param.data.clone()


class OfAll(Factors):
    """Keeps a number that depends on every parameter, as Prodigy does."""

    def after(self, group: dict[str, Any]) -> None:
        group["d"] = sum(float(param.detach().norm()) for param in group["params"])


class Clips(Optimizer):
    """May clip by the norm of all gradients, as some classes of libraries do."""

    def __init__(self, params: Any, max_grad_norm: float = 0.0) -> None:
        super().__init__(params, {"max_grad_norm": max_grad_norm})


class Counts(Factors):
    """Keeps a number for a param group that does not depend on its parameters."""

    def after(self, group: dict[str, Any]) -> None:
        if group["params"]:
            group["k"] = group.get("k", 0) + 1


@ranks(2)
def test_what_a_class_must_not_do() -> None:
    """Replacing a parameter, and numbers of all parameters, are errors; a counter of a group is
    not."""
    model = sharded("stack")
    for cls, error, text in (
        (Replaces, StateError, "replaced or resized"),
        (OfAll, StateError, "computed d of param group 0 over all parameters"),
    ):
        optimizer = fsdp2.optim.whole(cls, model.parameters())
        with pytest.raises((error, fsdp2.UnsupportedError), match=text):
            train_on(model, optimizer)
        model.zero_grad()
    optimizer = fsdp2.optim.whole(Counts, model.parameters(), max_bytes=1)
    train_on(model, optimizer)
    train_on(model, optimizer)
    assert optimizer.param_groups[0]["k"] == 2
    with pytest.raises(fsdp2.ConfigError, match="LBFGS computes a value from all parameters"):
        fsdp2.optim.whole(torch.optim.LBFGS, model.parameters())
    with pytest.raises(fsdp2.ConfigError, match=r"max_grad_norm=1\.0 computes a norm of all"):
        fsdp2.optim.whole(Clips, model.parameters(), max_grad_norm=1.0)
    fsdp2.optim.whole(Clips, model.parameters())
    extra = {"params": [nn.Parameter(torch.ones(3))], "cls": torch.optim.AdamW}
    with pytest.raises(fsdp2.ConfigError, match="expected 'cls' to be Counts, the optimizer's"):
        optimizer.add_param_group(extra)
    negative = fsdp2.optim.whole(Factors, model.parameters(), owners=lambda shape: -1.0)
    with pytest.raises(fsdp2.ConfigError, match=r"the cost of \(.*non-negative number, found -1.0"):
        train_on(model, negative)


# --- together with the rest -----------------------------------------------------------------------


@ranks(2)
def test_states_of_batches_go_through_checkpoints(tmp_path: Path) -> None:
    """The state of a 3-D parameter is stacked, and loads from files."""
    models = [fsdp2.fully_shard(seeded(Experts), mesh=make_mesh()) for _ in range(2)]
    one, two = (fsdp2.optim.whole(torch.optim.Muon, [m.experts], lr=0.1) for m in models)

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(ROWS, 13)).pow(2).mean().backward()
            model.bias.grad = None
            advance(optimizer)

    train(models[0], one, range(3))
    for owner in (models[0], models[1]):
        owner.bias.requires_grad_(False)
    fsdp2.checkpoint.save(tmp_path / "saved", models[0], one)
    fsdp2.checkpoint.load(tmp_path / "saved", models[1], two)
    for model, optimizer in zip(models, (one, two), strict=True):
        train(model, optimizer, range(3, 5))
    assert torch.equal(whole(models[0].experts), whole(models[1].experts))
    buffer = one.state_dict()["state"][0]["momentum_buffer"]
    assert buffer.placements == models[0].experts.placements


@pytest.mark.parametrize("offloads", [False, slow(True)])
@ranks(2)
def test_with_clipping_scaling_averages_and_late_groups(offloads: bool) -> None:
    """What works on shards works around a step of owners: the same bits as one process has."""
    case = CASES["stack"]
    policy = fsdp2.CPUOffloadPolicy(pin_memory=False) if offloads else fsdp2.OffloadPolicy()
    model = sharded(case, offload_policy=policy)
    plain = seeded(case.build)
    first, *rest = model.parameters()
    ours = fsdp2.optim.whole(Factors, [first], lr=0.1)
    leaves = list(plain.parameters())
    reference = Factors(leaves[:1], lr=0.1)
    average = fsdp2.optim.EMA(model, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(5):
        batch = case.batch(ROWS).chunk(dist.get_rank(), 2)
        scaler.scale(loss_of(model(*batch.args, **batch.kwargs))).backward()
        scaler.unscale_(ours)
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        give_gradients(model, leaves)
        scaler.step(ours)
        scaler.update()
        reference.step()
        average.update()
        assert_are(model, leaves)
        model.zero_grad()
        if step == 1:
            ours.add_param_group({"params": rest, "lr": 0.02})
            reference.add_param_group({"params": leaves[1:], "lr": 0.02})
        if step == 3:
            with average.swapped():
                state = ours.state_dict()
            ours.load_state_dict(state)


@ranks(2)
def test_plain_parameters_and_low_precision() -> None:
    """A parameter that no mesh divides is stepped on each rank; bf16 ones in their own dtype."""
    torch.manual_seed(0)
    plain = nn.Linear(13, 7).bfloat16()
    model = nn.Sequential(nn.Linear(29, 13).bfloat16(), plain)
    copy = seeded(lambda: model)
    leaves = [nn.Parameter(p.detach().clone()) for p in copy.parameters()]
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fsdp2.fully_shard(model[0], mesh=make_mesh(), mp_policy=policy)
    ours = fsdp2.optim.whole(torch.optim.Adafactor, model.parameters(), lr=0.1)
    reference = torch.optim.Adafactor(leaves, lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 29, dtype=torch.bfloat16)).pow(2).mean().backward()
        give_gradients(model, leaves)
        ours.step()
        reference.step()
        ours.zero_grad()
        assert_are(model, leaves)


@ranks(4)
def test_a_mesh_that_is_a_part_of_the_world() -> None:
    """Parameters of two meshes, one of them half of the ranks: each has peers of its own."""
    half = dist.get_rank() // 2
    inner = shared_mesh((2, 2), ("pair", "shard"))["shard"]
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5))
    torch.manual_seed(half)
    nn.init.normal_(model[0].weight)  # an expert of these two ranks
    leaves = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    dist.broadcast(model[1].weight.data, 0)
    dist.broadcast(model[1].bias.data, 0)
    leaves[2:] = [nn.Parameter(p.detach().clone()) for p in model[1].parameters()]
    fsdp2.fully_shard(model[0], mesh=inner)
    fsdp2.fully_shard(model[1], mesh=make_mesh())
    ours = fsdp2.optim.whole(Factors, model.parameters())
    reference = Factors(leaves)
    for _ in range(3):
        model(torch.randn(8, 13)).pow(2).mean().backward()
        give_gradients(model, leaves)
        ours.step()
        reference.step()
        ours.zero_grad()
        assert_are(model, leaves)
    assert sorted(fleet.peers.size for fleet in ours._fleets) == [2, 4]
    Fails.on = 3
    failing = fsdp2.optim.whole(Fails, model.parameters())
    before = [whole(param).clone() for param in model.parameters()]
    model(torch.randn(8, 13)).pow(2).mean().backward()
    with pytest.raises(StateError, match="no inverse"):
        failing.step()
    assert_are(model, before)


@ranks(4)
def test_what_travels_is_what_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady step sends each gradient's other parts once, and the rows once, padded to nothing.

    The owners' copies stay, so parameters travel one way.
    """
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = args[1][dist.get_rank()]
        sent.append(given.numel() - own)
        return exchange(received, given, *args, **kwargs)

    model = nn.Sequential(nn.Linear(130, 71), nn.Linear(71, 29), nn.Linear(29, 130))
    shard_each(*model, model, mesh=make_mesh())
    optimizer = fsdp2.optim.whole(Factors, model.parameters())
    totals = []
    monkeypatch.setattr(dist, "all_to_all_single", counted)
    for _ in range(3):
        model(torch.randn(3, 130)).pow(2).mean().backward()
        sent.clear()
        optimizer.step()
        total = torch.tensor([sum(sent)])
        dist.all_reduce(total)
        totals.append(int(total))
        optimizer.zero_grad()
    least = 2 * sum(param.numel() * 4 * 3 / 4 for param in model.parameters())
    assert totals[0] <= 1.5 * 1.02 * least
    assert totals[1] == totals[2] <= 1.02 * least


@ranks(3)
def test_tensors_go_to_owners_and_come_back() -> None:
    """The pieces for optimizers of one's own: a plan, whole tensors at owners, rows back."""
    model = sharded("few_rows")
    params = [param.detach() for param in model.parameters()]
    plan = fsdp2.optim.plan_owners(params)
    came = fsdp2.optim.to_owners(params, plan, max_bytes=64)
    for param, value, owner in zip(params, came, plan.owners, strict=True):
        full = whole(param)
        assert (value is not None) == (owner == dist.get_rank())
        if value is not None:
            assert torch.equal(value, full)
            value.mul_(3.0)
    before = [whole(param).clone() for param in params]
    fsdp2.optim.from_owners(came, params, plan, max_bytes=64)
    for param, value in zip(params, before, strict=True):
        assert torch.equal(whole(param), value * 3.0)
    with pytest.raises(fsdp2.ConfigError, match="on its owner"):
        fsdp2.optim.from_owners([None] * len(params), params, plan)


@ranks(2)
def test_several_classes_go_through_files(tmp_path: Path) -> None:
    """A checkpoint of two classes behind one object loads into another such, and trains on."""

    def make() -> tuple[nn.Module, Any]:
        model = sharded("few_rows")
        return model, fsdp2.optim.whole(torch.optim.Adafactor, mixed_groups(model))

    model, optimizer = make()
    train(model, optimizer, 2)
    fsdp2.checkpoint.save(tmp_path / "saved", model, optimizer)
    other, fresh = make()
    fsdp2.checkpoint.load(tmp_path / "saved", other, fresh)
    for one, its in ((model, optimizer), (other, fresh)):
        train(one, its, 2)
    assert_same_bits(model, other)


# --- found by attackers ---------------------------------------------------------------------------


class Remembers(Optimizer):
    """Keeps a 0-dim tensor and a number for each parameter, and a count in itself."""

    calls = 0

    def __init__(self, params: Any, lr: float = 0.1, scale: Any = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                entry = self.state[param]
                entry.setdefault("norm", torch.zeros((), dtype=param.dtype))
                entry["norm"] = 0.9 * entry["norm"] + param.grad.norm()
                entry["last"] = float(entry["norm"])
                step = group["lr"] * group["scale"] / (1 + entry["norm"] + entry["last"])
                param.sub_(param.grad * step / self.calls)
            if isinstance(group["scale"], Tensor):
                group["scale"].mul_(1.0001)


@ranks(2)
def test_what_a_class_keeps_of_each_matrix_of_a_batch_and_in_itself() -> None:
    """Numbers that differ between the matrices of a batch, and counters, outlive a save."""
    models = [fsdp2.fully_shard(seeded(Experts), mesh=make_mesh()) for _ in range(2)]
    one, two = (fsdp2.optim.whole(Remembers, [m.experts], batches=True) for m in models)
    for step in range(4):
        for model, optimizer in zip(models, (one, two), strict=True):
            torch.manual_seed(step)
            model(torch.randn(ROWS, 13)).pow(2).mean().backward()
            optimizer.step()
            model.zero_grad()
        state = two.state_dict()
        if step == 1:
            two.add_param_group({"params": [models[1].bias], "lr": 0.0})
            one.add_param_group({"params": [models[0].bias], "lr": 0.0})
            two.state_dict()
        elif step == 2:
            two.load_state_dict(state)
        assert torch.equal(whole(models[0].experts), whole(models[1].experts)), step


@ranks(2)
def test_an_option_that_is_a_tensor_is_changed_once_a_step() -> None:
    """Rounds have copies of it, and a change too small to be printed is taken over."""
    models = [sharded("stack") for _ in range(2)]
    scale = [torch.ones((), dtype=torch.float64) for _ in range(2)]
    many = fsdp2.optim.whole(Remembers, models[0].parameters(), max_bytes=1, scale=scale[0])
    few = fsdp2.optim.whole(Remembers, models[1].parameters(), scale=scale[1])
    for _ in range(3):
        backward_on("stack", *models)
        advance(many, few)
    for optimizer in (many, few):
        assert float(optimizer.param_groups[0]["scale"]) == pytest.approx(1.0001**3, rel=1e-12)
    assert_same_bits(models[0], models[1])


@ranks(2)
def test_any_write_is_seen() -> None:
    """Rows that change places, signs that change, values that cancel: sums of their bits differ."""
    model = fsdp2.fully_shard(nn.Linear(8, 8, bias=False), mesh=make_mesh())
    optimizer = fsdp2.optim.whole(torch.optim.SGD, model.parameters(), lr=0.0)
    eye = torch.eye(8)
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 4)
    for value in (eye, eye.flip(0), eye[[1, 0, *range(2, 8)]], signs, -signs, eye, eye.T.flip(1)):
        fsdp2.checkpoint.load_full_state(model, {"model": {"weight": value}})
        model(torch.ones(2, 8)).sum().backward()
        advance(optimizer)
        assert torch.equal(whole(model.weight), value)


@pytest.mark.parametrize("kind", ["nested", "crossing"])
@ranks(4)
def test_ranks_of_other_meshes_are_told(kind: str) -> None:
    """What ranks of one mesh do not agree on is an error on all that they share a mesh with."""
    mesh = shared_mesh((2, 2), ("pair", "shard"))
    outer = make_mesh() if kind == "nested" else mesh["pair"]
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fsdp2.fully_shard(model[0], mesh=mesh["shard"])
    fsdp2.fully_shard(model[1], mesh=outer)
    optimizer = fsdp2.optim.whole(torch.optim.SGD, model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    before = [param.to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
    if dist.get_rank() == 3:
        model[0].bias.grad = None
    with pytest.raises(fsdp2.ConfigError, match="parameters with gradients"):
        optimizer.step()
    assert_shards_are(model, before)
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


@ranks(2)
def test_groups_of_element_wise_classes_alone() -> None:
    """A stage of a pipeline may have no matrix; late groups without a class are of the first."""
    model = fsdp2.fully_shard(nn.Linear(8, 8), mesh=make_mesh())
    adamw = {"params": [model.bias], "cls": torch.optim.AdamW, "lr": 0.1}
    optimizer = fsdp2.optim.whole(torch.optim.Muon, [adamw], lr=0.5)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(fsdp2.ConfigError, match="one of this optimizer's classes"):
        optimizer.add_param_group({"params": [model.weight]})
    with pytest.raises(fsdp2.ConfigError, match="the result of an operation"):
        fsdp2.optim.whole(torch.optim.SGD, [model.bias * 1])


@ranks(2)
def test_rank_local_states_of_any_shape_load_again() -> None:
    """`local_state` of factors comes back on the same ranks."""
    model, optimizer = trained(2)
    state = fsdp2.checkpoint.local_state(model, optimizer)
    other, fresh = trained(0)
    fsdp2.checkpoint.load_local_state(other, state, fresh)
    for one, its in ((model, optimizer), (other, fresh)):
        train(one, its, 2)
    assert_same_bits(model, other)


@pytest.mark.parametrize("flat", [True, False])
@ranks(2)
def test_torchs_helpers_for_states(flat: bool) -> None:
    """They ask an optimizer for the fields of every parameter, also of those of other ranks."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(steps: int) -> tuple[nn.Module, Any]:
        model = sharded("few_rows")
        optimizer = fsdp2.optim.whole(torch.optim.Adafactor, model.parameters(), lr=0.1)
        train(model, optimizer, steps)
        return model, optimizer

    model, optimizer = make(2)
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    values = {name: param.clone() for name, param in model.state_dict().items()}
    for steps in (0, 3):
        other, fresh = make(steps)
        other.load_state_dict(values)
        set_optimizer_state_dict(other, fresh, kept, options=options)
        expected, its = make(2)
        for one, two in ((expected, its), (other, fresh)):
            train(one, two, 2)
        assert_same_bits(expected, other)
