"""Load the tokenizer that goes with a checkpoint."""

from __future__ import annotations

from slipstream.text.gguf import load_gguf
from slipstream.text.hf import load_hf
from slipstream.text.tokenizer import Tokenizer
from slipstream.weights import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """From GGUF metadata or tokenizer.json. Raises ModelFileError or UnsupportedModelError."""
    return load_gguf(checkpoint) if checkpoint.kind == "gguf" else load_hf(checkpoint)
