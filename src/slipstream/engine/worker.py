"""The engine's process: `python -m slipstream.engine.worker SOCKET OPTIONS PARENT`. It does not spin when idle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zmq

from slipstream.engine.ceiling import measure_ceiling
from slipstream.engine.cost import cost_model
from slipstream.engine.deployment import Deployment
from slipstream.engine.desk import Desk
from slipstream.engine.drafters import Speculative, load_speculative, verification_of
from slipstream.engine.embedding import Embedder
from slipstream.engine.engine import Engine
from slipstream.engine.explain import explain_traffic
from slipstream.engine.messages import (
    Cancel,
    Deploy,
    Deployed,
    DraftStats,
    Embed,
    Embedded,
    EngineInfo,
    Explain,
    Explained,
    Failed,
    News,
    Ping,
    Pong,
    Ready,
    Refused,
    RequestTimings,
    Score,
    Scored,
    Stats,
    Stop,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from slipstream.engine.model import LoadOptions, Model
from slipstream.engine.request import Timings
from slipstream.engine.scoring import Scorer
from slipstream.engine.shelving import parse_store
from slipstream.errors import SlipstreamError, UsageError
from slipstream.kernels.native import NativeExecutable
from slipstream.kvcache import Shelf
from slipstream.program import BLOCK_SLOTS, KVFormat
from slipstream.scheduling import Limits
from slipstream.speculation.card import fingerprint_of
from slipstream.speculation.settings import Drawing
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

_DIE_WITH_PARENT = 1
PLANNING = 1e-3
"""Seconds before the end of a step at which the next one is planned."""
SHELVING = 1.5
"""Seconds that putting blocks on the shelf may take at the end."""
LOADING = 20
"""Milliseconds that an idle engine sleeps at a time while a drafter is being loaded."""
CHECK_AFTER = 0.5
"""Seconds without a request after which an engine that has done something checks that no block was leaked."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the engine's process is started with."""

    model: str
    max_len: int | None = None
    kv_format: str = "bf16"
    quantization: str = "none"
    threads: int | None = None
    cache_bytes: int | None = None
    spare_bytes: int = -1
    max_sequences: int = 256
    prefix_cache: bool = True
    tpot_target: float | None = None
    ttft_target: float | None = None
    speculative: str = "auto"
    verify: str = "exact"
    prefix_store: str = ""

    def load(self) -> LoadOptions:
        """How to load the model."""
        return LoadOptions(
            max_len=self.max_len,
            kv_format=KVFormat(self.kv_format),
            quantization=self.quantization,  # type: ignore[arg-type]
            threads=self.threads,
            sequences=0,
            cache_bytes=self.cache_bytes,
            spare_bytes=self.spare_bytes,
        )


class Worker:
    """One engine and the socket it answers."""

    def __init__(
        self, model: Model, engine: Engine, ceiling: float, socket: zmq.Socket[bytes], drawing: Drawing | None = None
    ):
        self.model, self.engine, self.socket, self.ceiling = model, engine, socket, ceiling
        self._stopping = False
        self._stepped, self._checked = 0.0, True
        self._deployment = Deployment(engine, drawing)
        self._desk = Desk(engine.grammars)
        self._embedder, self._scorer = Embedder(engine), Scorer(engine)

    def run(self) -> None:
        """Until told to stop, and everything that runs has ended. Raises ValueError if the idle engine is damaged."""
        while not self._stopping or self.engine.busy or self._desk.waiting or self._aside:
            if self._hears(self._patience()):
                self._listen()
            self._say(self._deployment.settle())
            for request, problem in self._desk.done():
                self._add(request, problem)
            if self.engine.busy and not self._patience():
                self._step()
                self._stepped, self._checked = time.monotonic(), False
            if self._embedder.busy and (done := self._embedder.step()) is not None:
                self.socket.send(encode(Embedded(*done)))
            if self._scorer.busy and (done := self._scorer.step()) is not None:
                self.socket.send(encode(Scored(*done)))
            if self.engine.shelving:
                self.engine.shelve()
            if not (self._checked or self.engine.busy) and time.monotonic() - self._stepped > CHECK_AFTER:
                self.engine.check()
                self._checked = True

    def close(self) -> None:
        """Put what is left on the shelf, as far as there is time."""
        until = time.monotonic() + SHELVING
        while self.engine.shelving and time.monotonic() < until:
            self.engine.shelve()

    @property
    def _aside(self) -> bool:
        """Whether anything is computed beside answers."""
        return self._embedder.busy or self._scorer.busy

    def _patience(self) -> int | None:
        """Milliseconds to listen: the next step is planned when the one under way is about to end, and not before."""
        if self._aside or self.engine.shelving:
            return 0
        if not self.engine.busy:
            return LOADING if self._deployment.loading or self._desk.waiting else None
        return int(1e3 * max(0.0, self.engine.seconds_left() - PLANNING))

    def _hears(self, patience: int | None) -> bool:
        """Whether a message came within so many milliseconds. With none to wait ZeroMQ is asked without a poller."""
        if patience == 0:
            return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return bool(self.socket.poll(patience))

    def _listen(self) -> None:
        while True:
            try:
                message = decode_to_engine(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._obey(message)

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Submit():
                if self._desk.take(message):
                    self._add(message)
            case Embed(number, prompts, pooling, normalize, tenant):
                with self._refusing(number):
                    self._embedder.add(number, prompts, pooling, normalize=normalize, tenant=tenant)
            case Score(number, prompts, top, tenant):
                with self._refusing(number):
                    self._scorer.add(number, prompts, top, tenant)
            case Cancel(number):
                self._embedder.drop(number)
                self._scorer.drop(number)
                self._desk.drop(number)
                self.engine.cancel(number)
                self.engine.timings.pop(number, None)
            case Ping():
                self.socket.send(encode(Pong(self._stats())))
            case Explain(number):
                waterfall = explain_traffic(self.engine)
                self.socket.send(encode(Explained(number, json.dumps(waterfall) if waterfall else "")))
            case Deploy():
                self._say(self._deployment.begin(message))
            case Stop():
                self._stopping = True

    def _add(self, request: Submit, problem: str = "") -> None:
        with self._refusing(request.number):
            if problem:
                raise UsageError(problem)
            self.engine.add(request.prompt, request.params, request.terms, request.number)

    @contextlib.contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """What turns out to be wrong is said to whoever asked."""
        try:
            yield
        except UsageError as error:
            self.socket.send(encode(Refused(number, str(error))))

    def _say(self, deployed: Deployed | None) -> None:
        if deployed is not None:
            rollout = self._deployment.stats()
            self.socket.send(encode(Deployed(deployed.number, deployed.problem, deployed.warnings, rollout)))

    def _step(self) -> None:
        news = self.engine.step()
        if not news:
            return
        ended = {}
        for number in {chunk.request for chunk in news if chunk.finish_reason is not None}:
            if self.engine.timings[number].finished is not None:
                ended[number] = self._timings(self.engine.timings.pop(number))
        self.socket.send(encode(News(news, ended)))

    def _timings(self, t: Timings) -> RequestTimings:
        ended = t.finished or t.arrived
        started = t.started or ended
        return RequestTimings(
            t.prompt_tokens,
            t.cached_tokens,
            t.generated,
            t.queue_seconds,
            (t.first_token or ended) - started,
            t.decode_seconds,
            t.preemptions,
            t.decode_tok_s / self.ceiling if self.ceiling else 0.0,
            t.drafts.rounds,
            t.drafts.drafted,
            t.drafts.accepted,
            t.drafts.tau,
            t.drafts.tau - 1.0,
            t.drafts.conditional(),
            t.choices,
        )

    def _stats(self) -> Stats:
        engine, pool = self.engine, self.engine.pool
        running = sum(1 for s in engine.sequences if s.blocks)
        accounts = engine.accounting
        totals = accounts.totals
        seconds: Mapping[str, float] = {
            **accounts.seconds_by_class(),
            "scheduling": totals.scheduling,
            "dispatch": totals.dispatch,
            "output": totals.output,
            "accounting": totals.accounting,
            "hidden": totals.hidden,
            "drafting": totals.drafting,
            "outside": totals.outside,
            "idle": totals.idle,
        }
        prefix = engine.prefix.stats if engine.prefix else None
        return Stats(
            running,
            len(engine.sequences) - running + self._desk.waiting,
            1.0 - pool.available / pool.size,
            totals.steps,
            engine.preemptions,
            engine.saved,
            prefix.queries if prefix else 0,
            prefix.hits if prefix else 0,
            prefix.shelf_hits if prefix else 0,
            *self._drafts(),
            dict(totals.rows),
            dict(totals.step_rows),
            dict(seconds),
            self._deployment.stats(),
        )

    def _drafts(self) -> tuple[list[DraftStats], float, float, str | None]:
        """What drafting brought: by drafter and tag, speed-ups expected and measured, and whether it disappoints."""
        controller = self.engine.controller
        if controller is None:
            return [], 1.0, 1.0, None
        stats, ledger = [], controller.ledger
        for key, counts in ledger.counts().items():
            own = ledger.pace_of(*key)
            stats.append(
                DraftStats(
                    *key, counts.rounds, counts.drafted, counts.accepted, counts.tries, counts.hits,
                    own.predicted_speedup, own.measured_speedup,
                )
            )  # fmt: skip
        pace = ledger.pace
        return stats, pace.predicted_speedup, pace.measured_speedup, controller.disappointed()


def _start(options: WorkerOptions, socket: zmq.Socket[bytes]) -> Worker:
    begun = time.perf_counter()
    wanted, verification = Speculative.parse(options.speculative), verification_of(options.verify)
    drawing: Drawing | None = "own" if verification.wants_logits else None
    model, controller = load_speculative(options.model, options.load(), wanted, drawing=drawing)
    cost = cost_model(model)
    ceiling = measure_ceiling(model)
    if ceiling is None:
        raise UsageError("only the native backend can be served")
    limits = Limits(model.max_rows, options.max_sequences, options.tpot_target, options.ttft_target)
    engine = Engine(
        model, cost, limits=limits, prefix_cache=options.prefix_cache, controller=controller, verification=verification
    )
    if options.prefix_store:
        engine.keep_blocks(_shelf(options.prefix_store, model))
    info = EngineInfo(
        options.model,
        model.max_len,
        model.config.vocabulary,
        ceiling.threads,
        ceiling.isa,
        model.executable.numerics,
        model.executable.weight_bytes,
        model.kv_bytes,
        options.kv_format,
        engine.pool.size * BLOCK_SLOTS,
        model.spare_bytes,
        engine.spare.size * BLOCK_SLOTS,
        model.buffer_bytes,
        controller.neural.held_bytes if controller is not None and controller.neural is not None else 0,
        options.prefix_cache,
        options.speculative,
        options.verify,
        ceiling.tok_s,
        time.perf_counter() - begun,
    )
    socket.send(encode(Ready(info)))
    return Worker(model, engine, ceiling.tok_s, socket, drawing)


def _shelf(store: str, model: Model) -> Shelf:
    """The folder of cached blocks, for these very weights."""
    folder, most = parse_store(store)
    origin = fingerprint_of(model.config, open_checkpoint(resolve(model.reference)))
    assert isinstance(model.executable, NativeExecutable)
    return Shelf(folder, most, model.executable.operands.cache.block_bytes, origin)


def main() -> None:
    """Load, answer, end."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(sys.argv[3]):
        return  # it has died already
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the server lets requests end first
        signal.signal(number, signal.SIG_IGN)
    options = WorkerOptions(**json.loads(sys.argv[2]))
    context = zmq.Context(1)
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(f"ipc://{sys.argv[1]}")
    try:
        worker = _start(options, socket)
    except SlipstreamError as error:
        socket.send(encode(Failed(str(error), isinstance(error, UsageError))))
        socket.close()
        context.term()
        sys.exit(1)
    gc.freeze()  # model and tokenizer stay: no collection need look at them
    worker.run()
    worker.close()
    socket.close()
    context.term()


if __name__ == "__main__":
    main()
