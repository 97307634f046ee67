"""Layer 4: what a precision costs; later quantising and repacking."""

from slipstream.precision.quality import Quality, compare, scores_of

__all__ = ["Quality", "compare", "scores_of"]
