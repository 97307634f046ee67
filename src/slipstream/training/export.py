"""Export: trained drafters in the layouts that others publish, so that vLLM and SGLang can load them as we do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.speculation.dspark_model import DSparkConfig
from slipstream.speculation.eagle3_model import Eagle3Config, default_taps

Layout = Literal["eagle3", "speculators", "deepspec"]


def write_eagle3(
    folder: Path,
    c: Eagle3Config,
    weights: Mapping[str, Tensor],
    tokens: npt.NDArray[np.int32],
    layout: Layout,
    target: str,
    target_layers: int,
    context: int,
) -> None:
    """config.json and model.safetensors, weights in bfloat16. `tokens` are those of the head, `target` a name."""
    layer = "midlayer." if layout == "eagle3" else "layers.0."
    tensors = {name.replace("midlayer.", layer): value for name, value in weights.items()}
    config = _eagle3(c, context, target_layers) if layout == "eagle3" else _eagle3_speculators(c, context, target)
    _write(folder, config, tensors, tokens, c.vocabulary)


def write_dspark(
    folder: Path,
    c: DSparkConfig,
    weights: Mapping[str, Tensor],
    tokens: npt.NDArray[np.int32],
    layout: Layout,
    target: str,
    context: int,
) -> None:
    """The same for DSpark. Raises UsageError for a reduced vocabulary in a layout that has none."""
    if layout == "deepspec" and len(tokens) != c.vocabulary:
        raise UsageError("the deepspec layout has no reduced vocabulary: take speculators, or --draft-vocabulary 0")
    config = _deepspec(c, context) if layout == "deepspec" else _dspark_speculators(c, context, target)
    _write(folder, config, weights, tokens, c.vocabulary)


def _write(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokens: npt.NDArray[np.int32],
    vocabulary: int,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in weights.items()}
    if len(tokens) != vocabulary:
        ids = torch.from_numpy(tokens.astype(np.int64))
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
        tensors["t2d"][ids] = True
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _layer(c: Eagle3Config | DSparkConfig, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": c.layers,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta,
        "vocab_size": c.vocabulary,
        "max_position_embeddings": context,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _eagle3(c: Eagle3Config, context: int, target_layers: int) -> dict[str, Any]:
    """As SafeAILab/EAGLE and SpecForge have it. Taps need not be said if they are the paper's; otherwise they are said
    by the layers whose outputs they are where the first is 1, and by those whose inputs they are where it is not.
    """
    said = {}
    if c.taps != default_taps(target_layers):
        ids = [tap - 1 for tap in c.taps] if min(c.taps) == 2 else list(c.taps)
        said = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}}
    return (
        _layer(c, context)
        | said
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": c.draft_vocabulary,
            "target_hidden_size": c.tap_width,
        }
    )


def _speculator(algorithm: str, name: str, drafts: int, target: str) -> dict[str, Any]:
    """What the speculators layout says of any drafter."""
    return {
        "architectures": [name],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _eagle3_speculators(c: Eagle3Config, context: int, target: str) -> dict[str, Any]:
    return _speculator("eagle3", "Eagle3Speculator", 5, target) | {
        "transformer_layer_config": _layer(c, context),
        "draft_vocab_size": c.draft_vocabulary,
        "target_hidden_size": c.tap_width,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": False,
    }


def _dspark_speculators(c: DSparkConfig, context: int, target: str) -> dict[str, Any]:
    layer = _layer(c, context) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return _speculator("dspark", "DSparkDraftModel", c.drafts, target) | {
        "transformer_layer_config": layer,
        "draft_vocab_size": c.draft_vocabulary,
        "aux_hidden_state_layer_ids": list(c.taps),
        "block_size": c.block,
        "mask_token_id": c.mask_token,
        "sample_from_anchor": True,
        "markov_rank": c.rank,
        "markov_head_type": c.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _deepspec(c: DSparkConfig, context: int) -> dict[str, Any]:
    """Taps are said by the layers whose outputs they are."""
    return _layer(c, context) | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "target_layer_ids": [tap - 1 for tap in c.taps],
        "block_size": c.block,
        "mask_token_id": c.mask_token,
        "markov_rank": c.rank,
        "markov_head_type": c.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
