"""Tiny random models in Hugging Face's layout, scaled so that a wrong feature shows in the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

BASE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 24, "sliding_window": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3Text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 40, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "pad_token_id": 0},
    ),
}


def build(case: str, folder: Path, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """A random model of `case`, with `more` fields of its config changed, saved to `folder` in float32 and returned."""
    torch.manual_seed(seed)
    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**BASE | changes | more)
    config._attn_implementation = "eager"
    model_name = "Gemma3ForCausalLM" if name == "Gemma3Text" else f"{name}ForCausalLM"
    model = getattr(transformers, model_name)(config).eval().float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                offset = 0.0 if name.startswith("Gemma") else 1.0
                offset += 1.5 if "q_norm" in key or "k_norm" in key else 0.0  # or attention would be spread evenly
                value.copy_(offset + 0.3 * torch.randn_like(value))
            elif value.ndim == 1:
                value.copy_(0.5 * torch.randn_like(value))
            else:
                gain = 2.5 if ("q_proj" in key or "k_proj" in key or "qkv" in key) else 1.3
                value.copy_(gain * torch.randn_like(value) / value.shape[-1] ** 0.5)
        if "embed_scale" not in dir(model):
            model.get_input_embeddings().weight.mul_(4.0 if not name.startswith("Gemma") else 1.0)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def logits(model: transformers.PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of transformers, float32."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def evenness(model: transformers.PreTrainedModel, tokens: list[int]) -> float:
    """Mean entropy of attention weights over that of weights that are all alike, of rows with 16 to see or more."""
    with torch.no_grad():
        attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
    shares = []
    for weights in attentions:
        rows = weights[0, :, 16:]
        entropy = -(rows * rows.clamp_min(1e-12).log()).sum(-1)
        shares.append((entropy / (rows > 0).sum(-1).clamp_min(2).log()).mean().item())
    return float(np.mean(shares))
