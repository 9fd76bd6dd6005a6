"""Meshes that the bodies of one world share: the groups below them are made once."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.kit import sim as simulator

DEVICE = os.environ.get("FSDP2_TEST_DEVICE", "cpu")
"""Where bodies make their models, batches and meshes: docs/testing.md, "On a GPU"."""

BACKEND = os.environ.get("FSDP2_TEST_BACKEND", "gloo")
"""What carries the tensors of ranks that share one GPU: gloo, or nccl."""

_made: dict[tuple[object, ...], DeviceMesh] = {}


def shared_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of this shape and these names."""
    key = (
        dist.group.WORLD,
        DEVICE,
        shape,
        names,
    )  # ranks that are threads have worlds of their own
    if key not in _made:
        _made[key] = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    return _made[key]


def use_device(kind: str) -> None:
    """Let a rank make its tensors on the device of the bodies; ranks share the first of a kind."""
    global DEVICE
    DEVICE = kind
    if DEVICE == "sim":
        simulator.load()
    if DEVICE != "cpu":
        torch.accelerator.set_device_index(0)
        torch.empty(0, device=DEVICE)  # else torch gives each rank a device of its own
        torch.set_default_device(DEVICE)


def backend_of(kind: str) -> str:
    """Return what a process group is made with, for tensors on such a device and on the host."""
    if kind == "sim":
        return "cpu:gloo,sim:sim"
    if kind == "cuda" and BACKEND == "nccl":
        share_a_gpu_over_nccl()
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def share_a_gpu_over_nccl() -> None:
    """Let NCCL take the ranks of one GPU for ranks of several hosts.

    It refuses two ranks on one GPU of one host, and reads what follows once, for its first
    communicator. So ranks meet over sockets of the loopback device, and not through memory.
    """
    os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def random_numbers(seed: int) -> torch.Generator:
    """Return a source of random numbers on the device of the bodies."""
    return torch.Generator(DEVICE).manual_seed(seed)


def forget_meshes() -> None:
    """Forget all meshes: their process groups are gone."""
    _made.clear()
