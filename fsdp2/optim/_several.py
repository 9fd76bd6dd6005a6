"""An optimizer that combines members of several classes. Each member has its own param groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2.optim._local import check_groups
from fsdp2.optim._wrapped import Wrapped, loss_of, params_of

BESIDE = "beside"
"""Key in a state dict for the additional entries that hooks of the members' classes add."""

Member = tuple[Any, list[int]]  # an optimizer, and the indices of its param groups


class Several(Wrapped, Optimizer):
    """Combines members with separate param groups. ``step_together`` steps members with owners."""

    def __init__(
        self,
        main: type[Optimizer],
        members: Sequence[Member],
        step_together: Callable[[Sequence[Any]], None],
    ) -> None:
        self._members: list[Member] = []
        self._main = main  # the class for groups that do not specify a class
        by_place: dict[int, dict[str, Any]] = {}
        for member, places in members:
            by_place.update(zip(places, member.param_groups, strict=True))
        groups = [by_place[place] for place in sorted(by_place)]
        first, *others = (member.defaults for member, _ in members)
        common = {k: v for k, v in first.items() if all(k in other for other in others)}
        super().__init__([dict(group) for group in groups], common)
        self.param_groups = groups  # shared with the members, so that schedulers update both
        self._members = list(members)
        self._step_together = step_together

    def _share_groups(self) -> None:
        for member, places in self._members:
            member.param_groups = [self.param_groups[place] for place in places]

    @property
    def state(self) -> Any:
        merged: Any = defaultdict(dict)
        for member, _ in self._members:
            merged.update(member.state)
        return merged

    @state.setter
    def state(self, table: Any) -> None:
        for member, _ in self._members:
            own = set(params_of(member.param_groups))
            member.state = defaultdict(dict, {p: s for p, s in table.items() if p in own})

    @property
    def _by_owners(self) -> list[Any]:
        """The members that step full matrices; the others step shards."""
        return [member for member, _ in self._members if hasattr(member, "gather_state")]

    def gather_state(self) -> None:
        """Move states from their owners to DTensors. Collective; ``state_dict`` calls it."""
        for member in self._by_owners:
            member.gather_state()

    def state_dict(self) -> dict[str, Any]:
        self.gather_state()
        self._share_groups()
        found = super().state_dict()
        beside = [dict(getattr(member, "beside", {})) for member, _ in self._members]
        return {**found, BESIDE: beside} if any(beside) else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                "FS608",
                f"load_state_dict: the state has {len(groups)} param groups, but the optimizer has "
                f"{len(self.param_groups)}. Create the optimizer with the same groups.",
            )
        self._share_groups()
        self.param_groups = list(self.param_groups)  # an undo of this load has the old list
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
        """Add a group to the member of the class ``group["cls"]``, by default the main class."""
        if not self._members:  # called by torch's constructor
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
            f"add_param_group: expected 'cls' to be one of this optimizer's classes, {known}, "
            f"found {getattr(wanted, '__name__', wanted)}. Create the optimizer with a group of "
            "this class.",
        )

    @property
    def state_room(self) -> Any:
        """The ``state_room`` of a member for full matrices; members for shards do not need one."""
        return next((member.state_room for member in self._by_owners), None)

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member, with the guarantees of ``whole``; element-wise members step last."""
        loss = loss_of(closure)
        self._share_groups()
        by_owners = self._by_owners
        others = [member for member, _ in self._members if member not in by_owners]
        for member in others:  # check before anything is written
            check_groups(member._plain_class, member.param_groups)
        self._step_together(by_owners)
        for member in others:
            member.step()
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "FS713",
            "fsdp2.optim.whole: an optimizer of several classes cannot be pickled or copied. Use "
            "state_dict() and load_state_dict().",
        )
