"""The wheel of name==version, from where pip's settings say: indexes (PEP 503 and 691) and find-links."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import url2pathname

from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from slipstream.errors import UsageError
from slipstream.weights.download import NETWORK_ERRORS, Web, download, reason, without_password
from slipstream.weights.hub import FetchError
from slipstream.weights.sums import Progress

PYPI = "https://pypi.org/simple"
MAX_PAGE = 1 << 27
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class Link:
    """A file that an index offers, with its sha256 or ""."""

    filename: str
    url: str
    sha256: str


def fetch_wheel(package: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch the wheel of name==version, without dependencies, into the folder. An interrupted fetch is taken up again.

    Raises FetchError or UsageError.
    """
    what, (name, _, version) = f"pypi:{package}", package.partition("==")
    try:
        specifier = SpecifierSet(f"=={Version(version)}")
    except InvalidVersion as error:
        raise UsageError(f"{what}: {version!r} is no version, as 1.0 is; look it up at its index") from error
    settings = pip_settings()
    web = Web(settings.get("cert", ""), settings.get("proxy", ""), settings.get("trusted-host", "").split())
    link = _choose(what, _links(what, web, canonicalize_name(name), settings), canonicalize_name(name), specifier)
    # Our own name for it: nothing an index says becomes a path. With its sum, for parts of other files are not of it.
    target = folder / f"{canonicalize_name(name)}-{Version(version)}{link.sha256[:16] and '-' + link.sha256[:16]}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    download(web, link.url, target, what, link.sha256, progress)
    return target


def pip_settings() -> dict[str, str]:
    """pip's settings for downloads, from its files (if it is there to tell them) and the environment."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found: dict[str, dict[str, str]] = {"global": {}, "download": {}}
    for line in listed.stdout.splitlines():
        place, _, value = line.partition("=")
        section, _, key = place.partition(".")
        if section in found and value[:1] in ("'", '"'):
            found[section][key] = str(ast.literal_eval(value))
    prefix = "PIP_"
    environment = {
        key.removeprefix(prefix).lower().replace("_", "-"): value
        for key, value in os.environ.items()
        if key.startswith(prefix) and value
    }
    return {**found["global"], **found["download"], **environment}


def _links(what: str, web: Web, name: str, settings: dict[str, str]) -> list[Link]:
    """What all places offer under the name, find-links first."""
    indexes = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        indexes = []
    places = [_as_url(place) for place in settings.get("find-links", "").split()]
    places += [f"{_as_url(index).rstrip('/')}/{quote(name)}/" for index in indexes]
    links, problems = [], []
    for place in places:
        try:
            links += [link for link in _page(web, place) if _is_of(link, name)]
        except NETWORK_ERRORS as error:
            problems.append(f"{without_password(place)}: {reason(error)}")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problems.append(f"{without_password(place)}: the page cannot be read ({error})")
    if not links and problems:
        raise FetchError(
            f"{what}: {'; '.join(problems)}; check the connection, and pip's index-url and proxy (pip config list)"
        )
    if not links:
        asked = ", ".join(without_password(place) for place in places) or "an empty list of indexes"
        raise FetchError(f"{what}: no wheels of that name at {asked}; check the name, or set PIP_INDEX_URL")
    return links


def _as_url(place: str) -> str:
    return place if re.match(r"(https?|file):", place) else Path(place).expanduser().absolute().as_uri()


def _page(web: Web, place: str) -> Iterable[Link]:
    """The links of an index's page, of any page, or the wheels in a folder."""
    if place.startswith("file:"):
        path = Path(url2pathname(urlsplit(place).path))
        if path.is_dir() and not (path / "index.html").exists():
            return [Link(file.name, file.as_uri(), "") for file in sorted(path.glob("*.whl"))]
        if not path.exists():
            return []
        place = (path / "index.html" if path.is_dir() else path).as_uri()
    try:
        response = web.open(place, {"Accept": _ACCEPT})
    except HTTPError as error:
        if error.code in (404, 410):
            return []
        raise
    with response:
        base, kind, raw = response.geturl(), response.headers.get_content_type(), response.read(MAX_PAGE + 1)
    if len(raw) > MAX_PAGE:
        raise ValueError(f"it has more than {MAX_PAGE} bytes")
    links = _read_json(raw, base) if kind.endswith("json") else _read_html(raw.decode(errors="replace"), base)
    return [
        Link(link.filename, _with_password(link.url, place), link.sha256)
        for link in links
        if place.startswith("file:") or not link.url.startswith("file:")  # a page out there names no file in here
    ]


def _with_password(url: str, page: str) -> str:
    """What opened the page opens the files that lie on the same host."""
    file, place = urlsplit(url), urlsplit(page)
    same = file.scheme == place.scheme and file.netloc == place.netloc.rpartition("@")[2]
    return file._replace(netloc=place.netloc).geturl() if same else url


def _read_json(raw: bytes, base: str) -> list[Link]:
    return [
        Link(file["filename"], urljoin(base, file["url"]), _sum(file["hashes"].get("sha256", "")))
        for file in json.loads(raw)["files"]
    ]


def _read_html(text: str, base: str) -> list[Link]:
    parser = _Anchors(base)
    parser.feed(text)
    links = []
    for reference in parser.found:
        url, _, fragment = urljoin(parser.base, reference).partition("#")
        known = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        links.append(Link(unquote(PurePosixPath(urlsplit(url).path).name), url, _sum(known)))
    return links


class _Anchors(HTMLParser):
    def __init__(self, base: str):
        super().__init__()
        self.base, self.found = base, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        reference = dict(attrs).get("href")
        if tag == "a" and reference:
            self.found.append(reference)
        elif tag == "base" and reference:
            self.base = urljoin(self.base, reference)


def _sum(text: str) -> str:
    return text.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", text) else ""


def _is_of(link: Link, name: str) -> bool:
    try:
        return parse_wheel_filename(link.filename)[0] == name
    except InvalidWheelFilename:
        return False


def _choose(what: str, links: list[Link], name: str, specifier: SpecifierSet) -> Link:
    """What pip would take: of the version's wheels the one whose tags this Python likes best, then the last build."""
    ranks = {tag: -number for number, tag in enumerate(sys_tags())}
    parsed = [(link, *parse_wheel_filename(link.filename)[1:]) for link in links]
    of_version = [entry for entry in parsed if specifier.contains(entry[1], prereleases=True)]
    if not of_version:
        versions = ", ".join(str(version) for version in sorted({entry[1] for entry in parsed})[-20:])
        raise FetchError(f"{what}: no wheel of that version; {name} has wheels of {versions}")
    fitting = [
        ((version, max(ranks[tag] for tag in tags & ranks.keys()), build), link)
        for link, version, build, tags in of_version
        if tags & ranks.keys()
    ]
    if not fitting:
        names = ", ".join(entry[0].filename for entry in of_version[:5])
        raise FetchError(f"{what}: none of its wheels is for this Python on this machine ({names})")
    return max(fitting, key=lambda entry: entry[0])[1]
