"""The modules of a drawn model.

A rank's choices come with each call, as a dict from layers to ways, so that the unsharded model can
do what every rank did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz._bodies import BODIES, DTYPE
from tests.fuzz._program import IN_PLACE, Block, Model

Ways = Mapping[int, str]
MOST = 0.2  # what a layer clamps to


class Layer(nn.Module):
    def __init__(self, block: Block, width: int, places: Iterator[int]) -> None:
        super().__init__()
        self.block, self.place = block, next(places)
        self.body = BODIES[block.kind](width, block.hidden)
        self.inner = nn.ModuleList(Layer(inner, width, places) for inner in block.inner)
        self.aside: Tensor | None = None  # a loss of its own, of the last forward
        self.dtype: torch.dtype | None = None  # what it computes in; None: its parameters tell
        first = next(self.body.parameters(), None)
        if block.frozen and first is not None:
            first.requires_grad_(False)
        hook_up(self, block.hook)

    def forward(self, given: Any, ways: Ways) -> Any:
        way = ways.get(self.place, "")
        if way == "as_input":
            return given
        x = taken_out(given)
        y = x.mul_(0.5) if way == "inplace" else self._body(x, way)
        for layer in self.inner:
            y = run(layer, y, ways)
        y = y if way == "inplace" else x + y
        if way == "aside":
            self.aside = self._body(y, "").square().sum() / y.shape[-1]
        if self.block.box == "dict":
            return {"y": y, "more": [y.detach()]}
        if self.block.box == "list":
            given.append(y)
        return put_in(y, self.block.hides)

    def _body(self, x: Tensor, way: str) -> Tensor:
        """Compute, after what a way does first."""
        first = next(self.body.parameters(), None)
        if way == "around":
            return x * 1
        if way == "updates":
            x.mul_(0.5)
        elif way == "updates_view":
            x.view(-1).mul_(0.5)
        elif way == "updates_alias":
            x.view_as(x).mul_(0.5)
        elif way == "clamps" and first is not None:
            clamp(first)
        elif way == "clamps_buffer":
            clamp(self.body.get_buffer("offset"))
        # An output dtype may differ from that of the parameters of the unit around.
        dtype = x.dtype if first is None else self.dtype or first.dtype
        return torch.tanh(self.body(x.to(dtype), way == "other"))


@torch.no_grad()
def clamp(tensor: Tensor) -> None:
    """Write only if that changes something: the plain model runs for one rank after the other."""
    if (tensor.abs() > MOST).any():
        tensor.clamp_(-MOST, MOST)


def run(layer: nn.Module, x: Tensor, ways: Ways) -> Tensor:
    """Call a layer, as its parent does."""
    assert isinstance(layer, Layer)
    way = ways.get(layer.place, "")
    if way == "skip":
        return x
    y = x.clone() if way in IN_PLACE else x
    if way == "implicit":
        return implicit(lambda z: run_once(layer, z, ways), y)
    if way == "solved":
        return Solved.apply(y, lambda z: run_once(layer, z, ways))  # type: ignore[no-any-return]  # untyped
    if way == "fed":
        return x + run_once(layer, y.detach(), ways)
    for _ in range(2 if way == "twice" else 1):
        y = run_once(layer, y, ways)
    return x + 0 * y.detach() if way == "detach" else y


def run_once(layer: Layer, x: Tensor, ways: Ways) -> Tensor:
    given = put_in(x, layer.block.box)
    if layer.block.checkpoint == "no":
        found = layer(given, ways)
    else:
        found = checkpoint(layer, given, ways, use_reentrant=layer.block.checkpoint == "reentrant")
    if layer.block.box == "list":
        return given[-1]  # type: ignore[no-any-return]  # of a list of tensors
    return taken_out(found)


# --- what solvers do ------------------------------------------------------------------------------

TIMES = 2  # that one forward is differentiated, before its last


def implicit(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute `function(x)`, and let its gradient be solved for, as implicit layers do."""
    found = function(x)
    if not found.requires_grad:
        return found
    start = found.detach().requires_grad_()
    again = function(start)

    def solve(gradient: Tensor) -> Tensor:
        solved = gradient
        for _ in range(TIMES):
            (back,) = torch.autograd.grad(again, start, solved, retain_graph=True)
            solved = gradient + 0.5 * back
        return solved

    found.register_hook(solve)
    return found


class Solved(torch.autograd.Function):
    """The same in an autograd function, whose backward accumulates gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            ctx.start = x.detach().requires_grad_()
            ctx.found = function(ctx.start)
        return ctx.found.detach()  # type: ignore[no-any-return]  # of a context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one output
        solved = gradient
        for _ in range(TIMES):
            (back,) = torch.autograd.grad(ctx.found, ctx.start, solved, retain_graph=True)
            solved = gradient + 0.5 * back
        ctx.start.grad = None
        torch.autograd.backward(ctx.found, solved, retain_graph=True)
        return ctx.start.grad, None


# --- what tensors are passed in -------------------------------------------------------------------


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


PUT_IN: dict[str, Callable[[Tensor], Any]] = {
    "no": lambda x: x,
    "dict": lambda x: {"x": x},
    "list": lambda x: [x],
    "object": Box,
    "slots": Slots,
    "closure": lambda x: lambda: x,
    "generator": lambda x: (each for each in [x]),
}


def put_in(x: Tensor, kind: str) -> Any:
    return PUT_IN[kind](x)


def taken_out(found: Any) -> Tensor:
    """Return the tensor in what `put_in` gave, or in what a layer returns."""
    if isinstance(found, dict):
        return found["y"] if "y" in found else found["x"]  # type: ignore[no-any-return]  # of a dict
    if isinstance(found, list):
        return found[0]  # type: ignore[no-any-return]  # of a list
    if isinstance(found, Box | Slots):
        return found.x
    if isinstance(found, Tensor):
        return found
    return found() if callable(found) else next(found)  # type: ignore[no-any-return]  # opaque


def hook_up(layer: Layer, kind: str) -> None:
    """Register a hook as users do; it sees tensors, or dicts of them."""

    def change(value: Any, how: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, dict):
            return {k: how(v) if isinstance(v, Tensor) else v for k, v in value.items()}
        return how(value)

    def double(output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)
        return output

    if kind == "pre":
        layer.register_forward_pre_hook(
            lambda m, args: (change(args[0], lambda t: t * 1.5), *args[1:])
        )
    elif kind == "post":
        layer.register_forward_hook(lambda m, a, output: change(output, lambda t: t.sin() + 1))
    elif kind == "tensor":
        layer.register_forward_hook(lambda m, a, output: change(output, double))
    elif kind == "full":
        layer.register_full_backward_hook(lambda m, gin, gout: None)


class Net(nn.Module):
    """Layers one after the other; `trees` are the modules that are given to `fully_shard` last."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        places = iter(range(10**6))
        layers = [Layer(block, model.width, places) for block in model.blocks]
        parts = [part for part in (layers[: model.cut], layers[model.cut :]) if part]
        self.trees = nn.ModuleList(Tree(part, model) for part in parts)
        found = [module for module in self.modules() if isinstance(module, Layer)]
        self._layers = tuple(sorted(found, key=lambda layer: layer.place))
        every = self._layers
        for one, two in model.tied:
            tie(every[one].body, every[two].body)

    def forward(self, x: Tensor, ways: Ways, root: int = -1) -> Tensor:
        """Run all trees, or one."""
        for tree in self.trees if root < 0 else self.trees[root : root + 1]:
            assert isinstance(tree, Tree)
            x = tree.result_of(x, ways)
        return x

    def take_asides(self) -> list[Tensor]:
        """Return the losses that layers kept; they have none afterwards."""
        found = [layer.aside for layer in self.layers() if layer.aside is not None]
        for layer in self.layers():
            layer.aside = None
        return found

    def layers(self) -> tuple[Layer, ...]:
        """Return all layers, as the model's description counts them."""
        return self._layers


class Tree(nn.Module):
    def __init__(self, layers: list[Layer], model: Model) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(model.width, dtype=DTYPE))
        self.is_first = model.gain == "first"
        self.hides = model.hides
        self.result: Tensor | None = None
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor, ways: Ways) -> Any:
        x = x * self.gain if self.is_first else x
        for layer in self.blocks:
            x = run(layer, x, ways)
        x = x if self.is_first else x * self.gain
        if self.hides == "attribute":
            self.result = x
            return None
        return put_in(x, self.hides)

    def result_of(self, x: Tensor, ways: Ways) -> Tensor:
        found = self(x, ways)
        if self.hides != "attribute":
            return taken_out(found)
        found, self.result = self.result, None
        assert found is not None
        return found


def tie(one: nn.Module, two: nn.Module) -> None:
    """Give `two` the first parameter of `one`, under the same name."""
    name = next(name for name, _ in one.named_parameters())
    owner, _, last = name.rpartition(".")
    setattr(two.get_submodule(owner), last, one.get_parameter(name))


_building = threading.Lock()  # ranks that are threads share one generator


def build(model: Model, seed: int) -> Net:
    """Build a model whose values depend on the seed alone."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(model)
