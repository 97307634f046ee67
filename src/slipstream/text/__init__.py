"""Tokenizer, incremental detokenizer, chat templates."""

from slipstream.text.detokenizer import Detokenizer, StopStrings
from slipstream.text.load import load_tokenizer
from slipstream.text.template import ChatTemplate, TemplateError
from slipstream.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopStrings",
    "TemplateError",
    "Tokenizer",
    "load_tokenizer",
]
