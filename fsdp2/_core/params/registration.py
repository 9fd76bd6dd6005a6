"""Registered forms of a group's parameters: states, legal transitions, and user changes.

Before every forward, a group detects changes by user code: replaced parameters, toggled
``requires_grad``, writes, and placeholders for one forward. Has no buffer, collective or hook code.

[Note: what is registered]
We replace a registered tensor only if we registered it. Any other tensor belongs to the user, and
stays registered until the next forward adopts it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import is_
from types import SimpleNamespace
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
    """One place where a parameter is registered; a tied parameter has several."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register a tensor, which may be a non-leaf, at this site."""
        self.module._parameters[self.name] = tensor  # type: ignore[assignment]  # maybe non-leaf


class Forms:
    """The forms of one parameter; only one is registered at a time. Optimizers and checkpoints hold
    ``sharded``, which stays the same object unless the user replaces it. ``unsharded`` also stays
    the same object; its storage is freed and refilled, so tensors saved by autograd stay valid."""

    def __init__(self, fqn: str, sites: list[Site], original: nn.Parameter) -> None:
        self.fqn = fqn
        self.sites = sites
        self.trainable = original.requires_grad  # requires_grad of all forms
        self.sharded: nn.Parameter = original
        self.shown: nn.Parameter | None = original  # the form that the group registered last
        self.local: torch.Tensor | None = None  # local tensor of the sharded DTensor
        self.unsharded: nn.Parameter | None = None
        self.unsharded_dtype = original.dtype
        self.post_forward: nn.Parameter | None = None  # sharded over the smaller mesh

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
                form.requires_grad = self.trainable  # functorch refuses requires_grad_()


_storage_of: Callable[[Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage


class ParamState(enum.Enum):
    """The form in which a parameter is registered."""

    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded over a smaller mesh, between forward and backward"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # members are unique, and Enum.__hash__ is slow


class GroupState(enum.Enum):
    """State of a group's parameters, equal on all ranks; RELEASED and SHARDED count as equal."""

    SHARDED = "sharded"
    SMALLER = "sharded over a smaller mesh, between forward and backward"
    GATHERING = "an all-gather is in flight and has not been waited for"
    WHOLE = "whole"
    # see [Note: released early] in ``buffers``
    RELEASED = "counted as sharded on every rank, but still referenced on this rank, so not freed"

    __hash__ = object.__hash__


SHARDED, SMALLER = GroupState.SHARDED, GroupState.SMALLER
GATHERING, WHOLE, RELEASED = GroupState.GATHERING, GroupState.WHOLE, GroupState.RELEASED

TRANSITIONS = {
    SHARDED: {GATHERING},
    SMALLER: {GATHERING, SHARDED},
    GATHERING: {WHOLE, SHARDED, SMALLER},  # a dropped gather restores the previous state
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
"""The form registered in each state; GATHERING leaves the registered form unchanged."""


@dataclass(frozen=True)
class Placeholder:
    """A non-parameter tensor registered in place of a parameter, e.g. by ``functional_call``."""

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
    """Uses for which unsharded parameters are kept, to avoid a new gather. See ``group``."""

    BACKWARDS = enum.auto()  # backwards of the forward that gathered them
    EVALUATIONS = enum.auto()  # also a later forward without gradients
    ACCUMULATION = enum.auto()  # also forwards until the next step: ``_core/engine/tree``
    FORWARDS = enum.auto()  # also any later forward


optimizer_steps = SimpleNamespace(count=0)
"""Number of optimizer steps so far; ranks that run the same program have equal counts."""

_all: WeakValueDictionary[int, Registration] = WeakValueDictionary()


def lie_in_shards(tensors: Iterable[Tensor]) -> bool:
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    storages = set(map(_storage_of, dense))  # each storage has one Python object
    return any(registered.lies_in(storages) for registered in alive(_all))


class Registration:
    """The registered forms of a group's parameters. Only ``move`` sets ``state`` and ``form``."""

    def __init__(self, params: Sequence[Forms]) -> None:
        self.params = params  # all parameters of the group; their state is shared
        self.state = SHARDED
        self.form = FORM_SHARDED  # the state's form, even while ``show_shards`` is in effect
        self.is_held = False  # a manual unshard() keeps unsharded forms registered
        self.placeholders: list[Placeholder] = []  # the user's tensors for the next forward
        self.placed: list[Placeholder] = []  # placeholders of the current forward
        # shard versions to which the kept unsharded parameters correspond; None: none are kept
        self.values: list[int] | None = None
        self.serves = Serves.BACKWARDS  # allowed uses of kept unsharded parameters
        self.wholes: list[Tensor] = []  # unsharded parameters in the full buffer
        self.whole_versions: list[int] = []  # versions of ``wholes`` before any user write
        self._sharded: list[nn.Parameter] = []
        self._versioned: list[Tensor] = []
        # the DTensors' own empty storages: ``.data = ...`` replaces them, and has no other effect
        self._shells: list[torch.UntypedStorage] = []
        _all[id(self)] = self

    def move(self, target: GroupState, fqn: str) -> None:
        """Change the state and register its parameters. StateError: the transition is illegal."""
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
            if form_of is FORM_UNSHARDED:
                form = param.unsharded
            elif form_of is FORM_SHARDED:
                form = param.sharded
            else:
                form = param.post_forward
            shown, param.shown = param.shown, form
            for site in param.sites:
                registered, name = site.module._parameters, site.name
                found = registered[name] if name in registered else None  # noqa: SIM401  # get() is slower
                if found is shown or param.is_form(found):
                    registered[name] = form

    def show_shards(self) -> None:
        """Register the sharded parameters, unless unsharded ones are held. Frees no memory."""
        if not self.is_held:
            self.show(FORM_SHARDED)

    def see(self) -> None:
        """Start detecting changes to the current sharded forms."""
        self._sharded = [param.sharded for param in self.params]
        # a DTensor and its local tensor have separate version counters
        forms = [f for p in self._sharded for f in (p, torch_dtensor.local_tensor(p))]
        self._versioned = [form for form in forms if not form.is_inference()]
        self._shells = list(map(_storage_of, self._sharded))

    def see_whole(self, wholes: Iterable[Tensor | None]) -> None:
        """Start detecting writes to unsharded parameters. Gathers do not change their versions."""
        forms = [form for w in wholes if w is not None for form in (w, torch_dtensor.local_part(w))]
        self.wholes = list(dict.fromkeys(forms))
        self.forget_whole_writes()

    def forget_whole_writes(self) -> None:
        """Treat the current content of unsharded parameters as unmodified."""
        self.whole_versions = list(map(version_of, self.wholes))

    def take_whole_writes(self) -> list[Tensor]:
        seen = zip(self.wholes, self.whole_versions, strict=True)
        written = [whole for whole, noted in seen if version_of(whole) != noted]
        self.forget_whole_writes()
        return written

    def detect_changes(self) -> Changes:
        """Compare registered tensors with the group's tensors, by identity. Store placeholders, but
        apply no changes. Raise StateError if ``.data`` of a sharded parameter was assigned."""
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
                    f"{param.fqn}: found an assignment to .data, which a DTensor ignores, so "
                    "its shard still has the old values. Register a new parameter with all values "
                    "(module.weight = nn.Parameter(new)), or write inside "
                    "fsdp2.summon_full_params(model).",
                )

    def note_values(self, serves: Serves) -> None:
        """Record the shard versions and the allowed uses of unsharded parameters that are kept."""
        if self.values is None:
            self.values = self._versions()
        elif serves is Serves.BACKWARDS and self.serves is Serves.ACCUMULATION:
            return  # a forward that reused the parameters keeps them for the next forward
        self.serves = serves

    @property
    def serves_this_forward(self) -> bool:
        """Return True if the forward that is about to run may use kept parameters."""
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
        """Register placeholders again after the forward, so ``functional_call`` can remove them."""
        for item in self.placed:
            item.site.put(item.tensor)
        self.placed = []

    def forget_placeholders(self) -> None:
        self.placeholders, self.placed = [], []
