"""Promise: trainers of any layout update an engine of any other, to the bit, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.kit.ranks import run_on_ranks
from fsdp2 import weights
from fsdp2.weights import Box, Spec
from tests.kit.engine import BF16, engine_layout, update_an_engine
from tests.kit.pool import ranks
from tests.kit.slow import slow

FP32 = torch.float32
KINDS = ("rows", "dealt", "replicas", "tp", "experts")


@ranks(2)
def test_one_trainer_updates_one_engine_rank(rank: int) -> None:
    update_an_engine("rows", 1, engine_layout(1, BF16))


@pytest.mark.parametrize(
    ("kind", "trainers", "size"),
    [*((kind, 2, 2) for kind in KINDS[:4]), ("dealt", 3, 1), ("rows", 1, 3)],
)
@ranks(slow(4))
def test_some_trainers_update_an_engine_of_some_ranks(kind: str, trainers: int, size: int) -> None:
    update_an_engine(kind, trainers, engine_layout(size, BF16))


# Adapters, as `peft` names them.


class Adapted(nn.Module):
    """A frozen matrix with a low-rank adapter: `base_layer`, `lora_A.default`, `lora_B.default`."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(13, 29, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(13, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, 29, bias=False)})


def adapted() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(Adapted(), Adapted())
    return model, {n: p.detach().clone() for n, p in model.named_parameters()}


def boxes(names: list[str], values: dict[str, Tensor]) -> dict[str, Spec]:
    found = {}
    for name in names:
        shape = tuple(values[name].shape)
        found[name] = Spec(shape, BF16, [Box(name, (0, 0), shape)])
    return found


@pytest.mark.parametrize("merges", [False, True])
@ranks(slow(3))
def test_adapters_alone_or_merged_on_the_way(rank: int, merges: bool) -> None:
    model, values = adapted()
    parts = ["base_layer"] if merges else ["lora_A.default", "lora_B.default"]
    layout = boxes([f"{layer}.{part}.weight" for layer in range(2) for part in parts], values)
    text: list[Any] = [None]
    mesh = DeviceMesh("cpu", range(2))
    if rank < 2:
        fsdp2.fully_shard(model, mesh=mesh)
        plan = weights.plan(model, [layout], max_bytes=2048)
        adapters = dict(fsdp2.full_params(model, max_bytes=1 << 20, names=lambda n: "lora" in n))
        text = [plan.to_json()]

    def merge(name: str, start: tuple[int, ...], box: Tensor) -> Tensor:
        layer = name.partition(".")[0]
        rows, columns = (slice(s, s + n) for s, n in zip(start, box.shape, strict=True))
        b = adapters[f"{layer}.lora_B.default.weight"][rows]
        return box + b @ adapters[f"{layer}.lora_A.default.weight"][:, columns]

    dist.broadcast_object_list(text, src=0)
    if rank < 2:
        plan.send(dist.group.WORLD, [2], callback=merge if merges else None)
        base = values["0.base_layer.weight"].nbytes
        assert plan.figures.least_nbytes < base or merges, "the base travels too"
        return
    found = weights.Receiver(text[0], 0).receive(dist.group.WORLD)
    for name, tensor in found.items():
        right = values[name]
        if merges:
            layer = name.partition(".")[0]
            b = values[f"{layer}.lora_B.default.weight"]
            right = right + b @ values[f"{layer}.lora_A.default.weight"]
        torch.testing.assert_close(tensor, right.to(BF16), rtol=1e-2 if merges else 0, atol=0)


@pytest.mark.slow
def test_four_trainers_update_four_engine_ranks() -> None:
    run_on_ranks(four_and_four, 8)


def four_and_four(rank: int, world_size: int) -> None:
    for kind in KINDS:
        update_an_engine(kind, 4, engine_layout(4, BF16))
        update_an_engine(kind, 4, engine_layout(2, FP32) * 2)
        update_an_engine(kind, 4, [*engine_layout(3, BF16), {}])
