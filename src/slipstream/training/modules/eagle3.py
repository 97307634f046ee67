"""Eagle3: the EAGLE-3 drafter as a torch module, with its training-time test (Li et al., arXiv 2503.01840).

Names of parameters are those of the paper's layout. A row t is the hidden state of position t with the token t + 1, and
says what token t + 2 is. In the test the drafter is unrolled as when it drafts: in step k the hidden state at t is the
one that the drafter itself made at t - 1 in step k - 1, and a row sees the true rows before its chain began and, of the
chain, its own steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.speculation.eagle3_model import Eagle3Config
from slipstream.training.modules.parts import Mlp, Norm, Rope, heads_of, shifted


class Eagle3Attention(nn.Module):
    """Grouped-query attention over the token's embedding and the hidden state, side by side."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """A step [B, T, 2 h] of the test. `keys` and `values` are those of the steps before; this one's are added."""
        q = rope(heads_of(self.q_proj(x), self.dim))
        keys.append(rope(heads_of(self.k_proj(x), self.dim)).repeat_interleave(self.heads // self.kv_heads, 1))
        values.append(heads_of(self.v_proj(x), self.dim).repeat_interleave(self.heads // self.kv_heads, 1))
        step, length = len(keys) - 1, x.shape[1]
        scores = (q @ keys[0].transpose(2, 3)).float() * self.dim**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - step)
        scores = scores.masked_fill(hidden, -torch.inf)
        chain_keys = [shifted(k, step - j) for j, k in enumerate(keys[1:], 1)]
        chain_values = [shifted(v, step - j) for j, v in enumerate(values[1:], 1)]
        own = [(q * k).sum(-1, keepdim=True).float() * self.dim**-0.5 for k in chain_keys]
        weights = torch.cat([scores, *own], -1).softmax(-1).nan_to_num(0.0).to(q.dtype)
        out = weights[..., :length] @ values[0]
        for j, v in enumerate(chain_values):
            out = out + weights[..., length + j : length + j + 1] * v
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

    def forward(self, e: Tensor, x: Tensor, rope: Rope, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Embeddings and hidden states [B, T, h]; a step of the test."""
        joined = torch.cat([self.input_layernorm(e), self.hidden_norm(x)], -1)
        x = x + self.self_attn(joined, rope, keys, values)
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

    def unroll(self, taps: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Hidden states [B, T, h] of each step before the final norm.

        `taps` [B, T, taps] are of positions t, `embedded` [B, T, h] the tokens after them.
        """
        rope = Rope(self.config.rope, embedded.shape[1])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        x, outs = self.fc(taps), []
        for _ in range(steps):
            x = self.midlayer(embedded, x, rope, keys, values)
            outs.append(x)
            x = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return outs

    def logits(self, x: Tensor) -> Tensor:
        """[…, draft vocabulary] of hidden states."""
        return self.lm_head(self.norm(x))
