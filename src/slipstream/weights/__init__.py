"""Readers for GGUF and safetensors, model references, pull."""

from slipstream.weights.store import Checkpoint, StoredTensor

__all__ = ["Checkpoint", "StoredTensor"]
