"""Promise: torch.distributed.checkpoint reads and writes a sharded model as it does a plain one.

A checkpoint written on one layout loads on any other, bit for bit, and training goes on as if
nothing had happened. `write` and `read` are two jobs of different world sizes that meet in a folder
only; the tests below the matrix run in one job.
"""

from __future__ import annotations

import copy
import itertools
import types
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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import fsdp2
from fsdp2 import checkpoint
from tests.kit.in_turn import advance, reshard_all, shard_each
from tests.kit.meshes import DEVICE, random_numbers, shared_mesh
from tests.kit.models import VOCAB, WIDTH, seeded
from tests.kit.parity import (
    assert_sharded,
    assert_values,
    bits,
    global_mean,
    names_of,
    values_of,
    whole,
)
from tests.kit.pool import RunOnRanks, make_request
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow

HIDDEN = 30  # torch's ColwiseParallel computes with equal parts only: two ranks hold 15 rows each
FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


# --- a model with one parameter of every kind -----------------------------------------------------


class OddBlock(nn.Module):
    """One row, fewer rows than ranks, frozen, buffers; and the kinds that torch's own refuses."""

    def __init__(self, for_torch: bool, scalar: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH) / 4)
        self.few = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.frozen = nn.Parameter(torch.randn(WIDTH) / 4, requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        turned = (torch.randn(29, WIDTH) / 4).t()
        gains = torch.linspace(0.5, 1.5, WIDTH)
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 0.7))
        self.turned = nn.Parameter(turned.contiguous() if for_torch else turned)
        self.gains = nn.Parameter(gains if for_torch else gains.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale + self.row + self.frozen
        x = x + torch.tanh(x @ self.few.t()) @ self.few
        x = x + 0.1 * torch.tanh(x @ self.turned) @ self.turned.t()
        return x * self.gains.float()


class OddModel(nn.Module):
    """An odd block between an embedding and a head in a unit of its own; the two are tied."""

    def __init__(self, for_torch: bool = False, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([OddBlock(for_torch, scalar and not for_torch)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))
        if not for_torch:
            self.head[1].weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def columns(parameter: nn.Parameter) -> Placement | None:
    """Matrices on dim 1, vectors whole on every rank."""
    return Shard(1) if parameter.dim() == 2 else Replicate()


@dataclass(frozen=True)
class Layout:
    """How a model lies over a job: plain (no mesh), sharded by `library`, or by rows and TP."""

    world_size: int = 1
    mesh: tuple[int, ...] = ()
    tensor_parallel: bool = False
    placement: Callable[[nn.Parameter], Placement | None] | None = None
    library: types.ModuleType = fsdp2


LAYOUTS = {
    "plain": Layout(),
    "1": Layout(1, (1,)),
    "2": Layout(2, (2,)),
    "3": Layout(3, (3,)),
    "4": Layout(4, (4,)),
    "2x2": Layout(4, (2, 2)),
    "1x3": Layout(3, (1, 3)),
    "tensor": Layout(4, (2, 2), tensor_parallel=True),
    "columns": Layout(3, (3,), placement=columns),
    "torch": Layout(3, (3,), library=torch_fsdp),
    "torch2x2": Layout(4, (2, 2), library=torch_fsdp),
    "torch_tensor": Layout(4, (2, 2), tensor_parallel=True, library=torch_fsdp),
}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
}


class Run:
    """A model on a layout with its optimizer, and the batches that it trains on."""

    def __init__(
        self,
        layout: str = "2",
        optimizer: str = "adamw",
        *,
        for_torch: bool = False,
        scalar: bool = True,
        seed: int = 1,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        plan = LAYOUTS[layout]
        model = seeded(lambda: OddModel(for_torch, scalar), seed) if model is None else model
        self.model, self.optimizer_name = model, optimizer
        self.data: DeviceMesh | None = None
        if plan.mesh:
            self._shard(plan, kwargs)
        self.optimizer = self.make_optimizer()

    def _shard(self, plan: Layout, kwargs: dict[str, Any]) -> None:
        mesh = data = shared_mesh(plan.mesh, ("a", "b")[-len(plan.mesh) :])
        if plan.tensor_parallel:
            data = mesh["a"]
            for block in self.model.blocks:  # type: ignore[union-attr]  # a ModuleList
                parallelize_module(
                    block, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
        self.data = data
        if plan.placement is not None:
            kwargs = {"shard_placement_fn": plan.placement, **kwargs}
        # a sum in fp64 rounds to the same gradients in any order: replicas of a scalar stay equal
        policy = plan.library.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        kwargs = {"mp_policy": policy, **kwargs}
        for unit in (*self.model.blocks, self.model.head, self.model):  # type: ignore[misc]
            plan.library.fully_shard(unit, mesh=data, **kwargs)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of two groups; frozen parameters are in them too."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
        ]
        return OPTIMIZERS[self.optimizer_name](groups)

    def complete(self) -> None:
        """Tie again and make the optimizer, after `to_empty`, assignment or a load onto meta."""
        self.model.head[1].weight = self.model.embed.weight  # type: ignore[union-attr, index]
        for block in self.model.blocks:  # type: ignore[union-attr]  # a ModuleList
            block.scratch = torch.zeros(3)
        self.optimizer = self.make_optimizer()

    def batch(self, step: int) -> Tensor:
        """Return this rank's rows of the global batch of a step."""
        generator = random_numbers(step)
        ids = torch.randint(0, VOCAB, (12, 5), generator=generator)
        if self.data is None:
            return ids
        index = 0
        for size, place in zip(self.data.shape, self.data.get_coordinate(), strict=True):
            index = index * size + place
        return ids.chunk(self.data.size())[index]

    def loss(self, step: int) -> Tensor:
        ids = self.batch(step)
        return F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())

    def train(self, first: int, steps: int) -> list[Tensor]:
        """Train some steps; return their global losses."""
        losses = []
        for step in range(first, first + steps):
            loss = self.loss(step)
            loss.backward()
            advance(self.optimizer)
            losses.append(loss.detach() if self.data is None else global_mean(loss))
        return losses

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all values, whole, read from the objects themselves."""
        state = self.optimizer.state
        return {
            "parameters": {n: whole(p).clone() for n, p in names_of(self.model).items()},
            "buffers": {n: b.clone() for n, b in self.model.named_buffers()},
            "state": {
                name: {key: whole(value).clone() for key, value in state[p].items()}
                for name, p in names_of(self.model).items()
                if p in state
            },
            "groups": [
                {key: as_saved(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
        }


def as_saved(value: Any) -> Any:
    """A tuple comes back as a list where torch flattens state."""
    return list(value) if isinstance(value, tuple) else value


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two snapshots agree bit for bit."""
    for part in ("parameters", "buffers"):
        assert list(actual[part]) == list(expected[part])
        for name, value in expected[part].items():
            if not name.endswith("scratch"):  # which is not saved
                assert_bitwise(actual[part][name], value, name)
    assert set(actual["state"]) == set(expected["state"])
    for name, state in expected["state"].items():
        assert set(actual["state"][name]) == set(state), name
        for key, value in state.items():
            assert_bitwise(actual["state"][name][key], value, f"{key} of {name}")
    assert actual["groups"] == expected["groups"]


def assert_bitwise(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    assert torch.equal(bits(actual), bits(expected)), f"{what} differs"


def differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(not torch.equal(v, b["parameters"][n]) for n, v in a["parameters"].items())


def goes_on_as(run: Run, source: Run) -> bool:
    """Train both; the losses are the same, to the last bit."""
    return [x.item() for x in run.train(2, 2)] == [x.item() for x in source.train(2, 2)]


# --- written by one job, read by another ----------------------------------------------------------


def job(body: Callable[..., None]) -> Callable[..., None]:
    """Let ranks find a body that is no test by itself."""
    body.body = body  # type: ignore[attr-defined]  # what a rank looks for
    return body


@job
def write(layout: str, optimizer: str, for_torch: bool, folder: str) -> None:
    """Train, save, write down what was saved, and train on."""
    run = Run(layout, optimizer, for_torch=for_torch)
    run.train(0, 2)
    save(run, f"{folder}/saved")
    snapshot = run.snapshot()
    losses = run.train(2, 3)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"snapshot": snapshot, "losses": losses}, f"{folder}/expected.pt")


@job
def read(layout: str, optimizer: str, for_torch: bool, folder: str, loss_rtol: float) -> None:
    """Load into another model, compare with what the writer wrote down, and train on."""
    expected = torch.load(f"{folder}/expected.pt")
    run = Run(layout, optimizer, for_torch=for_torch, seed=5)
    scratch = run.model.blocks[0].scratch.clone()
    assert differs(run.snapshot(), expected["snapshot"])
    load(run, f"{folder}/saved")
    assert_equal(run.snapshot(), expected["snapshot"])
    assert torch.equal(run.model.blocks[0].scratch, scratch)
    losses = run.train(2, 3)
    # the first loss follows from what was loaded, the next ones from gradients in bf16 too
    rtols = [min(loss_rtol, 1e-6), loss_rtol, loss_rtol]
    for loss, other, rtol in zip(losses, expected["losses"], rtols, strict=True):
        torch.testing.assert_close(loss, other, rtol=rtol, atol=0)


def write_and_read(
    run_on_ranks: RunOnRanks,
    folder: Path,
    source: str,
    target: str,
    optimizer: str,
    *,
    for_torch: bool = False,
    loss_rtol: float = 0.0,
) -> None:
    given = {"optimizer": optimizer, "for_torch": for_torch, "folder": str(folder)}
    for body, layout, more in (
        (write, source, {}),
        (read, target, {"loss_rtol": loss_rtol}),
    ):
        run_on_ranks(
            make_request(
                body,
                f"{body.__name__} {layout}",
                LAYOUTS[layout].world_size,
                {"layout": layout, **given, **more},
                with_process_group=layout != "plain",
            )
        )


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    with_slow(
        itertools.product(["1", "2", "3", "2x2", "1x3", "columns", "tensor"], OPTIMIZERS),
        [("3", "adamw")],
    ),
)
def test_training_resumes_bit_for_bit(
    run_on_ranks: RunOnRanks, tmp_path: Path, layout: str, optimizer: str
) -> None:
    """Loaded on the layout that wrote it, a checkpoint continues with the same losses, all bits."""
    write_and_read(run_on_ranks, tmp_path, layout, layout, optimizer)


@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [
        slow("2", "4", "adamw"),
        ("4", "3", "momentum"),
        slow("3", "2x2", "adamw"),
        slow("2", "tensor", "adamw"),
        slow("columns", "4", "adamw"),
        slow("plain", "3", "adamw"),
        slow("4", "plain", "momentum"),
        slow("2x2", "3", "momentum"),
        slow("tensor", "3", "adamw"),
        slow("tensor", "plain", "momentum"),
        slow("plain", "tensor", "momentum"),
        slow("4", "columns", "adamw"),
        slow("columns", "2x2", "momentum"),
        slow("columns", "tensor", "adamw"),
        slow("1x3", "plain", "adamw"),
        slow("1", "4", "momentum"),
    ],
)
def test_a_checkpoint_moves_to_another_layout(
    run_on_ranks: RunOnRanks, tmp_path: Path, source: str, target: str, optimizer: str
) -> None:
    """What one layout saved is loaded on another bit for bit, and training goes on from there."""
    write_and_read(run_on_ranks, tmp_path, source, target, optimizer, loss_rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [
        ("torch", "4", "adamw"),
        slow("2x2", "torch", "momentum"),
        slow("torch", "2x2", "momentum"),
        slow("columns", "torch", "momentum"),
        slow("torch2x2", "3", "adamw"),
        slow("3", "torch2x2", "momentum"),
        slow("torch_tensor", "tensor", "adamw"),
        slow("tensor", "torch_tensor", "adamw"),
        slow("torch_tensor", "columns", "momentum"),
    ],
)
def test_checkpoints_are_those_of_torch(
    run_on_ranks: RunOnRanks, tmp_path: Path, source: str, target: str, optimizer: str
) -> None:
    """Files that torch's own fully_shard wrote load here, files from here load there, all bits."""
    write_and_read(
        run_on_ranks, tmp_path, source, target, optimizer, for_torch=True, loss_rtol=1e-6
    )


# --- in one job -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"), with_slow(itertools.product(["2x2", "tensor", "4"], repeat=2))
)
@ranks(4)
def test_our_own_reader_puts_blocks_together(tmp_path: Path, source: str, target: str) -> None:
    """`checkpoint.load` finds its block among the parts that another layout saved, bit for bit."""
    run = trained(source, optimizer="momentum")
    other = trained(target, optimizer="momentum", seed=5)
    checkpoint.save(tmp_path / "saved", run.model, run.optimizer)
    assert differs(other.snapshot(), run.snapshot())
    checkpoint.load(tmp_path / "saved", other.model, other.optimizer)
    assert_equal(other.snapshot(), run.snapshot())
    save(run, str(tmp_path / "torchs"))
    other = Run(target, "momentum", seed=6)
    checkpoint.load(tmp_path / "torchs", other.model, other.optimizer, optim_key="optim")
    assert_equal(other.snapshot(), run.snapshot())


def trained(layout: str = "3", **kwargs: Any) -> Run:
    run = Run(layout, **kwargs)
    run.train(0, 2)
    return run


def save(run: Run, folder: str, options: StateDictOptions | None = None) -> None:
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)


def load(run: Run, folder: str, options: StateDictOptions | None = None) -> None:
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    put(run, model, optim, options)


def put(run: Run, model: Any, optim: Any, options: StateDictOptions | None = None) -> None:
    given = {"model_state_dict": model, "optim_state_dict": optim}
    set_state_dict(run.model, run.optimizer, **given, options=options)


def detached(run: Run, options: StateDictOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a full state that shares no tensor: `Optimizer.load_state_dict` copies none."""
    return copy.deepcopy(get_state_dict(run.model, run.optimizer, options=options))


@pytest.mark.parametrize("layout", with_slow(["4", "tensor"], ["4"]))
@ranks(4)
def test_a_full_state_dict_is_that_of_a_plain_model(layout: str) -> None:
    """`full_state_dict` gives plain tensors under a plain model's names, and they fit one."""
    run = trained(layout)
    expected = run.snapshot()
    model, optim = get_state_dict(run.model, run.optimizer, options=FULL)
    plain = Run("plain", seed=5)
    assert list(model) == list(plain.model.state_dict())
    assert all(type(value) is Tensor for value in model.values())
    put(plain, model, optim, FULL)
    assert_equal(plain.snapshot(), expected)


@ranks(3)
def test_a_sharded_state_dict_holds_the_shards() -> None:
    """By default each value is a DTensor placed as its parameter, with the values of this rank."""
    run = trained()
    model, optim = get_state_dict(run.model, run.optimizer)
    for name, parameter in names_of(run.model).items():
        assert isinstance(model[name], DTensor)
        assert model[name].placements == parameter.placements
        assert torch.equal(model[name].to_local(), parameter.to_local())
    for name, state in optim["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].placements == names_of(run.model)[name].placements
            assert state[key].to_local().shape == names_of(run.model)[name].to_local().shape
        assert state["step"].item() == 2


@ranks(3)
def test_cpu_offload_gives_the_full_state_to_rank_0(rank: int) -> None:
    """With `cpu_offload` rank 0 alone gets the full state; sharded, each rank gets its own part."""
    run = trained()
    expected = run.snapshot()
    model, optim = get_state_dict(run.model, run.optimizer, options=ON_RANK_0)
    if rank == 0:
        for name, value in expected["parameters"].items():
            assert_bitwise(model[name], value, name)
        for name, state in expected["state"].items():
            for key, value in state.items():
                if name != "head.1.weight":  # tied: state stands under the first name only
                    assert_bitwise(optim["state"][name][key], value, f"{key} of {name}")
    else:
        assert model == {}
        assert optim == {}
    sharded = get_model_state_dict(run.model, options=StateDictOptions(cpu_offload=True))
    for name, parameter in names_of(run.model).items():
        assert torch.equal(sharded[name].to_local(), parameter.to_local())


@pytest.mark.parametrize(
    ("layout", "start"),
    [("3", "trained"), slow("columns", "fresh"), ("3", "emptied"), slow("columns", "on meta")],
)
@ranks(3)
def test_rank_0_broadcasts_the_state(layout: str, start: str) -> None:
    """With `broadcast_from_rank0` one rank has the full state and every rank gets its shards.

    A model on meta gets memory from `to_empty`, or from the load itself.
    """
    source = trained("3", scalar=False)
    expected = source.snapshot()
    model, optim = detached(source, ON_RANK_0)
    from_meta = start in ("emptied", "on meta")
    run = Run(layout, model=on_meta(False) if from_meta else None, seed=5, scalar=False)
    if start == "trained":
        run.train(0, 2)
    if start == "emptied":
        run.model.to_empty(device=DEVICE)
    # in two calls: torch's set_state_dict takes an empty model state for "the optimizer only"
    set_model_state_dict(run.model, model, options=FROM_RANK_0)
    if from_meta:
        run.complete()
    set_optimizer_state_dict(run.model, run.optimizer, optim, options=FROM_RANK_0)
    assert_equal(run.snapshot(), expected)
    rtol = 0.0 if layout == "3" else 1e-4
    for loss, other in zip(run.train(2, 2), source.train(2, 2), strict=True):
        torch.testing.assert_close(loss, other, rtol=rtol, atol=0)


@pytest.mark.parametrize("optimizer", with_slow(["adamw", "momentum"], ["momentum"]))
@ranks(3)
def test_a_flat_optimizer_state_goes_through_a_file(optimizer: str, tmp_path: Path) -> None:
    """`flatten_optimizer_state_dict` gives one key a tensor, which a fresh optimizer can load."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    run = trained(optimizer=optimizer)
    optim = get_optimizer_state_dict(run.model, run.optimizer, options=flat)
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"
    assert isinstance(optim[f"state.blocks.0.turned.{key}"], DTensor)
    assert optim["param_groups.blocks.0.turned.weight_decay"] == 0.1
    save(run, str(tmp_path), flat)
    other = Run(optimizer=optimizer, layout="3", seed=5)
    load(other, str(tmp_path), flat)
    assert_equal(other.snapshot(), run.snapshot())


@ranks(2)
def test_a_partial_state_loads_without_strict() -> None:
    """`strict=False` loads what is there, keeps the rest, and names missing and unexpected keys."""
    source, run = trained("2"), Run("2", seed=5)
    before, state = run.snapshot(), get_model_state_dict(source.model)
    removed = state.pop("blocks.0.turned")
    state["stranger"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="stranger"):
        set_model_state_dict(run.model, dict(state))
    result = set_model_state_dict(run.model, state, options=StateDictOptions(strict=False))
    assert result.missing_keys == ["blocks.0.turned"]
    assert result.unexpected_keys == ["stranger"]
    loaded = run.snapshot()["parameters"]
    assert removed.shape == loaded["blocks.0.turned"].shape
    for name, value in source.snapshot()["parameters"].items():
        wanted = before["parameters"][name] if name == "blocks.0.turned" else value
        assert_bitwise(loaded[name], wanted, name)


@ranks(2)
def test_frozen_parameters_may_be_left_out() -> None:
    """`ignore_frozen_params` leaves frozen parameters out of the state and nothing else."""
    run = trained("2")
    state = get_model_state_dict(run.model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(run.model.state_dict()) - set(state) == {"blocks.0.frozen"}


@ranks(3)
def test_modules_and_optimizers_are_stateful(tmp_path: Path) -> None:
    """`dcp.save` and `dcp.load` take a sharded module as it is, through its own state_dict."""
    run, other = trained(), Run("3", seed=5)
    dcp.save({"model": run.model}, checkpoint_id=str(tmp_path))
    dcp.load({"model": other.model}, checkpoint_id=str(tmp_path))
    assert_values(other.model, values_of(run.model))
    assert other.model.blocks[0].count.item() == 2


@ranks(2)
def test_training_goes_on_during_an_asynchronous_save(tmp_path: Path) -> None:
    """`async_save` writes the values of its call, whatever training does to shards meanwhile."""
    run, twin = trained("2"), trained("2")
    expected = run.snapshot()
    model, optim = get_state_dict(run.model, run.optimizer)
    saving = dcp.async_save(
        {"model": model, "optim": optim},
        checkpoint_id=str(tmp_path),
        process_group=dist.new_group(backend="gloo"),  # its thread must not share one with training
    )
    assert goes_on_as(run, twin)
    saving.result()
    other, again = Run("2", seed=5), trained("2")
    load(other, str(tmp_path))
    assert_equal(other.snapshot(), expected)
    assert goes_on_as(other, again)


@pytest.mark.parametrize(
    "options", [slow(None), FULL, slow(ON_RANK_0)], ids=["sharded", "full", "on_rank_0"]
)
@ranks(3)
def test_model_state_while_parameters_are_whole(
    options: StateDictOptions | None, rank: int
) -> None:
    """After a forward that does not reshard, the state read is that of the shards."""
    source, run = trained(), Run("3", reshard_after_forward=False)
    run.train(0, 2)
    loss = run.loss(9)
    source.loss(9)
    assert not isinstance(run.model.blocks[0].turned, DTensor)
    del loss
    state = get_model_state_dict(run.model, options=options)
    for name, value in source.snapshot()["parameters"].items():
        if name in state:
            assert_bitwise(whole(state[name]), value, name)
    assert len(state) == (0 if options == ON_RANK_0 and rank else len(source.model.state_dict()))
    assert_sharded(run.model)


@ranks(3)
def test_shards_are_loaded_while_parameters_are_whole() -> None:
    """Loaded after a forward that does not reshard, shards are what the next forward computes with.

    Full states, and the optimizer's, need the parameters sharded first: torch looks at them before
    it calls `load_state_dict` (it does so with its own fully_shard too). `reshard` does that.
    """
    source = trained(scalar=False)
    run = Run("3", seed=5, scalar=False, reshard_after_forward=False)
    run.model.set_reshard_after_backward(False)
    run.train(0, 1)
    assert "unsharded" in {group.state for unit in fsdp2.units(run.model) for group in unit.groups}
    set_model_state_dict(run.model, get_model_state_dict(source.model))
    assert_sharded(run.model)
    run.loss(9)
    reshard_all(run.model)
    model, optim = detached(source, FULL)
    put(run, model, optim, FULL)
    assert_equal(run.snapshot(), source.snapshot())
    assert goes_on_as(run, source)


@pytest.mark.parametrize("optimizer", ["adamw", slow("momentum")])
@ranks(3)
def test_optimizer_state_before_the_first_step(optimizer: str) -> None:
    """A fresh optimizer takes a state, and reading its own first changes no parameter."""
    source, run = trained(optimizer=optimizer), Run("3", optimizer, seed=5)
    twin = trained(optimizer=optimizer)  # `Optimizer.load_state_dict` takes tensors, no copies
    set_model_state_dict(run.model, get_model_state_dict(source.model))
    before = run.snapshot()
    fresh = get_optimizer_state_dict(run.model, run.optimizer)
    optim = get_optimizer_state_dict(source.model, source.optimizer)
    assert set(fresh["state"]) == set(optim["state"])
    assert not differs(run.snapshot(), before)
    assert all(p.grad is None for p in run.model.parameters())
    set_optimizer_state_dict(run.model, run.optimizer, optim)
    assert_equal(run.snapshot(), source.snapshot())
    assert goes_on_as(run, twin)


@pytest.mark.parametrize("trained_before", [False, slow(True)])
@ranks(3)
def test_a_loaded_state_may_be_assigned(trained_before: bool, tmp_path: Path) -> None:
    """`load_state_dict(assign=True)` takes what `dcp.load` filled; a new optimizer trains it."""
    source = trained()
    save(source, str(tmp_path))
    run = trained(seed=5) if trained_before else Run("3", seed=5)
    state = {name: torch.empty_like(value) for name, value in run.model.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=str(tmp_path))
    run.model.load_state_dict(state, assign=True)
    run.complete()  # assignment breaks ties of any model
    optim = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.load({"optim": optim}, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(run.model, run.optimizer, optim)
    assert_equal(run.snapshot(), source.snapshot())
    assert goes_on_as(run, source)


def on_meta(scalar: bool = True) -> nn.Module:
    with torch.device("meta"):
        return OddModel(scalar=scalar)


@pytest.mark.parametrize("parts", with_slow([1, 2], [2]))
@ranks(3)
def test_from_the_meta_device_by_whole_tensors(parts: int) -> None:
    """Whole tensors assigned to a model on meta, in one load or more, are shards at once.

    An optimizer made before the first forward trains them.
    """
    source = trained("3")
    state = get_model_state_dict(source.model, options=FULL)
    run = Run("3", model=on_meta())
    for block in run.model.blocks:
        block.scratch = torch.zeros(3)
    names = list(state)
    for part in range(parts):
        taken = {name: state[name].clone() for name in names[part::parts]}
        run.model.load_state_dict(taken, assign=True, strict=parts == 1)
    assert_sharded(run.model)
    assert run.model.head[1].weight is run.model.embed.weight
    run.optimizer, source.optimizer = run.make_optimizer(), source.make_optimizer()
    assert goes_on_as(run, source)
    assert_equal(run.snapshot(), source.snapshot())


@pytest.mark.xfail(strict=True, reason="torch loads 0-dim states of DTensors as plain tensors")
@ranks(2)
def test_full_optimizer_state_of_a_scalar() -> None:
    """A full optimizer state is loaded for a 0-dim parameter too."""
    run = trained("2")
    optim = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    set_optimizer_state_dict(run.model, run.optimizer, optim, options=FULL)
    run.train(2, 1)


@ranks(3)
def test_replicas_of_a_parameter_stay_equal() -> None:
    """A parameter that every rank holds whole has the same bits on every rank after training."""
    run = Run("columns", mp_policy=fsdp2.MixedPrecisionPolicy())
    run.train(0, 20)
    for name, parameter in names_of(run.model).items():
        if parameter.placements == (Replicate(),):
            mine = parameter.to_local().detach().float()
            first = mine.clone()
            dist.broadcast(first, src=0)
            differ = torch.tensor(float(not torch.equal(mine, first)))
            dist.all_reduce(differ)
            assert differ.item() == 0, name


@ranks(3)
def test_from_the_meta_device_from_a_file(tmp_path: Path) -> None:
    """A model on meta, given memory by `to_empty`, is filled from a file."""
    source = trained("3")
    save(source, str(tmp_path))
    run = Run("3", model=on_meta())
    run.model.to_empty(device=DEVICE)
    run.complete()
    load(run, str(tmp_path))
    assert_equal(run.snapshot(), source.snapshot())
    assert goes_on_as(run, source)


@ranks(4)
def test_three_ranks_of_four(rank: int, tmp_path: Path) -> None:
    """A model on three ranks of four saves and loads through their process group alone."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    everyone = trained("4")
    expected = values_of(everyone.model)
    save(everyone, str(tmp_path / "four"))
    if rank == 3:
        return
    model = seeded(OddModel, seed=5)
    shard_each(*model.blocks, model.head, model, mesh=mesh)
    state = get_model_state_dict(model)
    pg = mesh.get_group()
    dcp.load({"model": state}, checkpoint_id=str(tmp_path / "four"), process_group=pg)
    set_model_state_dict(model, state)
    assert_values(model, expected)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=str(tmp_path / "three"), process_group=pg)
    plain = OddModel()
    alone = {"model": plain.state_dict()}
    dcp.load(alone, checkpoint_id=str(tmp_path / "three"), no_dist=True)
    assert_values(plain, expected)
