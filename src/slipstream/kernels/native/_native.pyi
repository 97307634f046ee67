"""Types of the compiled extension (native/src/module.cpp)."""

from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

def available_isas() -> list[str]: ...
def emulated_isas() -> list[str]: ...
def op_classes() -> list[str]: ...
def read_rate(threads: int, bytes: int, seconds: float, huge_pages: bool = True) -> float: ...
def barrier_seconds(threads: int, count: int) -> float: ...
def isa() -> str: ...
def select_isa(name: str) -> None: ...
def usable_cores() -> int: ...
def cgroup_cores(groups: str, root: str) -> float: ...
def allocate(bytes: int, huge_pages: bool = True) -> _Bytes: ...
def decommit(data: _Bytes) -> None: ...
def map_file(path: str, offset: int, bytes: int) -> _Bytes: ...
def mapped_huge(data: _Bytes) -> int: ...
def checksum(data: _Bytes) -> int: ...
def packed_bytes(format: str, n: int, k: int) -> int: ...
def peak_ops(kind: str, threads: int, seconds: float) -> float: ...
def packs(stored: int, format: str) -> bool: ...

class Crowd:
    def __init__(self, threads: int) -> None: ...
    threads: int
    def note(self, seconds: float, stolen: float, now: float) -> None: ...

class Matrix:
    def __init__(self, format: str, n: int, k: int, data: _Bytes) -> None: ...
    n: int
    k: int
    format: str
    nbytes: int
    def unpack_row(self, row: int, out: _Floats) -> None: ...

class Packer:
    def __init__(self, threads: int) -> None: ...
    def pack(
        self,
        stored: int,
        base: _Bytes,
        stride: int,
        offset: int,
        rows: npt.NDArray[np.int64],
        to: Matrix,
    ) -> None: ...

class SuffixIndex:
    def __init__(self, capacity: int, least: int) -> None: ...
    bytes: int
    appended: int
    def append(self, tokens: list[int]) -> None: ...
    def propose(self, learned: SuffixIndex | None, most: int) -> tuple[list[int], list[int], list[float]] | None: ...
    def __len__(self) -> int: ...

class Draws:
    def __init__(self, *columns: npt.NDArray[Any]) -> None: ...

class Executor:
    def __init__(self, threads: int, max_rows: int, share: Executor | None = None) -> None: ...
    def set_vocabulary(self, ids: npt.NDArray[np.int32]) -> None: ...
    weight_bytes: int
    buffer_bytes: int
    max_rows: int
    threads: int
    class_bytes: list[float]
    def crowd(self, threads: int) -> None: ...
    def set_delay(self, op_class: str, seconds: float) -> None: ...
    def copy_seconds(self, out: npt.NDArray[np.float64]) -> None: ...
    def buffer(self, width: int) -> int: ...
    def set_cache(self, arena: _Bytes, block_bytes: int, blocks: int, spare: int) -> None: ...
    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None: ...
    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None: ...
    def submit(
        self,
        columns: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        logit_rows: npt.NDArray[np.int32],
        draws: Draws | None,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        copies: npt.NDArray[np.int32],
    ) -> None: ...
    def wait(self) -> None: ...
    def collect(self, out: npt.NDArray[np.float64]) -> None: ...
    def embed(self, out: int, table: Matrix, scale: float) -> None: ...
    def norm(self, x: int, out: int, add_to: int, w: _Floats, eps: float, heads: int) -> None: ...
    def add(self, a: int, b: int, out: int) -> None: ...
    def gated(self, gate: int, up: int, out: int, kind: str) -> None: ...
    def tap(self, x: int) -> None: ...
    def linear(
        self,
        x: int,
        norm: _Floats | None,
        eps: float,
        weights: list[Matrix],
        biases: list[_Floats | None],
        outs: list[int],
        epilogue: str,
        target: int,
        kind: str,
        op_class: str,
    ) -> None: ...
    def attention(
        self,
        *,
        q: int,
        k: int,
        v: int,
        out: int,
        heads: int,
        q_norm: _Floats | None,
        k_norm: _Floats | None,
        eps: float,
        cosine: _Floats,
        sine: _Floats,
        cache: _Bytes,
        block_bytes: int,
        k_at: int,
        v_at: int,
        k_scale_at: int,
        v_scale_at: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        int8: bool,
        scale: float,
        softcap: float,
        window: int,
        start: int,
        block: bool,
        anchored: bool,
    ) -> None: ...
    def write(
        self,
        *,
        k: int,
        v: int,
        k_norm: _Floats | None,
        eps: float,
        cosine: _Floats,
        sine: _Floats,
        cache: _Bytes,
        block_bytes: int,
        k_at: int,
        v_at: int,
        k_scale_at: int,
        v_scale_at: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        int8: bool,
    ) -> None: ...
    def input(self, out: int) -> None: ...
    def concat(self, a: int, b: int, out: int) -> None: ...
    def set_inputs(self, values: _Floats) -> None: ...
    def logits(
        self,
        x: int,
        norm: _Floats | None,
        eps: float,
        w: Matrix,
        bias: _Floats | None,
        softcap: float,
    ) -> None: ...
    def step(self, *arrays: npt.NDArray[Any]) -> None: ...
    def step_sampled(
        self,
        columns: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        logit_rows: npt.NDArray[np.int32],
        draws: Draws,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None: ...
    def redraw(
        self,
        rows: npt.NDArray[np.int32],
        draws: Draws,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None: ...
    def follow(
        self,
        columns: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        draws: Draws,
        inputs: _Floats,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        bounds: npt.NDArray[np.float64],
        chances: npt.NDArray[np.float64],
        alive: float,
        price: float,
    ) -> int: ...
    def read_weights(self, threads: int) -> float: ...
    def copy_logits(self, out: _Floats) -> None: ...
    def copy_taps(self, out: _Floats) -> None: ...
