"""Layer 1: sequences and the plan of each step."""

from slipstream.scheduling.drafts import Allotment, Offer, Prices, allot
from slipstream.scheduling.scheduler import Limits, Plan, SpanPlan, State, schedule
from slipstream.scheduling.sequence import Sequence

__all__ = [
    "Allotment",
    "Limits",
    "Offer",
    "Plan",
    "Prices",
    "Sequence",
    "SpanPlan",
    "State",
    "allot",
    "schedule",
]
