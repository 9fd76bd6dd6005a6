"""Promise: `print(model)` is what it was, and says of each unit what is sharded."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn

from fsdp2 import fully_shard
from tests._meshes import shared_mesh
from tests._pool import ranks


class Named(nn.Linear):
    def extra_repr(self) -> str:
        return "mine\nof two lines"


class Odd(nn.Linear):
    def __repr__(self) -> str:
        return "Odd!"


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), Named(4, 4, bias=False), nn.ReLU(), Odd(4, 4))
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer)
    fully_shard(model)
    return model


EXPECTED = """\
FSDPSequential(  # unit without parameters
  (0): FSDPLinear(in_features=4, out_features=3, bias=True)  # unit of 2 parameters, {linear} B \
here of 60 B, sharded over 2
  (1): FSDPNamed(  # unit of 1 parameter, 32 B here of 64 B, sharded over 2
    mine
    of two lines
  )
  (2): ReLU()
  (3): Odd!  # unit of 2 parameters, 40 B here of 80 B, sharded over 2
)"""


@ranks(2)
def test_before_during_and_after_steps(rank: int, world_size: int) -> None:
    """Two of the three rows of the first layer are on rank 0, so 40 of its 60 bytes."""
    model = make()
    expected = EXPECTED.format(linear=(40, 20)[rank])
    assert repr(model) == expected
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append(repr(model)))
    x = torch.ones(2, 4)
    model[0](x).sum().backward()
    model[1].unshard()
    seen.append(repr(model))
    assert seen == [expected, expected]
    assert repr(copy.deepcopy(model)) == expected


@ranks(2)
def test_equal_blocks_are_one_line(rank: int, world_size: int) -> None:
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for block in blocks:
        fully_shard(block)
    assert repr(blocks) == (
        "ModuleList(\n  (0-2): 3 x FSDPLinear(in_features=4, out_features=4, bias=True)"
        "  # unit of 2 parameters, 40 B here of 80 B, sharded over 2\n)"
    )


@ranks(2)
def test_on_meta_and_with_replicas(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        layer = nn.Linear(1024, 512, bias=False)
    fully_shard(layer, mesh=shared_mesh((2, 1), ("replicate", "shard")))
    assert repr(layer).endswith(
        "  # unit of 1 parameter, 2 MiB here of 2 MiB, sharded over 1 x 2 replicas"
    )


@ranks(1)
def test_inside_a_compiled_function(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 4))

    def words(x: torch.Tensor) -> torch.Tensor:
        return model(x) * len(repr(model))

    x = torch.ones(1, 4)
    compiled = torch.compile(words, backend="eager")
    assert torch.equal(compiled(x), words(x))
