"""A step of owners: what happens in which order, on all ranks or on none.

Owns ``WholeOptimizer``, which stands in front of an optimizer class. Who owns what is in
``_core.transfer.owners``, what travels in ``_core.transfer.crew``, and the two forms of the state
in ``_owned_state``. It must not know how users ask for it (``_whole``).

[Note: a step of owners]
1. Ranks agree that all of them are here, on which parameters have gradients, and on the options.
   Owners keep a copy of each matrix from step to step. Parameters that somebody wrote to since the
   last step are sent to their owners again. Versions do not tell that (torch's kernels write to
   DTensors, and ``.data`` writes to anything, without counting one), so each rank compares a sum
   over the bits of its shards with that after the last step.
2. Gradients go to owners, a round after the other; the class's own ``step`` runs on the matrices of
   a round while the next round is on its way. It writes to the owners' copies alone.
3. Ranks agree that no one failed. Up to here no parameter was changed; if one failed, all raise,
   and owners' copies are thrown away.
4. Rows of the copies go back to the shards.

Each round has an optimizer of the class for the matrices that this rank owns in it, with one
parameter for each and the options of the param groups. So the class sees what it sees in one
process, but fewer parameters; what it keeps for a whole param group must not depend on these.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler, torch_dtensor, torch_modes
from fsdp2._core.base.arguments import (
    check_function,
    described,
)
from fsdp2._core.base.errors import ConfigError, FSDPError, StateError, UnsupportedError
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.params.layout import contiguous_stride
from fsdp2._core.params.param import OwnerMark
from fsdp2._core.transfer.crew import Crew, stream
from fsdp2._core.transfer.owners import Cargo, Part, assign, rounds
from fsdp2.optim._local import plain_step
from fsdp2.optim._owned_state import Owned, bring, give_back, room_for_state
from fsdp2.optim._owners import MAX_BYTES, Cost, cost_of
from fsdp2.optim._runs import Table
from fsdp2.optim._zero import zero_gradients

# Options of param groups: what ranks compare of them, and what a step has changed.


def beside_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def own_options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for one round: it may write to a tensor among them, once a step."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in options_of(group).items()
    }


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def text_of(group: Mapping[str, Any]) -> list[str]:
    """Return a param group's options for comparison: of what is no plain value, its class."""

    def text(value: Any) -> str:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        return type(value).__name__

    return [f"{key}={text(value)}" for key, value in sorted(options_of(group).items())]


def short(value: object) -> str:
    """Return a text that is compared over ranks, and shown where it differs."""
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]}... ({zlib.crc32(text.encode()):x})"


def equal(one: Any, other: Any) -> bool:
    """Compare options: numbers and tensors by value, others as they compare."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    try:
        return bool(one == other)
    except Exception:  # what does not compare, as arrays
        return repr(one) == repr(other)


def changes_of(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a step has changed, among them new ones."""
    return {
        key: value
        for key, value in options_of(own).items()
        if key not in group or not equal(group[key], value)
    }


WHO = "fsdp2.optim.whole"

OF_THE_LARGEST = 6
"""Two rounds, in each of which a rank sends as much as a matrix, receives one, and has it whole."""

COUNTS_ELEMENTS = frozenset({"heavyball"})
"""Libraries that note in a param group, as ``param_count``, how many elements it has, once."""

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class How:
    """The arguments of ``whole``."""

    cost: Cost
    wire: torch.dtype | None
    limit: int | None
    batches: bool


@dataclass(eq=False)
class Round:
    """Matrices that travel together. ``inner`` steps this rank's; None: it owns none of them."""

    indices: list[int]
    inner: Optimizer | None = None
    groups: list[int] = field(default_factory=list)  # which param groups those of ``inner`` are


@dataclass(eq=False)
class Fleet:
    """Parameters whose ranks are the same: their matrices, in the order of the param groups."""

    crew: Crew
    owned: list[Owned] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    limit: int = MAX_BYTES
    # of the step that runs: which matrices have gradients, and whose parts were written to
    present: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    fields: dict[int, list[str]] = field(default_factory=dict)  # names in each matrix' state

    @property
    def cargos(self) -> list[Cargo]:
        return [one.cargo for one in self.owned]


class _Seen(defaultdict[Any, Any]):
    """States as they are seen between steps; to clear them clears the owners'."""

    def __init__(self, optimizer: WholeOptimizer) -> None:
        super().__init__(dict)
        self._optimizer = optimizer

    def clear(self) -> None:
        super().clear()
        self._optimizer.state = defaultdict(dict)


class WholeOptimizer:
    """What ``whole`` puts in front of an optimizer class.

    The state has two forms: on the owners, in the optimizers of the rounds (``_is_out``), or in the
    table, by parameter, as ``state_dict`` tells it. See ``_owned_state``.
    """

    _plain_class: type[Optimizer]
    _how: How
    _kwargs: dict[str, Any]
    _given: list[dict[str, Any]] | None  # options of param groups as users gave them
    _counters: dict[str, Any]  # numbers that the class keeps in the optimizer itself
    _table: Table
    _is_out: bool
    beside: dict[str, Any]  # of a state dict, next to the state and the param groups
    _fleets: list[Fleet]
    _planned_for: list[tuple[Tensor, object]]
    _stepped: list[tuple[Fleet, list[int]]]
    _crew_of: Callable[[Any], Crew]
    param_groups: Groups

    def __new__(cls, *args: Any, **kwargs: Any) -> WholeOptimizer:
        self = object.__new__(cls)
        self._table = defaultdict(dict)
        self._is_out = False
        self.beside, self._counters, self._given = {}, {}, None
        self._fleets, self._planned_for, self._stepped = [], [], []
        self._crew_of = Crew.of  # another one where ranks are imagined
        return self

    def _begin(self, how: How, kwargs: dict[str, Any], given: list[dict[str, Any]] | None) -> None:
        self._how, self._kwargs, self._given = how, kwargs, given
        self._table = defaultdict(dict)  # what the class made for stand-ins
        if getattr(self, "_step_supports_amp_scaling", False):
            self._step_supports_amp_scaling = False  # GradScaler unscales shards itself
        wanted = self._norm_of_all()
        if wanted is not None:
            raise ConfigError(
                "FS711",
                f"{WHO}: {wanted} takes a norm of all gradients, and an owner has its own ones "
                "only. Leave it out, and call fsdp2.clip_grad_norm_ before the step.",
            )
        for name, param in self._named():
            if isinstance(param, DTensor) and any(p.is_partial() for p in param.placements):
                raise UnsupportedError(
                    "FS624",
                    f"{WHO}: {name} is a partial sum. Redistribute it to Shard or Replicate.",
                )

    def _norm_of_all(self) -> str | None:
        """Return the option by which a class of a known library takes a norm of all gradients."""
        switch = getattr(self, "pre_norm", None)  # without it a LAMB's max_grad_norm is not used
        if switch:
            return "pre_norm=True"
        limits = [group.get("max_grad_norm") for group in self.param_groups]
        limit = next((one for one in limits if one), None)
        return f"max_grad_norm={limit!r}" if limit and switch is None else None

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters with names for messages."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, param in enumerate(group["params"]):
                owner = OwnerMark.owner_of(param)
                name = f"parameter {place} of param group {number}"
                if names is not None:
                    name = names[place]
                elif owner is not None:
                    name = owner.fqn
                yield name, param

    # --- The state.

    @property
    def state(self) -> Table:
        """States by parameter: what ``state_dict`` told, or what this rank owns now.

        Of what other ranks own, the names of the fields, with None. Only ``clear()`` changes it.
        """
        if not self._is_out:
            return self._table
        table: Table = _Seen(self)
        for fleet in self._fleets:
            for round_ in fleet.rounds:
                for index in round_.indices:
                    one = fleet.owned[index]
                    table[one.param] = dict.fromkeys(fleet.fields.get(index, ()))
                    if round_.inner is not None and one.lead is None and one.whole is not None:
                        table[one.param] = round_.inner.state.get(one.whole, {})
        return table

    @state.setter
    def state(self, table: Table) -> None:
        self._table = table if isinstance(table, defaultdict) else defaultdict(dict, table)
        self._forget_states()

    def kept_tensors(self) -> list[object]:
        """Return what this rank keeps between steps: copies of parameters, and their states."""
        inners = [r.inner for fleet in self._fleets for r in fleet.rounds if r.inner is not None]
        copies = [one.whole for fleet in self._fleets for one in fleet.owned]
        return [copies, [list(s.values()) for inner in inners for s in inner.state.values()]]

    def _forget_states(self) -> None:
        self._is_out = False
        for fleet in self._fleets:
            for round_ in fleet.rounds:
                if round_.inner is not None:
                    round_.inner.state.clear()

    def gather_state(self) -> None:
        """Move states from their owners to DTensors. Collective; ``state_dict`` calls it.

        Raises:
            StateError: the ranks do not agree.
        """
        if not self._is_out:
            return
        with operation(f"{WHO}({self._plain_class.__name__}).state_dict"):
            for fleet in self._fleets:
                give_back(fleet.crew, _held(fleet), self._table, fleet.limit)
            self._note_beside()
        order = [p for group in self.param_groups for p in group["params"] if p in self._table]
        self._table = defaultdict(dict, {param: self._table[param] for param in order})
        self._forget_states()

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict`` returns, with DTensors. Collective."""
        self.gather_state()
        found: dict[str, Any] = cast(Any, super()).state_dict()
        return {**found, **self.beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the plain optimizer's. The next step sends it."""
        cast(Any, super()).load_state_dict(state_dict)
        self.beside = beside_of(state_dict)

    def _note_beside(self) -> None:
        """Keep what a class has outside of states: what its hooks tell, its counters. Collective.

        Optimizers of other rounds will need them.
        """
        inners = [r.inner for fleet in self._fleets for r in fleet.rounds if r.inner is not None]
        own: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        if inners:
            counters = {k: v for k, v in vars(inners[0]).items() if type(v) in (int, float)}
            own = beside_of(inners[0].state_dict()), counters
        grid = max((fleet.crew.grid for fleet in self._fleets), key=lambda grid: grid.size)
        if grid.any_is(any(own)):
            found = [one for one in grid.collect(own) if any(one)]
            self.beside, self._counters = found[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; owners are chosen again in the next step.

        Raises:
            ConfigError: it names another class.
        """
        group = dict(param_group)
        if group.pop("cls", self._plain_class) is not self._plain_class:
            raise ConfigError(
                "FS711",
                f"add_param_group: expected {self._plain_class.__name__}, the optimizer's class, "
                f"as 'cls', found {described(param_group['cls'])}. Make the optimizer with a group "
                "of that class.",
            )
        if self._given is None and self.param_groups and hasattr(self, "_how"):
            self._given = [{} for _ in self.param_groups]
        if self._given is not None:
            self._given.append(options_of(group))
        cast(Any, super()).add_param_group(group)

    @staticmethod
    def state_room(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return room for a state of some shape, placed as ``state_dict`` places it."""
        return room_for_state(param, shape, contiguous_stride(shape), dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set them to None, or to zero where they lie."""
        zero_gradients(self.param_groups, set_to_none)

    # --- A step.

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step. ``closure`` computes the loss again, with gradients; its result is returned.

        Collective over the ranks of the parameters' meshes. See [Note: a step of owners].

        Raises:
            StateError: a rank failed, or ranks differ in which parameters have gradients or in an
                option. Parameters are as they were.
        """
        loss = None
        check_function("step", "closure", closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_together([self])
        return loss

    @property
    def _who(self) -> str:
        return f"{WHO}({self._plain_class.__name__}).step"

    def _plan(self) -> None:
        """Choose owners again if parameters, or where they lie, are others than before."""
        now = [(p, _lies(p)) for group in self.param_groups for p in group["params"]]
        if len(now) == len(self._planned_for) and all(
            one is other and (lies is lay or lies == lay)
            for (one, lies), (other, lay) in zip(now, self._planned_for, strict=True)
        ):
            return
        self.gather_state()
        self._note_facts()
        crews: dict[tuple[int, ...], Fleet] = {}
        names = [name for name, _ in self._named()]
        place = 0
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                is_placed = isinstance(param, DTensor)
                crew = self._crew_of(param.device_mesh) if is_placed else Crew.alone()
                fleet = crews.setdefault(crew.ranks, Fleet(crew))
                leads: list[int | None] = [None]
                if self._how.batches and param.dim() > 2:
                    leads = list(range(param.shape[0]))
                for lead in leads:
                    cut = fleet.crew.cut(names[place], param, lead)
                    cargo = Cargo(cut, 0, param.dtype.itemsize)
                    fleet.owned.append(Owned(names[place], param, number, lead, cargo))
                place += 1
        self._fleets, self._planned_for = list(crews.values()), []
        for fleet in self._fleets:
            self._share_out(fleet)
        self._planned_for = now

    def _note_facts(self) -> None:
        """Set what a library counts of a param group's parameters, if it is not set yet."""
        if self._plain_class.__module__.split(".")[0] not in COUNTS_ELEMENTS:
            return
        for group in self.param_groups:
            group.setdefault("param_count", sum(param.numel() for param in group["params"]))

    def _share_out(self, fleet: Fleet) -> None:
        """Choose owners, rounds, and make the optimizers of the rounds."""
        cuts = [one.cargo.cut for one in fleet.owned]
        costs = [cost_of(WHO, self._how.cost, cut.shape) for cut in cuts]
        sizes = [one.cargo.cut.numel * one.cargo.itemsize for one in fleet.owned]
        for one, owner in zip(fleet.owned, assign(cuts, costs, sizes), strict=True):
            one.cargo = Cargo(one.cargo.cut, owner, one.cargo.itemsize)
        fleet.limit = self._how.limit or max(MAX_BYTES, OF_THE_LARGEST * max(sizes, default=0))
        limit = fleet.limit // 2  # the next round is on its way meanwhile
        fleet.rounds = [Round(batch) for batch in rounds(fleet.cargos, fleet.crew.size, limit)]
        for round_ in fleet.rounds:
            self._make_inner(fleet, round_)

    def _make_inner(self, fleet: Fleet, round_: Round) -> None:
        """Make the optimizer of a round as users made this one: of a list, or of their dicts."""
        mine = [i for i in round_.indices if fleet.owned[i].cargo.owner == fleet.crew.me]
        by_group: dict[int, list[nn.Parameter]] = {}
        for index in mine:
            one = fleet.owned[index]
            by_group.setdefault(one.group, []).append(one.make_whole())
        if not mine:
            return
        round_.groups = sorted(by_group)
        if self._given is None:
            (own,) = by_group.values()
            round_.inner = self._plain_class(own, **self._kwargs)
        else:
            dicts = [{**self._given[n], "params": by_group[n]} for n in round_.groups]
            round_.inner = self._plain_class(dicts, **self._kwargs)
        made = [group["params"] for group in round_.inner.param_groups]
        if [[*map(id, params)] for params in made] != [
            [*map(id, by_group[number])] for number in round_.groups
        ]:
            raise UnsupportedError(
                "FS712",
                f"{self._who}: {self._plain_class.__name__} makes param groups of its own. Pass "
                "it the groups that it makes, as dicts.",
            )
        for name, value in self._counters.items():
            if hasattr(round_.inner, name):
                setattr(round_.inner, name, value)

    def _look(self, fleet: Fleet, same: dict[str, object]) -> None:
        """See what there is to step, and put what ranks must have alike into ``same``."""
        present: list[int] = []
        dtypes = []
        for index, one in enumerate(fleet.owned):
            grad = one.param.grad
            if grad is None:
                continue
            if torch_dtensor.local_part(grad).layout is not torch.strided:
                raise UnsupportedError(
                    "FS703",
                    f"{self._who}: the gradient of {one.name} is sparse. Make the embedding with "
                    "sparse=False.",
                )
            present.append(index)
            dtypes.append((one.name, str(grad.dtype)))
        fleet.present = present
        same["parameters with gradients"] = short(dtypes)
        for number, group in enumerate(self.param_groups):
            same[f"options of param group {number}"] = short(text_of(group))
        same["owners"] = short([one.cargo.owner for one in fleet.owned])
        if not self._is_out:
            entries = (self._table.get(one.param, {}) for one in fleet.owned)
            same["states that were loaded"] = short(
                [sorted((str(k), isinstance(v, DTensor)) for k, v in e.items()) for e in entries]
            )
        prints = [fleet.owned[index].shard_print(fleet.crew.me) for index in present]
        fleet.changed = [0] * len(fleet.owned)
        for index, is_same in zip(present, _same(fleet.owned, present, prints), strict=True):
            fleet.changed[index] = int(not is_same)

    def _compute(self) -> BaseException | None:
        """Step every owned matrix; return what failed on this rank. Collective."""
        failed: BaseException | None = None
        if not self._is_out:
            for fleet in self._fleets:
                try:
                    self._give_beside(fleet)
                except Exception as error:  # told with what fails in the rounds
                    failed = failed or error
                bring(fleet.crew, _held(fleet), self._table, fleet.limit)
            self._table = defaultdict(dict)
            self._is_out = True
        self._stepped = []
        for fleet in self._fleets:
            present = fleet.present
            if not present:
                continue
            if fleet.crew.size > 1:
                fleet.changed = fleet.crew.grid.highest(*fleet.changed)
            self._stepped.append((fleet, present))
            self._bring_parameters(fleet, [index for index in present if fleet.changed[index]])
            failed_here = self._step_rounds(fleet, set(present))
            failed = failed or failed_here
        return failed

    def _give_beside(self, fleet: Fleet) -> None:
        """Let the optimizers of the rounds have what lies beside a state that was loaded."""
        if not self.beside:
            return
        for round_ in fleet.rounds:
            if round_.inner is not None:
                empty = {**round_.inner.state_dict(), "state": {}}
                round_.inner.load_state_dict({**empty, **copy.deepcopy(self.beside)})

    def _bring_parameters(self, fleet: Fleet, wanted: Sequence[int]) -> None:
        """Let owners have the parameters that are not as they left them."""
        if not wanted:
            return
        owned = fleet.owned
        flights = self._stream(
            fleet, wanted, lambda index: owned[index].part(fleet.crew.me), to_owners=True
        )
        for _, parts in flights:
            for index, part, value in parts:
                kept = owned[index].whole
                assert kept is not None
                kept.data[part.region.slices].copy_(value)

    def _stream(
        self, fleet: Fleet, which: Sequence[int], own: Callable[[int], Tensor], *, to_owners: bool
    ) -> Iterator[tuple[list[int], Iterator[tuple[int, Part, Tensor]]]]:
        """Send parameters, in their own dtypes, and in the rounds that there are."""
        chosen = set(which)
        batches = [[i for i in round_.indices if i in chosen] for round_ in fleet.rounds]
        return stream(
            fleet.crew,
            fleet.cargos,
            [one.param.dtype for one in fleet.owned],
            own,
            _device_of(fleet.owned[0].param),
            fleet.limit,
            to_owners=to_owners,
            batches=[batch for batch in batches if batch],
        )

    def _step_rounds(self, fleet: Fleet, present: set[int]) -> BaseException | None:
        """Bring gradients to owners and step their matrices, a round after the other."""
        batches = [[i for i in round_.indices if i in present] for round_ in fleet.rounds]
        of_round = [r for r, batch in zip(fleet.rounds, batches, strict=True) if batch]
        owned = fleet.owned
        grads = {index: owned[index].gradient(self._who) for index in sorted(present)}
        wires = [self._wire_of(one) for one in owned]
        flights = stream(
            fleet.crew,
            [one.cargo_of(wire) for one, wire in zip(owned, wires, strict=True)],
            wires,
            lambda index: owned[index].part(fleet.crew.me, grads[index]),
            _device_of(owned[0].param),
            fleet.limit,
            to_owners=True,
            batches=[batch for batch in batches if batch],
        )
        failed: BaseException | None = None
        for round_, (numbers, parts) in zip(of_round, flights, strict=True):
            try:
                for index in numbers:
                    if owned[index].whole is not None:
                        owned[index].whole_gradient()
                for index, part, value in parts:
                    owned[index].whole_gradient()[part.region.slices].copy_(value)
                if round_.inner is not None and failed is None:
                    self._step_inner(fleet, round_, round_.inner)
            except BaseException as error:  # told, and raised, when all have ended
                failed = failed or error
            finally:
                for index in round_.indices:
                    owned[index].drop_gradient()
        return failed

    def _wire_of(self, one: Owned) -> torch.dtype:
        grad = one.param.grad
        dtype = one.param.dtype if grad is None else grad.dtype
        return (self._how.wire or dtype) if dtype.is_floating_point else dtype

    def _step_inner(self, fleet: Fleet, round_: Round, inner: Optimizer) -> None:
        for own, number in zip(inner.param_groups, round_.groups, strict=True):
            own.update(own_options_of(self.param_groups[number]))
        held = [fleet.owned[i] for i in round_.indices if fleet.owned[i].whole is not None]
        before = [one.identity() for one in held]
        plain_step(self._plain_class)(inner)  # hooks run around our own step
        for one, was in zip(held, before, strict=True):
            if one.identity() != was:
                raise UnsupportedError(
                    "FS712",
                    f"{self._who}: {self._plain_class.__name__} replaced or resized {one.name}, "
                    f"which had shape {one.cargo.cut.shape}, and its shards cannot follow. Use a "
                    "class that writes to parameters where they are.",
                )

    def _options_after(self) -> list[dict[str, Any]]:
        """Return the options that the class has changed, of each param group."""
        found: list[dict[str, Any]] = [{} for _ in self.param_groups]
        for fleet, present in self._stepped:
            stepped = set(present)
            for round_ in fleet.rounds:
                if round_.inner is None or not stepped.intersection(round_.indices):
                    continue
                for place, own in zip(round_.groups, round_.inner.param_groups, strict=True):
                    found[place].update(changes_of(self.param_groups[place], own))
        return found

    def _take_options(self, grids: Sequence[Grid]) -> None:
        """Take over the options that the class has changed, as all ranks have them. Collective.

        Raises:
            StateError: ranks with different parameters have different ones.
        """
        found = self._options_after()
        error: StateError | None = None
        for grid in grids:
            if not grid.any_is(any(found)):
                continue
            for other in grid.collect(found):
                for place, options in enumerate(other):
                    for key, value in options.items():
                        known = found[place].setdefault(key, value)
                        if not equal(known, value):
                            error = StateError(
                                "FS714",
                                f"{self._who}: {self._plain_class.__name__} made {key} of param "
                                f"group {place} of all parameters of the group: {known!r} on one "
                                f"rank, {value!r} on another, of the matrices that they own. Use a "
                                "class that steps each parameter by itself. Parameters are as they "
                                "were.",
                            )
        if len(grids) > 1 or error is not None:
            _tell(error, self._who, [(grid, {}) for grid in grids])
        for group, options in zip(self.param_groups, found, strict=True):
            group.update(options)

    def _write(self) -> None:
        """Give rows of the owners' copies to the shards. Collective."""
        for fleet, present in self._stepped:
            self._note_fields(fleet, present)
            owned = fleet.owned
            flights = self._stream(
                fleet, present, functools.partial(_whole_of, owned), to_owners=False
            )
            for _, parts in flights:
                for index, _, value in parts:
                    owned[index].part(fleet.crew.me).copy_(value)
            for index in present:
                owned[index].printed = owned[index].shard_print(fleet.crew.me)
        self._stepped = []

    def _note_fields(self, fleet: Fleet, present: Sequence[int]) -> None:
        """Learn what owners keep of matrices that were stepped for the first time. Collective."""
        if all(index in fleet.fields for index in present):
            return
        own = {}
        for round_ in fleet.rounds:
            for index in round_.indices:
                kept = fleet.owned[index].whole
                if kept is not None and round_.inner is not None:
                    own[index] = [*round_.inner.state.get(kept, {})]
        for told in fleet.crew.grid.collect(own):
            fleet.fields.update(told)

    def _forget_copies(self) -> None:
        """Let owners get all parameters again: a step failed, and nothing was written."""
        for fleet in self._fleets:
            for one in fleet.owned:
                one.printed = None
        self._stepped = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "state" in state:
            self.state = state.pop("state")
        cast(Any, super()).__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "FS713",
            f"{WHO}({self._plain_class.__name__}): cannot be pickled or copied, because each rank "
            "has states of its own matrices only. Use state_dict() and load_state_dict().",
        )


def step_together(optimizers: Sequence[WholeOptimizer]) -> None:
    """Step some optimizers, all of them or none. See [Note: a step of owners]."""
    if not optimizers:
        return
    who = optimizers[0]._who
    with torch.no_grad(), operation(who):
        failed: BaseException | None = None
        sames: dict[tuple[int, ...], dict[str, object]] = {}
        try:
            for number, one in enumerate(optimizers):
                try:
                    one._plan()
                    for fleet in one._fleets:
                        same: dict[str, object] = {}
                        one._look(fleet, same)
                        told = {f"{key}, {number}" if number else key: v for key, v in same.items()}
                        sames.setdefault(fleet.crew.ranks, {}).update(told)
                except Exception as error:
                    failed = failed or error
            fleets = [fleet for one in optimizers for fleet in one._fleets]
            grids = {fleet.crew.ranks: fleet.crew.grid for fleet in fleets}
            in_order = sorted(grids, key=len)  # the largest last: it hears of the others' failures
            _tell(failed, who, [(grids[ranks], sames.get(ranks, {})) for ranks in in_order])
            for one in optimizers:
                failed = one._compute() or failed
            _tell(failed, who, [(grids[ranks], {}) for ranks in in_order])
            for one in optimizers:
                one._take_options([grids[ranks] for ranks in in_order])
        except BaseException:
            for one in optimizers:
                one._forget_copies()
            raise
        for one in optimizers:
            one._write()


def _tell(
    failed: BaseException | None, who: str, grids: list[tuple[Grid, dict[str, object]]]
) -> None:
    """Raise on the ranks of all grids if one of them has an error, or if ranks differ in something.

    A rank may be in several grids. Who meets an error in one of them says so in all others; the way
    back tells those who asked before.
    """
    back: list[tuple[Grid, dict[str, object]]] = [(grid, {}) for grid, _ in reversed(grids)]
    for grid, same in [*grids, *back] if len(grids) > 1 else grids:
        try:
            grid.raise_together(failed, who, same)
        except BaseException as error:  # raised below
            failed = error if failed is None or isinstance(error, FSDPError) else failed
    if failed is not None:
        raise failed


def _whole_of(owned: Sequence[Owned], place: int) -> Tensor:
    kept = owned[place].whole
    assert kept is not None
    return kept.detach()


def _held(fleet: Fleet) -> list[tuple[Owned, Optimizer | None]]:
    return [(fleet.owned[i], r.inner) for r in fleet.rounds for i in r.indices]


def _same(owned: Sequence[Owned], present: Sequence[int], prints: Sequence[Tensor]) -> list[bool]:
    """Say which parts are as the last step left them: one look, whatever there are of them."""
    known = [owned[index].printed for index in present]
    if not prints or any(one is None for one in known):
        return [False] * len(prints)
    if not torch_modes.has_real_memory():  # a plan; nobody writes there
        return [True] * len(prints)
    before = torch.stack([one for one in known if one is not None])
    flags: list[bool] = (before == torch.stack(list(prints))).all(1).tolist()
    return flags


def _lies(param: Tensor) -> object:
    """Return an object that stays the same as long as a parameter lies as it does."""
    if isinstance(param, DTensor):
        return torch_dtensor.spec_of(param)
    return tuple(param.shape), param.dtype, param.device


def _device_of(param: Tensor) -> torch.device:
    return torch_dtensor.local_part(param).device
