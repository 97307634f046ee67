"""Errors as OpenAI's clients expect them: status, type, message, and the parameter at fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

GONE = "the client went away"


@dataclass
class ApiError(Exception):
    """What a request gets instead of an answer."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def object(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The same as JSON."""
        return msgspec.json.encode(self.object())

    def response(self) -> Response:
        """The same as a response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """The request is at fault."""
    return ApiError(400, message, param=param)
