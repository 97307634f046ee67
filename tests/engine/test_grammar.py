"""Answers under a grammar: they keep to it, and are the same alone, in company, with drafts, and after giving way."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance._lib import LLParserLimits

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.flight import Flight
from slipstream.engine.grammar import GrammarConstraint, Grammars
from slipstream.errors import UsageError
from slipstream.program import Draft, KVFormat
from slipstream.program.draft import ROOT
from slipstream.program.sampling import Mask, SamplingParams
from slipstream.speculation import Controller, GrammarDrafter, SuffixDrafter
from slipstream.speculation.rejection import RejectionVerification
from slipstream.text import grammars as g
from tests.engine.test_jitter import Said, Scenario
from tests.speculation.scripted import FREE
from tests.speculation.test_identity import answers, forgetful, scripted
from tests.speculation.test_state import SLOW, Eager, loaded

EOS = 258
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip
KINDS = {
    "schema": g.of_schema(SCHEMA), "regex": g.of_regex("[ab]{3,9}(-[0-9]{2}){1,3}"),
    "choice": g.of_choice(["yes", "no", "perhaps"]),
    "lark": g.of_lark('start: "a" (WORD " ")+ "."\nWORD: /[a-z]{1,4}/'),
}  # fmt: skip


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step looks for drafts and every answer tries them, also where they seldom hold."""
    monkeypatch.setattr("slipstream.engine.drafting.PATIENCE", math.inf)
    monkeypatch.setattr("slipstream.speculation.controller.HOPELESS", math.inf)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def allows(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def keeps_to(kind: str, text: str) -> bool:
    match kind:
        case "schema":
            value = json.loads(text)
            whole = set(value) == {"name", "age", "tags"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 120
            return whole and len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green", "blue"}
        case "regex":
            return re.fullmatch("[ab]{3,9}(-[0-9]{2}){1,3}", text) is not None
        case "choice":
            return text in ("yes", "no", "perhaps")
        case _:
            return re.fullmatch(r"a([a-z]{1,4} )+\.", text) is not None


def requests_of(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            grammar=rng.choice([*KINDS.values(), ""]), seed=rng.randrange(1 << 32), max_tokens=rng.choice([5, 300]),
            temperature=rng.choice([0.0, 1.0]), top_p=rng.choice([1.0, 0.9]), frequency_penalty=rng.choice([0.0, 0.4]),
            logprobs=rng.choice([None, 2]), n=rng.choice([1, 2]), min_tokens=rng.choice([0, 4]),
            ignore_eos=rng.random() < 0.3, stop=rng.choice([(), (), (), *STOPS]),
        )  # fmt: skip
        requests.append((prompt, params))
    return requests


STOPS = [('"age', "-1", "ps", "a "), (", ", "b-", "s"), ('e"', "-", "e ", "o")]
"""Stop strings that occur in what the grammars allow, some of them across two of its tokens or at its very end."""


def stopped(model: Model, params: SamplingParams, tokens: list[int]) -> str | None:
    """An answer's text if a stop string ended it, made anew from its tokens."""
    free = model.tokenizer.decode(tokens[: max(params.min_tokens - 1, 0)])  # not looked at
    rest = model.tokenizer.decode(tokens)[len(free) :]
    places = [place for stop in params.stop if (place := rest.find(stop)) >= 0]
    return free + rest[: min(places)] if places else None


def check(model: Model, requests: list[tuple[list[int], SamplingParams]], said: list[dict[int, Said]]) -> Counter[str]:
    """What was said keeps to its grammar token by token, and to its end if it ended by itself; returns who did."""
    grammars, kinds, ends = Grammars(model.tokenizer, 259), {text: kind for kind, text in KINDS.items()}, Counter[str]()
    for (_, params), choices in zip(requests, said, strict=True):
        for one in choices.values():
            if not params.grammar:
                continue
            assert grammars.learn(params.grammar).deep_copy().try_consume_tokens(one.tokens) == len(one.tokens)
            if (cut := stopped(model, params, one.tokens)) is not None:
                assert (one.text, one.finish) == (cut, "stop")
                ends["stop string"] += 1
                continue
            assert one.text == model.tokenizer.decode(one.tokens)
            if one.finish == "stop":
                assert keeps_to(kinds[params.grammar], one.text), one.text
                ends["whole"] += 1
    return ends


def test_answers_keep_to_their_grammar(model: Model) -> None:
    requests = requests_of(random.Random(0), 100)
    said = answers(Engine(model, prefix_cache=False), requests)
    ends = check(model, requests, said)
    assert ends["whole"] > 35
    assert ends["stop string"] > 8


@pytest.mark.parametrize("drafters", ["scripted", "suffix", "forced", "adversarial"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.features(
    "grammar", "sampling", "n", "penalties", "logprobs", "stop", "text drafts", "giving way", "prefix cache"
)
def test_nothing_changes_them(model: Model, drafters: str, seed: int) -> None:
    """Company, drafts good and bad, and giving way."""
    rng = random.Random(seed)
    requests = requests_of(rng, 16)
    plain = answers(Engine(model, prefix_cache=False), requests)
    if drafters == "suffix":
        controller = Controller([SuffixDrafter()])
    elif drafters == "forced":
        controller = Controller([GrammarDrafter()])
    else:
        controller = Controller([scripted(model, requests, plain, 0.1 if drafters == "scripted" else 0.9, 6)])
    engine = Engine(model, FREE, controller=controller, planner=forgetful(rng))  # type: ignore[arg-type]
    again = answers(engine, requests, rng)
    assert again == plain
    assert check(model, requests, again)["stop string"] > 0
    assert sum(c.drafted for c in controller.counts().values()) > 20
    if drafters == "scripted":
        assert sum(c.accepted for c in controller.counts().values()) > 50
    if drafters == "forced":  # every byte is a token here: there is one way to say what must be said
        (counts,) = controller.counts().values()
        assert counts.hits == counts.tries
        assert counts.drafted >= counts.accepted > 30, "stop strings end answers in the middle of drafts"


@pytest.mark.features(
    "grammar", "int8 cache", "sampling", "n", "penalties", "logprobs", "stop", "text drafts", "giving way",
    "prefix cache",
)  # fmt: skip
def test_nothing_changes_them_in_an_int8_cache(tiny_gguf: Path) -> None:
    """Nor where keys and values are rounded, and what is drafted is written over what was not taken."""
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1, kv_format=KVFormat.INT8))
    rng = random.Random(23)
    requests = requests_of(rng, 16)
    plain = answers(Engine(model, prefix_cache=False), requests)
    controller = Controller([GrammarDrafter(), scripted(model, requests, plain, 0.3, 6)])
    engine = Engine(model, FREE, controller=controller, planner=forgetful(rng))  # type: ignore[arg-type]
    assert answers(engine, requests, rng) == plain
    assert check(model, requests, plain).total() > 5
    assert sum(c.accepted for c in controller.counts().values()) > 30


@pytest.mark.parametrize("family", ["eagle3", "eagle3-tree", "dspark"])
@pytest.mark.features(
    "grammar", "sampling", "n", "penalties", "logprobs", "stop", "neural drafts", "giving way", "prefix cache"
)
def test_neural_drafts_change_nothing(family: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """Nor do drafters that know nothing of grammars; trees have masks of their own at every node."""
    model, drafter = loaded(family, tiny_gguf, tmp_path)
    drafter.prior = lambda draft_class: 0.9  # type: ignore[method-assign]
    rng = random.Random(5)
    requests = requests_of(rng, 24)
    plain = answers(Engine(model, prefix_cache=False), requests)
    controller = Eager([drafter])
    engine = Engine(model, SLOW, controller=controller, planner=forgetful(rng))  # type: ignore[arg-type]
    assert answers(engine, requests, rng) == plain
    assert check(model, requests, plain).total() > 3
    assert sum(c.drafted for c in controller.counts().values()) > 100


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.features(
    "grammar",
    "sampling",
    "n",
    "penalties",
    "logprobs",
    "stop",
    "text drafts",
    "giving way",
    "prefix cache",
    "moved out",
    "ahead",
)
def test_moving_out_and_planning_ahead_change_nothing(drafted: bool, tiny_gguf: Path) -> None:
    """Answers lose their blocks, some of which are kept beside the cache; free ones among them are planned ahead."""
    model = load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1, spare_bytes=1 << 20))
    rng, saved, ahead, accepted = random.Random(11), 0, 0, 0
    requests = requests_of(rng, 24)
    plain = answers(Engine(model, prefix_cache=False), requests)
    for _ in range(3):
        controller = Controller([GrammarDrafter(), scripted(model, requests, plain, 0.3, 6)]) if drafted else None
        small, planner = replace(model, blocks=14), Scenario.unkind(rng, model.spare_blocks)
        engine = Engine(small, replace(FREE, copy=0.0), planner, ahead=True, controller=controller)
        unforeseen = engine.drafting.unforeseen

        def counted(flight: Flight, look: Callable[[Flight], bool] = unforeseen) -> bool:
            nonlocal ahead
            ahead += (planned := look(flight))
            return planned

        engine.drafting.unforeseen = counted  # type: ignore[method-assign]
        assert answers(engine, requests, rng) == plain
        assert engine.preemptions > engine.saved
        saved += engine.saved
        accepted += sum(c.accepted for c in controller.counts().values()) if controller else 0
    assert saved > 5
    assert ahead > 30
    assert (accepted > 30) is drafted
    assert check(model, requests, plain).total() > 15


@pytest.mark.parametrize("drafter", ["scripted", "forced", "suffix"])
@pytest.mark.features(
    "rejection",
    "grammar",
    "sampling",
    "n",
    "penalties",
    "logprobs",
    "stop",
    "text drafts",
    "giving way",
    "prefix cache",
)
def test_by_rejection_answers_keep_to_their_grammar(model: Model, drafter: str) -> None:
    """They are other answers than plain ones, unless the temperature is 0, and none leaves its grammar."""
    rng = random.Random(17)
    requests = requests_of(rng, 40)
    plain = answers(Engine(model, prefix_cache=False), requests)
    made = {"scripted": scripted(model, requests, plain, 0.4, 6), "forced": GrammarDrafter(), "suffix": SuffixDrafter()}
    controller = Controller([made[drafter]])
    engine = Engine(model, FREE, controller=controller, verification=RejectionVerification(), planner=forgetful(rng))  # type: ignore[arg-type]
    said = answers(engine, requests, rng)
    assert check(model, requests, said).total() > 30
    for (_, params), one, other in zip(requests, said, plain, strict=True):
        if params.temperature == 0.0:
            assert one == other
    (counts,) = controller.counts().values()
    assert counts.accepted > 30
    if drafter == "scripted":
        assert said != plain
        assert counts.drafted > counts.accepted + 30, "drafts that leave the grammar are among them"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(KINDS)), st.integers(1, 20))
def test_what_must_follow(seed: int, kind: str, most: int) -> None:
    """All of it may follow, nothing else may, and looking changes nothing."""
    rng, one = random.Random(seed), CONSTRAINTS.constraint(KINDS[kind])
    for _ in range(rng.randint(0, 40)):
        if one.over:
            break
        mask = one.mask()
        one.accept(rng.choice([token for token in range(259) if allows(mask, token)]))
    before = one.mask().copy()
    forced = one.forced(most)
    assert len(forced) <= most
    assert np.array_equal(one.mask(), before)
    for token in forced:
        assert [t for t in range(259) if allows(one.mask(), t)] == [token]
        one.accept(token)
    if not one.over and len(forced) < most:
        assert sum(allows(one.mask(), token) for token in range(259)) > 1


ONE_WAY = [
    'start: "Name: " name "\\nAge: " AGE\nname[stop="\\n"]: /[a-z]*/\nAGE: /[0-9]{1,3}/',
    'start: "Name: " name\nname[max_tokens=5]: /[a-z]*/',
]


@pytest.mark.parametrize("lark", ONE_WAY)
def test_grammars_that_take_nothing_back_are_not_drafted_for(model: Model, lark: str) -> None:
    """Asking them about a draft would end the answer."""
    requests = [([1, 2, n], SamplingParams(grammar=g.of_lark(lark), seed=n, max_tokens=60)) for n in range(6)]
    plain = answers(Engine(model, prefix_cache=False), requests)
    drafters = [GrammarDrafter(), scripted(model, requests, plain, 0.3, 6)]
    engine = Engine(model, FREE, controller=Controller(drafters))
    assert answers(engine, requests) == plain
    assert plain[0][0].text.startswith("Name: ")
    assert not CONSTRAINTS.constraint(g.of_lark(lark)).draftable
    assert all(CONSTRAINTS.constraint(grammar).draftable for grammar in KINDS.values())


def test_a_draft_that_leaves_the_grammar_is_caught(model: Model) -> None:
    """The test above must be able to fail: without masks on drafts' rows the answer would be another one."""
    params = SamplingParams(grammar=KINDS["regex"], temperature=0.0, max_tokens=40)
    prompt = [7, 8, 9]
    plain = answers(Engine(model, prefix_cache=False), [(prompt, params)])

    def careless(self: GrammarConstraint, token: int) -> Mask | None:
        return None if self._before else ask(self, token)

    ask = GrammarConstraint.instead

    controller = Controller([scripted(model, [(prompt, params)], plain, 0.0, 6)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarConstraint, "instead", careless)
        changed = answers(Engine(model, FREE, controller=controller), [(prompt, params)])
    assert changed != plain


@pytest.mark.features("grammar", "stop")
def test_an_answer_ends_with_its_grammar(model: Model) -> None:
    for params in (
        SamplingParams(grammar=KINDS["choice"], temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(grammar=KINDS["choice"], temperature=0.0, max_tokens=40, min_tokens=20),
        SamplingParams(grammar=KINDS["choice"], temperature=0.0, max_tokens=40, stop=("zzz",)),
    ):
        (said,) = answers(Engine(model), [([1, 2], params)])
        assert said[0].text in ("yes", "no", "perhaps")
        assert said[0].finish == "stop"
    (said,) = answers(Engine(model), [([1, 2], SamplingParams(grammar=KINDS["schema"], max_tokens=3, seed=1))])
    assert said[0].finish == "length"
    stopped = SamplingParams(grammar=KINDS["schema"], max_tokens=90, seed=1, stop=('"age',))
    (said,) = answers(Engine(model), [([1, 2], stopped)])
    assert said[0].text.startswith('{"name": "')
    assert '"age' not in said[0].text


IN_TEXT = g.of_parts_in_text([g.Part('<t>{"name": ', {"enum": ["a", "be"]}, "}")], "<t>", {})
"""Tools' calls in a text that is free up to their mark."""


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 258), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_masks_along_a_draft_are_those_after_each_token(seed: int, tokens: list[int], tree: bool, free: bool) -> None:
    """A chain's or a tree's masks are what fresh states say, and looking changes nothing."""
    rng = random.Random(seed)
    grammar = IN_TEXT if free else KINDS["schema"]
    one, before = CONSTRAINTS.constraint(grammar), [*(rng.choice([b"a<", b"a<t", b"<t>{"]) if free else b'{"name": "')]
    assert one.draftable
    for token in before:
        one.accept(token)
    likely = b'<t>{"name": "a"}' if free else b'abc", :ge'
    tokens = [rng.choice(likely) if rng.random() < 0.7 else token for token in tokens]
    if free and rng.random() < 0.5:
        tokens = [*likely[len(bytes(before).removeprefix(b"a")) :]][: len(tokens)]  # a call, or its beginning
    parents = tuple(rng.randrange(-1, place) if tree else place - 1 for place in range(len(tokens)))
    draft = Draft(tuple(tokens), parents, (0,) * len(tokens), "x")
    untouched = one.mask().copy()
    found = one.masks(draft)
    assert np.array_equal(one.mask(), untouched)
    assert np.array_equal(found[0], untouched)
    for node, mask in enumerate(found[1:]):
        fresh, valid = CONSTRAINTS.constraint(grammar), True
        for token in [*before, *draft.path(node)]:
            valid = valid and allows(fresh.mask(), token) and not fresh.over
            if valid:
                fresh.accept(token)
        assert (mask is not None) is valid
        if mask is not None:
            assert np.array_equal(mask, fresh.mask())
    assert ROOT == -1


class _Tokenizer:
    """As much of one as a grammar asks for: bytes, and an end."""

    def __init__(self) -> None:
        self.token_bytes = [*(bytes([n]) for n in range(256)), b"", b"", b""]
        self.special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": EOS}
        self.eos, self.bos = frozenset({EOS}), 257

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


CONSTRAINTS = Grammars(_Tokenizer(), 259)  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": False},
])  # fmt: skip
def test_what_never_ends_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no text ends"):
        CONSTRAINTS.learn(g.of_schema(schema))


def test_an_answer_whose_grammar_became_too_complex_is_not_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is all that a failed grammar leaves: what stands there is no answer that was finished."""
    monkeypatch.setattr("slipstream.engine.grammar.limits", lambda: LLParserLimits(max_lexer_states=60))
    grammar = g.of_regex("([a-z]{1,9}[0-9]{1,9}){1,30}")
    (said,) = answers(Engine(model), [([1, 2], SamplingParams(grammar=grammar, seed=1, max_tokens=200))])
    assert said[0].finish == "length"
    assert len(said[0].tokens) < 200


def test_a_reference_to_itself_is_no_bomb(model: Model) -> None:
    """A schema of trees refers to itself, rightly."""
    schema = {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                           "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/node",
    }  # fmt: skip
    params = SamplingParams(grammar=g.of_schema(schema), seed=3, max_tokens=400)
    (said,) = answers(Engine(model), [([1, 2], params)])
    if said[0].finish == "stop":
        json.loads(said[0].text)
    assert said[0].text.startswith('{"v": ')
