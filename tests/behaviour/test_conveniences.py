"""Promise: `no_sync`, `EMA` and `units` do and say what an unsharded model shows."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit.models import CASES, Stack, seeded
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_parameters,
    assert_values,
    make_mesh,
    shard,
    values_of,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

# --- no_sync --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_dtype", with_slow([None, torch.float64], [torch.float64]))
@ranks(3)
def test_accumulation_without_sync(reduce_dtype: torch.dtype | None) -> None:
    """Two backwards inside and one outside give the gradients of three; then sync is back."""
    pair = Pair("one_row", mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for _ in range(2):
        with fsdp2.no_sync(pair.model):
            pair.backward(scale=1 / 3)
            assert all(p.grad is None for p in pair.model.parameters() if isinstance(p, DTensor))
            with fsdp2.no_sync(pair.model):
                pair.backward(scale=1 / 3)
        pair.backward(scale=1 / 3)
        pair.step()
    pair.train(1)


@ranks(2)
def test_settings_come_back() -> None:
    """What was set before holds afterwards, unit by unit, and after an exception."""
    model = shard(seeded(Stack), CASES["stack"])
    model.blocks[0].set_requires_gradient_sync(False)
    model.blocks[1].set_requires_all_reduce(False)

    def settings() -> list[tuple[bool, bool]]:
        states = [unit_of(m).settings for m in (model, *model.blocks)]
        return [(s.reduce_grads, s.all_reduce_grads) for s in states]

    before = settings()
    with contextlib.suppress(KeyError), fsdp2.no_sync(model):
        seen = settings()
        raise KeyError
    assert seen == [(False, False)] * 4
    assert settings() == before
    with fsdp2.no_sync(model.blocks):  # a container of units
        assert settings() == [before[0], *[(False, False)] * 3]
    assert settings() == before


@ranks(2)
def test_no_sync_inside_a_step() -> None:
    """During a forward or a backward some units may be through: an error, and the step goes on."""
    model = shard(seeded(Stack), CASES["stack"])
    errors: list[str] = []

    def enter(*_: Any) -> None:
        try:
            with fsdp2.no_sync(model):
                pass
        except fsdp2.StateError as error:
            errors.append(str(error))

    model.blocks[1].register_forward_hook(enter)
    x = torch.randn(4, 13)
    out = model(x)
    out.register_hook(enter)  # before the first unit: still between forward and backward
    model.blocks[0].up.weight.register_hook(enter)
    out.sum().backward()
    assert ["forward" in errors[0], "backward" in errors[-1]] == [True, True]
    assert all(p.grad is not None for p in model.parameters())


def test_no_sync_is_for_sharded_models() -> None:
    for given, said in ((nn.Linear(1, 1), "not applied to any module"), (torch.ones(1), "no_sync")):
        with pytest.raises(fsdp2.ConfigError, match=said), fsdp2.no_sync(given):  # type: ignore[arg-type]
            pass


# --- EMA ------------------------------------------------------------------------------------------


class PlainEMA:
    """The definition, on whole parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module, decay: float) -> None:
        for name, param in model.named_parameters():
            self.values[name].lerp_(param.detach(), 1 - decay)


@pytest.mark.parametrize("case", with_slow(["one_row", "few_rows", "tied_lm"], ["one_row"]))
@ranks(3)
def test_averages_of_shards(case: str) -> None:
    """Averages of shards are the shards of averages; swapped in, the model computes with them."""
    pair = Pair(case)
    ema = fsdp2.optim.EMA(pair.model, lambda n: 0.5 + 0.1 * n)
    expected = PlainEMA(pair.reference)
    for step in range(3):
        pair.backward()
        pair.step()
        ema.update()
        expected.update(pair.reference, 0.5 + 0.1 * step)
    averages = ema.state_dict()["averages"]
    assert list(averages) == list(expected.values)
    for name, value in averages.items():
        assert isinstance(value, DTensor)
        assert_same(value, expected.values[name], name)
    twin = copy.deepcopy(pair.reference)
    twin.load_state_dict(expected.values, strict=False)
    batch = pair.batch()
    before = values_of(pair.model)
    with torch.no_grad():
        pair.model(*pair.local(batch).args)  # the root may keep whole parameters
        with ema.swapped():
            out = pair.model(*batch.args)
            assert_same_parameters(pair.model, twin)
        torch.testing.assert_close(out, twin(*batch.args), rtol=1e-5, atol=1e-5)
    assert_values(pair.model, before)
    pair.train(1)


@ranks(2)
def test_averages_in_another_dtype_and_of_buffers() -> None:
    """bf16 parameters are averaged in fp32; buffers too, integers are copied; plain models work."""
    for sharded in (False, True):
        model = seeded(lambda: nn.Sequential(nn.Linear(13, 29), nn.BatchNorm1d(29)))
        model.bfloat16()
        if sharded:
            fsdp2.fully_shard(model, mesh=make_mesh())
        ema = fsdp2.optim.EMA(model, 0.9, dtype=torch.float32, include_buffers=True)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
            model[1].running_mean.add_(2)
            model[1].num_batches_tracked.add_(7)
        before = {n: whole(v).clone() for n, v in ema.state_dict()["averages"].items()}
        ema.update()
        after = {n: whole(v) for n, v in ema.state_dict()["averages"].items()}
        assert after["1.num_batches_tracked"] == 7
        assert after["1.running_mean"].dtype == torch.float32
        torch.testing.assert_close(after["1.running_mean"], torch.full((29,), 0.2))
        target = whole(model[0].weight).float()
        expected = before["0.weight"].lerp(target, 0.1)
        torch.testing.assert_close(after["0.weight"], expected)


@ranks(2)
def test_state_of_averages(tmp_path: Path) -> None:
    """A state dict loads from memory, from a distributed checkpoint, and from whole tensors."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model = shard(seeded(Stack), CASES["stack"])
    ema = fsdp2.optim.EMA(model, 0.5)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    ema.update()
    expected = {n: whole(v).clone() for n, v in ema.state_dict()["averages"].items()}
    dcp.save(ema.state_dict(), checkpoint_id=folder[0])
    for source in ("memory", "files", "whole"):
        other = fsdp2.optim.EMA(shard(seeded(Stack, 2), CASES["stack"]), 0.5)
        state = {"updates": 1, "averages": expected}
        if source == "memory":
            state = ema.state_dict()
        if source == "files":
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state)
        assert other.updates == 1
        for name, value in other.state_dict()["averages"].items():
            assert_same(value, expected[name], name)
    with pytest.raises(fsdp2.StateError, match=r"missing \['inp.weight'"):
        ema.load_state_dict({"updates": 1, "averages": {}})
    wrong = {**expected, "inp.bias": torch.zeros(3)}
    with pytest.raises(fsdp2.ConfigError, match=r"inp.bias has shape \(3,\)"):
        ema.load_state_dict({"updates": 1, "averages": wrong})


@ranks(2)
def test_averages_are_refused_inside_a_step() -> None:
    model = shard(seeded(Stack), CASES["stack"])
    ema = fsdp2.optim.EMA(model)
    errors: list[str] = []

    def update(*_: Any) -> None:
        with pytest.raises(fsdp2.StateError) as caught:
            ema.update()
        errors.append(str(caught.value))

    handle = model.blocks[1].register_forward_hook(update)
    model(torch.randn(4, 13)).sum().backward()
    assert "during the forward" in errors[0]
    handle.remove()
    with ema.swapped(), pytest.raises(fsdp2.StateError, match="inside swapped"):
        ema.update()
    for decay in (1.5, True, "0.9"):
        with pytest.raises(fsdp2.ConfigError, match="from 0 to 1"):
            fsdp2.optim.EMA(model, decay)  # type: ignore[arg-type]
    with torch.device("meta"):
        on_meta = Stack()
    with pytest.raises(fsdp2.ConfigError, match=r"inp.weight is on the meta device"):
        fsdp2.optim.EMA(on_meta)


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    with_slow(
        ["one_row", "few_rows", "scalars", "nested_units", "one_group"],
        ["one_row", "scalars", "nested_units"],
    ),
)
@ranks(3)
def test_what_units_say_is_what_lies_there(case: str, rank: int) -> None:
    """Every parameter once, and bytes at its offset that are this rank's shard."""
    model = shard(seeded(CASES[case].build), CASES[case])
    reference = dict(seeded(CASES[case].build).named_parameters())
    for _ in range(2):
        found = fsdp2.units(model)
        assert [unit.names for unit in found if unit.is_root] == [("",)]
        assert {n for u in found for n in u.parameters} == set(reference)
        for unit, info in [(u, i) for u in found for g in u.groups for i in g.shards]:
            state = unit_of(unit.modules[0])
            flat = state.own_groups[0].buffers.home.flat
            param = dict(model.named_parameters())[info.names[0]]
            assert info.shape == tuple(reference[info.names[0]].shape)
            local = param.to_local()
            assert info.local_shape == tuple(local.shape)
            assert info.offset is not None
            raw = flat[info.offset : info.offset + local.nbytes]
            assert torch.equal(raw, local.detach().reshape(-1).view(torch.uint8))
            if info.dim is not None:
                rows = reference[info.names[0]].narrow(info.dim, info.start, local.shape[info.dim])
                if _ == 0:
                    assert torch.equal(rows, local)
        model(torch.randn(3, 13))
        model.reshard()


@ranks(4)
def test_units_on_a_mesh_with_replicas() -> None:
    model = shard(seeded(Stack), CASES["stack"], mesh=make_mesh(2, 2), reshard_after_forward=False)
    root = fsdp2.units(model)[0]
    group = root.groups[0]
    assert (group.shard_size, group.replicate_size, group.state) == (2, 2, "sharded")
    assert root.reshard_after_forward is False
    assert group.shards[0].placements[1] == Shard(0)
    assert fsdp2.units(nn.Linear(2, 2)) == []
    with pytest.raises(fsdp2.ConfigError, match="found a list"):
        fsdp2.units([model])  # type: ignore[arg-type]


@ranks(2)
def test_tied_parameters_have_several_names() -> None:
    model = shard(seeded(CASES["tied_lm"].build), CASES["tied_lm"])
    names = [s.names for u in fsdp2.units(model) for g in u.groups for s in g.shards]
    assert ("embed.weight", "head.proj.weight") in [tuple(sorted(n)) for n in names]


@ranks(2)
def test_a_module_under_two_names_has_both() -> None:
    """`units()` names a parameter as `named_parameters(remove_duplicate=False)` does."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model.add_module("again", model[0])
    fsdp2.fully_shard(model)
    (unit,) = fsdp2.units(model)
    found = {names for group in unit.groups for names in (s.names for s in group.shards)}
    assert ("0.weight", "again.weight") in found
    assert ("1.weight",) in found
