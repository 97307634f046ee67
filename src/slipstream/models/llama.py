"""Llama 2 and 3, SmolLM2, Mistral: pre-norm blocks; the pattern that most models vary."""

from __future__ import annotations

from slipstream.models import blocks, read_gguf, read_hf
from slipstream.models.config import Fields, ModelConfig
from slipstream.models.names import Naming
from slipstream.program import Recorder
from slipstream.weights import Checkpoint

NAMING = Naming(rotary_pairs=True)
MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072}
"""What its config.json may leave out."""


def from_hf(f: Fields) -> ModelConfig:
    """Config of LlamaForCausalLM and MistralForCausalLM."""
    mistral = f.get("model_type") == "mistral"
    if mistral:
        f = f.with_defaults(MISTRAL)
    values = read_hf.common(f, "llama")
    sliding = mistral and "sliding_window" in f
    return ModelConfig(**values | {"windows": read_hf.windows(f, values["layers"], [sliding] * values["layers"])})


def from_gguf(f: Fields, checkpoint: Checkpoint) -> ModelConfig:
    """Config of the "llama" architecture, which Mistral and SmolLM2 share."""
    values = read_gguf.common(f, checkpoint, "llama")
    window = f.get("attention.sliding_window")
    if window:
        values["windows"] = (f.integer("attention.sliding_window"),) * values["layers"]
    return ModelConfig(
        **values
        | {
            "output_bias": "blk.0.attn_output.bias" in checkpoint.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in checkpoint.tensors,
        }
    )


def record(p: Recorder, c: ModelConfig, max_len: int) -> None:
    """x += attention(norm(x)); x += mlp(norm(x))."""
    x = blocks.embed(p, c)
    for layer in range(c.layers):
        p.tap(x, layer)
        h = blocks.norm(p, c, x, f"layers.{layer}.attn_norm")
        x = p.add(x, blocks.attention(p, c, layer, h, max_len))
        h = blocks.norm(p, c, x, f"layers.{layer}.ffn_norm")
        x = p.add(x, blocks.mlp(p, c, layer, h))
    blocks.head(p, c, x)
