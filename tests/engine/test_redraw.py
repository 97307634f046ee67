"""Redraw: an answer whose tokens are drawn before the grammar is asked is the one that masks would have led to."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from slipstream.bench.schemas import schemas
from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.grammar import GrammarConstraint, Grammars
from slipstream.kernels.native import NativeExecutable
from slipstream.program import Draft
from slipstream.program.sampling import DrawColumns, Drawn
from slipstream.scheduling import Sequence
from slipstream.speculation import Controller
from slipstream.text import grammars as g
from slipstream.text.tokenizer import byte_alphabet
from tests.engine.test_grammar import KINDS, allows, check, requests_of
from tests.speculation.scripted import FREE
from tests.speculation.test_identity import answers, scripted


@pytest.fixture(scope="module", params=["native", "reference", "torch"])
def model(request: pytest.FixtureRequest, tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1, backend=request.param))


def test_answers_are_those_of_masks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    native = isinstance(model.executable, NativeExecutable)
    requests = requests_of(random.Random(5), 60 if native else 12)
    seen, redraw, instead = Counter[str](), type(model.executable).redraw, GrammarConstraint.instead

    def counted(self: Any, rows: np.ndarray, draws: DrawColumns) -> Drawn:
        seen["redrawn"] += 1
        return redraw(self, rows, draws)

    def asked(self: GrammarConstraint, token: int) -> Any:
        seen["asked"] += 1
        return instead(self, token)

    monkeypatch.setattr(type(model.executable), "redraw", counted)
    monkeypatch.setattr(GrammarConstraint, "instead", asked)
    late = answers(Engine(model, prefix_cache=False), requests)
    assert 0 < seen["redrawn"] < seen["asked"]
    if native:  # with others, drafts change the last bits of the logits
        drafter = scripted(model, requests, late, 0.3, 6)
        assert answers(Engine(model, FREE, controller=Controller([drafter])), requests) == late
        assert 100 < seen["redrawn"] < seen["asked"] - 100
    monkeypatch.setattr(Sequence, "redraws", False)
    seen.clear()
    early = answers(Engine(model, prefix_cache=False), requests)
    assert not seen
    assert late == early
    check(model, requests, late)


class Pieces:
    """A vocabulary of pieces of JSON, as much of a tokenizer as a grammar asks for."""

    def __init__(self) -> None:
        self.inner = tokenizers.Tokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        texts = [repr(schema).replace("'", '"') for schema in schemas(60, 1)]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<end>"])
        self.inner.train_from_iterator(texts, trainer)
        self.special, self.eos, self.bos = {"<end>": 0}, frozenset({0}), None
        names = [self.inner.id_to_token(token) or "" for token in range(700)]
        letters = byte_alphabet()
        self.token_bytes = [b"", *(bytes(letters[letter] for letter in name) for name in names[1:])]

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(self.inner.encode(text).ids)


PIECES = Grammars(Pieces(), 700)  # type: ignore[arg-type]
GRAMMARS = [*KINDS.values(), *(g.of_schema(schema) for schema in schemas(12, 2))]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_may_follow_instead(seed: int) -> None:
    """Only what the mask leaves may follow, whether a text is forced, begun or free; and supposing changes nothing."""
    rng = random.Random(seed)
    one = PIECES.constraint(rng.choice(GRAMMARS))
    for _ in range(rng.randint(1, 25)):
        mask = one.mask()
        allowed = [token for token in range(700) if allows(mask, token)]
        for token in {*rng.choices(range(700), k=40), *rng.choices(allowed, k=10), 0}:
            other = one.instead(token)
            assert (other is None) is (token in allowed)
            assert other is None or np.array_equal(other, mask)
        token = rng.choice(allowed)
        draft = Draft.chain([token, rng.randrange(700)], [0, 0], "x")
        after = one.masks(draft)[1]
        assert np.array_equal(one.mask(), mask)
        one.accept(token)
        if one.over:
            break
        assert np.array_equal(after, one.mask())
