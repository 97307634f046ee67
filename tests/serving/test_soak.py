"""Long runs on a live server: thousands of requests with cancellations, and an engine that is killed time and again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import KEY, Server
from tests.serving.test_faults import CHAT, body, idle

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
REQUESTS, STREAMS, KILLS = 10_000, 32, 100


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


async def ask(client: httpx.AsyncClient, rng: random.Random) -> int:
    """One request; every fifth is left after a moment. Returns its status, 0 if it was left."""
    request = body(
        rng.randint(1, 60),
        n=rng.choice([1, 1, 2]),
        stream=rng.random() < 0.5,
        seed=rng.randrange(1 << 30),
        messages=[{"role": "user", "content": "word " * rng.randint(1, 60)}],
    )
    leave = rng.uniform(0.0, 0.2) if rng.random() < 0.2 else None
    try:
        async with asyncio.timeout(leave):
            return (await client.post(CHAT, json=request)).status_code
    except (TimeoutError, httpx.HTTPError):
        if leave is None:
            raise
        return 0


async def many(server: Server, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    left = iter(range(count))
    statuses: list[int] = []
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:

        async def worker() -> None:
            for _ in left:
                statuses.append(await ask(client, rng))

        await asyncio.gather(*(worker() for _ in range(STREAMS)))
    return statuses


def test_soak(server: Server) -> None:
    pids = (server.process.pid, server.engine_pid())
    asyncio.run(many(server, REQUESTS // 5, 1))
    idle(server, 30)
    before = [resident(pid) for pid in pids]
    statuses = asyncio.run(many(server, REQUESTS * 4 // 5, 2))
    idle(server, 30)
    assert set(statuses) <= {0, 200}
    assert statuses.count(0) > REQUESTS // 20
    for pid, earlier in zip(pids, before, strict=True):
        assert resident(pid) < 1.1 * earlier + (8 << 20), "memory grows"
    assert server.engine_pid() == pids[1]


def wait_for_another(server: Server, pid: int) -> None:
    """Until the engine that was killed has a successor that is loaded."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.CalledProcessError, IndexError):
            if server.engine_pid() != pid and httpx.get(f"{server.url}/health").status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("".join(server.log))


def test_killed_at_random_points(server: Server) -> None:
    """Before the first token, between two, after the last: always an answer, a refusal or an error in the stream."""
    rng, hit = random.Random(3), Counter[str]()
    with server.client() as http:
        for _ in range(KILLS):
            said = [{"role": "user", "content": "word " * rng.choice([1, 90])}]
            request, after = body(300, n=4, messages=said, stream=True), rng.uniform(0.0, rng.choice([0.012, 0.12]))
            pid = server.engine_pid()

            async def both(request: dict[str, object] = request, after: float = after) -> tuple[int, str]:
                headers = {"Authorization": f"Bearer {KEY}"}
                async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
                    asking = asyncio.create_task(client.post(CHAT, json=request))
                    await asyncio.sleep(after)
                    server.kill_engine()
                    answer = await asking
                    return answer.status_code, answer.text

            status, text = asyncio.run(both())
            assert status in (200, 503)
            ended = "data: [DONE]" in text
            assert ended != ("ended unexpectedly" in text or "being started" in text)
            asked = "ended unexpectedly" in text  # not only refused
            hit["whole" if ended else "answer" if status == 200 else "prompt" if asked else "refused"] += 1
            wait_for_another(server, pid)
        assert http.post(CHAT, json=body(3)).status_code == 200
    assert min(hit["prompt"], hit["answer"]) >= KILLS // 20, hit
    idle(server)
