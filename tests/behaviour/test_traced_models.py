"""Promise: a sharded model compiled whole trains like the eager one, whatever model it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fsdp2
from tests.kit.compiled_pair import (
    EPS_BF16,
    MANY_STEPS,
    RTOL_BF16,
    STEPS,
    CompiledPair,
    loss_of_output,
)
from tests.kit.models import (
    CASES,
    EVERY_KIND,
    WIDTH,
    Batch,
    Block,
    Case,
    Stack,
    each_block,
    first_blocks,
    floats,
)
from tests.kit.parity import make_mesh, sharded
from tests.kit.pool import ranks
from tests.kit.slow import slow
from tests.kit.tensor_parallel import WIDTH as TP_WIDTH
from tests.kit.tensor_parallel import (
    FeedForward,
    Transformer,
    colwise_then_rowwise,
    mesh_of,
    sequence_parallel,
)
from tests.kit.tensor_parallel import tokens as tp_tokens

HIDDEN, VOCABULARY = 29, 61
BF16, FP32 = torch.bfloat16, torch.float32


# --- mixtures of experts --------------------------------------------------------------------------


class Routed(nn.Module):
    """Experts of which a router chooses two for each row; what it chooses is a mask."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(experts)
        )

    def weights(self, x: Tensor) -> Tensor:
        """Return the weight of each expert for each row; zero for those not chosen."""
        values, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return values.new_zeros(len(x), len(self.experts)).scatter(-1, chosen, values)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        weights = self.weights(inner)
        for index, expert in enumerate(self.experts):
            x = x + weights[:, index, None] * expert(inner)
        return x


class RoutedInOneWeight(Routed):
    """All experts in one parameter, and rows sent to them by products with one-hot rows."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__(experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 6)
        self.experts = nn.ModuleList()
        self.count = experts

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        values, chosen = self.router(inner).softmax(-1).topk(2, dim=-1)
        sent = F.one_hot(chosen, self.count).to(x.dtype)
        rows = torch.einsum("rke,rw->erkw", sent, inner).flatten(1, 2)
        rows = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)
        rows = rows.view(self.count, len(x), 2, WIDTH)
        return x + torch.einsum("erkw,rke,rk->rw", rows, sent, values)


class RoutedByIndex(Routed):
    """Each expert runs only the rows that chose it, and not at all if there are none."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        weights = self.weights(inner)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = weights[:, index].nonzero(as_tuple=True)
            if len(rows) > 0:
                part = weights[rows, index, None] * expert(inner[rows])
                total = total.index_add(0, rows, part)
        return x + total


def stack_of(block: Callable[[], nn.Module], count: int = 2) -> Case:
    return Case(partial(Stack, block, count), each_block, floats)


def each_expert_and_block(model: Any) -> Sequence[nn.Module]:
    return [part for block in model.blocks for part in (*block.experts, block)]


# --- adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer of some dtype, and a trainable product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return frozen + (x @ self.a.mT) @ self.b.mT


class AdaptedBlock(Block):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.up = Adapted(self.up.to(dtype))  # type: ignore[assignment]  # in its place
        self.mid = Adapted(self.mid.to(dtype))  # type: ignore[assignment]
        self.down = Adapted(self.down.to(dtype))  # type: ignore[assignment]


def adapted(dtype: torch.dtype) -> nn.Module:
    model = Stack(partial(AdaptedBlock, dtype), count=2)
    model.inp.requires_grad_(False)
    model.out.requires_grad_(False)
    return model


# --- attention ------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Layers of `nn.Transformer` between an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 18)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(18, 3, HIDDEN, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(18)
        self.head = nn.Linear(18, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_rows(rows: int, length: int = 7) -> Batch:
    return Batch((torch.randint(0, VOCABULARY, (rows, length)),), {})


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch.args
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# --- what else forwards do ------------------------------------------------------------------------


class ReadsItsChild(Stack):
    """Reads a parameter of a layer that is no unit, beside calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.inp.weight.square(), self.inp.bias))


class ReadsAUnit(Stack):
    """Reads a parameter of a block, a unit that does not run: a sharded DTensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x * block.norm.weight.full_tensor().square().mean())
        return self.out(x)


class LooksAtAUnit(Stack):
    """Reads a norm of a parameter of a block without gradients, as for a log."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.blocks[0].up.weight.full_tensor().norm()
        return super().forward(x) / norm


class ReadsADtype(Stack):
    """Casts its input to the dtype of its first parameter, which is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


class ReadsADtypeOfOthers(nn.Module):
    """Has no parameter of its own, and casts its input to the dtype of the first one below it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = block(x)
        return x


class ReadsADtypeBetween(Stack):
    """Asks for the dtype of a block's weight, where the block does not run."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        return self.out(x)


class TwoWays(Stack):
    """Parameters that no forward uses: of a block's own, and a whole unit that is never called."""

    def __init__(self) -> None:
        super().__init__(count=3)
        self.blocks[0].idle = nn.Linear(WIDTH, 3)
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in list(self.blocks)[:2]:
            x = block(x)
        return self.out(x)


class PartlyTrained(Stack):
    """A frozen unit, a unit with frozen biases, and a frozen layer of the root's."""

    def __init__(self) -> None:
        super().__init__(count=3)
        self.blocks[0].requires_grad_(False)
        for name, parameter in self.blocks[1].named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))
        self.inp.requires_grad_(False)


class CalledTwice(Stack):
    """One block twice in a forward, with another one in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x))
        return self.out(self.blocks[0](self.blocks[1](x)))


MODELS: dict[str, Case] = {
    "routed": stack_of(Routed),
    "routed_in_one_weight": stack_of(RoutedInOneWeight),
    "routed_each_expert": Case(partial(Stack, Routed, 2), each_expert_and_block, floats),
    "adapted_fp32": Case(partial(adapted, FP32), each_block, floats),
    "adapted_bf16": Case(partial(adapted, BF16), each_block, floats),
    "encoder": Case(Encoder, each_block, token_rows),
    "tied_encoder": Case(partial(Encoder, tied=True), each_block, token_rows),
    "unused": Case(TwoWays, each_block, floats),
    "frozen": Case(PartlyTrained, each_block, floats),
    "twice": Case(partial(CalledTwice, count=2), each_block, floats),
    "every_kind": EVERY_KIND,
    "scalars": CASES["scalars"],
    "one_row": CASES["one_row"],
    "few_rows": CASES["few_rows"],
    "shared_block": CASES["shared_block"],
    "reads_its_child": Case(ReadsItsChild, each_block, floats),
    "reads_a_unit": Case(ReadsAUnit, each_block, floats),
    "looks_at_a_unit": Case(LooksAtAUnit, each_block, floats),
    "reads_a_dtype": Case(ReadsADtype, each_block, floats),
    "reads_a_dtype_of_others": Case(ReadsADtypeOfOthers, each_block, floats),
    "reads_a_dtype_between": Case(ReadsADtypeBetween, each_block, floats),
}

LOSSES = {"encoder": next_token_loss, "tied_encoder": next_token_loss}
NO_PARAMETERS = "while a compiled model runs, a unit that does not run has no parameters"
BROKEN = {
    "reads_a_unit": NO_PARAMETERS,
    "looks_at_a_unit": NO_PARAMETERS,
}
BACKENDS = ["aot_eager", "inductor"]
LONG = "tied_encoder"
MOST = [  # the others are blocks of `every_kind`
    name for name in MODELS if name not in ("scalars", "one_row", "few_rows", "shared_block")
]


def pair_of(name: str, **kwargs: Any) -> CompiledPair:
    return CompiledPair(MODELS[name], loss=LOSSES.get(name, loss_of_output), **kwargs)


def marked(name: str, *more: str) -> Any:
    """Return a value of `parametrize`, which fails if the model is broken today."""
    reason = BROKEN.get(name)
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(name, *more, marks=marks)


DEFAULT = ["tied_encoder", "reads_a_dtype_of_others"]


@pytest.mark.parametrize("name", [marked(name) for name in DEFAULT])
@ranks(2)
def test_a_few_steps(name: str) -> None:
    pair_of(name).train(steps=4)


@pytest.mark.parametrize(
    ("name", "backend"), [marked(*pair) for pair in itertools.product(MOST, BACKENDS)]
)
@ranks(slow(2), limit_s=300)
def test_many_steps(name: str, backend: str) -> None:
    """Losses and parameters are the eager model's, from one graph that the first step made."""
    pair_of(name, backend=backend).train(MANY_STEPS if name == LONG else STEPS)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@ranks(slow(2), limit_s=300)
def test_rows_sent_by_index(backend: str) -> None:
    """Graphs end where data decides; each expert runs the rows that chose it, on each rank."""
    pair = CompiledPair(stack_of(RoutedByIndex), backend=backend, fullgraph=False)
    pair.train(MANY_STEPS, warm_up=10)  # counts of rows change, and become symbols


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["routed", "every_kind", "tied_encoder", "adapted_bf16"])
@ranks(slow(3), slow(4), limit_s=300)
def test_three_ranks_and_replicas(name: str, backend: str, world_size: int) -> None:
    mesh = make_mesh(2, 2) if world_size == 4 else None
    pair_of(name, backend=backend, mesh=mesh).train()


OTHERWISE = {"rtol": RTOL_BF16, "eps": EPS_BF16}
"""What is called twice has its gradients summed in fp32 here, in bf16 eagerly; inductor fuses.

No routers are here, whose choice may turn on a rounding.
"""


@pytest.mark.parametrize(
    ("name", "backend", "rounds"),
    [
        ("routed", "aot_eager", {}),
        ("tied_encoder", "aot_eager", {}),
        ("scalars", "aot_eager", {}),
        ("twice", "aot_eager", OTHERWISE),
        ("twice", "inductor", OTHERWISE),
        ("tied_encoder", "inductor", OTHERWISE),
        ("scalars", "inductor", OTHERWISE),
    ],
)
@ranks(slow(2), limit_s=300)
def test_bf16(name: str, backend: str, rounds: dict[str, float]) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    pair_of(name, backend=backend, mp_policy=policy, **rounds).train()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@ranks(slow(2), limit_s=300)
def test_batches_and_lengths_that_change(backend: str) -> None:
    """With ``dynamic=True`` one graph serves all sizes."""
    sizes = [(12, 7), (4, 9), (8, 5), (16, 11), (6, 6)]
    batches = [token_rows(rows, length) for rows, length in sizes]
    pair = pair_of("encoder", backend=backend, batches=batches, compiling={"dynamic": True})
    pair.train(2 * len(batches))


TENSOR_PARALLEL = {
    "transformer": (
        Case(Transformer, each_block, lambda rows: Batch((tp_tokens(),), {})),
        sequence_parallel,
    ),
    "uneven": (
        Case(
            partial(FeedForward, TP_WIDTH, 29),
            lambda model: [],
            lambda rows: Batch((torch.randn(rows, TP_WIDTH),), {}),
        ),
        colwise_then_rowwise,
    ),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
@ranks(slow(4), limit_s=300)
def test_tensor_parallel(name: str, backend: str) -> None:
    case, parallelize = TENSOR_PARALLEL[name]
    mesh = mesh_of(data=2, tensor=2)
    CompiledPair(
        case,
        backend=backend,
        prepare=lambda model: parallelize(model, mesh["tensor"]),
        mesh=mesh["data"],
        part=(mesh.get_local_rank("data"), 2),
    ).train()


def halve_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in inputs)


@pytest.mark.parametrize(
    "paths",
    [
        ["blocks.0", "out"],
        ["blocks.0.mid", "blocks.1"],
    ],
    ids=" ".join,
)
@ranks(slow(2), limit_s=300)
def test_backward_hooks_of_modules(paths: list[str]) -> None:
    """A hook may change gradients on their way, at a unit and at a layer; no one graph holds it."""

    def hook(model: nn.Module) -> None:
        for path in paths:
            model.get_submodule(path).register_full_backward_hook(halve_gradients)

    CompiledPair(first_blocks(CASES["stack"], 2), finish=hook, fullgraph=False).train()


@ranks(2)
def test_a_compiled_model_is_an_fsdp_module() -> None:
    model = sharded("stack")
    compiled = fsdp2.compile(model, backend="aot_eager")
    assert isinstance(compiled, fsdp2.FSDPModule)
