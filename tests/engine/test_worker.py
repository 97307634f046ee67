"""The engine's process, without the process: it listens while a step runs, and checks itself when nobody asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from slipstream.engine import Engine, Model, Terms
from slipstream.engine import desk as desk_module
from slipstream.engine import worker as worker_module
from slipstream.engine.messages import News, Ping, Pong, Stop, Submit, decode_from_engine, encode
from slipstream.engine.worker import Worker
from slipstream.program.sampling import SamplingParams
from slipstream.text import grammars


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://worker")
    theirs.connect("inproc://worker")
    yield ours, theirs
    ours.close(0)
    theirs.close(0)
    context.term()


def ask(socket: zmq.Socket[bytes], message: object) -> None:
    socket.send(encode(message))


@pytest.mark.parametrize("ahead", [False, True])
def test_an_idle_engine_checks_itself_once(
    tiny_model: Model,
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_AFTER", 0.0)
    engine = Engine(tiny_model, ahead=ahead)
    checks: list[bool] = []
    monkeypatch.setattr(engine, "check", lambda: checks.append(engine.busy))
    client, server = sockets
    thread = threading.Thread(target=Worker(tiny_model, engine, 100.0, server).run)
    ask(client, Ping())
    ask(client, Submit(7, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), Terms()))
    thread.start()
    news, tokens = [], 0
    while tokens < 5:
        assert client.poll(10_000), "the worker says nothing"
        message = decode_from_engine(client.recv())
        news.append(message)
        tokens += len(message.chunks) if isinstance(message, News) else 0
    for _ in range(2):
        ask(client, Ping())
    ask(client, Stop())
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(news[0], Pong)
    assert checks == [False]


def test_a_damaged_engine_ends(
    tiny_model: Model, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is started again, and nobody's tokens come from another's blocks."""
    monkeypatch.setattr(worker_module, "CHECK_AFTER", 0.0)
    engine = Engine(tiny_model)
    client, server = sockets
    worker = Worker(tiny_model, engine, 100.0, server)
    ask(client, Submit(7, [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), Terms()))
    ask(client, Stop())
    leaked = engine.pool.take(1)
    with pytest.raises(ValueError, match="disagree"):
        worker.run()
    engine.pool.release(leaked)


def test_a_grammar_that_is_being_compiled_holds_up_nobody(
    tiny_model: Model, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: it does not end here before somebody else's whole answer is there. No clock decides."""
    monkeypatch.setattr(desk_module, "MOST_SECONDS", 60.0)
    engine, said = Engine(tiny_model), threading.Event()
    learn = engine.grammars.learn
    monkeypatch.setattr(engine.grammars, "learn", lambda *one: learn(*one) if said.wait(30) else None)
    client, server = sockets
    thread = threading.Thread(target=Worker(tiny_model, engine, 100.0, server).run)
    thread.start()
    ask(client, Submit(1, [1, 2, 3], SamplingParams(max_tokens=5, grammar=grammars.of_regex("a{9}")), Terms()))
    ask(client, Submit(2, [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True), Terms()))
    text = ""
    try:
        for number, tokens in ((2, 30), (1, 5)):
            while tokens:
                assert client.poll(10_000), "it waits for the grammar"
                message = decode_from_engine(client.recv())
                assert isinstance(message, News)
                for chunk in message.chunks:
                    assert chunk.request == number
                    text += chunk.text if number == 1 else ""
                    tokens -= len(chunk.token_ids)
            if not said.is_set():
                ask(client, Ping())
                pong = decode_from_engine(client.recv()) if client.poll(10_000) else None
                assert isinstance(pong, Pong)
                assert (pong.stats.running, pong.stats.waiting) == (0, 1), "who waits for his grammar waits"
            said.set()
    finally:
        said.set()
        ask(client, Stop())
        thread.join(30)
    assert text == "aaaaa"
