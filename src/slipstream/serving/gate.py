"""The gate before all routes: who is let in, and what is said about routes that do not exist."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.serving.errors import ApiError
from slipstream.serving.keys import Key, Keys
from slipstream.serving.messages import error_body, is_theirs


class Gate:
    """Every route but /health needs a key, if there are any; unknown routes included."""

    def __init__(self, inner: ASGIApp, keys: Keys):
        self.inner, self.keys = inner, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            shown = headers.get(b"authorization", b"").decode("latin-1")
            if not shown and b"x-api-key" in headers:  # as Anthropic's clients show it
                shown = f"Bearer {headers[b'x-api-key'].decode('latin-1')}"
            try:
                scope["slipstream.key"] = Key("", b"") if scope["path"] == "/health" else self.keys.find(shown)
            except ApiError as error:
                await _told(error, scope["path"])(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self.inner(scope, receive, send)


async def no_route(request: Request, error: Exception) -> Response:
    """404, in the shape that the caller's client expects."""
    path = request.url.path
    return _told(ApiError(404, f"there is no route {path[:200]}", code="unknown_url"), path)


async def no_method(request: Request, error: Exception) -> Response:
    """405, likewise."""
    path, headers = request.url.path, dict(getattr(error, "headers", None) or {})
    message = f"{request.method} is not allowed on {path[:200]}"
    return _told(ApiError(405, message, code="method_not_allowed", headers=headers), path)


def _told(error: ApiError, path: str) -> Response:
    body = error_body(error) if is_theirs(path) else error.body()
    return Response(body, error.status, error.headers, "application/json")
