"""The native backend: a program replayed by one C++ call per step, on the best instruction set there is."""

from slipstream.kernels.native._native import SuffixIndex, usable_cores
from slipstream.kernels.native.executable import NativeBackend, NativeExecutable, check_threads

__all__ = ["NativeBackend", "NativeExecutable", "SuffixIndex", "check_threads", "usable_cores"]
