"""Ways to the messages of ``fsdp2/_core/errors/arguments.md``."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fsdp2
from tests.kit.error_ways._programs import Net, build, train, x
from tests.kit.error_ways._way import way
from tests.kit.meshes import DEVICE
from tests.kit.parity import make_mesh


@way("FS101", "set_reduce_scatter_max_input_buffers", "'2'")
def _(mended: bool) -> None:
    model, found = build(), "2"  # of a configuration file
    model.set_reduce_scatter_max_input_buffers(int(found) if mended else found)
    train(model)


@way("FS102", "Compress", "torch.int16")
def _(mended: bool) -> None:
    model = build()
    hook = fsdp2.Compress(torch.bfloat16 if mended else torch.int16)
    fsdp2.register_comm_hook(model, hook)
    train(model)


@way("FS103", "SGD", "learning rate")
def _(mended: bool) -> None:
    model = build()
    fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1 if mended else -1.0)
    train(model)


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


@way("FS101", "plan", "hardware", name="hardware")
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, hardware=None if mended else 80)


@way("FS101", "plan", "batch", name="batch")
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, batch=x() if mended else 2)


@way("FS102", "hybrid_mesh", "'cpu:0'", name="kind of device")
def _(mended: bool) -> None:
    fsdp2.wrap.hybrid_mesh("cpu" if mended else "cpu:0", ranks_per_node=2)


@way("FS101", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)", name="a dtype for a policy")
def _(mended: bool) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    build(mp_policy=policy if mended else torch.bfloat16)


@way("FS101", "mesh=(2,)", name="a mesh for a plan")
def _(mended: bool) -> None:
    mesh = make_mesh(2)
    fsdp2.plan(Net(), mesh=tuple(mesh.shape) if mended else mesh)
