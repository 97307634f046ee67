"""Hugging Face repositories: which files of one make up a model, fetched with progress, resumed, verified."""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from slipstream.errors import SlipstreamError, UsageError
from slipstream.weights.sums import Digest, Progress, Sums

log = logging.getLogger(__name__)

FOLDER_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""What is fetched of a repository of safetensors."""
USUAL_VARIANT = "Q4_K_M"
_LATER_PART = re.compile(r"-(?!0*1-of-)\d{5}-of-\d{5}\.gguf$")


class FetchError(SlipstreamError):
    """A model could not be fetched."""


@dataclass(frozen=True, slots=True)
class HubName:
    """org/name[@revision][:variant]; the variant is a GGUF file's name, or the part of it that tells it apart."""

    repository: str
    revision: str | None
    variant: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UsageError if it is not written like that."""
        place, _, variant = text.partition(":")
        repository, _, revision = place.partition("@")
        if repository.count("/") != 1:
            raise UsageError(
                f"hf:{text}: a repository is written hf:org/name, with @revision and, of several GGUF files, "
                f":variant (as in :{USUAL_VARIANT}) if need be"
            )
        return cls(repository, revision or None, variant)


def choose(files: Sequence[str], variant: str) -> list[str]:
    """Of a repository's files the parts of one GGUF model, in order; empty: the folder itself is the model.

    Raises ValueError with the choice there is if the variant fits no model or several.
    """
    models = sorted(f for f in files if f.endswith(".gguf") and not _LATER_PART.search(f) and "mmproj" not in f.lower())
    if not variant and any(f.endswith(".safetensors") for f in files):
        return []
    if not models:
        raise ValueError(f"no GGUF file for variant {variant!r}" if variant else "neither safetensors nor GGUF files")
    wanted = variant or USUAL_VARIANT
    fitting = models if not variant and len(models) == 1 else [f for f in models if _fits(f, wanted)]
    if len(fitting) != 1:
        stems = ", ".join(PurePosixPath(f).name for f in models[:20])
        which = f"{len(fitting)} files fit {wanted!r}" if fitting else f"no file fits {wanted!r}"
        raise ValueError(f"{which}; write :VARIANT behind the name, which is part of one of {stems}")
    first = fitting[0]
    stem, split, total = first.rpartition("-00001-of-")
    return (
        [first] if not split else sorted(f for f in files if re.fullmatch(re.escape(stem) + r"-\d{5}-of-" + total, f))
    )


def _fits(file: str, variant: str) -> bool:
    """Whether the variant is the file's name, or stands in its path between marks."""
    return file == variant or bool(re.search(rf"(^|[-./])({re.escape(variant)})(?=[-./])", file, re.IGNORECASE))


_fetched: dict[str, Path] = {}
"""What names were found to be: within a process a branch does not move."""


def fetch(text: str, progress: Progress | None = None) -> Path:
    """The model's folder or (first) GGUF file in Hugging Face's cache. An interrupted fetch is taken up again.

    Raises FetchError or UsageError.
    """
    if text in _fetched:
        return _fetched[text]
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = HubName.parse(text)
    try:
        parts = choose(_files(name), name.variant)
        patterns = parts or list(FOLDER_PATTERNS)
        folder = Path(
            snapshot_download(
                name.repository, revision=name.revision, allow_patterns=patterns, tqdm_class=_bar(text, progress)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FetchError(
            f"hf:{text}: {reason}; check the name and the connection, or set HF_HUB_OFFLINE=1 to use "
            "what is already on this machine"
        ) from error
    _fetched[text] = folder / parts[0] if parts else folder
    return _fetched[text]


def _files(name: HubName) -> list[str]:
    """Names of the repository's files; without a connection, of those that are here."""
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HfHubHTTPError

    try:
        return HfApi().list_repo_files(name.repository, revision=name.revision)
    except HfHubHTTPError:
        raise
    except Exception as error:
        log.debug("the Hub was not reached (%s); looking at what is here", error)
        try:
            repositories = scan_cache_dir().repos
        except CacheNotFound:
            repositories = frozenset()
        wanted = name.revision or "main"
        for repository in repositories:
            if repository.repo_id == name.repository and repository.repo_type == "model":
                for revision in repository.revisions:
                    if wanted in revision.refs or revision.commit_hash == wanted:
                        root = revision.snapshot_path
                        return [f.file_path.relative_to(root).as_posix() for f in revision.files]
        raise FetchError(
            f"hf:{name.repository}: the Hub was not reached ({str(error).splitlines()[0] or type(error).__name__}), "
            "and the repository is not on this machine; check the connection"
        ) from error


def _bar(text: str, progress: Progress | None) -> Any:
    """A bar for huggingface_hub that draws nothing and tells `progress` of the bytes."""
    tqdm: Any = importlib.import_module("tqdm").tqdm  # has no types

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress and self._bytes and self.total:
                progress(f"fetching {text}", int(min(self.n, self.total)), int(self.total))

    return Bar


def verify(path: Path, progress: Progress | None = None) -> int:
    """Compare the files of a fetched model with the sums that Hugging Face's cache is named by; returns how many.

    A file that differs is taken out of the cache. Raises FetchError.
    """
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    else:
        stem, split, total = path.name.rpartition("-00001-of-")
        files = sorted(path.parent.glob(f"{stem}-*-of-{total}")) if split else [path]
    sums, compared = Sums(files, progress), 0
    for file in files:
        blob = file.resolve()
        digest: Digest
        if re.fullmatch(r"[0-9a-f]{64}", blob.name):
            digest = hashlib.sha256()
        elif re.fullmatch(r"[0-9a-f]{40}", blob.name):  # what git names a file by
            digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        else:
            continue
        if sums.of(blob, digest) != blob.name:
            blob.unlink()
            file.unlink(missing_ok=True)
            raise FetchError(f"{file.name} was damaged (its sum differs) and has been removed; pull the model again")
        compared += 1
    return compared
