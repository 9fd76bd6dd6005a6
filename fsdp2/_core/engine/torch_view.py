"""What other software finds on a sharded module in place of torch's own state: a façade.

Owns the names of torch's that stand for ours, and the error for all others. It must not know when
anything happens in a step.

[Note: the state that torch's software asks for]
``fully_shard.state(module)`` is a ``TorchState``, by our accessor and by torch's getters, which
return an ``FSDPState`` only, so it is one. From torch 2.15 on a stage of
``torch.distributed.pipelining`` whose module is an ``FSDPModule`` uses public methods:
``set_manual_backward_finalization``, ``finalize_backward``, and settings. With
``defer_reduce_grad_wait`` it compares ``_get_fsdp_state()._comm_ctx`` of its stages. Up to torch
2.14 it sets ``is_last_backward``, ``reshard_after_backward`` and ``requires_gradient_sync`` to
False before each backward of a microbatch, so gradients stay on the unsharded parameters. After the
last one it sets all three to True, calls ``post_backward`` on each group that it finds under
``_state_ctx.all_states``, and then ``_root_post_backward_final_callback``. No backward runs at that
time, so no hook of ours would. The order of reductions is the runtime's to choose: the list of
states is empty, and the callback is the end of a backward.

[Note: what tools may read]
Torch's FSDP2 keeps a state with parameter groups on each module, and programs read some of it: how
many ranks share a parameter, which dtype a unit computes in, whether a module is sharded already
(docs/clients.md lists the names and who reads them). These are true here too. What would act on
torch's internals, and every write, is an error. One of torch's groups is all parameters of a unit
on one mesh, so large parts of a root are in the group of the rest. The objects live as long as the
unit: programs use them as keys.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.nn as nn

from fsdp2._core.base import torch_modules
from fsdp2._core.base.errors import UnsupportedError, coded
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.mesh import REPLICATE, SHARD, DataMesh
from fsdp2._core.comm.wire import Streams
from fsdp2._core.engine.between_steps import finish
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam

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


class TorchState(View, torch_modules.FSDPState):
    """A unit, by the names that torch's ``FSDPState`` has for what programs read and call."""

    _state_ctx: ClassVar[Any] = SimpleNamespace(all_states=())  # see the note above

    def __init__(self, unit: Unit) -> None:
        vars(self).update(_unit=unit, _views={})

    @property
    def _comm_ctx(self) -> Streams:
        """An object that is another one for each root, unless roots share their streams."""
        unit: Unit = vars(self)["_unit"]
        if unit.runtime is not None:
            return unit.runtime.context.streams
        if unit.streams is None:
            unit.streams = streams_for(unit.device)
        return unit.streams

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        policy: MixedPrecisionPolicy = vars(self)["_unit"].precision.chosen
        return policy

    @property
    def _is_root(self) -> bool | None:
        """None before the first forward, which decides it."""
        unit: Unit = vars(self)["_unit"]
        return None if unit.runtime is None else unit.is_root

    def _lazy_init(self) -> None:
        """Do nothing: a first forward initialises by itself, and later is never wrong."""

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what a pipeline's step accumulated, wait for it, and reshard, as settings say.

        Raises:
            StateError: a unit's part of the gradient is lost. See ``Unit.note_unsynced_backward``.
        """
        runtime = vars(self)["_unit"].runtime
        if runtime is not None:  # else no forward ran yet
            finish(runtime)
            runtime.end_reductions()

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        found: dict[DataMesh, list[ParamGroup]] = {}
        for group in vars(self)["_unit"].own_groups:
            found.setdefault(group.data, []).append(group)
        known = vars(self)["_views"]
        vars(self)["_views"] = views = {d: known.get(d) or GroupView(d) for d in found}
        for data, view in views.items():
            view.take(found[data])
        return list(views.values())

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        """The parameters of the unit; None if it has none, as torch's own says.

        Raises:
            UnsupportedError: they lie on several meshes.
        """
        views = self._fsdp_param_groups
        if len(views) > 1:
            raise UnsupportedError(
                "FS910",
                f"{vars(self)['_unit'].fqn or '<root>'}: has parameters on {len(views)} meshes, so "
                "it is not one '_fsdp_param_group'. Read '_fsdp_param_groups'. " + ADVICE,
            )
        return views[0] if views else None

    def __getstate__(self) -> dict[str, Any]:
        """Copies are of a copied unit, whose groups nobody has seen yet."""
        return {"_unit": vars(self)["_unit"], "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


torch_modules.hide_torchs_own(TorchState, torch_modules.FSDPState)


def torch_state(module: nn.Module) -> TorchState | None:
    """Return what a module of a unit has in place of torch's state; None for other modules."""
    found = torch_modules.torch_state(module) if unit_of(module) is not None else None
    return found if isinstance(found, TorchState) else None


def register_torch_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's getters find the state of a module; all modules of a unit have the same one."""
    known = _states.get(unit)
    state = None if known is None else known()
    if state is None:
        state = TorchState(unit)
        _states[unit] = weakref.ref(state)
    torch_modules.register_torch_state(module, state)


_states: weakref.WeakKeyDictionary[Unit, weakref.ref[TorchState]] = weakref.WeakKeyDictionary()
"""The state of each unit; its modules hold it."""
