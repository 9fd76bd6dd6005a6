"""Promise: a load that fails changes nothing, on any rank; and nothing that does not fit is loaded.

After each failure, model and optimizer are compared bit for bit with what they were.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
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
from tests.kit.in_turn import advance, assert_same_bits, shard_each
from tests.kit.models import seeded
from tests.kit.parity import assert_values, make_mesh, values_of, whole
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


def state_of(form: str, model: Any, optimizer: Any) -> Any:
    more = {"rank0_only": False} if form == "full" else {}
    return copy.deepcopy(getattr(checkpoint, f"{form}_state")(model, optimizer, **more))


def load_state(form: str, target: Any, state: Any, **options: Any) -> None:
    getattr(checkpoint, f"load_{form}_state")(target[0], state, target[1], **options)


@contextlib.contextmanager
def refused(target: Any, said: str, error: Any = fsdp2.ConfigError) -> Iterator[None]:
    """Expect an error, and nothing changed."""
    before = snapshot(*target)
    with pytest.raises(error, match=said):
        yield
    assert snapshot(*target) == before


STATES = ["full", "local", "sharded"]


def load(form: str, folder: Path, source: Any, target: Any, **options: Any) -> None:
    """Load what ``source`` has, by a state or by files."""
    if form == "files":
        if not (folder / ".metadata").exists():
            checkpoint.save(folder, *source)
        checkpoint.load(folder, *target, **options)
    else:
        load_state(form, target, state_of(form, *source), **options)


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
    dist.barrier()
    if rank == 0:
        damage(tmp_path / "saved")
    dist.barrier()
    with refused(target, r"__1_0\.distcp.*damaged", fsdp2.StateError):
        checkpoint.load(tmp_path / "saved", *target)
    target[0](torch.ones(2, WIDTH)).sum().backward()
    target[1].step()


@ranks(2)
def test_ranks_that_see_other_checkpoints(tmp_path: Path, rank: int) -> None:
    for seed in (1, 2):
        checkpoint.save(tmp_path / f"saved{seed}", *made(seed))
    target = made(3)
    with refused(target, "ranks see different checkpoints", fsdp2.StateError):
        checkpoint.load(tmp_path / f"saved{rank + 1}", *target)


@pytest.mark.parametrize("form", with_slow(["files", *STATES], ["sharded"]))
@ranks(2)
def test_what_users_wrote_may_refuse(tmp_path: Path, form: str, rank: int) -> None:
    """`set_extra_state` raises on one rank, when the optimizer has its state: it is undone."""
    source, target = made(1), made(2, 2)
    target[0].refuses = rank == 1
    with refused(target, "this note does not suit me", fsdp2.StateError):
        load(form, tmp_path / "saved", source, target)
    target[0].refuses = False
    load(form, tmp_path / "saved", source, target)
    assert snapshot(*target) == snapshot(*source)


def test_groups_of_several_classes_are_put_back(tmp_path: Path) -> None:
    """As those of one class are, if a load fails after the optimizer has its state."""

    def several(params: Any, lr: float) -> Any:
        matrices, rest = [], []
        for param in params:
            (matrices if param.dim() == 2 else rest).append(param)
        groups = [{"params": matrices}, {"params": rest, "cls": torch.optim.AdamW}]
        return fsdp2.optim.whole(torch.optim.Adam, groups, lr=lr)

    source, target = made(1, 1, several), made(2, 1, several)  # type: ignore[arg-type]  # like a class
    source[1].param_groups[0]["lr"] = 0.5
    target[0].refuses = True
    with refused(target, "this note does not suit me", fsdp2.StateError):
        load("files", tmp_path / "saved", source, target)


# --- optimizers -----------------------------------------------------------------------------------

OTHERS: list[tuple[Class, dict[str, Any]]] = [
    (torch.optim.Adagrad, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]


@pytest.mark.parametrize("form", ["files", *STATES])
@pytest.mark.parametrize("stepped", [0, 1])
def test_the_state_of_another_optimizer(tmp_path: Path, form: str, stepped: int) -> None:
    """Also with `strict=False`, and before either has made a step."""
    for cls, options in OTHERS:
        source, target = made(1, stepped, cls, **options), made(2, 2)
        if cls is torch.optim.AdamW:
            if not stepped:
                continue
            source[1].param_groups[0]["amsgrad"] = False  # moments that its options do not want
        for options in ({"strict": True}, {"strict": False}) if form != "local" else ({},):
            with refused(target, "was not saved from AdamW"):
                load(form, tmp_path / f"{cls.__name__}", source, target, **options)


NAMES = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"


@pytest.mark.parametrize("cls", NAMES.split())
def test_the_state_of_the_same_optimizer_is_loaded(cls: str) -> None:
    """Every one of torch's, stepped or not, into one stepped or not."""
    kind = getattr(torch.optim, cls)
    for steps in (0, 2):
        source = made(1, steps, kind)
        for target_steps in (0, 1):
            target = made(2, target_steps, kind)
            load_state("full", target, state_of("full", *source))
            assert snapshot(*target)["state"] == snapshot(*source)["state"]


def test_a_custom_optimizer_is_not_run() -> None:
    class Counting(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            type(self).calls += 1
            return super().step(closure)

    source, target = made(1, 2, Counting), made(2, 1, Counting)
    load_state("full", target, state_of("full", *source))
    assert Counting.calls == 3
    assert snapshot(*target)["state"] == snapshot(*source)["state"]
    state = state_of("full", *made(1, 1, torch.optim.Adagrad))
    with refused(target, "was not saved from Counting"):
        load_state("full", target, state, strict=False)


MOMENTS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda state: state["up.weight"].update(exp_average=state["up.weight"].pop("exp_avg")),
        r"up\.weight was not saved from AdamW: it lacks exp_avg and has exp_average",
    ),
    (
        lambda state: state["up.weight"].update(exp_avg=state["up.weight"]["exp_avg"].flatten()),
        r"expected exp_avg of up\.weight .* a tensor of .* shape, \(29, 13\)",
    ),
    (
        lambda state: state["down.bias"].update(exp_avg_sq=torch.ones(1)),
        r"expected exp_avg_sq of down\.bias .* a tensor of .* shape, \(13,\)",
    ),
    (
        lambda state: state["up.weight"].update(step=torch.ones(3)),
        r"expected step of up\.weight .* to be a number",
    ),
    (
        lambda state: state.update({"up.wait": state.pop("up.weight")}),
        r"1 names that the model lacks: up\.wait",
    ),
]


@ranks(2)
def test_moments_of_another_name_or_shape() -> None:
    source, target = made(1), made(2)
    full = state_of("full", *source)
    for change, message in MOMENTS:
        state = copy.deepcopy(full)
        change(state["optimizer"]["state"])
        with refused(target, message):
            load_state("full", target, state)
        sharded = {**state, "model": checkpoint.sharded_state(source[0])["model"]}
        with refused(target, message):
            load_state("sharded", target, sharded)
    load_state("full", target, state, strict=False)  # the last one passes


def test_an_optimizer_of_parameters_without_memory() -> None:
    """Loading makes new parameters of those on meta, which that optimizer would not train."""
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(fsdp2.ConfigError, match=r"up\.weight is on the meta device|scale is on"):
        checkpoint.load_full_state(model, state_of("full", *made(1)), optimizer)
    assert model.scale.is_meta


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", with_slow([float("nan"), 0.5, 1e30], [0.5]))
@ranks(2)
def test_values_that_integers_cannot_hold(tmp_path: Path, value: float) -> None:
    source, target = made(1), made(2)
    source[0].count = torch.tensor([1.0, value])
    said = r"count is torch.int64 .* cannot represent"
    for form in ("files", *STATES):
        with refused(target, said):
            load(form, tmp_path / "saved", source, target)
    with refused(target, said):
        load("full", tmp_path / "saved", source, target, from_rank0=False)
    source[0].count = torch.tensor([1.0, 2.0])
    load("full", tmp_path / "saved", source, target)
    assert target[0].count.tolist() == [1, 2]


@ranks(2)
def test_a_local_state_is_complete_and_of_the_same_shapes(rank: int) -> None:
    source, target = made(1), made(2)
    cases: list[tuple[Callable[[Any], None], str]] = [
        (lambda s: s["model"].pop("count"), "1 missing names: count"),
        (lambda s: s["model"].pop("up.bias"), r"1 missing names: up\.bias"),
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
        state = state_of("local", *source)
        if rank == 1 or "1[45]" in message:
            change(state)
        with refused(target, message):
            load_state("local", target, state)
    load_state("local", target, state_of("local", *source))
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
    checkpoint.save_safetensors(tmp_path / "full", source[0])
    ema = fsdp2.optim.EMA(source[0])
    states = {form: state_of(form, *source) for form in STATES}
    for state in states.values():
        assert list(state["model"]) == names
        assert list(state["optimizer"]["state"]) == names
        assert state["optimizer"]["param_groups"][0]["params"] == names
    assert list(ema.state_dict()["averages"]) == names
    assert [n for n, _ in fsdp2.full_params(source[0], max_bytes=10**6)] == names
    sharded = states["sharded"]
    by_id = checkpoint.rekey(sharded["optimizer"], "id", model=source[0], optimizer=source[1])
    calls: list[Callable[[Any], Any]] = [
        *(functools.partial(load, form, tmp_path / "saved", source) for form in ("files", *STATES)),
        lambda target: load_state("sharded", target, {**sharded, "optimizer": by_id}),
    ]
    for call in calls:
        target = checkpointed(2, not wrapped)
        call(target)
        assert_same_bits(target[0], source[0])
        for ours, theirs in zip(target[0].parameters(), source[0].parameters(), strict=True):
            found, expected = target[1].state[ours], source[1].state[theirs]
            assert torch.equal(whole(found["exp_avg"]), whole(expected["exp_avg"]))
    target = checkpointed(2, not wrapped)
    checkpoint.load_safetensors(tmp_path / "full", target[0])
    assert_same_bits(target[0], source[0])
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
    with refused((model, optimizer), r"up\.weight .*load_full_state"):
        model.load_state_dict(seeded(Net, 1).state_dict())
    with refused((model, optimizer), r"weight .*load_full_state"):
        model.up.load_state_dict(seeded(Net, 1).up.state_dict())


@ranks(2)
def test_a_plain_root_is_told_too_where_its_units_whole_tensors_go(world_size: int) -> None:
    """Also a plain child of a unit; whole tensors may be assigned, and shards are loaded."""
    plain = {f"{n}.net.{k}": v for n in "ab" for k, v in seeded(Net, 1).state_dict().items()}
    root = nn.ModuleDict({n: nn.ModuleDict({"net": seeded(Net, 2)}) for n in "ab"})
    fsdp2.fully_shard(root["b"]["net"], mesh=make_mesh(world_size))
    before = values_of(root["b"])
    said = r": b\.net\.[\w.]+ is .*load_full_state.*before this"
    with pytest.raises(fsdp2.ConfigError, match=said):
        root.load_state_dict(plain)
    assert_values(root["b"], before)
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
