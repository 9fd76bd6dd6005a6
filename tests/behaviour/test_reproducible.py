"""Promise: `fsdp2.reproducible` trains with the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.parity import whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slots import (
    SLOTS,
    WIDTH,
    Net,
    Plain,
    adamw,
    assert_same_bits,
    assert_same_model,
    assert_same_step,
    batch_of,
    loss_of,
    train,
)

BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ONLY_BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


def shard(model: nn.Module, shape: tuple[int, ...], **options: Any) -> nn.Module:
    mesh = shared_mesh(shape, ("replicate", "shard")[-len(shape) :])
    return shard_each(*model.blocks, model, mesh=mesh, **options)  # type: ignore[misc]


def compress(model: nn.Module, dtype: torch.dtype, **options: Any) -> None:
    fsdp2.register_comm_hook(model, fsdp2.Compress(dtype, **options))


def nothing(model: nn.Module) -> None:
    pass


BF16_NODES = {"node": torch.bfloat16}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[nn.Module], None], Any]] = {
    "fp32": ({}, {}, nothing, {}),
    "bf16": ({"mp_policy": BF16}, {}, nothing, {"dtype": torch.bfloat16}),
    "sums in bf16": (
        {"mp_policy": ONLY_BF16},
        {},
        nothing,
        {"dtype": torch.bfloat16, **BF16_NODES},
    ),
    "Compress": ({}, {}, partial(compress, dtype=torch.bfloat16), BF16_NODES),
    "narrow wire": ({}, {}, lambda m: m.set_gradient_wire_dtype(torch.bfloat16), BF16_NODES),
    "recomputed": ({}, {"recomputes": True}, nothing, {}),
    "tied": ({}, {"tied": True}, nothing, {}),
    'shard="gradients"': ({"shard": "gradients"}, {}, nothing, {}),
    'shard="optimizer"': ({"shard": "optimizer"}, {}, nothing, {}),
    "smaller mesh": ({"reshard_after_forward": False}, {}, nothing, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 4)
def test_losses_norms_and_parameters_are_those_of_one_process(kind: str, world_size: int) -> None:
    check(kind, (world_size,))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "Compress", 'shard="gradients"'])
@ranks(4)
def test_replicas_are_part_of_the_tree(kind: str, world_size: int) -> None:
    check(kind, (world_size // 2, 2))
    check(kind, (world_size, 1))


class Issued(TorchDispatchMode):
    """Records collectives in the order in which this rank issues them; with delays of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = next(found for found in map(group_of, args) if found is not None)
            self.found.append((func._schema.name, group.group_name))
            if torch.distributed.get_rank() == len(self.found) // 7 % 4:
                time.sleep(0.002)
        return func(*args, **(kwargs or {}))


def group_of(value: Any) -> Any:
    if not isinstance(value, torch.ScriptObject):
        return None
    with contextlib.suppress(Exception):  # another object of a script
        return torch.distributed.ProcessGroup.unbox(value)
    return None


@pytest.mark.parametrize("kind", ["fp32", "narrow wire"])
@ranks(4)
def test_ranks_issue_collectives_in_one_order(kind: str) -> None:
    """A sum over replicas is issued in two parts, the second one in a wait. Ranks that take other
    branches, or another time, have to agree on its place among all collectives nevertheless."""
    model = shard(seeded(partial(Net, recomputes=True)), (2, 2))
    KINDS[kind][2](model)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = adamw(model.parameters())
    with Issued() as issued:
        for step in range(3):
            train(model, optimizer, mine, step, 0.3)
    names = {name for name, _ in issued.found}
    assert {"c10d::send", "c10d::recv_", "c10d::_allgather_base_"} <= names, names
    groups = list(dict.fromkeys(group for _, group in issued.found))  # by their first use
    order = [(name, groups.index(group)) for name, group in issued.found]
    assert len(groups) >= 2, groups
    everywhere: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everywhere, order)
    assert all(found == everywhere[0] for found in everywhere)


def check(kind: str, shape: tuple[int, ...]) -> None:
    options, of_model, prepare, of_plain = KINDS[kind]
    model = seeded(partial(Net, **of_model))
    plain = Plain(model, adamw, **of_plain)
    shard(model, shape, **options)
    prepare(model)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = adamw(model.parameters())
    for step in range(3):
        torch.manual_seed(torch.distributed.get_rank())  # no dropout depends on it
        before = torch.get_rng_state()
        found, expected = train(model, optimizer, mine, step, 0.3), plain.train(0.3)
        assert torch.equal(torch.get_rng_state(), before)
        assert_same_step(found, expected, mine)
        assert_same_model(model, plain.model)


def job(size: int) -> Any:
    """Return the mesh of this rank's job, where jobs of so many ranks run side by side."""
    world = torch.distributed.get_world_size()
    return shared_mesh((world // size, size), ("job", "shard"))["shard"]


def shard_over(mesh: Any, model: nn.Module, **options: Any) -> nn.Module:
    return shard_each(*model.blocks, model, mesh=mesh, **options)  # type: ignore[misc]


@ranks(4)
def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_one(tmp_path: Path) -> None:
    """Dropout goes on with the step that was saved; a job may load before or after."""
    plain = Plain(seeded(Net), adamw)
    model = shard_over(job(4), seeded(Net))
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = adamw(model.parameters())
    for step in range(2):
        assert_same_step(train(model, optimizer, mine, step, 0.3), plain.train(0.3), mine)
    fsdp2.checkpoint.save(tmp_path / "saved", model, optimizer, extra={"step": 2})
    expected = [plain.train(0.3) for _ in range(2)]
    for size in (2, 1):
        model = shard_over(job(size), seeded(Net, seed=size))
        optimizer = adamw(model.parameters())
        if size == 1:
            mine = fsdp2.reproducible(model, slots=SLOTS, seed=7)
        assert fsdp2.checkpoint.load(tmp_path / "saved", model, optimizer) == {"step": 2}
        if size == 2:
            mine = fsdp2.reproducible(model, slots=SLOTS)
        for step in (2, 3):
            found = train(model, optimizer, mine, step, 0.3)
            assert_same_step(found, expected[step - 2], mine)
        assert_same_model(model, plain.model)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "one by one": partial(AdamW, lr=1e-2, foreach=False, fused=False),
    "foreach": partial(AdamW, lr=1e-2, foreach=True),
    "fused": partial(AdamW, lr=1e-2, fused=True),
    "momentum": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@ranks(1, 4)
def test_optimizers_work_element_by_element(kind: str) -> None:
    """On odd shards as on whole tensors; and so does an average of parameters."""
    plain = Plain(seeded(Net), OPTIMIZERS["foreach" if kind == "fused" else kind])
    model = shard_over(job(torch.distributed.get_world_size()), seeded(Net))
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = OPTIMIZERS[kind](model.parameters())
    averages = fsdp2.optim.EMA(model, 0.9), fsdp2.optim.EMA(plain.model, 0.9)
    for step in range(4):
        assert_same_step(train(model, optimizer, mine, step, 0.3), plain.train(0.3), mine)
        for average in averages:
            average.update()
    assert_same_model(model, plain.model)
    own, other = (average.state_dict() for average in averages)
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(whole(value), whole(other[name]), name)


@ranks(4)
def test_tensor_parallel_models_have_the_same_bits_on_one_and_on_two_data_ranks() -> None:
    found = []
    for size in (1, 2):
        mesh = shared_mesh((2 // size, size, 2), ("job", "shard", "tp"))
        model: Any = seeded(Net)
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            block.up, block.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
            torch.nn.init.normal_(block.up.weight, generator=torch.Generator().manual_seed(1))
            torch.nn.init.normal_(block.down.weight, generator=torch.Generator().manual_seed(2))
            torch.nn.init.zeros_(block.up.bias)
            torch.nn.init.zeros_(block.down.bias)
            parallelize_module(block, mesh["tp"], plan)
        shard_over(mesh["shard"], model)
        mine = fsdp2.reproducible(model, slots=SLOTS)
        optimizer = adamw(model.parameters())
        norms = [train(model, optimizer, mine, step, 0.3)[1] for step in range(3)]
        found.append([*norms, *(whole(param) for param in model.parameters())])
    for place, (one, two) in enumerate(zip(*found, strict=True)):
        assert_same_bits(two, one, f"number {place}")


@ranks(2)
def test_gradients_of_several_global_batches_add_up() -> None:
    model = shard_over(job(2), seeded(Net))
    plain = Plain(seeded(Net), adamw)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    for step in range(2):
        for slot in mine:
            loss_of(model, batch_of(step)[slot]).backward()
    expected: list[torch.Tensor | None] = []
    for step in range(2):
        plain.step = step
        plain.optimizer.step = lambda: None  # type: ignore[method-assign]
        plain.optimizer.zero_grad = lambda: None  # type: ignore[method-assign,misc]
        plain.train(float("inf"))
        grads = [param.grad for param in plain.model.parameters()]
        plain.model.zero_grad()
        expected = grads if not step else [_sum(a, b) for a, b in zip(expected, grads, strict=True)]
    for (name, param), grad in zip(model.named_parameters(), expected, strict=True):
        assert (param.grad is None) is (grad is None), name
        if grad is not None:
            assert_same_bits(whole(param.grad), grad, name)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


@ranks(2)
def test_a_step_that_failed_begins_again_at_its_first_slot() -> None:
    model: Any = shard_over(job(2), seeded(Net))
    mine = fsdp2.reproducible(model, slots=SLOTS)
    plain = Plain(seeded(Net), adamw)
    optimizer = adamw(model.parameters())
    loss_of(model, batch_of(0)[mine[0]]).backward()
    handle = model.blocks[1].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(batch_of(0)[mine[1]])
    handle.remove()
    assert_same_step(train(model, optimizer, mine, 0, 0.3), plain.train(0.3), mine)
    loss_of(model, batch_of(1)[mine[0]]).backward()
    model.zero_grad()  # which drops the slot
    assert_same_step(train(model, optimizer, mine, 1, 0.3), plain.train(0.3), mine)
    assert_same_model(model, plain.model)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@ranks(2)
def test_a_model_is_as_before_when_it_ends_and_copies_are_plain() -> None:
    models: list[Any] = [shard_over(job(2), seeded(Net)) for _ in range(3)]
    fsdp2.reproducible(models[0], slots=SLOTS)
    models[1] = copy.deepcopy(models[0])
    fsdp2.reproducible(models[0], None)
    for model in models:
        torch.manual_seed(0)  # of dropout
        loss_of(model, batch_of(0)[torch.distributed.get_rank()]).backward()
    for one, other, third in zip(*(model.parameters() for model in models), strict=True):
        if third.grad is not None:
            assert_same_bits(one.grad.to_local(), third.grad.to_local(), "ended")
            assert_same_bits(other.grad.to_local(), third.grad.to_local(), "a copy")


def batch_norm(model: Any) -> None:
    model.norm = nn.BatchNorm1d(3)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "batch norm": ({}, batch_norm, "norm is a BatchNorm1d"),
    "codes of replicas": (
        {},
        partial(compress, dtype=torch.int8, only_replicas=True),
        "only_replicas=True",
    ),
    "error feedback": (
        {},
        partial(compress, dtype=torch.bfloat16, error_feedback=True),
        "error_feedback=True",
    ),
    "manual": ({}, lambda m: m.set_manual_backward_finalization(True), "manual finalization"),
    "fp16": (
        {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.float16, torch.float16)},
        nothing,
        "float16",
    ),
    "gather codes": (
        {
            "mp_policy": fsdp2.MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, gather_dtype=torch.float8_e4m3fn
            )
        },
        nothing,
        "gather_dtype",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@ranks(2)
def test_what_depends_on_the_number_of_ranks_is_refused_by_name(kind: str) -> None:
    options, prepare, words = REFUSED[kind]
    model = shard_over(job(2), seeded(Net), **options)
    prepare(model)
    with pytest.raises(fsdp2.ConfigError, match=words) as error:
        fsdp2.reproducible(model, slots=SLOTS)
    assert error.value.code == "FS516"


@ranks(3)
def test_numbers_of_ranks_that_serve_are_named() -> None:
    model = shard(seeded(Net), (3,))
    with pytest.raises(fsdp2.ConfigError, match=r"found 3 .* Use 1, 2, 4, 8 ranks"):
        fsdp2.reproducible(model, slots=SLOTS)
    for wrong in (6, 0, "8", True):
        with pytest.raises(fsdp2.ConfigError):
            fsdp2.reproducible(model, slots=wrong)  # type: ignore[arg-type]
    with pytest.raises(fsdp2.StateError, match="FS330"):
        fsdp2.mean_over_slots(model, [1.0])


PROGRAM = Path(__file__).parent.parent / "kit" / "slots_program.py"


def printed(ranks: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=PROGRAM.parent.parent.parent,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_hundred_steps_of_the_example_are_the_same_on_up_to_eight_ranks(
    dtype: str, tmp_path: Path
) -> None:
    """And on 2 x 2, and with 2 and 1 ranks from what 4 saved."""
    expected = printed(1, "--dtype", dtype)
    assert len(expected) == 101
    for ranks_of_run, mesh in ((2, "2"), (4, "4"), (4, "2x2"), (8, "8")):
        assert printed(ranks_of_run, "--dtype", dtype, "--mesh", mesh) == expected
    saved = str(tmp_path / "saved")
    printed(4, "--dtype", dtype, "--steps", "40", "--save", saved)
    for ranks_of_run in (2, 1):
        assert printed(ranks_of_run, "--dtype", dtype, "--load", saved) == expected[40:]
