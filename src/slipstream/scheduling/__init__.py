"""Layer 1: sequences and the plan of each step."""

from slipstream.scheduling.scheduler import Limits, Plan, SpanPlan, State, schedule
from slipstream.scheduling.sequence import Sequence

__all__ = ["Limits", "Plan", "Sequence", "SpanPlan", "State", "schedule"]
