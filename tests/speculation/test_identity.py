"""Speculation never changes a token: every drafter, draft length, batch and end of an answer against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.program import Draft
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Plan, State, schedule
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import (
    Ask,
    Controller,
    Counts,
    Drafter,
    ExactVerification,
    ModelDrafter,
    SuffixDrafter,
    Verdict,
    Verification,
)
from slipstream.speculation.rejection import RejectionVerification
from slipstream.text.grammars import of_choice, of_regex
from tests.engine.test_jitter import Said, collect
from tests.speculation.scripted import FREE, Adversarial, Scripted

Requests = Sequence[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def self_drafter(model: Model) -> ModelDrafter:
    """The target drafts for itself."""
    twin = load_model(model.reference, LoadOptions(max_rows=64, threads=1))
    return ModelDrafter(twin.executable, "itself", 64)


def requests_of(rng: random.Random, count: int, longest: int = 60) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, so that text can be found again, with all kinds of settings."""
    requests = []
    for _ in range(count):
        piece = [rng.randrange(256) for _ in range(rng.randint(3, 12))]
        prompt = (piece * 12)[: rng.randint(4, 90)]
        params = SamplingParams(
            seed=rng.randrange(1 << 32),
            max_tokens=rng.randint(1, longest),
            temperature=rng.choice([0.0, 0.3, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([{}, {5: 2.0}]),
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 0, 2]),
            n=rng.choice([1, 1, 2]),
            ignore_eos=rng.random() < 0.7,
        )
        requests.append((prompt, params))
    return requests


def answers(engine: Engine, requests: Requests, rng: random.Random | None = None) -> list[dict[int, Said]]:
    """What an engine says to requests that join at random steps; without `rng` one after the other."""
    waiting, numbers, chunks = list(range(len(requests))), {}, {index: [] for index in range(len(requests))}
    while waiting or engine.busy:
        if waiting and (not engine.busy or (rng is not None and rng.random() < 0.3)):
            index = waiting.pop(0)
            numbers[engine.add(*requests[index])] = index
        for chunk in engine.step() if engine.busy else []:
            chunks[numbers[chunk.request]].append(chunk)
        engine.check()
    return [collect(chunks[index]) for index in range(len(requests))]


def scripted(model: Model, requests: Requests, plain: list[dict[int, Said]], wrong: float, most: int) -> Scripted:
    drafter = Scripted(model.config.vocabulary, wrong, most)
    for (prompt, _), said in zip(requests, plain, strict=True):
        drafter.answers[tuple(prompt)] = {choice: s.tokens for choice, s in said.items()}
    return drafter


def forgetful(rng: random.Random) -> object:
    """The scheduler, but now and then somebody loses his blocks for no reason."""

    def planner(state: State) -> Plan:
        plan = schedule(state)
        running = [s for s in state.sequences if s.blocks and s.may_go_on and s not in plan.preempted]
        if running and rng.random() < 0.05:
            victim = rng.choice(running)
            plan.preempted.append(victim)
            return plan._replace(spans=[span for span in plan.spans if span.sequence is not victim])
        return plan

    return planner


def identical(model: Model, drafters: str, seed: int, requests: int) -> tuple[Counts, int]:
    """Play requests plain and drafted; returns what was drafted, and the tokens."""
    rng = random.Random(seed)
    wanted = requests_of(rng, requests)
    plain = answers(Engine(model, prefix_cache=False), wanted)
    most = rng.randint(1, 16)
    made: list[Drafter] = []
    if "suffix" in drafters:
        made.append(SuffixDrafter(most=most))
    if "ngram" in drafters:
        made.append(SuffixDrafter(learn=False, most=most))
    if "scripted" in drafters:
        made.append(scripted(model, wanted, plain, 0.3, most))
    if "model" in drafters:
        made.append(self_drafter(model))
    controller = Controller(made)
    small = replace(model, blocks=rng.choice([6, 12, model.blocks]))
    engine = Engine(small, FREE, forgetful(rng), controller=controller)  # type: ignore[arg-type]
    assert answers(engine, wanted, rng) == plain, f"{drafters}, seed {seed}"
    total = Counts()
    for counts in controller.counts().values():
        total.merge(counts)
    return total, sum(len(said.tokens) for answer in plain for said in answer.values())


FAMILIES = ["suffix", "ngram", "scripted", "model", "suffix+model"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.features(
    "sampling", "n", "penalties", "logprobs", "text drafts", "neural drafts", "giving way", "prefix cache"
)
def test_as_plain_decoding(model: Model, family: str) -> None:
    total = Counts()
    for seed in range(6):
        counts, _ = identical(model, family, seed, 8)
        total.merge(counts)
    assert total.accepted > 50


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_plain_decoding_long(model: Model, family: str) -> None:
    """Ten thousand tokens and more for each family, K from 1 to 16, up to 8 at once."""
    tokens, seed = 0, 1000
    while tokens < 10_000:
        tokens += identical(model, family, seed, 8)[1]
        seed += 1


def test_a_model_that_drafts_for_itself_is_always_right(model: Model) -> None:
    """Also after prefix hits, preemption, forks and cancellation: wrong state of the drafter would show."""
    drafter, rng = self_drafter(model), random.Random(3)
    drafter.most = 4
    drafter.prior = lambda draft_class: 0.99  # type: ignore[method-assign]
    controller = Controller([drafter])
    slow = replace(FREE, pace=1000.0)  # beside such steps the drafter's passes cost nothing either
    engine = Engine(model, slow, forgetful(rng), controller=controller)  # type: ignore[arg-type]
    wanted = [(prompt, replace(params, n=2)) for prompt, params in requests_of(rng, 24)]
    for _ in range(3):  # again with a warm prefix cache
        cancelled = engine.add(*wanted[0])
        engine.step()
        engine.cancel(cancelled)
        answers(engine, wanted, rng)
    (counts,) = controller.counts().values()
    assert counts.rounds > 100
    assert counts.hits == counts.tries
    assert engine.preemptions > 5
    prompt, params = [1, 2, 3], SamplingParams(temperature=0.8, seed=1, max_tokens=1 + 5 * 8, ignore_eos=True)
    calm = Engine(model, slow, controller=Controller([drafter]))
    list(calm.run(calm.add(prompt, params)))
    assert calm.timings[0].drafts.tau == 5.0, "K + 1 with K = 4"


def test_a_drafter_that_is_always_wrong(model: Model) -> None:
    rng = random.Random(4)
    wanted = requests_of(rng, 6)
    plain = answers(Engine(model), wanted)
    controller = Controller([Adversarial(scripted(model, wanted, plain, 0.0, 6))])
    assert answers(Engine(model, FREE, controller=controller), wanted, rng) == plain
    (counts,) = controller.counts().values()
    assert (counts.accepted, counts.tau) == (0, 1.0)
    assert counts.rounds > 10


class OffByOne(ExactVerification):
    """Lets one draft token more pass than the target says: the bug that these tests must find."""

    def verify(self, answer: Answer, draft: Draft, drawn: Sequence[int], logits: object) -> Verdict:
        held = draft.accepted(drawn)
        if len(held) < len(draft):
            held = [*held, len(held)]
        return Verdict(held, [*(draft.tokens[i] for i in held), drawn[len(held)]])


def test_an_off_by_one_is_found(model: Model) -> None:
    rng = random.Random(5)
    wanted = requests_of(rng, 6)
    plain = answers(Engine(model), wanted)

    def drafted(verification: Verification) -> list[dict[int, Said]]:
        controller = Controller([scripted(model, wanted, plain, 0.3, 5)])
        return answers(Engine(model, FREE, controller=controller, verification=verification), wanted)

    assert drafted(ExactVerification()) == plain
    assert drafted(OffByOne()) != plain


class Known(Drafter):
    """Proposes exactly what it is given, all of it at once."""

    name = "known"
    most = 64

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def prior(self, draft_class: int) -> float:
        return 0.999

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        rest = [(ask, self.tokens[ask.answer.generated :][: ask.most]) for ask in asks]
        return [Draft.chain(tokens, [0] * len(tokens), self.name) if tokens else None for _, tokens in rest]


@pytest.mark.features("stop", "text drafts")
def test_every_end_at_every_place_of_an_accepted_run(model: Model) -> None:
    """End of answer, stop token, stop string and length: text, ids, log-probabilities and reason are those of plain."""
    prompt, base = [10, 20, 30], SamplingParams(seed=8, temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=2)
    whole = answers(Engine(model), [(prompt, base)])[0][0]
    assert len(whole.tokens) == 24
    cases = [replace(base, max_tokens=place + 1) for place in range(24)]
    cases += [replace(base, stop_token_ids=(token,), min_tokens=m) for token in set(whole.tokens) for m in (0, 3)]
    pieces = {whole.text[i : i + length] for i in range(len(whole.text)) for length in (1, 2, 3)}
    cases += [replace(base, stop=(piece,)) for piece in pieces if piece]
    ends = set()
    for params in cases:
        plain = answers(Engine(model), [(prompt, params)])[0][0]
        controller = Controller([Known(whole.tokens)])
        engine = Engine(model, FREE, controller=controller)
        drafted = answers(engine, [(prompt, params)])[0][0]
        assert drafted == plain, params
        accepted = sum(counts.accepted for counts in controller.counts().values())
        assert accepted > 0 or len(plain.tokens) < 3, params
        assert engine.timings[0].generated == len(plain.tokens)
        ends.add((len(plain.tokens), plain.finish))
    assert {end for end, _ in ends} >= set(range(1, 25))
    eos = int(np.median(whole.tokens))
    changed = replace(model, eos=frozenset({eos, *whole.tokens[5:7]}))
    params = replace(base, ignore_eos=False)
    engine = Engine(changed, FREE, controller=Controller([Known(whole.tokens)]))
    assert answers(engine, [(prompt, params)]) == answers(Engine(changed), [(prompt, params)])


def test_log_probabilities_are_those_of_what_comes_out(model: Model) -> None:
    """By rejection: not of what the target drew in its place, which nobody sees."""
    prompt, params = [5, 6, 7], SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, logprobs=2)
    twin = load_model(model.reference, LoadOptions(max_rows=64, threads=1))
    drafter = ModelDrafter(twin.executable, "itself", 64, drawing="own")
    slow, verification = replace(FREE, pace=1000.0), RejectionVerification()
    engine = Engine(model, slow, controller=Controller([drafter]), verification=verification)
    ((said,),) = [list(choices.values()) for choices in answers(engine, [(prompt, params)])]
    assert len(said.logprobs) == len(said.tokens) == 40
    assert sum(count.accepted for count in engine.drafting.controller.counts().values()) > 3  # type: ignore[union-attr]
    for place, (token, entry) in enumerate(zip(said.tokens, said.logprobs, strict=True)):
        forced = replace(params, max_tokens=1, allowed_tokens=(token,))
        ((alone,),) = [list(c.values()) for c in answers(Engine(model), [([*prompt, *said.tokens[:place]], forced)])]
        (wanted,) = alone.logprobs
        assert (entry.token, entry.top) == (token, wanted.top)  # type: ignore[attr-defined]
        assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)  # type: ignore[attr-defined]


@pytest.mark.features("grammar", "text drafts")
@pytest.mark.parametrize("grammar", [of_choice(["yes", "no", "perhaps"]), of_regex("[ab]{3,9}(-[0-9]{2}){1,3}")])
def test_a_grammar_ends_at_every_place_of_an_accepted_run(model: Model, grammar: str) -> None:
    """Drafts go on past its end, as far as there is room: what comes out ends there all the same."""
    prompt, base = [10, 20, 30], SamplingParams(seed=8, temperature=1.0, max_tokens=40, grammar=grammar, logprobs=1)
    for ignore_eos in (False, True):
        params = replace(base, ignore_eos=ignore_eos)
        plain = answers(Engine(model), [(prompt, params)])
        said = plain[0][0]
        assert said.finish == "stop"
        for longest in range(1, len(said.tokens) + 4):
            drafter = Known([*said.tokens, *[97] * 8])
            drafter.most = longest
            controller = Controller([drafter])
            assert answers(Engine(model, FREE, controller=controller), [(prompt, params)]) == plain, longest
            assert sum(counts.accepted for counts in controller.counts().values()) > 0
