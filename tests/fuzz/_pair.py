"""A rank's two models, the sharded one and the plain one, and what must hold between them.

Runs on a rank. `_ops` does things to a `Pair`; after each of them `check` compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests._local_sgd import LocalSGD
from tests._meshes import random_numbers
from tests._parity import assert_same, names_of
from tests.fuzz._layers import Net, build
from tests.fuzz._program import Call, Op, Program
from tests.fuzz._sharding import shard

LR = 0.05


class MismatchError(AssertionError):
    """The sharded model is not as the plain one."""


class Pair:
    """The sharded model, and an unsharded one that does what all ranks do."""

    def __init__(self, program: Program) -> None:
        self.program, self.setup = program, program.setup
        self.count = self.setup.data_ranks
        self.index = dist.get_rank() // self.setup.tensor
        self.model = build(program.model, program.seed)
        self.reference = build(program.model, program.seed)
        shard(self.model, self.setup)
        self.meshes = {p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor)}
        self.random = random_numbers(program.seed)
        singles = any(b.kind == "single" for b in program.model.layers())
        self.rtol = 2e-4 if singles or self.setup.precision != "same" else 1e-9
        self.scale = 1.0  # of the sharded model's gradients over the mean
        self.zeros_if_unused = False
        self.is_unsynced = False  # gradients that are not reduced yet
        self.is_whole = False  # by the user's hand, or inside a step
        self.holds_whole = False  # the optimizer was made then
        self.hooks: list[Any] = []
        self.make_optimizers()

    def is_shard(self, param: Tensor) -> bool:
        """False for a whole parameter, and for one on a smaller mesh, between its passes."""
        return isinstance(param, DTensor) and param.device_mesh in self.meshes

    # Optimizers.

    def make_optimizers(self) -> None:
        """Make both optimizers of what `parameters()` are now."""
        self.holds_whole = any(not self.is_shard(p) for p in self.model.parameters())
        self.optimizer = self._make(self.model)
        self.reference_optimizer = self._make(self.reference)

    def _make(self, model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        is_ours = model is self.model
        kind = self.setup.optimizer
        if kind == "torch":
            return torch.optim.SGD(params, lr=LR, momentum=0.9)
        if kind == "sgd":
            return LocalSGD(params, lr=LR, momentum=0.9)
        options = {"lr": LR / 5, "eps": 1e-2, "weight_decay": 0.1}
        if kind == "fused":
            options["fused"] = True
        if is_ours:
            return fsdp2.optim.local(torch.optim.AdamW, params, **options)
        return torch.optim.AdamW(params, **options)

    @property
    def has_named_state(self) -> bool:
        """True if `fsdp2.checkpoint` knows the optimizer's state."""
        return self.setup.optimizer != "sgd"

    def zero(self, how: str = "optimizer") -> None:
        """Clear the gradients of both."""
        if self.holds_whole:
            how = "model"  # the optimizer has others
        if how == "zeros":
            for optimizer in (self.optimizer, self.reference_optimizer):
                optimizer.zero_grad(set_to_none=False)
            return
        if how == "model":
            self.model.zero_grad()
            for tree in self.model.trees:
                tree.zero_grad()
            self.is_unsynced = False
        else:
            self.optimizer.zero_grad()
        self.reference.zero_grad()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.reshard()
        self.is_whole = False

    def unhook(self) -> None:
        """Remove the hooks of parameters: copies and new parameters have none."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    # Forwards.

    def batch(self, call: Call) -> list[Tensor]:
        """Return the inputs of all data-parallel ranks, the same on every rank."""
        width = self.program.model.width
        return [
            torch.randn(call.rows_of(r), width, dtype=torch.float64, generator=self.random)
            for r in range(self.count)
        ]

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Run a forward of both; return the local loss, and the global one of the reference."""
        parts = self.batch(call)
        loss = loss_of(self.model(parts[self.index], call.ways_of(self.index)))
        return loss, self.expected(parts, call, loss)

    def expected(self, parts: list[Tensor], call: Call, loss: Tensor) -> Tensor:
        losses = [loss_of(self.reference(x, call.ways_of(r))) for r, x in enumerate(parts)]
        self.same(loss, losses[self.index], "loss")
        return sum(losses, torch.zeros(())) * (self.scale / self.count)

    # Comparing.

    def same(self, actual: Tensor, expected: Tensor, what: str, least: float = 1.0) -> None:
        try:
            assert_same(actual, expected, what, self.rtol, least)
        except AssertionError as error:
            raise MismatchError(f"{what.partition(':')[0]} differs\n{error}") from None

    def check(self, after: Op) -> None:
        """Compare what is registered, and gradients unless some are not reduced yet."""
        registered, expected = names_of(self.model), names_of(self.reference)
        if list(registered) != list(expected):
            raise MismatchError(f"names differ\n{list(registered)}\nnot {list(expected)}")
        if not self.is_whole:
            plain = [name for name, p in registered.items() if not isinstance(p, DTensor)]
            if plain:
                raise MismatchError(f"whole parameters between steps\n{plain}")
        found = shards_of(self.model)
        for name, param in expected.items():
            if registered[name].requires_grad is not param.requires_grad:
                raise MismatchError(
                    f"requires_grad differs\n{name}: {registered[name].requires_grad}"
                )
            self.same(found[name], param, f"parameter: {name}")
        if not self.is_unsynced:
            self.check_gradients()

    def check_gradients(self) -> None:
        # Parameters may be whole; gradients are those of the shards that the optimizer holds.
        found, expected = shards_of(self.model), names_of(self.reference)
        if self.zeros_if_unused:
            self._fill_in_zeros(found, expected)
        missing = [n for n, p in found.items() if (p.grad is None) != (expected[n].grad is None)]
        if missing:
            raise MismatchError(f"gradients of only one model\n{missing}")
        largest = [p.grad.abs().max().item() for p in expected.values() if _has_elements(p.grad)]
        least = max(max(largest, default=0.0) / 5, 1e-3)
        for name, param in expected.items():
            if param.grad is not None:
                gradient = found[name].grad
                assert gradient is not None
                self.same(gradient, param.grad, f"gradient: {name}", least)

    def _fill_in_zeros(
        self, found: dict[str, nn.Parameter], expected: dict[str, nn.Parameter]
    ) -> None:
        for name, param in expected.items():
            if param.grad is None and found[name].grad is not None:
                param.grad = torch.zeros_like(param)

    def assert_whole(self, found: Iterator[tuple[str, Tensor]], what: str) -> None:
        expected = dict(self.reference.named_parameters())
        for name, tensor in found:
            if name in expected:
                if isinstance(tensor, DTensor):
                    raise MismatchError(f"{what} gives no whole parameters\n{name}")
                self.same(tensor, expected[name], f"{what}: {name}")


def _has_elements(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def shards_of(model: Net) -> dict[str, nn.Parameter]:
    """Return the sharded parameters under all their names, whatever is registered now."""
    sharded: dict[tuple[int, str], nn.Parameter] = {}
    for module in model.modules():
        unit = fsdp2.fully_shard.state(module)
        for group in () if unit is None else unit.own_groups:
            for param in group.params:
                for site in param.sites:
                    sharded[id(site.module), site.name] = param.sharded
    found = {}
    for name, param in names_of(model).items():
        owner, _, last = name.rpartition(".")
        found[name] = sharded.get((id(model.get_submodule(owner)), last), param)
    return found


def loss_of(output: Tensor) -> Tensor:
    """Return a scalar; a rank without rows has a loss of 0, with a graph."""
    output = output.double()
    return (output.square().sum() + 0.3 * output.sum()) / (2 * output.shape[-1])
