"""EngineClient: the engine in a process of its own, seen from asyncio; it is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import zmq

from slipstream.engine.messages import (
    Cancel,
    Deploy,
    Deployed,
    Embed,
    Embedded,
    EngineInfo,
    Explain,
    Explained,
    Failed,
    FromEngine,
    News,
    Ping,
    Pong,
    Ready,
    Refused,
    RequestTimings,
    RolloutStats,
    Score,
    Scored,
    Stats,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from slipstream.engine.output import Chunk, TokenLogprob
from slipstream.engine.request import Terms
from slipstream.engine.worker import WorkerOptions
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program.sampling import SamplingParams

log = logging.getLogger(__name__)

PING_EVERY, SILENCE = 1.0, 5.0
"""Seconds between questions after the engine's health, and after which its silence counts as illness."""
STUCK, HUNG = 30.0, 120.0
"""Seconds without a step, though requests run or wait, after which the engine counts as ill; and of silence after which
its process is ended, and started again: whoever waits for it would wait for ever.
"""
_AGAIN = -1
"""The number of what nobody waits for."""
PROVING = 10.0
"""An engine that ends within so many seconds of getting a drafter again is started without it the next time."""
DEPLOYING = 120.0
"""Seconds that loading a drafter may take."""
RESTART_PAUSE, MOST_RESTARTS = 0.2, 5
"""Seconds before the first restart, doubled each time; restarts in a row without a token before giving up."""


class EngineDiedError(SlipstreamError):
    """The engine's process ended while it had work; it is being started again."""


class RequestRefusedError(UsageError):
    """The engine says that a request can never run."""


News_ = tuple[list[Chunk], RequestTimings | None]


class EngineClient:
    """Start with `start`, end with `close`. Use from one event loop."""

    def __init__(self, options: WorkerOptions):
        self.options = options
        self.info: EngineInfo | None = None
        self.stats = Stats()
        self.restarts = 0
        self.open = 0
        self._context = zmq.Context(1)
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-")
        self._socket: zmq.Socket[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._queues: dict[int, asyncio.Queue[News_ | SlipstreamError]] = {}
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._deployments: dict[int, asyncio.Future[Deployed]] = {}
        self._aside: dict[int, asyncio.Future[list[Any]]] = {}
        self._deployed: list[Deploy] = []  # what an engine that is started again is told anew: proven, candidate
        self._to_tell: list[Deploy] = []  # what of that it has not done yet
        self._given_again = -math.inf
        self._next = 0
        self._heard = self._got_on = 0.0
        self._failure: Failed | None = None
        self._ready = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def healthy(self) -> bool:
        """Whether the engine is loaded, was heard of lately, and gets on with what it has to do, if it has."""
        now = time.monotonic()
        return self._ready.is_set() and now - self._heard < SILENCE and now - self._got_on < STUCK

    @property
    def ready(self) -> bool:
        """Whether the engine is loaded."""
        return self._ready.is_set()

    @property
    def waited_for(self) -> bool:
        """Whether anybody waits for something from the engine."""
        return bool(self.open or self._answers or self._deployments)

    async def start(self) -> EngineInfo:
        """Start the process and wait until the model is loaded. Raises SlipstreamError with the engine's reason."""
        await self._launch()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._ping())]
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.info is None:
            failure = self._failure or Failed("the engine ended before it was ready", False)
            raise (UsageError if failure.wrong_use else SlipstreamError)(failure.reason)
        return self.info

    async def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._closing = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(SlipstreamError):
                self._send(Stop())
            try:
                await asyncio.wait_for(process.wait(), 2.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None and not self._socket.closed:
            asyncio.get_running_loop().remove_reader(_descriptor(self._socket))
            self._socket.close(0)
        self._context.destroy(0)
        self._folder.cleanup()

    async def generate(self, prompt: list[int], params: SamplingParams, terms: Terms) -> AsyncIterator[News_]:
        """Chunks as they come, with the timings at the end; leaving the loop early cancels the request."""
        number, self._next = self._next, self._next + 1
        queue: asyncio.Queue[News_ | SlipstreamError] = asyncio.Queue()
        self._queues[number] = queue
        self.open += 1
        done = False
        try:
            self._send(Submit(number, prompt, params, terms))
            while not done:
                item = await queue.get()
                if isinstance(item, SlipstreamError):
                    done = True
                    raise item
                done = item[1] is not None
                yield item
        finally:
            self.open -= 1
            del self._queues[number]
            if not done:
                with contextlib.suppress(SlipstreamError):
                    self._send(Cancel(number))

    async def explain(self) -> str:
        """The waterfall of the latest traffic as JSON; empty if there was too little."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(Explain(number))
            return await asyncio.wait_for(answer, 10.0)
        finally:
            self._answers.pop(number, None)

    async def embed(self, prompts: list[list[int]], pooling: str, *, normalize: bool, tenant: str = "") -> list[bytes]:
        """Vectors of prompts, float32. Raises SlipstreamError."""
        return await self._of_all(lambda number: Embed(number, prompts, pooling, normalize, tenant))

    async def score(self, prompts: list[list[int]], top: int, tenant: str = "") -> list[list[TokenLogprob]]:
        """Log-probabilities of every token of each prompt but the first. Raises SlipstreamError."""
        return await self._of_all(lambda number: Score(number, prompts, top, tenant))

    async def _of_all(self, question: Callable[[int], ToEngine]) -> list[Any]:
        """What comes of each of the prompts in a question, by its number."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._aside[number] = answer
        self.open += 1
        try:
            self._send(question(number))
            return await answer
        finally:
            self.open -= 1
            del self._aside[number]
            if not answer.done() or answer.cancelled():
                with contextlib.suppress(SlipstreamError):
                    self._send(Cancel(number))

    async def deploy(self, folder: str, stage: str, share: float, *, auto: bool) -> list[str]:
        """Have a drafter loaded and put to work, or its stage changed; returns warnings. Raises SlipstreamError."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Deployed] = asyncio.get_running_loop().create_future()
        self._deployments[number] = answer
        try:
            self._send(Deploy(number, folder, stage, share, auto))
            deployed = await asyncio.wait_for(answer, DEPLOYING)
        except TimeoutError as error:
            raise SlipstreamError(
                f"the drafter is still being loaded after {DEPLOYING:g} s; GET /admin/drafter says when it is at work"
            ) from error
        finally:
            self._deployments.pop(number, None)
        if deployed.problem:
            raise UsageError(deployed.problem)
        return deployed.warnings

    def _send(self, message: ToEngine) -> None:
        if self._socket is None or not self._ready.is_set():
            raise EngineDiedError("the engine is being started; try again in a moment")
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it died a moment ago
            raise EngineDiedError("the engine ended; it is being started again, try again in a moment") from error
        self._read()  # ZeroMQ may have noticed news meanwhile, and says so only once

    def _read(self) -> None:
        """Everything that has come: the descriptor that wakes us is told of changes, not of what is there."""
        socket = self._socket
        while socket is not None and not socket.closed:
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(decode_from_engine(message))

    async def _launch(self) -> None:
        path = Path(self._folder.name) / f"engine-{self.restarts}"
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{path}")
        self._socket = socket
        asyncio.get_running_loop().add_reader(_descriptor(socket), self._read)
        arguments = (str(path), json.dumps(asdict(self.options)), str(os.getpid()))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "slipstream.engine.worker", *arguments
        )  # fmt: skip

    async def _watch(self) -> None:
        """Read what the engine says; when it dies, tell everybody who waits, and start it again."""
        pause, in_a_row = RESTART_PAUSE, 0
        while True:
            process, socket = self._process, self._socket
            assert process is not None
            assert socket is not None
            await process.wait()
            await asyncio.sleep(0.05)  # what it said last is still on its way
            self._read()
            was_ready = self._ready.is_set()
            self._ready.clear()
            self.stats = replace(self.stats, rollout=None)
            if not socket.closed:
                asyncio.get_running_loop().remove_reader(_descriptor(socket))
                socket.close(0)
            self.give_up("the engine's process ended unexpectedly; it is being started again, try again")
            if self._closing or self.info is None:
                return
            in_a_row = 0 if was_ready else in_a_row + 1
            pause = RESTART_PAUSE if was_ready else 2 * pause
            if in_a_row >= MOST_RESTARTS:
                log.error("the engine ended %d times without becoming ready; giving up", in_a_row)
                return
            log.error("the engine ended with code %s; starting it again", process.returncode)
            if self._deployed and time.monotonic() - self._given_again < PROVING:
                lost = self._deployed.pop()
                log.error("it ends again and again with the drafter %s: it goes on without", lost.folder)
            self.restarts += 1
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except (OSError, zmq.ZMQError) as error:  # no memory, processes or files left: as if it had ended at once
                log.error("the engine's process cannot be started: %s", error.strerror or error)

    def give_up(self, reason: str) -> None:
        """Tell everybody who waits that nothing will come."""
        died = EngineDiedError(reason)
        for queue in self._queues.values():
            queue.put_nowait(died)
        waiting: list[asyncio.Future[Any]] = [
            *self._answers.values(), *self._deployments.values(), *self._aside.values()
        ]  # fmt: skip
        for future in waiting:
            if not future.done():
                future.set_exception(died)

    def _hear(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case News(chunks, timings):
                by_request: dict[int, list[Chunk]] = {}
                for chunk in chunks:
                    by_request.setdefault(chunk.request, []).append(chunk)
                for number, mine in by_request.items():
                    if (queue := self._queues.get(number)) is not None:
                        queue.put_nowait((mine, timings.get(number)))
            case Refused(number, reason):
                if (queue := self._queues.get(number)) is not None:
                    queue.put_nowait(RequestRefusedError(reason))
                elif (asked := self._aside.get(number)) is not None and not asked.done():
                    asked.set_exception(RequestRefusedError(reason))
            case Embedded(number, results) | Scored(number, results):
                if (asked := self._aside.get(number)) is not None and not asked.done():
                    asked.set_result(results)
            case Pong(stats):
                if stats.disappointment and not self.stats.disappointment:
                    log.warning("%s", stats.disappointment)
                if stats.steps != self.stats.steps or not (stats.running or stats.waiting):
                    self._got_on = time.monotonic()
                self.stats = stats
                self._rolled_out(stats.rollout)
            case Explained(number, waterfall):
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result(waterfall)
            case Deployed(number):
                self.stats = replace(self.stats, rollout=message.rollout)
                if number == _AGAIN:
                    if message.problem:
                        log.error("the drafter that was at work is not any more: %s", message.problem)
                    self._to_tell = self._to_tell[1:]
                    self._tell_again()
                self._rolled_out(message.rollout)
                if (deployment := self._deployments.get(number)) is not None and not deployment.done():
                    deployment.set_result(message)
            case Ready(info):
                self.info = info
                self._got_on = time.monotonic()
                self._ready.set()
                self._to_tell = [*self._deployed]
                self._tell_again()
            case Failed():
                self._failure = message

    def _rolled_out(self, rollout: RolloutStats | None) -> None:
        """Keep in mind which drafters are at work, and how far, for an engine that is started again."""
        if rollout is None or self._to_tell:
            return
        proven = [Deploy(_AGAIN, rollout.before, "all", 1.0, False)] if rollout.before else []
        candidate = [Deploy(_AGAIN, rollout.candidate, rollout.stage, rollout.share, rollout.auto)]
        deployed = [*proven, *candidate] if rollout.outcome is None else proven
        if [again.folder for again in deployed] != [again.folder for again in self._deployed]:
            self._given_again = -math.inf
        self._deployed = deployed

    def _tell_again(self) -> None:
        """Tell an engine that was started again of the next drafter that was at work: it loads one at a time."""
        if self._to_tell:
            self._given_again = time.monotonic()
            self._send(self._to_tell[0])

    async def _ping(self) -> None:
        while True:
            if self._ready.is_set():
                with contextlib.suppress(SlipstreamError):
                    self._send(Ping())
                if time.monotonic() - self._heard > HUNG and self._process is not None:
                    log.error("the engine has said nothing for %g s; it is ended", HUNG)
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
            await asyncio.sleep(PING_EVERY)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    """What the event loop watches a ZeroMQ socket by."""
    return int(socket.getsockopt(zmq.FD))
