"""What the fuzzer draws: a model, how it is sharded, and a program, as plain data.

Everything here is frozen, compares by value, pickles, and prints as the Python that makes it, what
is at its default left out: a failure that was shrunk is a few lines for `scripts/fuzz --program`.
What the words mean when they run is in `_layers` (models) and `_ops` (programs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

KINDS = (
    "linear",  # Linear, or none of it, by a rank's choice
    "mlp",  # two Linears; split over a tensor-parallel axis, if there is one
    "norm",  # LayerNorm
    "scalars",  # 0-dim parameters
    "row",  # parameters of one row and of one element
    "few",  # fewer rows than ranks
    "transposed",  # a parameter that is not contiguous
    "branch",  # two Linears, of which a rank uses one
    "single",  # fp32 among fp64
    "buffer",  # a buffer beside a parameter
    "empty",  # no parameter
)
WAYS = (
    "skip",  # the parent does not call it
    "twice",  # the parent calls it on its own output
    "detach",  # it runs, and its output has no part in the loss
    "other",  # it runs on its second set of parameters, if it has one
    "around",  # it runs and uses none of its parameters
    "as_input",  # it returns its input itself
    "inplace",  # it updates its input in place
    "updates",  # it updates its input in place, and then computes as usual
    "updates_view",  # it updates a view of its input, and then computes as usual
    "updates_alias",  # it updates `x.view_as(x)`, and then computes as usual
    "implicit",  # a hook on its output differentiates another forward of it, in a loop
    "solved",  # an autograd function differentiates its forward, in a loop
    "fed",  # the parent gives it what needs no gradient
    "aside",  # it keeps a loss of its own, computed from its output by its parameters
    "clamps",  # it clamps its first parameter in forward
    "clamps_buffer",  # it clamps its buffer in forward
)
IN_PLACE = ("inplace", "updates", "updates_view", "updates_alias")
SOLVERS = ("implicit", "solved")
OPAQUE = ("object", "slots", "closure", "generator")  # what tensors may hide in


class Literal:
    """A dataclass whose repr leaves out defaults."""

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Block(Literal):
    """A layer: some parameters, then the layers inside it; its input is added to what they give."""

    kind: str = "linear"
    # "own": it is one; "none"; "body": the module with its parameters is; "conditional"; "next": it
    # is one together with its next sibling.
    unit: str = "own"
    hidden: int = 5
    checkpoint: str = "no"  # or "reentrant", "saved" (the other kind)
    hook: str = "no"  # or "pre", "post", "tensor", "full"
    box: str = "no"  # "dict": takes and returns one; "list": appends to one; or one of OPAQUE
    hides: str = "no"  # or one of OPAQUE: what its output is in
    frozen: bool = False  # its first parameter
    inner: tuple[Block, ...] = ()


@dataclass(frozen=True, repr=False)
class Model(Literal):
    """Layers one after the other, and a parameter of the root, which is always used and trained."""

    blocks: tuple[Block, ...] = (Block(),)
    width: int = 4
    gain: str = "first"  # or "last": then what the first unit is given needs no gradient
    tied: tuple[tuple[int, int], ...] = ()  # layers of the same kind that share a first parameter
    roots: int = 1  # 2: the second half of the layers has a root of its own
    hides: str = "no"  # or "attribute", or one of OPAQUE: what the output of a root is in

    @property
    def cut(self) -> int:
        """How many blocks the first root has."""
        return (len(self.blocks) + 1) // 2 if self.roots == 2 else len(self.blocks)

    def layers(self) -> tuple[Block, ...]:
        """Return all layers, each before those inside it: programs name them by their place."""
        return tuple(_walk(self.blocks))


def _walk(blocks: tuple[Block, ...]) -> Iterator[Block]:
    for block in blocks:
        yield block
        yield from _walk(block.inner)


@dataclass(frozen=True, repr=False)
class Setup(Literal):
    """The arguments of `fully_shard`, and how ranks lie."""

    ranks: int = 2
    replicas: int = 0  # 0: a mesh of one dim; else of two
    tensor: int = 1  # ranks of a tensor-parallel axis, inside the others
    by_dims: bool = False  # say it by `dp_mesh_dims`
    reshard: bool | int | None = None
    place: str = "rows"  # or "columns", "whole", "mixed"
    precision: str = "same"  # or "single" (compute in fp32), "reduce" (and reduce in fp64), "half"
    offload: bool = False
    part_nbytes: int = 1 << 20  # from which submodules of a root are groups of their own
    optimizer: str = "sgd"  # or "adamw", "fused", "torch"

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.tensor


@dataclass(frozen=True, repr=False)
class Call(Literal):
    """One forward; `ways` are (rank, layer, way), -1 for all ranks."""

    rows: int = 2
    ways: tuple[tuple[int, int, str], ...] = ()
    empty: int = -1  # a rank whose batch has no rows

    def ways_of(self, rank: int) -> dict[int, str]:
        return {layer: way for who, layer, way in self.ways if who in (-1, rank)}

    def rows_of(self, rank: int) -> int:
        return 0 if rank == self.empty else self.rows


class Op(Literal):
    """One thing that a program does."""


@dataclass(frozen=True, repr=False)
class Backward(Op):
    """Forwards, and their backwards.

    `how`: "sum" of the losses, "each" on its own, "reversed", "retain" (each one twice), or
    "penalty" (the sum of losses and of the squares of their gradients).
    `sync`: "yes", "no", or "shard" (not over replicas). `root`: the one that runs; -1: all.
    """

    calls: tuple[Call, ...] = (Call(),)
    how: str = "sum"
    sync: str = "yes"
    between: tuple[Op, ...] = ()  # done after the forwards
    root: int = -1


@dataclass(frozen=True, repr=False)
class Forward(Op):
    """A forward with gradients on, whose graph is dropped."""

    call: Call = field(default=Call())  # frozen
    root: int = -1


@dataclass(frozen=True, repr=False)
class Update(Op):
    """A step of the optimizer, and its gradients cleared: "none", "zeros", "model" or "keep"."""

    zero: str = "none"


@dataclass(frozen=True, repr=False)
class Zero(Op):
    """Clear gradients by the model."""

    to_none: bool = True


@dataclass(frozen=True, repr=False)
class Fail(Op):
    """A step that raises on all ranks: "before", "after" a layer's forward, in its "backward", or
    in its "recompute"; gradients are cleared by the "optimizer", the "model", or a "new" optimizer,
    or after "reset" (`reset_iter_state`).
    """

    layer: int = 0
    phase: str = "before"
    then: str = "optimizer"
    call: Call = field(default=Call())  # frozen


@dataclass(frozen=True, repr=False)
class Evaluate(Op):
    mode: str = "no_grad"  # or "inference"
    call: Call = field(default=Call())  # frozen


@dataclass(frozen=True, repr=False)
class Freeze(Op):
    """Set `requires_grad` of a parameter, by its place."""

    param: int = 0
    trainable: bool = False


@dataclass(frozen=True, repr=False)
class Copy(Op):
    how: str = "deepcopy"  # or "pickle"


@dataclass(frozen=True, repr=False)
class State(Op):
    """Take the state, change model and optimizer, and load it.

    `how`: "torch" (`state_dict`), "assign", "full", "each" (full, on every rank), "sharded",
    "local".
    """

    how: str = "torch"
    optimizer: bool = True


@dataclass(frozen=True, repr=False)
class Unshard(Op):
    layer: int = -1  # -1: the root
    asynchronous: bool = False


@dataclass(frozen=True, repr=False)
class Reshard(Op):
    layer: int = -1


@dataclass(frozen=True, repr=False)
class Whole(Op):
    """Look at whole parameters: "summon" or "full_params"; write something, inside summon."""

    how: str = "summon"
    write: bool = False


@dataclass(frozen=True, repr=False)
class NewOptimizer(Op):
    """Make the optimizer anew from what `parameters()` are now."""


@dataclass(frozen=True, repr=False)
class Set(Op):
    """Change a setting of the whole tree, or below a layer."""

    name: str = "reshard_after_forward"
    value: Any = True
    layer: int = -1


@dataclass(frozen=True, repr=False)
class Replace(Op):
    """Change a parameter: "copy" (in place), "local", "new" (a plain `nn.Parameter`)."""

    param: int = 0
    how: str = "copy"


@dataclass(frozen=True, repr=False)
class Write(Op):
    """Halve all parameters as programs do that count no version: see `_ops.WRITE`."""

    how: str = "data"


@dataclass(frozen=True, repr=False)
class Clip(Op):
    max_norm: float = 0.1


@dataclass(frozen=True, repr=False)
class Functional(Op):
    """`functional_call`: "own" values, "half" of them with gradients onto them, or "grad"
    (`torch.func.grad` over whole values).
    """

    how: str = "half"


@dataclass(frozen=True, repr=False)
class Compiled(Op):
    """A forward and backward by `fsdp2.compile`, whose graph runs as it stands."""

    call: Call = field(default=Call())


@dataclass(frozen=True, repr=False)
class Hook(Op):
    """Register a hook that doubles a parameter's gradient; again: remove those that are there."""

    param: int = 0


@dataclass(frozen=True, repr=False)
class Diverge(Op):
    """One rank goes another way: (rank, layer, way), or it raises alone before that layer ("fail").
    All ranks get a `StateError`, or none. The last op of a program.
    """

    rank: int = 0
    layer: int = 0
    way: str = "skip"


@dataclass(frozen=True, repr=False)
class Program(Literal):
    ops: tuple[Op, ...] = ()
    model: Model = field(default=Model())  # frozen
    setup: Setup = field(default=Setup())  # frozen
    seed: int = 0

    def __str__(self) -> str:
        """Return the Python of this program, an op a line."""
        ops = "".join(f"\n        {op!r}," for op in self.ops)
        rest = "".join(
            f"\n    {f.name}={getattr(self, f.name)!r},"
            for f in fields(self)
            if f.name != "ops" and getattr(self, f.name) != f.default
        )
        return f"Program(\n    ops=({ops}\n    ),{rest}\n)"

    @property
    def leaves_world(self) -> bool:
        """True if the ranks' process groups are of no use afterwards."""
        return any(isinstance(op, Diverge) for op in self.ops)


def parse(text: str) -> Program:
    """Return the program that a text makes: what `str` of one gave."""
    classes = (Block, Model, Setup, Call, Program, *Op.__subclasses__())
    names = {cls.__name__: cls for cls in classes}
    program = eval(text, {"__builtins__": {}}, names)
    assert isinstance(program, Program), f"this is no program: {text}"
    return replace(program)
