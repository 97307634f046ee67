"""Parts that torch modules of drafters share: norm, rotary embedding, gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.rope import RopeConfig


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, width], computed in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class Rope:
    """Rotary embedding of positions 0 … length - 1; halves of a head are rotated against each other."""

    def __init__(self, config: RopeConfig, length: int):
        self._turn(config, torch.arange(length), length)

    @classmethod
    def at(cls, config: RopeConfig, positions: Tensor) -> Rope:
        """Of other positions [B, T] for each of a batch."""
        rope = cls.__new__(cls)
        rope._turn(config, positions, int(positions.max()) + 1)
        return rope

    def _turn(self, config: RopeConfig, positions: Tensor, length: int) -> None:
        frequencies, factor = config.table(length)
        angles = positions[..., None].float() * torch.from_numpy(frequencies)
        if positions.ndim == 2:
            angles = angles[:, None]  # the same for all heads
        self.cosine, self.sine = angles.cos() * factor, angles.sin() * factor

    def __call__(self, x: Tensor) -> Tensor:
        """Heads [B, heads, T, dim]."""
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Mlp(nn.Module):
    """Gated with SiLU."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def heads_of(x: Tensor, dim: int) -> Tensor:
    """[B, T, heads * dim] as [B, heads, T, dim]."""
    return x.view(*x.shape[:-1], -1, dim).transpose(1, 2)
