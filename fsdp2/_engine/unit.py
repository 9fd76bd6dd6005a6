"""``Unit``: what one call of ``fully_shard`` made.

Owns a unit's modules, groups and settings, and which of its calls are open. It must not know the
tree that it is in, beyond the runtime and the governor that ``attach`` gives it.

[Note: conditional units]
Some ranks may skip a conditional unit. So its hooks move nothing: the nearest unit above it that is
not conditional, its *governor*, moves its groups with its own, on every rank. ``own_groups`` is
what the call of ``fully_shard`` made, ``groups`` is what this unit's hooks move. A unit inside a
conditional one is conditional too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_autograd, torch_compiler
from fsdp2._base.errors import ConfigError, StateError
from fsdp2._base.events import IDLE, Clock
from fsdp2._base.names import clean
from fsdp2._base.policy import MixedPrecisionPolicy, Settings
from fsdp2._comm.streams import Streams
from fsdp2._engine.cast_buffers import CastBuffers
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.param import SHARDED

UNIT_ATTRIBUTE = "_fsdp2_unit"


class Tree(Protocol):
    """The units below one root, as a unit knows them. ``Runtime`` is what it is."""

    root: Unit
    units: list[Unit]
    clock: Clock
    streams: Streams
    failed: bool  # a forward raised, and nothing recovered yet

    def recover_if_failed(self) -> None: ...

    def recover(self) -> None: ...

    def use(self, streams: Streams) -> None: ...


class Runner(Protocol):
    """What runs a unit's modules in place of the engine's hooks, for a while."""

    is_traced: bool  # a compiler may trace the call

    def call(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Unit:
    """What one call of ``fully_shard`` made: its modules, its groups, its settings."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        policy: MixedPrecisionPolicy,
        settings: Settings,
        conditional: bool = False,
    ) -> None:
        self.modules = modules
        self.policy = policy  # that holds now, see _engine.precision
        self.chosen_policy = policy
        self.cast_buffers: CastBuffers | None = None
        self.settings = settings
        self.conditional = conditional
        self.own_groups: list[ParamGroup] = []
        self.groups: list[ParamGroup] = self.own_groups  # that its hooks move, see govern
        self.governor: Unit | None = None  # whose hooks move this conditional unit's groups
        self.fqn = ""  # in the tree, from its first forward on
        self.runtime: Tree | None = None  # from the first forward on
        self.input_dtype: torch.dtype | None = None  # None: inputs are not cast
        self.choose_input_dtype()
        self.streams: Streams | None = None  # of share_comm_ctx, until there is a runtime
        self.post_optim_event: torch.Event | None = None  # taken by the root's next forward
        self.forward_prefetch: tuple[Unit, ...] | None = None  # None: by the order of last time
        self.backward_prefetch: tuple[Unit, ...] | None = None
        self.ran: set[nn.Module] = set()  # of several modules: which did in this forward
        self.calls: list[object] = []  # forwards that are running, see _engine.hooks
        self.active_calls = 0  # that the running backward has entered and not left
        self.open_calls = 0  # recorded, and not past their post-backward
        self.recorded_calls = 0  # whose graph lives: a backward through them may come
        self.may_lose_gradients = False  # in a pipeline, see note_unsynced_backward
        self.runner: Runner | None = None  # None: the hooks
        self.is_summoned = False  # whole parameters are registered, see _transfer.summon
        self.is_summoned_on_first = False  # on the first rank only

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        return next((group.device for group in self.own_groups), torch.device("cpu"))

    def gather_for_backward(self) -> None:
        """Issue the gathers that backward needs, and finish them."""
        for group in self.groups:
            if group.settings.unshard_in_backward and not group.skips_backward:
                group.unshard()
        for group in self.groups:
            if group.settings.unshard_in_backward and not group.skips_backward:
                group.wait_for_unshard()

    @property
    def gathers_in_backward(self) -> bool:
        """True if backward has to gather something here that is not whole: on every rank."""
        return any(
            group.settings.unshard_in_backward
            and not group.skips_backward
            and not group.is_unsharded
            for group in self.groups
        )

    @property
    def trains(self) -> bool:
        """True if a parameter that the unit's hooks move is trained."""
        return any(param.trainable for group in self.groups for param in group.params)

    @property
    def is_root(self) -> bool:
        return self.runtime is not None and self.runtime.root is self

    @property
    def in_backward(self) -> bool:
        """True between the pre-backward and the post-backward of one of its calls."""
        return self.active_calls > 0

    def configure(self, **changes: Any) -> None:
        """Replace settings; a misspelt name is a TypeError."""
        self.settings = dataclasses.replace(self.settings, **changes)
        for group in self.own_groups:
            group.settings = self.settings

    def take_names(self, names: Mapping[nn.Module, str]) -> None:
        """Call the unit and its parameters by their full names; ``names`` are those of modules."""
        self.fqn = next((names[module] for module in self.modules if module in names), self.fqn)
        for group in self.own_groups:
            group.fqn = ".".join(filter(None, (self.fqn, group.part)))
            for param in group.params:
                for site in param.sites:
                    if site.module in names:
                        param.fqn = ".".join(filter(None, (names[site.module], site.name)))
                        break

    def govern(self, units: list[Unit]) -> None:
        """Move the groups of conditional units from now on. See [Note: conditional units]."""
        self.groups = self.own_groups + [group for unit in units for group in unit.own_groups]
        for unit in units:
            unit.governor, unit.groups = self, []

    @property
    def is_governed_now(self) -> bool:
        """True if the unit above, which moves this one's groups, has made them whole."""
        governor = self.governor
        return governor is None or bool(governor.calls) or governor.in_backward

    def keeps_after_forward(self, with_grad: bool) -> bool:
        """True if parameters stay unsharded after a forward.

        A root that was given no choice keeps them for its backward only: after a forward without
        gradients ``parameters()`` are sharded again.
        """
        choice = self.settings.reshard_after_forward
        return choice is False or (choice is None and self.is_root and with_grad)

    def choose_input_dtype(self) -> None:
        """See to what floating-point inputs of a forward are cast. Call it when that may change."""
        policy = self.policy
        casts = policy.cast_forward_inputs
        if policy.cast_root_forward_inputs and self.is_root:
            casts = True
        self.input_dtype = policy.param_dtype if casts else None

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def show_shards(self) -> None:
        """Register sharded parameters; whole ones may stay. [Note: between steps] in ``group``."""
        for group in self.groups:
            if group.machine.state is not SHARDED:
                group.show_shards()

    def reshard_unless_gathering(self) -> None:
        """Reshard what is whole. After a failure nothing may be waited for: ranks may differ."""
        for group in self.groups:
            group.watch.forget_stand_ins()
            if group.is_gathering:  # from shards on a smaller mesh, which may be registered
                group.show_shards()
            else:
                group.reshard()

    @property
    def is_unsharded(self) -> bool:
        return all(group.is_unsharded for group in self.groups)

    def note_unsynced_backward(self) -> None:
        """A backward without sync reached this unit and found its parameters sharded.

        If it computes gradients of inputs only, a pipeline stage means to compute those of
        parameters later, of the parameters that it saw registered before: gradients may be lost.
        """
        trainable = [p.unsharded for g in self.groups for p in g.params if p.trainable]
        if trainable and not any(
            p is not None and torch_autograd.computes_gradient(p) for p in trainable
        ):
            self.may_lose_gradients = True

    def reshard_if_idle(self, *_: Any, **__: Any) -> None:
        """Register sharded parameters, before ``state_dict`` for one (a hook)."""
        if self.runtime is not None:
            with contextlib.suppress(StateError):  # ranks that diverged can still save their state
                self.runtime.recover_if_failed()
        if self.runtime is None or self.runtime.clock.phase is IDLE:
            for group in self.own_groups:
                if not group.is_gathering or self.runtime is None or not self.runtime.failed:
                    group.reshard()
                    group.streams.finish_host_reads()

    def before_load(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Register a module's sharded parameters before ``load_state_dict`` fills them (a hook).

        Raises:
            ConfigError: it has whole tensors for them.
        """
        self.reshard_if_idle()
        if not local_metadata.get("assign_to_params_buffers", False):
            own = ((prefix + name, param) for name, param in module._parameters.items())
            refuse_whole(own, state_dict, "Modules before it are loaded already.")

    def adopt_if_idle(self, *_: Any, **__: Any) -> None:
        """Take over what ``load_state_dict(assign=True)`` registered (a hook).

        At once, so that an optimizer made next holds shards, before the first forward too. A model
        that leaves the meta device in several loads waits for the last of them.
        """
        if self.is_summoned:
            return
        if self.runtime is None or self.runtime.clock.phase is IDLE:
            for group in self.own_groups:
                if not any(param.is_on_meta for param in group.params):
                    group.inspect()

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry the recipe; a copy is initialised again at its first forward."""
        kept = [
            "modules",
            "policy",
            "chosen_policy",
            "cast_buffers",
            "settings",
            "conditional",
            "own_groups",
            "fqn",
        ]
        kept += ["forward_prefetch", "backward_prefetch"]
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["modules"], state["policy"], state["settings"])  # type: ignore[misc]  # not a new object
        vars(self).update(state)
        self.choose_input_dtype()
        self.groups = self.own_groups


@torch_compiler.always_eager
def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made of a module."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def refuse_whole(
    params: Iterable[tuple[str, torch.Tensor | None]], state_dict: Mapping[str, Any], after: str
) -> None:
    """Raise ConfigError where torch would fail to copy whole tensors to shards.

    ``after`` says what was changed.
    """
    for name, param in params:
        value = state_dict.get(name, state_dict.get(clean(name)))
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
            continue
        if isinstance(param, DTensor):
            raise ConfigError(
                f"load_state_dict: {clean(name)} is a whole tensor in the state dict, and sharded "
                "in the model. Load whole tensors with fsdp2.checkpoint.load_full_state(model, "
                f"{{'model': state_dict}}). {after}"
            )
