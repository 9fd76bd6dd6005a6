"""``Unit``: what one call of ``fully_shard`` made.

Owns a unit's modules, groups and settings, and which of its calls are open. It must not know the
tree that it is in, beyond the runtime and the owning unit that ``attach`` gives it.

[Note: conditional units]
Some ranks may skip a conditional unit. So its hooks move nothing: the nearest unit above it that is
not conditional, its *owning unit*, moves its groups with its own, on every rank. ``own_groups`` is
what the call of ``fully_shard`` made, ``groups`` is what this unit's hooks move. A unit inside a
conditional one is conditional too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_autograd, torch_compiler, torch_dtensor, torch_modes
from fsdp2._base.containers import Loan
from fsdp2._base.errors import ConfigError, StateError
from fsdp2._base.events import IDLE
from fsdp2._base.names import clean
from fsdp2._base.policy import Settings
from fsdp2._comm.mesh import DataMesh
from fsdp2._comm.streams import StepContext, Streams, streams_for
from fsdp2._engine.precision import Precision
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.param import SHARDED, FSDPParam
from fsdp2._param_group.replaced_params import Serves

UNIT_ATTRIBUTE = "_fsdp2_unit"


class Tree(Protocol):
    """The units below one root, as a unit knows them. ``Runtime`` is what it is."""

    root: Unit
    units: list[Unit]
    context: StepContext
    failed: bool  # a forward raised, and nothing recovered yet
    is_pipelined: bool  # many forwards run before their backwards, and somebody ends these
    thread: int  # that ran the last forward
    lock: Any  # taken by who looks at parameters between steps

    @property
    def has_other_thread(self) -> bool: ...

    @property
    def is_in_other_thread(self) -> bool: ...

    def recover_if_failed(self) -> None: ...

    def recover(self) -> None: ...

    def finalize(self) -> None: ...

    def end_reductions(self) -> None: ...


class Runner(Protocol):
    """What runs a unit's modules in place of the engine's hooks, for a while.

    A compiler that traces the module traces ``call`` too, unless that is ``never_traced``.
    """

    def call(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Marks(Protocol):
    """The marks of one forward. ``Call`` in ``_engine.marks`` is what it is."""

    def let_go(self) -> None:
        """Hold nothing of the forward any more: it is over."""


class Calls:
    """The forwards of a unit, and where backwards are in them."""

    def __init__(self) -> None:
        self.running: list[Marks | None] = []  # the marks of each; the innermost last
        self.lent: list[tuple[int, Loan]] = []  # to how many of these, and what of the caller's
        self.ran: set[nn.Module] = set()  # of several modules: which did in this forward
        self.recorded = 0  # whose graph lives: a backward through them may come
        self.open = 0  # recorded, and not past their post-backward
        self.active = 0  # that the running backward has entered and not left
        self.kept_on: list[tuple[nn.Module, str]] | None = None  # attributes; None: not yet known
        self.hides = False  # memory stays: a backward may begin where a recorded one has no mark
        self.saves_by_hooks = False  # a backward that begins there tells when it reads a parameter

    def lend(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Loan:
        """Let the innermost call have other tensors in the caller's containers."""
        loan = Loan(function)
        self.lent.append((len(self.running), loan))
        return loan

    def take_back(self) -> Loan | None:
        """Give the caller back what was lent to the call that is over, if anything was."""
        if not self.lent or self.lent[-1][0] <= len(self.running):
            return None
        _, loan = self.lent.pop()
        loan.give_back()
        return loan

    def give_up(self, depth: int) -> None:
        """Forget the calls that run inside of this many."""
        for marks in reversed(self.running[depth:]):
            if marks is not None:
                marks.let_go()
        del self.running[depth:]
        while self.take_back() is not None:
            pass

    def abandon(self) -> None:
        """Forget what an unfinished step left."""
        self.give_up(0)
        self.ran.clear()
        self.open = self.active = 0


class Unit:
    """What one call of ``fully_shard`` made: its modules, its groups, its settings."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        precision: Precision,
        settings: Settings,
        device: torch.device,
        conditional: bool = False,
    ) -> None:
        self.modules = modules
        self.precision = precision
        self.settings = settings
        self.device = device  # where it computes, if it has parameters
        self.conditional = conditional
        self.own_groups: list[ParamGroup] = []
        self.groups: list[ParamGroup] = self.own_groups  # that its hooks move, see take_over
        self.owner: Unit | None = None  # whose hooks move this conditional unit's groups
        self.fqn = ""  # in the tree, from its first forward on
        self.runtime: Tree | None = None  # from the first forward on
        self.streams: Streams | None = None  # of share_comm_ctx, until there is a runtime
        self.post_optim_event: torch.Event | None = None  # taken by the root's next forward
        self.calls = Calls()
        self.may_lose_gradients = False  # in a pipeline, see note_unsynced_backward
        self.runner: Runner | None = None  # None: the hooks
        self.summoned_on = ""  # ranks with whole ones registered: "all", "first"; "": no summon

    @property
    def trains(self) -> bool:
        """True if a parameter that the unit's hooks move is trained."""
        return any(param.trainable for group in self.groups for param in group.params)

    @property
    def is_root(self) -> bool:
        return self.runtime is not None and self.runtime.root is self

    def configure(self, **changes: Any) -> None:
        """Replace settings; a misspelt name is a TypeError."""
        self.settings = dataclasses.replace(self.settings, **changes)
        for group in self.own_groups:
            group.settings = self.settings

    def take_names(self, names: Mapping[nn.Module, str]) -> None:
        """Call the unit and its parameters by their full names; ``names`` are those of modules."""
        self.fqn = next((names[module] for module in self.modules if module in names), self.fqn)
        for group in self.own_groups:
            group.fqn = ".".join(filter(None, (self.fqn, group.early.part)))
            for param in group.params:
                for site in param.sites:
                    if site.module in names:
                        param.fqn = ".".join(filter(None, (names[site.module], site.name)))
                        break

    def release(self, params: Sequence[FSDPParam]) -> Iterator[tuple[DataMesh, list[FSDPParam]]]:
        """Give parameters up to another unit; yield them by mesh. A group of none is none."""
        for group in self.own_groups:
            taken = [param for param in group.params if param in params]
            if taken:
                group.release(taken)
                yield group.data, taken
        self.own_groups[:] = [group for group in self.own_groups if group.params]

    def check_mode_change(self, mode: bool) -> None:
        """Raise StateError if the precision would change under a step. Changes nothing."""
        if not self.precision.chosen.full_precision_in_eval or self.runtime is None:
            return
        self.runtime.recover_if_failed()
        phase = self.runtime.context.phase
        if phase is not IDLE and any(module.training is not mode for module in self.modules):
            raise StateError(
                "FS302",
                f"{self.fqn or '<root>'}: found train({mode}) during a {phase}. Its policy has "
                "full_precision_in_eval, so that would change the dtype of parameters in use. Call "
                "it between steps.",
            )

    def follow_mode(self) -> None:
        """Compute in the precision that the modules' mode asks for.

        Parameters are made anew, so a graph that holds old ones must not run: whoever recorded it
        has the old policy, as an object.
        """
        if not self.precision.follow(self.modules):
            return
        self.calls.open = 0
        if self.owner is not None:
            self.owner.precision.outdate()
            self.owner.calls.open = 0
        self.precision.choose_input_dtype(self.is_root)
        for group in self.own_groups:
            group.compute_by(self.precision.policy)

    def take_over(self, units: list[Unit]) -> None:
        """Move the groups of conditional units from now on. See [Note: conditional units]."""
        self.groups = self.own_groups + [group for unit in units for group in unit.own_groups]
        for unit in units:
            unit.owner, unit.groups = self, []

    def keeps_after_forward(self, with_grad: bool) -> bool:
        """True if parameters stay unsharded after a forward.

        A root that was given no choice keeps them for its backward only: after a forward without
        gradients ``parameters()`` are sharded again.
        """
        choice = self.settings.reshard_after_forward
        return choice is False or (choice is None and self.is_root and with_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies in memory of whole parameters that the unit's hooks move."""
        local = torch_dtensor.local_part(tensor)
        if type(local) not in (torch.Tensor, nn.Parameter) or torch_modes.is_under_transforms():
            return False  # made of other tensors: it may have no memory
        storage = local.untyped_storage()
        return any(group.lies_in(storage) for group in self.groups)

    def keep(self) -> None:
        """Let whole parameters stay after a forward; who writes to the shards is noticed."""
        is_pipelined = self.runtime is not None and self.runtime.is_pipelined
        serves = Serves.BACKWARDS
        if is_pipelined and self.settings.reshard_after_forward is False:
            serves = Serves.FORWARDS
        elif self.settings.keeps_in_evaluation and not torch.is_grad_enabled():
            serves = Serves.EVALUATIONS
        for group in self.groups:
            if group.is_unsharded:
                group.take_writes()
                group.watch.note_values(serves)

    def stop_hiding(self) -> None:
        """Keep memory no longer for a backward that may begin where it has no mark."""
        if self.calls.hides:
            self.calls.hides = False
            for group in self.groups:
                group.keep_memory(False)

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
            group.watch.forget_whole_writes()
            if group.gathering is not None:  # from a smaller mesh: its shards may be registered
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

    def have_lanes(self) -> None:
        """Let a gather by hand run as those of steps do, before the first forward."""
        if self.streams is None:
            self.streams = streams_for(self.device)
        for group in self.own_groups:
            group.context.streams = self.streams
        self.streams.order_after_compute("gather")

    def reshard_if_idle(self, *_: Any, **__: Any) -> None:
        """Register sharded parameters, before ``state_dict`` for one (a hook)."""
        with self.unless_another_thread_steps() as is_another:
            if is_another:  # to free what it keeps would change its collectives on this rank alone
                self._require_sharded()
                return
            if self.runtime is not None:
                with contextlib.suppress(StateError):  # ranks that diverged can still save theirs
                    self.runtime.recover_if_failed()
            if self.runtime is None or self.runtime.context.phase is IDLE:
                for group in self.own_groups:
                    if group.gathering is None or self.runtime is None or not self.runtime.failed:
                        group.reshard()
                        group.context.streams.finish_host_reads()

    @contextlib.contextmanager
    def unless_another_thread_steps(self) -> Iterator[bool]:
        """Around what looks at parameters between steps. See [Note: threads] of the runtime.

        It gives True if steps run in another thread.

        Raises:
            StateError: another thread is inside of a forward or a backward.
        """
        runtime = self.runtime
        if runtime is None:
            yield False
            return
        with runtime.lock:
            if runtime.is_in_other_thread:
                raise StateError(
                    "FS301",
                    f"{self.fqn or '<root>'}: another thread is inside a {runtime.context.phase} "
                    "of it, where parameters are gathered and freed. Read, copy or save its state "
                    "in the thread that trains, between steps.",
                )
            yield runtime.has_other_thread

    def _require_sharded(self) -> None:
        whole = [group for group in self.own_groups if group.machine.state is not SHARDED]
        if whole or any(group.gathering is not None for group in self.own_groups):
            raise StateError(
                "FS301",
                f"{self.fqn or '<root>'}: another thread has run a forward, and keeps parameters "
                "whole for its backward or for the next forward. Read, copy or save its state in "
                "that thread, between steps.",
            )

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
        if self.summoned_on:
            return
        if self.runtime is None or self.runtime.context.phase is IDLE:
            for group in self.own_groups:
                if not any(param.is_on_meta for param in group.params):
                    group.inspect()

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry the recipe; a copy is initialised again at its first forward."""
        kept = ["modules", "precision", "settings", "device", "conditional", "own_groups", "fqn"]
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        first = state["modules"], state["precision"], state["settings"], state["device"]
        self.__init__(*first)  # type: ignore[misc]  # not a new object
        vars(self).update(state)
        self.precision.choose_input_dtype(is_root=False)
        self.groups = self.own_groups


@torch_compiler.always_eager
def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made of a module."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


@contextlib.contextmanager
def original_buffers(units: Iterable[Unit]) -> Iterator[None]:
    """Register cast buffers in their dtypes of origin inside the context: to be filled."""
    found = [unit.precision.buffers for unit in units]
    on = [buffers for buffers in found if buffers is not None and buffers.is_on]
    for buffers in on:
        buffers.restore()
    try:
        yield
    finally:
        for buffers in on:
            buffers.cast()


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
                "FS623",
                f"load_state_dict: {clean(name)} is a whole tensor in the state dict, and sharded "
                "in the model. Load whole tensors with fsdp2.checkpoint.load_full_state(model, "
                f"{{'model': state_dict}}). {after}",
            )
