"""Layer 1: sequences and the plan of each step."""

from slipstream.scheduling.scheduler import Plan, SpanPlan, preempt, schedule
from slipstream.scheduling.sequence import Sequence

__all__ = ["Plan", "Sequence", "SpanPlan", "preempt", "schedule"]
