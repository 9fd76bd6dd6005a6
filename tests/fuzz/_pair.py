"""A rank's two models, the sharded one and the plain one, and what must hold between them.

Runs on a rank. `_ops` does things to a `Pair`; after each of them `check` compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.fuzz._layers import Net, Ways, build
from tests.fuzz._program import Call, Op, Program, Update
from tests.fuzz._sharding import shard
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import random_numbers
from tests.kit.parity import assert_same, names_of, whole

LR = 0.05
LETS_GO_S = 2.0  # how long threads may hold a graph that nobody refers to
LEAST = 0.1  # from which size on gradients of inputs are compared by their own


class Losses(NamedTuple):
    local: Tensor  # of the sharded model
    expected: Tensor  # of all ranks together, of the plain model


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
        # What is not of the usual precision consists of rounded terms, which may cancel.
        self.least_gradient = 1e-3 if self.rtol < 1e-6 else 0.05
        self.gradient_rtol = self.rtol if self.rtol < 1e-6 else 1e-3
        if self.setup.precision == "half":  # a norm of a few elements multiplies the rounding
            self.rtol, self.gradient_rtol, self.least_gradient = 3e-2, 0.1, 0.5
        self.rounds = self.rtol > 1e-6
        self.largest = 0.0  # gradient since both had the same parameters; its noise is trained on
        self.scale = 1.0  # of the sharded model's gradients over the mean
        self.zeros_if_unused = False
        self.unsynced: set[int] = set()  # trees with gradients that are not reduced yet
        self.keeps_whole = False  # a unit was told to, at some time
        self.is_whole = False  # by the user's hand, or inside a step
        self.holds_whole = False  # the optimizer was made then
        self.hooks: list[Any] = []
        self.make_optimizers()

    def is_shard(self, param: Tensor) -> bool:
        """False for a whole parameter, and for one on a smaller mesh, between its passes."""
        return isinstance(param, DTensor) and param.device_mesh in self.meshes

    @property
    def is_unsynced(self) -> bool:
        return bool(self.unsynced)

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
        # Where gradients are rounded, one that should be 0 is noise. A small eps would train on it.
        eps = 1.0 if self.rounds else 1e-2
        options: dict[str, Any] = {"lr": LR / 5, "eps": eps, "weight_decay": 0.1}
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
            self.unsynced.clear()
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

    def run(self, x: Tensor, ways: Ways, root: int = -1) -> Tensor:
        """Run the sharded model, or one of its roots; return the local loss."""
        return loss_of(self.model, x, ways, root)

    def run_reference(self, x: Tensor, ways: Ways, root: int = -1) -> Tensor:
        """Run the plain model on a rank's part; in half precision as every unit computes then."""
        if self.setup.precision != "half":
            return loss_of(self.reference, x, ways, root)
        halves = {n: p.to(torch.bfloat16) for n, p in self.reference.named_parameters()}

        def call(*args: Any) -> Tensor:
            return functional_call(self.reference, halves, args)  # type: ignore[no-any-return]  # untyped

        return loss_of(self.reference, x.to(torch.bfloat16), ways, root, call)

    def forward(self, call: Call, root: int = -1) -> Losses:
        """Run a forward of both."""
        parts = self.batch(call)
        loss = self.run(parts[self.index], call.ways_of(self.index), root)
        return Losses(loss, self.expected(parts, call, loss, root))

    def expected(self, parts: list[Tensor], call: Call, loss: Tensor, root: int = -1) -> Tensor:
        """Return the global loss of the plain model."""
        losses = [self.run_reference(x, call.ways_of(r), root) for r, x in enumerate(parts)]
        self.same(loss, losses[self.index], "loss")
        return self.mean(losses)

    def penalized(self, call: Call, root: int = -1) -> Losses:
        """Run a forward of both, and add a penalty for the gradient of the input."""
        parts = [x.requires_grad_() for x in self.batch(call)]
        ways = call.ways_of(self.index)
        loss, gradient = with_penalty(
            parts[self.index], lambda x: self.run(x, ways, root), self.program.model.width
        )
        found = [
            with_penalty(
                x,
                lambda x, r=r: self.run_reference(x, call.ways_of(r), root),  # type: ignore[misc]  # a default
                self.program.model.width,
            )
            for r, x in enumerate(parts)
        ]
        self.same(gradient, found[self.index][1], "input gradient", LEAST)
        self.same(loss, found[self.index][0], "penalized loss")
        return Losses(loss, self.mean([total for total, _ in found]))

    def mean(self, losses: list[Tensor]) -> Tensor:
        return sum(losses, torch.zeros(())) * (self.scale / self.count)

    # Comparing.

    def same(
        self,
        actual: Tensor,
        expected: Tensor,
        what: str,
        least: float = 1.0,
        rtol: float | None = None,
    ) -> None:
        if bool(actual.isnan().all()) and bool(expected.isnan().all()):
            return  # both went out of the range of half precision
        try:
            assert_same(actual, expected, what, self.rtol if rtol is None else rtol, least)
        except AssertionError as error:
            raise MismatchError(f"{what.partition(':')[0]} differs\n{error}") from None

    def _plain_ones(self) -> list[str]:
        """Return parameters that are whole, once threads have let go of a graph that was dropped.

        A collective of torch's own, of tensor parallelism under checkpointing, holds the hooks of
        saved tensors, and by them the graph, until gloo's thread frees it: 8 runs of 300.
        """
        deadline = time.monotonic() + LETS_GO_S
        while True:
            plain = [n for n, p in names_of(self.model).items() if not isinstance(p, DTensor)]
            if not plain or time.monotonic() > deadline:
                return plain
            time.sleep(0.001)

    def check(self, after: Op) -> None:
        """Compare what is registered, and gradients unless some are not reduced yet."""
        registered, expected = names_of(self.model), names_of(self.reference)
        if list(registered) != list(expected):
            raise MismatchError(f"names differ\n{list(registered)}\nnot {list(expected)}")
        if not self.is_whole:
            plain = self._plain_ones()
            if plain:
                raise MismatchError(f"whole parameters between steps\n{plain}")
            registered = names_of(self.model)
        found = shards_of(self.model)
        least = 1.0
        if self.rounds:  # two steps with momentum
            least = max(least, 2 * LR * self.gradient_rtol / self.rtol * self.largest)
        for name, param in expected.items():
            if registered[name].requires_grad is not param.requires_grad:
                raise MismatchError(
                    f"requires_grad differs\n{name}: {registered[name].requires_grad}"
                )
            self.same(found[name], param, f"parameter: {name}", least)
        buffers = dict(self.model.named_buffers())
        for name, buffer in self.reference.named_buffers():
            self.same(buffers[name], buffer, f"buffer: {name}")
        self.check_gradients()
        if self.rounds and type(after) is Update:
            self.begin_alike(found)

    @torch.no_grad()
    def begin_alike(self, found: dict[str, nn.Parameter]) -> None:
        """Give the plain model the other's parameters: rounding would drive both apart."""
        for name, param in names_of(self.reference).items():
            param.copy_(whole(found[name]))
        self.largest = 0.0

    def reduced(self, found: dict[str, Any]) -> dict[str, Any]:
        """Leave out the trees whose gradients wait."""
        waiting = tuple(f"trees.{index}." for index in self.unsynced)
        return {name: param for name, param in found.items() if not name.startswith(waiting)}

    def lacks_gradients(self) -> bool:
        """True if the sharded model misses gradients that the plain one has."""
        found, expected = shards_of(self.model), self.reduced(names_of(self.reference))
        return any(found[n].grad is None for n, p in expected.items() if p.grad is not None)

    def check_gradients(self) -> None:
        # Parameters may be whole; gradients are those of the shards that the optimizer holds.
        found = self.reduced(shards_of(self.model))
        expected = self.reduced(names_of(self.reference))
        if self.zeros_if_unused:
            self._fill_in_zeros(found, expected)
        missing = [n for n, p in found.items() if (p.grad is None) != (expected[n].grad is None)]
        if missing:
            raise MismatchError(f"gradients of only one model\n{missing}")
        largest = [p.grad.abs().max().item() for p in expected.values() if _has_elements(p.grad)]
        self.largest = max(self.largest, *largest, 0.0)
        least = max(max(largest, default=0.0) / 5, self.least_gradient)
        for name, param in expected.items():
            if param.grad is not None:
                gradient = found[name].grad
                assert gradient is not None
                self.same(gradient, param.grad, f"gradient: {name}", least, self.gradient_rtol)

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
    found: dict[str, nn.Parameter] = {}
    sharded: dict[tuple[nn.Module, str], nn.Parameter] = {}
    modules = list(model.named_modules())
    for _, module in modules:
        unit = unit_of(module)
        for group in () if unit is None else unit.own_groups:
            for param in group.params:
                for site in param.sites:
                    sharded[site.module, site.name] = param.sharded
    for prefix, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                full = f"{prefix}.{name}" if prefix else name
                found[full] = sharded.get((module, name), param)
    return found


def loss_of(
    model: Net,
    x: Tensor,
    ways: Ways,
    root: int = -1,
    call: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Run a model, or one of its roots; return a scalar.

    A rank without rows has a loss of 0, with a graph. `call` runs the model in another way.
    """
    model.take_asides()  # of a forward that raised
    output = (call or model)(x, ways, root).double()
    loss = (output.square().sum() + 0.3 * output.sum()) / (2 * output.shape[-1])
    return sum((0.1 * aside.double() for aside in model.take_asides()), loss)


def with_penalty(x: Tensor, run: Callable[[Tensor], Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Return a loss with a penalty for the gradient of the input, and that gradient."""
    loss = run(x * 1)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum() / width, gradient.detach()
