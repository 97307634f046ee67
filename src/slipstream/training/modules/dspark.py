"""DSpark: the block drafter as a torch module (arXiv 2607.05147), over many anchors of an answer at once.

Names of parameters are those of the published layouts. The target's hidden states before an anchor become keys and
values; the anchor and its masks see them and one another. The Markov head makes a block's slots agree with each other,
the confidence head says how likely each is to be accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.speculation.dspark_model import DSparkConfig
from slipstream.training.modules.parts import Mlp, Norm, Rope, heads_of
from slipstream.training.target import TargetParts

START_SCALE = 0.02
"""Standard deviation of what begins random."""


class DSparkAttention(nn.Module):
    """Grouped-query attention with normed heads: blocks over the context before their anchors, and over themselves."""

    def __init__(self, c: DSparkConfig):
        super().__init__()
        self.groups, self.dim = c.heads // c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.norm_eps), Norm(c.head_dim, c.norm_eps)

    def _keys_and_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        keys = rope(self.k_norm(heads_of(self.k_proj(x), self.dim)).to(x.dtype))
        values = heads_of(self.v_proj(x), self.dim)
        return keys.repeat_interleave(self.groups, 1), values.repeat_interleave(self.groups, 1).to(x.dtype)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Rope, Rope]) -> Tensor:
        """`x` [B, A b, h] are A blocks of b rows, `context` [B, T, h], `anchors` [B, A] their positions.

        `ropes` are those of the context and of the blocks' rows.
        """
        batch, count = anchors.shape
        block = x.shape[1] // count
        q = ropes[1](self.q_norm(heads_of(self.q_proj(x), self.dim)).to(x.dtype))
        keys, values = self._keys_and_values(context, ropes[0])
        own_keys, own_values = self._keys_and_values(x, ropes[1])
        heads, scale = q.shape[1], self.dim**-0.5
        before = torch.arange(context.shape[1]) < anchors.repeat_interleave(block, 1)[..., None]
        far = (q @ keys.transpose(2, 3)).float() * scale
        far = far.masked_fill(~before[:, None], -torch.inf)
        blocks = (batch, heads, count, block, self.dim)
        near = (q.view(blocks) @ own_keys.view(blocks).transpose(3, 4)).float() * scale
        weights = torch.cat([far, near.flatten(2, 3)], -1).softmax(-1).to(values.dtype)
        out = weights[..., : context.shape[1]] @ values
        inside = weights[..., context.shape[1] :].unflatten(2, (count, block))  # type: ignore[no-untyped-call]
        out = out + (inside @ own_values.view(blocks)).flatten(2, 3)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DSparkLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, c: DSparkConfig):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.norm_eps)
        self.post_attention_layernorm = Norm(c.hidden, c.norm_eps)
        self.self_attn = DSparkAttention(c)
        self.mlp = Mlp(c.hidden, c.ffn)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Rope, Rope]) -> Tensor:
        """As the attention's."""
        normed = self.input_layernorm(x).to(context.dtype)
        x = x + self.self_attn(normed, context, anchors, ropes)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """What the token before says about a slot's, through a matrix of low rank."""

    def __init__(self, c: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocabulary, c.rank)
        self.markov_w2 = nn.Linear(c.rank, c.draft_vocabulary, bias=False)


class ConfidenceHead(nn.Module):
    """How likely a slot's token is to be accepted if all before it are."""

    def __init__(self, c: DSparkConfig):
        super().__init__()
        self.proj = nn.Linear(c.hidden + c.rank, 1)


class DSpark(nn.Module):
    """The whole drafter but for the embedding, which is the target's."""

    def __init__(self, c: DSparkConfig):
        super().__init__()
        self.config = c
        self.fc = nn.Linear(len(c.taps) * c.tap_width, c.hidden, bias=False)
        self.hidden_norm = Norm(c.hidden, c.norm_eps)
        self.layers = nn.ModuleList(DSparkLayer(c) for _ in range(c.layers))
        self.norm = Norm(c.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocabulary, bias=False)
        self.markov_head = MarkovHead(c)
        self.confidence_head = ConfidenceHead(c)

    @torch.no_grad()
    def start_from(self, target: TargetParts, tokens: Tensor, generator: torch.Generator) -> None:
        """Begin random, but for the head's rows, which are the target's, and its norm; the Markov head begins mute."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, START_SCALE, generator=generator)
        self.lm_head.weight.copy_(target.head[tokens])
        self.norm.weight.copy_(target.norm)
        self.markov_head.markov_w2.weight.zero_()
        self.confidence_head.proj.bias.zero_()

    def hidden(self, taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Normed hidden states [B, A, b, h] of blocks.

        `taps` [B, T, taps], `blocks` [B, A, b, h] embedded, `anchors` [B, A] the positions of their first rows.
        """
        count, block = blocks.shape[1], blocks.shape[2]
        context = self.hidden_norm(self.fc(taps)).to(taps.dtype)
        positions = (anchors[..., None] + torch.arange(block)).flatten(1)
        ropes = (Rope(self.config.rope, taps.shape[1]), Rope.at(self.config.rope, positions))
        x = blocks.flatten(1, 2).float()
        for layer in self.layers:
            x = layer(x, context, anchors, ropes)
        return self.norm(x).view(anchors.shape[0], count, block, -1)

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[…, draft vocabulary] of hidden states […, h] after the tokens `before` […]."""
        return self.lm_head(hidden) + self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits […] of being accepted."""
        seen = torch.cat([hidden, self.markov_head.markov_w1(before).to(hidden.dtype)], -1)
        return self.confidence_head.proj(seen)[..., 0]


def embedded_blocks(embedding: Tensor, anchors: Tensor, mask_token: int, block: int) -> Tensor:
    """Anchor tokens [B, A] and masks after them, embedded: [B, A, block, h]."""
    tokens = F.pad(anchors[..., None], (0, block - 1), value=mask_token)
    return F.embedding(tokens, embedding)
