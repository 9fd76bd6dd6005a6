"""How a drawn model is sharded: the calls of `fully_shard` that its setup means."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
import fsdp2._core.api.collect
from tests.fuzz._layers import Layer, Net, Tree
from tests.fuzz._program import Setup
from tests.kit.meshes import shared_mesh


def whole_mesh(setup: Setup) -> DeviceMesh:
    """Return the mesh of all ranks: replicas, shards, tensor, those that there are."""
    sizes = {"replicate": setup.replicas, "shard": 0, "tensor": setup.tensor}
    sizes["shard"] = setup.data_ranks // max(setup.replicas, 1)
    kept = {
        name: size
        for name, size in sizes.items()
        if name == "shard" or (name == "replicate" and size) or (name == "tensor" and size > 1)
    }
    return shared_mesh(tuple(kept.values()), tuple(kept))


def shard(net: Net, setup: Setup) -> None:
    """Apply `fully_shard` to all units, bottom up."""
    mesh = whole_mesh(setup)
    names = mesh.mesh_dim_names or ()
    outer = tuple(name for name in names if name != "tensor")
    if setup.tensor > 1:
        split_over_tensor_axis(net, mesh["tensor"])
    kwargs: dict[str, Any] = {
        "mesh": mesh if len(outer) == len(names) else mesh[outer],
        "reshard_after_forward": setup.reshard,
        "shard_placement_fn": PLACES[setup.place],
        "mp_policy": POLICIES[setup.precision],
    }
    if setup.by_dims:
        replicate = "replicate" if setup.replicas else None
        kwargs["dp_mesh_dims"] = fsdp2.DataParallelMeshDims(shard="shard", replicate=replicate)
    if setup.offload:
        kwargs["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=False)
    if any(layer.block.checkpoint != "no" for layer in net.layers()):
        for layer in net.layers():  # a sharded parameter has another dtype than a whole one
            layer.dtype = POLICIES[setup.precision].param_dtype
    usual = fsdp2._core.api.collect.PART_NBYTES
    fsdp2._core.api.collect.PART_NBYTES = setup.part_nbytes
    try:
        for tree in net.trees:
            assert isinstance(tree, Tree)
            shard_layers(list(tree.blocks), kwargs)
            fsdp2.fully_shard(tree, **kwargs)
    finally:
        fsdp2._core.api.collect.PART_NBYTES = usual


def shard_layers(layers: list[nn.Module], kwargs: dict[str, Any]) -> None:
    for layer in layers:
        assert isinstance(layer, Layer)
        shard_layers(list(layer.inner), kwargs)
    for position, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        unit = layer.block.unit
        if unit == "next":  # at the end of a tree there is none
            fsdp2.fully_shard(layers[position : position + 2], **kwargs)
        elif position and is_with_next(layers[position - 1]):
            continue
        elif unit == "own":
            fsdp2.fully_shard(layer, **kwargs)
        elif unit == "body":
            fsdp2.fully_shard(innermost(layer.body), **kwargs)
        elif unit == "conditional":
            fsdp2.fully_shard(layer, conditional=True, **kwargs)


def is_with_next(layer: nn.Module) -> bool:
    assert isinstance(layer, Layer)
    return layer.block.unit == "next"


def innermost(module: nn.Module) -> nn.Module:
    """Return the module itself, or the only one in it: a unit without modules inside."""
    children = list(module.children())
    return children[0] if len(children) == 1 else module


def split_over_tensor_axis(net: Net, mesh: DeviceMesh) -> None:
    for layer in net.layers():
        if layer.block.kind == "mlp":
            up = ColwiseParallel(use_local_output=False)
            parallelize_module(layer.body, mesh, {"up": up, "down": RowwiseParallel()})


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim else None


def _mixed(param: nn.Parameter) -> Shard | Replicate | None:
    if param.ndim == 2:
        return Shard(-1) if param.shape[0] % 2 else None
    return Replicate()


PLACES: dict[str, Any] = {
    "rows": None,
    "columns": _columns,
    "whole": lambda param: Replicate(),
    "mixed": _mixed,
}
POLICIES = {
    "same": fsdp2.MixedPrecisionPolicy(),
    "single": fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32),
    "reduce": fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64
    ),
    "half": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
