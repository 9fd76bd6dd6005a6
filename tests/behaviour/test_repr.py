"""Promise: `print(model)` is what torch's own `fully_shard` makes it, the same on every rank.

But for ties: the module whose unit has a tied parameter says so.

What is sharded is in `print(*fsdp2.units(model), sep="\\n")`: it differs between ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

import fsdp2
from fsdp2 import fully_shard
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.pool import ranks


class Named(nn.Linear):
    def extra_repr(self) -> str:
        return "mine\nof two lines"


class Odd(nn.Linear):
    def __repr__(self) -> str:
        return "Odd!"


def make(library: Any = fsdp2) -> Any:
    same = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = nn.Sequential(nn.Linear(4, 3), Named(4, 4, bias=False), nn.ReLU(), Odd(4, 4), *same)
    for layer in model:
        if not isinstance(layer, nn.ReLU):
            library.fully_shard(layer)
    library.fully_shard(model)
    return model


@ranks(2)
def test_before_during_and_after_steps(rank: int, world_size: int) -> None:
    """The text of torch's own, on every rank, whatever is whole at the moment."""
    expected = repr(make(torch_fsdp))
    assert "(0): FSDPLinear(in_features=4, out_features=3, bias=True)" in expected
    model = make()
    seen: list[str] = [repr(model)]
    model[0].register_forward_hook(lambda *_: seen.append(repr(model)))
    model[0](torch.ones(2, 4)).sum().backward()
    model[1].unshard()
    seen += [repr(model), repr(copy.deepcopy(model))]
    assert seen == [expected] * 4
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, repr(model))
    assert texts == [expected] * 2


@ranks(2)
def test_equal_blocks_are_one_line(rank: int, world_size: int) -> None:
    for library in (torch_fsdp, fsdp2):
        blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        shard_each(*blocks, library=library)
        assert repr(blocks) == (
            "ModuleList(\n  (0-2): 3 x FSDPLinear(in_features=4, out_features=4, bias=True)\n)"
        )


@ranks(2)
def test_units_say_what_is_sharded(rank: int, world_size: int) -> None:
    """Two of the three rows of the first layer are on rank 0, so 40 of its 60 bytes."""
    assert [str(unit) for unit in fsdp2.units(make())][:3] == [
        "<root>: unit without parameters",
        f"0: unit of 2 parameters, {(40, 20)[rank]} B of 60 B on this rank, sharded over 2",
        "1: unit of 1 parameter, 32 B of 64 B on this rank, sharded over 2",
    ]


@ranks(2)
def test_on_meta_and_with_replicas(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        layer = nn.Linear(1024, 512, bias=False)
    fully_shard(layer, mesh=shared_mesh((2, 1), ("replicate", "shard")))
    (unit,) = fsdp2.units(layer)
    assert str(unit) == (
        "<root>: unit of 1 parameter, 2 MiB of 2 MiB on this rank, sharded over 1 x 2 replicas"
    )


@ranks(1)
def test_inside_a_compiled_function(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 4))

    def words(x: torch.Tensor) -> torch.Tensor:
        return model(x) * len(repr(model))

    x = torch.ones(1, 4)
    compiled = torch.compile(words, backend="eager")
    assert torch.equal(compiled(x), words(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13)
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.embedding.weight


@ranks(2)
def test_ties_are_shown(rank: int, world_size: int) -> None:
    """The module of the unit says it, and so does the line about the unit."""

    def model(library: Any) -> nn.Module:
        found = nn.Sequential(Tied())
        library.fully_shard(found[0])
        library.fully_shard(found)
        return found

    ours = model(fsdp2)
    line = "    tied: embedding.weight = head.weight\n"
    assert line in repr(ours)
    assert repr(ours).replace(line, "") == repr(model(torch_fsdp))
    texts = [str(unit) for unit in fsdp2.units(ours)]
    assert texts[1].endswith("sharded over 2; tied: 0.embedding.weight = 0.head.weight")
    assert "tied" not in texts[0]
    both = Tied()
    fsdp2.fully_shard([both.embedding, both.head])
    fsdp2.fully_shard(both)
    assert "(embedding): FSDPEmbedding(29, 13)" in repr(both), "one module of two has one name"
    assert "FSDPTied(\n  tied: embedding.weight = head.weight\n" in repr(both)
