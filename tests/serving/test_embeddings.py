"""Embeddings: those of an independent implementation, while answers go on, and nothing of the cache is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.engine.embedding import Embedder
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from tests.engine.test_jitter import collect
from tests.serving.conftest import KEY, Server


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


def embedded(engine: Engine, prompts: list[list[int]], pooling: str, *, normalize: bool) -> list[np.ndarray]:
    embedder = Embedder(engine)
    embedder.add(1, prompts, pooling, normalize=normalize)
    while (done := embedder.step()) is None:
        engine.check()
    engine.check()
    assert not embedder.busy
    return [np.frombuffer(vector, "<f4") for vector in done[1]]


def test_they_are_the_references(model: Model, tiny_gguf: Path) -> None:
    """The numpy backend's hidden states, normed and pooled here."""
    reference = load_model(str(tiny_gguf), LoadOptions(backend="reference", taps=(model.config.layers,)))
    prompts = [[1, 2, 3], [n % 256 for n in range(150)], [9]]
    from slipstream.training.features import FeatureSource

    states = FeatureSource(reference, (model.config.layers,)).compute(prompts)
    for pooling in ("mean", "last"):
        found = embedded(Engine(model), prompts, pooling, normalize=False)
        for state, vector in zip(states, found, strict=True):
            normed = state / np.sqrt(np.square(state).mean(-1, keepdims=True) + model.config.norm_eps)
            wanted = normed.mean(0) if pooling == "mean" else normed[-1]
            assert np.linalg.norm(vector - wanted) < 0.05 * np.linalg.norm(wanted)
    (unit,) = embedded(Engine(model), prompts[:1], "mean", normalize=True)
    assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.features("embeddings", "prefix cache")
def test_answers_go_on_meanwhile(model: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = Engine(model)
    alone = collect(engine.run(engine.add([5, 6, 7], params)))[0].tokens
    alone_vector = embedded(engine, [[n % 256 for n in range(200)]], "mean", normalize=True)[0]
    embedder = Embedder(engine)
    embedder.add(1, [[n % 256 for n in range(200)]] * 3, "mean", normalize=True)
    engine.add([5, 6, 7], params)
    tokens: list[int] = []
    vectors = None
    while engine.busy or embedder.busy:
        for chunk in engine.step() if engine.busy else []:
            tokens += chunk.token_ids
        if embedder.busy and (done := embedder.step()) is not None:
            vectors = done[1]
    assert tokens == alone
    assert vectors is not None
    assert [np.frombuffer(v, "<f4").tolist() for v in vectors] == [alone_vector.tolist()] * 3


def test_a_job_can_be_dropped(model: Model) -> None:
    engine = Engine(model)
    embedder = Embedder(engine)
    embedder.add(1, [[n % 256 for n in range(200)]], "mean", normalize=True)
    embedder.step()
    embedder.drop(1)
    engine.check()
    assert not embedder.busy
    for prompts, pooling in (([[]], "mean"), ([[1] * 600], "mean"), ([[999]], "mean"), ([[1]], "median")):
        with pytest.raises(UsageError):
            embedder.add(2, prompts, pooling, normalize=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("normalize", [True, False, None])
@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_pooling_and_length_by_http(model: Model, server: Server, pooling: Any, normalize: bool | None) -> None:
    """The engine's, as they were asked for; if nothing is said, the mean, of length 1."""
    prompts = [[1, 2, 3], [n % 256 for n in range(100)]]
    body = {"model": "tiny", "input": prompts, "pooling": pooling, "normalize": normalize}
    with server.client() as http:
        answer = http.post("/v1/embeddings", json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 200, answer.text
    found = np.array([entry["embedding"] for entry in answer.json()["data"]])
    wanted = embedded(Engine(model), prompts, pooling or "mean", normalize=normalize is not False)
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    other = embedded(Engine(model), prompts, "mean" if pooling == "last" else "last", normalize=normalize is not False)
    assert not np.allclose(found, other, rtol=0.1)
    lengths = np.linalg.norm(found, axis=1)
    assert np.allclose(lengths, 1.0, atol=1e-4) is (normalize is not False)


def test_through_the_client(real_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY, max_retries=0)
    texts = ["A cat sat on the mat.", "A kitten was sitting on the rug.", "Interest rates rose by half a percent."]
    encoded: Any = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = np.array([entry.embedding for entry in plain.data])
    assert np.allclose(vectors, [entry.embedding for entry in encoded.data], atol=1e-6)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-4)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far
    assert plain.usage.prompt_tokens > 15
    for bad in (
        {"input": []},
        {"input": "x", "dimensions": 8},
        {"input": "x", "encoding_format": "hex"},
        {"input": ""},
    ):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="tiny", **bad)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="pooling"):
        client.embeddings.create(model="tiny", input="x", extra_body={"pooling": "median"})
    threads = [threading.Thread(target=lambda: client.embeddings.create(model="tiny", input=texts)) for _ in range(4)]
    for thread in threads:
        thread.start()
    done = client.completions.create(model="tiny", prompt="Once", max_tokens=20)
    for thread in threads:
        thread.join()
    assert done.usage is not None
