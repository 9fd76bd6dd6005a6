"""``fsdp2.plans``: what ``fsdp2.plan`` returns, and ``Hardware``, which tells it of a machine."""

from fsdp2._tools.pages.content import Advice
from fsdp2._tools.plan.budget import Suggestion
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.plan import Plan
from fsdp2._tools.plan.table import Verdict
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
