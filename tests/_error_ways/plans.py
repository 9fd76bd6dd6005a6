"""Ways to the messages of ``fsdp2/_errors/plans.md``."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

import fsdp2
from tests._error_ways._programs import build, shared_folder, train
from tests._error_ways._way import way


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
