"""The engine's process as its client sees it: one that hangs is ended and started again, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import zmq

from slipstream.engine import Terms
from slipstream.engine import client as client_module
from slipstream.engine.client import EngineClient, EngineDiedError
from slipstream.engine.messages import ArmStats, Deployed, EngineInfo, Pong, Ready, RolloutStats, Stats
from slipstream.engine.worker import WorkerOptions
from slipstream.program.sampling import SamplingParams
from tests.metrics_page import example


def test_a_hanging_engine_is_started_again(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HUNG", 1.5)
    monkeypatch.setattr(client_module, "PING_EVERY", 0.2)

    async def said(client: EngineClient) -> int:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        return sum([len(chunks) async for chunks, _ in client.generate([1, 2, 3], params, Terms())])

    async def run() -> None:
        client = EngineClient(WorkerOptions(str(tiny_gguf), threads=1, cache_bytes=10**7))
        await client.start()
        try:
            assert await said(client) == 5
            assert client.healthy
            assert client._process is not None
            os.kill(client._process.pid, signal.SIGSTOP)
            with pytest.raises(EngineDiedError):
                await asyncio.wait_for(said(client), 60)
            await asyncio.wait_for(client._ready.wait(), 60)
            assert client.restarts == 1
            assert await said(client) == 5
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("what", ["process", "socket"])
@pytest.mark.parametrize("failures", [2, 99])
def test_a_process_that_cannot_be_started_is_tried_again(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int, what: str
) -> None:
    """As when there is no memory for one, for a moment or for good: that is said, and the trying ends in time."""
    monkeypatch.setattr(client_module, "RESTART_PAUSE", 0.01)
    start, refused = asyncio.create_subprocess_exec, 0

    def refuse(kind: str) -> None:
        nonlocal refused
        if kind == what and client.info is not None and refused < failures:
            refused += 1
            raise OSError(11, "") if kind == "process" else zmq.ZMQError(11)

    async def starting(*command: str) -> asyncio.subprocess.Process:
        refuse("process")
        return await start(*command)

    def opening(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        refuse("socket")
        return socket(context, kind)

    async def run() -> None:
        nonlocal client
        client = EngineClient(WorkerOptions(str(tiny_gguf), threads=1, cache_bytes=10**7))
        await client.start()
        try:
            assert client._process is not None
            client._process.kill()
            if failures < client_module.MOST_RESTARTS:
                await asyncio.sleep(0.2)
                await asyncio.wait_for(client._ready.wait(), 60)
                params = SamplingParams(max_tokens=5, ignore_eos=True)
                assert sum([len(chunks) async for chunks, _ in client.generate([1, 2, 3], params, Terms())]) == 5
            else:
                await asyncio.wait_for(asyncio.shield(client._tasks[0]), 60)
                assert not client.ready
        finally:
            await client.close()

    client: EngineClient
    socket = zmq.Context.socket
    monkeypatch.setattr(zmq.Context, "socket", opening)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    asyncio.run(run())
    assert refused == min(failures, client_module.MOST_RESTARTS)
    assert caplog.text.count("cannot be started: ") == refused
    assert ("giving up" in caplog.text) == (failures > refused)


def test_an_engine_that_does_not_get_on_is_ill(tiny_gguf: Path) -> None:
    """It answers, and has work, but nothing comes of it."""

    async def run() -> None:
        client = EngineClient(WorkerOptions(str(tiny_gguf)))
        client._ready.set()
        client._hear(Pong(Stats(running=1, steps=7)))
        assert client.healthy
        client._got_on -= 31.0
        client._hear(Pong(Stats(running=1, steps=7)))
        assert not client.healthy
        client._hear(Pong(Stats(running=1, steps=8)))
        assert client.healthy
        client._got_on -= 31.0
        client._hear(Pong(Stats(running=0, steps=8)))
        assert client.healthy, "it has nothing to do"
        client._hear(Pong(Stats(running=0, waiting=1, steps=8)))
        assert client.healthy, "it has not had to do it for long"
        client._got_on -= 31.0
        client._hear(Pong(Stats(running=0, waiting=1, steps=8)))
        assert not client.healthy, "whoever waits is never begun"
        client._hear(Pong(Stats(running=0, waiting=1, steps=9)))
        assert client.healthy
        client._ready.clear()
        await client.close()

    asyncio.run(run())


def test_the_drafters_of_an_engine_that_was_started_again(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proven one, then the candidate, which are kept in mind until it has both: it may end in between."""
    arm, sent = ArmStats(0, 0, 1.0, 1.0), list[str]()

    def rolled(folder: str, before: str = "", outcome: str | None = None) -> RolloutStats:
        return RolloutStats(folder, "all", 1.0, False, outcome, arm, arm, before)

    def begun() -> list[str]:
        sent.clear()
        client._hear(Ready(example(EngineInfo)))
        client._hear(Pong(Stats()))
        return sent

    def done(rollout: RolloutStats | None, problem: str = "") -> list[str]:
        client._hear(Deployed(client_module._AGAIN, problem, [], rollout))
        client._hear(Pong(Stats(rollout=rollout)))
        return sent

    async def run() -> None:
        nonlocal client
        client = EngineClient(WorkerOptions(str(tiny_gguf)))
        monkeypatch.setattr(client, "_send", lambda message: sent.append(message.folder))
        assert begun() == []
        client._hear(Pong(Stats(rollout=rolled("new", "proven"))))
        assert begun() == ["proven"]
        client._hear(Pong(Stats(rollout=rolled("proven"))))
        assert begun() == ["proven"], "it ended before it had any"
        assert done(rolled("proven")) == ["proven", "new"]
        assert begun() == ["proven"], "it ended before it had both"
        assert done(rolled("proven")) == ["proven", "new"]
        assert done(rolled("new", "proven")) == ["proven", "new"]
        assert begun() == ["proven"]
        assert done(None, "its folder is gone") == ["proven", "new"]
        assert done(rolled("new")) == ["proven", "new"]
        assert begun() == ["new"]
        assert done(rolled("new", outcome="it brings nothing")) == ["new"]
        assert begun() == []
        client._ready.clear()
        await client.close()

    client: EngineClient
    asyncio.run(run())
