"""Eagle3: the EAGLE-3 drafter as a torch module, with its training-time test (Li et al., arXiv 2503.01840).

Names of parameters are those of the paper's layout. Row t is the hidden state of position t with the token t + 1, and
says what token t + 2 is. In the test chains begin at some rows, their anchors, and go on as when they draft: step k of
a chain is row anchor + k, whose hidden state is what the drafter itself made in step k - 1, and which sees the true
rows up to the anchor and, of its chain, the steps before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.speculation.eagle3_model import Eagle3Config
from slipstream.training.modules.parts import Mlp, Norm, Rope, heads_of
from slipstream.training.target import TargetParts

KeysAndValues = tuple[Tensor, Tensor]
START_SCALE = 0.02
"""Standard deviation of what begins random."""


class Eagle3Attention(nn.Module):
    """Grouped-query attention over the token's embedding and the hidden state, side by side."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.groups, self.dim = c.heads // c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def keys_and_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Of rows [B, N, 2 h]: each [B, heads, N, dim]."""
        keys, values = rope(heads_of(self.k_proj(x), self.dim)), heads_of(self.v_proj(x), self.dim)
        return keys.repeat_interleave(self.groups, 1), values.repeat_interleave(self.groups, 1)

    def forward(
        self, x: Tensor, rope: Rope, true: KeysAndValues, last: Tensor, chain: Sequence[KeysAndValues]
    ) -> Tensor:
        """Rows [B, N, 2 h] that see the `true` rows up to `last` [B, N], and each its own place of the `chain`."""
        q, scale, (keys, values) = rope(heads_of(self.q_proj(x), self.dim)), self.dim**-0.5, true
        scores = (q @ keys.transpose(2, 3)).float() * scale
        ahead = torch.arange(keys.shape[2]) > last[:, None, :, None]
        own = [(q * k).sum(-1, keepdim=True).float() * scale for k, _ in chain]
        weights = torch.cat([scores.masked_fill(ahead, -torch.inf), *own], -1).softmax(-1).to(q.dtype)
        out = weights[..., : keys.shape[2]] @ values
        for place, (_, v) in enumerate(chain, keys.shape[2]):
            out = out + weights[..., place : place + 1] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """The drafter's only layer."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.hidden_norm = Norm(c.hidden, c.norm_eps)
        self.input_layernorm = Norm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = Norm(c.hidden, c.norm_eps)
        self.self_attn = Eagle3Attention(c)
        self.mlp = Mlp(c.hidden, c.ffn)

    def joined(self, embedded: Tensor, x: Tensor) -> Tensor:
        """What attention reads: embeddings and hidden states [..., h], each normed, side by side."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """The whole drafter but for the embedding, which is the target's."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.config = c
        self.fc = nn.Linear(len(c.taps) * c.tap_width, c.hidden, bias=False)
        self.midlayer = Eagle3Layer(c)
        self.norm = Norm(c.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocabulary, bias=False)

    @torch.no_grad()
    def start_from(self, target: TargetParts, tokens: Tensor, generator: torch.Generator) -> None:
        """Begin near the target: its last layer over its last tap, its norm, and its head's rows for `tokens`.

        The half that reads the token's embedding, for which the target has no counterpart, begins small and random.
        """
        hidden, attention, mlp = self.config.hidden, self.midlayer.self_attn, self.midlayer.mlp
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, START_SCALE, generator=generator)
        self.lm_head.weight.copy_(target.head[tokens])
        self.norm.weight.copy_(target.norm)
        self.fc.weight[:, -hidden:] += torch.eye(hidden, self.config.tap_width)
        for matrix, name in (
            (attention.q_proj, "q"), (attention.k_proj, "k"), (attention.v_proj, "v"), (attention.o_proj, "o"),
            (mlp.gate_proj, "gate"), (mlp.up_proj, "up"), (mlp.down_proj, "down"),
        ):  # fmt: skip
            theirs = target.layer.get(name)
            mine = matrix.weight[:, hidden:] if name in ("q", "k", "v") else matrix.weight
            if theirs is not None and theirs.shape == mine.shape:
                mine.copy_(theirs)
        self.midlayer.hidden_norm.weight.copy_(target.layer["attn_norm"])
        self.midlayer.post_attention_layernorm.weight.copy_(target.layer["ffn_norm"])

    def unroll(
        self, taps: Tensor, embedded: Tensor, rows: Tensor, anchors: Tensor, steps: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states before the final norm: of `rows` [B, Q] in step 0, and of each later step's rows [B, A].

        `taps` [B, T, taps] are of positions t, `embedded` [B, T, h] the tokens after them. `anchors` [B, A] are places
        in `rows`; chains that would leave the T rows stay at the last one.
        """
        layer, config = self.midlayer, self.config
        x = self.fc(taps)
        joined = layer.joined(embedded, x)
        true = layer.self_attn.keys_and_values(joined, Rope(config.rope, taps.shape[1]))
        rope = Rope.at(config.rope, rows)
        out = layer.after(_picked(x, rows), layer.self_attn(_picked(joined, rows), rope, true, rows, []))
        first, begun, x = out, rows.gather(1, anchors), _picked(out, anchors)
        later: list[Tensor] = []
        chain: list[KeysAndValues] = []
        for step in range(1, steps):
            at = (begun + step).clamp(max=taps.shape[1] - 1)
            rope = Rope.at(config.rope, at)
            joined = layer.joined(_picked(embedded, at), x)
            chain.append(layer.self_attn.keys_and_values(joined, rope))
            x = layer.after(x, layer.self_attn(joined, rope, true, begun, chain))
            later.append(x)
        return first, later

    def logits(self, x: Tensor) -> Tensor:
        """[…, draft vocabulary] of hidden states."""
        return self.lm_head(self.norm(x))


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, N] of x [B, T, …]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
