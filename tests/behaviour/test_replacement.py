"""Promise: software that imports torch's FSDP2 names gets ours, before or after, and back again."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.pipelining.stage as torch_stage
import torch.nn as nn

import fsdp2
from fsdp2 import ConfigError, StateError
from fsdp2._core.api.replacement import OURS
from fsdp2._core.base import torch_modules
from tests.kit.parity import Pair, backward_on, sharded
from tests.kit.pool import ranks

THEIRS = {name: value for name, value in torch_modules.PUBLIC.items() if name in OURS}
HOMES = (*torch_modules.HOMES, torch_modules.INNER_HOME)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Make modules of a library that is imported from files, by their text."""
    made: list[str] = []

    def make(text: str) -> Any:
        name = f"fsdp2_client_{len(made)}"
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in made:
        del sys.modules[name]


def importing(home: str) -> str:
    lines = [f"from {home} import {name} as a_{name}" for name in sorted(THEIRS) if has(home, name)]
    return "\n".join(lines)


def has(home: str, name: str) -> bool:
    return name in vars(sys.modules[home])


def test_every_name_of_both_has_an_entry() -> None:
    """Each public name of torch's FSDP2 that we offer under the same name is replaced."""
    names = set(torch_fsdp.__all__) & set(fsdp2.__all__)
    assert set(THEIRS) == names
    assert len(names) >= 9 or not hasattr(torch_fsdp, "DataParallelMeshDims")
    for name in OURS:
        assert OURS[name] is getattr(fsdp2, name)


@pytest.mark.parametrize("home", HOMES)
def test_both_orders_and_back(home: str, client: Callable[..., Any]) -> None:
    before = client(importing(home))
    assert vars(before)["a_fully_shard"] is THEIRS["fully_shard"]
    with fsdp2.replace_torch() as replaced:
        after = client(importing(home))
        for name in THEIRS:
            assert getattr(torch_fsdp, name) is OURS[name]
            if has(home, name):
                assert getattr(before, f"a_{name}") is OURS[name], name
                assert getattr(after, f"a_{name}") is OURS[name], name
        assert f"{before.__name__}.a_fully_shard" in replaced.names
    for name, theirs in THEIRS.items():
        assert getattr(torch_fsdp, name) is theirs
        if has(home, name):
            assert getattr(before, f"a_{name}") is theirs, name
            assert getattr(after, f"a_{name}") is theirs, name


def test_who_imports_ours_keeps_it(client: Callable[..., Any]) -> None:
    with fsdp2.replace_torch():
        module = client(
            "from fsdp2 import fully_shard\nfrom torch.distributed.fsdp import FSDPModule"
        )
    assert module.fully_shard is fsdp2.fully_shard
    assert fsdp2.fully_shard is not torch_fsdp.fully_shard


def test_a_name_of_a_class_is_one_too(client: Callable[..., Any]) -> None:
    module = client(
        "from torch.distributed import fsdp\n"
        "class Strategy:\n"
        "    policy = fsdp.MixedPrecisionPolicy\n"
        "    other = nothing = None\n"
    )
    with fsdp2.replace_torch():
        assert module.Strategy.policy is fsdp2.MixedPrecisionPolicy
        assert module.fsdp.fully_shard is fsdp2.fully_shard
    assert module.Strategy.policy is torch_fsdp.MixedPrecisionPolicy


def test_torchs_own_modules_are_left_alone() -> None:
    own = sys.modules[inspect.unwrap(THEIRS["fully_shard"]).__module__]
    with fsdp2.replace_torch():
        assert torch_stage.FSDPModule is THEIRS["FSDPModule"]
        assert vars(own)["FSDPModule"] is THEIRS["FSDPModule"]
        assert torch_fsdp.FullyShardedDataParallel.__module__.startswith("torch.")


def test_the_inner_module_is_torchs_own_inside(client: Callable[..., Any]) -> None:
    """Whoever imports a name from where torch's is written gets ours; what is there keeps its own.

    So torch's `fully_shard`, where somebody still holds it, works as before.
    """
    own = sys.modules[torch_modules.INNER_HOME]
    theirs = THEIRS["fully_shard"]
    with fsdp2.replace_torch() as replaced:
        assert f"{torch_modules.INNER_HOME}.fully_shard" in replaced.names
        module = client(f"from {torch_modules.INNER_HOME} import FSDPModule, fully_shard")
        assert module.fully_shard is own.fully_shard is fsdp2.fully_shard
        assert module.FSDPModule is fsdp2.FSDPModule
        assert inspect.unwrap(theirs).__globals__["FSDPModule"] is THEIRS["FSDPModule"]
        with fsdp2.replace_torch() as again:
            assert again.names == []
        assert own.fully_shard is fsdp2.fully_shard
    assert own.fully_shard is theirs
    assert type(own) is types.ModuleType


def test_calls_may_be_repeated_and_nested(client: Callable[..., Any]) -> None:
    first = fsdp2.replace_torch()
    with fsdp2.replace_torch() as second:
        assert second.names == []
        late = types.ModuleType("fsdp2_client_late")
        late.fully_shard = THEIRS["fully_shard"]  # type: ignore[attr-defined]  # by a private way
        sys.modules["fsdp2_client_late"] = late
        third = fsdp2.replace_torch()
        assert third.names == ["fsdp2_client_late.fully_shard"]
    assert torch_fsdp.fully_shard is fsdp2.fully_shard
    for _ in range(2):
        third.undo()
    assert late.fully_shard is THEIRS["fully_shard"]
    assert torch_fsdp.fully_shard is fsdp2.fully_shard
    first.undo()
    assert torch_fsdp.fully_shard is THEIRS["fully_shard"]
    first.undo()
    del sys.modules["fsdp2_client_late"]


def test_what_somebody_bound_since_is_kept(client: Callable[..., Any]) -> None:
    module = client("from torch.distributed.fsdp import fully_shard")
    with fsdp2.replace_torch():
        module.fully_shard = print
    assert module.fully_shard is print


def test_it_says_what_it_did(caplog: pytest.LogCaptureFixture, client: Callable[..., Any]) -> None:
    module = client("from torch.distributed.fsdp import fully_shard as shard")
    with caplog.at_level(logging.INFO, "fsdp2"), fsdp2.replace_torch():
        (text,) = (record.getMessage() for record in caplog.records)
    assert f"{module.__name__}.shard" in text
    assert "torch.distributed.fsdp.fully_shard" in text


@ranks(2)
def test_a_model_that_torch_has_sharded() -> None:
    """It is refused while it lives, and only then."""
    model = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(
        StateError, match=r"torch's own fully_shard has already sharded a Sequential"
    ):
        fsdp2.replace_torch()
    assert torch_fsdp.fully_shard is THEIRS["fully_shard"]
    model.itself = [model]
    del model
    with fsdp2.replace_torch():
        model = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(3, 3)))
        assert len(fsdp2.units(model)) == 1
        fsdp2.replace_torch().undo()
        model(torch.ones(2, 3)).sum().backward()


# Policies.


def test_ours_are_torchs_and_frozen() -> None:
    made = {
        "MixedPrecisionPolicy": (torch.bfloat16, torch.float32),
        "OffloadPolicy": (),
        "CPUOffloadPolicy": (False,),
        "DataParallelMeshDims": ("shard", ("a", "b")),
    }
    for name, args in made.items():
        policy = OURS[name](*args)
        if name in THEIRS:
            assert isinstance(policy, THEIRS[name])
        assert policy == OURS[name](*args)
        assert hash(policy) == hash(OURS[name](*args))
        for one in dataclasses.fields(policy):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(policy, one.name, None)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(policy, one.name)
    assert isinstance(fsdp2.CPUOffloadPolicy(), fsdp2.OffloadPolicy)


@ranks(2)
def test_torchs_policies_are_taken() -> None:
    """As arguments they do what ours with the same fields do."""
    models = []
    for library in (torch_fsdp, fsdp2):
        given = {
            "mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "offload_policy": library.CPUOffloadPolicy(pin_memory=False),
        }
        models.append(sharded("stack", **given))
        torch.manual_seed(0)
        backward_on("stack", models[-1])
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())


@ranks(2)
def test_torchs_policies_in_shard_model_and_on_meshes() -> None:
    if not hasattr(torch_fsdp, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 1))
    fsdp2.wrap.shard_model(
        model,
        {nn.Linear},
        mesh=mesh,
        mp_policy=torch_fsdp.MixedPrecisionPolicy(torch.bfloat16),
        dp_mesh_dims=torch_fsdp.DataParallelMeshDims(shard="dp"),
    )
    assert model(torch.ones(2, 13)).dtype is torch.bfloat16


@ranks(1)
def test_a_field_that_we_do_not_know() -> None:
    """A newer torch's policy is refused if it says what ours cannot, and else taken."""

    @dataclasses.dataclass(frozen=True)
    class Newer(torch_fsdp.MixedPrecisionPolicy):
        rounding: str = "nearest"

    assert fsdp2.fully_shard(nn.Linear(3, 3), mp_policy=Newer()) is not None
    with pytest.raises(
        ConfigError, match=r"rounding='up' in a Newer, which fsdp2 does not support"
    ):
        fsdp2.fully_shard(nn.Linear(3, 3), mp_policy=Newer(rounding="up"))


# Training by torch's names.


@ranks(2)
def test_a_program_by_torchs_names_trains_ours() -> None:
    with fsdp2.replace_torch():
        pair = Pair("stack", library=torch_fsdp, mp_policy=torch_fsdp.MixedPrecisionPolicy())
    for _ in range(3):
        pair.step()
    assert len(fsdp2.units(pair.model)) == 4
    assert isinstance(pair.model, torch_fsdp.FSDPModule)
