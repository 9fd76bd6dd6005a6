"""What public programs read of torch's own parameter groups, as read-only values of ours.

Owns the names that stand for ours, and the error for all others. It must not know when anything
happens in a step.

[Note: what tools may read]
Torch's FSDP2 keeps a state with parameter groups on each module, and programs read some of it: how
many ranks share a parameter, which dtype a unit computes in, whether a module is sharded already
(docs/clients.md lists the names and who reads them). These are true here too. What would act on
torch's internals, and every write, is an error. One of torch's groups is all parameters of a unit
on one mesh, so large parts of a root are in the group of the rest. The objects live as long as the
unit: programs use them as keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn as nn

from fsdp2._base import torch_modules
from fsdp2._base.errors import UnsupportedError, coded
from fsdp2._comm.mesh import REPLICATE, SHARD, DataMesh
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.param import FSDPParam

ADVICE = (
    "fsdp2.units(module) tells what is sharded and how, fsdp2.debug what a step does. What acts on "
    "a unit are the methods of FSDPModule."
)


def missing(what: str, name: str, of: object) -> AttributeError:
    """Make the error for a name that only torch's own object has."""
    return AttributeError(
        coded(
            "FS910",
            f"the {what} of a module that fsdp2 has sharded has no {name!r}: it is not torch's. "
            f"{ADVICE}",
        ),
        name=name,
        obj=of,
    )


class View:
    """Read-only, and an error with a remedy for what it has not."""

    what = "state"

    if not TYPE_CHECKING:  # or every misspelt name would pass the type checker

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self.what, name, self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            coded(
                "FS910",
                f"the {self.what} of a module that fsdp2 has sharded is read-only, and {name!r} "
                f"was set. {ADVICE}",
            ),
            name=name,
            obj=self,
        )


class ParamView(View):
    """One parameter, by the names that torch's ``FSDPParam`` has for what it holds."""

    what = "parameter state"

    def __init__(self, param: FSDPParam, data: DataMesh) -> None:
        vars(self).update(_param=param, _data=data)

    @property
    def sharded_param(self) -> nn.Parameter:
        param: FSDPParam = vars(self)["_param"]
        return param.sharded

    @property
    def sharded_size(self) -> torch.Size:
        """Size of this rank's shard, without padding."""
        param, data = vars(self)["_param"], vars(self)["_data"]
        return torch.Size(param.placement.layout.shard_shape(data.shard.rank))

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(vars(self)["_param"].placement.layout.shape)

    @property
    def _param_fqn(self) -> str:
        fqn: str = vars(self)["_param"].fqn
        return fqn


class GroupView(View):
    """A unit's parameters on one mesh, by the names of torch's ``FSDPParamGroup``."""

    what = "parameter group"

    def __init__(self, data: DataMesh) -> None:
        vars(self).update(data=data, views={})

    def take(self, groups: list[ParamGroup]) -> None:
        """Show the parameters that these groups have now; views of known ones stay."""
        known, data = vars(self)["views"], vars(self)["data"]
        params = [param for group in groups for param in group.params]
        vars(self)["views"] = {p: known.get(p) or ParamView(p, data) for p in params}

    @property
    def fsdp_params(self) -> list[ParamView]:
        return list(vars(self)["views"].values())

    @property
    def mesh_info(self) -> Any:
        """The mesh, as torch's classes say it: other code asks ``isinstance``.

        Raises:
            UnsupportedError: several dims of the mesh have one role.
        """
        data: DataMesh = vars(self)["data"]
        if max(data.roles.count(SHARD), data.roles.count(REPLICATE)) > 1:
            raise UnsupportedError(
                "FS910",
                "the parameter group of a module that fsdp2 has sharded over several dims of one "
                f"role has no 'mesh_info'. {ADVICE}",
            )
        dims = {role: data.roles.index(role) for role in (SHARD, REPLICATE) if role in data.roles}
        return torch_modules.mesh_info(data.mesh, dims.get(SHARD), dims.get(REPLICATE))


class Views:
    """The views of one unit's groups, by mesh."""

    def __init__(self) -> None:
        self._by_mesh: dict[DataMesh, GroupView] = {}

    def of(self, groups: list[ParamGroup]) -> list[GroupView]:
        found: dict[DataMesh, list[ParamGroup]] = {}
        for group in groups:
            found.setdefault(group.data, []).append(group)
        self._by_mesh = {data: self._by_mesh.get(data) or GroupView(data) for data in found}
        for data, view in self._by_mesh.items():
            view.take(found[data])
        return list(self._by_mesh.values())
