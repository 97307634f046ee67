"""Replay: what a drafter reaches on answers that are known, verification by verification, as if they were being made.

A draft is accepted as far as it agrees with what was said, and what comes after is the next token that was said: for
answers at temperature 0, and for sampled ones whose drafts do not depend on the noise, that is what serving comes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.program import BLOCK_SLOTS, Draft, KVFormat, Namespace
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Computed, Counts, Drafter
from slipstream.training.dataset import Example
from slipstream.training.features import FeatureSource

LANES = 16
"""Answers that are replayed at once: a neural drafter drafts for all of them in one pass."""
_NAMESPACE = Namespace("recorded", "none", KVFormat.F32)


@dataclass
class Replayed:
    """What became of one answer: steps (verifications and, where there was no draft, plain ones) and its counts."""

    tag: str
    tokens: int = 0
    steps: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass
class _Lane:
    """An answer under way: how far it is known, and of what there is to know."""

    example: Example
    answer: Answer
    stop: int
    taps: npt.NDArray[np.float32] | None
    replayed: Replayed

    @property
    def left(self) -> int:
        """Tokens that can be drafted: the one after them is not."""
        return self.stop - len(self.answer.tokens) - 1

    def accept(self, draft: Draft | None) -> Computed:
        """Judge a draft, if there is one, and go on to the token after what holds of it."""
        tokens, answer = self.example.tokens, self.answer
        start, accepted = len(answer.tokens), 0
        if draft is not None:
            places = [start, *(start + depth + 1 for depth in draft.depths)]
            said = [tokens[place] if place < self.stop else -1 for place in places]
            accepted, depth = len(draft.accepted(said)), max(draft.depths) + 1
            self.replayed.counts.add(len(draft), accepted, min(accepted + 1, depth))
        answer.tokens += tokens[start : start + accepted + 1]
        answer.computed = len(answer.tokens) - 1
        self.replayed.steps += 1
        self.replayed.tokens += accepted + 1
        rows = slice(start - 1, start + accepted)
        return Computed(answer, start - 1, accepted + 1, None if self.taps is None else self.taps[rows])


def replay(
    drafter: Drafter,
    examples: Iterable[Example],
    draft_len: int,
    source: FeatureSource | None = None,
    worth: float = 0.0,
) -> list[Replayed]:
    """Draft `draft_len` tokens, at most, at every step of every answer; of a conversation its last one.

    `source` computes what a drafter reads of the target. A draft from text is taken as far as it is at least `worth`
    likely to survive by what its drafter expects. Drafters that learn do so in the order of the examples.
    """
    done: list[Replayed] = []
    waiting: list[Example] = []
    lanes = LANES if drafter.neural else 1
    for example in examples:
        waiting.append(example)
        if len(waiting) == lanes:
            done += _together(drafter, waiting, draft_len, source, worth)
            waiting = []
    return done + _together(drafter, waiting, draft_len, source, worth)


def _together(
    drafter: Drafter, examples: Sequence[Example], draft_len: int, source: FeatureSource | None, worth: float
) -> list[Replayed]:
    taps = source.compute([example.tokens for example in examples]) if source is not None and examples else None
    lanes, block = [], 0
    for number, example in enumerate(examples):
        mine = None if taps is None else taps[number]
        answer = begin(example, number, block, mine, drafter, draft_len)
        block += len(answer.blocks)
        lanes.append(_Lane(example, answer, example.spans[-1][1], mine, Replayed(example.tag)))
    going = [lane for lane in lanes if len(lane.answer.tokens) < lane.stop]
    while going:
        drafts = _drafts(drafter, going, draft_len, worth)
        drafter.commit([lane.accept(draft) for lane, draft in zip(going, drafts, strict=True)])
        going = [lane for lane in going if len(lane.answer.tokens) < lane.stop]
    for lane in lanes:
        drafter.free(lane.answer)
    return [lane.replayed for lane in lanes]


def begin(
    example: Example,
    number: int,
    block: int,
    taps: npt.NDArray[np.float32] | None,
    drafter: Drafter,
    draft_len: int,
) -> Answer:
    """The last answer of an example when its first token is known, in blocks from `block` on.

    As in serving, the drafter hears of the prompt before that token is known.
    """
    start = example.spans[-1][0]
    needs = -(-(len(example.tokens) + drafter.scratch(draft_len) + 1) // BLOCK_SLOTS)
    answer = Answer(
        number, 0, list(example.tokens[:start]), start, SamplingParams(temperature=0.0), 0, frozenset(),
        len(example.tokens), _NAMESPACE, list(range(block, block + needs)), start, tenant=example.key, tag=example.tag,
    )  # fmt: skip
    drafter.commit([Computed(answer, 0, start, None if taps is None else taps[:start])])
    answer.tokens.append(example.tokens[start])
    return answer


def _drafts(drafter: Drafter, going: Sequence[_Lane], draft_len: int, worth: float) -> list[Draft | None]:
    drafts: list[Draft | None] = [None] * len(going)
    wanted = [
        (place, Ask(lane.answer, min(draft_len, lane.left, drafter.most), 0.0, lambda draft_class: 1.0))
        for place, lane in enumerate(going)
        if lane.left > 0 and drafter.ready(lane.answer)
    ]
    if not wanted:
        return drafts
    for (place, ask), draft in zip(wanted, drafter.propose([ask for _, ask in wanted]), strict=True):
        if draft is not None and (kept := _worth(drafter, draft, worth, ask.most)):
            drafts[place] = draft.cut(kept)
    return drafts


def _worth(drafter: Drafter, draft: Draft, worth: float, most: int) -> int:
    """How many tokens of a draft are taken: a tree's depth is within `most` as it is, a chain may be longer."""
    if not draft.is_chain:
        return len(draft)
    alive, kept = 1.0, 0
    for draft_class in draft.classes[:most]:
        alive *= drafter.prior(draft_class)
        if alive < worth:
            break
        kept += 1
    return kept


def tau(replayed: Iterable[Replayed]) -> float:
    """Tokens of a step, the bonus token included, and steps without a draft too."""
    steps = tokens = 0
    for one in replayed:
        steps, tokens = steps + one.steps, tokens + one.tokens
    return tokens / steps if steps else 1.0


def interval(replayed: Sequence[Replayed], samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95 % of tau's bootstrap over answers (Efron 1979): answers are independent of one another, their tokens not."""
    if not replayed:
        return 1.0, 1.0
    rng = np.random.default_rng(seed)
    tokens = np.array([one.tokens for one in replayed], np.float64)
    steps = np.array([one.steps for one in replayed], np.float64)
    chosen = rng.integers(0, len(replayed), (samples, len(replayed)))
    taus = tokens[chosen].sum(1) / np.maximum(steps[chosen].sum(1), 1.0)
    low, high = np.quantile(taus, (0.025, 0.975))
    return float(low), float(high)
