"""What is registered on the modules, seen from a group: sources for its plan.

Owns the question what the user did to registered parameters, and the answer to which shard each one
holds. It must not know buffers, states or collectives. A group asks before every forward.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import methodcaller

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_autograd, torch_dtensor, torch_tensors
from fsdp2._base.errors import StateError
from fsdp2._param_group import packing
from fsdp2._param_group.extension import needs_extension, own_shard
from fsdp2._param_group.optimizer_steps import steps_so_far
from fsdp2._param_group.param import FSDPParam, Site

Source = tuple[Tensor, nn.Parameter | None]
"""A shard, unpadded, and the registered parameter that holds it (None: one is to be made)."""


_storage_of = methodcaller("untyped_storage")


@dataclass(frozen=True)
class StandIn:
    """A tensor in a parameter's place that is no parameter (``functional_call``)."""

    site: Site
    param: FSDPParam
    tensor: Tensor


@dataclass(slots=True)  # frozen would take five calls more for each group and forward
class Changes:
    """What differs from what the group registered."""

    toggled: list[FSDPParam]
    cast: list[FSDPParam]
    replaced: dict[FSDPParam, Tensor | None]
    stand_ins: list[StandIn]


class Serves(enum.Enum):
    """What whole parameters that stay may be used for without a gather. See ``group``."""

    BACKWARDS = enum.auto()  # the backwards of the forward that gathered them
    EVALUATIONS = enum.auto()  # a later forward without gradients, too
    FORWARDS = enum.auto()  # any later forward, too


class Watch:
    """What a group looks at to see what programs did to its parameters."""

    def __init__(self) -> None:
        self.stand_ins: list[StandIn] = []  # for the forward that begins
        self.placed: list[StandIn] = []  # whose whole tensors are registered in a running one
        self.values: list[int] | None = None  # of the shards, when they were gathered to stay
        self.serves = Serves.BACKWARDS  # what these are kept for
        self.wholes: list[Tensor] = []  # the unsharded parameters that lie in the flat buffer
        self.whole_versions: list[int] = []  # of them, while nobody but us wrote there
        self._sharded: list[nn.Parameter] = []
        self._versioned: list[Tensor] = []
        self._shells: list[int] = []  # see _shells_now

    def see(self, params: Iterable[FSDPParam]) -> None:
        """Look at what these register while sharded from now on."""
        self._sharded = [param.sharded for param in params]
        # DTensor operations count on the DTensor, operations on local shards count there.
        forms = [f for p in self._sharded for f in (p, torch_dtensor.local_tensor(p))]
        self._versioned = [form for form in forms if not form.is_inference()]
        self._shells = self._shells_now()

    def see_whole(self, wholes: Iterable[Tensor | None]) -> None:
        """Look at what is written from now on to unsharded parameters; a gather counts no version.

        A DTensor counts operations on it, its local tensor those on that.
        """
        forms = [form for w in wholes if w is not None for form in (w, torch_dtensor.local_part(w))]
        self.wholes = list(dict.fromkeys(forms))
        self.forget_whole_writes()

    def forget_whole_writes(self) -> None:
        """Take what is in unsharded parameters now for what was gathered."""
        self.whole_versions = list(map(torch_autograd.version_of, self.wholes))

    def take_whole_writes(self) -> list[Tensor]:
        """Return the unsharded parameters that were written in place; forget that they were."""
        seen = zip(self.wholes, self.whole_versions, strict=True)
        written = [whole for whole, noted in seen if torch_autograd.version_of(whole) != noted]
        self.forget_whole_writes()
        return written

    def detect_changes(self, params: Sequence[FSDPParam]) -> Changes:
        """Compare what is registered with what the group registered, by identity.

        Stand-ins wait for ``place_stand_ins``; nothing else is changed.

        Raises:
            StateError: ``.data`` of a sharded parameter was assigned.
        """
        changes = Changes([], [], {}, [])
        for param in params:
            sharded, unsharded = param.sharded, param.unsharded
            trainable = param.trainable
            if sharded.requires_grad is not trainable or (
                unsharded is not None and unsharded.requires_grad is not trainable
            ):
                changes.toggled.append(param)
            if unsharded is not None and unsharded.dtype is not param.unsharded_dtype:
                changes.cast.append(param)
            if torch_dtensor.local_tensor(sharded) is not param.local:
                changes.replaced[param] = sharded
            for site in param.sites:
                found: Tensor | None = site.module._parameters.get(site.name)
                if found is sharded:
                    continue
                if found is None or isinstance(found, nn.Parameter):
                    if found is None or (
                        found is not unsharded and found is not param.post_forward
                    ):
                        changes.replaced[param] = found
                else:
                    changes.stand_ins.append(StandIn(site, param, found))
        self.stand_ins = changes.stand_ins
        shells = self._shells_now()
        if shells != self._shells:
            for param, seen, now in zip(params, self._shells, shells, strict=True):
                if seen != now and param not in changes.replaced:
                    refuse_assigned_data(param)
        return changes

    def _shells_now(self) -> list[int]:
        """Return what identifies the empty storage of each DTensor, which ``.data = ...`` changes.

        Nothing else tells: the assignment leaves the local tensor and both versions as they are.
        """
        return list(map(torch_tensors.number_of, map(_storage_of, self._sharded)))

    def note_values(self, serves: Serves) -> None:
        """Remember what the unsharded parameters, which may stay, are gathered from, and why."""
        if self.values is None:
            self.values = self._versions()
        self.serves = serves

    @property
    def serves_this_forward(self) -> bool:
        """True if what stayed was kept for such a forward as begins now."""
        if self.serves is Serves.EVALUATIONS:
            return not torch.is_grad_enabled()
        return self.serves is Serves.FORWARDS

    @property
    def were_written(self) -> bool:
        """True if somebody wrote to the shards since ``note_values``, which was called."""
        return self.values != self._versions()

    def _versions(self) -> list[int]:
        """Return what changes when somebody writes to the shards."""
        return [steps_so_far(), *map(torch_autograd.version_of, self._versioned)]

    def place_stand_ins(self) -> list[StandIn]:
        """Return what waits: it is placed now."""
        self.placed, self.stand_ins = self.stand_ins, []
        return self.placed

    def return_stand_ins(self) -> None:
        """Register stand-ins again after the forward: ``functional_call`` takes them from there."""
        for item in self.placed:
            item.site.put(item.tensor)
        self.placed = []

    def forget_stand_ins(self) -> None:
        """Drop tensors of the user's that stood in for parameters of a forward that raised."""
        self.stand_ins, self.placed = [], []


def refuse_assigned_data(param: FSDPParam) -> None:
    """Raise StateError for a sharded parameter of which ``.data`` was assigned."""
    raise StateError(
        "FS316",
        f"{param.fqn}: found an assignment to .data, which a DTensor forgets: its shard still has "
        "the old values, and the new ones are gone. Register a new one with the whole values "
        "(module.weight = nn.Parameter(new)), or write inside fsdp2.summon_full_params(model).",
    )


def own_rows(param: FSDPParam, whole: Tensor, rank: int) -> Tensor:
    """View this rank's rows of a whole parameter; an extended one copies them."""
    whole = torch_dtensor.local_part(whole.detach())
    if needs_extension(whole):
        return own_shard(whole, param, rank)
    return packing.shard_of(whole, param.placement.layout, rank)


def own_sources(params: Iterable[FSDPParam]) -> list[Source]:
    """Return the shards that parameters hold now."""
    return [(torch_dtensor.local_tensor(param.sharded), param.sharded) for param in params]


def source_of(param: FSDPParam, new: Tensor | None, rank: int) -> Source:
    """Return the shard that a replaced parameter holds.

    Raises:
        StateError: what is registered is no parameter, or cannot be sharded as the old one was.
    """
    placement = param.placement
    if isinstance(new, nn.Parameter):
        if placement.is_sharded(new):
            local, fits = torch_dtensor.local_tensor(new), placement.layout.shard_shape(rank)
            if tuple(local.shape) != fits or local.layout is not torch.strided:
                raise StateError(
                    "FS317",
                    f"{param.fqn}: its local tensor was replaced by one of shape "
                    f"{tuple(local.shape)} and layout {local.layout}. This rank's shard is dense, "
                    f"of shape {fits}. Put one of that shape there, or a whole nn.Parameter on "
                    "the module.",
                )
            return local, new
        if placement.is_unsharded(new):
            return own_rows(param, new, rank), None
    found = "nothing" if new is None else f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" with placements {new.placements} on {new.device_mesh}"
    raise StateError(
        "FS317",
        f"{param.fqn}: was replaced by {found}, which this module cannot shard. Register an "
        f"nn.Parameter {placement.describe()}.",
    )
