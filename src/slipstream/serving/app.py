"""The routes: who may call them, what they take, and answers whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream import __version__
from slipstream.engine.client import EngineClient, EngineDiedError
from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.engine.request import Terms
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.serving import admin, openai
from slipstream.serving.answers import ChatAnswer, CompletionAnswer, usage_of
from slipstream.serving.engine_metrics import EngineCollector
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.flush import Flush
from slipstream.serving.gate import Gate, no_method, no_route
from slipstream.serving.keys import Key, Keys
from slipstream.serving.metrics import Gaps, Metrics
from slipstream.serving.recording import Recording, Served
from slipstream.text import Tokenizer
from slipstream.text.sandbox import TemplateError
from slipstream.text.template import ChatTemplate
from slipstream.training.recorder import Recorder

log = logging.getLogger(__name__)
Result = TypeVar("Result")

RECORD_HEADER = "x-slipstream-record"
"""on or off: whether a request is recorded, where --record is given."""
BODY_SECONDS = 30.0
"""A body that has not arrived by then is given up."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes."""

    max_queue: int = 512
    max_body_bytes: int = 8 << 20
    request_timeout: float = 600.0
    fixed_flush: int = 0
    """Tokens of every event of a stream but the last; 0: as many as a step brought."""


class Api:
    """The handlers, over one engine."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        served_name: str,
        keys: Keys,
        limits: ServerLimits,
        recorder: Recorder | None = None,
        served: Served | None = None,
    ):
        """With a `recorder` answers are kept for training, as made by what was `served`."""
        self.client, self.tokenizer, self.template = client, tokenizer, template
        self.recorder, self.served = recorder, served or Served()
        self.served_name, self.keys, self.limits = served_name, keys, limits
        figures = EngineCollector(served_name, lambda: (client.stats, client.info, client.restarts))
        self.metrics = Metrics(served_name, figures, recorder)
        self.draining = False
        # The tokenizer is not to be used by two threads at once, and a long text must not hold up the loop.
        self._texts = ThreadPoolExecutor(1, "texts")

    def app(self) -> ASGIApp:
        """The whole application."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
            Route("/explain", self._guarded(self.explain), methods=["GET"]),
            Route("/admin/drafter", self._guarded(self.drafter), methods=["GET", "POST"]),
            Route("/version", self._guarded(self.version), methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        handlers: Any = {404: no_route, 405: no_method}
        return Gate(Starlette(routes=routes, exception_handlers=handlers), self.keys)

    def _guarded(
        self, handler: Callable[[Request, Key], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request, request.scope["slipstream.key"])
            except ApiError as error:
                self.metrics.fail(error.status)
                return error.response()
            except Exception:
                log.exception("a request failed")
                self.metrics.fail(500)
                return ApiError(500, "the server failed; its log says why", "server_error").response()

        return guarded

    async def health(self, request: Request) -> Response:
        """200 if the engine produced something lately or answers, and the server is not going away."""
        well = self.client.healthy and not self.draining
        state = "ok" if well else "draining" if self.draining else "the engine does not answer"
        return _json({"status": state}, 200 if well else 503)

    async def version(self, request: Request, key: Key) -> Response:
        """The program's version."""
        return _json({"version": __version__})

    async def models(self, request: Request, key: Key) -> Response:
        """The one model."""
        info = self.client.info
        card = {"id": self.served_name, "object": "model", "owned_by": "slipstream", "created": 0}
        if info is not None:
            card |= {
                "max_model_len": info.max_len,
                "numerics": info.numerics,
                "kv_cache_dtype": info.kv_format,
                "weight_bytes": info.weight_bytes,
                "ceiling_tok_s": info.ceiling_tok_s,
            }
        return _json({"object": "list", "data": [card]})

    async def show_metrics(self, request: Request, key: Key) -> Response:
        """Prometheus's text."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def explain(self, request: Request, key: Key) -> Response:
        """The waterfall of the latest traffic."""
        try:
            waterfall = await self.client.explain()
        except (SlipstreamError, TimeoutError) as error:
            raise ApiError(503, str(error) or "the engine does not answer", "server_error") from error
        if not waterfall:
            raise ApiError(
                409, "there was too little traffic to explain; answer a few requests first", "not_enough_data"
            )
        report = json.loads(waterfall)
        self.metrics.explained(report["parts"])
        return _json({"model": self.served_name, **report})

    async def drafter(self, request: Request, key: Key) -> Response:
        """GET: how drafters fare; POST: deploy one, change its stage, take it back."""
        admin.allow(request, key, keys=self.keys.required)
        if request.method == "GET":
            return _json(admin.shown(self.client))
        return _json(await admin.deploy(self.client, admin.deploy_body(await self._body(request))))

    async def tokenize(self, request: Request, key: Key) -> Response:
        """{"prompt": "…"} or {"messages": […]} as token ids."""
        body = await self._object(request)
        if "messages" in body:
            chat = openai.parse(json.dumps(body).encode(), openai.ChatRequest)
            tokens = await self._chat_tokens(chat)
        else:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise bad_request("prompt must be a string", "prompt")
            openai.surrogate_free(text, "prompt")
            self._may_fit(len(text), "prompt")
            special = body.get("add_special_tokens", True)
            tokens = await self._off_loop(lambda: self.tokenizer.encode(text, add_bos=None if special else False))
        info = self.client.info
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": info.max_len if info else None})

    async def detokenize(self, request: Request, key: Key) -> Response:
        """{"tokens": […]} as text."""
        tokens = (await self._object(request)).get("tokens")
        vocabulary = self.client.info.vocabulary if self.client.info else 0
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
            raise bad_request(f"tokens must be a list of token ids below {vocabulary}", "tokens")
        return _json({"prompt": await self._off_loop(lambda: self.tokenizer.decode(tokens))})

    async def chat(self, request: Request, key: Key) -> Response:
        """POST /v1/chat/completions."""
        body: openai.ChatRequest = openai.parse(await self._body(request), openai.ChatRequest)
        self._check(body)
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        params = openai.sampling(body, openai.chat_logprobs(body))
        tokens = await self._chat_tokens(body)
        answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", self.served_name, self.tokenizer, params.n)
        return await self._answer(request, key, body, [(tokens, params)], answer)

    async def completions(self, request: Request, key: Key) -> Response:
        """POST /v1/completions."""
        body: openai.CompletionRequest = openai.parse(await self._body(request), openai.CompletionRequest)
        self._check(body)
        if body.max_tokens is None:
            body.max_tokens = 16
        if body.logprobs is not None and not 0 <= body.logprobs <= 20:
            raise bad_request(f"logprobs must be from 0 to 20, not {body.logprobs}", "logprobs")
        params = openai.sampling(body, body.logprobs)
        work = []
        for prompt in openai.prompts(body):
            if isinstance(prompt, str):
                openai.surrogate_free(prompt, "prompt")
                self._may_fit(len(prompt), "prompt")
                tokens = await self._off_loop(lambda text=prompt: self.tokenizer.encode(text))  # type: ignore[misc]
            else:
                tokens = prompt
            self._fits(tokens, "prompt")
            work.append((tokens, params))
        answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", self.served_name, self.tokenizer, params.n * len(work))
        return await self._answer(request, key, body, work, answer)

    def _check(self, body: openai.Common) -> None:
        if body.model not in (None, "", self.served_name):
            raise ApiError(
                404, f"there is no model {body.model[:100]!r} here, only {self.served_name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip
        openai.finite(body)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")

    async def _chat_tokens(self, body: openai.ChatRequest) -> list[int]:
        if self.template is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        template, messages = self.template, openai.messages(body)
        for index, message in enumerate(messages):
            openai.surrogate_free(message["content"], f"messages[{index}].content")
        self._may_fit(sum(len(message["content"]) for message in messages), "messages")
        try:
            tokens = await self._off_loop(lambda: self.tokenizer.encode_chat(template, messages))
        except TemplateError as error:
            raise bad_request(str(error), "messages") from error
        self._fits(tokens, "messages")
        return tokens

    def _may_fit(self, characters: int, param: str) -> None:
        """Refuse at once what is too long however it is cut into tokens: cutting it would take seconds."""
        info = self.client.info
        if info is not None and characters > info.max_len * self.tokenizer.longest_token:
            raise ApiError(
                400, f"a text of {characters} characters cannot fit into a context of {info.max_len} tokens",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def _fits(self, tokens: list[int], param: str) -> None:
        info = self.client.info
        if not tokens:
            raise bad_request(f"{param} has no tokens", param)
        if info is not None and not all(0 <= token < info.vocabulary for token in tokens):
            raise bad_request(f"{param} has a token that is not from 0 to {info.vocabulary - 1}", param)
        if info is not None and len(tokens) >= info.max_len:
            raise ApiError(
                400, f"the prompt has {len(tokens)} tokens, the context holds {info.max_len}", param=param,
                code="context_length_exceeded",
            )  # fmt: skip

    async def _answer(
        self,
        request: Request,
        key: Key,
        body: openai.Common,
        work: list[tuple[list[int], SamplingParams]],
        answer: ChatAnswer | CompletionAnswer,
    ) -> Response:
        if self.draining:
            raise ApiError(503, "the server is going away", "server_error", headers={"Retry-After": "5"})
        if not self.client.ready:
            raise ApiError(503, "the engine is being started", "server_error", headers={"Retry-After": "2"})
        if self.client.open + len(work) > self.limits.max_queue:
            message = f"{self.client.open} requests are open, the limit is {self.limits.max_queue}"
            raise ApiError(429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        terms = Terms(
            key.name,
            body.priority or 0,
            self.limits.request_timeout,
            body.cache_salt or "",
            openai.tag_of(request.headers, body),
        )
        leave = contextlib.ExitStack()
        leave.enter_context(key.admitted())
        try:
            news = _merged([self.client.generate(tokens, params, terms) for tokens, params in work], work[0][1].n)
            if self.recorder is not None and self.recorder.options.wants(
                request.headers.get(RECORD_HEADER), key.record
            ):
                news = _overheard(news, Recording(self.recorder, self.served, answer.id, work, terms))
            if body.stream:
                first = await anext(news)  # what is refused is refused with a status, not inside a stream
                include = body.stream_options is not None and body.stream_options.include_usage
                events = self._events(answer, news, first, include, bool(body.timings), leave)
                leave = contextlib.ExitStack()
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            return await self._whole(request, answer, news, bool(body.timings))
        except UsageError as error:
            raise openai.context_error(error, answer.prompt_field) from error
        except EngineDiedError as error:
            raise ApiError(503, str(error), "server_error", headers={"Retry-After": "2"}) from error
        finally:
            leave.close()

    async def _whole(
        self, request: Request, answer: ChatAnswer | CompletionAnswer, news: AsyncIterator[News], timed: bool
    ) -> Response:
        gaps = Gaps()

        async def collect() -> list[RequestTimings]:
            ended = []
            async for chunks, timings in news:
                gaps.hear(chunks)
                for chunk in chunks:
                    answer.add(chunk)
                if timings is not None:
                    ended.append(timings)
                    self.metrics.count(timings, answer.reason(chunks))
            return ended

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(_disconnected(request))
        await asyncio.wait([collecting, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        self.metrics.gaps(gaps)
        if not collecting.done():
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            return Response(status_code=499)
        ended = collecting.result()
        if answer.aborted:
            raise ApiError(504, f"the answer took more than {self.limits.request_timeout:g} s", "timeout_error")
        report = answer.report() | {"usage": usage_of(ended)}
        if timed:
            report["timings"] = [asdict(t) for t in ended]
        return _json(report)

    async def _events(
        self,
        answer: ChatAnswer | CompletionAnswer,
        news: AsyncIterator[News],
        first: News,
        include_usage: bool,
        timed: bool,
        leave: contextlib.ExitStack,
    ) -> AsyncIterator[bytes]:
        ended: list[RequestTimings] = []
        gaps, flush = Gaps(), Flush(self.limits.fixed_flush)
        try:
            for opening in answer.opening():
                yield _event(opening)
            item: News | None = first
            while item is not None:
                chunks, timings = item
                gaps.hear(chunks)
                for chunk in flush.add(chunks):
                    if chunk.finish_reason == "abort":
                        error = ApiError(504, "the answer took too long", "timeout_error")
                        yield b"data: " + error.body() + b"\n\n"
                        continue
                    if (event := answer.event(chunk)) is not None:
                        yield _event(event)
                if timings is not None:
                    ended.append(timings)
                    self.metrics.count(timings, answer.reason(chunks))
                item = await anext(news, None)
            if include_usage or timed:
                last = answer.closing() | ({"usage": usage_of(ended)} if include_usage else {})
                yield _event(last | ({"timings": [asdict(t) for t in ended]} if timed else {}))
            yield b"data: [DONE]\n\n"
        except SlipstreamError as error:
            self.metrics.fail(503)
            yield b"data: " + ApiError(503, str(error), "server_error").body() + b"\n\n"
        finally:
            await news.aclose()  # type: ignore[attr-defined]
            self.metrics.gaps(gaps)
            leave.close()

    async def _off_loop(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def _object(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise bad_request("the body is not a JSON object")
        return value

    async def _body(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes

        async def read() -> bytes:
            parts, size = [], 0
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
                parts.append(part)
            return b"".join(parts)

        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise ApiError(413, f"the body has {declared} bytes, the limit is {limit}", code="request_too_large")
        try:
            return await asyncio.wait_for(read(), BODY_SECONDS)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from error


News = tuple[list[Chunk], RequestTimings | None]


async def _merged(streams: list[AsyncIterator[News]], n: int) -> AsyncIterator[News]:
    """News of several requests as they come; choices are numbered through."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for news in only:
                yield news
        return
    queue: asyncio.Queue[News | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[News]) -> None:
        try:
            async with contextlib.aclosing(stream) as source:  # type: ignore[type-var]
                async for chunks, timings in source:
                    queue.put_nowait(([c._replace(choice=index * n + c.choice) for c in chunks], timings))
            queue.put_nowait(None)
        except SlipstreamError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _overheard(news: AsyncIterator[News], recording: Recording) -> AsyncIterator[News]:
    async with contextlib.aclosing(news) as source:  # type: ignore[type-var]
        async for item in source:
            recording.hear(item[0])
            yield item


async def _disconnected(request: Request) -> None:
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
