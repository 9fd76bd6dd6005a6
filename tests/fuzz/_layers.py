"""The modules of a drawn model.

A rank's choices come with each call, as a dict from layers to ways, so that the unsharded model can
do what every rank did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz._bodies import BODIES, DTYPE
from tests.fuzz._program import Block, Model

Ways = Mapping[int, str]


class Layer(nn.Module):
    def __init__(self, block: Block, width: int, places: Iterator[int]) -> None:
        super().__init__()
        self.block, self.place = block, next(places)
        self.body = BODIES[block.kind](width, block.hidden)
        self.inner = nn.ModuleList(Layer(inner, width, places) for inner in block.inner)
        first = next(self.body.parameters(), None)
        if block.frozen and first is not None:
            first.requires_grad_(False)
        hook_up(self, block.hook)

    def forward(self, given: Any, ways: Ways) -> Any:
        x = given["x"] if self.block.boxed else given
        way = ways.get(self.place, "")
        if way == "as_input":
            return given
        if way == "around":
            y = x * 1
        elif way == "inplace":
            x.mul_(0.5)
            y = x
        else:
            # An output dtype may differ from that of the parameters of the unit around.
            dtype = next((p.dtype for p in self.body.parameters()), x.dtype)
            y = torch.tanh(self.body(x.to(dtype), way == "other"))
        for layer in self.inner:
            y = run(layer, y, ways)
        y = y if way == "inplace" else x + y
        return {"y": y, "more": [y.detach()]} if self.block.boxed else y


def run(layer: nn.Module, x: Tensor, ways: Ways) -> Tensor:
    """Call a layer, as its parent does."""
    assert isinstance(layer, Layer)
    way = ways.get(layer.place, "")
    if way == "skip":
        return x
    y = x.clone() if way == "inplace" else x
    for _ in range(2 if way == "twice" else 1):
        given: Any = {"x": y} if layer.block.boxed else y
        if layer.block.checkpoint == "no":
            found = layer(given, ways)
        else:
            found = checkpoint(
                layer, given, ways, use_reentrant=layer.block.checkpoint == "reentrant"
            )
        y = found["y"] if isinstance(found, dict) and "y" in found else given_of(found)
    return x + 0 * y.detach() if way == "detach" else y


def given_of(found: Any) -> Tensor:
    return found["x"] if isinstance(found, dict) else found


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
        every = self.layers()
        for one, two in model.tied:
            tie(every[one].body, every[two].body)

    def forward(self, x: Tensor, ways: Ways) -> Tensor:
        for tree in self.trees:
            x = tree(x, ways)
        return x

    def layers(self) -> list[Layer]:
        found = [module for module in self.modules() if isinstance(module, Layer)]
        return sorted(found, key=lambda layer: layer.place)


class Tree(nn.Module):
    def __init__(self, layers: list[Layer], model: Model) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(model.width, dtype=DTYPE))
        self.is_first = model.gain == "first"
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor, ways: Ways) -> Tensor:
        x = x * self.gain if self.is_first else x
        for layer in self.blocks:
            x = run(layer, x, ways)
        return x if self.is_first else x * self.gain


def tie(one: nn.Module, two: nn.Module) -> None:
    """Give `two` the first parameter of `one`, under the same name."""
    name = next(name for name, _ in one.named_parameters())
    owner, _, last = name.rpartition(".")
    setattr(two.get_submodule(owner), last, one.get_parameter(name))


def build(model: Model, seed: int) -> Net:
    """Build a model whose values depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(model)
