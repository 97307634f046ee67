"""Memory: what this process may use, and what of that is to be had now: the machine's, cut by every cgroup's limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SYSTEM = Path("/")
"""Where the system's own files are."""


class Group(NamedTuple):
    """A cgroup that this process is in: bytes that it may hold, and holds beside files that can be read again."""

    limit: int
    held: int


def usable_memory() -> int:
    """Bytes of memory this process may use."""
    return min([_of_machine("MemTotal"), *(group.limit for group in groups())])


def available_memory() -> int:
    """Bytes of them that nobody holds now; cached files count as free, swap does not count."""
    return max(0, min([_of_machine("MemAvailable"), *(group.limit - group.held for group in groups())]))


def groups() -> Iterator[Group]:
    """The cgroups with a limit that this process is in, of both versions.

    In a container the names may be those of the host: what is not there is left out, and the root is the container's.
    """
    for line in _read("proc/self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            root, limit, usage, files = "sys/fs/cgroup", "memory.max", "memory.current", "{}_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = "total_{}_file"
        else:
            continue
        inner = Path(name.lstrip("/"))
        for folder in (inner, *inner.parents):
            at = f"{root}/{folder}"
            if (most := _read(f"{at}/{limit}").strip()).isdigit():
                held = _fields(f"{at}/memory.stat")
                cached = sum(held.get(files.format(kind), 0) for kind in ("active", "inactive"))
                yield Group(int(most), int(_read(f"{at}/{usage}") or 0) - cached)


def _of_machine(name: str) -> int:
    told = _fields("proc/meminfo").get(f"{name}:")
    return told * 1024 if told is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fields(path: str) -> dict[str, int]:
    """Numbers by name, of a file that has one of each in a line."""
    lines = (line.split() for line in _read(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _read(path: str) -> str:
    try:
        return (SYSTEM / path).read_text()
    except OSError:
        return ""
