"""Small models, each with one oddity of real ones, and the batches that they train on.

A `Case` is a model, the modules of it to shard (in order, the root left out), and a maker of
global batches. `CASES` lists them by name; tests are parametrised with names.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

TORCH_2_14 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
TORCH_2_15 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
TORCH_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
WIDTH, HIDDEN, NARROW, VOCAB = 13, 29, 7, 31


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward; tensors have the batch on dim 0."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def chunk(self, index: int, count: int) -> Batch:
        """Return part `index` of `count` equal parts."""

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() > 0:
                assert value.shape[0] % count == 0, "a global batch must divide evenly"
                return value.chunk(count)[index]
            if isinstance(value, dict):
                return {key: cut(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(cut(item) for item in value)
            return value

        return Batch(cut(self.args), cut(self.kwargs))


Units = Callable[[nn.Module], Sequence[nn.Module | list[nn.Module]]]


@dataclass(frozen=True)
class Case:
    """One model to train; `units` are sharded below the root; `in_torch`: torch's own can too."""

    build: Callable[[], nn.Module]
    units: Units
    batch: Callable[[int], Batch]
    in_torch: bool = True


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors of nested containers, dataclasses included, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for item in output.values() for t in tensors_in(item)]
    if isinstance(output, (list, tuple)):
        return [t for item in output for t in tensors_in(item)]
    if is_dataclass(output) and not isinstance(output, type):
        return [t for field in fields(output) for t in tensors_in(getattr(output, field.name))]
    return []


def loss_of(output: Any) -> Tensor:
    """Return a scalar in which every tensor of `output` has a part; a mean over the batch."""
    terms = [t.float() if t.dtype is not torch.float64 else t for t in tensors_in(output)]
    return sum((t.square().mean() + 0.3 * t.mean() for t in terms), torch.zeros(()))


def seeded(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """Build a model whose initial values depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def floats(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH),), {})


def tokens(rows: int) -> Batch:
    return Batch((torch.randint(0, VOCAB, (rows, 5)),), {})


# --- blocks ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual MLP whose dims no small number of ranks divides."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.mid = nn.Linear(HIDDEN, NARROW, bias=bias)
        self.down = nn.Linear(NARROW, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.mid(F.gelu(self.up(self.norm(x))))))


class Stack(nn.Module):
    """Blocks in a list, with parameters of the root before and after them."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(count))
        self.out = nn.Linear(WIDTH, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def stack(make_block: Callable[[], nn.Module] = Block, count: int = 3) -> Callable[[], Stack]:
    return lambda: Stack(make_block, count)


def each_block(model: nn.Module) -> Sequence[nn.Module]:
    return list(model.blocks)  # type: ignore[arg-type]  # a ModuleList


def no_units(model: nn.Module) -> Sequence[nn.Module]:
    return []


class OneRow(Block):
    """Parameters of one row and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.row = nn.Parameter(torch.randn(1, WIDTH) / 4)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x)) + self.row * self.one


class FewRows(nn.Module):
    """Parameters with fewer rows than ranks, one of them with none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.three = nn.Parameter(torch.randn(3, 2) / 2)
        self.back = nn.Parameter(torch.randn(3, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh((x @ self.two.t()) @ self.three.t()) @ self.back


class Scalars(Block):
    """0-dim parameters, first and last in order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class NonContiguous(nn.Module):
    """A transposed, a permuted and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter((torch.randn(HIDDEN, WIDTH) / 4).t())
        self.permuted = nn.Parameter((torch.randn(3, HIDDEN, 2) / 4).permute(1, 2, 0))
        self.conv = nn.Conv2d(2, 4, (2, 1)).to(memory_format=torch.channels_last)
        self.down = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bh,hij->bij", torch.tanh(x @ self.transposed), self.permuted)
        return (
            x
            + self.down(hidden.flatten(1))
            + self.conv(hidden.unsqueeze(-1)).mean((1, 2, 3))[:, None]
        )


class MixedDtypes(nn.Module):
    """fp32, fp64 and bf16 parameters side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, HIDDEN)
        self.b = nn.Linear(HIDDEN, NARROW, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, NARROW, dtype=torch.bfloat16))
        self.c = nn.Linear(NARROW, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.tanh(self.a(x)).double()).float()
        return x + self.c(hidden * self.scale.float())


class PartlyFrozen(Block):
    """Frozen parameters between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.mid.bias.requires_grad_(False)
        self.down.requires_grad_(False)


class AllFrozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Quantised(nn.Module):
    """Frozen int8 and float8 weights with trainable low-rank updates."""

    def __init__(self) -> None:
        super().__init__()
        int8 = torch.randint(-127, 128, (HIDDEN, WIDTH), dtype=torch.int8)
        self.int8 = nn.Parameter(int8, requires_grad=False)
        self.float8 = nn.Parameter(
            (torch.randn(WIDTH, HIDDEN) / 4).to(torch.float8_e4m3fn), requires_grad=False
        )
        self.scale = nn.Parameter(torch.full((HIDDEN, 1), 0.01), requires_grad=False)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ (self.int8.float() * self.scale).t() + self.lora_b(self.lora_a(x))
        return x + 0.1 * torch.tanh(hidden) @ self.float8.float().t()


class TiedWithin(nn.Module):
    """One weight under two names in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.again = nn.Linear(WIDTH, HIDDEN)
        self.again.weight = self.up.weight
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) + torch.sin(self.again(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x))


class TinyLM(nn.Module):
    """Embedding in the root, head in a unit of its own, the two optionally tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head()
        self.register_buffer("position", torch.randn(5, WIDTH))
        if tied:
            self.head.proj.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_and_head(model: nn.Module) -> Sequence[nn.Module]:
    return [*model.blocks, model.head]  # type: ignore[misc, list-item]  # a ModuleList and a Head


def tied_blocks() -> Stack:
    """Two blocks that share one weight, and a third that shares a bias with the root."""
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.inp.bias = model.blocks[1].down.bias
    return model


def first_blocks(case: Case, count: int) -> Case:
    """Return the case with its first blocks only: to compile takes as long as there are blocks."""

    def build() -> nn.Module:
        model: Any = case.build()
        model.blocks = model.blocks[:count]
        return model

    return replace(case, build=build)


def shared_block() -> Stack:
    """One block under two names, called twice in a forward."""
    model = Stack()
    model.blocks[2] = model.blocks[0]
    return model


class AuxBlock(Block):
    """A block whose gate gets gradients only through the auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.gate(x.detach()).softmax(-1).square().sum(-1)


class AuxStack(Stack):
    def __init__(self) -> None:
        super().__init__(AuxBlock)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, aux = self.inp(x), torch.zeros(())
        for block in self.blocks:
            x, part = block(x)
            aux = aux + part
        return self.out(x), aux


@dataclass
class State:
    """What passes between the blocks of a `ContainerStack`."""

    hidden: Tensor
    extra: dict[str, Any]
    step: int = 0


Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    value: Tensor
    nested: list[Tensor]


class DictBlock(Block):
    def forward(self, state: State) -> dict[str, Any]:  # type: ignore[override]  # another input
        hidden = super().forward(state.hidden)
        return {"hidden": hidden, "more": [hidden * 2, (state.step, None)]}


class DataclassBlock(Block):
    def forward(self, inputs: dict[str, Any]) -> State:  # type: ignore[override]  # another input
        return State(super().forward(inputs["hidden"]), {"more": inputs["more"][0]}, 3)


class NamedTupleBlock(Block):
    def forward(self, state: State) -> Pair:  # type: ignore[override]  # another input
        hidden = super().forward(state.hidden + state.extra["more"])
        return Pair(hidden, Typed(hidden.sin(), [hidden.cos()]))


class ContainerStack(nn.Module):
    """Dataclasses, dicts, lists, and named tuples in and out of blocks and root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DictBlock(), DataclassBlock(), NamedTupleBlock()])
        self.out = nn.Linear(WIDTH, NARROW)

    def forward(self, x: Tensor) -> State:
        pair = self.blocks[2](self.blocks[1](self.blocks[0](State(x, {}))))
        assert isinstance(pair, Pair)
        assert isinstance(pair.right, Typed)
        return State(self.out(pair.left), {"nested": pair.right.nested, "value": pair.right.value})


class KwargsBlock(Block):
    def forward(self, *, x: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask) * options["scale"] + options["shift"]


class KwargsStack(Stack):
    def __init__(self) -> None:
        super().__init__(KwargsBlock)

    def forward(self, x: Tensor, *, mask: Tensor, options: dict[str, Any]) -> Tensor:  # type: ignore[override]
        x = self.inp(x)
        for block in self.blocks:
            x = block(x=x, mask=mask, options=options)
        return self.out(x)


def keywords(rows: int) -> Batch:
    mask = (torch.rand(rows, WIDTH) > 0.2).float()
    return Batch((), {"x": torch.randn(rows, WIDTH), "mask": mask, "options": {
        "scale": 0.5, "shift": torch.randn(rows, WIDTH)}})  # fmt: skip


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


def nested_units(model: nn.Module) -> Sequence[nn.Module]:
    """Return units inside units, innermost first."""
    return [m for block in model.blocks for m in (block.first, block)]  # type: ignore[union-attr]  # a ModuleList


def one_group(model: nn.Module) -> Sequence[nn.Module | list[nn.Module]]:
    """Return the first two blocks as one group and the last one alone."""
    first, second, third = model.blocks  # type: ignore[misc]  # a ModuleList
    return [[first, second], third]


class UnusedParts(Stack):
    """A block that never runs and parameters that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.blocks[1].spare = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[1](self.blocks[0](self.inp(x))))


class SequentialWithForward(nn.Sequential):
    """A container that has a forward."""


def sequential() -> nn.Module:
    return SequentialWithForward(
        Block(), nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, NARROW)
    )


def parts_with_parameters(model: nn.Module) -> Sequence[nn.Module]:
    return [m for m in model.children() if any(True for _ in m.parameters())]


class EveryKind(TinyLM):
    """Blocks of several kinds side by side, the first of them called twice, and a tied head."""

    def __init__(self) -> None:
        super().__init__(True)
        kinds = (Scalars, NonContiguous, FewRows, PartlyFrozen, OneRow, TiedWithin)
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.blocks.append(self.blocks[0])

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.embed(ids) + self.position).flatten(0, 1)  # for a convolution
        for block in self.blocks:
            x = block(x)
        return self.head(x)


EVERY_KIND = Case(
    EveryKind,
    lambda m: [*dict.fromkeys(blocks_and_head(m))],
    tokens,
)
"""For one graph in the place of many. Dtypes are left out: the coarsest is the tolerance of all."""


CASES: dict[str, Case] = {
    "stack": Case(stack(), each_block, floats),
    "root_only": Case(stack(), no_units, floats),
    "one_row": Case(stack(OneRow), each_block, floats),
    "few_rows": Case(stack(FewRows), each_block, floats),
    "scalars": Case(stack(Scalars), each_block, floats, in_torch=False),
    "non_contiguous": Case(stack(NonContiguous), each_block, floats, in_torch=False),
    "mixed_dtypes": Case(stack(MixedDtypes), each_block, floats, in_torch=False),
    "partly_frozen": Case(stack(PartlyFrozen), each_block, floats),
    "all_frozen_blocks": Case(stack(AllFrozen), each_block, floats),
    "quantised": Case(stack(Quantised), each_block, floats, in_torch=TORCH_2_13),
    "tied_within": Case(stack(TiedWithin), each_block, floats),
    "tied_lm": Case(lambda: TinyLM(True), blocks_and_head, tokens, in_torch=False),
    "untied_lm": Case(lambda: TinyLM(False), blocks_and_head, tokens),
    "tied_blocks": Case(tied_blocks, each_block, floats, in_torch=False),
    "shared_block": Case(shared_block, lambda m: list(m.blocks)[:2], floats),  # type: ignore[arg-type, attr-defined]
    "aux_output": Case(AuxStack, each_block, floats),
    "containers": Case(ContainerStack, each_block, floats, in_torch=TORCH_2_13),
    "kwargs": Case(KwargsStack, each_block, keywords),
    "nested_units": Case(stack(Inner, 2), nested_units, floats),
    "one_group": Case(stack(), one_group, floats),
    "unused_parts": Case(UnusedParts, each_block, floats),
    "sequential": Case(sequential, parts_with_parameters, floats),
}
