"""Memory: what may be used and what is free, on machines and in cgroups made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.roofline import memory

MACHINE = {"proc/meminfo": "MemTotal:  16000 kB\nMemFree:  100 kB\nMemAvailable:  9000 kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
MIB = FILES = 1 << 20
"""Bytes of cached files."""


def group(folder: str, limit: str, usage: int, names: tuple[str, str], stat: str = "") -> dict[str, str]:
    """A cgroup's files, which has `FILES` of cached files."""
    cached = f"anon {usage - FILES}\n{stat}active_file {FILES // 4}\n{stat}inactive_file {FILES - FILES // 4}\n"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": str(usage), f"{folder}/memory.stat": cached}


def second(folder: str, limit: str, usage: int) -> dict[str, str]:
    return group(f"{V2}{folder}", limit, usage, ("memory.max", "memory.current"))


def first(folder: str, limit: str, usage: int) -> dict[str, str]:
    return group(f"{V1}{folder}", limit, usage, ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_")


def of(name: str) -> dict[str, str]:
    return {"proc/self/cgroup": name}


WHOLE = 16000 << 10, 9000 << 10
CASES = {
    "no cgroups": ({}, WHOLE),
    "no limit": (of("0::/\n") | second("", "max\n", 5 * MIB), WHOLE),
    "a container": (of("0::/\n") | second("", f"{8 * MIB}\n", 5 * MIB), (8 * MIB, 4 * MIB)),
    "a service": (
        of("0::/a/b\n") | second("/a", f"{8 * MIB}", 3 * MIB) | second("/a/b", "max", MIB),
        (8 * MIB, 6 * MIB),
    ),
    "the outer one is tighter": (
        of("0::/a/b\n") | second("/a", f"{8 * MIB}", 7 * MIB) | second("/a/b", f"{4 * MIB}", MIB),
        (4 * MIB, 2 * MIB),
    ),
    "version 1": (of("9:cpu:/\n4:memory:/x\n0::/\n") | first("/x", f"{8 * MIB}", 5 * MIB), (8 * MIB, 4 * MIB)),
    "version 1 without a limit": (of("4:memory:/x\n") | first("/x", "9223372036854771712", 5 * MIB), WHOLE),
    "a container under the host's name": (
        of("4:memory:/docker/f0\n") | first("", f"{8 * MIB}", 5 * MIB),
        (8 * MIB, 4 * MIB),
    ),
    "all of it is held": (of("0::/\n") | second("", f"{4 * MIB}", 6 * MIB), (4 * MIB, 0)),
    "a limit past the machine": (of("0::/\n") | second("", str(1 << 40), 5 * MIB), WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tightest_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected = CASES[name]
    for path, text in (MACHINE | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(memory, "SYSTEM", tmp_path)
    assert (memory.usable_memory(), memory.available_memory()) == expected


def test_this_machine() -> None:
    assert 0 < memory.available_memory() < memory.usable_memory()
