"""Dataset: which recorded answers a drafter is trained on, which are held out, and in what order they come."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError
from slipstream.training.records import Record

LEAST_EXAMPLES = 8
FOREIGN, SERVED = "another target's", "served with "
"""Why answers are left out: another model made them; this one, served with other flags, which follow."""


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens to learn from: those in `spans` are what the target said."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    tag: str = ""
    key: str = ""
    settings: tuple[tuple[str, float], ...] = ()
    time: float = 0.0

    @property
    def answered(self) -> int:
        """Tokens that the target said."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first answer."""
        return self.tokens[: self.spans[0][0]]


@dataclass(frozen=True, slots=True)
class Split:
    """The newest answers are held out; no prompt is on both sides."""

    train: list[Example]
    held_out: list[Example]


def examples_of(records: Iterable[Record], target: str, max_len: int) -> tuple[list[Example], dict[str, int]]:
    """Examples in the order given, each text once, and why others were left out.

    Answers of another target, or of this one served otherwise, teach the wrong lesson and are left out; what is too
    long is cut. `target` is as `target_of` has it.
    """
    examples: list[Example] = []
    left_out = {FOREIGN: 0, "said before": 0, "too long": 0}
    seen: set[bytes] = set()
    for record in records:
        if record.target != target:
            why = FOREIGN
            model, _, flags = record.target.partition(" ")
            if model == target.partition(" ")[0]:
                why = SERVED + (flags or "the precision of its file")
            left_out[why] = left_out.get(why, 0) + 1
            continue
        digest = hashlib.sha256(np.asarray(record.tokens, "<u4").tobytes()).digest()
        if digest in seen:
            left_out["said before"] += 1
            continue
        seen.add(digest)
        spans = tuple((start, min(stop, max_len)) for start, stop in record.spans if start < max_len)
        if not spans:
            left_out["too long"] += 1
            continue
        settings = dict(record.settings)
        if "min_tokens" in settings:  # of an answer that is cut
            settings["min_tokens"] = min(settings["min_tokens"], spans[-1][1] - spans[-1][0])
        kept = tuple(sorted(settings.items()))
        examples.append(Example(record.tokens[:max_len], spans, record.tag, record.key, kept, record.time))
    return examples, left_out


def told(left_out: Mapping[str, int]) -> str:
    """Why there is nothing of a target, and what to do about it."""
    others = [(why.removeprefix(SERVED), count) for why, count in left_out.items() if why.startswith(SERVED)]
    if others:
        how, count = max(others, key=lambda pair: pair[1])
        return f"{count} are of this target served with {how}: say so, too, or import them with --regenerate"
    if foreign := left_out[FOREIGN]:
        return f"{foreign} are of another target: import them with --regenerate"
    return ", ".join(f"{count} {why}" for why, count in left_out.items() if count)


def split(examples: Sequence[Example], share: float) -> Split:
    """Hold out the last `share` of the examples, which are in order of time: all since some time, and none before.

    Raises UsageError if there are too few, or if nothing tells the newest.
    """
    if len(examples) < LEAST_EXAMPLES:
        raise UsageError(
            f"{len(examples)} answers of this target are too few to train on: record more, or import a log with "
            "--regenerate"
        )
    first = len(examples) - max(1, round(share * len(examples)))
    since = examples[first].time
    if since == examples[0].time:
        since = next((example.time for example in examples if example.time > since), math.inf)
    first = next((at for at, example in enumerate(examples) if example.time >= since), 0)
    if not first:
        raise UsageError("all answers have the same time, so that nothing tells which are the newest")
    prompts = {example.prompt for example in examples[first:]}
    train = [example for example in examples[:first] if example.prompt not in prompts]
    if len(train) < LEAST_EXAMPLES // 2:
        raise UsageError("the newest answers have the prompts of nearly all others: there is nothing left to train on")
    return Split(train, list(examples[first:]))


def apart_from(examples: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
    """The examples that begin with the prompt of none that is held out."""
    prompts = {example.prompt for example in held_out}
    return [example for example in examples if example.prompt not in prompts]


def vocabulary_of(
    examples: Iterable[Example], size: int, vocabulary: int, always: Iterable[int]
) -> npt.NDArray[np.int32]:
    """The `size` tokens that answers have most often, and those that are `always` there; ascending."""
    counts: Counter[int] = Counter()
    for example in examples:
        for start, stop in example.spans:
            counts.update(example.tokens[start:stop])
    chosen = {token for token in always if 0 <= token < vocabulary}
    by_frequency = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    for token in by_frequency:
        if len(chosen) >= min(size, vocabulary):
            break
        chosen.add(token)
    return np.array(sorted(chosen), np.int32)


def coverage(examples: Iterable[Example], tokens: npt.NDArray[np.int32]) -> float:
    """Share of the answers' tokens that are among `tokens`."""
    known = set(tokens.tolist())
    inside = total = 0
    for example in examples:
        for start, stop in example.spans:
            total += stop - start
            inside += sum(token in known for token in example.tokens[start:stop])
    return inside / total if total else 1.0


def data_fingerprint(examples: Iterable[Example]) -> str:
    """Names what was trained on, without saying what it was."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.asarray(example.tokens, "<u4").tobytes())
        digest.update(repr(example.spans).encode())
    return digest.hexdigest()[:16]


def in_order(own: Sequence[Example], generic: Sequence[Example], share: float, seed: int) -> Iterator[Example]:
    """Examples without end, each set through before it comes anew; `share` of them generic. The same for one seed."""
    rng = random.Random(seed)
    queues: dict[bool, list[Example]] = {True: [], False: []}
    while True:
        other = bool(generic) and rng.random() < share
        queue = queues[other]
        if not queue:
            queue += rng.sample(generic if other else own, len(generic if other else own))
        yield queue.pop()
