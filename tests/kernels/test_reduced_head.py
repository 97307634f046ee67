"""A head over some tokens: what the whole head says of them, drawn with their own noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.kernels import Backend
from slipstream.kernels.native import NativeBackend
from slipstream.kernels.reference import ReferenceBackend
from slipstream.models import read_config, record_program
from slipstream.models.weights import ModelWeights
from slipstream.program import KVFormat, Row, Rows
from slipstream.program.noise import gumbel, random_words
from slipstream.program.sampling import Draw, DrawColumns, SamplingParams
from slipstream.speculation.reduced_head import first_tokens, with_reduced_head
from slipstream.weights.open import open_checkpoint

TOKENS = first_tokens(259, 120, [256, 258, 999])
ROWS = Rows.of([Row(0, 9, 0, 0, -1, True), Row(0, 77, 1, 1, 0, True)], [[0]])


def test_which_tokens() -> None:
    assert TOKENS.tolist() == [*range(120), 256, 258]


@pytest.mark.parametrize("backend", [NativeBackend(threads=2, max_rows=8), ReferenceBackend()], ids=["native", "numpy"])
def test_as_the_whole_head(tiny_gguf: Path, backend: Backend) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    config = read_config(checkpoint)
    kv_format = KVFormat.BF16 if backend.name == "native" else KVFormat.F32
    program, weights = record_program(config, max_len=64, kv_format=kv_format), ModelWeights(config, checkpoint)
    whole = backend.compile(program, weights, 2)
    cut = backend.compile(*with_reduced_head(program, weights, TOKENS), 2)
    cut.set_vocabulary(TOKENS)
    logits = whole.step(ROWS, None, logits=True).logits
    assert logits is not None
    for temperature in (0.0, 0.6, 1.5):
        params = SamplingParams(temperature=temperature, logprobs=2)
        draws = DrawColumns.of([Draw(params, 5, 1, 40 + row, adjust=[(3, 1.0, -1.0)]) for row in range(2)])
        output = cut.step(ROWS, draws, logits=True)
        assert output.logits is not None
        assert output.drawn is not None
        assert np.array_equal(output.logits, logits[:, TOKENS])
        for row in range(2):
            scores = logits[row, TOKENS].copy()
            best = TOKENS[np.argsort(-scores, kind="stable")[:2]]
            assert output.drawn.tokens[row, 1:].tolist() == best.tolist()
            scores[3] -= 1.0
            if temperature:
                scores = scores / np.float32(temperature) + gumbel(random_words(5, 1, 40 + row, 0, 259))[TOKENS]
            assert output.drawn.token[row] == TOKENS[scores.argmax()]
            raw = logits[row, TOKENS].astype(np.float64)
            place = TOKENS.tolist().index(int(output.drawn.token[row]))
            wanted = raw[place] - raw.max() - np.log(np.exp(raw - raw.max()).sum())
            assert output.drawn.logprobs[row, 0] == pytest.approx(wanted, abs=1e-5)
    checked = np.array([4, 4], np.int32)
    if backend.name == "native":
        with pytest.raises(ValueError, match="one token for every row"):
            cut.set_vocabulary(checked)
