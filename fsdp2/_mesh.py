"""The ranks that a group talks to.

Owns ``MeshAxis`` and ``DataMesh``. An absent axis has size 1, so that no caller asks whether it
exists. It must not know parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._errors import ConfigError


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh as this rank sees it."""

    name: str
    size: int
    rank: int
    pg: dist.ProcessGroup | None

    def separate_group(self) -> dist.ProcessGroup:
        """Return one more process group over the same ranks, which axes over them share.

        Collective over the axis, the first time.
        """
        assert self.pg is not None
        group = _separate.get(self.pg)
        if group is None:
            made = dist.new_group(
                self.global_ranks,
                backend=dist.get_backend(self.pg),
                use_local_synchronization=True,
                group_desc=f"fsdp2 reductions over {self.name}",
            )
            assert made is not None
            group = _separate[self.pg] = made
        return group

    @property
    def is_real(self) -> bool:
        """True if torch.distributed carries what is sent over it; tests join ranks otherwise."""
        return isinstance(self.pg, dist.ProcessGroup)

    @property
    def global_ranks(self) -> list[int]:
        """Ranks of the axis, as the whole program counts them."""
        if isinstance(self.pg, dist.ProcessGroup):
            return dist.get_process_group_ranks(self.pg)
        return list(range(self.size))


_separate: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)

ABSENT_AXIS = MeshAxis("", 1, 0, None)


@dataclass(frozen=True)
class DataMesh:
    """A device mesh with the axis to shard over and the axis to replicate over."""

    mesh: DeviceMesh
    shard: MeshAxis
    replicate: MeshAxis

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard.size * self.replicate.size

    @staticmethod
    def of(mesh: DeviceMesh) -> DataMesh:
        """Read a 1-D mesh as (shard), a 2-D mesh as (replicate, shard)."""
        if mesh.ndim == 1:
            return DataMesh(mesh, _axis(mesh, 0), ABSENT_AXIS)
        return DataMesh(mesh, _axis(mesh, 1), _axis(mesh, 0))

    def __deepcopy__(self, memo: dict[int, object]) -> DataMesh:
        return self  # process groups are shared by what communicates over them

    def __reduce__(self) -> tuple[Callable[[DeviceMesh], DataMesh], tuple[DeviceMesh]]:
        return DataMesh.of, (self.mesh,)

    def split(self, size: int) -> DataMesh:
        """Return the mesh on which ``size`` neighbours of the shard axis hold a whole parameter.

        Collective: every rank of the mesh must call it (once; the result is kept on the mesh).
        """
        kept: dict[int, DataMesh] = self.mesh.__dict__.setdefault("_fsdp2_split", {})
        if size not in kept:
            ranks = self.mesh.mesh.view(-1, size)
            ((row, column),) = (ranks == dist.get_rank()).nonzero().tolist()
            # By their members alone: to other slices of the user's mesh they are other groups.
            pgs = [
                dist.new_group(line.tolist(), use_local_synchronization=True)
                for line in (ranks[:, column], ranks[row])
            ]
            smaller = DeviceMesh.from_group(
                pgs, self.mesh.device_type, mesh=ranks, mesh_dim_names=("outer", "inner")
            )
            kept[size] = DataMesh(smaller, _axis(smaller, 1), _axis(smaller, 0))
        return kept[size]

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())


def _axis(mesh: DeviceMesh, dim: int) -> MeshAxis:
    names = mesh.mesh_dim_names
    return MeshAxis(
        names[dim] if names else f"axis {dim}",
        mesh.size(dim),
        mesh.get_local_rank(dim),
        mesh.get_group(dim),
    )


def default_mesh() -> DeviceMesh:
    """Return the 1-D mesh of all ranks on the accelerator, or on the CPU.

    Initialises the default process group from the launcher's environment if there is none.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ConfigError(
                "fully_shard: mesh=None needs a process group, and none could be initialised "
                f"({error}). Start the program with torchrun, call init_process_group first, or "
                "pass mesh=init_device_mesh(...)."
            ) from error
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    kind = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(kind, mesh_shape=(dist.get_world_size(),))


def check_mesh(mesh: object) -> DeviceMesh:
    """Return ``mesh`` if it is one that parameters can be sharded over.

    Raises:
        ConfigError: not a ``DeviceMesh``; more than two dims; two dims without names.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard: expected mesh to be a DeviceMesh or None, found {type(mesh).__name__}. "
            "Make one with torch.distributed.device_mesh.init_device_mesh."
        )
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard: expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found "
            f"{mesh.ndim} dims. Slice the data-parallel dims: mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigError(
            "fully_shard: expected names on a 2-D mesh, found none. Pass mesh_dim_names="
            "('replicate', 'shard') to init_device_mesh."
        )
    return mesh
