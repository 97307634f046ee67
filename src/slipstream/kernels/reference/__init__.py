"""The reference backend: numpy, float32, plain, slow, obviously right."""

from slipstream.kernels.reference.executable import ReferenceBackend

__all__ = ["ReferenceBackend"]
