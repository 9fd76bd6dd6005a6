"""What `import fsdp2` loads: every rank pays for it. The other names load when they are asked for.

See [Note: names that load later] in the package. A fresh process: in this one all is loaded.
"""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fsdp2
from fsdp2._core import pickles

ROOT = Path(__file__).parents[2]
MOST_MODULES = 94
"""Of `import fsdp2`, beyond those of torch's own FSDP2: raise it for what every step needs."""

UNWANTED = (
    "fsdp2._tools.commands.",
    "fsdp2._compiled.",
    "fsdp2._tools.doctor.",
    "fsdp2._tools.pages.",
    "fsdp2._tools.plan.",
    "fsdp2._tools.record.",
    "fsdp2._core.transfer.",
    "fsdp2.checkpoint.",
    "fsdp2.debug.",
    "fsdp2.optim.",
    "fsdp2.plans.",
    "fsdp2.recordings.",
    "fsdp2.weights.",
    "fsdp2.wrap.",
    "torch._dynamo.",
    "torch._inductor.",
    "torch.distributed.checkpoint.",
    "torch.distributed.pipelining.",
    "torch.utils.flop_counter.",
)
"""Modules, and packages with all in them, that only names which load later need."""

PROGRAM = """
import json, sys
import torch
from torch.distributed.fsdp import fully_shard
torchs = set(sys.modules)
import fsdp2
ours = sorted(set(sys.modules) - torchs)
import pickle
found = [pickle.loads(f"cfsdp2._pickles\\n{name}\\n.".encode()) for name in sys.argv[1:]]
submodules = [fsdp2.checkpoint.__name__, fsdp2.debug.__name__, fsdp2.optim.__name__]
submodules += [fsdp2.plans.__name__, fsdp2.recordings.__name__]
submodules += [fsdp2.weights.__name__, fsdp2.wrap.__name__]
names = {}
exec("from fsdp2 import *", names)
bound = [name for name in fsdp2.__all__ if vars(fsdp2)[name] is names[name]]
print(json.dumps([ours, [one.__name__ for one in found], submodules, bound]))
"""


@dataclass(frozen=True)
class Imported:
    """What a fresh process saw, in this order: see `PROGRAM`."""

    ours: list[str]
    unpickled: list[str]
    submodules: list[str]
    bound: list[str]


@pytest.fixture(scope="module")
def imported() -> Imported:
    command = [sys.executable, "-c", PROGRAM, *pickles.LATER]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Imported(*json.loads(ended.stdout))


def test_importing_loads_what_a_step_needs(imported: Imported) -> None:
    loaded = [name for name in imported.ours if any(f"{name}.".startswith(w) for w in UNWANTED)]
    assert loaded == []
    assert len(imported.ours) <= MOST_MODULES, "\n".join(imported.ours)


def test_every_name_loads_when_it_is_asked_for(imported: Imported) -> None:
    """Pickles first, which find what no name has loaded; then submodules, then a star."""
    assert imported.unpickled == list(pickles.LATER)
    assert imported.submodules == [f"fsdp2.{name}" for name in fsdp2._SUBMODULES]
    assert imported.bound == fsdp2.__all__  # bound: the next look finds them without a function


def test_names_are_those_that_type_checkers_see() -> None:
    """The table, and the imports under `TYPE_CHECKING`, which no program runs."""
    tree = ast.parse(Path(fsdp2.__file__).read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "_typing.TYPE_CHECKING"
    )
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        module = str(node.module)
        found |= {alias.name: module for alias in node.names}
    submodules = dict.fromkeys(fsdp2._SUBMODULES, "fsdp2")
    assert found == submodules | {n: f"fsdp2.{m}" for n, m in fsdp2._LATER.items()}
    assert set(dir(fsdp2)) >= {*fsdp2.__all__, *fsdp2._SUBMODULES}


@pytest.mark.parametrize("module", [fsdp2, pickles])
def test_an_unknown_name_is_a_plain_attribute_error(module: Any) -> None:
    assert not hasattr(module, "fully_shrad")
    expected = f"module '{module.__name__}' has no attribute 'fully_shrad'"
    with pytest.raises(AttributeError, match=expected):
        _ = module.fully_shrad
    with pytest.raises(ImportError, match="cannot import name 'fully_shrad'"):
        exec(f"from {module.__name__} import fully_shrad")


def test_pickles_find_what_their_file_has_given_to_another() -> None:
    found = pickle.loads(b"cfsdp2.checkpoint._change\nIncompatibleKeys\n.")
    assert found is fsdp2.checkpoint.IncompatibleKeys


@pytest.mark.parametrize("name", sorted(pickles.LATER))
def test_pickles_name_what_loads_later_by_their_own_module(name: str) -> None:
    found = getattr(pickles, name)
    assert found.__module__ == "fsdp2._pickles"
    assert pickle.loads(pickle.dumps(found)) is found
