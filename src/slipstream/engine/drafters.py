"""From what --speculative says to a controller: auto, off, ngram, suffix, draft:MODEL, or a drafter's folder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.engine.model import Model, Progress
from slipstream.errors import UsageError
from slipstream.kernels.native import NativeBackend, NativeExecutable
from slipstream.kernels.native.packing import Quantization
from slipstream.models import read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.speculation import Controller, Drafter, ModelDrafter, SuffixDrafter
from slipstream.speculation.reduced_head import first_tokens, with_reduced_head
from slipstream.text import Tokenizer, load_tokenizer
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

DRAFTER_FORMAT: Quantization = "int4-128"
DRAFTED_TOKENS = 24 << 10
"""A draft model's weights, and the tokens of its head, the special ones besides: what a pass reads decides its price.
"""
_COMPARED = 1024
"""Tokens of two vocabularies that are compared."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """A checked value of --speculative."""

    kind: str
    reference: str = ""

    @classmethod
    def parse(cls, text: str) -> Speculative:
        """Raises UsageError for a value that cannot be one."""
        if text in ("auto", "off", "ngram", "suffix"):
            return cls(text)
        if text.startswith("draft:") and len(text) > len("draft:"):
            return cls("draft", text.removeprefix("draft:"))
        if "/" in text or text.startswith("."):
            return cls("folder", text)
        raise UsageError(
            f"--speculative is auto, off, ngram, suffix, draft:MODEL or a drafter's folder (with a /), not {text!r}"
        )


def load_controller(wanted: Speculative, model: Model, progress: Progress | None = None) -> Controller | None:
    """The drafters that were asked for; text that repeats is drafted from unless it says otherwise."""
    match wanted.kind:
        case "off":
            return None
        case "ngram":
            return Controller([SuffixDrafter(learn=False)])
        case "auto" | "suffix":
            return Controller([SuffixDrafter()])
        case "draft":
            return Controller([SuffixDrafter(), load_model_drafter(wanted.reference, model, progress)])
    raise UsageError(f"{wanted.reference} is no drafter")


def load_model_drafter(
    reference: str, target: Model, progress: Progress | None = None, *, coupled: bool = True
) -> Drafter:
    """A smaller model as a drafter, in int4 and with a reduced head. Raises UsageError if it does not fit."""
    if not isinstance(target.executable, NativeExecutable):
        raise UsageError("a draft model needs the native backend")
    checkpoint = open_checkpoint(resolve(reference, progress))
    config = read_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    _check_same(reference, tokenizer, target)
    program = record_program(config, max_len=target.max_len, kv_format=target.cache.groups[0].format)
    weights = ModelWeights(config, checkpoint)
    also = {*target.eos, *tokenizer.special.values()}
    tokens = first_tokens(min(config.vocabulary, target.config.vocabulary), DRAFTED_TOKENS, also)
    cut, cut_weights = with_reduced_head(program, weights, tokens)
    report = (lambda done, total: progress("packing the drafter", done, total)) if progress else None
    backend = NativeBackend(
        target.executable.threads, target.max_rows, DRAFTER_FORMAT, checkpoint.files, report,
        requantize=True, share=target.executable,
    )  # fmt: skip
    executable = backend.compile(cut, cut_weights, target.blocks, target.spare_blocks)
    executable.set_vocabulary(tokens)
    drafter = ModelDrafter(executable, f"model {reference}", target.max_rows, tokens, coupled=coupled)
    drafter.warm_up(target.blocks - 1)
    return drafter


def _check_same(reference: str, tokenizer: Tokenizer, target: Model) -> None:
    """Raise UsageError unless both models' tokens mean the same."""
    mine, theirs = tokenizer.token_bytes, target.tokenizer.token_bytes
    places = np.linspace(0, min(len(mine), len(theirs)) - 1, _COMPARED).astype(int).tolist()
    if any(mine[place] != theirs[place] for place in places) or tokenizer.eos != target.eos:
        raise UsageError(f"{reference} has another tokenizer than {target.reference}: it cannot draft for it")
