"""Mesh axes over which groups communicate. A missing axis has size 1: it needs no special case.

[Note: roles]
Every mesh dim of sharded parameters has a role: *shard* or *replicate* (parameters are sharded or
replicated over it), or *own* (used by tensor or expert parallelism, but not by data parallelism).
Several shard dims are first flattened into one, so that a mesh has at most one shard dim.

[Note: layers]
With ``shard_outer``, parameters and all persistent state are sharded over all ranks of a 2-D mesh,
as one axis. Within a step, parameters (after forward) and summed gradients are sharded only over
the inner dim. A gradient is therefore reduce-scattered twice. The first reduce-scatter is over the
inner axis; from it, each rank gets the shards of all ranks on its outer axis. The second is over
the outer axis, at the end of the step.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._core.base import torch_comm, torch_dtensor, torch_modes
from fsdp2._core.base.errors import ConfigError, UnsupportedError, wrong_type
from fsdp2._core.base.policy import DataParallelMeshDims
from fsdp2._core.base.warn import warn

SHARD = "shard"
REPLICATE = "replicate"
OWN = "own"


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh, as seen from this rank. ``whole``: the axis over which ranks agree on the
    order of operations over this axis; None: this axis itself. See [Note: one order over several
    process groups] in ``_core.agreement.agreement``."""

    name: str
    size: int
    rank: int
    pg: Any  # its process group; None for an absent axis
    whole: MeshAxis | None = dataclasses.field(default=None, compare=False)

    def separate(self) -> MeshAxis:
        """Return this axis with a separate process group. The first call is collective."""
        group = _separate.get(self.pg)
        if group is None:
            group = _separate[self.pg] = torch_comm.group_of(
                self.global_ranks, f"reductions over {self.name}", dist.get_backend(self.pg)
            )
        return dataclasses.replace(self, pg=group, whole=self)

    @property
    def is_real(self) -> bool:
        """Return True if torch.distributed sends the data; tests may simulate ranks instead."""
        return isinstance(self.pg, dist.ProcessGroup) and not self.is_imagined

    @property
    def is_imagined(self) -> bool:
        """Return True if the ranks do not exist, as during planning."""
        return isinstance(self.pg, torch_dtensor.ImaginedGroup)

    @property
    def global_ranks(self) -> list[int]:
        if self.is_real:
            return dist.get_process_group_ranks(self.pg)
        return list(range(self.size))


_separate: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()

ABSENT_AXIS = MeshAxis("", 1, 0, None)


@dataclass(frozen=True)
class DataMesh:
    """The mesh of sharded parameters: its shard axis and replicate axis, and the role of each dim
    ([Note: roles]). With ``dp_mesh_dims``, ``dims`` is the value of that argument, and ``full`` is
    the user's mesh. Parameters are then DTensors on ``full``, which differs from ``mesh`` only if
    there are several shard dims."""

    mesh: DeviceMesh
    shard: MeshAxis
    replicate: MeshAxis
    roles: tuple[str, ...]
    full: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    layers: DataMesh | None = None

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size

    @cached_property
    def scattered(self) -> MeshAxis:
        """The axis over which local gradients are reduced first. See [Note: layers]."""
        return self.shard if self.layers is None else self.layers.shard

    @cached_property
    def summed(self) -> MeshAxis:
        """The axis of the second reduction; ``ABSENT_AXIS`` if gradients are reduced only once."""
        return self.replicate if self.layers is None else self.layers.replicate

    @cached_property
    def rows_between(self) -> int:
        """Number of shards of a gradient that each rank holds between the two reductions."""
        return 1 if self.layers is None else self.layers.replicate.size

    @staticmethod
    def layered(mesh: DeviceMesh) -> DataMesh:
        """Use all ranks of a 2-D mesh as one shard axis. See [Note: layers]. Collective."""
        outer, inner = mesh.size(0), mesh.size(1)
        if _axis(mesh, 0).is_imagined:
            rank = mesh.get_local_rank(0) * inner + mesh.get_local_rank(1)
            flat: DeviceMesh = torch_dtensor.imagined_mesh((outer * inner,), ("shard",), rank)
        else:
            _require_ascending(mesh, [0, 1])
            flat = torch_dtensor.flatten_dims(mesh, tuple(mesh.mesh_dim_names or ()))
            torch_comm.wait_as_the_world(flat.get_group())
        return DataMesh._in_layers(flat, inner)

    @staticmethod
    def _in_layers(flat: DeviceMesh, size: int) -> DataMesh:
        data = DataMesh.of(flat)
        lines = data.split(size)
        across = dataclasses.replace(lines.replicate, whole=data.shard)
        return dataclasses.replace(data, layers=dataclasses.replace(lines, replicate=across))

    @staticmethod
    def of(mesh: DeviceMesh, roles: tuple[str, ...] | None = None) -> DataMesh:
        """Assign ``roles`` to mesh dims. Default: (shard) in 1-D, and (replicate, shard) in 2-D."""
        if roles is None:
            roles = (SHARD,) if mesh.ndim == 1 else (REPLICATE, SHARD)
        _require_ascending(mesh, [d for d, role in enumerate(roles) if role == SHARD])
        shard, replicate = (
            _axis(mesh, roles.index(role)) if role in roles else ABSENT_AXIS
            for role in (SHARD, REPLICATE)
        )
        return DataMesh(mesh, shard, replicate, roles)

    @staticmethod
    def named(full: DeviceMesh, dims: DataParallelMeshDims) -> DataMesh:
        """Interpret a mesh from ``check_mesh`` by its dim names. If several dims have the same
        role, they are flattened, and the first call is collective."""
        names = tuple(full.mesh_dim_names or ())
        shard = tuple(name for name in names if name in dims.shard_names)
        replicate = tuple(name for name in names if name in dims.replicate_names)
        _require_ascending(full, [names.index(name) for name in shard])
        mesh, flat_shard = full, _joined_axis(full, shard)
        if len(shard) > 1:
            start = names.index(shard[0])
            parts = [full[name] for name in names if name not in shard]
            flat = torch_dtensor.flatten_dims(full, shard)
            joined = [*parts[:start], flat, *parts[start:]]
            mesh = torch_dtensor.join_meshes(joined) if parts else flat
            names, shard = tuple(mesh.mesh_dim_names or ()), (flat_shard.name,)
        roles = tuple(
            SHARD if name in shard else REPLICATE if name in replicate else OWN for name in names
        )
        return DataMesh(mesh, flat_shard, _joined_axis(full, replicate), roles, full, dims)

    def __deepcopy__(self, memo: dict[int, object]) -> DataMesh:
        return self  # copies share process groups

    def __reduce__(self) -> tuple[Callable[..., DataMesh], tuple[Any, ...]]:
        if self.layers is not None:
            return DataMesh._in_layers, (self.mesh, self.layers.shard.size)
        if self.full is not None:
            return DataMesh.named, (self.full, self.dims)
        return DataMesh.of, (self.mesh, self.roles)

    def split(self, size: int) -> DataMesh:
        """Return a mesh (outer, inner) whose inner dim has ``size`` ranks. Collective, cached."""
        names = ("outer", "inner")
        if self.shard.is_imagined:
            rank = self.replicate.rank * self.shard.size + self.shard.rank
            shape = (self.size // size, size)
            return DataMesh.of(torch_dtensor.imagined_mesh(shape, names, rank))
        # ranks of other slices might not call split, so only the ranks of this slice create groups
        root = torch_dtensor.root_mesh(self.mesh)
        kept: KeptOnMesh = root.__dict__.setdefault("_fsdp2_split", KeptOnMesh())
        key = (self.mesh, self.roles, size)
        if key not in kept:
            ranks = self._ranks().view(-1, size)
            groups = []
            for lines in (ranks.t().tolist(), ranks.tolist()):
                (line,) = (line for line in lines if dist.get_rank() in line)
                groups.append(torch_comm.group_of(line, "neighbours of a smaller mesh"))
            kind = self.mesh.device_type
            mesh = DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)
            made = DataMesh.of(mesh)
            inner = dataclasses.replace(made.shard, whole=self.shard)
            kept[key] = dataclasses.replace(made, shard=inner)
        return kept[key]

    def _ranks(self) -> torch.Tensor:
        """Return ranks with the same *own* coordinates as this rank; the shard dim is innermost."""
        place: Any = self.mesh.get_coordinate()
        grid = self.mesh.mesh
        kinds = (OWN, REPLICATE, SHARD)
        order = sorted(range(grid.ndim), key=lambda dim: kinds.index(self.roles[dim]))
        grid = grid.permute(order)
        for dim in order[: self.roles.count(OWN)]:
            grid = grid[place[dim]]
        return grid.reshape(-1)

    @property
    def device(self) -> torch.device:
        return current_device(self.mesh.device_type)


def current_device(kind: str) -> torch.device:
    """Return this process's device of a type."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


class KeptOnMesh(dict[Any, DataMesh]):
    """A cache stored on a mesh. Copies and pickles of the mesh get an empty cache."""

    def __reduce__(self) -> tuple[type[KeptOnMesh], tuple[()]]:
        return KeptOnMesh, ()


def _joined_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> MeshAxis:
    """Return the (flattened) axis of the named dims, or ``ABSENT_AXIS`` if there are no names."""
    if not names:
        return ABSENT_AXIS
    if len(names) == 1:
        return _axis(mesh, (mesh.mesh_dim_names or ()).index(names[0]))
    if _axis(mesh, 0).is_imagined:
        raise UnsupportedError(
            "FS906",
            "plan: dp_mesh_dims with several dims for one role cannot be planned, because "
            "flattening them creates process groups. Pass a mesh of the same ranks with one dim "
            "per role.",
        )
    joined = torch_dtensor.flatten_dims(mesh, names)
    torch_comm.wait_as_the_world(joined.get_group())
    return _axis(joined, 0)


def _axis(mesh: DeviceMesh, dim: int) -> MeshAxis:
    torch_comm.pause_at_exit()
    names = mesh.mesh_dim_names
    name = names[dim] if names else f"axis {dim}"
    axis = MeshAxis(name, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
    if axis.size > 1 and axis.is_real:
        _tell_of_timeout(axis)
    return axis


def _tell_of_timeout(axis: MeshAxis) -> None:
    """Warn once if the axis's process group has a longer timeout than the default group."""
    world, group = dist.group.WORLD, axis.pg
    if world is None or group is None or group is world or world in _told:
        return
    asked, own = torch_comm.timeout_of(world), torch_comm.timeout_of(group)
    if asked is None or own is None or own <= asked:
        return
    _told.add(world)
    warn(
        "FS231",
        f"the process group of mesh dim {axis.name!r} has a timeout of {own.total_seconds():g} s, "
        f"but that of the default group is {asked.total_seconds():g} s: a mesh does not inherit "
        "the timeout of init_process_group. If a link fails, ranks wait for the longer time. Call "
        f"mesh.get_group({axis.name!r}).set_timeout(datetime.timedelta("
        f"seconds={asked.total_seconds():g})) for each dim.",
    )


_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Default groups for which the warning was issued."""


def default_mesh() -> DeviceMesh:
    """Return the 1-D mesh of all ranks. Initialises the default process group if necessary."""
    require_process_group("fully_shard: mesh=None")
    return init_device_mesh(default_device_type(), mesh_shape=(dist.get_world_size(),))


def require_process_group(who: str) -> None:
    """Initialise the default process group from the environment if there is none."""
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ConfigError(
                "FS218",
                f"{who} needs a process group, but none could be initialized ({error}). Run the "
                "program with torchrun --nproc-per-node=N, or call "
                "torch.distributed.init_process_group first.",
            ) from error


def default_device_type() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def check_mesh(mesh: object, dims: object = None) -> DeviceMesh:
    """Check and return a mesh to shard over. With ``dims``, the mesh must have dims with these
    names; otherwise, it must be 1-D, or 2-D with dim names."""
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        expected = "a fsdp2.DataParallelMeshDims or None"
        raise wrong_type("fully_shard", "dp_mesh_dims", expected, dims)
    if not isinstance(mesh, DeviceMesh):
        expected = "a DeviceMesh" if dims is not None else "a DeviceMesh or None"
        hint = "Create one with torch.distributed.device_mesh.init_device_mesh."
        raise wrong_type("fully_shard", "mesh", expected, mesh, hint)
    if mesh.get_coordinate() is None:
        raise ConfigError(
            "FS229",
            f"fully_shard: rank {dist.get_rank()} is not in {mesh}. Call fully_shard only on the "
            "ranks of the mesh, or pass each rank a mesh that contains it.",
        )
    if dims is not None:
        _check_dims(mesh, dims)
        return mesh
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            "FS216",
            f"fully_shard: expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found "
            f"{mesh.ndim} dims. Pass a slice, such as mesh['replicate', 'shard'], or name the "
            "data-parallel dims with dp_mesh_dims.",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigError(
            "FS216",
            "fully_shard: expected a 2-D mesh with dim names, found one without. Pass "
            "mesh_dim_names=('replicate', 'shard') to init_device_mesh.",
        )
    return mesh


def _require_ascending(mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Reject a mesh whose ranks do not ascend along the shard dims ``dims``. torch sorts the ranks
    of a process group, and collectives assign shards in sorted order, but a DTensor takes its
    coordinate from the mesh. If the orders differ, DCP silently writes wrong rows (torch 2.13.0).
    The check covers the full root mesh, so that ranks of other slices raise too."""
    if not dims:
        return
    whole, at = torch_dtensor.root_mesh(mesh), tuple(dims)
    names = [mesh.mesh_dim_names[dim] for dim in dims] if mesh.mesh_dim_names else []
    if names and set(names) <= set(whole.mesh_dim_names or ()):  # false for flattened dims
        at = tuple((whole.mesh_dim_names or ()).index(name) for name in names)
    else:
        whole = mesh
    with torch_modes.hidden_from_modes():
        ranks = whole.mesh.movedim(at, tuple(range(-len(at), 0)))
        lines = ranks.reshape(-1, math.prod(ranks.shape[-len(at) :])).tolist()
    if any(line != sorted(line) for line in lines):
        raise ConfigError(
            "FS230",
            f"fully_shard: found {whole}, whose ranks do not ascend along the sharded dim. torch "
            "sorts the ranks of a process group, so checkpoints would mix up rows. Sort the mesh's "
            "ranks. To move a rank to another machine, assign it to a process on that machine.",
        )


def _check_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            "FS217",
            "fully_shard: dp_mesh_dims needs a mesh with dim names, but the mesh has none. Pass "
            "mesh_dim_names to init_device_mesh.",
        )
    names = tuple(mesh.mesh_dim_names)
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ConfigError(
                "FS217",
                f"fully_shard: found {name!r} in dp_mesh_dims, but the mesh has no such dim. Use "
                f"names from {names}.",
            )
    places = sorted({names.index(name) for name in dims.shard_names})
    if places and places[-1] - places[0] >= len(places):
        raise ConfigError(
            "FS217",
            f"fully_shard: expected adjacent shard dims, found {dims.shard_names} in a mesh of "
            f"{names}. Reorder the dims in init_device_mesh.",
        )


def mesh_of(found: object, fqn: str, unit: DataMesh) -> DataMesh:
    """Return the data mesh for a parameter's ``mesh_info``; None means the mesh of its unit. Also
    accepts objects with a ``mesh`` attribute, such as torch's mesh infos. The ``shard_mesh_dim``
    and ``replicate_mesh_dim`` of such an object may specify another order of dims."""
    if found is None:
        return unit
    mesh = found if isinstance(found, DeviceMesh) else getattr(found, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            "FS215",
            f"{fqn}: shard_placement_fn returned mesh_info={found!r}. Return a 1-D mesh (shard), a "
            "2-D mesh (replicate, shard), an object whose mesh is one of these, or None.",
        )
    chosen = {
        getattr(found, "replicate_mesh_dim", None): REPLICATE,
        getattr(found, "shard_mesh_dim", None): SHARD,
    }
    chosen.pop(None, None)
    roles = tuple(chosen.get(dim, OWN) for dim in range(mesh.ndim)) if chosen else None
    if OWN in (roles or ()) or (roles is None and mesh.ndim not in (1, 2)):
        raise ConfigError(
            "FS215",
            f"{fqn}: shard_placement_fn returned a mesh of {mesh.ndim} dims, {mesh}. Return a "
            "slice of it with only the replicate and shard dims.",
        )
    if mesh.device_type != unit.mesh.device_type:
        raise ConfigError(
            "FS215",
            f"{fqn}: shard_placement_fn returned a mesh of {mesh.device_type} devices, but the "
            f"mesh of fully_shard has {unit.mesh.device_type} devices. Use one device type.",
        )
    return DataMesh.of(mesh, roles)
