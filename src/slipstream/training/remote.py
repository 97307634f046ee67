"""Remote: a server's admin interface, as the command line asks it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError, UsageError

SECONDS = 150.0


class UnreachableError(SlipstreamError):
    """Nobody answers there, for now."""


@dataclass(slots=True)
class Server:
    """Where it is, and the key that may administer it."""

    url: str
    key: str | None = None
    _said: float = -1.0

    def drafter(self) -> dict[str, Any]:
        """How drafters fare there. Raises SlipstreamError."""
        return self._json(self._ask("/admin/drafter"))

    def deploy(self, folder: str, stage: str, share: float, *, auto: bool) -> dict[str, Any]:
        """Deploy a drafter or change its stage. Raises SlipstreamError."""
        body = {"drafter": folder, "stage": stage, "share": share, "auto": auto}
        return self._json(self._ask("/admin/drafter", json.dumps(body).encode()))

    def busy(self) -> bool:
        """Whether it has requests, or had some since this was asked last; a server that does not answer has.

        Raises SlipstreamError if it refuses to say.
        """
        try:
            lines = self._ask("/metrics", seconds=2.0).decode().splitlines()
        except UnreachableError:
            return True

        def total(*names: str) -> float:
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))

        said, before = total("vllm:generation_tokens_total{"), self._said
        self._said = said
        return total("vllm:num_requests_running{", "vllm:num_requests_waiting{") > 0 or said > before >= 0

    def _ask(self, path: str, body: bytes | None = None, seconds: float = SECONDS) -> bytes:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"a server's address begins with http:// or https://, not {self.url!r}")
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url.rstrip("/") + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return bytes(answer.read(1 << 24))
        except urllib.error.HTTPError as error:
            raise SlipstreamError(f"{self.url}: {_message(error.read(1 << 16)) or error.reason}") from error
        except (OSError, ValueError) as error:
            raise UnreachableError(f"{self.url}: {error}") from error

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError as error:
            raise SlipstreamError(f"{self.url}: does not answer as slipstream serve does") from error
        return dict(value)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
