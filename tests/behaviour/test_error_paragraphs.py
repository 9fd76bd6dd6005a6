"""Promise: what the paragraph of an error says leads to that error, and its remedy mends it.

A `way` is the shortest program that ends in a code. It takes `mended`: then it does what the
paragraph's "What to do" says, and ends well. Both run on two ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

import fsdp2
from fsdp2 import checkpoint, debug
from fsdp2.checkpoint import _publish
from tests import _extensions
from tests._meshes import DEVICE
from tests._parity import make_mesh
from tests._pool import ranks

WIDTH = 4


@dataclass(frozen=True)
class Way:
    code: str
    words: tuple[str, ...]
    program: Callable[[bool], object]


WAYS: dict[str, Way] = {}


def way(code: str, *words: str, name: str = "") -> Callable[[Callable[[bool], object]], Any]:
    """Register a program that ends in ``code``, with each of ``words`` in the message."""

    def register(program: Callable[[bool], object]) -> Callable[[bool], object]:
        key = f"{code} {name}".strip()
        assert key not in WAYS, key
        WAYS[key] = Way(code, words, program)
        return program

    return register


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def build(**kwargs: Any) -> Any:
    """Return a sharded model: each layer, and the whole."""
    torch.manual_seed(0)
    model = Net()
    for layer in model:
        fsdp2.fully_shard(layer, **kwargs)
    return fsdp2.fully_shard(model, **kwargs)


def x() -> Tensor:
    return torch.ones(2, WIDTH)


def train(model: nn.Module, *args: Any) -> None:
    """Run one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*(args or (x(),))).sum().backward()
    optimizer.step()


# 1xx: arguments.


@way("FS101", "set_reduce_scatter_max_input_buffers", "'2'")
def _(mended: bool) -> None:
    model, found = build(), "2"  # of a configuration file
    model.set_reduce_scatter_max_input_buffers(int(found) if mended else found)
    train(model)


@way("FS102", "Compress", "torch.int8")
def _(mended: bool) -> None:
    model = build()
    hook = fsdp2.Compress(torch.bfloat16 if mended else torch.int8)
    fsdp2.register_comm_hook(model, hook)
    train(model)


@way("FS103", "SGD", "learning rate")
def _(mended: bool) -> None:
    model = build()
    fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1 if mended else -1.0)
    train(model)


# 2xx: sharding.


@way("FS201", "ModuleList")
def _(mended: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

        def forward(self, value: Tensor) -> Tensor:
            return self.layers[0](value)  # type: ignore[no-any-return]

    model = Blocks()
    if mended:
        for layer in model.layers:
            fsdp2.fully_shard(layer)
    else:
        fsdp2.fully_shard(model.layers)
    train(fsdp2.fully_shard(model))


@way("FS202", "Linear")
def _(mended: bool) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    for module in (model[0], model[2]):
        if not (mended and isinstance(module, fsdp2.FSDPModule)):
            fsdp2.fully_shard(module)
    train(fsdp2.fully_shard(model))


@way("FS202", "0.weight", "data", name="tensor parallelism on the same mesh")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        Net(),
        mesh["tensor" if mended else "data"],
        {"0": ColwiseParallel(), "1": RowwiseParallel()},
    )
    train(fsdp2.fully_shard(model, mesh=mesh["data"]))


@way("FS203", "Net", "replicate")
def _(mended: bool) -> None:
    from torch.distributed._composable import replicate

    model = Net()
    if mended:
        fsdp2.fully_shard(model, mesh=init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("r", "s")))
    else:
        fsdp2.fully_shard(replicate(model))
    train(model)


@way("FS204", "Linear", "ScriptModule")
def _(mended: bool) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    fsdp2.fully_shard(model if mended else scripted)
    train(model)


@way("FS204", "Registered", "__init_subclass__", name="init_subclass")
def _(mended: bool) -> None:
    class Base(nn.Linear):
        if mended:

            def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None: ...
        else:

            def __init_subclass__(cls, kind: str, **kwargs: Any) -> None: ...  # type: ignore[no-redef]

    class Registered(Base, kind="a"): ...

    train(fsdp2.fully_shard(Registered(WIDTH, WIDTH)))


@way("FS205", "weight", "lazy")
def _(mended: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH))
    if mended:
        with torch.no_grad():
            model(x())
    train(fsdp2.fully_shard(model))


@way("FS206", "1.kept", "torch.sparse_coo")
def _(mended: bool) -> None:
    model = Net()
    model[1].register_parameter("kept", nn.Parameter(torch.eye(WIDTH).to_sparse_coo()))
    ignored = {model[1].kept} if mended else None
    train(fsdp2.fully_shard(model, ignored_params=ignored))


@way("FS207", "1.weight", "meta")
def _(mended: bool) -> None:
    model = Net()
    model[1] = nn.Linear(WIDTH, WIDTH, device=None if mended else "meta")
    train(fsdp2.fully_shard(model))


@way("FS208", "0.weight", "meta")
def _(mended: bool) -> None:
    with torch.device("meta"):
        model = Net()
    fsdp2.fully_shard(model)
    if mended:
        fsdp2.materialize(model, DEVICE)
    train(model)


@way("FS209", "weight", "tied", "different meshes")
def _(mended: bool) -> None:
    mesh = make_mesh(2)
    other = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Net()
    model[1].weight = model[0].weight
    fsdp2.fully_shard(model[0], mesh=mesh if mended else other)
    train(fsdp2.fully_shard(model, mesh=mesh))


@way("FS210", "weight", "is shared with")
def _(mended: bool) -> None:
    model = Net()
    model[1].weight = model[0].weight
    for layer in model:
        fsdp2.fully_shard(layer)
    train(fsdp2.fully_shard(model) if mended else model)


@way("FS211", "reshard_after_forward=3")
def _(mended: bool) -> None:
    train(build(reshard_after_forward=2 if mended else 3))


@way("FS212", "Linear", "ignored_states")
def _(mended: bool) -> None:
    model = Net()
    first = [*model[0].parameters(), *model[0].buffers()] if mended else [model[0]]
    train(fsdp2.fully_shard(model, ignored_states=[*first, model[1].bias]))


@way("FS213", "0.weight", "'rows'")
def _(mended: bool) -> None:
    train(fsdp2.fully_shard(Net(), shard_placement_fn=lambda p: Shard(0) if mended else "rows"))


@way("FS214", "device_id", "shard_model")
def _(mended: bool) -> None:
    model = Net()
    given: dict[str, Any] = {} if mended else {"device_id": 0}
    fsdp2.wrap.shard_model(model, {nn.Linear}, **given)
    train(model)


@way("FS215", "0.weight", "3 dims")
def _(mended: bool) -> None:
    names = ("replicate", "shard", "tensor")
    whole = init_device_mesh(DEVICE, (1, 2, 1), mesh_dim_names=names)
    sliced = whole["replicate", "shard"]

    def place(_: object) -> Any:
        return fsdp2.ShardPlacementResult(Shard(0), mesh_info=sliced if mended else whole)

    train(fsdp2.fully_shard(Net(), mesh=sliced, shard_placement_fn=place))


@way("FS215", "0.weight", "meta devices", name="kind of device")
def _(mended: bool) -> None:
    mesh, other = make_mesh(2), init_device_mesh("meta", (2,))

    def place(_: object) -> Any:
        return fsdp2.ShardPlacementResult(Shard(0), mesh_info=mesh if mended else other)

    train(fsdp2.fully_shard(Net(), mesh=mesh, shard_placement_fn=place))


@way("FS216", "3 dims", "dp_mesh_dims")
def _(mended: bool) -> None:
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(DEVICE, (1, 2, 1), mesh_dim_names=names)
    train(fsdp2.fully_shard(Net(), mesh=mesh["replicate", "shard"] if mended else mesh))


@way("FS216", "mesh_dim_names", name="names")
def _(mended: bool) -> None:
    names = ("replicate", "shard") if mended else None
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=names)
    train(fsdp2.fully_shard(Net(), mesh=mesh))


@way("FS217", "'shards'")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))
    dims = fsdp2.DataParallelMeshDims(shard="shard" if mended else "shards")
    model = Net()
    for layer in model:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param, mesh, [Replicate()])))
    fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@way("FS219", "0.weight", "plain tensor", "DTensor")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    model = Net()
    if mended:
        for layer in model:
            for name, param in list(layer.named_parameters()):
                placed = distribute_tensor(param, mesh, [Replicate(), Replicate()])
                setattr(layer, name, nn.Parameter(placed))
    dims = fsdp2.DataParallelMeshDims(shard="data")
    fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@way("FS219", "0.weight", "cannot be joined", name="two meshes")
def _(mended: bool) -> None:
    both = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    alone = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tensor",))
    mesh = both["tensor"] if mended else alone
    model = Net()
    for layer in model:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param, mesh, [Replicate()])))
    fsdp2.fully_shard(model, mesh=both["data"])


@way("FS222", "hybrid_mesh", "ranks_per_node=3")
def _(mended: bool) -> None:
    mesh = fsdp2.wrap.hybrid_mesh(ranks_per_node=2 if mended else 3)
    train(fsdp2.fully_shard(Net(), mesh=mesh))


@way("FS223", "<root>", "conditional")
def _(mended: bool) -> None:
    model = Net()
    for layer in model:
        fsdp2.fully_shard(layer, conditional=True)
    train(fsdp2.fully_shard(model, conditional=not mended))


@way("FS224", "materialize", "Own")
def _(mended: bool) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, value: Tensor) -> Tensor:
            return value * self.weight

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.ones_(tensor)

    with torch.device("meta"):
        model = Own()
    fsdp2.fully_shard(model)
    fsdp2.materialize(model, DEVICE, init=init if mended else None)
    train(model)


@way("FS225", "materialize", "bias")
def _(mended: bool) -> None:
    def init(module: nn.Module) -> None:
        for name, tensor in module.named_parameters(recurse=False):
            if mended or name == "weight":
                torch.nn.init.ones_(tensor)

    with torch.device("meta"):
        model = fsdp2.fully_shard(Net())
    fsdp2.materialize(model, DEVICE, init=init)
    train(model)


@way("FS226", "0.weight on meta", "1.weight")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Net())
    train(model)
    model[0].to("meta")
    if mended:
        model.to("meta")
        fsdp2.materialize(model, DEVICE)
    train(model)


@way("FS227", "0.weight", "sync_from_rank0")
def _(mended: bool) -> None:
    model = Net()
    if not mended:
        fsdp2.fully_shard(model)
    fsdp2.sync_from_rank0(model)
    if mended:
        fsdp2.fully_shard(model)
    train(model)


@way("FS227", "0.weight", "materialize", name="on meta")
def _(mended: bool) -> None:
    with torch.device("meta"):
        model = Net()
    if not mended:
        fsdp2.sync_from_rank0(model)
    fsdp2.fully_shard(model)
    fsdp2.materialize(model, DEVICE, sync_from_rank0=True)
    train(model)


# 3xx: steps.


@way("FS301", "full_state", "<root>", "forward")
def _(mended: bool) -> None:
    model = build()
    if not mended:
        model[1].register_forward_hook(lambda *_: checkpoint.full_state(model))
    model(x()).sum().backward()
    checkpoint.full_state(model)


@way("FS302", "1", "full_precision_in_eval")
def _(mended: bool) -> None:
    model = build(mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True))
    loss = model(x()).sum()
    if mended:
        loss.backward()
    model.eval()
    if not mended:
        loss.backward()


@way("FS303", "0", "set_manual_backward_finalization")
def _(mended: bool) -> None:
    model = build()
    (model if mended else model[0]).set_manual_backward_finalization(True)
    model(x()).sum().backward()
    model.finalize_backward()


@way("FS304", "0", "Net")
def _(mended: bool) -> None:
    model = build()
    for module in (model, model[0]) if mended else (model[0], model):
        module(x())


@way("FS305", "0", "conditional")
def _(mended: bool) -> None:
    model = Net()
    fsdp2.fully_shard(model[0], conditional=True)
    fsdp2.fully_shard(model)
    model(x())
    train(model)
    train(model if mended else model[0])


@way("FS306", "Net", "forward")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.summon_full_params(model):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        if not mended:
            model(x())
    other = Net()
    other.load_state_dict(weights)
    other(x())


@way("FS307", "rank0_only")
def _(mended: bool) -> None:
    with fsdp2.summon_full_params(build(), rank0_only=True, writeback=not mended):
        pass


@way("FS308", "0.weight")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.summon_full_params(model), torch.no_grad():
        if mended:
            model[0].weight.fill_(1.0)
        else:
            model[0].weight = nn.Parameter(torch.ones(WIDTH + 1, WIDTH))
    train(model)


@way("FS309", "summon_full_params")
def _(mended: bool) -> None:
    model = build()
    given: dict[str, Any] = {"rank0_only": True, "writeback": False} if mended else {}
    with (
        warnings.catch_warnings(),
        mock.patch("torch.accelerator.is_available", return_value=True),  # it comes only there
    ):
        if mended:
            warnings.simplefilter("error")
        with fsdp2.summon_full_params(model, offload_to_cpu=True, **given):
            pass
    train(model)


@way("FS310", "set_manual_backward_finalization")
def _(mended: bool) -> None:
    model = build()
    model.set_manual_backward_finalization(mended)
    model(x()).sum().backward()
    model.finalize_backward()
    assert model[0].weight.grad is not None


@way("FS311", "wait()")
def _(mended: bool) -> None:
    model = build()
    model.set_manual_backward_finalization(True)
    model(x()).sum().backward()
    handle = model.finalize_backward(async_op=True)
    if mended:
        handle.wait()
    model(x())


@way("FS312", "0.weight", "requires_grad")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.no_sync(model):
        model(x()).sum().backward()
    if mended:
        model(x()).sum().backward()
    model[0].requires_grad_(False)
    model(x()).sum().backward()


@way("FS314", "1.", "create_graph")
def _(mended: bool) -> None:
    model = build()
    value = x().requires_grad_()
    loss = model(value).square().sum()
    if mended:
        (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
        (loss + gradient.square().sum()).backward()
    else:
        loss.backward(create_graph=True)
    assert model[0].weight.grad is not None


@way("FS316", "0.weight", ".data")
def _(mended: bool) -> None:
    model = build()
    if mended:
        with torch.no_grad():
            model[0].weight.copy_(torch.ones_like(model[0].weight))
    else:
        model[0].weight.data = torch.ones_like(model[0].weight)
    train(model)


@way("FS317", "0.weight")
def _(mended: bool) -> None:
    model = build()
    rows = WIDTH if mended else WIDTH + 1
    model[0].weight = nn.Parameter(torch.ones(rows, WIDTH))
    train(model)


@way("FS318", "0.weight", "torch.func")
def _(mended: bool) -> None:
    model = build()

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (x(),)).sum()

    params: dict[str, Any] = dict(model.named_parameters())
    if mended:
        params = {name: p.full_tensor() for name, p in params.items()}
    torch.func.grad(loss)(params)


@way("FS318", "0.weight", "stands in for it", name="shape")
def _(mended: bool) -> None:
    model = build()
    params: dict[str, Any] = {name: p.full_tensor() for name, p in model.named_parameters()}
    if not mended:
        params["0.weight"] = torch.ones(WIDTH + 1, WIDTH)
    functional_call(model, params, (x(),))


@way("FS319", "0.weight", "its grad")
def _(mended: bool) -> None:
    model = build()
    model(x()).sum().backward()
    weight = model[0].weight
    wrong = torch.ones(1, WIDTH)  # another part of the rows than the parameter's
    weight.grad = DTensor.from_local(
        wrong, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    if mended:
        model.zero_grad()
    model(x()).sum().backward()


@way("FS320", "0.weight", "grad_dtype")
def _(mended: bool) -> None:
    model = Net()
    model[0].weight.grad_dtype = None
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32 if mended else None)
    fsdp2.fully_shard(model, mp_policy=policy)
    model.set_reduce_scatter_unused_params(True)
    train(model)


# 4xx: ranks.


@way("FS401", "rank")
def _(mended: bool) -> None:
    model = build()
    debug.check_order(model)
    layers = list(model)
    if dist.get_rank() == 1 and not mended:
        layers.reverse()
    model.forward = lambda value: layers[1](layers[0](value))
    train(model)


@way("FS404", "sync_from_rank0", "more")
def _(mended: bool) -> None:
    model = Net()
    if dist.get_rank() == 0 or mended:
        model.register_parameter("more", nn.Parameter(torch.ones(1)))
    fsdp2.sync_from_rank0(model)


@way("FS405", "init")
def _(mended: bool) -> None:
    def init(module: nn.Module) -> None:
        for count in range(2 if dist.get_rank() == 1 and not mended else 1):
            for param in module.parameters(recurse=False):
                nn.init.normal_(param, std=count + 1.0)

    with torch.device("meta"):
        model = fsdp2.fully_shard(Net())
    fsdp2.materialize(model, DEVICE, init=init)
    train(model)


@way("FS406", "0.weight", "gradient")
def _(mended: bool) -> None:
    model = build()
    train(model)
    if mended:
        model.zero_grad()
    elif dist.get_rank() == 0:
        model[0].weight.grad = None
    with fsdp2.summon_full_params(model, with_grads=True):
        pass
    model.zero_grad()
    train(model)


@way("FS408", "runs where")
def _(mended: bool) -> None:
    model = build()
    debug.check_order(model, 1)
    layers = list(model)
    model.forward = lambda value: layers[1](layers[0](value))
    with torch.no_grad():
        for _ in range(3):
            model(x())
            if not mended:
                layers.reverse()


# 5xx: settings.


@way("FS501", "generte", "Generates")
def _(mended: bool) -> None:
    class Generates(Net):
        def generate(self, value: Tensor) -> Tensor:
            return self(value)  # type: ignore[no-any-return]

    model = fsdp2.fully_shard(Generates())
    fsdp2.register_fsdp_forward_method(model, "generate" if mended else "generte")
    model.generate(x())


@way("FS502", "generate", "generator")
def _(mended: bool) -> None:
    class Generates(Net):
        def generate(self) -> Any:
            yield self.one()

        def one(self) -> Tensor:
            return self[0].weight.sum()

    model = fsdp2.fully_shard(Generates())
    fsdp2.register_fsdp_forward_method(model, "one" if mended else "generate")
    next(model.generate())


@way("FS503", "Net", "fully_shard")
def _(mended: bool) -> None:
    model = Net()
    if mended:
        fsdp2.fully_shard(model)
    fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16))


@way("FS504", "bytes")
def _(mended: bool) -> None:
    model = build()
    model.set_memory(1_000_000 if mended else 70)
    train(model)


@way("FS505", "set_gradient_wire_dtype", "0")
def _(mended: bool) -> None:
    model = build()
    model.set_gradient_wire_dtype(torch.bfloat16)
    if mended:
        model.set_gradient_wire_dtype(None)
    fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16))
    train(model)


@way("FS506", "set_gradient_divide_factor")
def _(mended: bool) -> None:
    model = build()
    if mended:
        model.set_gradient_divide_factor(2.0)
    else:
        model.set_reduce_scatter_divide_factor(2.0)
    train(model)


@way("FS507", "gloo", "NCCL")
def _(mended: bool) -> None:
    model = build()
    if not mended:
        model[0].set_symm_mem_for_comm()
    train(model)


@way("FS508", "Compress")
def _(mended: bool) -> None:
    model, compress = build(), fsdp2.Compress(torch.bfloat16)

    def hook(state: Any, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup) -> None:
        compress(state, packed, reduced if mended else reduced[:1], group)

    fsdp2.register_comm_hook(model, hook)
    train(model)


def of_class(kind: type[_extensions.Bare], **kwargs: Any) -> Any:
    return _extensions.shard(_extensions.make((4,), kind), **kwargs)


def run(model: Any) -> None:
    model(torch.ones(2, _extensions.WIDTH)).sum().backward()


class Weight(_extensions.Int8Weight):
    """A right one, for the wrong ones to change."""


@way("FS509", "up", "fsdp_post_all_gather")
def _(mended: bool) -> None:
    class Half(_extensions.Bare):
        fsdp_pre_all_gather = Weight.fsdp_pre_all_gather
        if mended:
            fsdp_post_all_gather = Weight.fsdp_post_all_gather

    run(of_class(Half))


@way("FS510", "up", "dim 0")
def _(mended: bool) -> None:
    run(of_class(Weight, shard_placement_fn=lambda p: None if mended or p.dim() == 1 else Shard(1)))


@way("FS511", "0.up", "was sharded with")
def _(mended: bool) -> None:
    """The methods are set on tensor objects, which `.double()` copies."""
    model = _extensions.shard(_extensions.make((4,), kind=None))
    _extensions.set_methods(model[0].up)
    run(model)
    model.double()
    if mended:
        _extensions.set_methods(model[0].up)
    model(torch.ones(2, _extensions.WIDTH, dtype=torch.float64)).sum().backward()


@way("FS512", "0.up", "FS514", "takes 2 arguments")
def _(mended: bool) -> None:
    class Two(Weight):
        def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
            return (self.codes, self.scales), "metadata"

    run(of_class(Weight if mended else Two))


@way("FS512", "0.up", "FS514", "at most 16", name="too many")
def _(mended: bool) -> None:
    class Many(Weight):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (self.codes, self.scales) * (1 if mended else 9), "metadata"

    run(of_class(Many))


@way("FS513", "0.up", "fsdp_post_all_gather")
def _(mended: bool) -> None:
    class Alone(Weight):
        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
        ) -> Any:
            found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
            return found if mended or found is None else found[0]

    run(of_class(Alone))


@way("FS514", "0.up", "failed on rank 1")
def _(mended: bool) -> None:
    class Fails(Weight):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            if dist.get_rank() == 1 and not mended:
                raise ArithmeticError("no scale")
            return (self.codes, self.scales), "metadata"

    run(of_class(Fails))


@way("FS515", "without_communication")
def _(mended: bool) -> None:
    model = build()
    if mended:
        train(model)
        return
    with debug.without_communication(model):
        model(x())


# 6xx to 9xx: those that no other test comes to.


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x()).sum().backward()
    optimizer.step()
    return optimizer


MADE: list[Path] = []


def shared_folder() -> Path:
    """Return an empty folder that both ranks see, until the test ends."""
    found = [tempfile.mkdtemp(prefix="ways-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found, src=0)
    MADE.append(Path(found[0]))
    return MADE[-1]


@way("FS602", "'optimizer'", "optim_key=")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    optimizer = trained(model)
    torch.distributed.checkpoint.save(
        {
            "model": model.state_dict(),
            "optim": checkpoint.sharded_state(model, optimizer)["optimizer"],
        },
        checkpoint_id=path,
    )
    given = {"optim_key": "optim"} if mended else {}
    checkpoint.load(path, model, optimizer, **given)


@way("FS607", "rekey", "param_groups")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = optimizer.state_dict() if mended else model.state_dict()
    checkpoint.rekey(state, "name", model=model)


@way("FS607", "'state'", name="state")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = optimizer.state_dict()
    if not mended:
        state["state"] = list(state["state"].values())
    checkpoint.rekey(state, "name", model=model)


@way("FS611", "rekey", "model=")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = checkpoint.sharded_state(model, optimizer)["optimizer"]
    checkpoint.rekey(state, "id", model=model if mended else None, optimizer=optimizer)


@way("FS614", "locked")
def _(mended: bool) -> None:
    """Another job gives names to its files, and hangs meanwhile."""
    model, path = build(), shared_folder() / "saved"
    hangs = not mended and dist.get_rank() == 0
    with _publish.exclusive(path) if hangs else contextlib.nullcontext():
        dist.barrier()
        with mock.patch.object(_publish, "LOCK_WITHIN_S", 0.1):
            checkpoint.save(path, model)


@way("FS624", "0.kept", "placements")
def _(mended: bool) -> None:
    model = build()
    mesh = model[0].weight.device_mesh
    rows = 2 if mended else (1, 3)[dist.get_rank()]
    uneven = DTensor.from_local(
        torch.ones(rows, WIDTH), mesh, [Shard(0)], shape=torch.Size((4, WIDTH)), stride=(WIDTH, 1)
    )
    model[0].register_buffer("kept", uneven)
    checkpoint.full_state(model)


@way("FS706", "EMA.swapped")
def _(mended: bool) -> None:
    model = build()
    average = fsdp2.optim.EMA(model)
    with average.swapped():
        if not mended:
            average.swapped().__enter__()
    with average.swapped():
        model(x())


@way("FS707", "0.weight", "average")
def _(mended: bool) -> None:
    model = build()
    average = fsdp2.optim.EMA(model)
    model[0].weight = nn.Parameter(torch.ones(WIDTH + 1, WIDTH))
    if mended:
        average = fsdp2.optim.EMA(model)
    average.update()


@way("FS804", "overlap", "eager")
def _(mended: bool) -> None:
    fsdp2.compile(build(), backend="aot_eager" if mended else "eager", overlap=True)


def compiled() -> tuple[Any, Any]:
    model = build()
    return model, fsdp2.compile(model, backend="aot_eager")


@way("FS806", "functional_call")
def _(mended: bool) -> None:
    model, fast = compiled()
    params = {name: p.full_tensor() for name, p in model.named_parameters()}
    if mended:
        functional_call(model, params, (x(),))
    else:
        names = {name: params[name.removeprefix("model.")] for name, _ in fast.named_parameters()}
        functional_call(fast, names, (x(),))


@way("FS306", "compiled", "summon_full_params", name="compiled")
def _(mended: bool) -> None:
    model, fast = compiled()
    with fsdp2.summon_full_params(model):
        if not mended:
            fast(x())
    fast(x())


@way("FS807", "second backward")
def _(mended: bool) -> None:
    model = build()
    fast = fsdp2.compile(model, backend="aot_eager", fullgraph=True)
    with fsdp2.no_sync(model):
        fast(x()).sum().backward()
    loss = fast(x()).sum()
    loss.backward(retain_graph=not mended)
    (fast(x()).sum() if mended else loss).backward()


@way("FS808", "replicas")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = build(mesh=mesh)
    fast = fsdp2.compile(model, backend="aot_eager")
    model.set_requires_all_reduce(False)
    model(x()).sum().backward()
    model.set_requires_all_reduce(True)
    (model if mended else fast)(x()).sum().backward()


@way("FS914", "read_recordings")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    with fsdp2.record(model, folder):
        train(model)
    dist.barrier()
    fsdp2.read_recordings(*([folder] if mended else []))


@way("FS914", "rank 0 twice", name="twice")
def _(mended: bool) -> None:
    model, folders = build(), [shared_folder(), shared_folder()]
    for folder in folders:
        with fsdp2.record(model, folder):
            train(model)
    dist.barrier()
    fsdp2.read_recordings(*folders[: 1 if mended else 2])


@way("FS917", "profiles", "traceEvents")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    path = folder / f"profile{dist.get_rank()}.json"
    with fsdp2.record(model, folder), torch.profiler.profile() as profile:
        train(model)
    profile.export_chrome_trace(str(path))
    if not mended:
        path.write_text("{}")
    dist.barrier()
    profiles = {rank: folder / f"profile{rank}.json" for rank in range(2)}
    fsdp2.read_recordings(folder).trace(folder / f"trace{dist.get_rank()}.json", profiles=profiles)


@way("FS917", "not known", "dict", name="rank")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    path = folder / "profile.json"
    with fsdp2.record(model, folder):
        train(model)
    with torch.profiler.profile() as profile:
        train(model)
    dist.barrier()
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))
        found = json.loads(path.read_text())
        found.pop("distributedInfo", None)
        path.write_text(json.dumps(found))
    dist.barrier()
    profiles: Any = {0: path} if mended else [path]
    fsdp2.read_recordings(folder).trace(folder / f"trace{dist.get_rank()}.json", profiles=profiles)


@way("FS101", "Compress", "state", name="state")
def _(mended: bool) -> None:
    compress = fsdp2.Compress(torch.bfloat16, error_feedback=True)
    value = torch.ones(4)
    compress({} if mended else None, value, torch.empty(4), dist.group.WORLD)


@way("FS101", "clip_grad_norm_", "str", name="names")
def _(mended: bool) -> None:
    model = build()
    model(x()).sum().backward()
    fsdp2.clip_grad_norm_(model.parameters() if mended else dict(model.named_parameters()), 1.0)


@way("FS102", "materialize", "meta", name="meta")
def _(mended: bool) -> None:
    with torch.device("meta"):
        model = fsdp2.fully_shard(Net())
    fsdp2.materialize(model, DEVICE if mended else "meta")


# Places in the source that have a code which others have too.


@way("FS101", "plan", "hardware", name="hardware")
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, hardware=None if mended else 80)


@way("FS101", "plan", "batch", name="batch")
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, batch=x() if mended else 2)


@way("FS102", "hybrid_mesh", "'cpu:0'", name="kind of device")
def _(mended: bool) -> None:
    fsdp2.wrap.hybrid_mesh("cpu" if mended else "cpu:0", ranks_per_node=2)


@way("FS202", "weight", "full_tensor()", name="taken from another model")
def _(mended: bool) -> None:
    first, second = fsdp2.fully_shard(Net()), Net()
    weight = first[0].weight
    second[0].weight = nn.Parameter(weight.full_tensor() if mended else weight.detach())
    train(fsdp2.fully_shard(second))


@way("FS221", "up", "without all-gather extension")
def _(mended: bool) -> None:
    class Plain(Weight):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.new_zeros.default and not mended:
                return torch.zeros(args[1])
            return super().__torch_dispatch__(func, types, args, kwargs)

    run(of_class(Plain))


@way("FS618", "model-00001", "does not have it")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder() / "saved"
    checkpoint.save_safetensors(folder, model, max_file_bytes=90)
    dist.barrier()
    index = folder / "model.safetensors.index.json"
    if dist.get_rank() == 0 and not mended:
        found = json.loads(index.read_text())
        found["weight_map"]["1.bias"] = found["weight_map"]["0.weight"]
        index.write_text(json.dumps(found))
    dist.barrier()
    checkpoint.load_safetensors(folder, model, verify=mended)


@way("FS805", "inside a forward or backward")
def _(mended: bool) -> None:
    model = build()
    fast = fsdp2.compile(model, backend="aot_eager")
    if not mended:
        model[0].register_forward_hook(lambda module, args, output: fast(output))
    with torch.no_grad():
        model(x())
        fast(x())


@pytest.mark.parametrize("key", WAYS)
@ranks(2)
def test_a_way_leads_there_and_its_remedy_elsewhere(key: str) -> None:
    chosen = WAYS[key]
    if DEVICE != "cpu" and (chosen.code.startswith("FS8") or "compiled" in key):
        pytest.skip("gloo has no functional collectives for memory of a device")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        text, code = "", ""
        try:
            chosen.program(False)
        except fsdp2.FSDPError as error:
            text, code = str(error), error.code
        else:
            ours = [str(w.message) for w in warned if f"[{chosen.code}]" in str(w.message)]
            assert ours, f"no error, and no warning with {chosen.code}"
            text, code = ours[0], chosen.code
    assert f"[{chosen.code}]" in text, text  # or inside of another: which ranks failed, and why
    assert text.endswith(f"[{code}]")
    for word in chosen.words:
        assert word in text, f"{word!r} is not in {text!r}"
    chosen.program(True)
    dist.barrier()
    while MADE:
        shutil.rmtree(MADE.pop(), ignore_errors=True)


@pytest.mark.parametrize("mended", [False, True])
@ranks(1, with_process_group=False)
def test_no_process_group(mended: bool) -> None:
    """FS218: a launcher tells the processes of each other. A mesh needs a process group too."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if mended or name not in names}
    with mock.patch.dict(os.environ, kept, clear=True):
        if mended:
            fsdp2.fully_shard(Net())
            dist.destroy_process_group()
            return
        with pytest.raises(fsdp2.ConfigError, match="torchrun") as caught:
            fsdp2.fully_shard(Net())
        assert caught.value.code == "FS218"
        with pytest.raises(ValueError, match="environment variable"):
            init_device_mesh(DEVICE, (1,))
