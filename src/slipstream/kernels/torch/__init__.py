"""The torch backend: the same program run eagerly on any device; the base of the GPU backend."""

from slipstream.kernels.torch.executable import TorchBackend, named

__all__ = ["TorchBackend", "named"]
