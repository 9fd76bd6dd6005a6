"""One process of `benchmarks.optim.optim`: step the optimizers of some libraries and count.

`python -m benchmarks.kit.optim_worker REQUEST`, where REQUEST is JSON; run under callgrind by its
parent, it closes one window a variant. Not meant to be called by hand.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.kit import callgrind, models, noop

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
LIBRARIES = ("plain", "torch", "fsdp2")


class Model(nn.Module):
    """`depth` blocks of nine parameters, a projection, a norm and a head: 147 for 16 blocks."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        size = models.Size(depth, width, hidden=width, vocabulary=width)
        self.width = width
        self.stack = models.Stack(size)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stack(x))


def make_label(library: str, mode: str) -> str:
    return f"{library}, {mode}"


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _, mesh = noop.start(request["world_size"])
    gc.disable()
    for library in request["libraries"]:
        for mode, kwargs in MODES.items():
            model = _build(library, request["depth"], request["width"], mesh)
            optimizer = _make_optimizer(library, model.parameters(), kwargs)
            for _ in range(request["warmup"]):
                _backward(model)
                optimizer.step()
            _backward(model)
            with callgrind.Counter().window(make_label(library, mode)):
                for _ in range(request["steps"]):
                    optimizer.step()


def _build(library: str, depth: int, width: int, mesh: DeviceMesh) -> nn.Module:
    """Build the model, sharded by torch or by us; plain: of local shapes, on plain tensors."""
    torch.manual_seed(0)
    model = Model(depth, width)
    if library == "fsdp2":
        from fsdp2 import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]  # alike
    for block in model.stack.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _make_optimizer(library: str, params: Iterable[Tensor], kwargs: dict[str, Any]) -> Any:
    if library == "fsdp2":
        import fsdp2

        return fsdp2.optim.local(torch.optim.AdamW, params, **kwargs)
    if library == "plain":
        return _OnLocals(params, kwargs)
    return torch.optim.AdamW(params, **kwargs)


class _OnLocals:
    """AdamW on plain tensors of the local shapes: a floor for whoever steps one by one."""

    def __init__(self, params: Iterable[Tensor], kwargs: dict[str, Any]) -> None:
        self._params = list(params)
        self._leaves = [p.to_local().detach() for p in self._params if isinstance(p, DTensor)]
        self._optimizer = torch.optim.AdamW(self._leaves, **kwargs)

    def step(self) -> None:
        if self._leaves[0].grad is None:
            for leaf in self._leaves:
                leaf.grad = torch.ones_like(leaf)
        self._optimizer.step()


def _backward(model: Model) -> None:
    model.zero_grad(set_to_none=True)
    model(torch.ones(4, model.width)).sum().backward()


if __name__ == "__main__":
    main()
