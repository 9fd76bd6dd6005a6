"""``plan``: what becomes a unit, what each rank holds and sends, how much memory a step takes.

Owns the question and the answer. The engine itself is run, on ranks and tensors that are not there.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.api.collect import WrapPolicy
from fsdp2._core.base.arguments import check_module, check_path
from fsdp2._core.base.errors import ConfigError
from fsdp2._tools.pages.content import Advice, Page, Planned
from fsdp2._tools.pages.page import embed, write_page
from fsdp2._tools.plan import hardware as machines
from fsdp2._tools.plan import table
from fsdp2._tools.plan.advice import advise
from fsdp2._tools.plan.budget import MEMORY, Search, Suggestion, code_of, size_of
from fsdp2._tools.plan.hardware import Hardware, hardware_for
from fsdp2._tools.plan.imagined import groups_of
from fsdp2._tools.plan.pages import page_of, planned
from fsdp2._tools.plan.setup import (
    Setup,
    Template,
    check_mesh,
    mesh_of_sharded,
    refuse_for_sharded,
    refuse_torchs_own,
)
from fsdp2._tools.plan.table import Verdict, of_each, verdict_of
from fsdp2._tools.plan.values import GroupPlan, StepPlan

OF_A_STEP = Setup.__dataclass_fields__.keys() - {"mesh", "policy", "fully_shard_kwargs"}
"""What can be changed of a model that is sharded already."""


WHOLE = ("optimizer", "gradients")
"""Values of ``shard`` with which parameters are whole through the micro-batches of a step."""


@dataclass(frozen=True)
class Plan:
    """What ``plan`` found. ``print`` shows it as a table.

    ``mesh`` is the shape, ``ranks`` the number of ranks, ``rank`` the rank that is told. ``groups``
    has a ``GroupPlan`` for each group. ``step`` is a ``StepPlan``, or None without a batch. A plan
    keeps a copy of the model without memory, to answer what another setting would give. Everything
    in it is computed on the rank that asks: nothing is communicated.
    """

    mesh: tuple[int, ...]
    rank: int
    groups: tuple[GroupPlan, ...]
    step: StepPlan | None
    setup: Setup = field(repr=False, compare=False)
    template: Template = field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def changed(self, **changes: Any) -> Plan:
        """Plan the same model again with other arguments, named as those of ``plan``.

        Raises:
            ConfigError: as ``plan`` does.
        """
        if self.is_sharded:
            refuse_for_sharded({name: changes[name] for name in changes if name not in OF_A_STEP})
        return _run(self.template, _changed(self.setup, changes), code_of(changes))

    @property
    def hardware(self) -> Hardware | None:
        """The machine of the time line."""
        return self.setup.hardware

    @property
    def policy(self) -> WrapPolicy | None:
        """What picked the units below the root."""
        return self.setup.policy

    @property
    def model(self) -> nn.Module:
        """The model that was planned, without memory."""
        return self.template.model

    @property
    def is_sharded(self) -> bool:
        """True if the model was sharded before: its units cannot be chosen."""
        return self.template.is_sharded

    def suggest(self, budget: str | int | None = None) -> list[Suggestion]:
        """Look for settings with which a step fits into the memory of a rank.

        Memory settings are tried first. If none fits, a smaller batch, activation checkpointing
        around each unit, and a loss in chunks are tried, each by itself and together. On the
        hardware of a device, activations on the host come next, and then the optimizer's states
        too. The last is CPU offload, unless the model is sharded already. Of the best one the
        largest batch that fits is looked for. Each trial is a plan, so this takes as long as
        several. What gives the same as another one is left out. With several micro-batches values
        of ``shard`` are tried, too, if no keyword of the plan says when parameters are whole.

        Args:
            budget: bytes of one rank, or ``"70GB"``, ``"64GiB"``. None: the hardware's memory.

        Returns:
            What was tried. What fits comes first: the fastest for each row of the batch first, or
            without hardware the smallest peak first. Then what does not fit, the smallest peak
            first.

        Raises:
            ConfigError: the plan has no batch; no budget and no hardware whose memory is known; a
                budget that cannot be read.
        """
        return search_of(self, budget).run()

    def verdict(self, budget: str | int | None = None) -> Verdict:
        """Say whether a step fits; if it does not, look for what does, as ``suggest`` would.

        Args:
            budget: as for ``suggest``; None, and no hardware whose memory is known: it is not said
                whether a step fits.

        Raises:
            ConfigError: the plan has no batch; a budget that cannot be read.
        """
        self._batch_for("verdict")
        assert self.step is not None  # there is a batch
        found = verdict_of(self.step, self._budget("verdict", budget, False))
        if found.fits is not False:
            return found
        way_out = search_of(self, budget).first()
        if way_out is None:
            return replace(found, way_out="nothing that was tried fits: more ranks are needed")
        peak, _ = of_each(way_out.peak_nbytes, found.capacity_nbytes or 0)
        return replace(found, way_out=f"{way_out.name} fits ({peak})")

    def advice(self, budget: str | int | None = None) -> tuple[Advice, ...]:
        """Tell what is wrong with this choice, each with its number and what would be better.

        What it says is gained was planned too, so this takes as long as several plans.

        Args:
            budget: as for ``suggest``; None, and no hardware whose memory is known: no limit.

        Returns:
            The advice, the most urgent first; empty if nothing is wrong.

        Raises:
            ConfigError: a budget that cannot be read.
        """
        return tuple(advise(self, self._budget("advice", budget, False)))

    def page(self, budget: str | int | None = None) -> Page:
        """Return what ``html`` shows, as plain values. For programs that draw it in another way.

        Raises:
            ConfigError: a budget that cannot be read.
        """
        steps = {} if self.step is None else {self._memory_name: self.step}
        if self.step is not None:
            for name in MEMORY:
                if name not in steps:
                    steps[name] = self._predict({"memory": name})
        limit = self._budget("page", budget, False)
        verdict = None if self.step is None else self.verdict(budget)
        advice = self.advice(budget)
        return page_of(
            self.mesh, self.rank, self.groups, steps, advice, self.hardware, limit, verdict
        )

    def html(self, path: str | os.PathLike[str], budget: str | int | None = None) -> None:
        """Write a page to look at: units, memory over a step by setting, time line, advice.

        One file that needs no server and no network. It is written whole or not at all. Let one
        rank write it: ranks that write to one path replace each other's page.

        Args:
            path: of the file; one that is there is replaced.
            budget: as for ``advice``.

        Raises:
            ConfigError: a path or a budget that cannot be read.
            OSError: the file cannot be written; one that was there is as it was.
        """
        write_page(check_path("Plan.html", "path", path), self.page(budget))

    def planned(self) -> Planned:
        """Return what ``Recordings.html(path, planned=...)`` lays over what was measured.

        Raises:
            ConfigError: a plan without a batch.
        """
        self._batch_for("planned")
        assert self.step is not None  # there is a batch
        return planned(self.step)

    def _repr_html_(self) -> str:
        return embed(self.page())

    @property
    def _memory(self) -> str | int | None:
        """The memory setting; None if a sharded model has one that nobody named."""
        return self.setup.memory or (None if self.is_sharded else "balanced")

    @property
    def _memory_name(self) -> str:
        return "as it is set" if self._memory is None else str(self._memory)

    def _predict(self, changes: dict[str, Any]) -> StepPlan:
        step = self.changed(**changes).step
        assert step is not None  # there is a batch
        return step

    def _batch_for(self, who: str) -> Any:
        if self.setup.batch is None:
            raise ConfigError(
                "FS901",
                f"Plan.{who}: found a plan without a batch, so nothing is known of a step. Pass "
                "batch to plan: what one rank's forward is given.",
            )
        return self.setup.batch

    def _budget(self, who: str, budget: object, is_needed: bool) -> int | None:
        if budget is not None:
            return size_of(f"Plan.{who}", "budget", budget)
        found = None if self.hardware is None else self.hardware.memory_nbytes
        if found is None and is_needed:
            raise ConfigError(
                "FS901",
                f"Plan.{who}: found no budget, and no hardware whose memory is known. Pass budget, "
                "the bytes of one rank, as '70GB'.",
            )
        return found

    def __str__(self) -> str:
        limit = self._budget("print", None, False)
        verdict = None if self.step is None else verdict_of(self.step, limit)
        return table_of(self) if verdict is None else f"{verdict}\n\n{table_of(self)}"


def table_of(plan: Plan) -> str:
    """Return what ``print`` shows of a plan, without the verdict."""
    return "\n".join(table.lines(plan.mesh, plan.rank, plan.groups, plan.step))


def search_of(
    plan: Plan,
    budget: str | int | None,
    found: Callable[[Suggestion], None] = lambda suggestion: None,
) -> Search:
    """Return the search of ``Plan.suggest``, which tells each suggestion when it is known.

    Raises:
        ConfigError: as ``Plan.suggest`` does.
    """
    batch, nbytes = plan._batch_for("suggest"), plan._budget("suggest", budget, True)
    assert nbytes is not None  # it was needed
    setup, chosen = plan.setup, {"shard", "shard_outer", "reshard_after_forward", "offload_policy"}
    may_choose = not plan.is_sharded and chosen.isdisjoint(setup.fully_shard_kwargs)
    sharding = WHOLE if may_choose and setup.micro_batches > 1 else ()
    return Search(
        *(batch, nbytes, plan._predict, not plan.is_sharded, plan._memory, found),
        machine=plan.hardware,
        sharding=sharding,
        fused=_fused(setup.optimizer, plan.hardware),
    )


def _fused(optimizer: object, machine: Hardware | None) -> Callable[..., Any] | None:
    """Return what makes an optimizer of torch with its fused step, where a device may have it."""
    if machine is None or machine.device_type == "cpu" or not isinstance(optimizer, type):
        return None
    is_torchs = optimizer.__module__.startswith("torch.optim.")
    if not is_torchs or "fused" not in inspect.signature(optimizer).parameters:
        return None
    return _with_fused_step(optimizer)


@functools.cache
def _with_fused_step(optimizer: type) -> Callable[..., Any]:
    return functools.partial(optimizer, fused=True)  # one object: what it does is traced once


def _changed(setup: Setup, changes: dict[str, Any]) -> Setup:
    given = dict(changes)
    if "mesh" in given:
        given["mesh"] = check_mesh(given["mesh"])
    if "hardware" in given:
        given["hardware"] = hardware_for(given["hardware"])
    own = {name: given.pop(name) for name in list(given) if name in Setup.__dataclass_fields__}
    kwargs = {**setup.fully_shard_kwargs, **own.pop("fully_shard_kwargs", {}), **given}
    return replace(setup, **own, fully_shard_kwargs=kwargs)


def _run(template: Template, setup: Setup, what: str) -> Plan:
    setup.check()
    found = template.run(setup, what)
    return Plan(setup.mesh, setup.rank, found.groups, found.step, setup, template)


def plan(
    model: nn.Module,
    *,
    mesh: int | Sequence[int] | None = None,
    policy: WrapPolicy | None = None,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    memory: str | int | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    activation_checkpointing: bool = False,
    loss_chunks: int = 1,
    offload_activations: bool = False,
    offload_states: bool = False,
    rank: int | None = None,
    micro_batches: int = 1,
    **fully_shard_kwargs: Any,
) -> Plan:
    """Tell what sharding a model over ranks gives, without ranks, a process group, or memory.

    The engine itself runs, on tensors that have shapes and no values. Its ranks are numbers without
    processes. What it gathers, reduces, keeps and frees there is what it would do in a real step.

    Args:
        model: the model before ``fully_shard``, on any device, ``meta`` included. Or a sharded
            model on a CPU, which keeps its units, mesh and settings. The model is not changed.
        mesh: number of ranks to shard over, or ``(replicate, shard)``. Up to 2**20 ranks.
        policy: what becomes a unit below the root, as ``fsdp2.wrap.shard_model`` takes it. None:
            nothing.
        batch: what one rank's forward is given: a tensor, a tuple of arguments, or a dict of
            keywords. Of tensors only shapes and dtypes count. None: no step is predicted.
        loss: a function that makes a scalar of the output. None: the ``loss`` of the output, or the
            mean of all its tensors.
        optimizer: a class or function that makes an optimizer of parameters, as
            ``torch.optim.AdamW``. Its state counts from its first step on. Its step, on the shards
            of one rank, is part of the planned step.
        memory: what ``set_memory`` is given.
        hardware: the name of a machine in ``fsdp2.plan.hardware``, a ``fsdp2.plans.Hardware``, or
            the path of a JSON file that ``python -m fsdp2 doctor --json`` wrote on such a machine.
            With it the plan has times, without it none.
        activation_checkpointing: compute activations of the units below the root again in backward,
            as ``torch.utils.checkpoint`` around each of them does.
        loss_chunks: count logits (what has a number for each word of an embedding's vocabulary) as
            if head and loss ran on so many parts of the tokens, one after the other.
        offload_activations: keep on the host what the units below the root save, but for the last
            one, as ``fsdp2.offload_activations`` does. On the hardware of a device alone.
        offload_states: keep the optimizer's states on the host, as ``fsdp2.optim.offload_states``
            does. On the hardware of a device alone.
        rank: the rank whose shards and memory the plan tells. None: the first rank, which has the
            most; for a sharded model, this rank.
        micro_batches: backwards of a step, each of ``batch``; all but the last are without gradient
            sync.
        fully_shard_kwargs: more keywords of ``fully_shard``, such as ``mp_policy``,
            ``offload_policy``, ``reshard_after_forward``, ``shard`` and ``shard_outer``.

    Returns:
        A ``Plan``: groups, and for a step its collectives, events, memory and time, in order.

    Raises:
        ConfigError: an argument cannot be used; what ``shard_model`` raises.
        UnsupportedError: a parameter is tensor-parallel and no unit has it; a sharded model
            computes on a device.

    Memory counts tensors only. What an allocator rounds, what libraries need, and what a device's
    streams hold back is not counted. The ranks are on a CPU mesh.
    """
    check_module("plan", "model", model)
    given = {"mesh": mesh, "policy": policy, **fully_shard_kwargs}
    if groups_of(model):
        refuse_for_sharded(given)
        shape, own = mesh_of_sharded(model)
    else:
        refuse_torchs_own(model)
        shape, own = check_mesh(mesh), 0
    setup = Setup(
        mesh=shape,
        rank=own if rank is None else rank,
        micro_batches=micro_batches,
        policy=policy,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        memory=memory,
        hardware=hardware_for(hardware),
        activation_checkpointing=activation_checkpointing,
        loss_chunks=loss_chunks,
        offload_activations=offload_activations,
        offload_states=offload_states,
        fully_shard_kwargs=fully_shard_kwargs,
    )
    setup.check()
    return _run(Template(model), setup, "the step as it is asked for")


plan.measure = machines.measure  # type: ignore[attr-defined]  # a function of a function
plan.hardware = machines.HARDWARE  # type: ignore[attr-defined]  # what it knows by name
