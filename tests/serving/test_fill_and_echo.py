"""Filling in between two texts, and saying the prompt again: what the model is asked, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers

from slipstream.engine import LoadOptions, load_model
from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.precision.quality import scores_of
from slipstream.program.sampling import SamplingParams
from slipstream.serving.app import Api
from slipstream.serving.errors import ApiError
from slipstream.serving.exchange import ServerLimits
from slipstream.serving.keys import Keys
from slipstream.serving.prompts import Prompts
from slipstream.text import Tokenizer
from slipstream.text.tokenizer import byte_alphabet
from tests.serving.conftest import KEY, Server

BOS = 256
FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
}
PREFIX, SUFFIX = "def f(", "):\n    pass\né"


def tokenizer_with(names: tuple[str, ...], *, special: bool = True, add_bos: bool = False) -> Tokenizer:
    """Bytes, a beginning of text, and some tokens besides, which may or may not be called special."""
    alphabet = byte_alphabet()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(dict(alphabet), []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    added = [tokenizers.AddedToken(name, special=special, normalized=False) for name in names]
    inner.add_special_tokens(added) if special else inner.add_tokens(added)
    ids = {name: 257 + place for place, name in enumerate(names)}
    spelt = [bytes([n]) for n in range(256)] + [b""] + [b"" if special else name.encode() for name in names]
    return Tokenizer(inner, spelt, {"<s>": BOS} | (ids if special else {}), bos=BOS, add_bos=add_bos)


class Client:
    """Stands for an engine: keeps what it was asked, and says two pieces."""

    ready, healthy, open, stats, restarts = True, True, 0, None, 0

    def __init__(self, vocabulary: int = 300):
        self.info = SimpleNamespace(max_len=200, vocabulary=vocabulary)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, tokens: list[int], params: SamplingParams, terms: Any) -> AsyncIterator[Any]:
        self.asked.append((tokens, params))
        timings = RequestTimings(len(tokens), 0, 2 * params.n, 0.0, 0.0, 0.0, 0, 0.0)
        for choice in range(params.n):
            yield [Chunk(0, choice, f"a{choice}", (97,))], None
            yield [Chunk(0, choice, "b", (98,), finish_reason="stop")], timings if choice == params.n - 1 else None


def between(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    return asyncio.run(Prompts(Client(), tokenizer, None).between(prefix, suffix))  # type: ignore[arg-type]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_asked_of_a_model_that_learned_to_fill_in(family: str, special: bool, add_bos: bool) -> None:
    """Its own tokens around both texts, after whatever its prompts begin with."""
    tokenizer = tokenizer_with(("<other>", *FAMILIES[family]), special=special, add_bos=add_bos)
    start = [BOS] if add_bos else []
    assert between(tokenizer, PREFIX, SUFFIX) == [*start, 258, *PREFIX.encode(), 259, *SUFFIX.encode(), 260]
    assert between(tokenizer, "", "x") == [*start, 258, 259, *b"x", 260]
    assert tokenizer.encode("x") == [*start, *b"x"]


def test_texts_cannot_write_the_tokens_themselves() -> None:
    names = FAMILIES["qwen"]
    assert between(tokenizer_with(names), names[1], names[2]) == [
        257, *names[1].encode(), 258, *names[2].encode(), 259
    ]  # fmt: skip


@pytest.mark.parametrize("names", [(), FAMILIES["qwen"][:2], ("<fim_prefix>", "<|fim_suffix|>", "<fim_middle>")])
def test_a_model_that_never_learned_it_is_not_asked(names: tuple[str, ...]) -> None:
    with pytest.raises(ApiError) as error:
        between(tokenizer_with(names), PREFIX, SUFFIX)
    assert (error.value.status, error.value.param) == (400, "suffix")


@pytest.mark.parametrize(("prefix", "suffix", "field"), [
    ("\ud800", "x", "prompt"), ("x", "\ud800", "suffix"), ("x" * 10_000, "x", "prompt"), ("x", "x" * 10_000, "suffix"),
])  # fmt: skip
def test_the_text_at_fault_is_named(prefix: str, suffix: str, field: str) -> None:
    with pytest.raises(ApiError) as error:
        between(tokenizer_with(FAMILIES["qwen"]), prefix, suffix)
    assert (error.value.status, error.value.param) == (400, field)


def posted(client: Client, body: dict[str, Any]) -> httpx.Response:
    """What /v1/completions answers over a stand-in of an engine."""
    tokenizer = tokenizer_with(FAMILIES["qwen"], add_bos=True)
    app = Api(client, tokenizer, None, "tiny", Keys([]), ServerLimits()).app()  # type: ignore[arg-type]

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post("/v1/completions", json=body)

    return asyncio.run(run())


def test_a_suffix_reaches_the_engine() -> None:
    """For every prompt; an empty one asks for nothing."""
    client = Client()
    body = {"prompt": [PREFIX, "g("], "suffix": ")", "n": 2, "max_tokens": 4, "echo": True}
    answer = posted(client, body).json()
    assert [tokens for tokens, _ in client.asked] == [
        [BOS, 257, *text.encode(), 258, *b")", 259] for text in (PREFIX, "g(")
    ]  # fmt: skip
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {0: PREFIX + "a0b", 1: PREFIX + "a1b", 2: "g(a0b", 3: "g(a1b"}
    for nothing in ("", None):
        client = Client()
        assert posted(client, {"prompt": "ab", "suffix": nothing}).status_code == 200
        assert [tokens for tokens, _ in client.asked] == [[BOS, *b"ab"]]


def test_a_suffix_that_cannot_be_is_refused_by_name() -> None:
    for body, field in (
        ({"prompt": [97, 98], "suffix": "x"}, "suffix"), ({"prompt": "ab", "suffix": "x" * 198}, "prompt"),
        ({"prompt": "ab", "suffix": 5}, "suffix"), ({"prompt": "ab", "suffix": ["x"]}, "suffix"),
        ({"prompt": "ab", "suffix": "x", "echo": True, "logprobs": 1}, "suffix"),
    ):  # fmt: skip
        client = Client()
        answer = posted(client, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body
        assert not client.asked


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    more = {"ignore_eos": True} | options.pop("more", {})
    settings = {"model": "tiny", "prompt": "Hellö, wörld", "max_tokens": 12, "seed": 3, **options}
    return client.completions.create(**settings, extra_body=more)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[dict[int, str], list[Any]]:
    """Every choice's text, put together, and all events."""
    texts: dict[int, str] = {}
    events = list(complete(client, stream=True, **options))
    for event in events:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, events


def texts_of(done: Any) -> dict[int, str]:
    return {choice.index: choice.text for choice in done.choices}


def test_a_model_without_the_tokens_refuses_a_suffix(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, suffix="x")
    assert error.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, suffix="x", prompt=[1, 2])
    assert error.value.param == "suffix"
    assert texts_of(complete(client, suffix="")) == texts_of(complete(client))


def ids(text: str) -> list[int]:
    """The tiny model's tokens."""
    order = list(byte_alphabet().values())
    return [order.index(byte) for byte in text.encode()]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("prompt", "said"), [
    ("Hellö, wörld", ["Hellö, wörld"]), (["One", "Two \n"], ["One", "Two \n"]), (ids("hö"), ["hö"]),
    ([ids("hi"), ids("!")], ["hi", "!"]),
])  # fmt: skip
def test_echo_is_the_prompt_and_the_answer(client: openai.OpenAI, prompt: Any, said: list[str], n: int) -> None:
    """Streamed or whole, for every choice of every prompt; it costs nothing and changes nothing else."""
    plain = complete(client, prompt=prompt, n=n, temperature=1.0)
    prompts = [text for text in said for _ in range(n)]
    echoed = complete(client, prompt=prompt, n=n, temperature=1.0, echo=True)
    assert texts_of(echoed) == {at: prompts[at] + text for at, text in texts_of(plain).items()}
    assert len(texts_of(echoed)) == len(prompts)
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens
    assert echoed.usage.prompt_tokens == plain.usage.prompt_tokens
    assert [c.finish_reason for c in echoed.choices] == [c.finish_reason for c in plain.choices]
    texts, events = streamed(client, prompt=prompt, n=n, temperature=1.0, echo=True)
    assert texts == texts_of(echoed)
    for at, text in enumerate(prompts):
        first = next(choice for event in events for choice in event.choices if choice.index == at)
        assert (first.text, first.finish_reason) == (text, None), "the prompt comes first"
    assert streamed(client, prompt=prompt, n=n, temperature=1.0)[0] == texts_of(plain)


def test_what_is_echoed_is_not_looked_at(client: openai.OpenAI) -> None:
    """A stop string in the prompt does not end the answer, which may still have some of it."""
    plain = texts_of(complete(client, temperature=0))[0]
    stop = plain[4:6]
    prompt = f"Hellö, wörld{stop}"
    answer = texts_of(complete(client, prompt=prompt, temperature=0))[0]
    for options in ({"stop": [stop]}, {"stop": ["wörld"]}):
        echoed = complete(client, prompt=prompt, temperature=0, echo=True, **options).choices[0]
        assert echoed.text == prompt + answer.partition(options["stop"][0])[0]
    assert texts_of(complete(client, echo=False, temperature=0)) == {0: plain}


PROMPTS = ["Hell\u00f6, w\u00f6rld", "x", "one two three " * 20]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_echoed_prompt_is_scored(client: openai.OpenAI, tiny_gguf: Path, prompt: str) -> None:
    """Each token after those before it, the first by nothing; with the likeliest at its place; then the answer's."""
    done = complete(client, prompt=prompt, echo=True, logprobs=3, temperature=0)
    (choice,) = done.choices
    scores, tokens = choice.logprobs, ids(prompt)
    count = len(tokens)
    assert (len(scores.tokens), choice.text[: len(prompt)]) == (count + 12, prompt)
    assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
    assert scores.text_offset == [len("".join(scores.tokens[:place])) for place in range(count + 12)]
    reference = load_model(str(tiny_gguf), LoadOptions(backend="reference")).executable
    logits = scores_of(reference)(tokens, 0, count)[:-1]
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = scores.token_logprobs[1:count]
    assert np.allclose(found, wanted[range(count - 1), tokens[1:]], atol=0.5), "as near as int8 is to float32"
    best = [max(top.values()) for top in scores.top_logprobs[1:count]]
    assert np.allclose(best, wanted.max(-1), atol=0.5)
    again = complete(client, prompt=prompt, logprobs=3, temperature=0).choices[0]
    assert again.text == choice.text.removeprefix(prompt)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert getattr(scores, name)[count:] == getattr(again.logprobs, name), name


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPTS, [ids(prompt) for prompt in PROMPTS]])
def test_scored_streamed_whole_and_alone(client: openai.OpenAI, prompt: Any, n: int) -> None:
    """The same for every choice of every prompt, in events and with nothing generated; answers are what they were."""
    settings: dict[str, Any] = {"prompt": prompt, "n": n, "logprobs": 2, "temperature": 1.0}
    whole, plain = complete(client, echo=True, **settings), complete(client, **settings)
    texts, events = streamed(client, echo=True, **settings)
    silent = complete(client, echo=True, **{**settings, "max_tokens": 0})
    assert texts == texts_of(whole)
    assert texts_of(silent) == {at: PROMPTS[at // n] for at in range(n * len(PROMPTS))}
    assert (silent.usage.prompt_tokens, silent.usage.completion_tokens) == (whole.usage.prompt_tokens, 0)
    for at, (choice, mute, after) in enumerate(zip(whole.choices, silent.choices, plain.choices, strict=True)):
        count = len(ids(PROMPTS[at // n]))
        assert mute.finish_reason == "length"
        pieces = [c.logprobs for event in events for c in event.choices if c.index == at and c.logprobs]
        for name, values in choice.logprobs.model_dump().items():
            assert values[:count] == getattr(mute.logprobs, name)
            assert values == [value for piece in pieces for value in getattr(piece, name)]
            if name != "text_offset":
                assert values[count:] == getattr(after.logprobs, name)


def test_a_text_has_the_scores_that_it_was_said_with(client: openai.OpenAI) -> None:
    more = {"guided_regex": "[a-z ]{12}", "ignore_eos": False}  # of letters that tell which token it was
    said = complete(client, prompt=ids("x"), temperature=0, logprobs=1, more=more).choices[0]
    tokens = [*ids("x"), *ids(said.text)]
    scores = complete(client, prompt=tokens, echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    assert len(tokens) == 13
    assert scores.token_logprobs[1:] == pytest.approx(said.logprobs.token_logprobs, abs=1e-5)
    assert [*map(dict.keys, scores.top_logprobs[1:])] == [*map(dict.keys, said.logprobs.top_logprobs)]


def test_nothing_generated_without_scores(client: openai.OpenAI) -> None:
    done = complete(client, prompt=["a", "b"], echo=True, max_tokens=0)
    assert [(c.text, c.logprobs, c.finish_reason) for c in done.choices] == [
        ("a", None, "length"),
        ("b", None, "length"),
    ]
    for options, field in (
        ({}, "max_tokens"), ({"echo": True, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 20, "prompt": ["x" * 400] * 40}, "logprobs"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            complete(client, max_tokens=0, **options)
        assert error.value.param == field


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_logprobs_are_the_whole_ones(client: openai.OpenAI, n: int) -> None:
    """Offsets go on from event to event."""
    whole = complete(client, logprobs=2, n=n, temperature=1.0)
    found: dict[int, dict[str, list[Any]]] = {}
    for event in streamed(client, logprobs=2, n=n, temperature=1.0)[1]:
        for choice in event.choices:
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                found.setdefault(choice.index, {}).setdefault(name, []).extend(values)
    assert found == {choice.index: choice.logprobs.model_dump() for choice in whole.choices}
    for choice in whole.choices:
        tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
        assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
        assert len(tokens) == 12
