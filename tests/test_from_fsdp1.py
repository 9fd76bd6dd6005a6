"""`docs/from-fsdp1.md` is complete, and what it shows runs."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp2
from fsdp2._core.base.events import listen
from tests.kit.pool import ranks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-fsdp1.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rows() -> Iterator[list[str]]:
    for line in PAGE.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[-1] != "test":
                yield cells


def named_in_tables() -> set[str]:
    """Return the names in backticks in first columns, without their classes."""
    found = {name for cells in rows() for name in re.findall(r"`([\w.]+)`", cells[0])}
    return found | {name.rpartition(".")[2] for name in found}


def enumerations() -> list[type]:
    names = ("ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType")
    return [getattr(torch_fsdp, name) for name in names]


def test_everything_of_fsdp1_has_a_row() -> None:
    """Arguments, public methods, members of enumerations, configurations, policies, variables."""
    cls = FullyShardedDataParallel
    wanted = set(inspect.signature(cls.__init__).parameters) - {"self"}
    wanted |= {name for name in vars(cls) if not name.startswith("_")}
    for enumeration in enumerations():
        wanted |= set(enumeration.__members__)  # type: ignore[attr-defined]
    wanted |= set(inspect.signature(MixedPrecision).parameters)
    wanted |= {name for name in torch_fsdp.__all__ if "Config" in name or "Settings" in name}
    wanted |= {"CPUOffload", "FlatParameter", "wrap", "enable_wrap"}
    wanted |= {name for name in vars(torch_wrap) if name.endswith("olicy") and name[0] != "_"}
    source = Path(torch_fsdp.__file__).parent / "_flat_param.py"
    wanted |= set(re.findall(r'"(FSDP_[A-Z_]+)"', source.read_text()))
    assert "FSDP_USE_FULL_PREC_IN_EVAL" in wanted
    assert not wanted - named_in_tables()


def test_every_row_names_a_test() -> None:
    for cells in rows():
        path = re.fullmatch(r"`(tests/\S+\.py)`", cells[-1])
        assert path is not None, cells
        assert (ROOT / path[1]).exists(), cells


def test_names_of_ours_exist() -> None:
    """Every `fsdp2.name` on the page is there."""
    for name in re.findall(r"fsdp2\.((?:\w+\.)?\w+)", PAGE):
        first, _, second = name.partition(".")
        value = getattr(fsdp2, first)
        if second and not isinstance(value, type):
            assert hasattr(value, second), name


# --- the blocks -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 29), nn.Linear(29, 13)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(13)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@ranks(2)
def test_without_prefetch_nothing_is_gathered_ahead() -> None:
    """Empty lists, as the page says, are `backward_prefetch=None` and `forward_prefetch=False`."""
    model = Model()
    fsdp2.wrap.shard_model(model, {Block})
    kinds: list[str] = []
    for wanted in (True, False):
        if not wanted:
            for unit in fsdp2.units(model):
                unit.modules[0].set_modules_to_backward_prefetch([])  # type: ignore[operator]
                unit.modules[0].set_modules_to_forward_prefetch([])  # type: ignore[operator]
        for _ in range(2):
            kinds.clear()
            with listen(lambda event: kinds.append(str(event))):
                model(torch.randn(4, 13)).sum().backward()
        for phase in ("forward", "backward"):
            assert any(k.startswith(f"{phase}: prefetch") for k in kinds) == wanted, (phase, kinds)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
@ranks(2)
def test_blocks_run(index: int) -> None:
    """Each on a fresh model, on two ranks of one node."""
    block = BLOCKS[index]
    os.environ.pop("GROUP_RANK", None)
    os.environ.pop("SLURM_NODEID", None)
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "fsdp2": fsdp2,
        "Block": Block,
        "model": Model(),
        "make_model": Model,
        "x": torch.randn(4, 13),
    }
    exec(compile(block, f"docs/from-fsdp1.md, block {index}", "exec"), names)
