"""Layer 3: backends that compile and replay programs."""

from slipstream.kernels.backend import Backend, Executable, StepOutput

__all__ = ["Backend", "Executable", "StepOutput"]
