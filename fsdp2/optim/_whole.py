"""Optimizers that step on full matrices: each matrix once, on the rank that owns it.

Ownership is in ``_core.transfer.owners``, communication in ``_core.transfer.peers``, and the two
forms of the state in ``_owned_state``.

[Note: a step of owners]
1. Ranks check that no rank is missing, and that they agree on options and on the parameters that
have gradients. Owners keep a copy of each matrix between steps. Parameters that were written to
after the last step are sent to their owners again. Version counters do not detect all writes
(torch's kernels on DTensors, and writes through ``.data``, do not increment them), so each rank
compares a hash of its shards' bits with the hash after the last step. 2. Gradients are sent to
owners round by round. The class's own ``step`` runs on a round's matrices while the next round is
in flight. This ``step`` writes only to the owners' copies. 3. Ranks check that no rank failed. Up
to this point, no parameter has changed. If a rank failed, all ranks raise, and the owners' copies
are discarded. 4. Rows of the copies are sent back to the shards.

For each round, a rank has an optimizer of the class for the matrices that it owns. This optimizer
has one parameter per matrix, and the options of the param groups. The class runs as in a single
process, but with fewer parameters. Its state per param group must not depend on their number.
"""

from __future__ import annotations

import copy
import functools
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler, torch_dtensor
from fsdp2._core.base.errors import (
    ConfigError,
    FSDPError,
    StateError,
    UnsupportedError,
    check_count,
    check_dtype,
    check_flag,
    described,
    translated,
    wrong_type,
    wrong_value,
)
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.params.deals import newton_schulz_flops
from fsdp2._core.params.layout import contiguous_stride
from fsdp2._core.params.param import OwnerMark
from fsdp2._core.transfer.owners import Cargo, assign, rounds
from fsdp2._core.transfer.peers import Freight, Peers
from fsdp2.optim._local import ELEMENTWISE, OptimizerT, local, needs_closure
from fsdp2.optim._owned_state import Owned, bring, give_back, room_for_state
from fsdp2.optim._owners import MAX_BYTES, Cost, cost_of
from fsdp2.optim._several import Several
from fsdp2.optim._wrapped import (
    Groups,
    Table,
    Wrapped,
    as_table,
    in_order,
    loss_of,
    params_of,
    plain_step,
    wrapped_class,
)

WHO = "fsdp2.optim.whole"

_DADAPT = ("AdaGrad", "Adam", "SGD", "Adan", "AdanIP", "Lion")
_SAM = ("SAM", "GSAM", "WSAM", "BSAM", "LookSAM", "FriendlySAM")
NEEDS_ALL = frozenset(
    {"LBFGS", "Prodigy", "AdaGC", "Adai", *(f"DAdapt{name}" for name in _DADAPT), *_SAM}
)
"""Classes in torch and known libraries that compute a value from all parameters together."""


def whole(
    cls: type[OptimizerT],
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
    *,
    owners: str | Cost = "balanced",
    wire_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    batches: bool | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """Make an optimizer of class ``cls`` that steps on full matrices, each matrix on one rank.

    Supports unmodified optimizers that need full matrices (Muon, Shampoo, SOAP, Adafactor, LAMB).
    Every parameter has an owner among the ranks that hold its parts, including replicas and
    tensor-parallel ranks. Gradients are sent to the owners in rounds, ``cls`` steps each full
    parameter once, and each rank receives its updated rows. Results are equal to those of ``cls``
    in a single process with the same gradients.

    The result is an instance of ``cls``, with param groups and hooks, so learning-rate schedulers
    and ``GradScaler`` accept it. Before a step, gradients are sharded as usual and can be clipped.
    An owner keeps copies of its parameters, and their states. Together, these need about as much
    memory as shards of both would. If a step fails on any rank, all ranks raise, and parameters are
    unchanged. States that were already updated are then one step ahead: reload them, or continue.

    ``step``, ``state_dict`` and the functions of ``fsdp2.checkpoint`` are collective. On each rank,
    ``state`` has the states that the rank owns, and only the field names of other states.
    ``state_dict()`` moves states into DTensors, and the next step moves them back. The DTensors
    have the placements of their parameters, or are sharded on dim 0 if their shapes differ.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``, from torch or another library.
        params: as for ``cls``; sharded, tensor-parallel and plain parameters of any dtype. A param
            group may name another class as ``"cls"`` (such as AdamW for embeddings and vectors);
            the result then combines the classes. Element-wise classes step on local shards.
        owners: ``"balanced"`` balances the FLOPs of Newton-Schulz steps; a function from a matrix's
            shape to its cost balances this cost. Ties are broken by bytes.
        wire_dtype: the dtype in which floating-point gradients are sent; None: their own.
            Parameters are sent back in their own dtype.
        max_bytes: upper bound on the bytes of communication buffers and full gradients. A single
            matrix may exceed it. With six times the size of the largest matrix, each owner can
            process one matrix at a time. None: the larger of this value and 256 MiB.
        batches: treat a parameter of three or more dims as a batch of matrices along its first dim.
            Each matrix has an owner, and is a separate parameter of ``cls``. None: True for
            ``torch.optim.Muon``, which accepts only matrices.
        kwargs: the arguments of ``cls``, for the groups that specify no other class.

    Raises:
        ConfigError: ``cls`` needs all parameters together, or rejects the arguments.
        UnsupportedError: a class whose ``step`` requires a closure; a parameter that wraps other
            tensors, or is a partial sum.

    Source: ``cls``; the choice of one owner per matrix follows DistributedShampoo and the
    distributed Muon of Moonlight (arXiv 2502.16982).
    """
    _check_class(cls)
    is_balanced = isinstance(owners, str) and owners == "balanced"
    if not is_balanced and not callable(owners):
        raise wrong_value(WHO, "owners", "'balanced' or a function of a shape", owners)
    check_dtype(WHO, "wire_dtype", wire_dtype)
    check_count(WHO, "max_bytes", MAX_BYTES if max_bytes is None else max_bytes)
    how = How(
        newton_schulz_flops if is_balanced else cast(Cost, owners),
        wire_dtype,
        max_bytes,
        _takes_batches(cls) if batches is None else batches,
    )
    if batches is not None:
        check_flag(WHO, "batches", batches)
    if not isinstance(params, Iterable):
        raise wrong_type(WHO, "params", "tensors, or dicts of them", params)
    given = params if isinstance(params, Tensor) else list(cast(Any, params))
    if isinstance(given, list) and any(isinstance(g, Mapping) and "cls" in g for g in given):
        odd = [g for g in given if not isinstance(g, Mapping)]
        if odd:
            raise wrong_type(WHO, "params", "only dicts, as one of them has 'cls'", odd[0])
        return cast(OptimizerT, _several(cls, given, how, kwargs))
    return cast(OptimizerT, _make(cls, given, how, kwargs))


def _several(cls: type[Optimizer], groups: list[Any], how: How, kwargs: Any) -> Any:
    by_class: dict[type[Optimizer], list[int]] = {}
    for place, group in enumerate(groups):
        own = group.get("cls", cls)
        _check_class(own)
        by_class.setdefault(own, []).append(place)
    members: list[tuple[Any, list[int]]] = []
    for own, places in by_class.items():
        its = [{k: v for k, v in groups[place].items() if k != "cls"} for place in places]
        if own is cls:
            members.append((_make(own, its, how, kwargs), places))
        elif own in ELEMENTWISE:
            members.append((local(own, its), places))
        else:
            its_how = replace(how, batches=_takes_batches(own))
            members.append((_make(own, its, its_how, {}), places))
    return Several(cls, members, step_together)


def _takes_batches(cls: type[Optimizer]) -> bool:
    """Return True for a class that accepts only matrices, so that further dims are batch dims."""
    return issubclass(cls, torch.optim.Muon)


def _check_class(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise wrong_type(WHO, "cls", "a subclass of torch.optim.Optimizer", cls)
    needs_all = next((c.__name__ for c in cls.__mro__ if c.__name__ in NEEDS_ALL), None)
    if needs_all is not None:
        raise ConfigError(
            "FS711",
            f"{WHO}: {needs_all} computes a value from all parameters together, but each owner has "
            "only its own parameters. Use a class that steps each parameter independently.",
        )
    if needs_closure(cls):
        raise UnsupportedError(
            "FS703",
            f"{WHO}: {cls.__name__}.step requires a closure, so it computes the loss during a "
            "step, but owners need gradients beforehand. Use a class whose step needs no closure.",
        )


def _make(
    cls: type[Optimizer],
    params: Any,
    how: How,
    kwargs: dict[str, Any],
) -> Any:
    """Make the optimizer. ``cls`` gets placeholders on the meta device, which use no memory."""
    stand_in: dict[Tensor, nn.Parameter] = {}  # placeholders by their parameters

    def placeholder(given: Any) -> Any:
        if isinstance(given, Mapping):
            inner = given["params"]
            single = isinstance(inner, Tensor)
            return {**given, "params": placeholder(inner) if single else [*map(placeholder, inner)]}
        if isinstance(given, tuple) and len(given) == 2:
            return (given[0], placeholder(given[1]))
        if not isinstance(given, Tensor):
            raise wrong_type(WHO, "params", "tensors, or dicts of them", given)
        if not (given.is_leaf or given.retains_grad):
            raise wrong_value(WHO, "params", "parameters", "the result of an operation")
        if given not in stand_in:
            shape = given.shape[1:] if how.batches and given.dim() > 2 else given.shape
            empty = torch.empty(shape, dtype=given.dtype, device="meta")
            stand_in[given] = nn.Parameter(empty, requires_grad=given.requires_grad)
        return stand_in[given]

    try:
        stands = params if isinstance(params, Tensor) else [*map(placeholder, params)]
        methods = [(name, getattr(cls, name, None)) for name in MODES]
        switches = {name: _on_shards(method) for name, method in methods if callable(method)}
        optimizer = wrapped_class("Whole", WholeOptimizer, cls, **switches)(stands, **kwargs)
    except FSDPError:
        raise
    except Exception as error:
        raise translated(f"{WHO}: {cls.__name__} rejected its arguments", error) from error
    real = {stand: given for given, stand in stand_in.items()}
    for group in optimizer.param_groups:
        group["params"] = [real[stand] for stand in group["params"]]
    is_grouped = isinstance(params, list) and any(isinstance(one, Mapping) for one in params)
    given = [options_of(one) for one in params] if is_grouped else None
    optimizer._begin(how, kwargs, given)
    return optimizer


MODES = ("train", "eval")
"""Methods in which a schedulefree class swaps the parameters' values with its states."""


def _on_shards(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def switch(self: WholeOptimizer, *args: Any, **kwargs: Any) -> Any:
        self.gather_state()
        return method(self, *args, **kwargs)

    return switch


# Param-group options: comparing them across ranks, and detecting changes made by a step.


def beside_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def text_of(group: Mapping[str, Any]) -> list[str]:
    """Return a param group's options as text to compare. Non-plain values appear as their class."""

    def text(value: Any) -> str:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        return type(value).__name__

    return [f"{key}={text(value)}" for key, value in sorted(options_of(group).items())]


def short(value: object) -> str:
    """Return a value as short text. Ranks compare these texts; an error shows different ones."""
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]}... ({zlib.crc32(text.encode()):x})"


def equal(one: Any, other: Any) -> bool:
    """Compare options: tensors by dtype and values, other options by ``==``."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    try:
        return bool(one == other)
    except Exception:  # results without a truth value, such as comparisons of arrays
        return repr(one) == repr(other)


OF_THE_LARGEST = 6
"""For each of two rounds, three matrices on a rank: one sent, one received, and one unpacked."""

COUNTS_ELEMENTS = frozenset({"heavyball"})
"""Libraries that record a param group's number of elements once, as ``param_count``."""


@dataclass(frozen=True)
class How:
    cost: Cost
    wire: torch.dtype | None
    limit: int | None
    batches: bool


@dataclass(eq=False)
class Round:
    """Matrices sent together. ``inner`` steps those that this rank owns; None if it owns none."""

    indices: list[int]
    inner: Optimizer | None = None
    groups: list[int] = field(default_factory=list)  # the indices of ``inner``'s param groups


@dataclass(eq=False)
class Fleet:
    """The matrices of parameters on the same ranks, in the order of the param groups."""

    peers: Peers
    owned: list[Owned] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    limit: int = MAX_BYTES
    # for the current step: matrices with gradients, and a flag for each of them if written to
    present: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    fields: dict[int, list[str]] = field(default_factory=dict)  # field names of each matrix's state

    def whole(self, index: int) -> Tensor:
        whole = self.owned[index].whole
        assert whole is not None
        return whole.data

    def rounds_of(self, which: Sequence[int]) -> list[tuple[Round, list[int]]]:
        """Return the rounds that contain given matrices, each with the given matrices in it."""
        chosen = set(which)
        found = [(one, [i for i in one.indices if i in chosen]) for one in self.rounds]
        return [(round_, batch) for round_, batch in found if batch]

    def freight(self, which: Sequence[int]) -> Freight:
        return Freight(
            self.peers,
            [one.param for one in self.owned],
            [one.cargo for one in self.owned],
            self.limit,
            [batch for _, batch in self.rounds_of(which)],
        )


class _Seen(defaultdict[Any, Any]):
    """States as visible between steps. Clearing this table clears the owners' states."""

    def __init__(self, optimizer: WholeOptimizer) -> None:
        super().__init__(dict)
        self._optimizer = optimizer

    def clear(self) -> None:
        super().clear()
        self._optimizer.state = defaultdict(dict)


class WholeOptimizer(Wrapped):
    """The base class of ``whole``'s optimizers. If ``_is_out``, the state is on the owners, in the
    rounds' optimizers; otherwise, in the table, as in ``state_dict``. See ``_owned_state``.
    """

    def _start(self) -> None:
        self._table: Table = defaultdict(dict)
        self._is_out = False
        # state-dict entries other than the state and the param groups
        self.beside: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}  # numbers that the class keeps on the optimizer itself
        self._given: list[dict[str, Any]] | None = None  # the user's options of param groups
        self._fleets: list[Fleet] = []
        self._planned_for: list[tuple[int, object]] = []
        self._peers_of: Callable[[Any], Peers] = Peers.of  # replaced for simulated ranks

    def _begin(
        self,
        how: How,
        kwargs: dict[str, Any],
        given: list[dict[str, Any]] | None,
    ) -> None:
        self._how, self._kwargs, self._given = how, kwargs, given
        self._table = defaultdict(dict)  # drops states made for placeholders
        if getattr(self, "_step_supports_amp_scaling", False):
            self._step_supports_amp_scaling = False  # GradScaler unscales shards itself
        wanted = _norm_of_all(self)
        if wanted is not None:
            raise ConfigError(
                "FS711",
                f"{WHO}: {wanted} computes a norm of all gradients, but each owner has only its "
                "own. Omit it, and call fsdp2.clip_grad_norm_ before the step.",
            )
        for _, name, param in _named(self.param_groups):
            if isinstance(param, DTensor) and any(p.is_partial() for p in param.placements):
                raise UnsupportedError(
                    "FS624",
                    f"{WHO}: {name} is a partial sum. Redistribute it to Shard or Replicate.",
                )

    # --- The state.

    @property
    def state(self) -> Table:
        """States by parameter: of the last ``state_dict`` or, after a step, those of this rank.

        Other states have only field names, with value None. Only ``clear()`` changes states.
        """
        if not self._is_out:
            return self._table
        table: Table = _Seen(self)
        for fleet in self._fleets:
            for index, one in enumerate(fleet.owned):
                is_here = one.inner is not None and one.lead is None
                names = fleet.fields.get(index, ())
                table[one.param] = one.state if is_here else dict.fromkeys(names)
        return table

    @state.setter
    def state(self, table: Table) -> None:
        self._table = as_table(table)
        self._forget_states()

    def kept_tensors(self) -> list[object]:
        """Return the tensors that this rank keeps between steps: parameter copies and states."""
        copies = [one.whole for fleet in self._fleets for one in fleet.owned]
        states = [list(s.values()) for inner in self._inners for s in inner.state.values()]
        return [copies, states]

    @property
    def _inners(self) -> list[Optimizer]:
        rounds = [round_ for fleet in self._fleets for round_ in fleet.rounds]
        return [round_.inner for round_ in rounds if round_.inner is not None]

    def _forget_states(self) -> None:
        self._is_out = False
        for inner in self._inners:
            inner.state.clear()

    def gather_state(self) -> None:
        """Move states from their owners to DTensors. Collective; ``state_dict`` calls it."""
        if not self._is_out:
            return
        with operation(f"{WHO}({self._plain_class.__name__}).state_dict"):
            for fleet in self._fleets:
                give_back(fleet.peers, fleet.owned, self._table, fleet.limit)
            self._note_beside()
        self._table = in_order(self._table, self.param_groups)
        self._forget_states()

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the plain optimizer, but with DTensors. Collective."""
        self.gather_state()
        found: dict[str, Any] = cast(Any, super()).state_dict()
        return {**found, **self.beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` from this or the plain optimizer. The next step distributes it."""
        cast(Any, super()).load_state_dict(state_dict)
        self.beside = beside_of(state_dict)

    def _note_beside(self) -> None:
        """Store the class's counters, and the entries that it adds to state dicts. Collective."""
        own: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for inner in self._inners[:1]:
            counters = {k: v for k, v in vars(inner).items() if type(v) in (int, float)}
            own = beside_of(inner.state_dict()), counters
        grid = max((fleet.peers.grid for fleet in self._fleets), key=lambda grid: grid.size)
        if grid.any_is(any(own)):
            found = [one for one in grid.collect(own) if any(one)]
            self.beside, self._counters = found[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for this optimizer's class; the next step chooses owners again."""
        group = dict(param_group)
        if group.pop("cls", self._plain_class) is not self._plain_class:
            raise ConfigError(
                "FS711",
                f"add_param_group: expected 'cls' to be {self._plain_class.__name__}, the "
                f"optimizer's class, found {described(param_group['cls'])}. Create the optimizer "
                "with a group of that class.",
            )
        if self._given is None and self.param_groups and hasattr(self, "_how"):
            self._given = [{} for _ in self.param_groups]
        if self._given is not None:
            self._given.append(options_of(group))
        cast(Any, super()).add_param_group(group)

    @staticmethod
    def state_room(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a state of a given shape, placed as ``state_dict`` places it."""
        return room_for_state(param, shape, contiguous_stride(shape), dtype)

    # --- A step.

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step. ``closure`` recomputes the loss and gradients; its result is returned.

        Collective over the ranks of the parameters' meshes. See [Note: a step of owners].

        Raises:
            StateError: a rank failed, or ranks differ in an option or in which parameters have
                gradients. Parameters are unchanged.
        """
        loss = loss_of(closure)
        step_together([self])
        return loss

    @property
    def _who(self) -> str:
        return f"{WHO}({self._plain_class.__name__}).step"

    def _plan(self) -> None:
        now = [(id(param), _lies(param)) for param in params_of(self.param_groups)]
        if now == self._planned_for:  # the fleets keep the parameters alive
            return
        self.gather_state()
        if self._plain_class.__module__.split(".")[0] in COUNTS_ELEMENTS:
            for group in self.param_groups:
                group.setdefault("param_count", sum(param.numel() for param in group["params"]))
        by_ranks: dict[tuple[int, ...], Fleet] = {}
        for number, name, param in _named(self.param_groups):
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            peers = Peers.alone() if mesh is None else self._peers_of(mesh)
            fleet = by_ranks.setdefault(peers.ranks, Fleet(peers))
            is_batch = self._how.batches and param.dim() > 2
            for lead in range(param.shape[0]) if is_batch else (None,):
                cargo = Cargo(fleet.peers.cut(name, param, lead), 0, param.dtype)
                fleet.owned.append(Owned(name, param, number, lead, cargo))
        self._fleets, self._planned_for = list(by_ranks.values()), []
        for fleet in self._fleets:
            self._share_out(fleet)
        self._planned_for = now

    def _share_out(self, fleet: Fleet) -> None:
        cuts = [one.cargo.cut for one in fleet.owned]
        costs = [cost_of(WHO, self._how.cost, cut.shape) for cut in cuts]
        sizes = [one.cargo.nbytes for one in fleet.owned]
        for one, owner in zip(fleet.owned, assign(cuts, costs, sizes), strict=True):
            one.cargo = replace(one.cargo, owner=owner)
        fleet.limit = self._how.limit or max(MAX_BYTES, OF_THE_LARGEST * max(sizes, default=0))
        limit = fleet.limit // 2  # another round is in flight at the same time
        cargos = [one.cargo for one in fleet.owned]
        fleet.rounds = [Round(batch) for batch in rounds(cargos, fleet.peers.size, limit)]
        for round_ in fleet.rounds:
            owned = [fleet.owned[index] for index in round_.indices]
            self._make_inner(round_, [one for one in owned if one.cargo.owner == fleet.peers.me])

    def _make_inner(self, round_: Round, mine: Sequence[Owned]) -> None:
        """Create a round's optimizer as this one was created, from a list or from dicts."""
        if not mine:
            return
        by_group: dict[int, list[nn.Parameter]] = {}
        for one in mine:
            by_group.setdefault(one.group, []).append(one.make_whole())
        round_.groups = sorted(by_group)
        given: Any = next(iter(by_group.values()))  # if there are several, the check below fails
        if self._given is not None:
            given = [{**self._given[n], "params": by_group[n]} for n in round_.groups]
        inner = self._plain_class(given, **self._kwargs)
        made = [[*map(id, group["params"])] for group in inner.param_groups]
        if made != [[*map(id, by_group[number])] for number in round_.groups]:
            raise UnsupportedError(
                "FS712",
                f"{self._who}: {self._plain_class.__name__} creates its own param groups. Pass "
                "the groups that it creates, as dicts.",
            )
        for name, value in self._counters.items():
            if hasattr(inner, name):
                setattr(inner, name, value)
        round_.inner = inner
        for one in mine:
            one.inner = inner

    def _look(self, fleet: Fleet) -> dict[str, object]:
        """Find the matrices to step, and return the values that must be equal on all ranks."""
        same: dict[str, object] = {}
        present: list[int] = []
        dtypes = []
        for index, one in enumerate(fleet.owned):
            grad = one.param.grad
            if grad is None:
                continue
            if torch_dtensor.local_part(grad).layout is not torch.strided:
                raise UnsupportedError(
                    "FS703",
                    f"{self._who}: the gradient of {one.name} is sparse. Create the embedding with "
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
        owned = [fleet.owned[index] for index in present]
        prints = [one.shard_print(fleet.peers.me) for one in owned]
        known = [one.printed for one in owned if one.printed is not None]
        fleet.changed = [int(len(known) < len(owned))] * len(owned)
        # a plan's fake tensors are never written to
        if known and len(known) == len(owned) and torch_dtensor.has_real_memory():
            is_changed = (torch.stack(known) != torch.stack(prints)).any(1)
            fleet.changed = is_changed.int().tolist()  # synchronizes once
        return same

    def _compute(self) -> BaseException | None:
        """Step every owned matrix; return this rank's exception, if any. Collective."""
        failed: BaseException | None = None
        if not self._is_out:
            try:  # pass the extra entries of a loaded state dict to the rounds' optimizers
                for inner in self._inners if self.beside else ():
                    empty = {**inner.state_dict(), "state": {}}
                    inner.load_state_dict({**empty, **copy.deepcopy(self.beside)})
            except Exception as error:  # reported with failures of the rounds
                failed = error
            for fleet in self._fleets:
                bring(fleet.peers, fleet.owned, self._table, fleet.limit)
            self._table = defaultdict(dict)
            self._is_out = True
        for fleet in self._fleets:
            if not fleet.present:
                continue
            fleet.changed = fleet.peers.grid.highest(*fleet.changed)
            wanted = list(itertools.compress(fleet.present, fleet.changed))
            if wanted:  # owners' copies are out of date
                fleet.freight(wanted).to_owners(fleet.whole)
            failed_here = self._step_rounds(fleet)
            failed = failed or failed_here
        return failed

    def _step_rounds(self, fleet: Fleet) -> BaseException | None:
        owned, present = fleet.owned, fleet.present
        grads = {index: owned[index].gradient(self._who) for index in present}
        freight = replace(
            fleet.freight(present),
            tensors=[grads.get(index, one.param) for index, one in enumerate(owned)],
            cargos=[one.gradient_cargo(self._how.wire) for one in owned],
        )
        flights = freight.flights(freight.part, to_owners=True)
        failed: BaseException | None = None
        for (round_, _), flight in zip(fleet.rounds_of(present), flights, strict=True):
            try:
                for index in flight.indices:
                    if owned[index].whole is not None:
                        owned[index].whole_gradient()
                flight.land(lambda index: owned[index].whole_gradient())
                if round_.inner is not None and failed is None:
                    self._step_inner(fleet, round_, round_.inner)
            except BaseException as error:  # reported and raised after all rounds
                failed = failed or error
            finally:
                for one in map(owned.__getitem__, round_.indices):
                    if one.whole is not None:
                        one.whole.grad = None
        return failed

    def _step_inner(self, fleet: Fleet, round_: Round, inner: Optimizer) -> None:
        for own, number in zip(inner.param_groups, round_.groups, strict=True):
            for key, value in options_of(self.param_groups[number]).items():
                # a copy, so that writes to tensor options do not add up over rounds
                own[key] = value.detach().clone() if isinstance(value, Tensor) else value
        held = [fleet.owned[i] for i in round_.indices if fleet.owned[i].whole is not None]
        before = [one.identity() for one in held]
        plain_step(self._plain_class)(inner)  # hooks run around our step
        for one, was in zip(held, before, strict=True):
            if one.identity() != was:
                raise UnsupportedError(
                    "FS712",
                    f"{self._who}: {self._plain_class.__name__} replaced or resized {one.name}, "
                    f"which had shape {one.cargo.cut.shape}, so its shards cannot be updated. Use "
                    "a class that writes to parameters in place.",
                )

    def _take_options(self, grids: Sequence[Grid]) -> None:
        """Adopt all ranks' changes to options. Raise StateError if the changes differ."""
        found: list[dict[str, Any]] = [{} for _ in self.param_groups]
        for fleet in self._fleets:
            for round_, _ in fleet.rounds_of(fleet.present):
                groups = [] if round_.inner is None else round_.inner.param_groups
                for place, own in zip(round_.groups, groups, strict=True):
                    before = self.param_groups[place]
                    for key, value in options_of(own).items():
                        if key not in before or not equal(before[key], value):
                            found[place][key] = value
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
                                f"{self._who}: {self._plain_class.__name__} computed {key} of "
                                f"param group {place} over all parameters of the group: {known!r} "
                                f"on one rank, {value!r} on another, because each rank has only "
                                "its own matrices. Use a class that steps each parameter "
                                "independently. Parameters are unchanged.",
                            )
        if len(grids) > 1 or error is not None:
            _tell(error, self._who, [(grid, {}) for grid in grids])
        for group, options in zip(self.param_groups, found, strict=True):
            group.update(options)

    def _write(self) -> None:
        for fleet in self._fleets:
            if not fleet.present:
                continue
            if any(index not in fleet.fields for index in fleet.present):
                # exchange the field names of states of matrices stepped for the first time
                own = {
                    i: [*one.state] for i, one in enumerate(fleet.owned) if one.inner is not None
                }
                for told in fleet.peers.grid.collect(own):
                    fleet.fields.update(told)
            fleet.freight(fleet.present).from_owners(fleet.whole)
            for index in fleet.present:
                fleet.owned[index].printed = fleet.owned[index].shard_print(fleet.peers.me)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "FS713",
            f"{WHO}({self._plain_class.__name__}) cannot be pickled or copied, because each rank "
            "has only the states of its own matrices. Use state_dict() and load_state_dict().",
        )


def step_together(optimizers: Sequence[WholeOptimizer]) -> None:
    """Step several optimizers atomically: all or none. See [Note: a step of owners]."""
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
                        same = sames.setdefault(fleet.peers.ranks, {})
                        for key, value in one._look(fleet).items():
                            same[f"{key}, {number}" if number else key] = value
                except Exception as error:
                    failed = failed or error
            fleets = [fleet for one in optimizers for fleet in one._fleets]
            grids = {fleet.peers.ranks: fleet.peers.grid for fleet in fleets}
            in_order = sorted(grids, key=len)  # the largest grid is last, and reports all errors
            _tell(failed, who, [(grids[ranks], sames.get(ranks, {})) for ranks in in_order])
            for one in optimizers:
                failed = one._compute() or failed
            _tell(failed, who, [(grids[ranks], {}) for ranks in in_order])
            for one in optimizers:
                one._take_options([grids[ranks] for ranks in in_order])
        except BaseException:
            # the owners' copies are invalid: the step failed, and no shard was written
            for fleet in (fleet for one in optimizers for fleet in one._fleets):
                for owned in fleet.owned:
                    owned.printed = None
            raise
        for one in optimizers:
            one._write()


def _tell(
    failed: BaseException | None, who: str, grids: list[tuple[Grid, dict[str, object]]]
) -> None:
    """Raise on the ranks of all grids if one rank has an error, or if ranks differ in a value. A
    rank in several grids reports errors of one grid to the later grids. A second pass, in reverse
    order, reports them to the earlier grids.
    """
    back: list[tuple[Grid, dict[str, object]]] = [(grid, {}) for grid, _ in reversed(grids)]
    for grid, same in [*grids, *back] if len(grids) > 1 else grids:
        try:
            grid.raise_together(failed, who, same)
        except BaseException as error:  # raised below
            failed = error if failed is None or isinstance(error, FSDPError) else failed
    if failed is not None:
        raise failed


def _norm_of_all(optimizer: Any) -> str | None:
    """Return the option, if any, that makes a known class use a norm of all gradients."""
    switch = getattr(optimizer, "pre_norm", None)  # if off, LAMB ignores max_grad_norm
    if switch:
        return "pre_norm=True"
    limits = [group.get("max_grad_norm") for group in optimizer.param_groups]
    limit = next((one for one in limits if one), None)
    return f"max_grad_norm={limit!r}" if limit and switch is None else None


def _named(groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """Yield each parameter, after its group number and its name for messages."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            owner = OwnerMark.owner_of(param)
            name = f"parameter {place} of param group {number}"
            if names is not None:
                name = names[place]
            elif owner is not None:
                name = owner.fqn
            yield number, name, param


def _lies(param: Tensor) -> object:
    if isinstance(param, DTensor):
        return torch_dtensor.spec_of(param)
    return tuple(param.shape), param.dtype, param.device
