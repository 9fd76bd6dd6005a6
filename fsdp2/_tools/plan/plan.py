"""``plan``: predicts a model's units, the data that each rank holds and sends, and the memory of a
step. The real engine runs on simulated ranks and fake tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.api.collect import WrapPolicy
from fsdp2._core.base.errors import check_module, check_path
from fsdp2._tools.pages.content import Advice, Page, Planned
from fsdp2._tools.pages.page import embed, write_page
from fsdp2._tools.plan import hardware as machines
from fsdp2._tools.plan.advice import advise
from fsdp2._tools.plan.budget import MEMORY, Suggestion, budget_of, search_of
from fsdp2._tools.plan.hardware import Hardware, hardware_for
from fsdp2._tools.plan.imagined import groups_of
from fsdp2._tools.plan.setup import (
    Prediction,
    Setup,
    Template,
    check_mesh,
    mesh_of_sharded,
    refuse_for_sharded,
    refuse_torchs_own,
)
from fsdp2._tools.plan.shown import Verdict, lines, of_each, page_of, planned, verdict_of
from fsdp2._tools.plan.values import GroupPlan as GroupPlan  # annotations of inherited fields
from fsdp2._tools.plan.values import StepPlan


@dataclass(frozen=True)
class Plan(Prediction):
    """The result of ``plan``. ``print`` shows it as a table.

    ``mesh`` is the mesh shape, ``ranks`` the number of ranks, and ``rank`` the described rank.
    ``groups`` has a ``GroupPlan`` for each group. ``step`` is a ``StepPlan``, or None without a
    batch. A plan keeps a copy of the model, without memory for its tensors, to predict the effect
    of other settings. All methods run on the calling rank only, without communication.
    """

    def suggest(self, budget: str | int | None = None) -> list[Suggestion]:
        """Find settings with which a step fits into the memory of a rank.

        Memory settings are tried first. If none fits, a smaller batch, activation checkpointing
        around each unit, and a chunked loss are tried separately, then the last two together. If
        the hardware is a device, offloading activations is tried next, then offloading optimizer
        states as well. CPU offload is tried last, unless the model is already sharded. For the best
        setting, the search also determines the largest batch that fits. Each trial is a plan, so
        the search takes as long as several plans. A setting with the same result as an earlier
        setting is omitted. With several micro-batches, values of ``shard`` are also tried, unless
        a keyword argument of the plan controls when parameters are unsharded.

        Args:
            budget: bytes per rank, as an int or as text, such as ``"70GB"`` or ``"64GiB"``. None:
                the hardware's memory.

        Returns:
            The settings that were tried. Settings that fit come first, sorted by time per row of
            the batch (without hardware, by peak memory). The others follow, sorted by peak memory.

        Raises:
            ConfigError: the plan has no batch; the budget is invalid, or it is None and the
                hardware's memory is unknown.
        """
        return search_of(self, budget).run()

    def verdict(self, budget: str | int | None = None) -> Verdict:
        """Return whether a step fits. If not, find a setting that fits, as ``suggest`` does.

        Args:
            budget: as for ``suggest``. If it is None and the hardware's memory is unknown, the
                verdict's ``fits`` is None.

        Raises:
            ConfigError: the plan has no batch; the budget is invalid.
        """
        found = verdict_of(self.step_for("verdict"), budget_of(self, "verdict", budget))
        if found.fits is not False:
            return found
        way_out = search_of(self, budget).first()
        if way_out is None:
            return replace(found, way_out="none of the tried settings fits: more ranks are needed")
        peak, _ = of_each(way_out.peak_nbytes, found.capacity_nbytes or 0)
        return replace(found, way_out=f"{way_out.name} fits ({peak})")

    def advice(self, budget: str | int | None = None) -> tuple[Advice, ...]:
        """Return problems with the plan's settings, each with a figure and an improvement.

        Another plan predicts the gain of each improvement, so this takes as long as several plans.

        Args:
            budget: as for ``suggest``. No limit if it is None and the hardware's memory is unknown.

        Returns:
            The advice, most urgent first; empty if there is none.

        Raises:
            ConfigError: an invalid budget.
        """
        return tuple(advise(self, budget_of(self, "advice", budget)))

    def page(self, budget: str | int | None = None) -> Page:
        """Return the contents of the ``html`` page as plain values, for programs that render them.

        Raises:
            ConfigError: an invalid budget.
        """
        steps: dict[str, StepPlan] = {}
        if self.step is not None:
            own = "current setting" if self.setup.memory is None else str(self.setup.memory)
            others = {name: self.changed(memory=name) for name in MEMORY if name != own}
            steps = {own: self.step, **{name: one.step_for("page") for name, one in others.items()}}
        limit = budget_of(self, "page", budget)
        verdict = None if self.step is None else self.verdict(budget)
        return page_of(self, steps, self.advice(budget), limit, verdict)

    def html(self, path: str | os.PathLike[str], budget: str | int | None = None) -> None:
        """Write an HTML page: units, memory over a step for each setting, timeline, advice.

        The page is one file, which needs neither a server nor a network, and is written atomically.
        Call this on one rank only, because ranks that use the same path replace each other's page.

        Args:
            path: the file; an existing one is replaced.
            budget: as for ``advice``.

        Raises:
            ConfigError: an invalid path or budget.
            OSError: the file cannot be written. An existing file remains unchanged.
        """
        write_page(check_path("Plan.html", "path", path), self.page(budget))

    def planned(self) -> Planned:
        """Return predictions that ``Recordings.html(path, planned=...)`` plots with measurements.

        Raises:
            ConfigError: the plan has no batch.
        """
        return planned(self.step_for("planned"))

    def _repr_html_(self) -> str:
        return embed(self.page())

    def __str__(self) -> str:
        if self.step is None:
            return table_of(self)
        return f"{verdict_of(self.step, budget_of(self, 'print', None))}\n\n{table_of(self)}"


def table_of(plan: Plan) -> str:
    """Return the text that ``print`` shows for a plan, without the verdict."""
    return "\n".join(lines(plan))


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
    """Predict how a model is sharded over ranks, without other ranks, a process group, or memory.

    The real engine runs on fake tensors, which have shapes but no values, and on simulated ranks,
    which have no processes. It gathers, reduces, keeps and frees tensors as in a real step.

    Args:
        model: the model before ``fully_shard``, on any device, including ``meta``; or a sharded
            model on a CPU, which keeps its units, mesh and settings. The model is not changed.
        mesh: number of ranks to shard over, or ``(replicate, shard)``. Up to 2**20 ranks.
        policy: the units below the root, in the form that ``fsdp2.wrap.shard_model`` accepts. None:
            no units below the root.
        batch: the inputs of one rank's forward: a tensor, a tuple of arguments, or a dict of
            keywords. Only the shapes and dtypes of tensors matter. None: no step is predicted.
        loss: a function that computes a scalar from the output. None: the output's ``loss``, or the
            sum of the means of its tensors.
        optimizer: a class or function that creates an optimizer from parameters, such as
            ``torch.optim.AdamW``. The plan includes its state after the first step, and its step on
            the shards of one rank.
        memory: the argument of ``set_memory``.
        hardware: the name of a machine in ``fsdp2.plan.hardware``, a ``fsdp2.plans.Hardware``, or
            the path of a JSON file from ``python -m fsdp2 doctor --json`` on the target machine.
            None: the plan has no times.
        activation_checkpointing: recompute activations of the units below the root in backward, as
            with ``torch.utils.checkpoint`` around each unit.
        loss_chunks: count logits (tensors whose last dim is the vocabulary size of an embedding) as
            if head and loss processed the tokens in this many chunks, one after another.
        offload_activations: offload the tensors that units below the root save for backward, except
            those of the last unit, as ``fsdp2.offload_activations`` does. Has an effect only if
            ``hardware`` is a device.
        offload_states: keep the optimizer's states on the host, as ``fsdp2.optim.offload_states``
            does. Has an effect only if ``hardware`` is a device.
        rank: the rank whose shards and memory the plan describes. None: the first rank, which
            stores the most; for a sharded model, the calling rank.
        micro_batches: backwards per step, each with ``batch``. Only the last one syncs.
        fully_shard_kwargs: other keywords of ``fully_shard``, such as ``mp_policy``,
            ``offload_policy``, ``reshard_after_forward``, ``shard`` and ``shard_outer``.

    Returns:
        A ``Plan``: the groups; for a step, the collectives, events, memory and time, in order.

    Raises:
        ConfigError: an invalid argument; errors of ``shard_model``.
        UnsupportedError: a parameter is tensor-parallel and belongs to no unit; a sharded model
            computes on a device.

    Memory includes tensors only. It excludes allocator rounding, library workspaces, and memory
    that the allocator cannot reuse yet because another stream may use it. The mesh is on CPUs.
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
    return Plan.of(Template(model), setup, "the requested step")


plan.measure = machines.measure  # type: ignore[attr-defined]  # an attribute of a function
plan.hardware = machines.HARDWARE  # type: ignore[attr-defined]  # an attribute of a function
