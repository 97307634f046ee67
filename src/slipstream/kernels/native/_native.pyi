"""Types of the compiled extension (native/src/module.cpp)."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

def available_isas() -> list[str]: ...
def emulated_isas() -> list[str]: ...
def isa() -> str: ...
def select_isa(name: str) -> None: ...
def usable_cores() -> int: ...
def allocate(bytes: int, huge_pages: bool = True) -> _Bytes: ...
def checksum(data: _Bytes) -> int: ...
def packed_bytes(format: str, n: int, k: int) -> int: ...
def peak_ops(kind: Literal["int8", "bf16", "f32"], threads: int, seconds: float) -> float: ...
def packs(stored: int, format: str) -> bool: ...

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

class Executor:
    def __init__(self, threads: int, max_rows: int) -> None: ...
    weight_bytes: int
    max_rows: int
    threads: int
    phase_seconds: dict[str, float]
    def buffer(self, width: int) -> int: ...
    def set_blocks(self, blocks: int) -> None: ...
    def embed(self, out: int, table: Matrix, scale: float) -> None: ...
    def norm(self, x: int, out: int, add_to: int, w: _Floats, eps: float, heads: int) -> None: ...
    def add(self, a: int, b: int, out: int) -> None: ...
    def gated(self, gate: int, up: int, out: int, kind: str) -> None: ...
    def tap(self, x: int, tap: int) -> None: ...
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
        k_cache: _Bytes,
        v_cache: _Bytes,
        k_scale: _Floats | None,
        v_scale: _Floats | None,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        int8: bool,
        scale: float,
        softcap: float,
        window: int,
    ) -> None: ...
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
    def step_sampled(self, *arrays: npt.NDArray[Any]) -> None: ...
    def read_weights(self) -> float: ...
    def copy_logits(self, out: _Floats) -> None: ...
    def copy_tap(self, tap: int, out: _Floats) -> None: ...
