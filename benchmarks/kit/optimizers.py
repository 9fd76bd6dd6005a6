"""Optimizers of torch and of other libraries, and what each does to a sharded model.

Owns the list of optimizers (`ROWS`), the models and batches, and the comparison: five steps of a
sharded model and of the whole one on the global batch. Knows nothing of tables.

Legend: a `Row` is an optimizer with its options; a `Way` is how it steps sharded parameters.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import fsdp2

STEPS = 5
ROWS_OF_BATCH = 12  # a global batch: 1, 2, 3 and 4 ranks divide it
WIDTH = 13


# --- models ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that no small number of ranks divides; of the one row all ranks but one hold nothing"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 29)
        self.mid = nn.Linear(29, WIDTH)
        self.out = nn.Linear(WIDTH, 7)
        self.row = nn.Parameter(torch.randn(1, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(nn.functional.gelu(self.up(x))) + self.row))


class Even(nn.Sequential):
    """Sizes that two and three ranks divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 24, bias=False), nn.Tanh(), nn.Linear(24, 12))


class Wide(nn.Sequential):
    """Parameters of more than 4096 elements a rank: where 8-bit optimizers begin to quantise."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 7))


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x[:, :4].abs() * 10).long() % 29)


# --- optimizers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An optimizer class and its options.

    `exact` names the class of the same library that this one is a quantised form of; `in_bf16`
    says that the class itself computes in bf16, whatever the parameters are. `within` is how far a
    sharded model may be from the whole one, of the way that the whole one went in the largest of
    its elements. One that `needs_owners` looks at whole matrices: steps on shards, which differ
    from rank to rank in what they raise, are not tried.
    """

    package: str
    cls: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    dtype: torch.dtype = torch.float64
    within: float = 1e-12
    model: Callable[[], nn.Module] = Odd
    matrices_only: bool = False
    with_closure: bool = False
    exact: str = ""
    in_bf16: bool = False
    needs_owners: bool = False

    @property
    def label(self) -> str:
        name = f"{self.package.split('.')[0]} {self.cls}"
        return name + (f", {self.note}" if self.note else "")

    def find(self) -> type[Optimizer] | None:
        """Return the class, or None where its package is not installed."""
        return _find(self.package, self.cls)

    def train_exactly(self) -> dict[str, Tensor]:
        """Return the whole parameters after the same steps without the row's own rounding."""
        if self.in_bf16:
            with Bf16AsDouble():
                return train(self, WHOLE)
        exact = Row(self.package, self.exact, {"lr": 0.01}, dtype=self.dtype, model=self.model)
        return train(exact, WHOLE)


def _find(package: str, name: str) -> type[Optimizer] | None:
    if importlib.util.find_spec(package.split(".")[0]) is None:
        return None
    found: type[Optimizer] = getattr(importlib.import_module(package), name)
    return found


def _of_torch() -> Iterator[Row]:
    classes: dict[str, dict[str, Any]] = {
        "Adadelta": {"weight_decay": 0.1},
        "Adagrad": {"lr": 0.05},
        "Adam": {"lr": 0.01},
        "AdamW": {"lr": 0.01},
        "Adamax": {"lr": 0.01},
        "ASGD": {"lr": 0.1, "t0": 2.0},
        "NAdam": {"lr": 0.01},
        "RAdam": {"lr": 0.01},
        "RMSprop": {"momentum": 0.9},
        "Rprop": {},
        "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    }
    for name, options in classes.items():
        yield Row("torch.optim", name, options)
        yield Row("torch.optim", name, {**options, "foreach": True}, "foreach")
        if name in ("Adam", "AdamW", "Adagrad", "SGD"):
            yield Row("torch.optim", name, {**options, "fused": True}, "fused")
    yield Row("torch.optim", "SGD", {"lr": 0.1}, "without momentum")
    yield Row("torch.optim", "Adam", {"lr": 0.01, "amsgrad": True}, "amsgrad")
    yield Row("torch.optim", "AdamW", {"lr": torch.tensor(0.01)}, "a tensor as lr")
    yield Row("torch.optim", "AdamW", {"capturable": True}, "capturable")
    for model in (Odd, Even):
        note = model.__name__.lower() + " sizes"
        yield Row("torch.optim", "Adafactor", {"lr": 0.05}, note, model=model)
        muon = {"matrices_only": True, "in_bf16": True}
        yield Row("torch.optim", "Muon", {"lr": 0.02}, note, model=model, **muon)
        line = {"line_search_fn": "strong_wolfe", "max_iter": 3}
        for options, name in (({"lr": 0.1, "max_iter": 3}, ""), (line, ", line search")):
            yield Row("torch.optim", "LBFGS", options, note + name, model=model, with_closure=True)
    yield Row("torch.optim", "SparseAdam", {"lr": 0.01}, model=Sparse)


def _of_schedulefree() -> Iterator[Row]:
    for base in ("AdamW", "SGD", "RAdam"):
        yield Row("schedulefree", f"{base}ScheduleFree", {"lr": 0.05})
        yield Row("schedulefree", f"{base}ScheduleFree", {"lr": 0.05, "foreach": False}, "loop")
        closure = f"{base}ScheduleFreeClosure"
        yield Row("schedulefree", closure, {"lr": 0.05}, with_closure=True)


def _of_bitsandbytes() -> Iterator[Row]:
    exact = {"dtype": torch.float32, "within": 1e-4}
    for name in ("Adam", "AdamW", "Lion", "AdEMAMix", "PagedAdamW"):
        yield Row("bitsandbytes.optim", name, {"lr": 0.01}, **exact)
    for name in ("SGD", "RMSprop", "Adagrad"):
        options = {"lr": 0.01, "momentum": 0.9} if name == "SGD" else {"lr": 0.01}
        yield Row("bitsandbytes.optim", name, options, **exact)
    for name in ("Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW8bit", "PagedLion8bit"):
        like = name.removeprefix("Paged").removesuffix("8bit")
        yield Row(
            "bitsandbytes.optim",
            name,
            {"lr": 0.01},
            dtype=torch.float32,
            model=Wide,
            exact=like,
        )


def _of_torchao() -> Iterator[Row]:
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        yield Row(
            "torchao.optim", name, {"lr": 0.01}, dtype=torch.float32, model=Wide, exact="_AdamW"
        )
    offload = {"optimizer_class": torch.optim.AdamW, "lr": 0.01}
    yield Row("torchao.optim", "CPUOffloadOptimizer", offload, dtype=torch.float32)


def _of_whole_matrices() -> Iterator[Row]:
    """Yield optimizers that need all of a matrix, and some that do not, of two libraries."""
    # SOAP's eigenvectors of zero follow the last bit of a gradient: a test compares from equal ones
    for name in ("Shampoo", "ScalableShampoo", "Lamb", "CAME", "StableAdamW", "AdEMAMix"):
        within = 1e-10 if "Shampoo" in name else 1e-12  # inverse roots of nearly singular sums
        yield Row("pytorch_optimizer", name, {"lr": 0.01}, within=within, needs_owners=True)
    for name in ("AdamW", "LaProp"):
        yield Row(
            "heavyball", name, {"lr": 0.01}, dtype=torch.float32, within=1e-3, needs_owners=True
        )


ROWS: tuple[Row, ...] = (
    *_of_torch(),
    *_of_schedulefree(),
    *_of_bitsandbytes(),
    *_of_torchao(),
    *_of_whole_matrices(),
)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How an optimizer steps a sharded model; no library: the whole model, on the global batch."""

    name: str
    library: ModuleType | None
    is_local: bool = False
    is_whole: bool = False

    def make(self, row: Row, params: list[Tensor]) -> Any:
        cls, options = row.find(), copy.deepcopy(row.options)
        assert cls is not None
        if self.is_whole:
            return fsdp2.optim.whole(cls, params, **options)
        if not self.is_local:
            return cls(params, **options)
        vouched = not row.package.startswith("torch.")
        return fsdp2.optim.local(cls, params, elementwise=vouched, **options)


WHOLE = Way("whole", None)
WAYS = (
    Way("fsdp2", fsdp2),
    Way("fsdp2.optim.local", fsdp2, is_local=True),
    Way("fsdp2.optim.whole", fsdp2, is_whole=True),
    Way("torch", torch_fsdp),
)


@dataclass(frozen=True)
class Outcome:
    """How far a sharded model was from the whole one, or what was raised instead.

    `rounding` is how far the whole model was from one that stepped without the class's own rounding
    (the unquantised class; float64 where it computes in bf16).
    """

    difference: float = 0.0
    error: str = ""
    rounding: float = 0.0

    def is_right(self, row: Row) -> bool:
        """Say whether the sharded model learnt the same, up to twice the class's own rounding."""
        return not self.error and self.difference <= max(row.within, 2 * self.rounding)


def shard(model: nn.Module, library: ModuleType) -> nn.Module:
    """Make each direct child that has parameters a unit, and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in list(model.children())[:-1]:
        if list(child.parameters()):
            library.fully_shard(child, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    return model


def train(row: Row, way: Way) -> dict[str, Tensor]:
    """Return the whole parameters after a few steps."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if way.library else (0, 1)
    torch.manual_seed(0)
    model = row.model().to(row.dtype)
    if way.library is not None:
        shard(model, way.library)
    chosen = [p for p in model.parameters() if not row.matrices_only or p.dim() == 2]
    optimizer = way.make(row, chosen)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(STEPS):
        x = torch.randn(ROWS_OF_BATCH, WIDTH, dtype=row.dtype).chunk(size)[rank]

        def closure(x: Tensor = x) -> Tensor:
            """Return the loss of the global batch, which line searches compare."""
            optimizer.zero_grad()
            output = model(x)
            loss = output.square().mean() + 0.3 * output.mean()
            loss.backward()
            total = loss.detach().clone()
            if size > 1:
                dist.all_reduce(total)
            return total / size

        if row.with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {name: _whole(param) for name, param in model.named_parameters()}


def _whole(param: Tensor) -> Tensor:
    param = param.detach()
    return param.full_tensor() if isinstance(param, DTensor) else param.clone()


def compare(row: Row, ways: Sequence[Way] = WAYS) -> dict[str, Outcome]:
    """Train in every way; return outcomes by the way's name. Runs on every rank alike."""
    with _quiet():
        try:
            expected = train(row, WHOLE)
        except Exception as error:  # it does not even step plain parameters here
            return {way.name: Outcome(error=f"{_say(error)} (the whole model too)") for way in ways}
        torch.manual_seed(0)
        began = {name: p.detach() for name, p in row.model().to(row.dtype).named_parameters()}
        way_gone = _apart(expected, began)
        rounding = 0.0
        if row.exact or row.in_bf16:
            rounding = _apart(expected, row.train_exactly()) / way_gone
        outcomes = {}
        for way in ways:
            if row.needs_owners and not way.is_whole:
                outcomes[way.name] = Outcome(error="not tried: it needs whole matrices")
                continue
            try:
                found = train(row, way)
            except Exception as error:
                outcomes[way.name] = Outcome(error=_say(error))
            else:
                outcomes[way.name] = Outcome(_apart(found, expected) / way_gone, "", rounding)
    return outcomes


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in b)


def _say(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


class Bf16AsDouble(TorchFunctionMode):
    """Gives float64 to what asks for bf16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.bfloat16 or (
            func is Tensor.to and torch.bfloat16 in (*args[1:], *kwargs.values())
        ):
            return args[0].double().clone()
        return func(*args, **kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let steps run without compiling (torchao compiles each shape) and without remarks."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    torch.compiler.set_stance("force_eager")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.set_stance("default")
        logging.disable(level)
