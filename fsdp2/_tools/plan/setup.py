"""The checked arguments of a plan, and the template from which each run copies the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.api.collect import WrapPolicy
from fsdp2._core.base import torch_dtensor, torch_modules
from fsdp2._core.base.errors import (
    ConfigError,
    UnsupportedError,
    check_count,
    check_flag,
    check_function,
    wrong_type,
    wrong_value,
)
from fsdp2._tools.plan.clock import tensors_in
from fsdp2._tools.plan.hardware import Hardware, hardware_for
from fsdp2._tools.plan.imagined import groups_of, without_memory
from fsdp2._tools.plan.step import StepRun, arguments_of, check_batch, mean_of
from fsdp2._tools.plan.stepped import OPTIMIZER_WANTED
from fsdp2._tools.plan.traced import Traces
from fsdp2._tools.plan.values import GroupPlan, StepPlan, describe
from fsdp2.wrap import shard_model

MAX_RANKS = 1 << 20
MOST_READY = 2
"""Maximum number of cached sharded copies, usually for the original plan and the latest variant."""
OF_A_STEP = frozenset({"batch", "loss_chunks", "activation_checkpointing"})
"""Arguments that may change for an existing sharded copy. A change of any other argument needs a
new copy; for ``memory``, see ``Setup.of_a_step``. Steps with several micro-batches or offloaded
activations also need a new copy, because they depend on the state that earlier steps left."""

Found = tuple[tuple[GroupPlan, ...], StepPlan | None]
"""The result of a run: groups and a step."""
Listener = Callable[[str], None]
"""A function that receives progress reports: planning a large model takes seconds."""
_listeners: list[Listener] = []


def tell(what: str) -> None:
    """Report the start of a run with a short text, or its end with an empty text."""
    for listener in tuple(_listeners):
        listener(what)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Template:
    """A model without memory, and sharded copies of it that have run steps. The engine of a copy is
    in its steady state, so planning another batch, for example, takes only one step."""

    def __init__(self, model: nn.Module) -> None:
        self._mode = torch_dtensor.without_memory()
        self._traces = Traces()
        self._known: dict[tuple[Any, ...], tuple[Setup, Found]] = {}
        self._ready: dict[tuple[Any, ...], StepRun] = {}
        self.is_sharded = bool(groups_of(model))
        with self._mode:
            self.model = without_memory(model)

    def run(self, setup: Setup, what: str) -> Found:
        """Return the result of a setup. Results are cached for advice, pages and suggestions."""
        key = setup.key()
        if key not in self._known:
            tell(what)
            try:
                # keep the setup, and thereby the objects whose ids are in the key
                self._known[key] = (setup, self._run(setup))
            finally:
                tell("")
        return self._known[key][1]

    def _run(self, setup: Setup) -> Found:
        """Run a few steps, or only one if a cached copy can be used."""
        own = setup.of_a_step
        key = setup.key(own)
        with self._mode, torch_dtensor.without_traces_in_the_log():
            run = self._ready.pop(key, None) or self._start(setup)  # dropped if the run fails
            run.choose(setup.memory, setup.activation_checkpointing, setup.loss_chunks)
            step = None
            if setup.batch is not None:
                given, loss = arguments_of(setup.batch), setup.loss or mean_of
                step = run.predict(given, loss, setup.optimizer, setup.micro_batches)
            for group in run.groups:
                group.inspect()
            if own:
                self._ready[key] = run
            if len(self._ready) > MOST_READY:
                del self._ready[next(iter(self._ready))]
            return tuple(describe(group) for group in run.groups), step

    def _start(self, setup: Setup) -> StepRun:
        """Copy the model. Shard the copy as the setup specifies, unless it is sharded already."""
        names = ("replicate", "shard")[-len(setup.mesh) :]
        mesh = torch_dtensor.imagined_mesh(setup.mesh, names, setup.rank)
        model = without_memory(self.model)
        if not self.is_sharded:
            policy = (lambda _: False) if setup.policy is None else setup.policy
            shard_model(model, policy, **{"mesh": mesh, **setup.fully_shard_kwargs})
        run = StepRun(model, setup.hardware, self._traces)
        if setup.offload_activations:
            run.keep_activations_away()  # do not replay: a replay does not save tensors to offload
        elif setup.micro_batches == 1:  # several micro-batches add to existing gradients
            run.replay()
        if setup.offload_states:
            run.keep_states_away()
        return run


@dataclass(frozen=True)
class Setup:
    """The checked arguments of ``plan``. Change them with ``replace``."""

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
        """Return a key of this setup, with shapes and dtypes in place of tensors."""
        given = {**vars(self), **self.fully_shard_kwargs}
        names = sorted(given.keys() - {"fully_shard_kwargs", *without})
        return tuple((name, _identity(given[name])) for name in names)

    @property
    def of_a_step(self) -> frozenset[str]:
        """Arguments that may change for a sharded copy; empty if the copy cannot be reused."""
        if self.micro_batches > 1 or self.offload_activations:
            return frozenset()
        # the original settings of a sharded model cannot be restored
        return OF_A_STEP if self.memory is None else OF_A_STEP | {"memory"}

    def check(self) -> None:
        check_function("plan", "loss", self.loss, "a function of the output, or None")
        for name in ("activation_checkpointing", "offload_activations", "offload_states"):
            check_flag("plan", name, getattr(self, name))
        check_count("plan", "loss_chunks", self.loss_chunks)
        check_count("plan", "micro_batches", self.micro_batches)
        if self.optimizer is not None and not callable(self.optimizer):
            raise wrong_type("plan", "optimizer", OPTIMIZER_WANTED, self.optimizer)
        ranks, rank = math.prod(self.mesh), self.rank
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < ranks:
            raise wrong_type("plan", "rank", f"one of {ranks} ranks, starting at 0", rank)
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


CAN_CHANGE = Setup.__dataclass_fields__.keys() - {"mesh", "policy", "fully_shard_kwargs"}
"""Arguments that may change for a model that is already sharded."""

P = TypeVar("P", bound="Prediction")


@dataclass(frozen=True)
class Prediction:
    """The prediction for a setup. ``changed`` plans the same model with another setup."""

    mesh: tuple[int, ...]
    rank: int
    groups: tuple[GroupPlan, ...]
    step: StepPlan | None
    setup: Setup = field(repr=False, compare=False)
    template: Template = field(repr=False, compare=False)

    @classmethod
    def of(cls: type[P], template: Template, setup: Setup, what: str) -> P:
        """Run a setup. ``what`` describes it in a few words, for progress reports."""
        setup.check()
        if setup.memory is None and not template.is_sharded:
            setup = replace(setup, memory="balanced")
        groups, step = template.run(setup, what)
        return cls(setup.mesh, setup.rank, groups, step, setup, template)

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def changed(self: P, **changes: Any) -> P:
        """Plan the same model again, with other values for arguments of ``plan``.

        Raises:
            ConfigError: as for ``plan``.
        """
        if self.is_sharded:
            refuse_for_sharded({name: changes[name] for name in changes if name not in CAN_CHANGE})
        given = dict(changes)
        if "mesh" in given:
            given["mesh"] = check_mesh(given["mesh"])
        if "hardware" in given:
            given["hardware"] = hardware_for(given["hardware"])
        own = {name: given.pop(name) for name in changes if name in Setup.__dataclass_fields__}
        kwargs = {**self.setup.fully_shard_kwargs, **own.pop("fully_shard_kwargs", {}), **given}
        setup = replace(self.setup, **own, fully_shard_kwargs=kwargs)
        return self.of(self.template, setup, code_of(changes))

    @property
    def hardware(self) -> Hardware | None:
        """The machine for which times are predicted."""
        return self.setup.hardware

    @property
    def policy(self) -> WrapPolicy | None:
        """The policy for the units below the root."""
        return self.setup.policy

    @property
    def model(self) -> nn.Module:
        """The planned model, without memory."""
        return self.template.model

    @property
    def is_sharded(self) -> bool:
        """Whether the model was already sharded, in which case its units cannot be changed."""
        return self.template.is_sharded

    def step_for(self, who: str) -> StepPlan:
        """Return the step, or raise ConfigError if there is none. ``who`` is the calling method."""
        if self.step is None:
            raise ConfigError(
                "FS901",
                f"Plan.{who}: found a plan without a batch, so there is no step. Pass the inputs "
                "of one rank's forward to plan as batch.",
            )
        return self.step


def code_of(changes: Mapping[str, Any]) -> str:
    parts = [word(changes[name]) for name, word in WORDS.items() if name in changes]
    others = [f"another {name}" for name in changes if name not in WORDS]
    return ", ".join([part for part in parts if part] + others)


def _code_of_optimizer(made: Any) -> str:
    is_fused = isinstance(made, functools.partial) and made.keywords == {"fused": True}
    return f"{made.func.__name__}(..., fused=True)" if is_fused else "another optimizer"


def rows_of(batch: object) -> int | None:
    """Return the size of a batch's first dim, or None if it differs between tensors."""
    found = {one.shape[0] if one.dim() else 0 for one in tensors_in(batch)}
    return found.pop() or None if len(found) == 1 else None


WORDS: dict[str, Callable[[Any], str]] = {
    "batch": lambda batch: f"a batch of {rows_of(batch)}",
    "shard": lambda shard: f"fully_shard(..., shard={shard!r})",
    "offload_policy": lambda _: "fully_shard(..., offload_policy=CPUOffloadPolicy())",
    "activation_checkpointing": lambda on: on and "torch.utils.checkpoint around each unit",
    "loss_chunks": lambda n: f"head and loss computed in {n} chunks of tokens" if n > 1 else "",
    "offload_activations": lambda on: on and "fsdp2.offload_activations around each unit",
    "offload_states": lambda on: on and "fsdp2.optim.offload_states(optimizer)",
    "optimizer": _code_of_optimizer,
    "memory": lambda memory: f"model.set_memory({memory!r})",
}
"""Texts that describe changed arguments. A text is empty if the value has no effect."""


def check_mesh(mesh: object) -> tuple[int, ...]:
    """Return the sizes of a mesh. Raise ConfigError if they are invalid."""
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) not in (1, 2):
        hint = ""
        if isinstance(mesh, DeviceMesh):
            hint = f"Pass mesh={tuple(mesh.shape)}: a plan needs no process group."
        raise wrong_type("plan", "mesh", "a number of ranks, or (replicate, shard)", mesh, hint)
    shape = tuple(check_count("plan", "mesh", size) for size in sizes)
    if not 0 < math.prod(shape) <= MAX_RANKS:
        raise wrong_value("plan", "mesh", f"of 1 to {MAX_RANKS} ranks", mesh)
    return shape


def mesh_of_sharded(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """Return the mesh sizes of a sharded model, and this rank's index in the mesh."""
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
                f"plan: {name or 'the model'} was sharded by torch's own fully_shard, which plan "
                "does not support. Plan the model before sharding it, or shard it with "
                "fsdp2.fully_shard (fsdp2.replace_torch() replaces torch's function).",
            )


def refuse_for_sharded(given: Mapping[str, object]) -> None:
    """Raise ConfigError for arguments that are fixed in a sharded model."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            "FS905",
            f"plan: found {', '.join(names)} with an already sharded model, whose units, mesh and "
            "policies are fixed. Omit these arguments, or pass the unsharded model.",
        )
