"""Ways to the messages of ``fsdp2/_core/errors/plans.md``."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from tests.kit.error_ways._programs import WIDTH, Net, build, full_disk, shared_folder, train, x
from tests.kit.error_ways._way import way
from tests.kit.meshes import DEVICE


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


@way("FS917", "is unknown", "dict", name="rank")
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


@way("FS901", "without a batch", alone=True)
def _(mended: bool) -> None:
    found = fsdp2.plan(Net(), mesh=2, batch=x() if mended else None)
    found.suggest("1GB")


@way("FS901", "neither a budget", name="budget", alone=True)
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, batch=x()).suggest("1GB" if mended else None)


@way("FS901", "neither a budget", name="hardware", alone=True)
def _(mended: bool) -> None:
    hardware = "h100-nvlink-ib" if mended else None
    fsdp2.plan(Net(), mesh=2, batch=x(), hardware=hardware).suggest()


@way("FS902", "RuntimeError", alone=True)
def _(mended: bool) -> None:
    fsdp2.plan(Net(), mesh=2, batch=torch.ones(2, WIDTH if mended else WIDTH + 1))


@way("FS902", "DataDependent", name="values", alone=True)
def _(mended: bool) -> None:
    class Capped(Net):
        def forward(self, value: Tensor) -> Tensor:
            norm = value.norm()
            if mended:
                return super().forward(value / norm.clamp(min=1.0))
            return super().forward(value / norm if norm > 1.0 else value)

    fsdp2.plan(Capped(), mesh=2, batch=x())


class Out:
    """An output of a class of one's own, whose tensors are not found by themselves."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def logits(self) -> Tensor:
        return self.module.logits


@way("FS903", "loss", alone=True)
def _(mended: bool) -> None:
    class Returns(Net):
        def forward(self, value: Tensor) -> Any:
            self.logits = super().forward(value)
            return Out(self)

    def loss(out: Out) -> Tensor:
        return out.logits.sum()

    fsdp2.plan(Returns(), mesh=2, batch=x(), loss=loss if mended else None)


@way("FS903", "loss", name="no gradient", alone=True)
def _(mended: bool) -> None:
    class Chooses(Net):
        def forward(self, value: Tensor) -> Tensor:
            logits = super().forward(value)
            return logits if mended else logits.argmax(-1)

    fsdp2.plan(Chooses(), mesh=2, batch=x())


@way("FS904", "which raised AttributeError", alone=True)
def _(mended: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params) if mended else params.values()
        return torch.optim.SGD(params, lr=0.1)

    fsdp2.plan(Net(), mesh=2, batch=x(), optimizer=make)


@way("FS904", "LBFGS", name="values", alone=True)
def _(mended: bool) -> None:
    optimizer = None if mended else torch.optim.LBFGS
    fsdp2.plan(Net(), mesh=2, batch=x(), optimizer=optimizer)


@way("FS905", "mesh", "already sharded")
def _(mended: bool) -> None:
    fsdp2.plan(build(), **({} if mended else {"mesh": 2}))


@way("FS906", "one dim per role", alone=True)
def _(mended: bool) -> None:
    several = fsdp2.DataParallelMeshDims(shard=("replicate", "shard"))
    if mended:
        fsdp2.plan(Net(), mesh=8)
    else:
        fsdp2.plan(Net(), mesh=(2, 4), dp_mesh_dims=several)


@way("FS907", "0.weight", "parallelize_module")
def _(mended: bool) -> None:
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("data", "tensor"))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(Net(), mesh["tensor"], styles)
    if mended:
        fsdp2.fully_shard(model, mesh=mesh["data"])
    fsdp2.plan(model, mesh=None if mended else 2, batch=x())


@way("FS907", "torch's own fully_shard", "replace_torch", name="torch's")
def _(mended: bool) -> None:
    with fsdp2.replace_torch() if mended else contextlib.nullcontext():
        model = torch.distributed.fsdp.fully_shard(Net())
    fsdp2.plan(model, mesh=None if mended else 2, batch=x())


@way("FS908", "torch's own fully_shard")
def _(mended: bool) -> None:
    model = Net()
    for layer in model:
        fsdp2.fully_shard(layer)
    with fsdp2.replace_torch() if mended else contextlib.nullcontext():
        train(torch.distributed.fsdp.fully_shard(model))


@way("FS909", "Net", "before sharding anything")
def _(mended: bool) -> None:
    with fsdp2.replace_torch() if mended else contextlib.nullcontext():
        model = torch.distributed.fsdp.fully_shard(Net())
        with fsdp2.replace_torch():
            train(model)


@way("FS910", "'post_backward'", "FSDPModule")
def _(mended: bool) -> None:
    model = build()
    if mended:
        model.set_manual_backward_finalization(True)
        model(x()).sum().backward()
        model.finalize_backward()
    else:
        model[0]._get_fsdp_state()._fsdp_param_group.post_backward()


@way("FS911", "torch.profiler")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    fast = fsdp2.compile(model, backend="aot_eager")
    with fsdp2.record(model if mended else fast, folder):
        train(model)


@way("FS912", "another folder")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    recording = fsdp2.record(model, folder / "first")
    with recording:
        train(model)
    with fsdp2.record(model, folder / "second") if mended else recording:
        train(model)


@way("FS913", "new folder")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    for again in (False, True):
        with fsdp2.record(model, folder / "again" if again and mended else folder):
            train(model)


@way("FS915", "one of the recorded files")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    with fsdp2.record(model, folder) as recording:
        train(model)
    recording.rows(folder / f"rows{recording.rank}.jsonl" if mended else recording.path)


@way("FS915", "cannot be written", name="folder")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    with fsdp2.record(model, folder) as recording:
        train(model)
    recording.trace((folder if mended else folder / "missing") / f"{recording.rank}.json")


@way("FS916", "from 1 to 1")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    with fsdp2.record(model, folder) as recording:
        train(model)
    recording.page(step=1 if mended else 2)


@way("FS918", "KeyError", "step 1")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    seen = []

    def scalars(step: int, figures: dict[str, float]) -> None:
        seen.append(figures["seconds" if mended else "loss"])

    with fsdp2.record(model, folder, scalars=scalars):
        train(model)


@way("FS919", "too large")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    recording = fsdp2.record(model, folder)
    with recording, contextlib.nullcontext() if mended else full_disk():
        train(model)
