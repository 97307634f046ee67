"""Clients that people have, pointed at the server: OpenAI's asynchronous one, LangChain, llm, and a load tester."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.serving.conftest import KEY, Server

ASK: Any = [{"role": "user", "content": "Say hello."}]
BIN = Path(sys.executable).parent


class Dog(BaseModel):
    """A dog."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)


# ---- openai, asynchronous ----


def asked(server: Server, ask: Any) -> Any:
    """What comes of a coroutine that is given the client."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def test_many_at_once(real_server: Server) -> None:
    """Whole and streamed, side by side: all of the same question say the same."""
    settings: Any = {"model": "tiny", "messages": ASK, "max_tokens": 24, "temperature": 0.0}

    async def ask(client: openai.AsyncOpenAI) -> list[str]:
        async def whole() -> str:
            return (await client.chat.completions.create(**settings)).choices[0].message.content or ""

        async def streamed() -> str:
            stream = await client.chat.completions.create(**settings, stream=True)
            return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])

        return await asyncio.gather(*(whole() if n % 2 else streamed() for n in range(12)))

    said = asked(real_server, ask)
    assert len(said[0]) > 20
    assert set(said) == {said[0]}


def test_whoever_goes_away_is_not_waited_for(real_server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=1800, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        for _ in range(100):
            metrics = httpx.get(f"{real_server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
            running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
            if running and float(running[0].split()[-1]) == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the answer goes on although nobody listens")

    asked(real_server, ask)


def test_parsed(real_server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        messages: Any = [{"role": "user", "content": "Invent a dog, as JSON."}]
        return await client.chat.completions.parse(
            model="tiny", messages=messages, response_format=Dog, max_tokens=100, seed=1
        )

    dog = asked(real_server, ask).choices[0].message.parsed
    assert isinstance(dog, Dog)


# ---- langchain-openai ----


def chat(server: Server, **options: Any) -> ChatOpenAI:
    settings: Any = {"max_tokens": 100, "seed": 1, "temperature": 0.0} | options
    return ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, **settings)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_streams_what_it_is_told(real_server: Server, responses: bool) -> None:
    """Over chat completions, and over responses."""
    options = {"use_responses_api": True, "seed": None} if responses else {}
    model = chat(real_server, **options)
    whole = model.invoke("Say hello.")
    assert "".join(str(chunk.text) for chunk in model.stream("Say hello.")) == str(whole.text)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_what_it_asked_for(real_server: Server, method: Any) -> None:
    dog = chat(real_server).with_structured_output(Dog, method=method).invoke("Invent a dog, as JSON.")
    assert isinstance(dog, Dog)


def test_langchain_calls_tools(real_server: Server) -> None:
    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sun over {city}"

    model = chat(real_server)
    message = model.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Paris?")
    (call,) = message.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    after = model.bind_tools([weather]).invoke([("user", "What is the weather in Paris?"), message, result])
    assert after.usage_metadata is not None
    assert message.usage_metadata is not None
    assert after.usage_metadata["input_tokens"] > message.usage_metadata["input_tokens"]


def test_langchain_embeds(real_server: Server) -> None:
    embeddings = OpenAIEmbeddings(
        model="tiny", base_url=f"{real_server.url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )  # type: ignore[call-arg, arg-type]  # fmt: skip
    one, two = embeddings.embed_documents(["hello", "the sea"])
    assert len(one) == len(two) == 576
    assert embeddings.embed_query("hello") == pytest.approx(one, abs=1e-5)


def test_langchain_sees_errors(real_server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chat(real_server, top_p=3.0).invoke("Say hello.")


# ---- llm ----


@pytest.fixture
def llm(real_server: Server, tmp_path: Path) -> Any:
    """The command, knowing the server as a model called "slip"."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: slip\n  model_name: tiny\n  api_base: {real_server.url}/v1\n  api_key_name: slip\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [str(BIN / "llm"), *arguments, "--key", KEY]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_llm_prompts(llm: Any) -> None:
    options = ("-m", "slip", "-o", "temperature", "0", "-o", "max_tokens", "20")
    streamed = llm(*options, "Say hello.")
    assert len(streamed) > 20
    assert llm(*options, "--no-stream", "Say hello.") == streamed
    assert llm("-c", "-o", "max_tokens", "20", "And again.").strip()
    greedy = ("-m", "slip", "-o", "temperature", "0", "-o", "max_tokens", "200")  # drawn ones may not come to their end
    dog = json.loads(llm(*greedy, "--schema", "name, age int", "Invent a dog"))
    assert set(dog) == {"name", "age"}


# ---- guidellm ----


def test_a_load_testers_report_is_clean(real_server: Server, tmp_path: Path) -> None:
    """Every request answered in full, as many tokens as it wanted, and times for all of them."""
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    asks = [{"prompt": f"Tell a story of {n} ships.", "output_tokens_count": 16} for n in range(12)]
    prompts.write_text("".join(json.dumps(ask) + "\n" for ask in asks))
    command = [
        str(BIN / "guidellm"), "run", "--backend",
        f"kind=openai_http,target={real_server.url},model=tiny,api_key={KEY}", "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=12", "--data", f"kind=json_file,path={prompts}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == 16
        assert request["time_to_first_token_ms"] > 0
