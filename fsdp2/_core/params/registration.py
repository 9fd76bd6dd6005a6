"""What is registered on the modules of a group: states, legal moves, and what users do there.

Owns which form of each parameter is shown, and the question what programs did to it since: replaced
it, toggled ``requires_grad``, wrote to it, lent a tensor for one forward. It must not know buffers,
collectives or hooks. A group asks before every forward.

[Note: what is registered]
We replace a registered tensor only if it is one that we registered. Anything else there is the
user's; it stays until the next forward looks at it and takes it over.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.torch_autograd import version_of

# The forms of one parameter, and the places where it is registered.


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register a tensor here, a leaf or not."""
        self.module._parameters[self.name] = tensor  # type: ignore[assignment]  # maybe no leaf


class Forms:
    """The forms of one parameter, of which one is registered at a time, and where.

    ``sharded`` is what optimizers and checkpoints hold: one object for life, unless the user
    replaces it. ``unsharded`` is one object for life too, so that autograd's saved tensors stay
    valid while its storage is freed and filled again.
    """

    def __init__(self, fqn: str, sites: list[Site], original: nn.Parameter) -> None:
        self.fqn = fqn
        self.sites = sites
        self.trainable = original.requires_grad  # requires_grad of all forms
        self.sharded: nn.Parameter = original
        self.shown: nn.Parameter | None = original  # what the group registered last
        self.local: torch.Tensor | None = None  # what the sharded DTensor holds
        self.unsharded: nn.Parameter | None = None
        self.unsharded_dtype = original.dtype
        self.post_forward: nn.Parameter | None = None  # over the smaller mesh

    def is_form(self, found: torch.Tensor | None) -> bool:
        """True if a registered tensor is one of this parameter's forms."""
        if found is None:
            return False
        return found is self.sharded or found is self.unsharded or found is self.post_forward

    @property
    def is_toggled(self) -> bool:
        """True if somebody changed ``requires_grad`` of a form that may be registered."""
        forms = (self.sharded, self.unsharded)
        return any(f is not None and f.requires_grad is not self.trainable for f in forms)

    def toggle(self) -> None:
        """Carry ``requires_grad`` over from the form that the user changed."""
        self.trainable = not self.trainable
        for form in (self.sharded, self.unsharded, self.post_forward):
            if form is not None:
                form.requires_grad = self.trainable  # the method is refused under functorch


_storage_of: Callable[[Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage


class ParamState(enum.Enum):
    """Which form a parameter has, as users see it."""

    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded over a smaller mesh, between forward and backward"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # members are unique; Enum's own is a Python function


class GroupState(enum.Enum):
    """Where the parameters of a group are: the same on every rank, but for RELEASED."""

    SHARDED = "sharded"
    SMALLER = "sharded over a smaller mesh, between forward and backward"
    GATHERING = "an all-gather is under way, for which nobody has waited"
    WHOLE = "whole"
    # see [Note: released early] in ``early_release``
    RELEASED = "whole on this rank, where somebody reads them, and sharded to every rank's plans"

    __hash__ = object.__hash__


SHARDED, SMALLER = GroupState.SHARDED, GroupState.SMALLER
GATHERING, WHOLE, RELEASED = GroupState.GATHERING, GroupState.WHOLE, GroupState.RELEASED

TRANSITIONS = {
    SHARDED: {GATHERING},
    SMALLER: {GATHERING, SHARDED},
    GATHERING: {WHOLE, SHARDED, SMALLER},  # back to where it came from, if it is dropped
    WHOLE: {SHARDED, SMALLER, RELEASED},
    RELEASED: {SHARDED},
}

# members of an Enum are looked up slowly
FORM_SHARDED, FORM_UNSHARDED = ParamState.SHARDED, ParamState.UNSHARDED

FORM_IN = {
    SHARDED: FORM_SHARDED,
    SMALLER: ParamState.SHARDED_POST_FORWARD,
    WHOLE: FORM_UNSHARDED,
    RELEASED: FORM_UNSHARDED,
}
"""The form that is registered in a state; a gather changes none until somebody waits for it."""


@dataclass(frozen=True)
class StandIn:
    """A tensor in a parameter's place that is no parameter (``functional_call``)."""

    site: Site
    param: Any  # an ``FSDPParam``
    tensor: Tensor


@dataclass(slots=True)
class Changes:
    """What differs from what the group registered."""

    toggled: list[Any]
    cast: list[Any]
    replaced: dict[Any, Tensor | None]
    stand_ins: list[StandIn]


class Serves(enum.Enum):
    """What whole parameters that stay may be used for without a gather. See ``group``."""

    BACKWARDS = enum.auto()  # the backwards of the forward that gathered them
    EVALUATIONS = enum.auto()  # a later forward without gradients, too
    # the forwards of the same accumulation, too: ``_core/engine/tree`` frees it before any other
    # one
    ACCUMULATION = enum.auto()
    FORWARDS = enum.auto()  # any later forward, too


class OptimizerSteps:
    """How many steps of optimizers there were: the same number on ranks that run alike."""

    def __init__(self) -> None:
        self.count = 0


optimizer_steps = OptimizerSteps()


_all: weakref.WeakSet[Registration] = weakref.WeakSet()


def lie_in_shards(tensors: Iterable[Tensor]) -> bool:
    """True if one of the tensors lies in memory of a shard, of any group."""
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    storages = set(map(_storage_of, dense))  # a storage is one object in Python
    return any(registered.lies_in(storages) for registered in tuple(_all))


class Registration:
    """What a group's parameters are registered as, and what programs did to that.

    ``move`` is the one method that writes the state, and the form that goes with it.
    """

    def __init__(self, params: Sequence[Forms]) -> None:
        self._params = params  # all parameters of the group: they move together
        self.state = SHARDED
        self.form = FORM_SHARDED  # the form that the state stands for, whatever is shown
        self.is_held = False  # unshard() by hand keeps whole parameters registered
        # tensors of the user's that wait for the forward that begins
        self.stand_ins: list[StandIn] = []
        # those whose whole tensors are registered in a running forward
        self.placed: list[StandIn] = []
        # versions of the shards when whole parameters were gathered to stay; None: they do not
        self.values: list[int] | None = None
        self.serves = Serves.BACKWARDS  # what whole parameters that stay are kept for
        self.wholes: list[Tensor] = []  # the unsharded parameters that lie in the flat buffer
        # versions of the unsharded parameters while nobody but us wrote there
        self.whole_versions: list[int] = []
        self._sharded: list[nn.Parameter] = []
        self._versioned: list[Tensor] = []
        # the empty storages of the DTensors, which ``.data = ...`` changes. Nothing else tells: the
        # assignment leaves the local tensor and both versions as they are.
        self._shells: list[torch.UntypedStorage] = []
        _all.add(self)

    def move(self, target: GroupState, fqn: str) -> None:
        """Be in another state, and show its form.

        Raises:
            StateError: the table does not allow it; nothing was changed.
        """
        if target not in TRANSITIONS[self.state]:
            raise StateError(
                "FS313",
                f"{fqn or '<root>'}: cannot go from {self.state.name} to {target.name}. Legal: "
                f"{', '.join(sorted(s.name for s in TRANSITIONS[self.state]))}.",
            )
        self.state = target
        if target is not GATHERING:
            self.form = FORM_IN[target]
            self.show(self.form)

    def show(self, form_of: ParamState) -> None:
        """Put one form of every parameter onto the modules. See [Note: what is registered]."""
        for param in self._params:
            form = (
                param.unsharded
                if form_of is FORM_UNSHARDED
                else param.sharded
                if form_of is FORM_SHARDED
                else param.post_forward
            )
            shown, param.shown = param.shown, form
            for site in param.sites:
                registered, name = site.module._parameters, site.name
                found = registered[name] if name in registered else None  # noqa: SIM401  # a call
                if found is shown or param.is_form(found):
                    registered[name] = form

    def show_shards(self) -> None:
        """Register the sharded parameters, whatever stays in memory, unless whole ones are held.

        See [Note: between steps] in ``group``.
        """
        if not self.is_held:
            self.show(FORM_SHARDED)

    def see(self) -> None:
        """Look at the sharded forms that there are now, from now on."""
        self._sharded = [param.sharded for param in self._params]
        # DTensor operations count on the DTensor, operations on local shards count there.
        forms = [f for p in self._sharded for f in (p, torch_dtensor.local_tensor(p))]
        self._versioned = [form for form in forms if not form.is_inference()]
        self._shells = list(map(_storage_of, self._sharded))

    def see_whole(self, wholes: Iterable[Tensor | None]) -> None:
        """Look at what is written from now on to unsharded parameters; a gather counts no version.

        A DTensor counts operations on it, its local tensor those on that.
        """
        forms = [form for w in wholes if w is not None for form in (w, torch_dtensor.local_part(w))]
        self.wholes = list(dict.fromkeys(forms))
        self.forget_whole_writes()

    def forget_whole_writes(self) -> None:
        """Take what is in unsharded parameters now for what was gathered."""
        self.whole_versions = list(map(version_of, self.wholes))

    def take_whole_writes(self) -> list[Tensor]:
        """Return the unsharded parameters that were written in place; forget that they were."""
        seen = zip(self.wholes, self.whole_versions, strict=True)
        written = [whole for whole, noted in seen if version_of(whole) != noted]
        self.forget_whole_writes()
        return written

    def detect_changes(self) -> Changes:
        """Compare what is registered with what the group registered, by identity.

        Stand-ins wait for ``place_stand_ins``; nothing else is changed.

        Raises:
            StateError: ``.data`` of a sharded parameter was assigned.
        """
        changes = Changes([], [], {}, [])
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves what reads of a DTensor cost
            for param in self._params:
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
            # a storage is one object in Python
            assigned = not all(map(is_, map(_storage_of, self._sharded), self._shells))
        self.stand_ins = changes.stand_ins
        if assigned:
            self._refuse_assigned(changes)
        return changes

    def _refuse_assigned(self, changes: Changes) -> None:
        """Raise StateError for the first parameter of which ``.data`` was assigned."""
        for param, shell in zip(self._params, self._shells, strict=True):
            if _storage_of(param.sharded) is not shell and param not in changes.replaced:
                refuse_assigned_data(param)

    def note_values(self, serves: Serves) -> None:
        """Remember what the unsharded parameters, which may stay, are gathered from, and why."""
        if self.values is None:
            self.values = self._versions()
        elif serves is Serves.BACKWARDS and self.serves is Serves.ACCUMULATION:
            return  # a forward that used it takes nothing from the next one
        self.serves = serves

    @property
    def serves_this_forward(self) -> bool:
        """True if what stayed was kept for such a forward as begins now."""
        if self.serves is Serves.EVALUATIONS:
            return not torch.is_grad_enabled()
        return self.serves in (Serves.FORWARDS, Serves.ACCUMULATION)

    @property
    def were_written(self) -> bool:
        """True if somebody wrote to the shards since ``note_values``, which was called."""
        return self.values != self._versions()

    def _versions(self) -> list[int]:
        """Return what changes when somebody writes to the shards."""
        return [optimizer_steps.count, *map(version_of, self._versioned)]

    def lies_in(self, storages: Set[torch.UntypedStorage]) -> bool:
        """True if a shard lies in one of the storages."""
        return any(_storage_of(form) in storages for form in self._versioned)

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


def refuse_assigned_data(param: Forms) -> None:
    """Raise StateError for a sharded parameter of which ``.data`` was assigned."""
    raise StateError(
        "FS316",
        f"{param.fqn}: found an assignment to .data, which a DTensor forgets: its shard still has "
        "the old values, and the new ones are gone. Register a new one with the whole values "
        "(module.weight = nn.Parameter(new)), or write inside fsdp2.summon_full_params(model).",
    )
