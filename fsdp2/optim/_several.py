"""One optimizer of several classes: each steps the param groups that name it.

Owns the split of param groups and of states between its members. It must not know how they step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler
from fsdp2._core.base.arguments import check_function
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2.optim._local import check_groups
from fsdp2.optim._zero import zero_gradients

BESIDE = "beside"
"""In a state dict: what each member's class puts next to its state, by hooks."""

Member = tuple[Any, list[int]]
"""An optimizer, and which of the param groups are its own."""


class Several(Optimizer):
    """An optimizer of the members' param groups, with one state, in the order of the user's.

    ``step_together`` steps the members of one kind, all of them or none; the others, which step on
    this rank's own shards, come after these.
    """

    def __init__(
        self,
        main: type[Optimizer],
        members: Sequence[Member],
        step_together: Callable[[Sequence[Any]], None],
    ) -> None:
        self._members: list[Member] = []
        self._main = main  # the class of groups that name none
        count = sum(len(places) for _, places in members)
        groups: list[dict[str, Any]] = [{} for _ in range(count)]
        for member, places in members:
            for place, group in zip(places, member.param_groups, strict=True):
                groups[place] = group
        first, *others = (member.defaults for member, _ in members)
        common = {k: v for k, v in first.items() if all(k in other for other in others)}
        super().__init__([dict(group) for group in groups], common)
        self.param_groups = groups  # the members' own, so that a scheduler sets both
        self._members = list(members)
        self._step_together = step_together

    def _share_groups(self) -> None:
        """Let members have the param groups that there are now."""
        for member, places in self._members:
            member.param_groups = [self.param_groups[place] for place in places]

    @property
    def state(self) -> Any:
        """The members' states by parameter."""
        merged: Any = defaultdict(dict)
        for member, _ in self._members:
            merged.update(member.state)
        return merged

    @state.setter
    def state(self, table: Any) -> None:
        for member, _ in self._members:
            own = {param for group in member.param_groups for param in group["params"]}
            member.state = defaultdict(dict, {p: s for p, s in table.items() if p in own})

    def gather_state(self) -> None:
        """Move states from their owners to DTensors. Collective; ``state_dict`` calls it."""
        for member, _ in self._members:
            if hasattr(member, "gather_state"):
                member.gather_state()

    def state_dict(self) -> dict[str, Any]:
        """Return one state for all members, with DTensors. Collective."""
        self.gather_state()
        self._share_groups()
        found = super().state_dict()
        beside = [dict(getattr(member, "beside", {})) for member, _ in self._members]
        return {**found, BESIDE: beside} if any(beside) else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned: each member its own groups."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                "FS608",
                f"load_state_dict: the state has {len(groups)} param groups, and the optimizer has "
                f"{len(self.param_groups)}. Make it with the same groups.",
            )
        self._share_groups()
        for number, (member, places) in enumerate(self._members):
            own = [groups[place] for place in places]
            ids = {number for group in own for number in group["params"]}
            states = {key: value for key, value in state_dict["state"].items() if key in ids}
            beside = state_dict.get(BESIDE)
            its = beside[number] if beside else {}
            member.load_state_dict({"state": states, "param_groups": own, **its})
            for place, group in zip(places, member.param_groups, strict=True):
                self.param_groups[place] = group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the member of its ``"cls"``, or to the first one."""
        if not self._members:  # while torch makes this
            super().add_param_group(param_group)
            return
        group = dict(param_group)
        wanted = group.pop("cls", self._main)
        for member, places in self._members:
            if member._plain_class is wanted:
                self._share_groups()
                member.add_param_group(group)
                places.append(len(self.param_groups))
                self.param_groups.append(member.param_groups[-1])
                return
        known = ", ".join(member._plain_class.__name__ for member, _ in self._members)
        raise ConfigError(
            "FS711",
            f"add_param_group: expected one of this optimizer's classes as 'cls', {known}, found "
            f"{getattr(wanted, '__name__', wanted)}. Make an optimizer with a group of that class.",
        )

    @property
    def state_room(self) -> Any:
        """As of an optimizer of owners; members on shards have no states of other shapes."""
        rooms = [m.state_room for m, _ in self._members if hasattr(m, "state_room")]
        return rooms[0] if rooms else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set them to None, or to zero where they lie."""
        zero_gradients(self.param_groups, set_to_none)

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step of every member; what ``whole`` says of it holds for all of them.

        Element-wise members step last, once no other one has failed.
        """
        loss = None
        check_function("step", "closure", closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share_groups()
        wholes = [member for member, _ in self._members if hasattr(member, "gather_state")]
        for member, _ in self._members:
            if member not in wholes:  # before anything is written
                check_groups(member._plain_class, member.param_groups)
        self._step_together(wholes)
        for member, _ in self._members:
            if member not in wholes:
                member.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        groups, table = state.pop("param_groups", None), state.pop("state", None)
        if groups is not None:
            self.param_groups = list(groups)
            self._share_groups()
        if table is not None:
            self.state = table
        super().__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "FS713",
            "fsdp2.optim.whole: an optimizer of several classes cannot be pickled or copied. Use "
            "state_dict() and load_state_dict().",
        )
