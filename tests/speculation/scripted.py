"""Drafters for tests: they know the answers, and are right as often as they are told to be; and a cost that favours
drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from slipstream.program import Draft
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Drafter

FREE = CostModel(
    Curve((1, 512), (1e-3, 1.0001e-3)), Curve((1, 512), (1e-4, 1.0001e-4)), (0.0, 0.0, 0.0, 0.0), drafted=0.0
)
"""Rows cost next to nothing, so that the planner takes all drafts there are."""


class Scripted(Drafter):
    """Proposes what comes next in `answers` (prompt → tokens of choice 0, 1, …), each token wrong with a chance.

    With `branches` a draft is a tree: every place has so many tokens, in any order, the continuation under the true
    one.
    """

    name = "scripted"

    def __init__(self, vocabulary: int, wrong: float, most: int, branches: int = 1, seed: int = 0):
        self.vocabulary, self.wrong, self.most, self.branches = vocabulary, wrong, most, branches
        self.answers: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self.random = random.Random(seed)

    def prior(self, draft_class: int) -> float:
        return 0.99

    def truth(self, answer: Answer) -> list[int]:
        known = self.answers.get(tuple(answer.tokens[: answer.prompt_length]), {})
        return known.get(answer.choice, [])[answer.generated :]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        truth = self.truth(ask.answer)[: self.random.randint(0, ask.most)]
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in truth:
            if len(tokens) + self.branches > ask.most:
                break
            right = token if self.random.random() >= self.wrong else (token + 1) % self.vocabulary
            here = [right, *((right + 7 + i) % self.vocabulary for i in range(self.branches - 1))]
            self.random.shuffle(here)
            tokens += here
            parents += [at] * len(here)
            at = len(tokens) - len(here) + here.index(right)
        if not tokens:
            return None
        return Draft(tuple(tokens), tuple(parents), (0,) * len(tokens), self.name)


class Adversarial(Drafter):
    """Always wrong: it says what the answer does not say next."""

    name = "adversarial"

    def __init__(self, script: Scripted):
        self.script, self.most = script, script.most

    def prior(self, draft_class: int) -> float:
        return 0.99

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for ask in asks:
            wrong = [(token + 1) % self.script.vocabulary for token in self.script.truth(ask.answer)[: ask.most]]
            drafts.append(Draft.chain(wrong, [0] * len(wrong), self.name) if wrong else None)
        return drafts
