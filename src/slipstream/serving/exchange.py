"""Exchange: a request goes to the engine, and its answer back, whole or as a stream, in whatever protocol it came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from slipstream.engine.client import EngineClient, EngineDiedError
from slipstream.engine.messages import RequestTimings
from slipstream.engine.output import Chunk
from slipstream.engine.request import Terms
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.serving import openai
from slipstream.serving.activity import Activity
from slipstream.serving.answers import Answer, timings_of
from slipstream.serving.errors import GONE, ApiError, bad_request
from slipstream.serving.flush import Flush
from slipstream.serving.keys import Key
from slipstream.serving.metrics import Gaps, Metrics
from slipstream.serving.recording import Recording, Served
from slipstream.serving.tracing import Span, Tracing
from slipstream.training.recorder import Recorder

RECORD_HEADER = "x-slipstream-record"
"""on or off: whether a request is recorded, where --record is given."""
FAILED = "the server failed; its log says why"
News = tuple[list[Chunk], RequestTimings | None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes."""

    max_queue: int = 512
    max_body_bytes: int = 8 << 20
    request_timeout: float = 600.0
    fixed_flush: int = 0
    """Tokens of every event of a stream but the last; 0: as many as a step brought."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks the engine for: prompts with their settings, and how it is to be treated."""

    work: list[tuple[list[int], SamplingParams]]
    stream: bool = False
    usage: bool = False
    timed: bool = False
    priority: int = 0
    cache_salt: str = ""
    tag: str = ""
    before: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What is done first, once the request is let in."""
    silent: bool = False
    """Nothing is generated: the answer is what it is before."""
    form: str = ""
    """The field that says what form the answer must have."""

    @classmethod
    def by(
        cls, body: openai.Common, request: Request, work: list[tuple[list[int], SamplingParams]], form: str = ""
    ) -> Wanted:
        """As the fields say that OpenAI's requests share. Raises ApiError."""
        usage = body.stream_options is not None and body.stream_options.include_usage
        return cls(
            work, bool(body.stream), usage, bool(body.timings), body.priority or 0, body.cache_salt or "",
            openai.tag_of(request.headers, body), form=form,
        )  # fmt: skip


class Exchange:
    """Runs requests on one engine."""

    def __init__(
        self,
        client: EngineClient,
        limits: ServerLimits,
        metrics: Metrics,
        recorder: Recorder | None = None,
        served: Served | None = None,
    ):
        """With a `recorder` answers are kept for training, as made by what was `served`."""
        self.client, self.limits, self.metrics = client, limits, metrics
        self.recorder, self.served = recorder, served or Served()
        self.tracing, self.activity = Tracing.start(), Activity()
        self.draining = False

    async def run(self, request: Request, key: Key, wanted: Wanted, answer: Answer) -> Response:
        """See a request through. Raises ApiError for what is refused."""
        span = self.tracing.begin(answer.operation, answer.model, request.headers)
        try:
            return await self._run(request, key, wanted, answer, span)
        except ApiError as error:
            span.end(problem=error.message)
            raise
        except Exception:
            span.end(problem=FAILED)
            raise

    async def _run(self, request: Request, key: Key, wanted: Wanted, answer: Answer, span: Span) -> Response:
        work = wanted.work
        key.check_priority(wanted.priority)
        leave = contextlib.ExitStack()
        leave.enter_context(self.admitted(key, len(work)))
        timeout, asked = self.limits.request_timeout, time.perf_counter()
        terms = Terms(key.name, wanted.priority, timeout, wanted.cache_salt, wanted.tag, asked)
        try:
            if wanted.before is not None:
                await self.while_there(request, wanted.before())
            if wanted.silent:
                ended = [RequestTimings(len(tokens), 0, 0, 0.0, 0.0, 0.0, 0, 0.0) for tokens, _ in work]
                span.end(ended)
                return json_response(answer.report(ended) | timings_of(ended, timed=wanted.timed))
            streams = [self.client.generate(tokens, params, terms) for tokens, params in work]
            news = streams[0] if len(streams) == 1 else _merged(streams, work[0][1].n)
            if self.recorder is not None and self.recorder.options.wants(
                request.headers.get(RECORD_HEADER), key.record
            ):
                news = _overheard(news, Recording(self.recorder, self.served, answer.id, work, terms))
            if wanted.stream:
                first = await _unless_gone(request, news)
                if first is None:
                    return self._left(span)
                events = self._events(answer, news, first, wanted, leave, span)
                leave = contextlib.ExitStack()
                await anext(events)
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                return StreamingResponse(_rest(events), media_type="text/event-stream", headers=headers)
            return await self._whole(request, answer, news, wanted, span)
        except UsageError as error:
            raise openai.engine_refused(error, answer.prompt_field, wanted.form) from error
        except EngineDiedError as error:
            raise ApiError(503, str(error), "server_error", headers={"Retry-After": "2"}) from error
        finally:
            leave.close()

    @contextlib.contextmanager
    def admitted(self, key: Key, count: int) -> Iterator[None]:
        """Let a request of so many prompts in, while it runs. Raises ApiError where it is not taken, or not now."""
        most = key.most(self.limits.max_queue)
        if count > most:
            raise bad_request(f"a request may have at most {most} prompts here, not {count}")
        if self.draining:
            raise ApiError(503, "the server is going away", "server_error", headers={"Retry-After": "5"})
        if not self.client.ready:
            raise ApiError(503, "the engine is being started", "server_error", headers={"Retry-After": "2"})
        if self.client.open + count > self.limits.max_queue:
            message = f"{self.client.open} requests are open, the limit is {self.limits.max_queue}"
            raise ApiError(429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        with key.admitted(count, self.limits.max_queue), self.activity.counted():
            yield

    def _left(self, span: Span, ended: Sequence[RequestTimings] = ()) -> Response:
        """What nobody waits for any more."""
        self.metrics.fail(499)
        span.end(ended, GONE)
        return Response(status_code=499)

    async def _whole(
        self, request: Request, answer: Answer, news: AsyncIterator[News], wanted: Wanted, span: Span
    ) -> Response:
        gaps, ended = Gaps(), list[RequestTimings]()

        async def collect() -> None:
            async for chunks, timings in news:
                gaps.hear(chunks)
                for chunk in chunks:
                    answer.add(chunk)
                if timings is not None:
                    ended.append(timings)
                    self.metrics.count(timings, answer.reason(chunks))

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(disconnected(request))
        await asyncio.wait([collecting, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        self.metrics.gaps(gaps)
        if not collecting.done():
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            return self._left(span, ended)
        collecting.result()
        if answer.aborted:
            raise self._late()
        report = answer.report(ended)
        report |= timings_of(ended, timed=wanted.timed)  # of the report itself, which may be kept
        span.end(ended)
        return json_response(report)

    async def while_there(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        """What comes of some work that no token tells of, as long as the client is there, and a request may take.

        Raises ApiError: 499 for nobody to read, 504.
        """
        working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(request))
        tasks: list[asyncio.Task[Any]] = [working, leaving]
        try:
            await asyncio.wait(tasks, timeout=self.limits.request_timeout, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ApiError(499, GONE) if leaving.done() else self._late()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _late(self) -> ApiError:
        return ApiError(504, f"the answer took more than {self.limits.request_timeout:g} s", "timeout_error")

    async def _events(
        self,
        answer: Answer,
        news: AsyncIterator[News],
        first: News,
        wanted: Wanted,
        leave: contextlib.ExitStack,
        span: Span,
    ) -> AsyncIterator[bytes]:
        ended, problem = list[RequestTimings](), FAILED
        gaps, flush, late = Gaps(), Flush(self.limits.fixed_flush), ""
        try:
            yield b""  # it has begun: from now on it is ended in any case
            frames = answer.opening()
            item: News | None = first
            while item is not None:
                chunks, timings = item
                gaps.hear(chunks)
                for chunk in flush.add(chunks):
                    if chunk.finish_reason == "abort":
                        if not late:
                            self.metrics.fail(504)
                        late = self._late().message
                        frames.append(answer.failure(self._late()))
                        continue
                    frames += answer.frames(chunk)
                if timings is not None:
                    ended.append(timings)
                    self.metrics.count(timings, answer.reason(chunks))
                if frames:
                    yield b"".join(frames)
                    frames.clear()
                item = await anext(news, None)
            yield b"".join(answer.closing(ended, usage=wanted.usage, timed=wanted.timed))
            problem = late
        except (GeneratorExit, asyncio.CancelledError):
            problem = late or GONE
            raise
        except SlipstreamError as error:
            problem = str(error)
            self.metrics.fail(503)
            yield answer.failure(ApiError(503, problem, "server_error"))
        finally:
            leave.close()  # first: what is awaited below may be cancelled
            if problem == GONE:
                self.metrics.fail(499)
            span.end(ended, problem)
            self.metrics.gaps(gaps)
            await news.aclose()  # type: ignore[attr-defined]


async def _merged(streams: list[AsyncIterator[News]], n: int) -> AsyncIterator[News]:
    """News of several requests as they come; choices are numbered through."""
    queue: asyncio.Queue[News | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[News]) -> None:
        try:
            async with contextlib.aclosing(stream) as source:  # type: ignore[type-var]
                async for chunks, timings in source:
                    queue.put_nowait(([replace(c, choice=index * n + c.choice) for c in chunks], timings))
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


async def _rest(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream that has begun; it ends with this, and, if this is never begun, when it is forgotten."""
    async with contextlib.aclosing(events) as rest:  # type: ignore[type-var]
        async for event in rest:
            yield event


async def _unless_gone(request: Request, news: AsyncIterator[News]) -> News | None:
    """The first news, or None if the client has gone away before.

    What is refused is refused here, with a status, not inside a stream.
    """

    async def first() -> News:
        return await anext(news)

    waiting, leaving = asyncio.create_task(first()), asyncio.create_task(disconnected(request))
    try:
        both: list[asyncio.Task[Any]] = [waiting, leaving]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await news.aclose()  # type: ignore[attr-defined]
    return None


async def disconnected(request: Request) -> None:
    """Wait until the client has gone away."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return


def json_response(value: object, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
