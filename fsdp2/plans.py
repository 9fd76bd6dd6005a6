"""``fsdp2.plans``: result types of ``fsdp2.plan``, and ``Hardware``, which describes a machine."""

from fsdp2._tools.pages.content import Advice
from fsdp2._tools.plan.budget import Suggestion
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.plan import Plan
from fsdp2._tools.plan.shown import Verdict
from fsdp2._tools.plan.values import Collective, GroupPlan, MemoryPoint, ParamPlan, StepPlan

__all__ = [
    "Advice",
    "Collective",
    "GroupPlan",
    "Hardware",
    "MemoryPoint",
    "ParamPlan",
    "Plan",
    "StepPlan",
    "Suggestion",
    "Verdict",
]
