"""Draft: which tokens of a chain or tree hold; and noise of a few tokens only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.program import Draft, Proposal
from slipstream.program.noise import gumbel, gumbel_of, random_words


def trees() -> st.SearchStrategy[Draft]:
    def build(choices: list[tuple[int, int]]) -> Draft:
        parents = tuple(min(parent, index - 1) for index, (parent, _) in enumerate(choices))
        return Draft(tuple(token for _, token in choices), parents, (0,) * len(choices), "test")

    return st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 2)), min_size=1, max_size=10).map(build)


@given(trees(), st.lists(st.integers(0, 2), min_size=11, max_size=11))
def test_what_holds_is_a_path_that_the_target_walks(draft: Draft, drawn: list[int]) -> None:
    held = draft.accepted(drawn)
    at = -1
    for index in held:
        assert draft.parents[index] == at
        assert draft.tokens[index] == drawn[at + 1]
        at = index
    assert not any(p == at and t == drawn[at + 1] for p, t in zip(draft.parents, draft.tokens, strict=True))
    for index, depth in enumerate(draft.depths):
        assert len(draft.path(index)) == depth + 1
        assert draft.path(index)[-1] == draft.tokens[index]


def test_chains() -> None:
    draft = Draft.chain([5, 6, 7], [0, 1, 2], "test")
    assert draft.is_chain
    assert draft.accepted([5, 6, 9, 0]) == [0, 1]
    assert draft.accepted([4, 6, 7, 0]) == []
    assert draft.cut(2) == Draft.chain([5, 6], [0, 1], "test")
    assert draft.cut(9) is draft
    assert not Draft((5, 6), (-1, -1), (0, 0), "test").is_chain


def test_proposals() -> None:
    sparse = Proposal(np.array([0.25, 0.75], np.float32), np.array([1, 3], np.int32))
    assert sparse.dense(5).tolist() == [0, 0.25, 0, 0.75, 0]
    assert Proposal(np.array([0.5, 0.5], np.float32)).dense(2).tolist() == [0.5, 0.5]
    cut = Draft.chain([1, 3], [0, 0], "test", (sparse, sparse)).cut(1)
    assert cut.proposals == (sparse,)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_noise_of_some_tokens(count: int) -> None:
    rng = random.Random(count)
    tokens = np.array(sorted(rng.sample(range(1000), count)), np.int64)
    whole = gumbel(random_words(1 << 40 | 5, 2, 77, 1, 1000))
    assert np.array_equal(gumbel_of(1 << 40 | 5, 2, 77, 1, tokens), whole[tokens])
