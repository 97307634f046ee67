"""Tokenizer, incremental detokenizer; chat templates are in `template`, imported when one is used."""

from slipstream.text.detokenizer import Detokenizer, StopStrings
from slipstream.text.load import load_tokenizer
from slipstream.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "StopStrings",
    "Tokenizer",
    "load_tokenizer",
]
