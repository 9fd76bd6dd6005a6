"""Ways to the messages of ``fsdp2/_core/errors/sharding.md``."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from tests.kit.error_ways._programs import WIDTH, Net, build, train, x
from tests.kit.error_ways._way import way
from tests.kit.error_ways.settings import Weight, of_class, run
from tests.kit.in_turn import shard_each
from tests.kit.meshes import DEVICE
from tests.kit.parity import make_mesh


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
        shard_each(*model.layers)
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


@way("FS202", "Linear", "enclosing", name="the model before its layers")
def _(mended: bool) -> None:
    model = Net()
    for module in (*model, model) if mended else (model, *model):
        fsdp2.fully_shard(module)
    train(model)


@way("FS202", "Linear", "enclosing", name="the model before a list with its layer")
def _(mended: bool) -> None:
    other, model = nn.Linear(WIDTH, WIDTH), Net()
    for module in ([other, model[0]], model) if mended else (model, [other, model[0]]):
        fsdp2.fully_shard(module)
    train(model)


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
    shard_each(*model)
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


@way("FS219", "0.weight", "can be combined", name="two meshes")
def _(mended: bool) -> None:
    both = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    alone = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tensor",))
    mesh = both["tensor"] if mended else alone
    model = Net()
    for layer in model:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param, mesh, [Replicate()])))
    fsdp2.fully_shard(model, mesh=both["data"])


def tensor_parallel(chosen: str | None) -> None:
    """Shard a tensor-parallel model over one dim of its mesh, all of it, or no mesh."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(Net(), mesh["tensor"], plan)
    given = {"": None, "all": mesh, "data": mesh["data"]}[chosen or ""]
    train(fsdp2.fully_shard(model, mesh=given))


@way("FS219", "0.weight", "mesh=mesh['data']", name="no mesh")
def _(mended: bool) -> None:
    tensor_parallel("data" if mended else None)


@way("FS219", "0.weight", "mesh=mesh['data']", name="the whole mesh")
def _(mended: bool) -> None:
    tensor_parallel("data" if mended else "all")


@way("FS222", "hybrid_mesh", "ranks_per_node=3")
def _(mended: bool) -> None:
    mesh = fsdp2.wrap.hybrid_mesh(ranks_per_node=2 if mended else 3)
    train(fsdp2.fully_shard(Net(), mesh=mesh))


@way("FS223", "<root>", "conditional")
def _(mended: bool) -> None:
    model = Net()
    shard_each(*model, conditional=True)
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


@way("FS202", "weight", "full_tensor()", name="taken from another model")
def _(mended: bool) -> None:
    first, second = fsdp2.fully_shard(Net()), Net()
    weight = first[0].weight
    second[0].weight = nn.Parameter(weight.full_tensor() if mended else weight.detach())
    train(fsdp2.fully_shard(second))


@way("FS221", "up", "without an all-gather extension")
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


@way("FS220", "0.weight", "dp_mesh_dims")
def _(mended: bool) -> None:
    spmd = pytest.importorskip("spmd_types")
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    model = Net()
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group(name): spmd.R for name in ("data", "tensor")})
    if mended:
        fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="data"))
    else:
        fsdp2.fully_shard(model, mesh=mesh["data"])


@way("FS228", "Conv2d")
def _(mended: bool) -> None:
    model = Net()
    fsdp2.wrap.shard_model(model, {nn.Linear if mended else nn.Conv2d})
    train(model)


@way("FS228", "ModuleWrapPolicy", name="a policy of torch's")
def _(mended: bool) -> None:
    model = Net()
    fsdp2.wrap.shard_model(model, ModuleWrapPolicy({nn.Linear if mended else nn.Conv2d}))
    train(model)


@way("FS228", "transformer_auto_wrap_policy", name="another policy of torch's")
def _(mended: bool) -> None:
    model = Net()
    classes = {nn.Linear if mended else nn.Conv2d}
    fsdp2.wrap.shard_model(
        model, partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    )
    train(model)


@way("FS228", "Conv2d", name="on purpose")
def _(mended: bool) -> None:
    policy = None if mended else {nn.Conv2d}
    fsdp2.plan(Net(), mesh=8, policy=policy)


@way("FS229", "rank 1", on=(1,))
def _(mended: bool) -> None:
    mesh = DeviceMesh(DEVICE, [0])
    if dist.get_rank() == 0 or not mended:
        train(fsdp2.fully_shard(Net(), mesh=mesh))


@way("FS230", "DeviceMesh")
def _(mended: bool) -> None:
    ranks = list(range(dist.get_world_size()))
    train(fsdp2.fully_shard(Net(), mesh=DeviceMesh(DEVICE, ranks if mended else ranks[::-1])))


@way("FS230", "DeviceMesh", name="several dims as one")
def _(mended: bool) -> None:
    ranks = torch.arange(dist.get_world_size())
    mesh = DeviceMesh(DEVICE, (ranks if mended else ranks.flip(0))[None], mesh_dim_names=("a", "b"))
    dims = fsdp2.DataParallelMeshDims(shard=("a", "b"))
    train(fsdp2.fully_shard(Net(), mesh=mesh, dp_mesh_dims=dims))


@way("FS230", "DeviceMesh", name="some lines of it")
def _(mended: bool) -> None:
    """Every rank sees it, those too whose own place would be right."""
    ranks = torch.tensor([[0], [1]]) if mended else torch.tensor([[1], [0]])
    mesh = DeviceMesh(DEVICE, ranks, mesh_dim_names=("shard", "replicate"))
    dims = fsdp2.DataParallelMeshDims(shard="shard", replicate="replicate")
    train(fsdp2.fully_shard(Net(), mesh=mesh, dp_mesh_dims=dims))


@way("FS231", "set_timeout")
def _(mended: bool) -> None:
    group = dist.new_group()
    if mended:
        group.set_timeout(timedelta(seconds=10))
    mesh = DeviceMesh.from_group(group, DEVICE, mesh_dim_names=("shard",))
    train(fsdp2.fully_shard(Net(), mesh=mesh))


@way("FS232", "does not support this view", "full_tensor")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Net(), shard_placement_fn=lambda _: fsdp2.Whole())
    weight = model[0].weight
    (weight.full_tensor() if mended else weight)[0, 0]
    train(model)


@way("FS234", "keeps parameters unsharded", "reshard_after_forward")
def _(mended: bool) -> None:
    keeps = None if mended else True
    train(fsdp2.fully_shard(Net(), shard="gradients", reshard_after_forward=keeps))


@way("FS234", "CPUOffloadPolicy", name="offload")
def _(mended: bool) -> None:
    policy = fsdp2.OffloadPolicy() if mended else fsdp2.CPUOffloadPolicy()
    train(fsdp2.fully_shard(Net(), shard="optimizer", offload_policy=policy))


@way("FS234", "stay unsharded", name="a setter")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Net(), shard="parameters" if mended else "gradients")
    model.set_reshard_after_forward(True)
    train(model)


@way("FS234", "all ranks form one axis", name="outer and whole")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("outer", "inner"))
    outer = None if mended else "optimizer"
    train(fsdp2.fully_shard(Net(), mesh=mesh, shard="gradients", shard_outer=outer))


@way("FS234", "several ranks along each", name="outer alone")
def _(mended: bool) -> None:
    outer = None if mended else "optimizer"
    train(fsdp2.fully_shard(Net(), shard_outer=outer))
