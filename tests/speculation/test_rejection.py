"""What speculation emits has the target's law: χ² on the joint law of three tokens, for every way to propose and to
verify.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from slipstream.kernels.reference import sampling
from slipstream.kernels.reference.sampling import draw
from slipstream.program import Draft, KVFormat, Namespace, Proposal
from slipstream.program.draft import ROOT
from slipstream.program.noise import gumbel, random_words
from slipstream.program.sampling import (
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_TARGET,
    DrawColumns,
    SamplingParams,
)
from slipstream.scheduling import Plan, SpanPlan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Drafter, ExactVerification, ForcedVerification, Verification
from slipstream.speculation import rejection as rule
from slipstream.speculation.chains import Chains
from slipstream.speculation.rejection import RejectionVerification
from slipstream.speculation.settings import PRIORS, class_of
from tests.speculation.scripted import FREE

VOCABULARY, LENGTH, DRAFTED = 4, 3, 3
TRIALS, LONG_TRIALS = 400, 100_000
LEAST = 1e-4
"""A law that is right passes with all but this probability."""
_RNG = np.random.default_rng(0)
TARGET = (1.5 * _RNG.standard_normal((VOCABULARY, VOCABULARY))).astype(np.float32)
"""Logits of the next token by the last one."""
DRAFTER = (TARGET + 0.9 * _RNG.standard_normal((VOCABULARY, VOCABULARY))).astype(np.float32)

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cool, top-k": SamplingParams(temperature=0.7, top_k=3),
    "top-p, biased": SamplingParams(temperature=1.2, top_p=0.85, logit_bias={1: 1.0}),
    "penalised": SamplingParams(temperature=1.0, presence_penalty=0.7, min_p=0.05),
}
Propose = Callable[[Answer], Draft]


def law(last: int, said: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The next token's distribution, written down once more: bias and penalty, temperature, top-k, top-p, min-p."""
    scores = TARGET[last].astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(said):
        scores[token] -= params.presence_penalty
    p = np.exp(scores / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: params.top_k or VOCABULARY]
    share = p[kept] / p[kept].sum()
    kept = kept[np.cumsum(share) - share < params.top_p]
    kept = kept[p[kept] >= params.min_p * p[kept[0]]]
    only = np.zeros(VOCABULARY)
    only[kept] = p[kept]
    return only / only.sum()


def joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of the first tokens of an answer that begins after token 0."""
    result = {}
    for said in itertools.product(range(VOCABULARY), repeat=LENGTH):
        chance, last = 1.0, 0
        for place, token in enumerate(said):
            chance *= law(last, said[:place], params)[token]
            last = token
        if chance > 0:
            result[said] = chance
    return result


def answer_of(params: SamplingParams, seed: int) -> Answer:
    return Answer(0, 0, [0], 1, params, seed, frozenset(), 1 << 20, Namespace("", "", KVFormat.F32))


def drafted_law(last: int, params: SamplingParams) -> np.ndarray:
    p = np.exp(DRAFTER[last].astype(np.float64) / params.temperature)
    return p / p.sum()


class Words:
    """`random_words` for many seeds at once: one call for small arrays costs as much as one for a thousand of them."""

    SEEDS = 1000

    def __init__(self) -> None:
        self._block = -1
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, seed: int, choice: int, position: int, stream: int, count: int) -> np.ndarray:
        block = seed // self.SEEDS
        if block != self._block:
            self._block, self._known = block, {}
        if (position, stream) not in self._known:
            self._known[position, stream] = self._words(choice, position, stream)
        return self._known[position, stream][seed % self.SEEDS, :count]

    def _words(self, choice: int, position: int, stream: int) -> np.ndarray:
        """Philox with the seeds in place of the one key: [seeds, 4] words of the first four tokens."""
        c = [np.full(self.SEEDS, value, np.uint64) for value in (0, position, choice, stream)]
        k0 = np.arange(self._block * self.SEEDS, (self._block + 1) * self.SEEDS, dtype=np.uint64)
        k1, low, high = np.zeros_like(k0), np.uint64(0xFFFFFFFF), np.uint64(32)
        for _ in range(10):
            first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            c = [(second >> high) ^ c[1] ^ k0, second & low, (first >> high) ^ c[3] ^ k1, first & low]
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
        return np.stack(c, axis=-1).astype(np.uint32)


WORDS = Words()


@pytest.fixture(autouse=True)
def _many_words_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, choice, position, stream in ((0, 0, 1, 0), (999, 0, 5, 3), (1000, 0, 2, 1), (123_456, 0, 77, 4)):
        assert np.array_equal(WORDS(seed, choice, position, stream, 4), random_words(seed, choice, position, stream, 4))
    monkeypatch.setattr(rule, "random_words", WORDS)
    monkeypatch.setattr(sampling, "random_words", WORDS)


def sampled(answer: Answer, depth: int, branch: int, q: np.ndarray, stream: int) -> int:
    """A draft drawn with noise of a stream, another word for each branch."""
    position = answer.length + depth + 1000 * branch
    noise = gumbel(WORDS(answer.seed, answer.choice, position, stream, VOCABULARY))
    with np.errstate(divide="ignore"):
        return int((np.log(q) + noise).argmax())


def likeliest(answer: Answer) -> Draft:
    tokens = []
    for _ in range(DRAFTED):
        tokens.append(int(DRAFTER[tokens[-1] if tokens else answer.tokens[-1]].argmax()))
    return Draft.chain(tokens, [0] * DRAFTED, "test")


def coupled(answer: Answer) -> Draft:
    """Drawn with the answer's own noise."""
    tokens: list[int] = []
    for depth in range(DRAFTED):
        q = drafted_law(tokens[-1] if tokens else answer.tokens[-1], answer.params)
        tokens.append(sampled(answer, depth, 0, q, STREAM_TARGET))
    return Draft.chain(tokens, [0] * DRAFTED, "test")


def chain(answer: Answer, dense: bool, stream: int = STREAM_DRAFT) -> Draft:
    tokens: list[int] = []
    proposals = []
    for depth in range(DRAFTED):
        q = drafted_law(tokens[-1] if tokens else answer.tokens[-1], answer.params)
        places = None
        if not dense:  # the two likeliest only
            places = np.sort(np.argsort(-q)[:2]).astype(np.int32)
            only = np.zeros(VOCABULARY)
            only[places] = q[places]
            q = only / only.sum()
        tokens.append(sampled(answer, depth, 0, q, stream))
        proposals.append(Proposal((q if places is None else q[places]).astype(np.float32), places))
    return Draft.chain(tokens, [0] * DRAFTED, "test", tuple(proposals))


def tree(answer: Answer, drawn: bool) -> Draft:
    """Two candidates at each of two places: the likeliest two, or drawn without putting back."""
    tokens: list[int] = []
    parents: list[int] = []
    proposals: list[Proposal] = []

    def children(parent: int, last: int, depth: int) -> None:
        q = drafted_law(last, answer.params)
        for _ in range(2):
            token = sampled(answer, depth, 2 * len(tokens) + 1, q, STREAM_DRAFT) if drawn else int(q.argmax())
            tokens.append(token)
            parents.append(parent)
            proposals.append(Proposal(q.astype(np.float32)))
            q = np.where(np.arange(VOCABULARY) == token, 0.0, q)
            q /= q.sum()

    children(-1, answer.tokens[-1], 0)
    children(0, tokens[0], 1)
    children(1, tokens[1], 1)
    return Draft(tuple(tokens), tuple(parents), (0,) * len(tokens), "test", tuple(proposals) if drawn else None)


PROPOSALS: dict[str, Propose] = {
    "one-hot chain": likeliest,
    "sparse chain": lambda answer: chain(answer, dense=False),
    "dense chain": lambda answer: chain(answer, dense=True),
    "one-hot tree": lambda answer: tree(answer, drawn=False),
    "drawn tree": lambda answer: tree(answer, drawn=True),
}


def run(params: SamplingParams, propose: Propose, verification: Verification, trials: int) -> tuple[float, float]:
    """(p-value of χ² against the target's law, mean tokens of a verification)."""
    counts: Counter[tuple[int, ...]] = Counter()
    rounds = emitted = 0
    for seed in range(trials):
        answer = answer_of(params, seed)
        while answer.generated < LENGTH:
            draft = propose(answer)
            before = [answer.tokens[-1], *draft.tokens]
            logits = np.stack([TARGET[token] for token in before])
            drawn = []
            if isinstance(verification, ExactVerification):
                drawn = draw(logits, DrawColumns.of(answer.draws(draft))).token.tolist()
            verdict = verification.verify(answer, draft, drawn, logits)
            assert len(verdict.tokens) == len(verdict.held) + 1
            for token in verdict.tokens:
                answer.append(token)
            rounds += 1
            emitted += len(verdict.tokens)
        counts[tuple(answer.tokens[1 : 1 + LENGTH])] += 1
    expected = joint(params)
    assert counts.keys() <= expected.keys(), "a token came out that the settings forbid"
    rare = [said for said, chance in expected.items() if chance * trials < 5]
    cells = [said for said in expected if said not in rare]
    observed = [counts[said] for said in cells] + ([sum(counts[said] for said in rare)] if rare else [])
    wanted = [expected[said] * trials for said in cells] + (
        [sum(expected[said] for said in rare) * trials] if rare else []
    )
    return float(chisquare(observed, wanted).pvalue), emitted / rounds


class Sure(Drafter):
    """Draws chains from DRAFTER and says how sure it is of each token, as neural drafters do."""

    name, neural, classes, most = "sure", True, len(PRIORS), DRAFTED

    def prior(self, draft_class: int) -> float:
        return PRIORS[draft_class]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        chains = Chains(asks, self.name)
        for index, ask in enumerate(asks):
            whole = chain(ask.answer, dense=True)
            assert whole.proposals is not None
            for token, proposal in zip(whole.tokens, whole.proposals, strict=True):
                chance = proposal.dense(VOCABULARY)[token]
                if not chains.add(index, token, class_of(float(chance)), proposal):
                    break
        return chains.drafts()


def controlled(price: float) -> Propose:
    """What the controller makes of such a drafter's chains where a row costs so many tokens."""
    controller = Controller([Sure()])

    def propose(answer: Answer) -> Draft:
        controller.offers([answer], FREE)
        most = min(DRAFTED, answer.limit - len(answer.tokens) - 1)
        drafts = controller.draft(Plan([SpanPlan(answer, 1, most)], [], [], [], [], price, price))
        controller.free(answer, learn=False)
        return drafts.get(id(answer), Draft.chain([], [], "sure"))

    return propose


@pytest.mark.parametrize("price", [0.1, 0.3, 0.5])
def test_what_is_not_worth_verifying_bends_no_law(price: float) -> None:
    """Whether a drawn token is verified must not depend on which token was drawn."""
    assert run(SETTINGS["plain"], controlled(price), RejectionVerification(), 2_500)[0] > LEAST


CASES = list(itertools.product(SETTINGS, PROPOSALS))


@pytest.mark.parametrize(("setting", "proposal"), CASES)
@pytest.mark.features("rejection", "sampling")
def test_rejection_keeps_the_law(setting: str, proposal: str) -> None:
    p_value, tau = run(SETTINGS[setting], PROPOSALS[proposal], RejectionVerification(), TRIALS)
    assert p_value > LEAST
    assert tau > 1.2


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("setting", "proposal"), CASES)
def test_rejection_keeps_the_law_long(setting: str, proposal: str) -> None:
    assert run(SETTINGS[setting], PROPOSALS[proposal], RejectionVerification(), LONG_TRIALS)[0] > LEAST


EXACT: dict[str, Propose] = {"likeliest": likeliest, "coupled": coupled, "tree": PROPOSALS["one-hot tree"]}


@pytest.mark.parametrize(("setting", "proposal"), list(itertools.product(SETTINGS, EXACT)))
def test_exact_keeps_the_law_even_with_shared_noise(setting: str, proposal: str) -> None:
    """What comes out is what the target draws itself, whatever the drafts were drawn with."""
    assert run(SETTINGS[setting], EXACT[proposal], ExactVerification(), TRIALS)[0] > LEAST


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("setting", "proposal"), list(itertools.product(SETTINGS, EXACT)))
def test_exact_keeps_the_law_long(setting: str, proposal: str) -> None:
    assert run(SETTINGS[setting], EXACT[proposal], ExactVerification(), LONG_TRIALS)[0] > LEAST


def test_coupled_drafts_are_accepted_more_often() -> None:
    params = SETTINGS["plain"]
    assert run(params, coupled, ExactVerification(), 500)[1] > 1.1 * run(params, likeliest, ExactVerification(), 500)[1]


def test_a_shared_noise_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above must fail where drafts and whether they are kept, or that and what replaces them, share noise."""
    params, trials = SETTINGS["plain"], 2_500

    def shared(answer: Answer) -> Draft:
        return chain(answer, dense=True, stream=STREAM_ACCEPT)

    assert run(params, PROPOSALS["dense chain"], RejectionVerification(), trials)[0] > LEAST
    assert run(params, shared, RejectionVerification(), trials)[0] < LEAST
    monkeypatch.setattr(rule, "STREAM_RESIDUAL", STREAM_ACCEPT)
    assert run(params, PROPOSALS["dense chain"], RejectionVerification(), trials)[0] < LEAST


def test_a_wrong_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing from p itself where p - q is due bends the law."""
    right = rule._against

    def wrong(p: np.ndarray, token: int, proposal: Proposal | None) -> tuple[float, np.ndarray]:
        return right(p, token, proposal)[0], p

    monkeypatch.setattr(rule, "_against", wrong)
    assert run(SETTINGS["plain"], PROPOSALS["dense chain"], RejectionVerification(), 2_500)[0] < LEAST


def test_rejection_at_temperature_zero_is_exact() -> None:
    params = SamplingParams(temperature=0.0)
    for propose in PROPOSALS.values():
        answer = answer_of(params, 1)
        draft = propose(answer_of(SETTINGS["plain"], 1))
        logits = np.stack([TARGET[token] for token in [0, *draft.tokens]])
        drawn = draw(logits, DrawColumns.of(answer.draws(draft))).token.tolist()
        exact = ExactVerification().verify(answer, draft, drawn, None)
        assert RejectionVerification().verify(answer, draft, drawn, logits) == exact


def test_forced_acceptance_walks_a_tree() -> None:
    """What holds is a path from the root, the first branch at every fork; with no chance at all nothing does."""
    tree = Draft((5, 6, 7, 8, 9), (ROOT, ROOT, 0, 1, 2), (0,) * 5, "x")
    drawn = [10, 11, 12, 13, 14, 15]
    answer: Any = None
    assert ForcedVerification(1.0).verify(answer, tree, drawn, None) == ([0, 2, 4], [5, 7, 9, 15])
    assert ForcedVerification(0.0).verify(answer, tree, drawn, None) == ([], [10])
    seen = {tuple(ForcedVerification(0.5, seed).verify(answer, tree, drawn, None).held) for seed in range(40)}
    assert seen == {(), (0,), (0, 2), (0, 2, 4)}
