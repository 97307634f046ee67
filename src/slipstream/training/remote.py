"""Remote: a server's admin interface, as the command line asks it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError, UsageError

SECONDS, SOON = 150.0, 2.0
"""Within which it answers what may take a while, and what may not."""


class UnreachableError(SlipstreamError):
    """Nobody answers there, for now."""


@dataclass(slots=True)
class Server:
    """Where it is, and the key that may administer it."""

    url: str
    key: str | None = None
    _begun: int | None = None

    def drafter(self) -> dict[str, Any]:
        """How drafters fare there. Raises SlipstreamError."""
        return self._json(self._ask("/admin/drafter"))

    def deploy(self, folder: str, stage: str, share: float, *, auto: bool) -> dict[str, Any]:
        """Deploy a drafter or change its stage. Raises SlipstreamError."""
        body = {"drafter": folder, "stage": stage, "share": share, "auto": auto}
        return self._json(self._ask("/admin/drafter", json.dumps(body).encode()))

    def busy(self, wait: float = 0.0) -> bool:
        """Whether it has requests, or had some since this was asked last; a server that does not answer has.

        If it has none, waits so many seconds for one to come, and answers when it does. Raises SlipstreamError if it
        refuses to say.
        """
        path, before = f"/admin/activity?wait={wait:g}", self._begun
        if before is not None:
            path += f"&since={before}"
        try:
            said = self._json(self._ask(path, seconds=wait + SOON))
        except UnreachableError:
            return True
        try:
            now, self._begun = int(said["open"]), int(said["begun"])
        except (KeyError, TypeError, ValueError) as error:
            raise SlipstreamError(f"{self.url}: does not answer as slipstream serve does") from error
        return now > 0 or before not in (None, self._begun)

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
