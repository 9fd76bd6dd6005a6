"""Training side by side: a plain model, and one tensor-parallel inside and sharded outside.

Everything here runs on a rank. Models are in double precision, so that a wrong number cannot hide
behind the order of sums.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp2
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import shared_mesh
from tests.kit.parity import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    global_mean,
    names_of,
)

RTOL = 1e-11
ROWS = 4  # of a global batch: 1, 2 and 4 data-parallel ranks divide it
VOCABULARY, WIDTH, TOKENS = 29, 12, 6


def mesh_of(**axes: int) -> DeviceMesh:
    """Return a CPU mesh with named axes."""
    return shared_mesh(tuple(axes.values()), tuple(axes))


class Twin:
    """A sharded tensor-parallel model, and a plain copy that is trained on the global batch."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        parallelize: Callable[[nn.Module, DeviceMesh], None],
        *,
        inner: Sequence[str] = ("tensor",),
        batch: Callable[[], Tensor] | None = None,
        prepare: Callable[[nn.Module], None] = lambda model: None,
        library: Any = fsdp2,
        **kwargs: Any,
    ) -> None:
        self.reference = model.double()
        self.model = copy.deepcopy(self.reference)
        names = mesh.mesh_dim_names or ()
        outer = tuple(name for name in names if name not in inner)
        parallelize(self.model, mesh[tuple(inner)])
        prepare(self.model)
        prepare(self.reference)
        blocks = getattr(self.model, "blocks", ())
        for module in (*blocks, self.model):
            library.fully_shard(module, mesh=mesh[outer], **kwargs)
        sizes = [mesh[name].size() for name in outer]
        self.count, self.row = math.prod(sizes), 0
        for name, size in zip(outer, sizes, strict=True):
            self.row = self.row * size + mesh.get_local_rank(name)
        self.batch = batch or (lambda: torch.randn(ROWS, WIDTH, dtype=torch.float64))
        self.optimizers = [
            kind([p for p in m.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
            for kind, m in ((LocalSGD, self.model), (torch.optim.SGD, self.reference))
        ]

    def local(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.count)[self.row]

    def backward(self) -> None:
        """Run forward and backward of both on a new global batch and compare the losses."""
        batch = self.batch()
        loss = self.model(self.local(batch)).square().mean()
        expected = self.reference(batch).square().mean()
        assert_same(global_mean(loss), expected, "loss", RTOL)
        loss.backward()
        expected.backward()

    def check_gradients(self) -> None:
        check_gradients(self.model, self.reference)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        """Train both; compare losses and gradients of every step, and the parameters at the end."""
        before = {name: param.detach().clone() for name, param in names_of(self.reference).items()}
        for _ in range(steps):
            self.backward()
            self.check_gradients()
            self.update()
        for name, param in names_of(self.reference).items():
            assert torch.equal(param, before[name]) is not param.requires_grad, name
        assert_same_parameters(self.model, self.reference, RTOL)


def check_gradients(model: nn.Module, reference: nn.Module, rtol: float = RTOL) -> None:
    """Assert that gradients are placed as their parameters and equal the reference's."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        if param.grad is not None:
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name
            assert param.grad.device_mesh == param.device_mesh, name
    assert_same_gradients(model, reference, rtol)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """Causal attention whose number of heads follows from how much of ``q`` a rank has."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            project(x).view(batch, tokens, -1, self.head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 3)
        self.feed = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 2, hidden: int = 30) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, TOKENS))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split weights over ranks, and what lies between them along the sequence."""
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:  # type: ignore[union-attr]  # a Transformer
        parallelize_module(
            block,
            mesh,
            {
                "first": SequenceParallel(),
                "attention": PrepareModuleInput(**whole),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "second": SequenceParallel(),
                "feed": PrepareModuleInput(**whole),
                "feed.up": ColwiseParallel(),
                "feed.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def colwise_then_rowwise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a ``FeedForward``; DTensors in between, so that the hidden size may be uneven."""
    up = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, {"up": up, "down": RowwiseParallel()})


def distribute_as(**placements: Sequence[Placement]) -> Callable[[nn.Module, DeviceMesh], None]:
    """Return a function that makes DTensors of parameters, by name, over all axes of a mesh."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        for name, where in placements.items():
            param = distribute_tensor(getattr(model, name).detach(), mesh, where)
            setattr(model, name, nn.Parameter(param))

    return parallelize


def whole_inside(param: Tensor) -> Tensor:
    """Return a parameter's whole value, differentiably; a plain one as it is."""
    if not isinstance(param, DTensor):
        return param
    return param.redistribute(placements=[Replicate()] * param.device_mesh.ndim).to_local()
