"""Registered forms of a group's parameters: states, legal transitions, and user changes.

Before every forward a group detects what user code did to a parameter: replaced it, toggled
``requires_grad``, wrote to it, or put a placeholder there for one forward. Contains no buffer,
collective or hook code.

[Note: what is registered]
We replace a registered tensor only if we registered it. Any other tensor is the user's, and stays
until the next forward adopts it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.containers import alive
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.torch_autograd import version_of


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register a tensor here, even one that is not a leaf."""
        self.module._parameters[self.name] = tensor  # type: ignore[assignment]  # maybe no leaf


class Forms:
    """The forms of one parameter, one of which is registered. Optimizers and checkpoints hold
    ``sharded``, which is one object unless the user replaces it. ``unsharded`` is one object too,
    whose storage is freed and refilled, so tensors saved by autograd stay valid."""

    def __init__(self, fqn: str, sites: list[Site], original: nn.Parameter) -> None:
        self.fqn = fqn
        self.sites = sites
        self.trainable = original.requires_grad  # requires_grad of all forms
        self.sharded: nn.Parameter = original
        self.shown: nn.Parameter | None = original  # the parameter that the group registered last
        self.local: torch.Tensor | None = None  # local tensor of the sharded DTensor
        self.unsharded: nn.Parameter | None = None
        self.unsharded_dtype = original.dtype
        self.post_forward: nn.Parameter | None = None  # over the smaller mesh

    def is_form(self, found: torch.Tensor | None) -> bool:
        if found is None:
            return False
        return found is self.sharded or found is self.unsharded or found is self.post_forward

    @property
    def is_toggled(self) -> bool:
        """Return True if ``requires_grad`` changed on a form that may be registered."""
        forms = (self.sharded, self.unsharded)
        return any(f is not None and f.requires_grad is not self.trainable for f in forms)

    def toggle(self) -> None:
        self.trainable = not self.trainable
        for form in (self.sharded, self.unsharded, self.post_forward):
            if form is not None:
                form.requires_grad = self.trainable  # the method is refused under functorch


_storage_of: Callable[[Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage


class ParamState(enum.Enum):
    """The registered form of a parameter."""

    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded over a smaller mesh, between forward and backward"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # members are unique; Enum's own hash is a Python function


class GroupState(enum.Enum):
    """State of a group's parameters: equal on all ranks, except that RELEASED may be SHARDED."""

    SHARDED = "sharded"
    SMALLER = "sharded over a smaller mesh, between forward and backward"
    GATHERING = "an all-gather is in flight and has not been waited for"
    WHOLE = "whole"
    # see [Note: released early] in ``buffers``
    RELEASED = "whole on this rank, where it is still read, and sharded in every rank's plans"

    __hash__ = object.__hash__


SHARDED, SMALLER = GroupState.SHARDED, GroupState.SMALLER
GATHERING, WHOLE, RELEASED = GroupState.GATHERING, GroupState.WHOLE, GroupState.RELEASED

TRANSITIONS = {
    SHARDED: {GATHERING},
    SMALLER: {GATHERING, SHARDED},
    GATHERING: {WHOLE, SHARDED, SMALLER},  # back to its origin if it is dropped
    WHOLE: {SHARDED, SMALLER, RELEASED},
    RELEASED: {SHARDED},
}

# attribute access on an Enum is slow
FORM_SHARDED, FORM_UNSHARDED = ParamState.SHARDED, ParamState.UNSHARDED

FORM_IN = {
    SHARDED: FORM_SHARDED,
    SMALLER: ParamState.SHARDED_POST_FORWARD,
    WHOLE: FORM_UNSHARDED,
    RELEASED: FORM_UNSHARDED,
}
"""The form registered in a state; GATHERING does not change it."""


@dataclass(frozen=True)
class Placeholder:
    """A tensor in a parameter's place that is not a parameter (``functional_call``)."""

    site: Site
    param: Any  # an ``FSDPParam``
    tensor: Tensor


@dataclass(slots=True)
class Changes:
    toggled: list[Any]
    cast: list[Any]
    replaced: dict[Any, Tensor | None]
    placeholders: list[Placeholder]


class Serves(enum.Enum):
    """Later uses of kept unsharded parameters that need no gather. See ``group``."""

    BACKWARDS = enum.auto()  # backwards of the forward that gathered them
    EVALUATIONS = enum.auto()  # also a later forward without gradients
    ACCUMULATION = enum.auto()  # also forwards until the next step, see ``_core/engine/tree``
    FORWARDS = enum.auto()  # also any later forward


@dataclass
class OptimizerSteps:
    """Number of optimizer steps so far: equal on ranks that run the same program."""

    count: int = 0


optimizer_steps = OptimizerSteps()

_all: WeakValueDictionary[int, Registration] = WeakValueDictionary()


def lie_in_shards(tensors: Iterable[Tensor]) -> bool:
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    storages = set(map(_storage_of, dense))  # a storage is one object in Python
    return any(registered.lies_in(storages) for registered in alive(_all))


class Registration:
    """The registered forms of a group's parameters. Only ``move`` writes the state and form."""

    def __init__(self, params: Sequence[Forms]) -> None:
        self.params = params  # all parameters of the group, which change state together
        self.state = SHARDED
        self.form = FORM_SHARDED  # the state's form, even if shards are shown
        self.is_held = False  # a manual unshard() keeps unsharded parameters registered
        self.placeholders: list[Placeholder] = []  # the user's tensors for the forward that begins
        self.placed: list[Placeholder] = []  # those of the running forward
        # shard versions from which kept unsharded parameters were gathered; None: none are kept
        self.values: list[int] | None = None
        self.serves = Serves.BACKWARDS  # purpose of kept unsharded parameters
        self.wholes: list[Tensor] = []  # unsharded parameters in the flat buffer
        self.whole_versions: list[int] = []  # before any write by the user
        self._sharded: list[nn.Parameter] = []
        self._versioned: list[Tensor] = []
        # the DTensors' empty storages: replacing them is the only visible effect of ``.data = ...``
        self._shells: list[torch.UntypedStorage] = []
        _all[id(self)] = self

    def move(self, target: GroupState, fqn: str) -> None:
        """Change the state, and register its form. If it is illegal, only raise StateError."""
        if target not in TRANSITIONS[self.state]:
            raise StateError(
                "FS313",
                f"{fqn or '<root>'}: cannot change from {self.state.name} to {target.name}. "
                f"Allowed: {', '.join(sorted(s.name for s in TRANSITIONS[self.state]))}.",
            )
        self.state = target
        if target is not GATHERING:
            self.form = FORM_IN[target]
            self.show(self.form)

    def show(self, form_of: ParamState) -> None:
        """Register one form of every parameter. See [Note: what is registered]."""
        for param in self.params:
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
        """Register the sharded parameters, unless unsharded ones are held, and free nothing."""
        if not self.is_held:
            self.show(FORM_SHARDED)

    def see(self) -> None:
        """Start observing the current sharded forms."""
        self._sharded = [param.sharded for param in self.params]
        # a DTensor and its local tensor have separate versions
        forms = [f for p in self._sharded for f in (p, torch_dtensor.local_tensor(p))]
        self._versioned = [form for form in forms if not form.is_inference()]
        self._shells = list(map(_storage_of, self._sharded))

    def see_whole(self, wholes: Iterable[Tensor | None]) -> None:
        """Start observing writes to unsharded parameters; a gather increments no version."""
        forms = [form for w in wholes if w is not None for form in (w, torch_dtensor.local_part(w))]
        self.wholes = list(dict.fromkeys(forms))
        self.forget_whole_writes()

    def forget_whole_writes(self) -> None:
        """Treat the current content of unsharded parameters as the gathered one."""
        self.whole_versions = list(map(version_of, self.wholes))

    def take_whole_writes(self) -> list[Tensor]:
        seen = zip(self.wholes, self.whole_versions, strict=True)
        written = [whole for whole, noted in seen if version_of(whole) != noted]
        self.forget_whole_writes()
        return written

    def detect_changes(self) -> Changes:
        """Compare the registered tensors with the group's, by identity. Keeps the placeholders, and
        changes nothing else. StateError: ``.data`` of a sharded parameter was assigned."""
        changes = Changes([], [], {}, [])
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves the cost of reading a DTensor
            for param in self.params:
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
                        changes.placeholders.append(Placeholder(site, param, found))
            assigned = not all(map(is_, map(_storage_of, self._sharded), self._shells))
        self.placeholders = changes.placeholders
        if assigned:
            self._refuse_assigned(changes)
        return changes

    def _refuse_assigned(self, changes: Changes) -> None:
        for param, shell in zip(self.params, self._shells, strict=True):
            if _storage_of(param.sharded) is not shell and param not in changes.replaced:
                raise StateError(
                    "FS316",
                    f"{param.fqn}: found an assignment to .data, which a DTensor ignores: its "
                    "shard still has the old values. Register a new parameter with all values "
                    "(module.weight = nn.Parameter(new)), or write inside "
                    "fsdp2.summon_full_params(model).",
                )

    def note_values(self, serves: Serves) -> None:
        """Record the shard versions of unsharded parameters that may stay, and their purpose."""
        if self.values is None:
            self.values = self._versions()
        elif serves is Serves.BACKWARDS and self.serves is Serves.ACCUMULATION:
            return  # a forward that reused them keeps them for the next one
        self.serves = serves

    @property
    def serves_this_forward(self) -> bool:
        """Return True if the forward that begins may use kept parameters."""
        if self.serves is Serves.EVALUATIONS:
            return not torch.is_grad_enabled()
        return self.serves in (Serves.FORWARDS, Serves.ACCUMULATION)

    @property
    def were_written(self) -> bool:
        return self.values != self._versions()

    def _versions(self) -> list[int]:
        return [optimizer_steps.count, *map(version_of, self._versioned)]

    def lies_in(self, storages: Set[torch.UntypedStorage]) -> bool:
        return any(_storage_of(form) in storages for form in self._versioned)

    def place_placeholders(self) -> list[Placeholder]:
        self.placed, self.placeholders = self.placeholders, []
        return self.placed

    def return_placeholders(self) -> None:
        """Register placeholders again after the forward; ``functional_call`` removes them."""
        for item in self.placed:
            item.site.put(item.tensor)
        self.placed = []

    def forget_placeholders(self) -> None:
        self.placeholders, self.placed = [], []
