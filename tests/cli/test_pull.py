"""slipstream pull from a Hub of our own: what is fetched, taken up again, verified, and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.weights.hub import choose
from tests.conftest import write_tiny_gguf
from tests.weights.hub_server import Hub

COMMAND = [sys.executable, "-c", "from slipstream.cli import main; main()"]


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    path = tmp_path / "made.gguf"
    write_tiny_gguf(path)
    return path.read_bytes()


def run(endpoint: str, home: Path, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    settings = {
        "NO_PROXY": "127.0.0.1",
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home / "hf"),
        "SLIPSTREAM_HOME": str(home / "own"),
    }
    environment = {**os.environ, **settings, "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def test_one_variant_of_several(tmp_path: Path, gguf: bytes) -> None:
    files = {"README.md": b"#", "tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf + bytes(32), "run.py": b"raise"}
    hub = Hub("org/tiny-GGUF", files)
    with hub.serve() as endpoint:
        out = run(endpoint, tmp_path, "pull", "hf:org/tiny-GGUF", "--json")
        assert out.returncode == 0, out.stderr
        report = json.loads(out.stdout)
        assert Path(report["path"]).name == "tiny-Q4_K_M.gguf"
        assert report["verified_files"] == 1
        assert report["bytes"] == len(gguf)
        other = json.loads(run(endpoint, tmp_path, "pull", "hf:org/tiny-GGUF@main:q8_0", "--json").stdout)
        assert Path(other["path"]).read_bytes() == gguf + bytes(32)
        wrong = run(endpoint, tmp_path, "pull", "hf:org/tiny-GGUF:Q2_K")
        assert wrong.returncode == 1
        assert "tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in wrong.stderr
        missing = run(endpoint, tmp_path, "pull", "hf:org/nothing")
        assert missing.returncode == 1
        assert "hf:org/nothing" in missing.stderr
    fetched = {path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path}
    assert {path.rpartition("/")[2] for path in fetched} == {"tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"}
    for offline in (True, False):  # the server is gone
        again = run(
            endpoint, tmp_path, "generate", "hf:org/tiny-GGUF:Q8_0", "-p", "x", "--max-tokens", "1", offline=offline
        )
        assert again.returncode == 0, again.stderr
    nowhere = run(endpoint, tmp_path, "pull", "hf:org/other", offline=True)
    assert nowhere.returncode == 1
    assert "not on this machine" in nowhere.stderr


def test_what_breaks_off_is_taken_up_again(tmp_path: Path, gguf: bytes) -> None:
    gguf += bytes(24 << 20)  # huggingface_hub keeps whole pieces of 10 MB
    hub = Hub("org/tiny", {"m.gguf": gguf}, breaks=1)
    with hub.serve() as endpoint:
        out = run(endpoint, tmp_path, "pull", "hf:org/tiny", "--json")
        if out.returncode:
            out = run(endpoint, tmp_path, "pull", "hf:org/tiny", "--json")
        assert out.returncode == 0, out.stderr
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("m.gguf")]
    assert any(asked.startswith("bytes=1") for asked in ranges), ranges
    assert Path(json.loads(out.stdout)["path"]).read_bytes() == gguf


def test_a_folder_with_its_progress(tmp_path: Path, gguf: bytes) -> None:
    files = {"config.json": b"{}", "model.safetensors": gguf, "model.bin": gguf, "code.py": b"raise"}
    script = "from slipstream.weights.hub import fetch, verify; path = fetch('org/m', print); print(verify(path), path)"
    with Hub("org/m", files).serve() as endpoint:
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        lines = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).splitlines()
    count, _, folder = lines[-1].partition(" ")
    assert count == "2"
    assert {file.name for file in Path(folder).iterdir()} == {"config.json", "model.safetensors"}
    assert f"fetching org/m {len(gguf) + 2} {len(gguf) + 2}" in lines


def test_damage_is_found_and_fetched_anew(tmp_path: Path, gguf: bytes) -> None:
    with Hub("org/tiny", {"m.gguf": gguf}).serve() as endpoint:
        path = Path(json.loads(run(endpoint, tmp_path, "pull", "hf:org/tiny", "--json").stdout)["path"])
        blob = path.resolve()
        blob.chmod(0o644)
        damaged = bytearray(gguf)
        damaged[-100] ^= 1
        blob.write_bytes(damaged)
        out = run(endpoint, tmp_path, "pull", "hf:org/tiny")
        assert out.returncode == 1
        assert "damaged" in out.stderr
        assert "pull the model again" in out.stderr
        assert run(endpoint, tmp_path, "pull", "hf:org/tiny").returncode == 0
        assert path.read_bytes() == gguf


@pytest.mark.parametrize(
    ("files", "variant", "chosen"),
    [
        (["config.json", "model.safetensors", "m-Q4_K_M.gguf"], "", []),
        (["config.json", "model.safetensors", "m-Q4_K_M.gguf"], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (["only.gguf", "mmproj-f16.gguf"], "", ["only.gguf"]),
        (["m.Q4_0.gguf", "m.Q4_K_M.gguf", "m.Q4_K_S.gguf"], "", ["m.Q4_K_M.gguf"]),
        (["m.Q4_0.gguf", "m.Q4_K_M.gguf"], "m.Q4_0.gguf", ["m.Q4_0.gguf"]),
        (
            ["Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "m-Q4_0.gguf"],
            "q8_0",
            ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"],
        ),
    ],
)
def test_which_files_are_the_model(files: list[str], variant: str, chosen: list[str]) -> None:
    assert choose(files, variant) == chosen


@pytest.mark.parametrize(
    ("files", "variant", "words"),
    [
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], "", "no file fits 'Q4_K_M'"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "2 files fit"),
        (["README.md"], "", "neither safetensors nor GGUF"),
        (["README.md"], "Q8_0", "no GGUF file"),
        (["m-Q4_K_M.gguf"], "Q4_K", "no file fits"),
    ],
)
def test_a_choice_that_is_none(files: list[str], variant: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(files, variant)
