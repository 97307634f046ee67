"""ModelConfig: everything a program needs to know of a model, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelFileError, UnsupportedModelError
from slipstream.models.rope import RopeConfig
from slipstream.program import CacheGroup, CacheSpec, GroupKind, KVFormat
from slipstream.program.ops import Activation

MAX_LAYERS = 1_000
MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `windows[i]` is layer i's sliding window, None for full attention.

    `local_rope`, where set, is used by the layers with a window.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    local_rope: RopeConfig | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    attention_scale: float = 0.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = {
            "layers": (self.layers, MAX_LAYERS),
            "hidden": (self.hidden, MAX_WIDTH),
            "heads": (self.heads, MAX_WIDTH),
            "kv_heads": (self.kv_heads, MAX_WIDTH),
            "head_dim": (self.head_dim, 1024),
            "ffn": (self.ffn, MAX_WIDTH),
            "vocabulary": (self.vocabulary, 1 << 24),
            "context": (self.context, 1 << 30),
        }
        for name, (value, limit) in sizes.items():
            if not 0 < value <= limit:
                raise UnsupportedModelError(f"{name} is {value}, expected 1 to {limit}")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if len(self.windows) != self.layers:
            raise UnsupportedModelError(f"{len(self.windows)} windows for {self.layers} layers")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.attention_scale or self.head_dim**-0.5

    def cache(self, kv_format: KVFormat, kv_heads: int) -> CacheSpec:
        """Cache groups for `kv_heads` heads: the full layers, then one group per window size."""
        return CacheSpec(
            tuple(
                CacheGroup(
                    GroupKind.FULL if window is None else GroupKind.WINDOW,
                    self.windows.count(window),
                    kv_heads,
                    self.head_dim,
                    self.head_dim,
                    kv_format,
                    window,
                )
                for window in self._window_kinds()
            )
        )

    def cache_place(self, layer: int) -> tuple[int, int]:
        """(group, index within the group) of a layer's keys and values."""
        window = self.windows[layer]
        return self._window_kinds().index(window), self.windows[:layer].count(window)

    def _window_kinds(self) -> list[int | None]:
        return sorted(set(self.windows), key=lambda window: (window is not None, window or 0))


class Fields:
    """Typed look-ups in a model's metadata; a wrong or missing one is an error that names it."""

    def __init__(self, path: object, values: Mapping[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def fail(self, key: str, problem: str) -> ModelFileError:
        """An error about `key`."""
        return ModelFileError(self.path, self.prefix + key, problem)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "is missing" if value is None else f"{value!r} is not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "is missing" if value is None else f"{value!r} is not a number")
        if not abs(value) < 1e30:
            raise self.fail(key, f"{value!r} is out of range")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number or None."""
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is not true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedModelError if `key` is there and none of the values `allowed`."""
        if key in self and (value := self.get(key)) not in allowed:
            raise UnsupportedModelError(f"{self.path}: {self.prefix}{key}: {str(value)[:40]!r} is not supported")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """These and, for keys that are missing, `defaults`; a key that is null stays so."""
        return Fields(self.path, {**defaults, **self.values}, self.prefix)

    def section(self, key: str) -> Fields:
        """A nested object, empty if missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, "is not an object")
        return Fields(self.path, value)
