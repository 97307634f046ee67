"""Record: one answer as traffic keeps it. Token ids and how they came about; no text, no hidden states."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.program.sampling import SamplingParams

MOST_TOKENS = 1 << 20
"""Tokens of a record that are believed when it is read."""
SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip
"""Sampling settings that are kept; a seed or a stop string might say who asked what."""
WHOLE = ("top_k", "min_tokens")
RESTRICTIONS = ("logit_bias", "banned_tokens", "allowed_tokens", "grammar")
"""What else decides which tokens may come. Kept is how many tokens it names, of a grammar that there was one: what it
was would be text. Such an answer cannot be had again from what is kept.
"""


class RecordError(SlipstreamError):
    """A record that is damaged, or none."""


@dataclass(frozen=True, slots=True)
class Record:
    """A prompt and its answer.

    `spans` are the half-open ranges of tokens that the target made: only those are learned from. `steps` are the
    tokens that each step of the answer brought, if it was served here: more than one where drafts were accepted.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    target: str = ""
    """The model that made the answer, by `target_of`; empty: not known, so it must be made anew before training."""
    template: str = ""
    """Hash of the chat template."""
    tag: str = ""
    key: str = ""
    time: float = 0.0
    request: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.spans:
            if not end <= start < stop <= len(self.tokens):
                raise RecordError(f"the answers of a record lie at {self.spans!r} of its {len(self.tokens)} tokens")
            end = stop
        if not self.spans or self.spans[0][0] == 0:
            raise RecordError("a record has a prompt, and an answer after it")

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first answer."""
        return self.tokens[: self.spans[0][0]]

    @property
    def answered(self) -> int:
        """Tokens of all answers."""
        return sum(stop - start for start, stop in self.spans)


def served_as(kv_cache_dtype: str, quantization: str) -> str:
    """The flags of a target that is not served as its file has it; empty if it is."""
    cache = f"--kv-cache-dtype {kv_cache_dtype}" if kv_cache_dtype != "bf16" else ""
    return " ".join(filter(None, (cache, f"--quantization {quantization}" if quantization != "none" else "")))


def target_of(fingerprint: str, kv_cache_dtype: str, quantization: str) -> str:
    """What a target is called in records: its fingerprint, and how it is served. Other numbers give other answers."""
    return f"{fingerprint} {served_as(kv_cache_dtype, quantization)}".rstrip()


def settings_of(params: SamplingParams) -> dict[str, float]:
    """The sampling settings that are not as they always are."""
    plain = SamplingParams()
    kept = {name: value for name in SETTINGS if (value := getattr(params, name)) != getattr(plain, name)}
    sizes = {name: 1 if name == "grammar" else len(value) for name in RESTRICTIONS if (value := getattr(params, name))}
    return {name: float(value) for name, value in (kept | sizes).items()}


def sampled_with(settings: Mapping[str, float]) -> dict[str, Any]:
    """Kept settings as fields of SamplingParams, without what is not kept whole."""
    kept = {name: value for name, value in settings.items() if name not in RESTRICTIONS}
    for name in WHOLE:
        if name in kept:
            kept[name] = int(kept[name])
    return kept | ({"ignore_eos": bool(kept["ignore_eos"])} if "ignore_eos" in kept else {})


def restricted(settings: Iterable[str]) -> bool:
    """Whether something that is not kept decided which tokens might come."""
    return any(name in RESTRICTIONS for name in settings)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as compressed little-endian 32-bit numbers."""
    return zlib.compress(np.asarray(tokens, "<u4").tobytes(), 1)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """What `pack_tokens` packed. Raises RecordError."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, 4 * MOST_TOKENS)
    except zlib.error as error:
        raise RecordError(f"a record's tokens are damaged: {error}") from error
    if len(raw) % 4 or unpacker.unconsumed_tail or not unpacker.eof:
        raise RecordError("a record's tokens are cut off, or too many")
    return tuple(np.frombuffer(raw, "<u4").tolist())


def spans_json(record: Record) -> str:
    """The answers' places."""
    return json.dumps([list(span) for span in record.spans])


def spans_of(text: str) -> tuple[tuple[int, int], ...]:
    """What `spans_json` wrote. Raises RecordError."""
    value = _json(text)
    if not isinstance(value, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span) for span in value
    ):
        raise RecordError("a record's answers are no list of pairs")
    return tuple((span[0], span[1]) for span in value)


def settings_of_json(text: str) -> dict[str, float]:
    """Settings as they are stored. Raises RecordError."""
    value = _json(text)
    if not isinstance(value, dict) or not all(isinstance(number, int | float) for number in value.values()):
        raise RecordError("a record's settings are no table of numbers")
    return {str(name)[:40]: float(number) for name, number in value.items()}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record is damaged: {error}") from error
