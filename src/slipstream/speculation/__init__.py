"""Layer 6: drafters, which propose tokens, the rules by which they hold, and the controller that says when it pays."""

from slipstream.speculation.controller import Controller
from slipstream.speculation.drafter import Ask, Computed, Drafter, Needs
from slipstream.speculation.forced import GrammarDrafter
from slipstream.speculation.model_drafter import ModelDrafter
from slipstream.speculation.statistics import Counts, Pace
from slipstream.speculation.suffix import SuffixDrafter
from slipstream.speculation.verification import (
    ExactVerification,
    ForcedVerification,
    Verdict,
    Verification,
)

__all__ = [
    "Ask",
    "Computed",
    "Controller",
    "Counts",
    "Drafter",
    "ExactVerification",
    "ForcedVerification",
    "GrammarDrafter",
    "ModelDrafter",
    "Needs",
    "Pace",
    "SuffixDrafter",
    "Verdict",
    "Verification",
]
