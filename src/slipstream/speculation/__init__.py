"""Layer 6: drafters, which propose tokens, and the controller, which decides when that pays."""

from slipstream.speculation.controller import Controller
from slipstream.speculation.drafter import Ask, Computed, Drafter, Needs
from slipstream.speculation.statistics import Counts, Pace
from slipstream.speculation.suffix import SuffixDrafter

__all__ = ["Ask", "Computed", "Controller", "Counts", "Drafter", "Needs", "Pace", "SuffixDrafter"]
