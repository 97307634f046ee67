"""Three hundred schemas: whatever a model would say under them, an independent checker finds it valid.

What is said is drawn at random from what the grammar allows, token by token, with a bent for text that goes on: the
worst that a model could do.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from slipstream.bench.schemas import schemas
from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.grammar import Grammars
from slipstream.text.grammars import of_schema

COUNT, LONGEST = 300, 6000
USUAL = frozenset(b"abcdefghij0123456789")


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def said_under(grammars: Grammars, model: Model, grammar: str, rng: random.Random) -> str:
    """Tokens that are allowed, at random, up to the end."""
    one, data = grammars.constraint(grammar), b""
    names = model.tokenizer.token_bytes
    for _ in range(LONGEST):
        if one.over:
            break
        mask = one.mask()
        allowed = [token for token in range(model.config.vocabulary) if mask[token >> 5] >> (token & 31) & 1]
        assert allowed, data
        ends = [token for token in allowed if token in model.eos]
        if ends and rng.random() < 0.5:
            break
        usual = [token for token in allowed if token in USUAL] if rng.random() < 0.7 else []
        token = rng.choice(usual or [token for token in allowed if token not in ends])
        data += names[token]
        one.accept(token)
        assert not one.failed
    else:
        raise AssertionError("no end")
    return data.decode()


@pytest.mark.parametrize("block", range(6))
def test_whatever_is_said_is_valid(model: Model, block: int) -> None:
    grammars, rng = Grammars(model.tokenizer, model.config.vocabulary), random.Random(block)
    each = COUNT // 6
    for schema in schemas(COUNT)[block * each : (block + 1) * each]:
        text = said_under(grammars, model, of_schema(schema), rng)
        value: Any = json.loads(text)
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
