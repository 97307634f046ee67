"""A server with two keys, for all attacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import KEY, LIMITED, Server, start, stop


@pytest.fixture(scope="package")
def tenants(tiny_gguf: Path) -> Iterator[Server]:
    running = start(
        tiny_gguf, "--api-key", KEY, "--api-key", LIMITED, "--threads", "1", "--kv-cache-gb", "0.02"
    )  # fmt: skip
    yield running
    stop(running)
