"""CacheSpec and Namespace: what state a model keeps per token, and whose cached state may be reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

BLOCK_SLOTS = 32
"""KV slots in a block: the depth of one AMX tile of values (32 positions of bf16)."""


class GroupKind(StrEnum):
    """How a group of layers keeps its state."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    RECURRENT = "recurrent"
    DRAFTER = "drafter"


class KVFormat(StrEnum):
    """Stored precision of keys and values."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def bytes(self) -> int:
        """Bytes of one stored number."""
        return {"f32": 4, "bf16": 2, "int8": 1}[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale that goes with each token and head."""
        return 4 if self is KVFormat.INT8 else 0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of state, under the sequence's one block table.

    For attention, `k_dim` and `v_dim` are per head; a latent group has one head and `v_dim` 0 (values
    are a view of the keys). A recurrent group keeps `k_dim` numbers a token in float32: the state after
    that token, so that rolling back is reading an earlier slot. A drafter group names the drafter that
    wrote it: another drafter must not read it.
    """

    kind: GroupKind
    layers: int
    heads: int
    k_dim: int
    v_dim: int
    format: KVFormat = KVFormat.BF16
    window: int | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.kind is not GroupKind.DRAFTER and (self.kind is GroupKind.WINDOW) != (self.window is not None):
            raise ValueError("a window belongs to a window group, and only there")
        if (self.kind is GroupKind.DRAFTER) != bool(self.fingerprint):
            raise ValueError("a fingerprint belongs to a drafter group, and only there")
        if min(self.layers, self.heads, self.k_dim) < 1 or self.v_dim < 0:
            raise ValueError("a cache group needs positive layers, heads and widths")

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers of the group."""
        if self.kind is GroupKind.RECURRENT:
            return self.layers * self.heads * self.k_dim * 4
        numbers = self.k_dim + self.v_dim
        scales = (1 + (self.v_dim > 0)) * self.format.scale_bytes
        return self.layers * self.heads * (numbers * self.format.bytes + scales)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All cache groups of a program."""

    groups: tuple[CacheGroup, ...]

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all groups."""
        return self.bytes_per_token * BLOCK_SLOTS


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose blocks may be shared: equal namespaces hold bit-identical state for equal tokens.

    `numerics` names everything that decides the bits: build, ISA class, activation rule.
    """

    model: str
    numerics: str
    kv_format: KVFormat
    adapter: str = ""
    salt: str = ""
