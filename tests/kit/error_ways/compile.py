"""Ways to the messages of ``fsdp2/_core/errors/compile.md``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import fsdp2
from tests.kit.error_ways._programs import Net, build, train, x
from tests.kit.error_ways._way import way
from tests.kit.meshes import DEVICE


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


@way("FS805", "during a forward or backward")
def _(mended: bool) -> None:
    model = build()
    fast = fsdp2.compile(model, backend="aot_eager")
    if not mended:
        model[0].register_forward_hook(lambda module, args, output: fast(output))
    with torch.no_grad():
        model(x())
        fast(x())


@way("FS801", "different graphs")
def _(mended: bool) -> None:
    class Branches(Net):
        def forward(self, value: Tensor) -> Tensor:
            return self[0 if mended else dist.get_rank()](value)  # type: ignore[no-any-return]

    model = Branches()
    for layer in model:
        fsdp2.fully_shard(layer)
    fast = fsdp2.compile(fsdp2.fully_shard(model), backend="aot_eager")
    fast(x()).sum().backward()


@way("FS802", "0", "hook", "blocks")
def _(mended: bool) -> None:
    model = build()
    fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16))
    if mended:
        for block in model:
            block.compile(backend="aot_eager")
        train(model)
    else:
        fsdp2.compile(model, backend="aot_eager")
