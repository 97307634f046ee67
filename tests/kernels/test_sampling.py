"""Sampling: the native kernels against numpy, the law of the draws, and noise that depends on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from slipstream.kernels.native import NativeBackend, NativeExecutable, _native
from slipstream.kernels.reference.sampling import draw, keep
from slipstream.models.weights import ArrayWeights
from slipstream.program import CacheGroup, CacheSpec, GroupKind, Recorder, Row, Rows
from slipstream.program.noise import gumbel, random_words
from slipstream.program.sampling import Draw, DrawColumns, Mask, SamplingParams, mask_of

VOCABULARY = 300


def logit_executable(table: np.ndarray) -> NativeExecutable:
    """A program whose logits for token t are the row t of `table`: an identity head."""
    rows, vocabulary = table.shape
    cache = CacheSpec((CacheGroup(GroupKind.FULL, 1, 1, 16, 16),))
    p = Recorder(cache)
    x = p.embed("table", rows, vocabulary)
    p.sample(p.logits(x, "head", vocabulary))
    weights = ArrayWeights({"table": table, "head": np.eye(vocabulary, dtype=np.float32)})
    return NativeBackend(2, max_rows=64).compile(p.program(), weights, 64)


def rows_of(count: int) -> Rows:
    return Rows.of([Row(i, i, 0, i * 32, -1, True) for i in range(count)], [[i] for i in range(count)])


TABLE = (np.random.default_rng(0).standard_normal((8, VOCABULARY)) * 3).astype(np.float32)
EXECUTABLE = logit_executable(TABLE)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 290, 1000]),
    top_p=st.sampled_from([0.1, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    logprobs=st.sampled_from([None, 0, 7]),
)
MASKS = st.sampled_from([None, mask_of((3, 70, 299)), mask_of(range(0, 40))])
ADJUST = st.lists(
    st.tuples(
        st.integers(0, VOCABULARY - 1),
        st.sampled_from([1.0, 1.5, 0.5]),
        st.sampled_from([0.0, -2.0, 8.0, -np.inf]),
    ),
    max_size=6,
    unique_by=lambda entry: entry[0],
)


@given(PARAMS, st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, 5000), min_size=1, max_size=9))
def test_draws_along_an_answer_are_single_draws(params: SamplingParams, seed: int, positions: list[int]) -> None:
    """What a draft's rows are drawn with is written out at once; it must not differ from one draw after the other."""
    along = DrawColumns.along(Draw(params, seed, 3, 0), positions)
    single = DrawColumns.of([Draw(params, seed, 3, position) for position in positions])
    for name in DrawColumns.__slots__:
        mine, theirs = getattr(along, name), getattr(single, name)
        assert np.array_equal(mine, theirs)
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype


@given(
    st.lists(st.tuples(PARAMS, *[st.integers(0, (1 << 64) - 1), st.integers(0, 5), st.integers(0, 5000)]), min_size=1)
)
def test_plain_draws_are_single_draws(rows: list[tuple[SamplingParams, int, int, int]]) -> None:
    plain = DrawColumns.plain(*map(list, zip(*rows, strict=True)))
    single = DrawColumns.of([Draw(*row) for row in rows])
    for name in DrawColumns.__slots__:
        mine, theirs = getattr(plain, name), getattr(single, name)
        assert np.array_equal(mine, theirs)
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PARAMS, ADJUST, st.integers(0, (1 << 64) - 1), MASKS), min_size=1, max_size=8))
def test_native_equals_reference(requests: list[tuple[SamplingParams, list, int, Mask | None]]) -> None:
    draws = DrawColumns.of(
        [Draw(p, seed, i, 17 + i, adjust=adjust, mask=m) for i, (p, adjust, seed, m) in enumerate(requests)]
    )
    expected = draw(TABLE[: len(requests)], draws)
    actual = EXECUTABLE.step(rows_of(len(requests)), draws).drawn
    assert actual is not None
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert np.allclose(actual.logprobs, expected.logprobs, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("isa", [*_native.available_isas(), *_native.emulated_isas()])
def test_draws_are_the_same_on_every_instruction_set(isa: str) -> None:
    draws = DrawColumns.of([Draw(SamplingParams(), 99, 0, position) for position in range(8)])
    before = _native.isa()
    expected = EXECUTABLE.step(rows_of(8), draws).drawn
    _native.select_isa(isa)
    try:
        actual = EXECUTABLE.step(rows_of(8), draws).drawn
    finally:
        _native.select_isa(before)
    assert expected is not None
    assert actual is not None
    assert actual.token.tolist() == expected.token.tolist()


@pytest.mark.parametrize("isa", [*_native.available_isas(), *_native.emulated_isas()])
def test_tokens_that_cannot_win_are_left_out_rightly(isa: str) -> None:
    """A large vocabulary with few likely tokens: most noise is never computed, the draws are those of the oracle."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((16, 1500)).astype(np.float32) * 3 - 6
    for row, likely in enumerate(range(0, 1500, 100)):
        table[row, likely : likely + row] += 9.0  # a few likely ones, now here, now there
    table[15] = 0.0
    table[14, 700:] = -1e6
    executable, seen = logit_executable(table), 0
    before = _native.isa()
    _native.select_isa(isa)
    try:
        for turn in range(12):
            temperature = (0.4, 0.8, 1.3)[turn % 3]
            single = Draw(SamplingParams(temperature=temperature), turn, 0, turn)
            draws = [Draw(SamplingParams(temperature=temperature), turn, 0, 100 * turn + i) for i in range(16)]
            for rows, wanted in ((rows_of(16), draws), (rows_of(1), [single])):
                columns = DrawColumns.of(wanted)
                drawn = executable.step(rows, columns).drawn
                assert drawn is not None
                assert drawn.token.tolist() == draw(table[: len(wanted)], columns).token.tolist()
                seen += len(wanted)
    finally:
        _native.select_isa(before)
    assert seen == 12 * 17


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value; rare outcomes are counted together."""
    common = probabilities * counts.sum() >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * counts.sum()
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=12),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.2, min_p=0.1),
    ],
)
def test_the_law_of_the_draws(params: SamplingParams) -> None:
    """χ² over 64 000 draws by position; fails if the noise of neighbouring positions is the same."""
    batch, rounds = 64, 1000
    logits = (np.random.default_rng(5).standard_normal(40) * 2).astype(np.float32)
    executable = logit_executable(np.tile(logits, (batch, 1)))
    rows, counts = rows_of(batch), np.zeros(40, np.int64)
    for turn in range(rounds):
        draws = DrawColumns.of([Draw(params, 7, 0, turn * batch + i) for i in range(batch)])
        drawn = executable.step(rows, draws).drawn
        assert drawn is not None
        np.add.at(counts, drawn.token, 1)
    scaled = logits / np.float32(params.temperature)
    kept = keep(scaled, params.top_k, params.top_p, params.min_p)
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    assert counts[~kept].sum() == 0
    assert chi_square(counts, weights / weights.sum()) > 1e-4


def test_noise_differs_by_every_part_of_its_key() -> None:
    base = random_words(1, 2, 3, 4, 1000)
    for key in ((2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (1 + (1 << 40), 2, 3, 4)):
        assert (random_words(*key, 1000) != base).mean() > 0.99
    assert np.array_equal(random_words(1, 2, 3, 4, 500), base[:500])
    noise = gumbel(random_words(9, 0, 0, 0, 200_000))
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_known_philox_answers() -> None:
    """Known answers published with Random123 (kat_vectors)."""
    from slipstream.program.noise import philox

    zeros = philox(np.zeros((1, 4), np.uint32), (0, 0))[0]
    assert [f"{word:08x}" for word in zeros] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = philox(np.full((1, 4), 0xFFFFFFFF, np.uint32), (0xFFFFFFFF, 0xFFFFFFFF))[0]
    assert [f"{word:08x}" for word in ones] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_ties_and_bad_logits() -> None:
    executable = logit_executable(np.zeros((2, 64), np.float32))
    greedy = DrawColumns.of([Draw(SamplingParams(temperature=0.0), 0, 0, 0)] * 2)
    drawn = executable.step(rows_of(2), greedy).drawn
    assert drawn is not None
    assert drawn.token.tolist() == [0, 0]
    top_one = DrawColumns.of([Draw(SamplingParams(top_k=1), seed, 0, 0) for seed in range(2)])
    drawn = executable.step(rows_of(2), top_one).drawn
    assert drawn is not None
    assert drawn.token.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_drawn_again(temperature: float) -> None:
    """It is what the step would have drawn by those draws. Only rows of the last step can be drawn again."""
    params = SamplingParams(temperature=temperature, logprobs=3)
    plain = [Draw(params, 5, 0, at, adjust=[(at, 1.0, 2.0), (7, 2.0, 0.0)]) for at in range(6)]
    mask = mask_of(range(0, VOCABULARY, 7))
    wanted = EXECUTABLE.step(rows_of(6), DrawColumns.of([replace(draw, mask=mask) for draw in plain])).drawn
    first = DrawColumns.of(plain)
    drawn = EXECUTABLE.step(rows_of(6), first).drawn
    assert wanted is not None
    assert drawn is not None
    for row in (4, 0, 5):
        again = EXECUTABLE.redraw(np.array([row], np.int32), first.of_row(row, mask))
        assert again.token[0] == wanted.token[row] != drawn.token[row]
        assert np.array_equal(again.tokens[0], wanted.tokens[row])
        assert np.array_equal(again.logprobs[0], wanted.logprobs[row])
    for row in (6, -1):
        with pytest.raises(ValueError, match="no logit row"):
            EXECUTABLE.redraw(np.array([row], np.int32), first.of_row(0, mask))
