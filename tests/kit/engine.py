"""A model, an engine of another layout, and updates from trainers to engine ranks.

Every size is odd, so that ranks have uneven parts. What an engine is to have is computed from whole
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import weights
from fsdp2.weights import Box, Spec
from tests.kit import meshes

Layout = dict[str, Spec]
BF16 = torch.bfloat16
MAX_BYTES = 4096


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(7, 12)
        self.k = nn.Linear(7, 6)
        self.gate = nn.Linear(7, 11, bias=False)
        self.up = nn.Linear(7, 11, bias=False)
        self.down = nn.Linear(11, 7)
        self.experts = nn.ModuleList(nn.Linear(5, 3, bias=False) for _ in range(4))
        self.tied = nn.Linear(7, 11, bias=False)
        self.tied.weight = self.gate.weight
        self.embed = nn.Embedding(67, 33)
        self.scale = nn.Parameter(torch.randn(()))


def whole_values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: param.detach().clone() for name, param in Net().named_parameters()}


def changed(values: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """Return values of which the positive ones are larger."""
    return {name: value + by * (value > 0) for name, value in values.items()}


def write(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    start = min(index * size, length)
    return start, min(size, length - start)


def engine_layout(size: int, dtype: torch.dtype) -> list[Layout]:
    """Return tensors that are fused, stacked, transposed, padded, divided on each dim, copied."""
    found = []
    for index in range(size):
        q, k, g, e = (chunk(length, size, index) for length in (12, 6, 11, 67))
        fused = [Box("q.weight", (q[0], 0), (q[1], 7)), Box("k.weight", (k[0], 0), (k[1], 7))]
        biases = [Box("q.bias", (q[0],), (q[1],)), Box("k.bias", (k[0],), (k[1],))]
        gated = [Box(f"{name}.weight", (g[0], 0), (g[1], 7)) for name in ("tied", "up")]
        columns = (0, g[0]), (7, g[1])
        pairs = [
            [Box(f"experts.{e}.weight", (0, 0), (3, 5), turns) for e in (first, first + 1)]
            for first, turns in ((0, False), (2, False), (0, True), (2, True))
        ]
        experts = [Spec((6, 5), dtype, pair) for pair in pairs[:2]]
        turned = [Spec((5, 6), dtype, pair, dim=1) for pair in pairs[2:]]
        layout = {
            "qk": Spec((q[1] + k[1], 7), dtype, fused),
            "qk.bias": Spec((q[1] + k[1],), dtype, biases),
            "gate_up": Spec((2, g[1], 7), dtype, gated),
            "down": Spec((7, g[1]), dtype, [Box("down.weight", *columns)]),
            "down.T": Spec((g[1], 7), dtype, [Box("down.weight", *columns, True)]),
            "experts": Spec((2, 6, 5), dtype, experts),
            "experts.T": Spec((2, 5, 6), dtype, turned),
            "norm": Spec((9,), dtype, [Box("down.bias", (0,), (7,)), Box(None, (), (2,))]),
            "embed": Spec((e[1], 33), dtype, [Box("embed.weight", (e[0], 0), (e[1], 33))]),
            "scale": Spec((), dtype, [Box("scale", (), ())]),
        }
        found.append(layout)
    return found


def expected(layout: Layout, values: dict[str, Tensor]) -> dict[str, Tensor]:
    values = values | {"tied.weight": values["gate.weight"]} if "gate.weight" in values else values

    def made(part: Box | Spec, dtype: torch.dtype) -> Tensor:
        if isinstance(part, Spec):
            parts = [made(inner, dtype) for inner in part.boxes]
            parts = [p.view((1,) * (len(part.shape) - p.dim()) + tuple(p.shape)) for p in parts]
            return torch.cat(parts, part.dim) if part.shape else parts[0]
        if part.name is None:
            return torch.zeros(part.shape, dtype=dtype)
        where = tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))
        value = values[part.name][where].to(dtype)
        return (value.transpose(-1, -2) if part.transposed else value).contiguous()

    return {name: made(spec, spec.dtype) for name, spec in layout.items()}


def assert_same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


# Trainers by how they hold the parameters.


def trained(kind: str, trainers: int, values: dict[str, Tensor]) -> tuple[nn.Module, DeviceMesh]:
    """Return a model with these values; every rank of the job calls this, and gets the mesh.

    ``rows``: sharded by rows. ``dealt``: by columns, owned, aligned. ``replicas``: two of them.
    ``tp``: tensor parallelism of two. ``experts``: half of the ranks have half of the experts.
    """
    is_flat = kind in ("rows", "dealt")
    numbers = torch.arange(trainers, device="cpu").view((trainers,) if is_flat else (-1, 2))
    mesh = DeviceMesh(meshes.DEVICE, numbers, mesh_dim_names=("dp",) if is_flat else ("out", "in"))
    model = Net()
    write(model, values)
    if dist.get_rank() >= trainers:
        return model, mesh
    if kind == "tp":
        for name, dim in (("q", 0), ("up", 0), ("down", 1)):
            layer = getattr(model, name)
            weight = distribute_tensor(layer.weight.detach(), mesh["in"], [Shard(dim)])
            layer.weight = nn.Parameter(weight)
        return fsdp2.fully_shard(model, mesh=mesh["out"]), mesh
    places: dict[nn.Parameter, Any] = {}
    if kind == "dealt":
        places = {
            model.q.weight: Shard(1),
            model.up.weight: fsdp2.Whole(),
            model.down.weight: fsdp2.Aligned(0, 2),
        }
    if kind == "experts":
        place = mesh.get_local_rank("in")
        kept = {str(e): model.experts[e] for e in (2 * place, 2 * place + 1)}
        model.experts = nn.ModuleDict(kept)  # type: ignore[assignment]  # names stay
        for expert in kept.values():
            fsdp2.fully_shard(expert, mesh=mesh["out"])
    return fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=places.get), mesh


def add_to_positive(model: nn.Module, by: float, names: Sequence[str] = ()) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            if not names or name in names:
                local.add_(by * (local > 0))


def update_an_engine(kind: str, trainers: int, layout: list[Layout]) -> str:
    """Send five updates from the first ranks to the others; compare each to the bit.

    The second has no change, and the third one of a scalar alone: few bytes are sent. The last is
    sent in the background, while the model goes on.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    values = whole_values()
    model, _ = trained(kind, trainers, values)
    text: list[Any] = [None]
    if rank < trainers:
        plan = weights.plan(model, layout, max_bytes=MAX_BYTES)
        text = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    if rank < trainers:
        sent = []
        for by, names in ((0, ()), (0, ()), (1, ["scale"]), (1, ())):
            add_to_positive(model, by, names)
            receivers = list(range(trainers, world))
            sent.append(plan.send(dist.group.WORLD, receivers, since=plan.version).nbytes)
        handle = plan.send(dist.group.WORLD, receivers, background=True)
        add_to_positive(model, 3)
        handle.wait()
        assert handle.version == plan.version == 5
        assert max(sent[1:3]) < 0.5 * sent[0], sent
        return f"{sent[0]} B, and {sent[1]} B without a change"
    receiver = weights.Receiver(text[0], rank - trainers, meshes.DEVICE)
    for by, names in ((0, ()), (0, ()), (1, ["scale"]), (1, ()), (0, ())):
        later = changed(values, by)
        values = {n: later[n] if not names or n in names else v for n, v in values.items()}
        found = receiver.receive(dist.group.WORLD)
        assert_same(found, expected(layout[rank - trainers], values))
    return ""
