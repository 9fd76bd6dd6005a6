"""The package ``spmd_types``: how plain parameters lie on a mesh, by what they are annotated with.

Owns everything that touches that package, which is never imported here: a parameter that has an
annotation comes from a program that did. It must not know what a unit or a group is. Tried on
spmd_types 0.3.1, and without its checker on 0.2.3.

[Note: annotated parameters]
On each axis of a mesh a plain parameter may be annotated as R (equal on all ranks, which compute
different things with it: gradients are sums over the ranks), I (equal, and so is what they compute:
gradients are equal) or S(dim) (each rank has its part of dim). That is all that placements of a
DTensor and of its gradient say, so the shards are such DTensors. What is computed with stays plain,
with the annotation. Data axes have to be R, or may be left out: the group averages over them.

Source: the meaning of such annotations in ``torch.distributed.fsdp``, torch 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fsdp2._core.base.errors import ConfigError

ATTRIBUTES = frozenset({"_local_type", "_partition_spec"})
"""Where the package keeps annotations: on the tensor object, as what users set is."""


@dataclass(frozen=True, eq=False)
class Annotation:
    """What a plain parameter says about itself. See [Note: annotated parameters].

    ``types`` and ``spec`` are what the whole tensor gets again; ``placements`` those of the values
    on the full mesh, ``gradients`` those of what backward computes. ``sums``: they differ, on an
    axis that the group does not average over.
    """

    types: Mapping[Any, Any]
    spec: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    sums: bool

    def __deepcopy__(self, memo: dict[int, object]) -> Annotation:
        return self  # frozen, and its mesh is shared

    def placed(self, tensor: torch.Tensor) -> DTensor:
        """Return the DTensor on the full mesh that this rank's plain values belong to."""
        local = tensor.detach()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def placed_gradient(self, grad: torch.Tensor) -> DTensor:
        """Return the DTensor that a plain gradient of this rank belongs to."""
        return DTensor.from_local(grad, self.mesh, self.gradients, run_check=False)

    def restore(self, tensor: torch.Tensor) -> None:
        """Annotate a plain tensor as the parameter was; data axes that it left out are R."""
        _package().assert_type(tensor, dict(self.types), partition_spec=self.spec)


def _package() -> Any:
    return sys.modules.get("spmd_types")


def own_attributes() -> frozenset[str]:
    """Return the names of attributes that are annotations, and no business of the user's."""
    return ATTRIBUTES if _package() is not None else frozenset()


def leave_unchecked(functions: Iterable[Callable[..., Any]]) -> None:
    """Keep the checker of types out of what runs inside of some functions, from now on.

    What moves shards is no part of the program whose types are checked. Before 0.3 the package has
    no such list: with these the checker looks into what runs inside.
    """
    register = getattr(_package(), "register_no_typecheck", None)
    if register is not None:
        for function in functions:
            register(function)


def annotation_of(
    param: torch.Tensor, fqn: str, mesh: DeviceMesh | None, data_names: Iterable[str]
) -> Annotation | None:
    """Read the annotation of a plain parameter; None if it has none.

    ``mesh`` is the full one, None if no dims of it were named, ``data_names`` those of its dims
    that are data-parallel.

    Raises:
        ConfigError: the parameter cannot be stored on the mesh by what it says.
    """
    package = _package()
    if package is None or isinstance(param, DTensor):
        return None
    own = dict(package.get_local_type(param))
    if not own:
        return None
    if mesh is None:
        raise ConfigError(
            "FS220",
            f"{fqn}: has an annotation of spmd_types, and fully_shard was not told which dims of "
            "the mesh are data-parallel. Pass the full mesh, with names, and "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...).",
        )
    return _Reader(package, fqn, mesh, frozenset(data_names)).read(param, own)


class _Reader:
    """Reads one annotation against the mesh that the parameter is to be stored on."""

    def __init__(
        self, package: Any, fqn: str, mesh: DeviceMesh, data_names: frozenset[str]
    ) -> None:
        self._package = package
        self._fqn = fqn
        self._mesh = mesh
        names = mesh.mesh_dim_names or ()
        self._axes = {name: package.MeshAxis.of(mesh.get_group(name)) for name in names}
        self._data = {name: self._axes[name] for name in names if name in data_names}

    def read(self, param: torch.Tensor, own: dict[Any, Any]) -> Annotation:
        """Check what the parameter says and translate it."""
        spec = self._package.get_partition_spec(param)
        types = {**own, **self._shards(spec)}
        computed_on = self._compute_mesh(types)
        strangers = [axis for axis in types if axis not in computed_on]
        if strangers:
            raise self._error(
                f"is annotated on {strangers}, which are no axes of the mesh that is computed on, "
                f"{sorted(map(str, computed_on))}. Annotate it on axes of that mesh."
            )
        placed = self._by_name(types)
        placements: list[Placement] = []
        gradients: list[Placement] = []
        for name in self._axes:
            placement, gradient = self._placements(name, placed.get(name))
            placements.append(placement)
            gradients.append(gradient)
        restored = {axis: own.get(axis, self._package.R) for axis in computed_on}
        sums = any(
            gradient.is_partial()
            for name, gradient in zip(self._axes, gradients, strict=True)
            if name not in self._data
        )
        return Annotation(restored, spec, self._mesh, tuple(placements), tuple(gradients), sums)

    def _error(self, rest: str) -> ConfigError:
        return ConfigError("FS220", f"{self._fqn}: {rest}")

    def _shards(self, spec: Any) -> dict[Any, Any]:
        """Return the type S(dim) of each axis that splits the parameter.

        Several axes that split one dim do so in the order of the mesh, as a DTensor has it.
        """
        found: dict[Any, Any] = {}
        order = list(self._axes.values())
        for dim, entry in enumerate(spec or ()):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            places = [order.index(axis) for axis in axes if axis in order]
            if places != sorted(places):
                raise self._error(
                    f"dim {dim} is split over {axes}, in another order than the mesh has, "
                    f"{self._mesh.mesh_dim_names}. Split it in the order of the mesh."
                )
            found.update((axis, self._package.S(dim)) for axis in axes)
        return found

    def _compute_mesh(self, types: Mapping[Any, Any]) -> tuple[Any, ...]:
        """Return the axes that the whole parameter is annotated on again."""
        stored_on = self._ranks(self._axes.values())
        if self._ranks(types) == stored_on:
            return tuple(types)
        current = self._package.current_mesh()
        if current is None:
            raise self._error(
                f"is annotated on {list(types)}, which is not all of the mesh {self._axes}. "
                "Annotate it on every axis, or call fully_shard inside of "
                "spmd_types.set_current_mesh(...) with the mesh that is computed on."
            )
        if self._ranks(current) != stored_on:
            raise self._error(
                f"expected the current mesh of spmd_types, {list(current)}, to have the ranks of "
                f"the mesh that fully_shard got, {self._axes}. Set one that does, or pass another."
            )
        return tuple(current)

    def _ranks(self, axes: Iterable[Any]) -> set[int]:
        """Return the ranks that can be reached along some axes, counted from the first of them."""
        axes = tuple(axes)
        try:
            self._package.normalize_mesh(frozenset(axes))
        except self._package.SpmdTypeError as error:
            raise self._error(
                f"is annotated on axes that overlap, {list(axes)}: {error} Annotate it on axes "
                "that are dims of one mesh."
            ) from error
        found = {0}
        for axis in axes:
            steps = axis.layout.all_ranks_from_zero()
            found = {start + step for start in found for step in steps}
        return found

    def _by_name(self, types: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the type on each named dim that is not data-parallel.

        Axes of the mesh that is computed on may split the data dims otherwise: they have to be R.
        """
        names = {axis: name for name, axis in self._axes.items() if name not in self._data}
        data_ranks = self._ranks(self._data.values())
        found = {}
        for axis, said in types.items():
            if self._ranks([axis]) <= data_ranks:
                if said is not self._package.R:
                    raise self._error(
                        f"expected R on the data-parallel axis {axis}, found {said}. fully_shard "
                        "splits the parameter there, and averages its gradient: annotate it R, or "
                        "leave the axis out."
                    )
            elif axis in names:
                found[names[axis]] = said
            else:
                raise self._error(
                    f"is annotated on {axis}, which is neither among the data-parallel dims of "
                    f"the mesh, {list(self._data)}, nor another dim of it, {list(names.values())}. "
                    "Annotate it on these."
                )
        return found

    def _placements(self, name: str, said: Any) -> tuple[Placement, Placement]:
        """Return how values and gradients lie on a dim of the mesh."""
        package = self._package
        if name in self._data:
            return Replicate(), Partial()
        if self._axes[name].size() == 1:  # nothing is kept of an annotation there
            return Replicate(), Replicate()
        if said is package.R:
            return Replicate(), Partial()
        if said is package.I:
            return Replicate(), Replicate()
        if isinstance(said, package.S):
            return Shard(said.dim), Shard(said.dim)
        found = "nothing" if said is None else repr(said)
        raise self._error(
            f"expected R, I or S(dim) on the dim {name!r} of the mesh, found {found}. Annotate it "
            "with spmd_types.assert_type: how its values lie there is not known else."
        )
