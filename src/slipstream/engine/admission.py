"""Admission: a prompt and its settings become sequences, or are refused by name."""

from __future__ import annotations

import secrets
from dataclasses import replace

from slipstream.engine.model import Model
from slipstream.engine.request import Terms
from slipstream.errors import UsageError
from slipstream.program import BLOCK_SLOTS
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence


def check_request(model: Model, blocks: int, prompt: list[int], params: SamplingParams) -> None:
    """Raise UsageError for what can never run on a model with so many blocks of cache."""
    vocabulary = model.config.vocabulary
    params.check_vocabulary(vocabulary)
    if not prompt:
        raise UsageError("the prompt has no tokens")
    if any(not 0 <= token < vocabulary for token in prompt):
        raise UsageError("the prompt has a token outside the vocabulary")
    if len(prompt) >= model.max_len:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, the context holds {model.max_len}; "
            "shorten it or raise --max-model-len"
        )
    if -(-(len(prompt) + 1) // BLOCK_SLOTS) > blocks:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, the whole cache holds {blocks * BLOCK_SLOTS}; "
            "shorten it or give the cache more memory"
        )


def sequences_of(
    model: Model, number: int, prompt: list[int], params: SamplingParams, terms: Terms, arrived: float
) -> list[Sequence]:
    """A sequence for each choice of request `number`; all but the first wait for it, to share its prompt."""
    seed = secrets.randbits(64) if params.seed is None else params.seed
    namespace = replace(model.namespace, salt=f"{len(terms.tenant)} {terms.tenant}/{terms.cache_salt}")
    limit = model.max_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    found: list[Sequence] = []
    for choice in range(params.n):
        sequence = Sequence(
            number, choice, list(prompt), len(prompt), params, seed, model.eos, limit, namespace,
            waits_for=found[0] if found else None, tenant=terms.tenant, priority=terms.priority, arrived=arrived,
            deadline=arrived + terms.timeout, tag=terms.tag,
        )  # fmt: skip
        found.append(sequence)
    return found
