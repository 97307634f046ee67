"""A file by its URL: streamed to disk, taken up again where it broke off, compared with its sha256."""

from __future__ import annotations

import base64
import email.message
import hashlib
import shutil
import ssl
import urllib.request
from collections.abc import Collection
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.response import addinfourl

from slipstream.weights.hub import FetchError
from slipstream.weights.sums import Progress, Sums

NETWORK_ERRORS = (OSError, HTTPException)
TIMEOUT = 60.0
TRIES = 5
"""How often one call goes on with a file whose connection breaks off; only while each time brings something."""
_BLOCK = 1 << 16
_OWN_HOSTS = ("localhost", "127.0.0.1", "::1")


class Web:
    """Opens URLs with pip's settings: a file of certificates, a proxy, hosts trusted without encryption."""

    def __init__(self, cert: str = "", proxy: str = "", trusted: Collection[str] = ()):
        self._trusted = {*_OWN_HOSTS, *trusted}
        folder = bool(cert) and Path(cert).is_dir()
        try:
            context = ssl.create_default_context(
                cafile=None if folder else cert or None, capath=cert if folder else None
            )
        except OSError as error:
            raise FetchError(f"{cert}: these certificates cannot be read ({error}); see pip's setting cert") from error
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context), _Redirect(self)]
        if proxy:
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self._opener = urllib.request.build_opener(*handlers)

    def open(self, url: str, headers: dict[str, str]) -> addinfourl:
        """Raises NETWORK_ERRORS."""
        self.check(url, ("https", "http", "file"))
        request = urllib.request.Request(without_password(url), headers={"User-Agent": "slipstream", **headers})
        place = urlsplit(url)
        if place.username is not None:
            pair = f"{unquote(place.username)}:{unquote(place.password or '')}"
            # Unredirected: what opens one host is not told to another.
            request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        response: addinfourl = self._opener.open(request, timeout=TIMEOUT)
        return response

    def check(self, url: str, schemes: Collection[str]) -> None:
        """As with pip, nothing comes over the network unencrypted unless the host is trusted by name."""
        try:
            place = urlsplit(url)
            host = f"{place.hostname}:{place.port}"
        except ValueError as error:
            raise URLError(f"{url!r} is no URL ({error})") from error
        if place.scheme not in schemes:
            raise URLError(f"{place.scheme!r} is none of {', '.join(schemes)}")
        if place.scheme == "http" and not {place.hostname, host} & self._trusted:
            raise URLError(f"{place.hostname} is asked without encryption; use https or pip's setting trusted-host")


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows only to where one may go at once."""

    def __init__(self, web: Web):
        self._web = web

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        self._web.check(newurl, ("https", "http"))
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    place = urlsplit(url)
    return place._replace(netloc=place.netloc.rpartition("@")[2]).geturl()


def reason(error: BaseException) -> str:
    """What went wrong, without urllib's wrapping."""
    inner = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    return str(inner) or type(inner).__name__


def download(web: Web, url: str, target: Path, what: str, sha256: str = "", progress: Progress | None = None) -> None:
    """Fetch the file to `target`. What came before an interruption is kept beside it and taken up by the next call.

    Without a sum nothing tells whether an old part is of the same file, so each call begins anew. Raises FetchError.
    """
    if sha256 and target.exists() and Sums([target], progress).of(target, hashlib.sha256()) == sha256:
        return
    part = target.with_name(target.name + ".part")
    if not sha256:
        part.unlink(missing_ok=True)
    for left in reversed(range(TRIES)):
        before = _size(part)
        try:
            _stream(web, url, part, what, progress)
            break
        except NETWORK_ERRORS as error:
            if left and _size(part) > before:
                continue
            kept = f"; {_size(part) / 1e6:.1f} MB are kept" if sha256 and _size(part) else ""
            raise FetchError(
                f"{what}: {without_password(url)}: {reason(error)}{kept}; check the connection and pull again"
            ) from error
    if sha256 and Sums([part], progress).of(part, hashlib.sha256()) != sha256:
        part.unlink()
        raise FetchError(
            f"{what}: {without_password(url)}: the sha256 is not {sha256}, which the index names; it has been removed. "
            "Pull again; if it stays so, do not trust this index"
        )
    part.replace(target)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _stream(web: Web, url: str, part: Path, what: str, progress: Progress | None) -> None:
    have = _size(part)
    try:
        response = web.open(url, {"Range": f"bytes={have}-"} if have else {})
    except HTTPError as error:
        if error.code == 416 and have:
            return  # nothing lies behind what is here; the sum tells whether that is the file
        raise
    with response:
        headers: email.message.Message[Any, Any] = response.headers
        if response.status == 206 and not headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            raise OSError("the server sent another part than it was asked for")
        if response.status != 206:  # also a file: URL, which has no status
            have = 0
        length = int(headers.get("Content-Length") or 0)
        total = have + length if length else 0
        if length > shutil.disk_usage(part.parent).free:
            raise FetchError(f"{what}: {length / 1e9:.1f} GB more do not fit on the disk of {part.parent}; make room")
        with part.open("ab" if have else "wb") as out:
            while block := response.read(_BLOCK):
                out.write(block)
                have += len(block)
                if progress:
                    progress(f"fetching {what}", have, total)
    if have < total:
        raise OSError(f"the connection broke off after {have} of {total} bytes")
