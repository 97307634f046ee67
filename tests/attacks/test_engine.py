"""What the engine is told: drafts of hostile drafters, and numbers that are none or too large (classes 7 and 8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.program import Draft, Proposal
from slipstream.program.sampling import SamplingParams
from slipstream.serving.openapi import BODIES
from slipstream.speculation import Ask, Controller, Drafter, ExactVerification, Verification
from slipstream.speculation.rejection import RejectionVerification
from tests.serving.conftest import Server
from tests.speculation.scripted import FREE
from tests.speculation.test_identity import answers


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


class _Rogue(Drafter):
    """Drafts the same tokens whatever was said, perhaps as if drawn from `proposal`."""

    name = "rogue"

    def __init__(self, tokens: tuple[int, ...], proposal: Proposal | None = None):
        self.tokens, self.proposal, self.asked = tokens, proposal, 0

    def prior(self, draft_class: int) -> float:
        return 0.99

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        self.asked += len(asks)
        return [self._propose(self.tokens[: ask.most]) for ask in asks]

    def _propose(self, tokens: tuple[int, ...]) -> Draft:
        proposals = (self.proposal,) * len(tokens) if self.proposal is not None else None
        return Draft.chain(tokens, (0,) * len(tokens), self.name, proposals)


NAN, SURE = np.full(259, np.nan, np.float32), np.full(259, 2.0, np.float32)


class Test7Drafts:
    REQUESTS = (
        ([4, 5], SamplingParams(temperature=0.7, top_k=1, seed=4, max_tokens=20, ignore_eos=True)),
        ([6], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)),
        ([1, 2, 3], SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)),
    )

    @pytest.mark.parametrize("rule", [ExactVerification, RejectionVerification])
    @pytest.mark.parametrize("tokens", [(-1, -1), (259,), (1 << 30,), (-(1 << 30), 5), (5, 300, 7), (1 << 70,)])
    def test_a_token_that_does_not_exist_is_never_said(
        self, model: Model, tokens: tuple[int, ...], rule: type[Verification]
    ) -> None:
        """It never reaches a kernel or a rule, and nobody's answer ends for it."""
        rogue, requests = _Rogue(tokens), self.REQUESTS
        if rule is RejectionVerification and tokens[0] == 5:  # which may hold: other tokens of the same law follow
            requests = requests[:2]
        engine = Engine(model, FREE, controller=Controller([rogue]), verification=rule())
        assert answers(engine, requests) == answers(Engine(model), requests)
        assert rogue.asked > 0

    @pytest.mark.parametrize(
        "proposal",
        [
            Proposal(NAN), Proposal(-NAN), Proposal(SURE), Proposal(-SURE), Proposal(np.full(259, np.inf, np.float32)),
            Proposal(np.zeros(259, np.float32)), Proposal(np.ones(3, np.float32)), Proposal(np.ones(500, np.float32)),
            Proposal(np.ones(1, np.float32), np.array([300], np.int32)),
            Proposal(np.ones(1, np.float32), np.array([-1], np.int32)),
            Proposal(np.array([np.nan], np.float32), np.array([7], np.int32)),
        ],
    )  # fmt: skip
    def test_a_proposal_that_is_no_distribution(self, model: Model, proposal: Proposal) -> None:
        """What cannot be said is not said because a drafter is sure of it: with top_k=1 there is one answer."""
        requests = [
            (prompt, SamplingParams(temperature=0.7, top_k=1, seed=4, max_tokens=20, ignore_eos=True))
            for prompt in ([1, 2, 3], [9] * 40)
        ]
        plain, rogue = answers(Engine(model), requests), _Rogue((7, 8, 9), proposal)
        engine = Engine(model, FREE, controller=Controller([rogue]), verification=RejectionVerification())
        assert answers(engine, requests) == plain
        assert rogue.asked > 0


class Test8Numbers:
    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 16384}, {"n": 0}, {"n": -1}, {"temperature": "nan"}, {"temperature": -0.1}, {"top_k": 1.5},
            {"top_k": -5}, {"top_p": 2}, {"max_tokens": -1}, {"max_tokens": 1e400}, {"logit_bias": {"999999": 1}},
            {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 1e9}}, {"min_tokens": -1}, {"logprobs": 10**9},
            {"stop_token_ids": [-1]}, {"stop_token_ids": [10**12]}, {"seed": "x"}, {"presence_penalty": 1e300},
            {"prompt": [10**20]}, {"prompt": [-1]}, {"prompt": [1.5]}, {"priority": "high"},
        ],
    )  # fmt: skip
    def test_a_number_that_is_none_is_a_400(self, tenants: Server, fields: dict[str, Any]) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 2, **fields}).replace("Infinity", "1e999")
        with tenants.client() as http:
            assert http.post("/v1/completions", content=body).status_code == 400

    def test_not_a_number_as_such(self, tenants: Server) -> None:
        with tenants.client() as http:
            for body in ('{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "top_p": Infinity}'):
                assert http.post("/v1/completions", content=body).status_code == 400


USER = [{"role": "user", "content": "x"}]
NEEDED = {
    "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": USER}, "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 2}, "/v1/embeddings": {"input": "x"},
}  # fmt: skip
HUGE = 10**30
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 101, HUGE, -HUGE, "hot"], "top_p": [-0.1, 0, 1.1, HUGE], "min_p": [-0.1, 1.1, HUGE],
    "top_k": [-1, 1.5, HUGE, -HUGE], "n": [-1, 0, 1.5, 16384, HUGE], "seed": ["x", 1.5, []],
    "presence_penalty": [-3, 3, HUGE], "frequency_penalty": [-3, 3, -HUGE], "repetition_penalty": [-1, 0, 101, HUGE],
    "min_tokens": [-1, 1.5, HUGE], "max_tokens": [-1, 0, 1.5, HUGE, -HUGE], "priority": [1.5, HUGE, -HUGE, "high"],
    "max_completion_tokens": [-1, 0, 1.5, HUGE], "max_output_tokens": [-1, 0, 1.5, HUGE],
    "stop_token_ids": [[-1], [1.5], [HUGE], [-HUGE], 5], "dimensions": [-1, 0, 1.5, HUGE], "top_logprobs": [-1, 21],
    "logit_bias": [{"-1": 1}, {str(HUGE): 1}, {"5": 1e9}, {"5": -HUGE}, {"1.5": 1}, {"9" * 5000: 1}],
}  # fmt: skip


@pytest.mark.parametrize("path", NEEDED)
class Test8NumbersEverywhere:
    """Every field of every body that is a number: what is none, or out of its range, is a 400 that names it."""

    def fields(self, path: str) -> list[str]:
        return [name for name in BODIES[path][1].__struct_fields__ if name in WRONG]

    @pytest.mark.parametrize(
        "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-9999e", "0x10", "+1", "01"]
    )
    def test_what_is_no_number(self, tenants: Server, path: str, number: str) -> None:
        with tenants.client() as http:
            for name in self.fields(path):
                body = json.dumps({**NEEDED[path], name: "HERE"}).replace('"HERE"', number)
                answer = http.post(path, content=body)
                assert answer.status_code == 400, (body, answer.text)

    def test_what_is_out_of_range(self, tenants: Server, path: str) -> None:
        assert self.fields(path)
        with tenants.client() as http:
            for name in self.fields(path):
                for value in WRONG[name]:
                    answer = http.post(path, json={**NEEDED[path], name: value})
                    assert answer.status_code == 400, (name, value, answer.text)
                    said = "max_tokens" if name.startswith("max_") else name.removesuffix("s")
                    assert said in answer.text or name in answer.text, (name, value, answer.text)

    def test_those_that_are_right(self, tenants: Server, path: str) -> None:
        """The largest that are taken reach the engine."""
        right = {"priority": 100, "seed": -HUGE, "top_k": 1 << 30, "temperature": 100.0, "logit_bias": {"258": -100}}
        body = {name: value for name, value in right.items() if name in self.fields(path)}
        body |= {name: 2 for name in ("max_tokens", "max_output_tokens") if name in self.fields(path)}
        with tenants.client() as http:
            answer = http.post(path, json={**NEEDED[path], **body})
        assert answer.status_code == 200, answer.text


def test_8_a_response_is_one(tenants: Server) -> None:
    """`n` is none of this API's: what more than one would mean is not defined."""
    with tenants.client() as http:
        for stream in (False, True):
            answer = http.post("/v1/responses", json={"input": "x", "n": 2, "max_output_tokens": 2, "stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "n"
