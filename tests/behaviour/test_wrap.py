"""Promise: `fsdp2.wrap` picks the units that torch's FSDP1 picks for the same policy.

The reference is what `FullyShardedDataParallel` wraps, read off its module names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2._core.engine.tree import unit_of
from fsdp2.wrap import hybrid_mesh, shard_model, strategy
from tests.kit.models import (
    Block,
    Case,
    Inner,
    Stack,
    TinyLM,
    floats,
    seeded,
    shared_block,
    stack,
    tied_blocks,
    tokens,
)
from tests.kit.parity import Pair, make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

POLICIES: dict[str, Any] = {
    "ModuleWrapPolicy": ModuleWrapPolicy({Block, nn.LayerNorm}),
    "CustomPolicy": CustomPolicy(lambda m: isinstance(m, Block)),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=400),
    "size_small": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    "size_all": functools.partial(
        size_based_auto_wrap_policy,
        min_num_params=100,
        force_leaf_modules={Block},
        exclude_wrap_modules=set(),
    ),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)
    ),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "always": always_wrap_policy,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "nested": stack(Inner, 2),
    "lm": lambda: TinyLM(False),
}


def wrapped_by_torch(model: nn.Module, policy: Any) -> set[str]:
    """Return the names of what torch's FSDP1 wraps below the root."""
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    names = {
        name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")
        for name, module in wrapped.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }
    return {name.rstrip(".") for name in names} - {""}


@pytest.mark.parametrize("policy", with_slow(POLICIES, ["CustomPolicy", "size", "transformer"]))
@ranks(2)
def test_the_same_units_as_torch(policy: str) -> None:
    """Every policy of torch picks here what it picks there, except what has no forward."""
    for name, build in MODELS.items():
        expected = wrapped_by_torch(seeded(build), POLICIES[policy])
        model = seeded(build)
        chosen = shard_model(model, POLICIES[policy], mesh=make_mesh())
        modules = dict(model.named_modules())
        without_forward = {n for n in expected if isinstance(modules[n], nn.ModuleList)}
        assert set(chosen) - {""} >= expected - without_forward, name
        passed_on = {f"{n}.{i}" for n in without_forward for i in range(3)}
        assert set(chosen) - {""} <= (expected - without_forward) | passed_on, name
        sharded = {n for n, m in model.named_modules() if isinstance(m, fsdp2.FSDPModule)}
        assert sharded == set(chosen)
        assert list(chosen)[-1] == ""
        assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize(
    "build", with_slow(["stack", "tied_blocks", "shared_block"], ["tied_blocks"])
)
@ranks(3)
def test_what_is_picked_trains(build: str) -> None:
    """Ties and modules with two names included, a model trains as its unsharded twin does."""
    builds = {"stack": stack(), "tied_blocks": tied_blocks, "shared_block": shared_block}
    case = Case(builds[build], lambda m: [], floats)
    pair = Pair(case, library=_Wrapping({Block, nn.LayerNorm}))
    assert sum(isinstance(m, fsdp2.FSDPModule) for m in pair.model.modules()) > 3
    pair.train()


class _Wrapping:
    """What `shard` calls in the place of a library: `shard_model` with a policy."""

    def __init__(self, policy: Any, **kwargs: Any) -> None:
        self.policy, self.kwargs = policy, kwargs

    def fully_shard(self, model: nn.Module, **kwargs: Any) -> None:
        self.chosen = shard_model(model, self.policy, **self.kwargs, **kwargs)


@ranks(2)
def test_tied_embeddings() -> None:
    """A head that a policy picks gives the weight that it shares with the root to the root."""
    case = Case(lambda: TinyLM(True), lambda m: [], tokens)
    Pair(case, library=_Wrapping(lambda m: isinstance(m, Block) or hasattr(m, "proj"))).train()


@ranks(2)
def test_keywords_of_one_module() -> None:
    """A policy's dict goes to that module alone, over the keywords of all."""
    half = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    whole = fsdp2.MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)
    model = Stack()

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.blocks[1]:
            return {"mp_policy": whole, "reshard_after_forward": False}
        if module is model.blocks[2]:
            return {}  # as torch's CustomPolicy has it: no
        return isinstance(module, Block)

    chosen = shard_model(model, CustomPolicy(choose), mp_policy=half, mesh=make_mesh())
    expected = {"mp_policy": whole, "reshard_after_forward": False}
    assert chosen == {"blocks.0": {}, "blocks.1": expected, "": {}}
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args: seen.append(m.up.weight.dtype))
    model(torch.randn(2, 13)).sum().backward()
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert unit_of(model.blocks[1]).settings.reshard_after_forward is False


@ranks(2)
def test_containers_pass_the_choice_on() -> None:
    model = Stack()
    chosen = shard_model(model, {nn.ModuleList}, mesh=make_mesh())
    assert list(chosen) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert not isinstance(model.blocks, fsdp2.FSDPModule)


@ranks(2)
def test_ignored_modules_are_not_asked_about() -> None:
    """Ignored parameters stay as they are, in every unit, and no policy sees their modules."""
    model = Stack()
    asked: list[nn.Module] = []

    def choose(module: nn.Module) -> bool:
        asked.append(module)
        return isinstance(module, Block)

    ignored = [model.blocks[0], model.blocks[1].norm]
    chosen = shard_model(model, choose, mesh=make_mesh(), ignored_states=ignored)
    assert list(chosen) == ["blocks.1", "blocks.2", ""]
    assert not {m for i in ignored for m in i.modules()} & set(asked)
    plain = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert plain == {
        n for n, _ in model.named_parameters() if n.startswith(("blocks.0.", "blocks.1.norm."))
    }
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=500)
    model = Stack()
    ignored_params = {model.blocks[0].up.weight, model.blocks[0].up.bias}
    chosen = shard_model(model, by_size, mesh=make_mesh(), ignored_params=ignored_params)
    assert list(chosen) == ["blocks.1", "blocks.2", ""]


@ranks(2)
def test_what_is_refused() -> None:
    """Nothing is sharded when a policy or a keyword is wrong."""
    model = Stack()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ({"Block"}, {}, "expected policy to contain module classes"),
        (set(), {}, "found none"),
        (Block, {}, "a set of module classes"),
        ("Block", {}, "a set of module classes"),
        (lambda m: None, {}, "returned None for inp"),
        ({Block}, {"sharding_strategy": 1}, r"Pass \*\*fsdp2.wrap.strategy"),
        ({Block}, {"ignored_modules": 1}, "Pass ignored_states"),
        (lambda m: {"mp": 1}, {}, "choice for inp"),
    ]
    for policy, kwargs, message in wrong:
        with pytest.raises(fsdp2.ConfigError, match=message):
            shard_model(model, policy, **kwargs)
    assert not any(isinstance(m, fsdp2.FSDPModule) for m in model.modules())
    with pytest.raises(fsdp2.ConfigError, match="model to be an"):
        shard_model([model], {Block})  # type: ignore[arg-type]


# --- meshes ---------------------------------------------------------------------------------------


@ranks(4)
def test_the_hybrid_mesh_follows_the_launcher(rank: int) -> None:
    """Rows are nodes, whatever order their ranks have."""
    for nodes, expected in (("0011", [[0, 1], [2, 3]]), ("0101", [[0, 2], [1, 3]])):
        for variable in ("GROUP_RANK", "SLURM_NODEID"):
            with Environment(**{variable: nodes[rank]}):
                mesh = hybrid_mesh("cpu")
            assert mesh.mesh.tolist() == expected
            assert mesh.mesh_dim_names == ("replicate", "shard")
    assert hybrid_mesh("cpu").mesh.tolist() == [[0, 1, 2, 3]]  # all have one host's name
    assert hybrid_mesh("cpu", ranks_per_node=1).mesh.tolist() == [[0], [1], [2], [3]]
    with (
        Environment(GROUP_RANK="0001"[rank]),
        pytest.raises(fsdp2.ConfigError, match=r"0: \[0, 1, 2\], 1: \[3\]"),
    ):
        hybrid_mesh("cpu")
    for wrong in (3, 0, True, "2"):
        with pytest.raises(fsdp2.ConfigError, match="ranks_per_node"):
            hybrid_mesh("cpu", ranks_per_node=wrong)  # type: ignore[arg-type]


class Environment:
    """Set variables inside, and no other that tells nodes apart."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def __enter__(self) -> None:
        self.before = dict(os.environ)
        for name in ("GROUP_RANK", "SLURM_NODEID"):
            os.environ.pop(name, None)
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self.before)


@ranks(2)
def test_strategies_that_do_not_exist_or_fit() -> None:
    for name, mesh, message in (
        ("ZERO", None, "one of FULL_SHARD"),
        ("FULL_SHARD", make_mesh(1, 2), "needs a mesh that is 1-D"),
        ("NO_SHARD", make_mesh(1, 2), r"shape \(ranks, 1\)"),
        (ShardingStrategy.HYBRID_SHARD, make_mesh(), "2-D"),
    ):
        with pytest.raises(fsdp2.ConfigError, match=message):
            strategy(name, mesh)


@ranks(2)
def test_batch_norm_in_full_precision() -> None:
    """What FSDP1 does to BatchNorm by itself under mixed precision is a policy here."""
    assert TorchMixedPrecision()._module_classes_to_ignore  # the behaviour that this replaces
    model = nn.Sequential(nn.Linear(13, 29), nn.BatchNorm1d(29), nn.Linear(29, 7))
    half = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    shard_model(
        model,
        lambda m: (
            {"mp_policy": fsdp2.MixedPrecisionPolicy(output_dtype=torch.bfloat16)}
            if isinstance(m, nn.BatchNorm1d)
            else False
        ),
        mp_policy=half,
        mesh=make_mesh(),
    )
    seen = []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    assert model(torch.randn(4, 13)).dtype == torch.float32
    assert seen == [torch.float32]


@ranks(4)
def test_a_late_unit_that_cannot_wait_on_fewer_ranks() -> None:
    """A parameter with an all-gather extension is refused there before others are sharded."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight.fsdp_pre_all_gather = model[1].weight.fsdp_post_all_gather = print
    with pytest.raises(fsdp2.ConfigError, match="extension"):
        shard_model(model, {nn.Linear}, reshard_after_forward=2)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@ranks(2)
def test_ignored_parameters_may_be_read_once_only() -> None:
    """What `parameters()` returns is used up by the first unit that asks."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    shard_model(model, {nn.Linear}, ignored_params=model[1].parameters())
    assert [isinstance(p, DTensor) for p in model.parameters()] == [True] * 2 + [False] * 2 + [
        True
    ] * 2


@pytest.mark.parametrize("wrong", ["dim", "lazy", "meta"])
@ranks(2)
def test_a_parameter_of_a_late_unit_that_cannot_be_sharded(wrong: str) -> None:
    """The units before it are left as they were."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)], nn.Linear(5, 3)))
    if wrong == "lazy":
        model[2] = nn.LazyLinear(5)
    if wrong == "meta":
        model[2].bias = nn.Parameter(torch.empty(5, device="meta"))

    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if wrong == "dim" and param is model[2].bias else 0)

    classes = [type(module) for module in model.modules()]
    values = [(p, p.detach().clone()) for p in model.parameters() if wrong == "dim"]
    for _ in range(2):
        with pytest.raises(fsdp2.ConfigError, match=r"\b2\b"):
            shard_model(model, {nn.Linear, nn.LazyLinear}, shard_placement_fn=place)
        assert [type(module) for module in model.modules()] == classes
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    for (param, before), now in zip(values, model.parameters(), strict=False):
        assert param is now
        assert torch.equal(now, before)


@ranks(2)
def test_a_block_that_was_sharded_by_hand_stays_one_unit() -> None:
    """What is in it is taken; the policy picks in the rest of the model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(2)))
    fsdp2.fully_shard(model[0], mesh=make_mesh())
    chosen = shard_model(model, {nn.Linear}, mesh=make_mesh())
    assert list(chosen) == ["1.0", "1.1", ""]
    model(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
