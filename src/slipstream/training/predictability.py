"""Predictability: what drafting would reach on recorded traffic: from text, without running any model; by a drafter.

An answer that is known can be replayed: a draft is accepted as far as it agrees with what was said. Answers are taken
in order of time, so that suffix drafting knows what it would have known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from slipstream.engine import LoadOptions, load_model
from slipstream.engine.drafters import Folder, load_tapped_drafter
from slipstream.errors import UsageError
from slipstream.models import read_config
from slipstream.models.weights import ModelWeights
from slipstream.speculation import Counts, Drafter, SuffixDrafter
from slipstream.speculation.card import fingerprint_of
from slipstream.training.dataset import Example, examples_of, told
from slipstream.training.features import FeatureSource
from slipstream.training.records import Record, target_of
from slipstream.training.replay import LANES, replay
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

MOST_DRAFT = 8
WORTH = 0.3
"""A draft is taken as far as it is at least so likely to survive, by what is known of its drafter beforehand."""
GRAM = 4
DRAFTED, LONGEST = 5, 4096
"""Tokens of a neural draft, and of the longest answer that it is replayed on, its prompt included."""

Item = TypeVar("Item")


def counted(items: Iterable[Item], total: int, progress: Callable[[int, int], None]) -> Iterator[Item]:
    """The items, telling of each that it was taken."""
    for number, item in enumerate(items, 1):
        yield item
        progress(number, total)


@dataclass
class Predictability:
    """Of one tag's answers: how often text repeats itself, and what drafts from text come to."""

    records: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    grams: int = 0
    repeated: int = 0
    """Runs of GRAM tokens of the answers, and those that were there before in the same prompt and answer."""
    drafts: dict[str, Counts] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """Verifications and plain steps, by drafter."""
    replayed: dict[str, int] = field(default_factory=dict)
    """Tokens that these brought: those of each record's last answer but the first, which comes with the prompt."""

    @property
    def repetition(self) -> float:
        """Share of runs of tokens that were there before."""
        return self.repeated / self.grams if self.grams else 0.0

    def tokens_a_step(self, drafter: str) -> float:
        """Tokens over steps, those without a draft included."""
        steps = self.steps.get(drafter, 0)
        return self.replayed[drafter] / steps if steps else 1.0


def predictability(records: Iterable[Record]) -> dict[str, Predictability]:
    """By tag. Records are taken in the order given."""
    drafters: tuple[Drafter, ...] = (SuffixDrafter(learn=False), SuffixDrafter())
    found: dict[str, Predictability] = {}
    for record in records:
        mine = found.setdefault(record.tag, Predictability())
        mine.records += 1
        mine.tokens += record.answered
        mine.prompt_tokens += len(record.tokens) - record.answered
        _repetition(record, mine)
        for drafter in drafters:
            counts = mine.drafts.setdefault(drafter.name, Counts())
            (replayed,) = replay(
                drafter, [Example(record.tokens, record.spans, record.tag, record.key)], MOST_DRAFT, worth=WORTH
            )
            counts.merge(replayed.counts)
            mine.steps[drafter.name] = mine.steps.get(drafter.name, 0) + replayed.steps
            mine.replayed[drafter.name] = mine.replayed.get(drafter.name, 0) + replayed.tokens
    return found


def of_drafter(
    records: Iterable[Record],
    reference: str,
    folder: Path,
    found: dict[str, Predictability],
    served: LoadOptions,
    progress: Callable[[str, int, int], None],
    draft_len: int = DRAFTED,
) -> str:
    """What a drafter in a folder would reach on the answers of its target, added to what was `found`; returns its name.

    Runs the target over the answers, as it is `served`. Raises UsageError where none is the target's.
    """
    checkpoint = open_checkpoint(resolve(reference))
    config = read_config(checkpoint)
    opened = Folder.open(resolve(str(folder)), config)
    target = target_of(fingerprint_of(config, checkpoint), served.kv_format, served.quantization)
    examples, left_out = examples_of(records, target, min(config.context, LONGEST))
    if not examples:
        raise UsageError(f"no record is an answer of {reference}; {told(left_out)}")
    longest = max(len(example.tokens) for example in examples)
    max_len = min(longest + 64, config.context)
    options = replace(served, max_len=max_len, sequences=LANES, taps=opened.config.taps)
    model = load_model(reference, options, progress)
    drafter = load_tapped_drafter(opened, model, ModelWeights(config, checkpoint))
    shown = counted(examples, len(examples), partial(progress, "replaying the drafter"))
    for replayed in replay(drafter, shown, draft_len, FeatureSource(model, opened.config.taps)):
        mine = found.setdefault(replayed.tag, Predictability())
        mine.drafts.setdefault(drafter.name, Counts()).merge(replayed.counts)
        mine.steps[drafter.name] = mine.steps.get(drafter.name, 0) + replayed.steps
        mine.replayed[drafter.name] = mine.replayed.get(drafter.name, 0) + replayed.tokens
    return drafter.name


def _repetition(record: Record, mine: Predictability) -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    answered = {place for start, stop in record.spans for place in range(start, stop)}
    for place in range(GRAM - 1, len(record.tokens)):
        gram = record.tokens[place - GRAM + 1 : place + 1]
        if place in answered:
            mine.grams += 1
            mine.repeated += gram in seen
        seen[gram] += 1
