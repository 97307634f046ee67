"""Drafters' state is a function of an answer's tokens: hits, preemption, forks and cancellation change nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.drafters import Speculative, load_speculative
from slipstream.program import Draft
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Plan, State, schedule
from slipstream.speculation import Ask, Controller, Drafter, ModelDrafter, tapped
from slipstream.speculation.eagle3_tree import TreeShape
from slipstream.speculation.tapped import MOST_WAITING
from tests.engine.test_jitter import Said, collect
from tests.speculation.folders import dspark_folder, eagle3_folder
from tests.speculation.scripted import FREE
from tests.speculation.test_identity import answers, forgetful, requests_of

OPTIONS = LoadOptions(max_rows=64, threads=1)
SLOW = replace(FREE, pace=1000.0)
"""Steps beside which a drafter's passes cost nothing."""

Seen = dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]


def loaded(family: str, target: Path, folder: Path, spare: int = 0) -> tuple[Model, Drafter]:
    """The tiny target with a random drafter of a family."""
    make = dspark_folder if family == "dspark" else eagle3_folder
    tree = TreeShape(12, 3, 3) if family == "eagle3-tree" else None
    wanted = Speculative("folder", str(make(folder)), tree)
    model, controller = load_speculative(str(target), replace(OPTIONS, spare_bytes=spare), wanted)
    assert controller is not None
    assert controller.neural is not None
    return model, controller.neural


def watch(drafter: Drafter, seen: Seen) -> None:
    """Note every draft by the tokens and the noise it was made for; drafts are long whatever they promise."""
    propose = drafter.propose

    def watched(asks: Sequence[Ask]) -> list[Draft | None]:
        asks = [ask._replace(price=0.0, chance=lambda draft_class: 1.0) for ask in asks]
        drafts = propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft is not None:
                key = (tuple(ask.answer.tokens), hash((ask.answer.seed, ask.answer.choice)))
                seen.setdefault(key, []).append(draft.tokens)
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]


class Eager(Controller):
    """Asks for drafts at every step, however bad they have been."""

    def _pause(self, answer: object) -> None:
        pass


@pytest.mark.parametrize("family", ["eagle3", "eagle3-tree", "dspark"])
@pytest.mark.features("neural drafts", "giving way", "n", "sampling", "prefix cache", "moved out")
def test_state_follows_the_blocks(family: str, tiny_gguf: Path, tmp_path: Path) -> None:
    model, drafter = loaded(family, tiny_gguf, tmp_path, spare=1 << 20)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    rng = random.Random(7)
    wanted = [(prompt, replace(params, n=rng.choice([1, 2]))) for prompt, params in requests_of(rng, 12, 50)]
    plain = answers(Engine(model, prefix_cache=False), wanted)
    alone: Seen = {}
    watch(drafter, alone)
    calm = Engine(model, SLOW, prefix_cache=False, controller=Eager([drafter]))
    assert answers(calm, wanted) == plain
    among: Seen = {}
    watch(drafter, among)
    small = replace(model, blocks=14)
    engine = Engine(small, replace(SLOW, copy=rng.choice([0.0, 1.0])), forgetful(rng), controller=Eager([drafter]))  # type: ignore[arg-type]
    for _ in range(4):
        cancelled = engine.add(*wanted[0])
        engine.step()
        engine.cancel(cancelled)
        assert answers(engine, wanted, rng) == plain
    assert engine.preemptions > 10
    assert engine.prefix is not None
    assert engine.prefix.stats.hits > 100
    both = alone.keys() & among.keys()
    assert len(both) > 200
    for key in both:
        for tokens in among[key]:
            shorter = min(len(tokens), len(alone[key][0]))
            if family == "eagle3-tree":  # a smaller tree is not the beginning of a larger one
                if len(tokens) == len(alone[key][0]):
                    assert tokens == alone[key][0]
            else:
                assert tokens[:shorter] == alone[key][0][:shorter]


def test_drafts_after_a_prefix_hit(tiny_gguf: Path, tmp_path: Path) -> None:
    """The first draft after a prompt that came from the cache is the one without a cache: no hole, no replay."""
    for family in ("eagle3", "dspark"):
        model, drafter = loaded(family, tiny_gguf, tmp_path / family)
        seen: Seen = {}
        watch(drafter, seen)
        prompt = [random.Random(5).randrange(256) for _ in range(100)]
        params = requests_of(random.Random(1), 1)[0][1]
        params = replace(params, max_tokens=12, n=1, ignore_eos=True, temperature=0.0, seed=3)
        engine = Engine(model, SLOW, controller=Eager([drafter]))
        said: list[dict[int, Said]] = []
        for _ in range(3):
            said += answers(engine, [(prompt, params)])
        assert said[0] == said[1] == said[2]
        assert engine.prefix is not None
        assert engine.prefix.stats.hits == 2 * 96
        repeated = [drafts for drafts in seen.values() if len(drafts) == 3]
        assert len(repeated) >= 2
        for drafts in repeated:
            shortest = min(map(len, drafts))
            assert len({draft[:shortest] for draft in drafts}) == 1


@pytest.mark.parametrize("family", ["eagle3", "eagle3-tree", "dspark", "draft"])
@pytest.mark.parametrize("waiting", [MOST_WAITING, 4])
def test_drafts_after_plain_steps(
    family: str, waiting: int, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts repeat their plan; what is drafted after some of them is what would have been without them.

    Rests are longer than a block, so that a stale position would show in every part of the state; and long enough for
    everything that waits to be taken in, so that the row to draft after may have been run already.
    """
    monkeypatch.setattr(tapped, "MOST_WAITING", waiting)
    if family == "draft":
        model = load_model(str(tiny_gguf), OPTIONS)
        twin = load_model(str(tiny_gguf), OPTIONS)
        drafter: Drafter = ModelDrafter(twin.executable, "itself", 64)
    else:
        model, drafter = loaded(family, tiny_gguf, tmp_path)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)  # without penalties plans are repeated
    seen: list[Seen] = []
    said = []
    for rests in (False, True):
        watch(drafter, found := {})
        seen.append(found)
        engine = Engine(model, SLOW, prefix_cache=False, controller=Eager([drafter]), ahead=False)
        number, tokens, step = engine.add([7, 8, 9], params), [], 0
        while engine.busy:
            engine.drafting.resting = rests and step % 50 < 37
            tokens += [token for chunk in engine.step() for token in chunk.token_ids]
            step += 1
        assert engine.timings[number].drafts.rounds > 3
        said.append(tokens)
    assert said[0] == said[1]
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 3
    for key in both:
        shorter = min(len(seen[0][key][0]), len(seen[1][key][0]))
        if family == "eagle3-tree" and len(seen[0][key][0]) != len(seen[1][key][0]):
            continue  # a smaller tree is not the beginning of a larger one
        assert seen[0][key][0][:shorter] == seen[1][key][0][:shorter]


def test_random_weights_switch_themselves_off(tiny_gguf: Path, tmp_path: Path) -> None:
    """Drafts of random weights never pay: after a few trials almost all steps are plain."""
    for family in ("eagle3", "eagle3-tree", "dspark"):
        model, drafter = loaded(family, tiny_gguf, tmp_path / family)
        cost = replace(FREE, pace=0.1)  # steps of 0.1 ms: passes are dear
        params = replace(requests_of(random.Random(1), 1)[0][1], max_tokens=400, n=1, ignore_eos=True, temperature=1.0)
        engine = Engine(model, cost, controller=Controller([drafter]))
        number = engine.add([1, 2, 3], params)
        rounds: list[int] = []
        for chunk in engine.run(number):
            rounds += [engine.timings[number].drafts.rounds] * len(chunk.token_ids)
        assert rounds[-1] <= 12
        assert rounds[-1] - rounds[len(rounds) // 2] <= 3


def test_who_is_never_wanted_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    """What the planner has no room for it hears of, too: an offer at every step costs the host's time for nothing."""
    model, drafter = loaded("eagle3-tree", tiny_gguf, tmp_path)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    controller, offered = Controller([drafter]), []
    offers = controller.offers

    def watched(*arguments: object) -> object:
        offered.append(bool(found := offers(*arguments)))  # type: ignore[arg-type]
        return found

    def planner(state: State) -> Plan:
        plan = schedule(state)
        return plan._replace(spans=[span._replace(drafts=0) for span in plan.spans])

    controller.offers = watched  # type: ignore[assignment,method-assign]
    engine = Engine(model, SLOW, controller=controller, planner=planner, ahead=False)
    params = replace(requests_of(random.Random(1), 1)[0][1], max_tokens=120, n=1, ignore_eos=True)
    list(engine.run(engine.add([1, 2, 3], params)))
    assert any(offered)
    assert sum(offered) < 10


def test_another_drafter_never_reads_the_blocks_of_the_last(tiny_gguf: Path, tmp_path: Path) -> None:
    model, first = loaded("eagle3", tiny_gguf, tmp_path / "a")
    prompt = [3] * 70
    params = replace(requests_of(random.Random(1), 1)[0][1], max_tokens=8, n=1, ignore_eos=True)
    engine = Engine(model, SLOW, controller=Eager([first]))
    answers(engine, [(prompt, params)])
    assert engine.prefix is not None
    node = engine.prefix.find(replace(model.namespace, salt="0 /"), prompt, 2)
    assert node is not None
    assert node.drafted(first.state) == 2
    assert node.drafted("another") == 0


def test_drafters_are_swapped_in_the_middle_of_answers(tiny_gguf: Path, tmp_path: Path) -> None:
    """Answers stay those of plain decoding; the new drafter drafts as if it had always been there, or not at all."""
    model, first = loaded("eagle3", tiny_gguf, tmp_path / "a")
    _, second = loaded("eagle3", tiny_gguf, tmp_path / "b")
    assert first.state != second.state
    rng = random.Random(9)
    wanted = requests_of(rng, 6, 60)
    plain = answers(Engine(model, prefix_cache=False), wanted)
    alone: Seen = {}
    watch(second, alone)
    answers(Engine(model, SLOW, prefix_cache=False, controller=Eager([second])), wanted)
    among: Seen = {}
    watch(second, among)
    engine = Engine(model, SLOW, controller=Eager([first]))
    numbers = [engine.add(prompt, params) for prompt, params in wanted]
    chunks = []
    for step in range(1000):
        if step == 12:
            engine.use(Eager([second]))
        if not engine.busy:
            break
        chunks += engine.step()
        engine.check()
    assert [collect(c for c in chunks if c.request == number) for number in numbers] == plain
    later = answers(engine, wanted)
    assert later == plain
    both = alone.keys() & among.keys()
    assert len(both) > 50
    for key in both:
        for tokens in among[key]:
            shorter = min(len(tokens), len(alone[key][0]))
            assert tokens[:shorter] == alone[key][0][:shorter]


def identical(family: str, target: Path, folder: Path, least: int, seed: int) -> None:
    """Play requests plain and drafted, up to 12 at once, in caches of all sizes, until there are so many tokens."""
    model, drafter = loaded(family, target, folder, spare=1 << 20)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    tokens = drafted = 0
    while tokens < least:
        rng = random.Random(seed)
        wanted = requests_of(rng, 12)
        plain = answers(Engine(model, prefix_cache=False), wanted)
        controller = Eager([drafter])
        small = replace(model, blocks=rng.choice([8, 14, model.blocks]))
        engine = Engine(small, replace(SLOW, copy=rng.choice([0.0, 1.0])), forgetful(rng), controller=controller)  # type: ignore[arg-type]
        assert answers(engine, wanted, rng) == plain, f"{family}, seed {seed}"
        tokens += sum(len(said.tokens) for answer in plain for said in answer.values())
        drafted += sum(counts.drafted for counts in controller.counts().values())
        seed += 1
    assert drafted > tokens / 4


@pytest.mark.parametrize("family", ["eagle3", "eagle3-tree", "dspark"])
@pytest.mark.features("neural drafts", "sampling", "n", "penalties", "logprobs", "giving way", "moved out")
def test_tapped_drafters_as_plain_decoding(family: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """Two of the first seeds once ended the engine: by a row that had been run already, and by scratch too many."""
    identical(family, tiny_gguf, tmp_path, 1_500, 2014)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["eagle3", "eagle3-tree", "dspark"])
def test_tapped_drafters_as_plain_decoding_long(family: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """Ten thousand tokens and more for each family."""
    identical(family, tiny_gguf, tmp_path, 10_000, 3000)
