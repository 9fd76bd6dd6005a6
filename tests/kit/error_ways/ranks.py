"""Ways to the messages of ``fsdp2/_core/errors/ranks.md``."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import checkpoint, debug
from tests.kit.error_ways._programs import Net, build, full_disk, shared_folder, train, x
from tests.kit.error_ways._way import way
from tests.kit.meshes import DEVICE


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


@way("FS402", "did not participate", on=(0,))
def _(mended: bool) -> None:
    """The other process has ended."""
    group = dist.new_group()
    if dist.get_rank() == 1 and not mended:
        dist.destroy_process_group(group)
        return
    checkpoint.full_state(build(mesh=DeviceMesh.from_group(group, DEVICE)))


@way("FS403", "rank 0", "pickle")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    factor = 0.5 if mended else lambda step: 0.5
    checkpoint.save(path, model, extra={"factor": factor})


@way("FS403", "rank 1", "too large", name="full disk")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    with contextlib.nullcontext() if mended or dist.get_rank() == 0 else full_disk():
        checkpoint.save(path, model)


@way("FS407", "rank 1", on=(0,))
def _(mended: bool) -> None:
    for name, _weight in fsdp2.full_params(build(), max_bytes=64):
        if name == "0.weight" and dist.get_rank() == 1 and not mended:
            break


@way("FS409", "full_state", "rank0_only=True on rank 0", "rank0_only=False on rank 1")
def _(mended: bool) -> None:
    checkpoint.full_state(build(), rank0_only=True if mended else dist.get_rank() == 0)
