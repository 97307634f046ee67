"""Bodies: what a request brings, within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from slipstream.serving.errors import GONE, ApiError, bad_request

BODY_SECONDS = 30.0
"""A body that has not arrived by then is given up."""


async def read_body(request: Request, limit: int) -> bytes:
    """All of a body. Raises ApiError: 413 where it has more than `limit` bytes, 408 where it does not come, 499 where
    its client leaves before.
    """

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
    except ClientDisconnect as error:
        raise ApiError(499, GONE) from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from error


def object_of(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object. Raises ApiError."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object")
    return value
