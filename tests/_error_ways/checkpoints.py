"""Ways to the messages of ``fsdp2/_errors/checkpoints.md``."""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint
from fsdp2.checkpoint import _publish
from tests._error_ways._programs import WIDTH, build, shared_folder, trained
from tests._error_ways._way import way


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
