"""The routes: who may call them, and what each does."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream import __version__
from slipstream.engine.client import EngineClient
from slipstream.errors import SlipstreamError
from slipstream.serving import admin, openai
from slipstream.serving.answers import ChatAnswer, CompletionAnswer
from slipstream.serving.bodies import object_of, read_body
from slipstream.serving.chats import Chats
from slipstream.serving.embeddings import EmbeddingsRequest, embeddings_of, inputs_of
from slipstream.serving.engine_metrics import EngineCollector
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.exchange import Exchange, ServerLimits, Wanted, json_response
from slipstream.serving.gate import Gate, no_method, no_route
from slipstream.serving.keys import Key, Keys
from slipstream.serving.messages import UNSUPPORTED, MessagesAnswer, MessagesRequest, as_chat, error_body, names_of
from slipstream.serving.metrics import Metrics
from slipstream.serving.openapi import document
from slipstream.serving.prompts import Prompts
from slipstream.serving.recording import Served
from slipstream.serving.responses import Responses
from slipstream.text import Tokenizer
from slipstream.text.template import ChatTemplate
from slipstream.training.recorder import Recorder

log = logging.getLogger(__name__)
Handler = Callable[[Request, Key], Awaitable[Response]]
MOST_SCORES = 1 << 18
"""Log-probabilities of prompts that a request may ask for: some 10 MB of JSON."""


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
        formats: tuple[str | None, str | None] = (None, None),
    ):
        """With a `recorder` answers are kept for training, as made by what was `served`.

        `formats` are those of tool calls and thoughts, where they are not what the template says.
        """
        self.client, self.tokenizer = client, tokenizer
        self.served_name, self.keys, self.limits = served_name, keys, limits
        figures = EngineCollector(served_name, lambda: (client.stats, client.info, client.restarts))
        self.metrics = Metrics(served_name, figures, recorder)
        self.exchange = Exchange(client, limits, self.metrics, recorder, served)
        self.prompts = Prompts(client, tokenizer, template)
        self.chats = Chats(self.prompts, *formats)
        self.responses = Responses(self.chats, self.exchange, served_name)

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self.exchange.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.exchange.draining = value
        if value:
            self.exchange.activity.end()

    def app(self) -> ASGIApp:
        """The whole application."""
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=post),
            Route("/v1/completions", self._guarded(self.completions), methods=post),
            Route("/v1/responses", self._guarded(self.respond), methods=post),
            Route("/v1/responses/{id}", self._guarded(self.response), methods=["GET", "DELETE"]),
            Route("/v1/messages", self._guarded(self.messages, error_body), methods=post),
            Route("/v1/messages/count_tokens", self._guarded(self.count_tokens, error_body), methods=post),
            Route("/v1/embeddings", self._guarded(self.embeddings), methods=post),
            Route("/v1/models", self._guarded(self.models), methods=get),
            Route("/v1/models/{id:path}", self._guarded(self.model), methods=get),
            Route("/tokenize", self._guarded(self.tokenize), methods=post),
            Route("/detokenize", self._guarded(self.detokenize), methods=post),
            Route("/metrics", self._guarded(self.show_metrics), methods=get),
            Route("/explain", self._guarded(self.explain), methods=get),
            Route("/admin/drafter", self._guarded(self.drafter), methods=["GET", "POST"]),
            Route("/admin/activity", self._guarded(self.activity), methods=get),
            Route("/version", self._guarded(self.version), methods=get),
            Route("/openapi.json", self._guarded(self.openapi), methods=get),
            Route("/health", self.health, methods=get),
        ]
        handlers: Any = {404: no_route, 405: no_method}
        return Gate(Starlette(routes=routes, exception_handlers=handlers), self.keys)

    def _guarded(
        self, handler: Handler, body_of: Callable[[ApiError], bytes] = ApiError.body
    ) -> Callable[[Request], Awaitable[Response]]:
        def failed(error: ApiError) -> Response:
            self.metrics.fail(error.status)
            return Response(body_of(error), error.status, error.headers, "application/json")

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request, request.scope["slipstream.key"])
            except ApiError as error:
                return failed(error)
            except Exception:
                log.exception("a request failed")
                return failed(ApiError(500, "the server failed; its log says why", "server_error"))

        return guarded

    async def health(self, request: Request) -> Response:
        """200 if the engine produced something lately or answers, and the server is not going away."""
        well = self.client.healthy and not self.draining
        state = "ok" if well else "draining" if self.draining else "the engine does not answer"
        return json_response({"status": state}, 200 if well else 503)

    async def version(self, request: Request, key: Key) -> Response:
        """The program's version."""
        return json_response({"version": __version__})

    async def openapi(self, request: Request, key: Key) -> Response:
        """The OpenAPI document."""
        info = self.client.info
        return json_response(document(self.served_name, info.vocabulary if info is not None else None))

    def _card(self) -> dict[str, Any]:
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
        return card

    async def models(self, request: Request, key: Key) -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request, key: Key) -> Response:
        """The one model, by its name."""
        self._known(request.path_params["id"])
        return json_response(self._card())

    async def show_metrics(self, request: Request, key: Key) -> Response:
        """Prometheus's text."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def explain(self, request: Request, key: Key) -> Response:
        """The waterfall of the latest traffic, and what drafts brought by drafter and tag."""
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
        return json_response({"model": self.served_name, **report, "drafts": admin.drafts(self.client)})

    async def drafter(self, request: Request, key: Key) -> Response:
        """GET: how drafters fare; POST: deploy one, change its stage, take it back."""
        admin.allow(request, key, keys=self.keys.required)
        if request.method == "GET":
            return json_response(admin.shown(self.client))
        return json_response(await admin.deploy(self.client, admin.deploy_body(await self._body(request))))

    async def activity(self, request: Request, key: Key) -> Response:
        """Requests for answers: those that are open, and those that have begun; waits for the next if that is asked."""
        admin.allow(request, key, keys=self.keys.required)
        return json_response(await admin.activity(request, self.exchange.activity))

    async def tokenize(self, request: Request, key: Key) -> Response:
        """{"prompt": "…"} or {"messages": […]} as token ids."""
        data = await self._body(request)
        body = object_of(data)
        if "messages" in body:
            chat: openai.ChatRequest = openai.parse(data, openai.ChatRequest)
            tokens = (await self.chats.prepare(chat)).tokens
        else:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise bad_request("prompt must be a string", "prompt")
            special = body.get("add_special_tokens", True)
            if not isinstance(special, bool):
                raise bad_request("add_special_tokens is true or false", "add_special_tokens")
            tokens = await self.prompts.of_text(text, "prompt", add_bos=None if special else False)
        info = self.client.info
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": info.max_len if info else None})

    async def detokenize(self, request: Request, key: Key) -> Response:
        """{"tokens": […]} as text."""
        tokens = object_of(await self._body(request)).get("tokens")
        vocabulary = self.client.info.vocabulary if self.client.info else 0
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
            raise bad_request(f"tokens must be a list of token ids below {vocabulary}", "tokens")
        return json_response({"prompt": await self.prompts.off_loop(lambda: self.tokenizer.decode(tokens))})

    async def chat(self, request: Request, key: Key) -> Response:
        """POST /v1/chat/completions."""
        body: openai.ChatRequest = openai.parse(await self._body(request), openai.ChatRequest)
        self._check(body)
        chat = await self.chats.prepare(body)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        answer = ChatAnswer(name, self.served_name, self.tokenizer, chat.params.n, chat.reading)
        wanted = Wanted.by(body, request, [(chat.tokens, chat.params)], chat.form)
        return await self.exchange.run(request, key, wanted, answer)

    async def completions(self, request: Request, key: Key) -> Response:
        """POST /v1/completions."""
        body: openai.CompletionRequest = openai.parse(await self._body(request), openai.CompletionRequest)
        self._check(body)
        if body.max_tokens is None:
            body.max_tokens = 16
        if body.logprobs is not None and not 0 <= body.logprobs <= 20:
            raise bad_request(f"logprobs must be from 0 to 20, not {body.logprobs}", "logprobs")
        if silent := body.echo is True and body.max_tokens == 0:
            if body.stream:
                raise bad_request("there is nothing to stream with max_tokens 0", "stream")
            body.max_tokens = 1
        form = await self.prompts.off_loop(body.form)
        params = openai.sampling(body, body.logprobs, form.grammar)
        prompts = openai.prompts(body)
        work = [(await self._completed(prompt, body.suffix), params) for prompt in prompts]
        answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", self.served_name, self.tokenizer, params.n * len(work))
        if body.echo:
            answer.echoed = [self._echo(prompt) for prompt in prompts for _ in range(params.n)]
        wanted = replace(Wanted.by(body, request, work, form.field), silent=silent)
        if silent:
            for choice in answer.choices:
                choice.reason = "length"
        if body.echo and body.logprobs is not None:
            wanted = replace(wanted, before=self._scoring([tokens for tokens, _ in work], body, answer, key.name))
        return await self.exchange.run(request, key, wanted, answer)

    def _scoring(
        self, prompts: list[list[int]], body: openai.CompletionRequest, answer: CompletionAnswer, tenant: str
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """What puts the prompts' log-probabilities into an answer. Raises ApiError."""
        top, count = body.logprobs or 0, sum(map(len, prompts))
        if body.suffix:
            raise bad_request("log-probabilities of a prompt with a suffix are not told: leave one out", "suffix")
        if count * (top + 1) > MOST_SCORES:
            most = f"at most {MOST_SCORES // (top + 1)} tokens of prompts are told {top} log-probabilities each"
            raise bad_request(f"{most}, not {count}", "logprobs")

        async def score() -> None:
            scores = await self.client.score(prompts, top, tenant)
            await self.prompts.off_loop(lambda: answer.score(prompts, scores))

        return score

    async def _completed(self, prompt: str | list[int], suffix: str | None) -> list[int]:
        if isinstance(prompt, list):
            if suffix:
                raise bad_request("suffix needs a prompt that is a text", "suffix")
            tokens = prompt
        elif suffix:
            tokens = await self.prompts.between(prompt, suffix)
        else:
            tokens = await self.prompts.of_text(prompt, "prompt")
        self.prompts.fits(tokens, "prompt")
        return tokens

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    async def respond(self, request: Request, key: Key) -> Response:
        """POST /v1/responses."""
        body = await self._body(request)
        return await self.responses.create(request, key, body, self._known)

    async def response(self, request: Request, key: Key) -> Response:
        """GET or DELETE /v1/responses/ID."""
        name = request.path_params["id"]
        found = self.responses.forget(key, name) if request.method == "DELETE" else self.responses.find(key, name)
        return json_response(found)

    async def messages(self, request: Request, key: Key) -> Response:
        """POST /v1/messages: Anthropic's."""
        body: MessagesRequest = openai.parse(await self._body(request), MessagesRequest, UNSUPPORTED)
        self._known(body.model)
        chat_request = as_chat(body)
        openai.finite(chat_request)
        chat = await self.chats.prepare(chat_request, names_of(body))
        answer = MessagesAnswer(f"msg_{uuid.uuid4().hex[:24]}", self.served_name, self.tokenizer, 1, chat.reading)
        answer.prompt_tokens = len(chat.tokens)
        wanted = Wanted.by(chat_request, request, [(chat.tokens, chat.params)], chat.form)
        return await self.exchange.run(request, key, wanted, answer)

    async def count_tokens(self, request: Request, key: Key) -> Response:
        """POST /v1/messages/count_tokens."""
        raw = object_of(await self._body(request))
        openai.refuse_unsupported(raw, UNSUPPORTED)
        body: MessagesRequest = openai.convert({"max_tokens": 1, **raw}, MessagesRequest)
        self._known(body.model)
        chat = await self.chats.prepare(as_chat(body), names_of(body))
        return json_response({"input_tokens": len(chat.tokens)})

    async def embeddings(self, request: Request, key: Key) -> Response:
        """POST /v1/embeddings."""
        body: EmbeddingsRequest = openai.parse(await self._body(request), EmbeddingsRequest)
        self._known(body.model)
        work = await inputs_of(body, self.prompts)
        with self.exchange.admitted(key, 1):
            making = embeddings_of(work, body, self.client, self.served_name, key.name)
            return json_response(await self.exchange.while_there(request, making))

    def _known(self, model: str | None) -> None:
        """Raise ApiError 404 for a model that is not here."""
        if model not in (None, "", self.served_name):
            raise ApiError(
                404, f"there is no model {model[:100]!r} here, only {self.served_name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def _check(self, body: openai.Common) -> None:
        self._known(body.model)
        openai.finite(body)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.limits.max_body_bytes)
