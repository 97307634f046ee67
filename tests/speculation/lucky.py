"""Luck for neural drafters: random weights are hardly ever right, so some of their tokens are made what comes next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from slipstream.program import Draft
from slipstream.program.draft import ROOT
from slipstream.speculation import Ask, Drafter

Known = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""What answers will be, by prompt and choice."""


def rightly(draft: Draft, truth: Sequence[int], rng: random.Random, chance: float) -> Draft:
    """The draft with the right tokens along one of its branches, each with a chance, until one is wrong."""
    tokens, at = list(draft.tokens), ROOT
    for right in truth:
        children = [index for index, parent in enumerate(draft.parents) if parent == at]
        if not children:
            break
        at = next((index for index in children if tokens[index] == right), rng.choice(children))
        tokens[at] = right
        if rng.random() >= chance:
            tokens[at] = right ^ 1
            break
    return Draft(tuple(tokens), draft.parents, draft.classes, draft.drafter)


def lucky(drafter: Drafter, known: Known, chance: float = 0.85, seed: int = 0) -> list[int]:
    """Let a drafter be right with a chance, whatever it costs and promises; returns how long its drafts are, as made.

    It runs all its passes, and its state is what it would be.
    """
    rng, propose, lengths = random.Random(seed), drafter.propose, list[int]()

    def better(asks: Sequence[Ask]) -> list[Draft | None]:
        drafts = propose([ask._replace(price=0.0, chance=lambda draft_class: 1.0) for ask in asks])
        for place, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
            answer = ask.answer
            truth = known.get((tuple(answer.tokens[: answer.prompt_length]), answer.choice), ())
            if draft is not None:
                lengths.append(len(draft))
                drafts[place] = rightly(draft, truth[answer.generated :], rng, chance)
        return drafts

    drafter.propose = better  # type: ignore[method-assign]
    drafter.prior = lambda draft_class: 0.95  # type: ignore[method-assign]
    return lengths
