"""Promise: a wrong argument raises a typed error that names it, before anything changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import fsdp2
from fsdp2._core.base.errors import described
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES, WIDTH, Block, Stack, each_block, floats, loss_of, seeded
from tests.kit.parity import Pair, make_mesh, shard
from tests.kit.pool import ranks


def look(module: nn.Module) -> dict[str, Any]:
    """Return everything about a module tree that sharding may change."""
    seen: dict[str, Any] = {}
    for name, child in module.named_modules():
        seen[f"{name} class"] = type(child)
        seen[f"{name} attributes"] = sorted(vars(child))
        seen[f"{name} parameters"] = {n: id(p) for n, p in child._parameters.items()}
        seen[f"{name} buffers"] = {n: id(b) for n, b in child._buffers.items()}
        seen[f"{name} hooks"] = {n: len(v) for n, v in vars(child).items() if n.endswith("_hooks")}
    return seen


@contextmanager
def refused(
    error: type[Exception], *words: str, unchanged: nn.Module | None = None
) -> Iterator[None]:
    """Expect `error`, with every one of `words` in its message, and nothing changed."""
    before = look(unchanged) if unchanged is not None else None
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    if unchanged is not None:
        assert look(unchanged) == before, "the refused call changed the module"


def trains(model: nn.Module) -> None:
    """Assert that a model that was refused something can still be sharded and trained."""
    shard(model, CASES["stack"])
    loss_of(model(torch.randn(4, WIDTH))).backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


@ranks(1)
def test_the_error_tree() -> None:
    assert issubclass(fsdp2.ConfigError, ValueError)
    assert issubclass(fsdp2.StateError, RuntimeError)
    assert issubclass(fsdp2.UnsupportedError, NotImplementedError)


@ranks(1)
def test_a_wrong_type_is_a_type_error_too() -> None:
    """Programs written for torch's functions catch that; a wrong value is none."""
    model = shard(seeded(Stack), CASES["stack"])
    limit = model.set_reduce_scatter_max_input_buffers
    with pytest.raises(fsdp2.ConfigError) as refusal:
        limit(0)
    assert not isinstance(refusal.value, TypeError)
    for call in (
        *(functools.partial(limit, count) for count in (1.5, True, "2", None)),
        lambda: fsdp2.fully_shard(1),
        lambda: fsdp2.clip_grad_norm_(None, 1.0),
        lambda: fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr="x"),
        lambda: list(fsdp2.full_params(model, max_bytes=1e6)),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert isinstance(caught.value, fsdp2.ConfigError)


@ranks(1)
def test_not_a_module() -> None:
    for thing in ("text", None, 3, torch.zeros(2), nn.Parameter(torch.zeros(2)), Stack):
        with refused(fsdp2.ConfigError, type(thing).__name__):
            fsdp2.fully_shard(thing)


@ranks(1)
def test_a_list_with_something_else_in_it() -> None:
    model = Stack()
    with refused(fsdp2.ConfigError, "str", unchanged=model):
        fsdp2.fully_shard([model, "text"])
    with refused(fsdp2.ConfigError):
        fsdp2.fully_shard([])
    trains(model)


@pytest.mark.parametrize("kind", ["ModuleList", "ModuleDict"])
@ranks(1)
def test_a_container_without_forward(kind: str) -> None:
    blocks = [Block(), Block()]
    module = nn.ModuleList(blocks) if kind == "ModuleList" else nn.ModuleDict({"a": blocks[0]})
    with refused(fsdp2.ConfigError, kind, "forward", unchanged=module):
        fsdp2.fully_shard(module)
    with refused(fsdp2.ConfigError, kind, unchanged=module):
        fsdp2.fully_shard([Block(), module])


@ranks(2)
def test_a_container_with_a_forward_is_fine() -> None:
    class List(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
            return x

    model = fsdp2.fully_shard(List([Block(), Block()]))
    loss_of(model(torch.randn(4, WIDTH))).backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


@ranks(2)
def test_applied_twice() -> None:
    model = shard(seeded(Stack), CASES["stack"])
    with refused(fsdp2.ConfigError, "Stack", unchanged=model):
        fsdp2.fully_shard(model)
    with refused(fsdp2.ConfigError, "Block", unchanged=model):
        fsdp2.fully_shard(model.blocks[0])
    other = Block()
    with refused(fsdp2.ConfigError, unchanged=other):
        fsdp2.fully_shard([other, model.blocks[0]])
    loss_of(model(torch.randn(4, WIDTH))).backward()


@ranks(4)
def test_wrong_arguments_of_fully_shard() -> None:
    """Each is named, and changes nothing."""
    model = Stack()
    row, three = model.blocks[1].up.weight, (1, 2, 2)
    refusals: list[tuple[dict[str, Any], list[str]]] = [
        ({"mesh": init_device_mesh(DEVICE, three, mesh_dim_names=("a", "b", "c"))}, ["mesh", "3"]),
        ({"mesh": init_device_mesh(DEVICE, (2, 2))}, ["name"]),
        ({"mp_policy": torch.bfloat16}, ["mp_policy", "bfloat16"]),
        ({"offload_policy": True}, ["offload_policy"]),
        ({"ignored_params": {"inp.weight"}}, ["ignored_params"]),
    ]
    for mesh in ("cpu", (1,), 1):
        refusals.append(({"mesh": mesh}, ["mesh", described(mesh)]))
    for choice in (3, 8, 0, -2, "yes", 2.0):  # four ranks take 2, and 1 and 4 for False and True
        word = "reshard_after_forward"
        refusals.append(({word: choice}, [word, repr(choice)]))
    for dim in (2, 5, -3):
        place = {"shard_placement_fn": lambda p, dim=dim: Shard(dim) if p is row else None}
        refusals.append((place, ["up.weight", str(dim)]))
    for placement in (Partial(), 0, "Shard(0)"):
        place = {"shard_placement_fn": lambda p, placement=placement: placement}
        refusals.append((place, ["inp.weight"]))
    for kwargs, words in refusals:
        with refused(fsdp2.ConfigError, *words, unchanged=model):
            fsdp2.fully_shard(model, **kwargs)
    with refused(fsdp2.ConfigError, "int8", unchanged=model):
        fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.int8))
    with pytest.raises(TypeError):
        fsdp2.fully_shard(model, reshard_after_backward=True)
    trains(model)


@ranks(1)
def test_lazy_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with refused(fsdp2.ConfigError, "0.weight", unchanged=model):
        fsdp2.fully_shard(model)


@ranks(2)
def test_parameters_on_meta_at_the_first_forward_are_listed() -> None:
    with torch.device("meta"):
        model = Stack()
    shard(model, CASES["stack"])
    for unit in (model.blocks[0], model.blocks[1]):
        unit.to_empty(device="cpu")
    with pytest.raises(fsdp2.StateError) as caught:
        model(torch.randn(4, WIDTH))
    for word in ("inp.weight", "blocks.2.up.weight", "out.bias", "to_empty"):
        assert word in str(caught.value)
    assert "blocks.0.up.weight" not in str(caught.value)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    loss_of(model(torch.randn(4, WIDTH))).backward()


@ranks(2)
def test_a_unit_that_ran_before_its_root() -> None:
    model = shard(seeded(Stack), CASES["stack"])
    model.blocks[1](torch.randn(4, WIDTH))
    with refused(fsdp2.StateError, "blocks.1"):
        model(torch.randn(4, WIDTH))


@ranks(2)
def test_an_unknown_method_name() -> None:
    model = shard(seeded(Stack), CASES["stack"])
    with refused(fsdp2.ConfigError, "Stack", "genrate", unchanged=model):
        fsdp2.register_fsdp_forward_method(model, "genrate")
    model.__dict__["number"] = 3
    with refused(fsdp2.ConfigError, "Stack", "number", unchanged=model):
        fsdp2.register_fsdp_forward_method(model, "number")
    loss_of(model(torch.randn(4, WIDTH))).backward()


@ranks(2)
def test_a_parameter_that_is_a_dtensor_of_another_mesh() -> None:
    """A parameter that is sharded already, over the same ranks, cannot be sharded again."""
    mesh = make_mesh()
    model = Stack()
    model.inp.weight = nn.Parameter(distribute_tensor(model.inp.weight.detach(), mesh, [Shard(0)]))
    with refused(fsdp2.ConfigError, "inp.weight", unchanged=model):
        fsdp2.fully_shard(model, mesh=mesh)


@ranks(2)
def test_parameters_are_called_by_their_full_names() -> None:
    """Before the first forward and after it, in a copy, and from outside of a larger root."""

    def replaced(model: nn.Module, path: str) -> None:
        module, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def refuses(model: nn.Module, name: str) -> None:
        with refused(fsdp2.StateError, f"{name} was replaced"):
            list(fsdp2.full_params(model, max_bytes=1000))
        with refused(fsdp2.StateError, f"{name} was replaced"):
            model(torch.randn(4, WIDTH))

    for steps in (0, 1):
        for copies in (False, True):
            model = shard(seeded(Stack), CASES["stack"])
            for _ in range(steps):
                loss_of(model(torch.randn(4, WIDTH))).backward()
            model = copy.deepcopy(model) if copies else model
            replaced(model, "blocks.1.up.weight")
            refuses(model, "blocks.1.up.weight")
    outer = fsdp2.fully_shard(nn.Sequential(shard(seeded(Stack), CASES["stack"])))
    replaced(outer, "0.blocks.2.down.bias")
    refuses(outer, "0.blocks.2.down.bias")


@ranks(2)
def test_shard_model_says_of_which_unit_an_error_is() -> None:
    """What a policy says of a later unit is refused before the first one changes."""
    model = Stack()

    def policy(module: nn.Module) -> Any:
        wrong = {"reshard_after_forward": "x"} if module is model.blocks[1] else {}
        return {"conditional": False, **wrong} if isinstance(module, Block) else False

    with refused(fsdp2.ConfigError, "blocks.1: fully_shard: expected reshard", unchanged=model):
        fsdp2.wrap.shard_model(model, policy)
    lazy = nn.Sequential(nn.Sequential(nn.LazyLinear(3)))
    with refused(fsdp2.ConfigError, "shard_model: 0: 0.weight has no shape"):
        fsdp2.wrap.shard_model(lazy, {nn.Sequential})


@ranks(2)
def test_a_refused_call_leaves_a_model_that_trains_right() -> None:
    def refuse_first(model: nn.Module) -> None:
        if any(isinstance(m, fsdp2.FSDPModule) for m in model.modules()):
            return
        for block in each_block(model):
            with pytest.raises(fsdp2.ConfigError):
                fsdp2.fully_shard(block, reshard_after_forward=7)

    pair = Pair("stack", prepare=refuse_first)
    assert pair.batch().args[0].shape == floats(12).args[0].shape
    pair.train(steps=2)
