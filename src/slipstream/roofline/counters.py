"""Hardware counters, where the machine has them: bytes that came from memory, to check the accounts against.

Last-level cache misses of all threads times the line's length, over Linux's perf events (perf_event_open(2)). What
prefetchers bring in is counted on some processors and not on others, so the difference is an error bar and no proof.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LINE = 64
_HARDWARE, _CACHE_MISSES = 0, 3
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_ATTRIBUTES_SIZE = 112
_SYSCALL = {"x86_64": 298, "aarch64": 241}
REASONS = {
    errno.ENOENT: "this machine (a virtual one, most likely) has no counter of cache misses",
    errno.EOPNOTSUPP: "this machine (a virtual one, most likely) has no counter of cache misses",
    errno.EACCES: "not allowed; lower kernel.perf_event_paranoid",
    errno.EPERM: "not allowed; lower kernel.perf_event_paranoid",
    errno.ENOSYS: "the system has no perf events",
}


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes by the counters, or why there are none."""

    nbytes: float | None
    reason: str = ""


def _open(thread: int) -> int:
    """A file descriptor of a thread's counter. Raises OSError."""
    number = _SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, "no perf events")
    attributes = bytearray(_ATTRIBUTES_SIZE)
    struct.pack_into("<IIQ", attributes, 0, _HARDWARE, _ATTRIBUTES_SIZE, _CACHE_MISSES)
    struct.pack_into("<Q", attributes, 40, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * _ATTRIBUTES_SIZE).from_buffer(attributes)
    descriptor = libc.syscall(number, buffer, thread, -1, -1, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(descriptor)


def count_bytes(work: Callable[[], None]) -> Count:
    """Bytes that all threads of this process missed in the last-level cache while `work` ran."""
    descriptors: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            descriptors.append(_open(int(task.name)))
        before = sum(_read(descriptor) for descriptor in descriptors)
        work()
        return Count(float(sum(_read(descriptor) for descriptor in descriptors) - before) * LINE)
    except OSError as error:
        return Count(None, REASONS.get(error.errno or 0, str(error)))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(descriptor: int) -> int:
    return int(struct.unpack("<q", os.read(descriptor, 8))[0])
