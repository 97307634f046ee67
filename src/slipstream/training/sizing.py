"""Sizing: of the shapes that a drafter may have, the one that should bring most here, before anything is trained.

S = tau / (v + d + o), all but tau in seconds of this machine over those of a step of one row. What tau a shape will
reach nobody knows beforehand; a prior stands for it, fitted to the trainings in docs/training.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.roofline.speculation import tau_of

BYTES_A_WEIGHT = 0.5625
"""int4 with a scale for every 32 weights: how drafters are run."""
PASS_OVER_BYTES = 0.7
"""Seconds that a byte of a drafter takes beside one of its target: 0.5 to 0.9, as measured; it stays in the cache."""
FEATURES, LEARNING = 1.5, 54.0
"""Seconds that a token takes in training, over those of its row in a step of the target's: for its features, and, times
the drafter's share of the target's bytes, for learning from it twice. Fitted to two trainings of about 20 minutes.
"""
NO_WORSE = 0.98
"""Share of the best S that counts as as good: no prior tells sizes apart more finely than S is foreseen. The largest of
them is taken, as it gains most from traffic to come.
"""
FEW_TOKENS = 34_000
"""Tokens of answers of the smallest training that priors are fitted to."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is chosen of a drafter: layers, width of their MLPs, tokens of its head."""

    layers: int
    ffn: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape with the weights that a pass reads, its layers' in layers of the target, and what its head covers of what
    is said.
    """

    shape: Shape
    parameters: int
    body: float
    covers: float

    @property
    def bytes(self) -> float:
        """When it drafts."""
        return BYTES_A_WEIGHT * self.parameters


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on this machine: the target's step by rows, what the host adds to a draft; and the bytes of a step."""

    step: Callable[[int], float]
    host: float
    target_bytes: int
    block: int = 0
    """Rows of the one pass that makes a whole draft; 0: each token takes a pass of one row."""
    pass_over_bytes: float = PASS_OVER_BYTES

    def drafting(self, size: float, drafts: int) -> float:
        """Seconds of making so many drafts with a drafter of `size` bytes."""
        passes = self.step(self.block) if self.block else drafts * self.step(1)
        return self.pass_over_bytes * size / self.target_bytes * passes

    def speedup(self, tau: float, size: float, drafts: int) -> float:
        """S."""
        return tau * self.step(1) / (self.step(drafts + 1) + self.drafting(size, drafts) + self.host)

    def best_speedup(self, acceptance: Sequence[float], size: float) -> float:
        """S at the best draft length, given acceptance by position; 1 where no draft pays."""
        best, tau, alive = 1.0, 1.0, 1.0
        for drafts, chance in enumerate(acceptance, 1):
            alive *= chance
            tau += alive
            best = max(best, self.speedup(tau, size, drafts))
        return best


@dataclass(frozen=True, slots=True)
class Lesson:
    """What can be learned from: so many tokens of answers, `each` of which costs so many seconds of the target's steps;
    and the seconds that there are, if they are bounded.
    """

    tokens: float
    seconds: float | None = None
    each: float = 0.0

    def seen(self, share: float) -> float:
        """Tokens that a drafter with this share of its target's bytes comes to see."""
        if self.seconds is None:
            return self.tokens
        return min(self.tokens, self.seconds / (self.each * (FEATURES + LEARNING * share)))


@dataclass(frozen=True, slots=True)
class Prior:
    """How often a draft token fails: what a layer of the target's size cannot learn, and what it has not yet learned.

    Two falling powers, as losses of models fall with weights and tokens.
    """

    limit: float = 0.13
    """Of one layer and endless tokens: published EAGLE-3 drafters reach tau 5.1 on GSM8K with seven drafts."""
    size: float = 0.15
    """Exponent by which that falls with the layers' weights: published drafters of five layers fail a little less."""
    unlearned: float = 0.47
    """Beyond that, after `FEW_TOKENS`."""
    tokens: float = 0.31
    """Exponent by which this falls with the tokens seen."""
    deeper: float = 0.06
    """Exponent by which it rises with layers: they begin with nothing, and must learn it from the same tokens."""
    outside: float = 0.5
    """Share of the tokens outside the head that would have been drafted right: rare ones are hard to foresee."""

    def acceptance(self, candidate: Candidate, tokens: float) -> float:
        """Chance that a draft token holds if all before it did."""
        cannot = self.limit * candidate.body**-self.size
        not_yet = self.unlearned * candidate.shape.layers**self.deeper * (FEW_TOKENS / max(tokens, 1.0)) ** self.tokens
        known = 1.0 - self.outside * (1.0 - candidate.covers)
        return known * max(0.02, 1.0 - cannot - not_yet)


PRIORS = {"eagle3": Prior(), "dspark": Prior(unlearned=0.60)}
"""EAGLE-3: 0.60 fail after 34 k tokens, 0.56 after 46 k, 0.42 after 181 k, 0.33 after 640 k. DSpark, whose drafts do
not see one another: 0.73 after 34 k, 0.61 after 80 k.
"""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A candidate with what is expected of it."""

    candidate: Candidate
    share: float
    """Of the target's bytes."""
    tokens: float
    tau: float
    draft_cost: float
    """Seconds of making a draft over those of a step of one row."""
    speedup: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and all that was looked at, the best first, for drafts of one length."""

    chosen: Foreseen
    ranked: tuple[Foreseen, ...]
    drafts: int

    def table(self, most: int = 6) -> list[dict[str, Any]]:
        """The best, and the chosen one in any case, the best first, for people and for the card."""
        shown = list(self.ranked[:most])
        if not any(one is self.chosen for one in shown):
            shown[-1] = self.chosen
        return [
            {
                "chosen": one is self.chosen, "layers": one.candidate.shape.layers, "ffn": one.candidate.shape.ffn,
                "vocabulary": one.candidate.shape.vocabulary, "parameters": one.candidate.parameters,
                "share_of_the_targets_bytes": one.share, "draft_len": self.drafts, "draft_cost": one.draft_cost,
                "tokens_seen": one.tokens, "tau": one.tau, "speedup": one.speedup,
            }
            for one in shown
        ]  # fmt: skip


def choose(candidates: Sequence[Candidate], costs: Costs, prior: Prior, lesson: Lesson, most: int) -> Choice:
    """The largest of those whose S, with drafts of one length up to `most`, is no worse than the best.

    That length is the one that would be best if drafts took no time. With one that depended on what they take, dearer
    passes could be a reason for fewer of them by a larger drafter.
    """
    shares = [one.bytes / costs.target_bytes for one in candidates]
    seen = [lesson.seen(share) for share in shares]
    accepted = [prior.acceptance(one, tokens) for one, tokens in zip(candidates, seen, strict=True)]
    best = max(accepted)
    drafts = max(range(1, most + 1), key=lambda count: tau_of(best, count) / costs.step(count + 1))
    found = []
    for one, share, tokens, acceptance in zip(candidates, shares, seen, accepted, strict=True):
        tau, cost = tau_of(acceptance, drafts), costs.drafting(one.bytes, drafts) / costs.step(1)
        found.append(Foreseen(one, share, tokens, tau, cost, costs.speedup(tau, one.bytes, drafts)))
    ranked = tuple(sorted(found, key=lambda one: (-one.speedup, one.candidate.parameters)))
    as_good = [one for one in ranked if one.speedup >= NO_WORSE * ranked[0].speedup]
    return Choice(max(as_good, key=lambda one: one.candidate.parameters), ranked, drafts)
