"""The reference backend: numpy, float32, plain, slow, obviously right."""

from slipstream.errors import UsageError
from slipstream.kernels.reference.executable import ReferenceBackend

__all__ = ["ReferenceBackend", "named"]


def named(setting: str) -> ReferenceBackend:
    """The backend by what follows its name: nothing. Raises UsageError."""
    if setting:
        raise UsageError(f"the reference backend takes no setting {setting!r}")
    return ReferenceBackend()
