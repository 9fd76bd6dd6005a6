"""``fsdp2.plans``: what ``fsdp2.plan`` returns, and ``Hardware``, which tells it of a machine."""

from fsdp2._pages.content import Advice
from fsdp2._plan.budget import Suggestion
from fsdp2._plan.hardware import Hardware
from fsdp2._plan.plan import Plan
from fsdp2._plan.values import Collective, GroupPlan, MemoryPoint, ParamPlan, StepPlan
from fsdp2._plan.verdict import Verdict

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
