"""The torch backend: the same program run eagerly on any device; the base of the GPU backend."""

import torch

from slipstream.errors import UsageError
from slipstream.kernels.torch.executable import TorchBackend

__all__ = ["TorchBackend", "named"]


def named(setting: str) -> TorchBackend:
    """The backend by what follows its name: a device, or bf16, or both with a colon between. Raises UsageError."""
    device, _, last = setting.rpartition(":")
    if last != "bf16":
        device, last = setting, ""
    try:
        return TorchBackend(device or None, torch.bfloat16 if last else torch.float32)
    except RuntimeError as error:
        raise UsageError(f"torch has no device {device!r}: cpu, cuda or cuda:1, with :bf16 after it or not") from error
