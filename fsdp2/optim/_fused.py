"""One call of torch's fused Adam kernel for all runs of a param group, with one step counter.

Owns the lists that the kernel takes, and the counter that the runs have in common meanwhile. The
optimizer's own ``step`` builds the lists anew and counts every run's ``step`` by itself, which
costs several times the kernel. It must not know when it may be used: that is ``optim``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp2._base import torch_tensors
from fsdp2.optim._runs import Run, StepPlan

VARIANTS = (torch.optim.Adam, torch.optim.AdamW)
"""The classes whose fused step is this kernel."""


class FusedAdam:
    """What the kernel takes for the runs of one plan, except gradients and hyperparameters."""

    def __init__(self, runs: Sequence[Run], uses_amsgrad: bool) -> None:
        self._runs = runs
        self._params = [run.tensor for run in runs]
        self._means = [run.state["exp_avg"] for run in runs]
        self._squares = [run.state["exp_avg_sq"] for run in runs]
        self._maxima = [run.state["max_exp_avg_sq"] for run in runs] if uses_amsgrad else []
        self._uses_amsgrad = uses_amsgrad
        self._counter = runs[0].state["step"].clone()
        self._counters = [self._counter] * len(runs)

    @staticmethod
    def of(plan: StepPlan, group: dict[str, Any]) -> FusedAdam | None:
        """Return what steps the plan's runs in one call; None if they have to step by the class."""
        if not _suits(group) or plan.plain or not plan.runs:
            return None
        names = {"step", "exp_avg", "exp_avg_sq"}
        if group["amsgrad"]:
            names.add("max_exp_avg_sq")
        first = plan.runs[0].tensor
        for run in plan.runs:
            if set(run.state) != names or not first.is_floating_point():
                return None
            values = [run.tensor, *(run.state[name] for name in names - {"step"})]
            if any(v.dtype is not first.dtype or v.device != first.device for v in values):
                return None
            step = run.state["step"]
            if step.dim() or step.dtype is not torch.float32 or step.device != first.device:
                return None
        steps = torch.stack([run.state["step"] for run in plan.runs])
        if not bool((steps == steps[0]).all()):
            return None
        return FusedAdam(plan.runs, bool(group["amsgrad"]))

    def takes(self, grads: Sequence[Tensor], group: dict[str, Any]) -> bool:
        """True if this step is one for the kernel: what ``of`` asked still holds."""
        if not _suits(group) or bool(group["amsgrad"]) is not self._uses_amsgrad:
            return False
        dtype = self._params[0].dtype
        return all(grad.dtype is dtype for grad in grads)

    def step(self, grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        self._counter += 1
        kernel = (
            torch_tensors.fused_adamw
            if group["decoupled_weight_decay"]
            else torch_tensors.fused_adam
        )
        kernel(
            self._params,
            grads,
            self._means,
            self._squares,
            self._maxima,
            self._counters,
            amsgrad=self._uses_amsgrad,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )

    def settle(self) -> None:
        """Give every run a counter of its own again."""
        for run in self._runs:
            run.state["step"].copy_(self._counter)


def _suits(group: dict[str, Any]) -> bool:
    """True if hyperparameters are what the kernel takes as they are."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return group.get("fused") is True and all(isinstance(n, int | float) for n in numbers)
