"""Promise: a load that fails changes nothing, on any rank; and nothing that does not fit is loaded.

After each failure, model and optimizer are compared bit for bit with what they were.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import fsdp2
from fsdp2 import checkpoint
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import seeded
from tests.kit.parity import make_mesh, whole
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

WIDTH = 13


class Net(nn.Module):
    """Two units, a buffer of integers, state of its own that may refuse to be set."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 29)
        self.down = nn.Linear(29, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.note: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state
        if self.refuses:
            raise ValueError("this note does not suit me")


Class = type[torch.optim.Optimizer]


def made(seed: int, steps: int = 1, cls: Class = torch.optim.AdamW, **options: Any) -> Any:
    model = seeded(Net, seed)
    model.note = seed
    if dist.is_initialized():
        shard_each(model.up, model, mesh=make_mesh())
    optimizer = cls(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]  # of all classes here
    for _ in range(steps):
        model(torch.ones(4, WIDTH)).sum().backward()
        advance(optimizer)
    return model, optimizer


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's bits, and everything else that a load might touch."""

    def bits(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().contiguous().view(-1).view(torch.uint8).tolist()

    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "model": {name: bits(v) for name, v in model.state_dict().items()},
        "note": model.note,
        "state": {
            names[id(p)]: {key: bits(v) for key, v in fields.items()}
            for p, fields in optimizer.state.items()
        },
        "groups": [{**group, "params": 0} for group in optimizer.param_groups],
    }


def full_of(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy(checkpoint.full_state(model, optimizer, rank0_only=False))


# --- files ----------------------------------------------------------------------------------------


def last_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.name)


def remove(folder: Path) -> None:
    last_file(folder).unlink()


def cut(folder: Path) -> None:
    os.truncate(last_file(folder), last_file(folder).stat().st_size // 2)


def flip_last_byte_of_a_tensor(folder: Path) -> None:
    content = bytearray(last_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    last_file(folder).write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    with_slow([remove, cut, flip_last_byte_of_a_tensor], [flip_last_byte_of_a_tensor]),
)
@ranks(2)
def test_a_missing_or_damaged_shard(
    tmp_path: Path, damage: Callable[[Path], None], rank: int
) -> None:
    """The first rank needs its own file only and finds it whole: it changes nothing either."""
    checkpoint.save(tmp_path / "saved", *made(1), extra={"step": 1})
    target = made(2, 2)
    before = snapshot(*target)
    dist.barrier()
    if rank == 0:
        damage(tmp_path / "saved")
    dist.barrier()
    with pytest.raises(fsdp2.StateError, match=r"__1_0\.distcp.*damaged"):
        checkpoint.load(tmp_path / "saved", *target)
    assert snapshot(*target) == before
    target[0](torch.ones(2, WIDTH)).sum().backward()
    target[1].step()


@ranks(2)
def test_ranks_that_see_other_checkpoints(tmp_path: Path, rank: int) -> None:
    for seed in (1, 2):
        checkpoint.save(tmp_path / f"saved{seed}", *made(seed))
    target = made(3)
    before = snapshot(*target)
    with pytest.raises(fsdp2.StateError, match="ranks see different checkpoints"):
        checkpoint.load(tmp_path / f"saved{rank + 1}", *target)
    assert snapshot(*target) == before


@pytest.mark.parametrize("form", with_slow(["files", "full", "local", "sharded"], ["sharded"]))
@ranks(2)
def test_what_users_wrote_may_refuse(tmp_path: Path, form: str, rank: int) -> None:
    """`set_extra_state` raises on one rank, when the optimizer has its state: it is undone."""
    source, target = made(1), made(2, 2)
    load: Callable[..., Any]
    if form == "files":
        checkpoint.save(tmp_path / "saved", *source)
        load = checkpoint.load
        given: Any = tmp_path / "saved"
    else:
        given = getattr(checkpoint, f"{form}_state")(*source)
        given = given or None
        load = getattr(checkpoint, f"load_{form}_state")
    before = snapshot(*target)
    target[0].refuses = rank == 1

    def run() -> None:
        if form == "files":
            load(given, *target)
        else:
            load(target[0], given, target[1])

    with pytest.raises(fsdp2.StateError, match="this note does not suit me"):
        run()
    assert snapshot(*target) == before
    target[0].refuses = False
    run()
    assert snapshot(*target) == snapshot(*source)


# --- optimizers -----------------------------------------------------------------------------------

OTHERS: list[tuple[Class, dict[str, Any]]] = [
    (torch.optim.Adagrad, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]


def load_files(folder: Path, source: Any, target: Any, strict: bool) -> None:
    if not (folder / ".metadata").exists():
        checkpoint.save(folder, *source)
    checkpoint.load(folder, *target, strict=strict)


def load_full(folder: Path, source: Any, target: Any, strict: bool) -> None:
    checkpoint.load_full_state(target[0], full_of(*source), target[1], strict=strict)


def load_sharded(folder: Path, source: Any, target: Any, strict: bool) -> None:
    state = checkpoint.sharded_state(*source)
    checkpoint.load_sharded_state(target[0], state, target[1], strict=strict)


def load_local(folder: Path, source: Any, target: Any, strict: bool) -> None:
    checkpoint.load_local_state(target[0], checkpoint.local_state(*source), target[1])


@pytest.mark.parametrize("load", [load_files, load_full, load_sharded, load_local])
@pytest.mark.parametrize("stepped", [0, 1])
def test_the_state_of_another_optimizer(
    tmp_path: Path, load: Callable[..., None], stepped: int
) -> None:
    """Also with `strict=False`, and before either has made a step."""
    for cls, options in OTHERS:
        source, target = made(1, stepped, cls, **options), made(2, 2)
        if cls is torch.optim.AdamW:
            if not stepped:
                continue
            source[1].param_groups[0]["amsgrad"] = False  # moments that its options do not want
        before = snapshot(*target)
        for strict in (True, False):
            with pytest.raises(fsdp2.ConfigError, match=r"was not saved from AdamW"):
                load(tmp_path / f"{cls.__name__}", source, target, strict)
            assert snapshot(*target) == before, (cls, strict)


@pytest.mark.parametrize(
    "cls",
    [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ],
)
def test_the_state_of_the_same_optimizer_is_loaded(tmp_path: Path, cls: str) -> None:
    """Every one of torch's, stepped or not, into one stepped or not."""
    kind = getattr(torch.optim, cls)
    for steps in (0, 2):
        source = made(1, steps, kind)
        for target_steps in (0, 1):
            target = made(2, target_steps, kind)
            load_full(tmp_path, source, target, True)
            assert snapshot(*target)["state"] == snapshot(*source)["state"]


def test_a_custom_optimizer_is_not_run(tmp_path: Path) -> None:
    class Counting(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            type(self).calls += 1
            return super().step(closure)

    source, target = made(1, 2, Counting), made(2, 1, Counting)
    load_full(tmp_path, source, target, True)
    assert Counting.calls == 3
    assert snapshot(*target)["state"] == snapshot(*source)["state"]
    with pytest.raises(fsdp2.ConfigError, match=r"was not saved from Counting"):
        load_full(tmp_path, made(1, 1, torch.optim.Adagrad), target, False)


@ranks(2)
def test_moments_of_another_name_or_shape() -> None:
    source, target = made(1), made(2)
    before = snapshot(*target)
    full = full_of(*source)

    def rename(state: Any) -> None:
        state["up.weight"]["exp_average"] = state["up.weight"].pop("exp_avg")

    def reshape(state: Any) -> None:
        state["up.weight"]["exp_avg"] = state["up.weight"]["exp_avg"].flatten()

    def shrink(state: Any) -> None:
        state["down.bias"]["exp_avg_sq"] = torch.ones(1)

    def lengthen(state: Any) -> None:
        state["up.weight"]["step"] = torch.ones(3)

    def of_another(state: Any) -> None:
        state["up.wait"] = state.pop("up.weight")

    cases: list[tuple[Callable[[Any], None], str]] = [
        (rename, r"up\.weight was not saved from AdamW: it lacks exp_avg and has exp_average"),
        (reshape, r"expected exp_avg of up\.weight .* a tensor of .* shape, \(29, 13\)"),
        (shrink, r"expected exp_avg_sq of down\.bias .* a tensor of .* shape, \(13,\)"),
        (lengthen, r"expected step of up\.weight .* to be a number"),
        (of_another, r"1 names that the model lacks: up\.wait"),
    ]
    for change, message in cases:
        state = copy.deepcopy(full)
        change(state["optimizer"]["state"])
        with pytest.raises(fsdp2.ConfigError, match=message):
            checkpoint.load_full_state(target[0], state, target[1])
        assert snapshot(*target) == before
        sharded = {**state, "model": checkpoint.sharded_state(source[0])["model"]}
        with pytest.raises(fsdp2.ConfigError, match=message):
            checkpoint.load_sharded_state(target[0], sharded, target[1])
        assert snapshot(*target) == before
    checkpoint.load_full_state(target[0], state, target[1], strict=False)  # the last one passes


def test_an_optimizer_of_parameters_without_memory() -> None:
    """Loading makes new parameters of those on meta, which that optimizer would not train."""
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(fsdp2.ConfigError, match=r"up\.weight is on the meta device|scale is on"):
        checkpoint.load_full_state(model, full_of(*made(1)), optimizer)
    assert model.scale.is_meta


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", with_slow([float("nan"), 0.5, 1e30], [0.5]))
@ranks(2)
def test_values_that_integers_cannot_hold(tmp_path: Path, value: float) -> None:
    source, target = made(1), made(2)
    before = snapshot(*target)
    full = full_of(*source)
    full["model"]["count"] = torch.tensor([1.0, value])
    sharded = checkpoint.sharded_state(*source)
    sharded["model"]["count"] = full["model"]["count"]
    local = checkpoint.local_state(*source)
    local["model"]["count"] = full["model"]["count"]
    source[0].count = full["model"]["count"]
    checkpoint.save(tmp_path / "saved", *source)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load_full_state(target[0], full, target[1]),
        lambda: checkpoint.load_full_state(target[0], full, target[1], from_rank0=False),
        lambda: checkpoint.load_sharded_state(target[0], sharded, target[1]),
        lambda: checkpoint.load_local_state(target[0], local, target[1]),
        lambda: checkpoint.load(tmp_path / "saved", *target),
    ]
    for call in calls:
        with pytest.raises(fsdp2.ConfigError, match=r"count is torch.int64 .* cannot represent"):
            call()
        assert snapshot(*target) == before
    full["model"]["count"] = torch.tensor([1.0, 2.0])
    checkpoint.load_full_state(target[0], full, target[1])
    assert target[0].count.tolist() == [1, 2]


@ranks(2)
def test_a_local_state_is_complete_and_of_the_same_shapes(rank: int) -> None:
    source, target = made(1), made(2)
    before = snapshot(*target)

    def without(name: str) -> Callable[[Any], None]:
        return lambda state: state["model"].pop(name)

    cases: list[tuple[Callable[[Any], None], str]] = [
        (without("count"), "1 missing names: count"),
        (without("up.bias"), r"1 missing names: up\.bias"),
        (lambda s: s["model"].update(more=torch.ones(1)), "1 names that the model lacks: more"),
        (lambda s: s["model"].update(count=torch.ones(1)), r"count has size \(2,\) on this rank"),
        (lambda s: s["model"].update({"up.bias": torch.ones(1)}), r"up\.bias has size \(1[45],\)"),
        (lambda s: s.pop("layout"), r"loads only on the same ranks and meshes"),
        (lambda s: s.pop("model"), "expected {'model'"),
        (lambda s: s.pop("optimizer"), "has no 'optimizer'"),
        (
            lambda s: s["optimizer"]["state"]["up.bias"].update(exp_avg=torch.ones(1)),
            r"up\.bias\.exp_avg has size \(1[45],\) on this rank",
        ),
    ]
    for change, message in cases:
        state = copy.deepcopy(checkpoint.local_state(*source))
        if rank == 1 or "1[45]" in message:
            change(state)
        with pytest.raises(fsdp2.ConfigError, match=message):
            checkpoint.load_local_state(target[0], state, target[1])
        assert snapshot(*target) == before
    checkpoint.load_local_state(
        target[0], copy.deepcopy(checkpoint.local_state(*source)), target[1]
    )
    assert snapshot(*target) == snapshot(*source)


class TensorState(nn.Linear):
    """Keeps a tensor as extra state, as layers in 8 bits do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scales = torch.zeros(3)

    def get_extra_state(self) -> Tensor:
        return self.scales.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.scales = state.clone()


@ranks(2)
def test_extra_state_that_is_a_tensor(tmp_path: Path) -> None:
    source, target = TensorState(), TensorState()
    source.scales = torch.arange(3.0)
    shard_each(source, target, mesh=make_mesh())
    checkpoint.save(tmp_path / "saved", source)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(tmp_path / "saved", target),
        lambda: checkpoint.load_full_state(target, checkpoint.full_state(source) or None),
        lambda: checkpoint.load_sharded_state(target, checkpoint.sharded_state(source)),
        lambda: checkpoint.load_local_state(target, checkpoint.local_state(source)),
    ]
    for call in calls:
        target.scales = torch.zeros(3)
        call()
        assert target.scales.tolist() == [0.0, 1.0, 2.0]


# --- names ----------------------------------------------------------------------------------------


def checkpointed(seed: int, wrapped: bool) -> Any:
    """A model whose inner layers are wrapped for activation checkpointing, or not."""
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), seed)
    if wrapped:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
    if dist.is_initialized():
        shard_each(*model, model, mesh=make_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("wrapped", with_slow([True, False], [True]))
@ranks(2)
def test_wrappers_are_in_no_name(tmp_path: Path, wrapped: bool) -> None:
    """What is saved with activation checkpointing is loaded without it, and the other way round."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    source = checkpointed(1, wrapped)
    checkpoint.save(tmp_path / "saved", *source)
    checkpoint.save_safetensors(tmp_path / "full", source[0])
    ema = fsdp2.optim.EMA(source[0])
    full, local, sharded = (
        getattr(checkpoint, f"{form}_state")(*source) for form in ("full", "local", "sharded")
    )
    for state in (full or local, local, sharded):
        assert list(state["model"]) == names
        assert list(state["optimizer"]["state"]) == names
        assert state["optimizer"]["param_groups"][0]["params"] == names
    assert list(ema.state_dict()["averages"]) == names
    assert [n for n, _ in fsdp2.full_params(source[0], max_bytes=10**6)] == names
    expected = [whole(p).clone() for p in source[0].parameters()]
    moments = [whole(source[1].state[p]["exp_avg"]).clone() for p in source[0].parameters()]
    by_id = checkpoint.rekey(sharded["optimizer"], "id", model=source[0], optimizer=source[1])
    target = checkpointed(2, not wrapped)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(tmp_path / "saved", *target),
        lambda: checkpoint.load_full_state(target[0], full or None, target[1]),
        lambda: checkpoint.load_local_state(target[0], local, target[1]),
        lambda: checkpoint.load_sharded_state(target[0], sharded, target[1]),
        lambda: checkpoint.load_sharded_state(
            target[0], {"model": sharded["model"], "optimizer": by_id}, target[1]
        ),
    ]
    for call in calls:
        target = checkpointed(2, not wrapped)
        call()
        for p, value, moment in zip(target[0].parameters(), expected, moments, strict=True):
            assert torch.equal(whole(p), value)
            assert torch.equal(whole(target[1].state[p]["exp_avg"]), moment)
    target = checkpointed(2, not wrapped)
    checkpoint.load_safetensors(tmp_path / "full", target[0])
    assert torch.equal(whole(next(target[0].parameters())), expected[0])
    fsdp2.optim.EMA(target[0]).load_state_dict(ema.state_dict())


def test_names_with_wrappers_in_older_states_are_read() -> None:
    """0.1.0 and torch's FSDP1 wrote such names; so did EMA."""
    source, target = checkpointed(1, False), checkpointed(2, True)
    state = copy.deepcopy(checkpoint.full_state(*source))

    def old(name: str) -> str:
        return name.replace(".", "._checkpoint_wrapped_module.")

    state["model"] = {old(n): v for n, v in state["model"].items()}
    state["optimizer"]["state"] = {old(n): v for n, v in state["optimizer"]["state"].items()}
    group = state["optimizer"]["param_groups"][0]
    group["params"] = [old(name) for name in group["params"]]
    for model, optimizer in (target, checkpointed(3, False)):
        checkpoint.load_full_state(model, state, optimizer)
        for a, b in zip(model.parameters(), source[0].parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(optimizer.state[a]["exp_avg"], source[1].state[b]["exp_avg"])
    averages = fsdp2.optim.EMA(source[0]).state_dict()
    averages["averages"] = {old(n): v for n, v in averages["averages"].items()}
    ema = fsdp2.optim.EMA(target[0])
    ema.load_state_dict(averages)


def test_a_compiled_block_is_in_no_name() -> None:
    plain, model = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    model[0] = torch.compile(model[0], backend="eager")
    state = checkpoint.full_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(state["model"]) == ["0.weight", "0.bias"]
    assert state["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    checkpoint.load_full_state(plain, state, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert torch.equal(plain[0].weight, model[0].weight)


@ranks(2)
def test_a_plain_state_dict_is_told_where_to_go() -> None:
    """`model.load_state_dict` of whole tensors names the function for them, and changes nothing."""
    model, optimizer = made(2)
    before = snapshot(model, optimizer)
    with pytest.raises(fsdp2.ConfigError, match=r"up\.weight .*load_full_state"):
        model.load_state_dict(seeded(Net, 1).state_dict())
    assert snapshot(model, optimizer) == before
    with pytest.raises(fsdp2.ConfigError, match=r"weight .*load_full_state"):
        model.up.load_state_dict(seeded(Net, 1).up.state_dict())


@ranks(2)
def test_a_plain_root_is_told_too_where_its_units_whole_tensors_go(world_size: int) -> None:
    """Also a plain child of a unit; whole tensors may be assigned, and shards are loaded."""
    plain = {f"{n}.net.{k}": v for n in "ab" for k, v in seeded(Net, 1).state_dict().items()}
    root = nn.ModuleDict({n: nn.ModuleDict({"net": seeded(Net, 2)}) for n in "ab"})
    fsdp2.fully_shard(root["b"]["net"], mesh=make_mesh(world_size))
    before = {name: whole(value).clone() for name, value in root["b"].named_parameters()}
    said = r": b\.net\.[\w.]+ is .*load_full_state.*before this"
    with pytest.raises(fsdp2.ConfigError, match=said):
        root.load_state_dict(plain)
    for name, value in root["b"].named_parameters():
        assert torch.equal(whole(value), before[name]), name
    inner = fsdp2.fully_shard(nn.Sequential(nn.Linear(3, 3)), mesh=make_mesh(world_size))
    with pytest.raises(fsdp2.ConfigError, match=r"weight .*load_full_state"):
        inner[0].load_state_dict(nn.Linear(3, 3).state_dict())
    checkpoint.load_full_state(root, {"model": plain})
    state = root.state_dict()
    root.load_state_dict(state)
    root.load_state_dict(plain, assign=True)
    full = checkpoint.full_state(root, rank0_only=False)["model"]
    for name, value in plain.items():
        assert not isinstance(value, Tensor) or torch.equal(full[name], value), name


def test_an_ema_takes_all_of_a_state_or_nothing() -> None:
    model, _ = made(1)
    ema = fsdp2.optim.EMA(model)
    before = copy.deepcopy(ema.state_dict())
    given = copy.deepcopy(before)
    for value in given["averages"].values():
        value.add_(1)
    bad_count = {**given, "updates": "many"}
    bad_value = {**given, "averages": {**given["averages"], "scale": 3.0}}
    for state in (bad_count, bad_value, {"updates": 1}, given["averages"], None):
        with pytest.raises(fsdp2.ConfigError, match=r"EMA\.load_state_dict"):
            ema.load_state_dict(state)  # type: ignore[arg-type]  # wrong on purpose
        found = ema.state_dict()
        assert found["updates"] == before["updates"]
        for name, value in before["averages"].items():
            assert torch.equal(found["averages"][name], value), name
