"""Meshes that the bodies of one world share: the groups below them are made once."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_made: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}


def shared_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the CPU mesh of this shape and these names."""
    key = (shape, names)
    if key not in _made:
        _made[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _made[key]


def forget_meshes() -> None:
    """Forget all meshes: their process groups are gone."""
    _made.clear()
