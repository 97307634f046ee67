"""Who leaves is gone within a step, at whatever stage: nothing of his is planned after the step that was under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from slipstream.engine import Engine, Model, Terms
from slipstream.engine.messages import Cancel, News, Stop, Submit, decode_from_engine
from slipstream.engine.output import Chunk
from slipstream.engine.worker import Worker
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Limits, Sequence
from slipstream.text.grammars import of_regex
from tests.engine.test_worker import ask, sockets

__all__ = ["sockets"]

WHO, OTHER, ANSWER = 7, 8, 40
LAST = 5
"""The step during which he leaves."""
STAGES: dict[str, tuple[int, str, int, Callable[[list[Sequence]], bool]]] = {
    "queued": (3, "", 1, lambda his: not his[0].blocks),
    "in his prompt": (90, "", 1, lambda his: 10 < his[0].computed < 80),
    "in his answer": (3, "", 1, lambda his: his[0].generated > 1),
    "in several answers": (3, "", 3, lambda his: len(his) == 3 and all(s.generated for s in his)),
    "at the desk": (3, of_regex("a{300}"), 1, lambda his: not his),
}
"""Tokens of his prompt, his grammar, how many answers he wants, and how it shows where he is."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_gone_within_a_step(
    tiny_model: Model,
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    ahead: bool,
) -> None:
    length, grammar, choices, there = STAGES[stage]
    client, server = sockets
    limits = Limits(8, 1 if stage == "queued" else 100)
    engine = Engine(tiny_model, limits=limits, ahead=ahead, prefix_cache=False)
    worker, step, compiled, seen = Worker(tiny_model, engine, 100.0, server), engine.step, threading.Event(), [0]

    def watched() -> list[Chunk]:
        his = [s for s in engine.sequences if s.tokens[0] == WHO]
        seen.append(len(his))
        if len(seen) - 1 == LAST:
            assert there(his), "he is where he should be"
            assert worker._desk.waiting == (stage == "at the desk")
            ask(client, Cancel(WHO))
            ask(client, Stop())
        return step()

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr(engine.grammars, "learn", lambda *_: compiled.wait(30))
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    ask(client, Submit(OTHER, [OTHER], params, Terms()))
    ask(client, Submit(WHO, [WHO] * length, replace(params, n=choices, grammar=grammar), Terms()))
    worker.run()
    compiled.set()
    assert not any(seen[LAST + 1 :]), "the step under way was his last"
    assert len(seen) > LAST + 20, "while the other went on"
    engine.check()
    assert engine.pool.free == engine.pool.size
    heard = 0
    while client.poll(0):
        message = decode_from_engine(client.recv())
        assert isinstance(message, News)
        heard += sum(len(chunk.token_ids) for chunk in message.chunks if chunk.request == OTHER)
    assert heard == ANSWER
