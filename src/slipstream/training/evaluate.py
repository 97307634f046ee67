"""Evaluation: what drafters reach on held-out answers, replayed for tau and served in turns for tokens a second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.engine import Engine, Model
from slipstream.program import Draft, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel
from slipstream.scheduling import Offer, Plan
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Controller, Counts, Drafter
from slipstream.speculation.tapped import TappedDrafter
from slipstream.training.dataset import Example
from slipstream.training.features import FeatureSource
from slipstream.training.records import sampled_with
from slipstream.training.replay import Replayed, begin, interval, replay, tau

CONTEXT = 256
"""Tokens of context at which v and d are stated."""
LEAK_EXAMPLES = 4
PRICELESS = 1e6
"""Tokens that a draft is said to bring where it is to be verified in any case."""

Progress = Callable[[str, int, int], None]


@dataclass
class Served:
    """What serving with one contender came to, answer by answer."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafts: Counts = field(default_factory=Counts)
    spent: float = 0.0
    predicted: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second after each answer's first."""
        return sum(self.tokens) / max(sum(self.seconds), 1e-9)

    def add(self, other: Served) -> None:
        """Add what others came to."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.drafts.merge(other.drafts)
        self.spent += other.spent
        self.predicted += other.predicted


class Always(Controller):
    """Has its only drafter draft so many tokens at every step, whatever that costs or brings: what replaying does."""

    def __init__(self, drafter: Drafter, draft_len: int):
        super().__init__([drafter])
        self._draft_len = draft_len

    def offers(self, eligible: Sequence[Answer], cost: CostModel) -> dict[int, Offer]:
        """Drafts for everyone, at a worth that no price comes near."""
        (drafter,) = self.drafters
        self._ready.clear()
        offers: dict[int, Offer] = {}
        for answer in eligible:
            most = min(answer.limit - len(answer.tokens) - 1, drafter.most, self._draft_len)
            if most > 0 and drafter.ready(answer):
                self._track(answer)
                offers[id(answer)] = Offer((PRICELESS,) * most, neural=True, passes=drafter.passes)
                self._ready[id(answer)] = drafter, None
        return offers

    def draft(self, plan: Plan) -> dict[int, Draft]:
        """Whole drafts, likely or not."""
        (drafter,) = self.drafters
        asks = [
            Ask(answer, count, 0.0, lambda draft_class: 1.0)
            for answer, _, count in plan.spans
            if count and id(answer) in self._ready
        ]
        found = zip(asks, drafter.propose(asks) if asks else [], strict=True)
        return {id(ask.answer): draft.cut(ask.most) for ask, draft in found if draft is not None and len(draft)}


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of drafting: its drafters (none: plain decoding), and which of them tau is about.

    With `always` the only drafter drafts so many tokens at every step, whether that pays or not.
    """

    name: str
    drafters: tuple[Drafter, ...] = ()
    always: int = 0

    def controller(self) -> Controller | None:
        """What drafts when it is this one's turn."""
        if self.always:
            return Always(self.drafters[0], self.always)
        return Controller(list(self.drafters)) if self.drafters else None

    @property
    def judged(self) -> Drafter | None:
        """The neural drafter if there is one, otherwise the only one."""
        return next((d for d in self.drafters if d.neural), self.drafters[0] if self.drafters else None)


def replayed_tau(
    contenders: Sequence[Contender],
    examples: Sequence[Example],
    earlier: Sequence[Example],
    draft_len: int,
    source: FeatureSource | None,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """By contender and tag ("" for all): tau with its interval, and acceptance by position.

    Drafters that learn from served traffic begin with the `earlier` answers, as they would have.
    """
    report: dict[str, dict[str, Any]] = {}
    judged = [contender for contender in contenders if contender.judged is not None]
    for number, contender in enumerate(judged):
        drafter = contender.judged
        assert drafter is not None
        if not drafter.neural and drafter.name == "suffix":
            replay(drafter, earlier, 1)
        found = replay(drafter, examples, draft_len, source if drafter.needs.taps else None)
        by_tag: dict[str, list[Replayed]] = {"": found}
        for one in found:
            by_tag.setdefault(one.tag, []).append(one) if one.tag else None
        report[contender.name] = {tag: _judged(those) for tag, those in by_tag.items()}
        drafter.forget()
        progress("replaying", number + 1, len(judged))
    return report


def _judged(found: Sequence[Replayed]) -> dict[str, Any]:
    low, high = interval(found)
    return {
        "tau": tau(found),
        "interval": [low, high],
        "answers": len(found),
        "steps": sum(one.steps for one in found),
        "acceptance_by_position": pooled(found).conditional(),
    }


def pooled(found: Sequence[Replayed]) -> Counts:
    """The counts of all."""
    counts = Counts()
    for one in found:
        counts.merge(one.counts)
    return counts


def served_in_turns(
    model: Model,
    cost: CostModel,
    contenders: Sequence[Contender],
    examples: Sequence[Example],
    earlier: Sequence[Example],
    progress: Progress,
) -> dict[str, Any]:
    """The examples' prompts answered with each contender in turn, so that all have the machine's good and bad moments.

    Keys: identical (whether all answers are those of plain decoding), and by contender tok_s, speedup with its
    interval, speedup_predicted, tau, acceptance_by_position, drafted, accepted; where there are several tags, the same
    in `tags` by tag.
    """
    engine = Engine(model, cost, prefix_cache=False, ahead=False)
    controllers = {contender.name: contender.controller() for contender in contenders}
    for contender in contenders:
        for drafter in contender.drafters:
            if drafter.name == "suffix":
                replay(drafter, earlier, 1)
    served: dict[str, dict[str, Served]] = {contender.name: defaultdict(Served) for contender in contenders}
    identical = True
    for number, example in enumerate(examples):
        start, stop = example.spans[-1]
        params = SamplingParams(**sampled_with(dict(example.settings)), max_tokens=max(stop - start, 2), seed=number)
        answers = {}
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            engine.use(controllers[contender.name])
            answers[contender.name], came = _answer(engine, list(example.tokens[:start]), params)
            for tag in {"", example.tag}:
                served[contender.name][tag].add(came)
        identical &= len(set(map(tuple, answers.values()))) == 1
        progress("serving in turns", number + 1, len(examples))
    engine.use(None)
    plain = served[contenders[0].name]

    def report(contender: Contender, tag: str) -> dict[str, Any]:
        foresees = bool(contender.drafters) and not contender.always
        return _report(served[contender.name][tag], plain[tag], foresees=foresees)

    tags = sorted(tag for tag, found in plain.items() if tag and found.tokens)
    return {
        "identical": identical,
        "answers": len(examples),
        "contenders": {
            c.name: report(c, "") | ({"tags": {tag: report(c, tag) for tag in tags}} if len(tags) > 1 else {})
            for c in contenders
        },
    }


def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], Served]:
    """(tokens, what they took)."""
    served = Served()
    pace = engine.controller.pace if engine.controller is not None else None
    before = (pace.spent, pace.predicted) if pace is not None else (0.0, 0.0)
    number = engine.add(prompt, params)
    tokens = [token for chunk in engine.run(number) for token in chunk.token_ids]
    timings = engine.timings.pop(number)
    if timings.generated > 1:
        served.tokens.append(timings.generated - 1)
        served.seconds.append(timings.decode_seconds)
    served.drafts.merge(timings.drafts)
    if pace is not None:
        served.spent += pace.spent - before[0]
        served.predicted += pace.predicted - before[1]
    return tokens, served


def _report(found: Served, plain: Served, *, foresees: bool) -> dict[str, Any]:
    whole = sum(found.seconds)
    undrafted = max(whole - found.spent, 0.0)
    low, high = _ratio_interval(found, plain)
    return {
        "tok_s": found.rate,
        "speedup": found.rate / plain.rate,
        "speedup_interval": [low, high],
        "speedup_predicted": (found.predicted + undrafted) / (found.spent + undrafted) if foresees else None,
        "tau": found.drafts.tau,
        "tokens_a_step": _tokens_a_step(found),
        "drafted": found.drafts.drafted,
        "accepted": found.drafts.accepted,
        "acceptance_by_position": found.drafts.conditional(),
    }


def _tokens_a_step(found: Served) -> float:
    tokens = sum(found.tokens)
    return tokens / max(tokens - found.drafts.accepted, 1)


def _ratio_interval(found: Served, plain: Served, samples: int = 1000) -> tuple[float, float]:
    """95 % of the speed-up's bootstrap over answers."""
    count = min(len(found.seconds), len(plain.seconds))
    if count < 2:
        return 1.0, 1.0
    chosen = np.random.default_rng(0).integers(0, count, (samples, count))

    def rates(served: Served) -> Any:
        tokens, seconds = np.array(served.tokens[:count]), np.array(served.seconds[:count])
        return tokens[chosen].sum(1) / seconds[chosen].sum(1)

    low, high = np.quantile(rates(found) / rates(plain), (0.025, 0.975))
    return float(low), float(high)


def costs(cost: CostModel, drafter: Drafter | None, draft_len: int) -> dict[str, float]:
    """v(K + 1) and d(K) in steps of one row at K = `draft_len`, and c."""

    def step(rows: int) -> float:
        return cost.seconds(StepShape(rows, rows, 0, rows * CONTEXT))

    one = step(1)
    each = drafter.pass_seconds(1) / one if drafter is not None else 0.0
    passes = (drafter.passes or draft_len) if drafter is not None and drafter.neural else 0
    return {"verify_cost": step(draft_len + 1) / one, "draft_cost": passes * each, "c": each, "plain_step_seconds": one}


def leaks(drafter: TappedDrafter, examples: Sequence[Example], source: FeatureSource, draft_len: int) -> list[int]:
    """Examples whose drafts change when tokens that are not known yet do; there should be none.

    Drafts at a place are compared between the answer as it was, and one that goes on otherwise from that place on.
    """
    found = []
    for number, example in enumerate(examples[:LEAK_EXAMPLES]):
        start, stop = example.spans[-1]
        place = (start + stop) // 2
        vocabulary = source.model.config.vocabulary
        other = (*example.tokens[:place], *((token + 1) % vocabulary for token in example.tokens[place:]))
        drafts = [_draft_at(drafter, tokens, place, source, draft_len) for tokens in (example.tokens, other)]
        if drafts[0] != drafts[1]:
            found.append(number)
    return found


def _draft_at(
    drafter: TappedDrafter, tokens: Sequence[int], place: int, source: FeatureSource, draft_len: int
) -> tuple[int, ...]:
    """The draft after token `place` - 1, made while the target's features were computed for all tokens."""
    (taps,) = source.compute([tokens])
    answer = begin(Example(tuple(tokens), ((place - 1, len(tokens)),)), 0, 0, taps, drafter, draft_len)
    (draft,) = drafter.propose([Ask(answer, draft_len, 0.0, lambda draft_class: 1.0)])
    drafter.free(answer)
    return draft.tokens if draft is not None else ()
