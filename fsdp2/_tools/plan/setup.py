"""What a plan was asked for, so that it can be asked again with one thing changed.

Owns the checked arguments, the copy of the model that every run copies, and one such run. It must
not know what is made of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.api.collect import WrapPolicy
from fsdp2._core.base import torch_modes, torch_modules
from fsdp2._core.base.arguments import (
    check_count,
    check_flag,
    check_function,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2._tools.plan.batches import arguments_of, check_batch, mean_of
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.imagined import groups_of, make_mesh, without_memory
from fsdp2._tools.plan.step import StepRun
from fsdp2._tools.plan.stepped import OPTIMIZER_WANTED
from fsdp2._tools.plan.traced import Traces
from fsdp2._tools.plan.values import GroupPlan, StepPlan, describe
from fsdp2.wrap import shard_model

# Who listens to what is being planned: a plan of a large model takes seconds, and says so.

Listener = Callable[[str], None]
_listeners: list[Listener] = []


def tell(what: str) -> None:
    """Say what begins now, in a few words; empty: it is over."""
    for listener in tuple(_listeners):
        listener(what)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a function hear what is planned inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


MAX_RANKS = 1 << 20
MOST_READY = 2
"""So many sharded copies are kept: that of the plan as it was asked for, and the last other one."""
OF_A_STEP = frozenset({"batch", "loss_chunks", "activation_checkpointing"})
"""What a sharded copy can be asked anew: in all else copies differ. Of ``memory`` see ``Template``.

A step of several micro-batches, and one whose activations leave, begin with what others left.
"""


class Template:
    """A model without memory, and sharded copies of it that have taken steps.

    A copy that has taken steps knows what an engine learns in the first one, so a plan that differs
    in the batch, say, is one step of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mode = torch_modes.without_memory()
        self._traces = Traces()
        self._known: dict[tuple[Any, ...], tuple[Setup, Found]] = {}
        self._ready: dict[tuple[Any, ...], StepRun] = {}
        self.is_sharded = bool(groups_of(model))
        with self._mode:
            self.model = without_memory(model)

    def run(self, setup: Setup, what: str = "") -> Found:
        """Return what a setup gives: advice, pages and suggestions ask for the same again."""
        if setup.memory is None and not self.is_sharded:
            setup = replace(setup, memory="balanced")
        key = setup.key()
        if key not in self._known:
            tell(what)
            try:
                # with the setup: objects in a key go by their numbers, so they have to stay
                self._known[key] = (setup, self._run(setup))
            finally:
                tell("")
        return self._known[key][1]

    def _run(self, setup: Setup) -> Found:
        """Take a few steps, or one if there is a copy that has taken others."""
        own = setup.of_a_step
        key = setup.key(own)
        with self._mode, torch_modes.without_traces_in_the_log():
            run = self._ready.pop(key, None) or self._start(setup)  # none is kept if it fails
            run.choose(setup.memory, setup.activation_checkpointing, setup.loss_chunks)
            step = None
            if setup.batch is not None:
                step = run.predict(
                    arguments_of(setup.batch),
                    setup.loss or mean_of,
                    setup.optimizer,
                    setup.micro_batches,
                )
            for group in run.groups:
                group.inspect()
            if own:
                self._ready[key] = run
            if len(self._ready) > MOST_READY:
                del self._ready[next(iter(self._ready))]
            return Found(tuple(describe(group) for group in run.groups), step)

    def _start(self, setup: Setup) -> StepRun:
        """Shard a copy as a setup says, if it is not yet."""
        mesh = make_mesh(setup.mesh, setup.rank)
        model = without_memory(self.model)
        if not self.is_sharded:
            choice = setup.policy if setup.policy is not None else nothing_below
            shard_model(model, choice, **{"mesh": mesh, **setup.fully_shard_kwargs})
        run = StepRun(model, setup.hardware)
        run.may_recompute()
        if setup.offload_activations:
            run.keep_activations_away()  # of saved tensors, which a replay has not
        elif setup.micro_batches == 1:  # others add each gradient to one that is there
            run.replay(self._traces)
        if setup.offload_states:
            run.keep_states_away()
        return run


@dataclass(frozen=True)
class Found:
    """What a run found."""

    groups: tuple[GroupPlan, ...]
    step: StepPlan | None


@dataclass(frozen=True)
class Setup:
    """The arguments of ``plan``, checked. ``replace`` one and run again."""

    mesh: tuple[int, ...]
    rank: int = 0
    policy: WrapPolicy | None = None
    batch: Any = None
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    memory: str | int | None = None
    hardware: Hardware | None = None
    activation_checkpointing: bool = False
    loss_chunks: int = 1
    micro_batches: int = 1
    offload_activations: bool = False
    offload_states: bool = False
    fully_shard_kwargs: dict[str, Any] = field(default_factory=dict)

    def key(self, without: Collection[str] = ()) -> tuple[Any, ...]:
        """Return what tells this setup from others; of tensors shapes and dtypes count."""
        given = {**vars(self), **self.fully_shard_kwargs}
        names = sorted(given.keys() - {"fully_shard_kwargs", *without})
        return tuple((name, _identity(given[name])) for name in names)

    @property
    def of_a_step(self) -> frozenset[str]:
        """What a sharded copy can be asked anew; nothing if it runs once."""
        if self.micro_batches > 1 or self.offload_activations:
            return frozenset()
        # settings that a sharded model came with cannot be given back to it
        return OF_A_STEP if self.memory is None else OF_A_STEP | {"memory"}

    def check(self) -> None:
        """Raise ConfigError for what cannot be used."""
        check_function("plan", "loss", self.loss, "a function of the output or None")
        for name in ("activation_checkpointing", "offload_activations", "offload_states"):
            check_flag("plan", name, getattr(self, name))
        check_count("plan", "loss_chunks", self.loss_chunks)
        check_count("plan", "micro_batches", self.micro_batches)
        if self.optimizer is not None and not callable(self.optimizer):
            raise wrong_type("plan", "optimizer", OPTIMIZER_WANTED, self.optimizer)
        ranks, rank = math.prod(self.mesh), self.rank
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < ranks:
            raise wrong_type("plan", "rank", f"one of {ranks} ranks, from 0 on", rank)
        if self.batch is not None:
            check_batch(self.batch)


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return tuple((str(name), _identity(part)) for name, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_identity, value))
    if isinstance(value, set):
        return frozenset(value)
    return value if isinstance(value, Hashable) and type(value) is not Hardware else id(value)


def nothing_below(module: nn.Module) -> bool:
    """Pick nothing: the root is the only unit."""
    return False


def check_mesh(mesh: object) -> tuple[int, ...]:
    """Return the sizes of a mesh.

    Raises:
        ConfigError: they cannot be used.
    """
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) not in (1, 2):
        hint = ""
        if isinstance(mesh, DeviceMesh):
            hint = f"Pass mesh={tuple(mesh.shape)}: a plan needs no ranks."
        raise wrong_type("plan", "mesh", "a number of ranks, or (replicate, shard)", mesh, hint)
    shape = tuple(check_count("plan", "mesh", size) for size in sizes)
    if not 0 < math.prod(shape) <= MAX_RANKS:
        raise wrong_value("plan", "mesh", f"of 1 to {MAX_RANKS} ranks", mesh)
    return shape


def mesh_of_sharded(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """Return sizes of the mesh that a sharded model lies on, and this rank's place in it."""
    data = groups_of(model)[0].data
    replicate, shard = data.replicate, data.shard
    if replicate.size == 1:
        return (shard.size,), shard.rank
    return (replicate.size, shard.size), replicate.rank * shard.size + shard.rank


def refuse_torchs_own(model: nn.Module) -> None:
    """Raise UnsupportedError for a model that torch's own ``fully_shard`` has sharded."""
    for name, module in model.named_modules():
        if isinstance(module, torch_modules.FSDPModule):
            raise UnsupportedError(
                "FS907",
                f"plan: {name or 'the model'} was sharded by torch's own fully_shard, which is not "
                "planned. Plan the model as it was before; or shard it with fsdp2.fully_shard, "
                "which fsdp2.replace_torch() puts in the place of torch's.",
            )


def refuse_for_sharded(given: Mapping[str, object]) -> None:
    """Raise ConfigError for what a sharded model has already."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            "FS905",
            f"plan: found {', '.join(names)}, and a model that is sharded already: its units, mesh "
            "and policies are those that it has. Leave these out, or pass the model as it was "
            "before fully_shard.",
        )
