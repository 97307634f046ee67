"""An answer that ends inside a chain or tree, at every place and in every way: what comes out is plain decoding's.

Drafts go on past the end, and the end falls on every depth: text, ids, log-probabilities and reason must not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, Model, load_model
from slipstream.program import Draft
from slipstream.program.draft import ROOT
from slipstream.program.sampling import SamplingParams
from slipstream.speculation import Ask, Drafter
from slipstream.text.grammars import of_choice, of_regex
from tests.engine.test_jitter import Said
from tests.speculation.families import OPTIONS, SLOW, family_of
from tests.speculation.lucky import lucky
from tests.speculation.test_identity import answers
from tests.speculation.test_state import Eager

PROMPT, LENGTH, DEEPEST = [10, 20, 30], 20, 8
BASE = SamplingParams(seed=8, temperature=1.0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
LONGER = replace(BASE, max_tokens=3 * LENGTH)
"""With room for a whole draft past the end."""
Case = tuple[SamplingParams, frozenset[int] | None]
"""Settings, and the tokens that end answers if they are not the model's own."""
DrafterOf = Callable[[Sequence[int]], Drafter]
"""A drafter that knows what comes, and what would come if the answer did not end."""


class Shaped(Drafter):
    """Knows what comes, and hides it in a tree: at every depth the right token has a wrong one before it and after it,
    each with a child of its own that would be right if it were.
    """

    name, most, classes, neural = "shaped", 64, 64, True

    def __init__(self, truth: Sequence[int], depth: int, *, tree: bool):
        self.truth, self.depth, self.tree, self.ranked = truth, depth, tree, tree

    def prior(self, draft_class: int) -> float:
        return 0.999

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        truth = self.truth[ask.answer.generated :][: self.depth]
        tokens: list[int] = []
        parents: list[int] = []
        at = ROOT
        for place, token in enumerate(truth):
            level = [token ^ 1, token, token ^ 2] if self.tree else [token]
            first = len(tokens)
            if first + len(level) > ask.most:
                break
            tokens += level
            parents += [at] * len(level)
            at = first + level.index(token)
            if self.tree and place + 1 < len(truth) and len(tokens) + 2 <= ask.most:
                tokens += [truth[place + 1]] * 2
                parents += [first, first + 2]
        if not tokens:
            return None
        return Draft(tuple(tokens), tuple(parents), tuple(range(len(tokens))), self.name)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), OPTIONS)


def whole(model: Model) -> Said:
    return answers(Engine(model), [(PROMPT, LONGER)])[0][0]


def ends(said: Said) -> Iterator[Case]:
    """An end at every token, of every kind."""
    for place, token in enumerate(said.tokens[:LENGTH]):
        yield replace(BASE, max_tokens=place + 1), None
        for least in {0, *(min(place + more, LENGTH) for more in (0, 1, 3))}:
            yield replace(LONGER, stop_token_ids=(token,), min_tokens=least), None
            yield replace(LONGER, ignore_eos=False, min_tokens=least), frozenset({token})
    for piece in sorted({said.text[i : i + length] for i in range(LENGTH) for length in (1, 2, 3)}):
        yield replace(LONGER, stop=(piece,)), None
        yield replace(LONGER, stop=(piece,), min_tokens=LENGTH // 2), None


def grammars() -> Iterator[Case]:
    for grammar in (of_choice(["yes", "no", "perhaps"]), of_regex("[ab]{3,9}(-[0-9]{2}){1,3}")):
        for ignore_eos in (False, True):
            yield replace(LONGER, grammar=grammar, ignore_eos=ignore_eos), None


def depths(model: Model, cases: Iterable[Case], drafter_of: DrafterOf) -> set[int]:
    """Check all cases; returns at which depths of a draft the answers ended."""
    seen: set[int] = set()
    rest = whole(model).tokens
    for params, eos in cases:
        ended = model if eos is None else replace(model, eos=eos)
        plain = answers(Engine(ended), [(PROMPT, params)])
        said = plain[0][0]
        drafter = drafter_of([*said.tokens, *rest[len(said.tokens) :], *[97] * DEEPEST])
        began = noted(drafter)
        engine = Engine(ended, SLOW, controller=Eager([drafter]), ahead=False)
        assert answers(engine, [(PROMPT, params)]) == plain, (params, eos)
        assert engine.timings[0].generated == len(said.tokens)
        engine.check()
        if began:
            seen.add(len(said.tokens) - began[-1])
    return seen


def noted(drafter: Drafter) -> list[int]:
    """How long the answer was each time that it was drafted for."""
    propose, began = drafter.propose, list[int]()

    def propose_and_note(asks: Sequence[Ask]) -> list[Draft | None]:
        began.extend(ask.answer.generated for ask in asks)
        return propose(asks)

    drafter.propose = propose_and_note  # type: ignore[method-assign]
    return began


def shaped(depth: int, *, tree: bool) -> DrafterOf:
    return lambda truth: Shaped(truth, depth, tree=tree)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.features("stop", "text drafts", "logprobs", "sampling")
@pytest.mark.features("grammar", "text drafts", "logprobs", "sampling")
def test_every_end_at_every_place_of_a_draft(model: Model, tree: bool) -> None:
    cases = [*ends(whole(model)), *grammars()]
    assert depths(model, cases, shaped(4, tree=tree)) >= set(range(1, 6)), "and at the token after it"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tree", [False, True])
def test_every_end_at_every_place_of_every_draft(model: Model, tree: bool) -> None:
    cases = [*ends(whole(model)), *grammars()]
    for depth in range(1, DEEPEST + 1):
        assert depths(model, cases, shaped(depth, tree=tree)) >= set(range(1, depth + 2))


NEURAL = [("draft", 4), ("eagle3", 4), ("eagle3-tree", 7), ("dspark", 4)]


def neural(family: str, most: int, target: Path, folder: Path, *, every: int) -> None:
    """Drafters with passes and state, always right along one branch; one end in so many."""
    model, drafter = family_of(family, target, folder, most)
    propose = drafter.propose

    def drafter_of(truth: Sequence[int]) -> Drafter:
        drafter.propose = propose  # type: ignore[method-assign]
        lucky(drafter, {(tuple(PROMPT), 0): truth}, 1.0)
        return drafter

    cases = [*ends(whole(model)), *grammars()][::every]
    seen = depths(model, cases, drafter_of)
    assert seen >= set(range(1, 1 + (most if family != "eagle3-tree" else 3)))


@pytest.mark.parametrize(("family", "most"), NEURAL)
@pytest.mark.features("stop", "neural drafts", "logprobs", "sampling")
@pytest.mark.features("grammar", "neural drafts", "logprobs", "sampling")
def test_ends_with_passes_and_state(family: str, most: int, tiny_gguf: Path, tmp_path: Path) -> None:
    neural(family, most, tiny_gguf, tmp_path, every=5)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "most"), NEURAL)
def test_every_end_with_passes_and_state(family: str, most: int, tiny_gguf: Path, tmp_path: Path) -> None:
    neural(family, most, tiny_gguf, tmp_path, every=1)
