"""The ranks that a group talks to.

Owns ``MeshAxis`` and ``DataMesh``. An absent axis has size 1, so that no caller asks whether it
exists. It must not know parameters.

[Note: roles]
Every dim of the mesh on which sharded parameters lie has a role: to shard over, to replicate over,
or to be a parameter's own (tensor-parallel, expert-parallel), which data parallelism leaves alone.
At most one dim has the role to shard; several that a user names become one first, flattened.

[Note: layers]
With ``shard_outer`` parameters are sharded over all ranks of a 2-D mesh, as one axis, so that
whatever is kept between steps is. Within a step neighbours along the inner dim have copies among
themselves: of parameters (a smaller mesh after forward), and of sums of gradients. So a gradient
goes two ways: it is scattered over the inner axis, where each rank gets the shards of its whole
line of the outer axis, and these are scattered over that line when the step is due.
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
from fsdp2._core.base.arguments import wrong_type
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2._core.base.policy import DataParallelMeshDims
from fsdp2._core.base.warn import warn

SHARD = "shard"
REPLICATE = "replicate"
OWN = "own"


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh as this rank sees it.

    ``whole``: the axis whose ranks agree on what is sent over this one, which has some or all of
    them; None: the ranks of this one do. See [Note: several groups of some ranks] in
    ``_core.agreement.agreement``.
    """

    name: str
    size: int
    rank: int
    pg: dist.ProcessGroup | None
    whole: MeshAxis | None = dataclasses.field(default=None, compare=False)

    def separate(self) -> MeshAxis:
        """Return the axis with one more process group, which axes over these ranks share.

        Collective over the axis, the first time.
        """
        assert self.pg is not None
        group = _separate.get(self.pg)
        if group is None:
            group = _separate[self.pg] = torch_comm.group_of(
                self.global_ranks, f"reductions over {self.name}", dist.get_backend(self.pg)
            )
        return dataclasses.replace(self, pg=group, whole=self)

    @property
    def is_real(self) -> bool:
        """True if torch.distributed carries what is sent over it; tests join ranks otherwise."""
        return isinstance(self.pg, dist.ProcessGroup) and not self.is_imagined

    @property
    def is_imagined(self) -> bool:
        """True if there are no ranks: somebody plans."""
        return isinstance(self.pg, torch_dtensor.ImaginedGroup)

    @property
    def global_ranks(self) -> list[int]:
        """Ranks of the axis, as the whole program counts them."""
        if isinstance(self.pg, dist.ProcessGroup) and self.is_real:
            return dist.get_process_group_ranks(self.pg)
        return list(range(self.size))


_separate: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)

ABSENT_AXIS = MeshAxis("", 1, 0, None)


@dataclass(frozen=True)
class DataMesh:
    """The mesh that sharded parameters lie on, with the axes to shard and to replicate over.

    ``roles`` has one entry for each dim of ``mesh``; see [Note: roles]. ``full`` and ``dims`` are
    what the user passed if dims were named (``dp_mesh_dims``): then parameters come as DTensors on
    ``full``, which is ``mesh`` unless several dims are sharded over.
    """

    mesh: DeviceMesh
    shard: MeshAxis
    replicate: MeshAxis
    roles: tuple[str, ...]
    full: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    layers: DataMesh | None = None

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard.size * self.replicate.size

    @cached_property
    def scattered(self) -> MeshAxis:
        """The axis over which local gradients are reduced first. See [Note: layers]."""
        return self.shard if self.layers is None else self.layers.shard

    @cached_property
    def summed(self) -> MeshAxis:
        """The axis over which the result is reduced then: of size 1 if that was all."""
        return self.replicate if self.layers is None else self.layers.replicate

    @cached_property
    def rows_between(self) -> int:
        """Shards of a gradient that a rank has between the two."""
        return 1 if self.layers is None else self.layers.replicate.size

    @staticmethod
    def layered(mesh: DeviceMesh) -> DataMesh:
        """Read a 2-D mesh as one axis of all its ranks, in layers. See [Note: layers].

        Collective: the dims are flattened, and cut into lines again.
        """
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
        """Read a 1-D mesh as (shard), a 2-D mesh as (replicate, shard), or as ``roles`` say."""
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
        """Read a mesh of any number of dims by their names; ``check_mesh`` has seen both.

        Collective the first time, if several dims have one role: they are flattened.
        """
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
        return self  # process groups are shared by what communicates over them

    def __reduce__(self) -> tuple[Callable[..., DataMesh], tuple[Any, ...]]:
        if self.layers is not None:
            return DataMesh._in_layers, (self.mesh, self.layers.shard.size)
        if self.full is not None:
            return DataMesh.named, (self.full, self.dims)
        return DataMesh.of, (self.mesh, self.roles)

    def split(self, size: int) -> DataMesh:
        """Return the mesh on which ``size`` neighbours of the shard axis hold a whole parameter.

        Collective: every rank of the mesh must call it (once; the result is kept on the mesh).
        """
        if self.shard.is_imagined:
            return DataMesh.of(
                torch_dtensor.imagined_mesh(
                    (self.size // size, size),
                    ("outer", "inner"),
                    self.replicate.rank * self.shard.size + self.shard.rank,
                )
            )
        # only the ranks of this slice may be here, so only they make the groups
        root = torch_dtensor.root_mesh(self.mesh)
        kept: KeptOnMesh = root.__dict__.setdefault("_fsdp2_split", KeptOnMesh())
        key = (self.mesh, self.roles, size)
        if key not in kept:
            ranks = self._ranks().view(-1, size)
            groups = []
            for lines in (ranks.t().tolist(), ranks.tolist()):
                (line,) = (line for line in lines if dist.get_rank() in line)
                groups.append(torch_comm.group_of(line, "neighbours of a smaller mesh"))
            made = DataMesh.of(
                DeviceMesh.from_group(
                    groups, self.mesh.device_type, ranks, mesh_dim_names=("outer", "inner")
                )
            )
            inner = dataclasses.replace(made.shard, whole=self.shard)
            kept[key] = dataclasses.replace(made, shard=inner)
        return kept[key]

    def _ranks(self) -> torch.Tensor:
        """Return the ranks that share this rank's place on every own axis, shard axis last."""
        place = self.mesh.get_coordinate()
        assert place is not None
        grid = self.mesh.mesh
        order = sorted(
            range(grid.ndim), key=lambda dim: (OWN, REPLICATE, SHARD).index(self.roles[dim])
        )
        grid = grid.permute(order)
        for dim in order[: self.roles.count(OWN)]:
            grid = grid[place[dim]]
        return grid.reshape(-1)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())


class KeptOnMesh(dict[Any, DataMesh]):
    """What is kept on a mesh; copies and pickles of the mesh have none."""

    def __deepcopy__(self, memo: dict[int, object]) -> KeptOnMesh:
        return KeptOnMesh()

    def __reduce__(self) -> tuple[type[KeptOnMesh], tuple[()]]:
        return KeptOnMesh, ()


def _joined_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> MeshAxis:
    """Return several dims as one axis; none are an absent one."""
    if not names:
        return ABSENT_AXIS
    if len(names) == 1:
        return _axis(mesh, (mesh.mesh_dim_names or ()).index(names[0]))
    if _axis(mesh, 0).is_imagined:
        raise UnsupportedError(
            "FS906",
            "plan: dp_mesh_dims with several dims of one role is not planned, because it makes "
            "process groups. Pass mesh with one dim of each role, of the same number of ranks.",
        )
    joined = torch_dtensor.flatten_dims(mesh, names)
    torch_comm.wait_as_the_world(joined.get_group())
    return _axis(joined, 0)


def _axis(mesh: DeviceMesh, dim: int) -> MeshAxis:
    torch_comm.pause_at_exit()
    names = mesh.mesh_dim_names
    axis = MeshAxis(
        names[dim] if names else f"axis {dim}",
        mesh.size(dim),
        mesh.get_local_rank(dim),
        mesh.get_group(dim),
    )
    if axis.size > 1 and axis.is_real:
        _tell_of_timeout(axis)
    return axis


def _tell_of_timeout(axis: MeshAxis) -> None:
    """Warn, once for each world, of a user's group that waits longer than the world."""
    world, group = dist.group.WORLD, axis.pg
    if world is None or group is None or group is world or world in _told:
        return
    asked, own = torch_comm.timeout_of(world), torch_comm.timeout_of(group)
    if asked is None or own is None or own <= asked:
        return
    _told.add(world)
    warn(
        "FS231",
        f"the process group of mesh dim {axis.name!r} waits {own.total_seconds():g} s for "
        f"other ranks, and the default group {asked.total_seconds():g} s: a mesh does not take "
        "over the time-out that init_process_group was given. If a link breaks, ranks wait "
        f"that long. Set it: mesh.get_group({axis.name!r}).set_timeout(datetime.timedelta("
        f"seconds={asked.total_seconds():g})), for each dim.",
    )


_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Default groups whose users were told that a mesh waits longer."""


def default_mesh() -> DeviceMesh:
    """Return the 1-D mesh of all ranks on the accelerator, or on the CPU.

    Initialises the default process group from the launcher's environment if there is none.
    """
    require_process_group("fully_shard: mesh=None")
    return init_device_mesh(default_device_type(), mesh_shape=(dist.get_world_size(),))


def require_process_group(who: str) -> None:
    """Initialise the default process group from the environment if there is none.

    Raises:
        ConfigError: that does not tell enough.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ConfigError(
                "FS218",
                f"{who} needs a process group, and none could be initialised "
                f"({error}). Start the program with torchrun --nproc-per-node=N, or call "
                "torch.distributed.init_process_group first.",
            ) from error


def default_device_type() -> str:
    """Name the accelerator, or the CPU."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator.type if accelerator is not None else "cpu"


def check_mesh(mesh: object, dims: object = None) -> DeviceMesh:
    """Return ``mesh`` if it is one that parameters can be sharded over.

    Raises:
        ConfigError: not a ``DeviceMesh``; without ``dims``, more than two dims, or two without
            names; with ``dims``, no names, or not those that ``dims`` has.
    """
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        expected = "a fsdp2.DataParallelMeshDims or None"
        raise wrong_type("fully_shard", "dp_mesh_dims", expected, dims)
    if not isinstance(mesh, DeviceMesh):
        raise wrong_type(
            "fully_shard",
            "mesh",
            "a DeviceMesh" if dims is not None else "a DeviceMesh or None",
            mesh,
            "Make one with torch.distributed.device_mesh.init_device_mesh.",
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            "FS229",
            f"fully_shard: rank {dist.get_rank()} is not on {mesh}. Call it on the ranks of the "
            "mesh only, or pass each rank a mesh that it is on.",
        )
    if dims is not None:
        _check_dims(mesh, dims)
        return mesh
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            "FS216",
            f"fully_shard: expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found "
            f"{mesh.ndim} dims. Slice the data-parallel dims, mesh['replicate', 'shard'], or name "
            "them with dp_mesh_dims.",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigError(
            "FS216",
            "fully_shard: expected names on a 2-D mesh, found none. Pass mesh_dim_names="
            "('replicate', 'shard') to init_device_mesh.",
        )
    return mesh


def _require_ascending(mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Refuse a mesh whose ranks do not ascend along ``dims``, which together cut a tensor.

    torch sorts the ranks of a process group, and a collective hands out shards in that order. A
    DTensor takes its place from the mesh. Where the two differ, what DCP writes is in the wrong
    rows, without an error (torch 2.13.0). What ``mesh`` was sliced from is looked at, as a whole:
    ranks of another slice, which work with these along other dims, raise too.

    Raises:
        ConfigError: they do not.
    """
    if not dims:
        return
    whole, at = torch_dtensor.root_mesh(mesh), tuple(dims)
    names = [mesh.mesh_dim_names[dim] for dim in dims] if mesh.mesh_dim_names else []
    if names and set(names) <= set(whole.mesh_dim_names or ()):  # dims that were joined are not
        at = tuple((whole.mesh_dim_names or ()).index(name) for name in names)
    else:
        whole = mesh
    known = _ascending.setdefault(whole, set())
    if at in known:
        return
    with torch_modes.hidden_from_modes():
        ranks = whole.mesh.movedim(at, tuple(range(-len(at), 0)))
        lines = ranks.reshape(-1, math.prod(ranks.shape[-len(at) :])).tolist()
    if any(line != sorted(line) for line in lines):
        raise ConfigError(
            "FS230",
            f"fully_shard: found {whole}, whose ranks do not ascend along the sharded dim. torch "
            "sorts the ranks of a process group, so checkpoints would mix up rows. "
            "Sort them; to place ranks on machines, change which process has which rank.",
        )
    known.add(at)


_ascending: weakref.WeakKeyDictionary[DeviceMesh, set[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""The dims along which ranks were found to ascend: a model has many units on one mesh."""


def _check_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            "FS217",
            "fully_shard: dp_mesh_dims names dims of a mesh, and this one has no names. Pass "
            "mesh_dim_names to init_device_mesh.",
        )
    names = tuple(mesh.mesh_dim_names)
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ConfigError(
                "FS217",
                f"fully_shard: found {name!r} in dp_mesh_dims, which is no dim of the mesh. Name "
                f"some of {names}.",
            )
    places = sorted({names.index(name) for name in dims.shard_names})
    if places and places[-1] - places[0] >= len(places):
        raise ConfigError(
            "FS217",
            f"fully_shard: expected the dims to shard over to lie side by side, found "
            f"{dims.shard_names} in a mesh of {names}. Order the dims so in init_device_mesh.",
        )


def mesh_of(found: object, fqn: str, unit: DataMesh) -> DataMesh:
    """Read the ``mesh_info`` that a parameter was given: None means the mesh of its unit.

    Besides meshes it takes any object with a ``mesh``, and ``shard_mesh_dim`` and
    ``replicate_mesh_dim`` if the dims are not in the usual order, as torch's own have.

    Raises:
        ConfigError: not a mesh; one that parameters cannot be sharded over; one of other devices.
    """
    if found is None:
        return unit
    mesh = found if isinstance(found, DeviceMesh) else getattr(found, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            "FS215",
            f"{fqn}: shard_placement_fn returned mesh_info={found!r}. Return a 1-D mesh (shard), a "
            "2-D mesh (replicate, shard), an object with one as its mesh, or None.",
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
            f"{fqn}: shard_placement_fn returned a mesh of {mesh.ndim} dims, {mesh}. Slice those "
            "to replicate and to shard over from it.",
        )
    if mesh.device_type != unit.mesh.device_type:
        raise ConfigError(
            "FS215",
            f"{fqn}: shard_placement_fn returned a mesh of {mesh.device_type} devices, and "
            f"fully_shard has one of {unit.mesh.device_type}. Use one kind in a call.",
        )
    return DataMesh.of(mesh, roles)
