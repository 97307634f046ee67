"""The official client against a live server: answers, streams, log-probabilities, errors."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.engine.admission import check_request
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.serving.openai import engine_refused
from tests.serving.conftest import KEY, Server

MESSAGES = [{"role": "user", "content": "Tell me about lighthouses."}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def ask(client: openai.OpenAI, **options: object):
    defaults = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "seed": 3, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(**{**defaults, **options})  # type: ignore[call-overload]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"


def test_the_server_says_what_the_engine_says(client: openai.OpenAI, tiny_gguf: Path) -> None:
    model = load_model(str(tiny_gguf), LoadOptions())
    engine = Engine(model)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    expected = "".join(c.text for c in engine.run(engine.add(model.chat_prompt(MESSAGES), params)))
    answer = ask(client, temperature=0.8)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(model.chat_prompt(MESSAGES))


@pytest.mark.features("streaming", "stop")
@pytest.mark.features("streaming", "n", "stop", "sampling")
def test_a_stop_string_is_never_seen_in_a_stream(client: openai.OpenAI) -> None:
    """However the text falls into events: those of a stream are the whole answer, up to where it stops."""
    settings = {"temperature": 1.0, "n": 3, "max_tokens": 60}
    plain = [choice.message.content for choice in ask(client, **settings).choices]
    stops = sorted({text[place : place + 2] for text in plain for place in (7, 20) if len(text) > 24})
    assert stops
    whole = [choice.message.content for choice in ask(client, stop=stops[:4], **settings).choices]
    texts, reasons = [""] * 3, [""] * 3
    for event in ask(client, stop=stops[:4], stream=True, **settings):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == whole
    assert whole != plain
    assert "stop" in reasons
    assert not any(stop in text for text in texts for stop in stops[:4])


@pytest.mark.features("streaming", "n", "sampling")
def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=1.0, n=2)
    texts, reasons, usage = ["", ""], {}, None
    for event in ask(client, temperature=1.0, n=2, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 40


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert len(content) == 20
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs)
    streamed = [
        e for event in ask(client, logprobs=True, top_logprobs=3, temperature=0, stream=True)
        for choice in event.choices if choice.logprobs for e in choice.logprobs.content
    ]  # fmt: skip
    assert streamed == content


def test_stop_and_bias(client: openai.OpenAI) -> None:
    full = ask(client, temperature=0).choices[0].message.content
    stopped = ask(client, temperature=0, stop=[full[4:6]])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == full[: full.index(full[4:6])]
    forced = ask(client, temperature=0, logit_bias={"65": 100}, max_tokens=3)
    assert len(set(forced.choices[0].message.content)) == 1


def test_completions(client: openai.OpenAI) -> None:
    both = client.completions.create(
        model="tiny", prompt=["ab", "cd"], max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    for prompt, choice in zip(("ab", "cd"), both.choices, strict=True):
        alone = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        assert alone.choices[0].text == choice.text
        assert len(choice.logprobs.tokens) == 8
        assert len(choice.logprobs.top_logprobs[0]) == 2
    ids = client.completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=4, stream=True, extra_body={"ignore_eos": True}
    )
    assert sum(len(event.choices) for event in ids) >= 1


def test_prefixes_are_reused_and_said(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "A sentence that is said again. " * 6}]
    first, second = (ask(client, messages=long, temperature=0) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= 160
    other = ask(client, messages=long, temperature=0, extra_body={"cache_salt": "mine", "ignore_eos": True})
    assert other.usage.prompt_tokens_details.cached_tokens == 0, "a salt keeps caches apart"


def test_many_at_once_get_the_same_bits(client: openai.OpenAI) -> None:
    def one(seed: int) -> str:
        return ask(client, seed=seed, temperature=1.0).choices[0].message.content

    alone = [one(seed) for seed in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == alone


def test_timings_of_several_choices(client: openai.OpenAI) -> None:
    """Tokens a second are those that each had, not those of all."""
    answer = ask(client, n=4, extra_body={"timings": True, "ignore_eos": True})
    (timings,) = answer.timings
    assert (timings["choices"], timings["generated_tokens"]) == (4, 80)
    rate = 19 / timings["decode_seconds"]
    ceiling = client.models.retrieve("tiny").ceiling_tok_s  # type: ignore[attr-defined]
    assert timings["ceiling_fraction"] == pytest.approx(rate / ceiling, rel=0.01)


def test_timings(client: openai.OpenAI) -> None:
    (timings,) = ask(client, extra_body={"timings": True, "ignore_eos": True}).timings
    assert timings["generated_tokens"] == 20
    assert timings["decode_seconds"] > 0
    assert timings["ceiling_fraction"] > 0


BAD: list[tuple[dict[str, object], str]] = [
    ({"temperature": 1000}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 16384}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "no role"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"extra_body": {"best_of": 4}}, "best_of"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"extra_body": {"top_k": 1.5}}, "top_k"),
    ({"extra_body": {"min_p": "x"}}, "min_p"),
    ({"extra_body": {"stop_token_ids": [99999]}}, "stop_token_ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param"), BAD)
def test_bad_fields_are_named(client: openai.OpenAI, options: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **options)
    assert error.value.body["type"] == "invalid_request_error"  # type: ignore[index]
    assert (error.value.param, error.value.code) == (param, None), error.value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"}), ("responses", {"input": "x"})],
)
@pytest.mark.parametrize("field", [{"stop_token_ids": [99999]}, {"logit_bias": {"99999": 1}}])
def test_tokens_that_the_model_does_not_have(
    server: Server, path: str, asked: dict[str, object], field: dict[str, object], stream: bool
) -> None:
    """Only the engine knows which there are; what it refuses is told by the field's name too."""
    with server.client() as http:
        answer = http.post(f"/v1/{path}", json={**asked, **field, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, *field, None), error


@pytest.mark.parametrize(
    ("prompt", "blocks", "code"),
    [
        ([1] * 99, 9, "context_length_exceeded"),
        ([1] * 60, 1, "context_length_exceeded"),
        ([], 9, None),
        ([256], 9, None),
    ],
)
def test_prompts_that_the_engine_refuses(prompt: list[int], blocks: int, code: str | None) -> None:
    """Only one that is too long is called that."""
    model: Any = SimpleNamespace(config=SimpleNamespace(vocabulary=256), max_len=99)
    with pytest.raises(UsageError) as error:
        check_request(model, blocks, prompt, SamplingParams())
    refused = engine_refused(error.value, "prompt")
    assert (refused.status, refused.param, refused.code) == (400, "prompt", code)


def test_too_long_a_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


def test_wrong_model_and_wrong_key(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="another")
    assert missing.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_tokenize_and_back(server: Server) -> None:
    with server.client() as http:
        tokens = http.post("/tokenize", json={"prompt": "hëllo <|im_start|>", "add_special_tokens": False}).json()
        assert tokens["count"] == len(tokens["tokens"])
        back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        assert back["prompt"] == "hëllo <|im_start|>"
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["count"] > 10


DASHBOARD = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "iteration_tokens_total_bucket",
)
"""vLLM's names that dashboards look for."""


def test_metrics_and_explain(server: Server, client: openai.OpenAI) -> None:
    ask(client, max_tokens=60)
    with server.client() as http:
        explained = http.get("/explain").json()
        assert sum(explained["parts"].values()) == pytest.approx(explained["seconds_per_token"])
        steps: dict[str | None, float] = {}
        end = time.monotonic() + 10
        while steps.get("1.0", 0.0) < 59 and time.monotonic() < end:  # the engine is asked how it is once a second
            text = http.get("/metrics").text
            families = {f.name: f for f in text_string_to_metric_families(text)}
            steps = {s.labels.get("le"): s.value for s in families["vllm:iteration_tokens_total"].samples}
        assert steps["1.0"] >= 59, "decodes of one user"
        for name in DASHBOARD:
            assert f"vllm:{name}{{" in text, name
        gaps = {s.name: s.value for s in families["vllm:inter_token_latency_seconds"].samples if "bucket" not in s.name}
        assert gaps["vllm:inter_token_latency_seconds_count"] >= 59
        assert 'slipstream_waterfall_seconds_per_token{model_name="tiny",part="ceiling"}' in text
        assert json.loads(http.get("/version").text)["version"]


@pytest.mark.parametrize("token", [-1, 10**6])
def test_token_ids_outside_the_vocabulary(server: Server, token: int) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": [1, token], "max_tokens": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "vocabulary" in answer.json()["error"]["message"] or "from 0 to" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "chat_template", "{{ x }}"),
        ("/v1/chat/completions", "continue_final_message", True),
        ("/v1/chat/completions", "documents", [{"text": "x"}]),
        ("/v1/completions", "bad_words", ["x"]),
        ("/v1/completions", "allowed_token_ids", [1]),
        ("/v1/completions", "use_beam_search", True),
        ("/v1/completions", "prompt_logprobs", 1),
        ("/v1/completions", "skip_special_tokens", False),
        ("/v1/completions", "best_of", 3),
        ("/v1/responses", "conversation", "c"),
        ("/v1/responses", "top_logprobs", 3),
        ("/v1/responses", "max_tool_calls", 1),
    ],
)
def test_what_would_change_the_answer_is_not_ignored(server: Server, path: str, field: str, value: object) -> None:
    asked = {"messages": MESSAGES, "prompt": "x", "input": "x"}
    named = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    with server.client() as http:
        refused = http.post(path, json={named: asked[named], "max_tokens": 2, field: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
