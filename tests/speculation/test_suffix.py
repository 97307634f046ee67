"""Drafts from text: what a brute-force search over all that was said would propose; bounded, and each tenant's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.native import SuffixIndex
from slipstream.program import KVFormat, Namespace
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import SuffixDrafter
from slipstream.speculation.suffix import BOUNDARY, LEARNED_TOKENS, LEAST_MATCH, MOST_TENANTS, class_of

SAME, CANDIDATES = 16, 32


def brute_force(text: list[int], context: list[int], most: int) -> list[int]:
    """What follows the longest match (16 and more count alike), most occurrences first, then the latest one."""

    def matched(position: int) -> int:
        length = 0
        while (
            length < min(len(context), 64)
            and position - 1 - length >= 0
            and text[position - 1 - length] == context[-1 - length]
        ):
            length += 1
        return length

    found = [p for p in range(len(text) - 1, 0, -1) if matched(p) >= LEAST_MATCH][:CANDIDATES]
    if not found:
        return []
    best = max(min(matched(p), SAME) for p in found)
    alive = [p for p in found if min(matched(p), SAME) == best]
    tokens: list[int] = []
    while len(tokens) < most:
        following = [text[p + len(tokens)] for p in alive if p + len(tokens) < len(text)]
        following = [token for token in following if token != BOUNDARY]
        if not following:
            break
        counts = {token: following.count(token) for token in following}
        token = max(following, key=lambda t: (counts[t], -following.index(t)))
        alive = [p for p in alive if p + len(tokens) < len(text) and text[p + len(tokens)] == token]
        tokens.append(token)
    return tokens


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=120), st.integers(1, 12))
def test_as_a_brute_force_search(text: list[int], most: int) -> None:
    index = SuffixIndex(1 << 12, LEAST_MATCH)
    for token in text:  # token by token, as an answer grows
        index.append([token])
    proposal = index.propose(None, most)
    wanted = brute_force(text, text, most) if len(text) >= LEAST_MATCH else []
    assert (proposal[0] if proposal else []) == wanted
    whole = SuffixIndex(1 << 12, LEAST_MATCH)
    whole.append(text)
    assert whole.propose(None, most) == proposal


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=6), st.lists(st.integers(0, 2), max_size=20)
)
def test_learned_text_has_borders(texts: list[list[int]], context: list[int]) -> None:
    learned, own = SuffixIndex(1 << 12, LEAST_MATCH), SuffixIndex(1 << 12, LEAST_MATCH)
    joined = [token for text in texts for token in (*text, BOUNDARY)]
    learned.append(joined)
    own.append(context)
    proposal = own.propose(learned, 8)
    mine, theirs = brute_force(context, context, 8), brute_force(joined, context, 8)
    assert (proposal[0] if proposal else []) in (mine, theirs)
    assert proposal is None or BOUNDARY not in proposal[0]
    assert (proposal is None) == (not mine and not theirs)


def test_memory_is_bounded() -> None:
    rng, index = random.Random(1), SuffixIndex(1000, LEAST_MATCH)
    pattern = [7, 8, 9, 10, 11, 12]
    index.append(pattern)
    for _ in range(20):
        index.append([rng.randrange(1000) for _ in range(500)])
    assert len(index) == 1000
    assert index.bytes < 40_000
    index.append(pattern[:4])
    assert index.propose(None, 4) is None, "what fell out of the ring is not found"
    index.append([1, 2, *pattern, 3, *pattern[:4]])
    proposal = index.propose(None, 2)
    assert proposal is not None
    assert proposal[0] == [11, 12]


def answer_of(tokens: list[int], tenant: str = "", prompt: int = 1) -> Answer:
    namespace = Namespace("", "", KVFormat.BF16)
    return Answer(0, 0, tokens, prompt, SamplingParams(), 0, frozenset(), 1 << 20, namespace, tenant=tenant)


def test_earlier_answers_help_their_own_tenant_only() -> None:
    said = list(range(100, 140))
    drafter = SuffixDrafter()
    drafter.free(answer_of([1, *said], "a"))
    again = [5, *said[:6]]
    draft = drafter.draft(answer_of(again, "a"), 4)
    assert draft is not None
    assert draft.tokens == tuple(said[6:10])
    assert drafter.draft(answer_of(again, "b"), 4) is None
    assert SuffixDrafter(learn=False).draft(answer_of(again, "a"), 4) is None
    drafter.forget()
    assert drafter.draft(answer_of(again, "a"), 4) is None
    drafter.free(answer_of([1, *said], "a"), learn=False)
    assert drafter.draft(answer_of(again, "a"), 4) is None


def test_an_answer_that_ended_is_forgotten() -> None:
    drafter = SuffixDrafter()
    for number in range(MOST_TENANTS + 10):
        answer = answer_of([number, *range(200)], f"tenant {number}")
        drafter.draft(answer, 4)
        drafter.free(answer)
    assert len(drafter._own) == 0
    assert len(drafter._learned) == MOST_TENANTS
    assert drafter.bytes < MOST_TENANTS * LEARNED_TOKENS * 20


def test_surer_the_longer_the_match_and_the_more_alike() -> None:
    drafter = SuffixDrafter()
    by_length = [drafter.prior(class_of(length, 1.0)) for length in (3, 5, 8, 12, 20, 40)]
    assert by_length == sorted(by_length)
    assert drafter.prior(class_of(8, 0.4)) < drafter.prior(class_of(8, 0.7)) < drafter.prior(class_of(8, 1.0))


def test_bad_sizes() -> None:
    for capacity, least in ((0, 3), (10, 0), (10, 65)):
        with pytest.raises(ValueError, match="at least one"):
            SuffixIndex(capacity, least)
