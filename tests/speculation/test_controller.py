"""The controller: it learns what drafts are worth, leaves off where they are worth nothing, and finds out again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slipstream.program import Draft, KVFormat, Namespace, StepShape
from slipstream.program.sampling import SamplingParams
from slipstream.roofline.cost import CostModel, Curve
from slipstream.scheduling import Plan, SpanPlan
from slipstream.scheduling import Sequence as Answer
from slipstream.scheduling.drafts import Prices, allot
from slipstream.speculation import Ask, Controller, Drafter, GrammarDrafter
from slipstream.speculation.chains import PassClock
from slipstream.speculation.controller import (
    FIRST_PAUSE,
    LONGEST_FIRST,
    LONGEST_PAUSE,
    MOST_KNOWN,
    MOST_LEFT,
    TEXT_RETRY,
)

# 10 ms a step, 0.7 ms for each row more.
COST = CostModel(Curve((1, 64), (9e-3, 53e-3)), Curve((1, 2), (1e-3, 1e-3)), (0, 0, 0, 0), drafted=0.0)
PASS = 1e-3
PLAIN = COST.seconds(StepShape(1, 1, 0, 1))


class Luck(Drafter):
    """A neural drafter whose tokens hold with a chance that the test sets."""

    name, neural, most = "luck", True, 8

    def prior(self, draft_class: int) -> float:
        return 0.7

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [Draft.chain([1] * ask.most, [0] * ask.most, self.name) for ask in asks]

    def pass_seconds(self, answers: int) -> float:
        return PASS


class Text(Luck):
    """Text that was there before: drafts without passes."""

    name, neural = "text", False

    def draft(self, answer: Answer, most: int) -> Draft | None:
        return Draft.chain([1] * most, [0] * most, self.name) if most > 0 else None


def answer_of(tag: str = "") -> Answer:
    params, namespace = SamplingParams(temperature=0.0), Namespace("", "", KVFormat.BF16)
    return Answer(0, 0, [1], 1, params, 0, frozenset(), 1 << 30, namespace, blocks=[0], tag=tag)


class Play:
    """One answer decoded against a machine that costs what the cost model says; drafts hold as luck has it."""

    def __init__(self, controller: Controller, tag: str = "", seed: int = 0):
        self.controller, self.answer, self.random = controller, answer_of(tag), random.Random(seed)
        self.seconds: list[float] = []
        """Of each token."""

    def run(self, tokens: int, chance: float) -> list[float]:
        begun = len(self.seconds)
        while len(self.seconds) < begun + tokens:
            self.step(chance)
        return self.seconds[begun:]

    def step(self, chance: float) -> None:
        controller, answer = self.controller, self.answer
        offers = controller.offers([answer], COST)
        count, passes = 0, 0.0
        if (offer := offers.get(id(answer))) is not None:

            def step(rows: int) -> float:
                return COST.seconds(StepShape(1 + rows, 1 + rows, 0, 1))

            chosen = allot([offer], Prices(step, 0.0, PASS), 1, 64)
            count, passes = chosen.drafts[0], PASS * offer.passes_for(chosen.drafts[0])
            plan = Plan([SpanPlan(answer, 1, count)], [], [], [], [], 0.0, 0.0, PLAIN, chosen.speedup)
            drafts = controller.draft(plan)
        taken = COST.seconds(StepShape(1 + count, 1 + count, 0, 1)) + passes
        held = 0
        if count:
            draft = drafts[id(answer)]
            while held < len(draft) and self.random.random() < chance:
                held += 1
            controller.landed(answer, draft, range(held), ended=False)
        answer.tokens += [1] * (held + 1)
        self.seconds += [taken / (held + 1)] * (held + 1)


def speedup(seconds: list[float]) -> float:
    return PLAIN * len(seconds) / sum(seconds)


@pytest.mark.parametrize("drafter", [Luck, Text])
def test_good_drafts_are_used_and_bad_ones_left(drafter: type[Luck]) -> None:
    good = Play(Controller([drafter()]))
    good.run(200, 0.9)
    assert speedup(good.run(400, 0.9)) > 2.0
    bad = Play(Controller([drafter()]))
    assert speedup(bad.run(64, 0.0)) > 0.8
    assert speedup(bad.run(400, 0.0)) > 0.97


@pytest.mark.parametrize("drafter", [Luck, Text])
def test_after_a_change_of_subject_it_is_back_within_64_tokens(drafter: type[Luck]) -> None:
    play = Play(Controller([drafter()]))
    assert speedup(play.run(600, 0.92)) > 2.0
    play.run(64, 0.0)
    assert speedup(play.run(300, 0.0)) > 0.97
    play.run(LONGEST_PAUSE, 0.92)
    assert speedup(play.run(300, 0.92)) > 2.0, "and finds out when drafts pay again"


def test_pauses_grow_and_end() -> None:
    play = Play(Controller([Luck()]))
    play.run(3000, 0.0)
    track = play.controller._tracks[id(play.answer)]
    assert track.pause == LONGEST_PAUSE
    play.run(2 * LONGEST_PAUSE, 0.95)
    assert track.pause == FIRST_PAUSE


def trials(controller: Controller, answers: int, chance: float, tokens: int = 40) -> list[int]:
    """Verifications of each of so many answers, one after the other."""
    found = []
    for seed in range(answers):
        before = controller.counts()["luck", ""].rounds if controller.counts() else 0
        play = Play(controller, seed=seed)
        play.run(tokens, chance)
        controller.free(play.answer)
        found.append(controller.counts()["luck", ""].rounds - before)
    return found


def test_traffic_that_is_never_drafted_right_is_tried_more_and_more_seldom() -> None:
    controller = Controller([Luck()])
    hopeless = trials(controller, 200, 0.0)
    assert [rounds > 0 for rounds in hopeless[:7]] == [True, True, False, True, False, False, True]
    later = sum(rounds > 0 for rounds in hopeless[100:])
    assert 2 <= later <= 5, "one of 33"
    back = trials(controller, 2 * MOST_LEFT, 0.95)
    first = next(index for index, rounds in enumerate(back) if rounds)
    assert first <= MOST_LEFT
    assert min(back[first + 1 :]) > 0, "and found out when it is drafted right"
    other = Play(controller, "another kind")
    other.run(10, 0.0)
    assert controller.counts()["luck", "another kind"].rounds > 0


def test_it_says_for_how_long_it_need_not_be_asked() -> None:
    controller = Controller([Luck()])
    play = Play(controller)
    play.run(30, 0.0)
    assert controller.offers([play.answer], COST) == {}
    asleep = controller.asleep
    assert 0 < asleep <= FIRST_PAUSE * 2
    play.answer.tokens += [1] * (asleep - 1)
    assert controller.offers([play.answer], COST) == {}
    play.answer.tokens.append(1)
    assert controller.offers([play.answer], COST)
    assert controller.asleep == 0
    with_text = Controller([Text(), Luck()])
    play = Play(with_text)
    play.run(60, 0.0)
    with_text.offers([play.answer], COST)
    assert with_text.asleep == 0, "text may repeat itself at any token"


class Sure(Text):
    """Thought to be right before anything was seen."""

    def prior(self, draft_class: int) -> float:
        return 0.95


def test_with_many_answers_nothing_is_tried_that_could_not_bring_more_than_it_costs() -> None:
    """Of drafts that are not expected to hold one of so many is tried: not where a row is as dear as a token."""
    for count, tried in ((1, True), (48, False)):
        drafter = Sure()
        controller = Controller([drafter])
        answers = [answer_of() for _ in range(count)]
        for answer in answers:
            for _ in range(60):
                controller._knows(drafter, answer).classes.observe(0, 0.0)
                controller._chances(drafter, answer, controller._track(answer)).observe(0, 0.0)
        offered = any(controller.offers(answers, COST) for _ in range(2 * TEXT_RETRY))
        assert offered is tried


def test_text_and_neural_drafts_race() -> None:
    """Where text repeats its drafts win, since they take no passes; where it does not, the neural ones do."""
    for text, neural in ((0.95, 0.9), (0.0, 0.9)):
        controller = Controller([Text(), Luck()])
        play = Play(controller)
        used = {"text": 0, "luck": 0}
        for step in range(600):
            offers = controller.offers([play.answer], COST)
            if not offers:
                play.answer.tokens.append(1)
                continue
            drafter = controller._ready[id(play.answer)][0]
            used[drafter.name] += step > 300
            plan = Plan([SpanPlan(play.answer, 1, 4)], [], [], [], [])
            draft = controller.draft(plan)[id(play.answer)]
            chance, held = (text if drafter.name == "text" else neural), 0
            while held < len(draft) and play.random.random() < chance:
                held += 1
            controller.landed(play.answer, draft, range(held), ended=False)
            play.answer.tokens += [1] * (held + 1)
        assert (used["text"] > 10 * used["luck"]) == (text > 0.5)


def test_what_must_follow_is_as_sure_when_an_answer_is_sampled() -> None:
    """Text that was there before is not."""
    for drafter, sure in ((GrammarDrafter(), True), (Text(), False)):
        greedy, sampled = answer_of(), answer_of()
        sampled.params = replace(sampled.params, temperature=1.0)
        controller = Controller([drafter])
        expected = [controller._knows(drafter, answer).classes.chance(0) for answer in (greedy, sampled)]
        assert (expected[0] == expected[1]) is sure


def test_what_is_known_of_a_tag_helps_the_next_answer() -> None:
    controller = Controller([Text()])
    for _ in range(12):
        play = Play(controller, "prose")
        play.run(100, 0.0)
        controller.free(play.answer)
    stranger, same = Play(controller, "code"), Play(controller, "prose")
    assert len(controller.offers([stranger.answer], COST)) == 1
    assert len(controller.offers([same.answer], COST)) == 0
    by_tag = controller.counts()
    assert by_tag["text", "prose"].accepted == 0
    assert by_tag["text", "prose"].rounds > 5


def test_tokens_that_were_not_tried_teach_nothing() -> None:
    controller = Controller([Luck()])
    answer = answer_of()
    controller.offers([answer], COST)
    plan = Plan([SpanPlan(answer, 1, 4)], [], [], [], [])
    draft = controller.draft(plan)[id(answer)]
    assert controller.landed(answer, draft, [0, 1], ended=True) == 2
    counts = controller.counts()["luck", ""]
    assert (counts.tries[:4], counts.hits[:4]) == ([1, 1, 0, 0], [1, 1, 0, 0])
    assert counts.conditional() == [1.0, 1.0]


def test_of_a_tree_what_lies_beyond_the_end_teaches_nothing() -> None:
    """Two levels of two: the answer ended with a token of the first, so that nobody knows about the second."""
    tree = Draft((5, 6, 7, 8), (-1, -1, 0, 0), (0, 1, 2, 3), "luck")
    for ended, tried in ((True, [1.0, 1.0, 0.0, 0.0]), (False, [1.0, 1.0, 1.0, 1.0])):
        drafter = Luck()
        drafter.ranked, drafter.classes = True, 4
        controller, answer = Controller([drafter]), answer_of()
        assert controller.landed(answer, tree, [0], ended=ended) == (1 if ended else 2)
        known = controller._knows(drafter, answer).classes
        assert known._tries == tried
        assert known._hits == [1.0, 0.0, 0.0, 0.0]


def test_a_kind_of_traffic_that_goes_on_is_not_forgotten() -> None:
    """However many others come: those that were used longest ago give way."""
    controller = Controller([Text()])
    (text,) = controller.drafters
    controller._knows(text, answer_of("regular")).classes.observe(0, 0.0)
    for number in range(3 * MOST_KNOWN):
        controller._knows(text, answer_of(f"once {number}"))
        assert controller._knows(text, answer_of("regular")).classes._tries == [1.0]
    assert len(controller._known) == MOST_KNOWN


def test_dearness_follows_what_verifying_costs() -> None:
    controller = Controller([])
    for _ in range(100):
        controller.verified(2e-3, 1e-3)
    assert controller.dearness == pytest.approx(2.0, rel=0.01)
    controller.verified(5.0, 1e-3)
    assert controller.dearness < 2.3, "one disturbed step moves little"
    controller.verified(1.0, 0.0)


def test_a_price_of_a_bad_moment_does_not_last() -> None:
    """Passes that were measured while something else ran are not run at that price, and so never measured again."""
    clock = PassClock()
    clock.observe(1, 40e-3)
    assert clock.seconds(1) == 0.0, "the first one finds everything cold"
    clock.observe(1, 4e-3)
    for _ in range(8):
        clock.doubt()
    assert clock.seconds(1) < 2e-3
    clock.observe(1, 1e-3)
    assert clock.seconds(1) == pytest.approx(1e-3)
    for seconds in (1.2e-3, 9e-3, 1.1e-3):
        clock.observe(1, seconds)
    assert clock.seconds(1) == pytest.approx(1.15e-3), "one in a bad moment does not show"
    assert clock.seconds(5) == clock.seconds(1), "the nearest that is known"
    empty = PassClock()
    empty.doubt()
    assert empty.seconds(1) == 0.0


def test_a_trial_is_no_prediction() -> None:
    """What is foreseen of it is hope: S as predicted leaves it out."""
    controller, answer = Controller([Luck()]), answer_of()
    for trial in (True, False):
        assert controller.offers([answer], COST)
        assert controller.draft(Plan([SpanPlan(answer, 1, 4)], [], [], [], []))
        assert controller.trying is trial
        controller.paced([("luck", "")], 2.0, 3.0, 4.0)
        expected = 1.5 if trial else (1.5 * 2.0 + 4.0 * 2.0) / 4.0
        assert controller.pace.predicted_speedup == pytest.approx(expected)
        answer.tokens.append(1)
    assert controller.pace.measured_speedup == pytest.approx(1.5)


def test_what_a_drafter_was_not_sure_of_counts_for_its_kind_of_traffic() -> None:
    """Only drafts that it was sure of are verified: who counted those alone would go on asking in vain."""
    controller = Controller([Luck()])
    answer = answer_of()
    drafter = controller.drafters[0]
    for _ in range(40):
        controller._track(answer).resume = 0
        controller._ready[id(answer)] = (drafter, None)
        assert controller.draft(Plan([SpanPlan(answer, 1, 4)], [], [], [], [], 0.9)) == {}, "not worth a row"
    chance = controller._knows(drafter, answer).positions.chance(0)
    assert chance == pytest.approx(0.7, abs=0.02), "as sure as it was, not as before anything was seen"


def test_where_drafts_do_not_pay_the_next_answer_begins_with_a_longer_pause() -> None:
    controller, pauses = Controller([Luck()]), []
    for chance in (0.15, 0.15, 0.95, 0.95):
        play = Play(controller)
        pauses.append(controller._track(play.answer).pause)
        play.run(2 * LONGEST_PAUSE, chance)
        controller.free(play.answer)
    assert pauses == [FIRST_PAUSE, LONGEST_FIRST, LONGEST_FIRST, FIRST_PAUSE]
