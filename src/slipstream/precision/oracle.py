"""The other side of a comparison by other people's code: transformers, in float32, on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError
from slipstream.precision.quality import Scores


def transformers_scores(path: Path) -> Scores:
    """Logits by transformers of a GGUF file (dequantised by it) or a folder. Raises UsageError without transformers."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            f"--reference transformers: {error}; pip install torch transformers gguf accelerate"
        ) from error
    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(f"--reference transformers: {str(error).strip().splitlines()[0]}") from error
    model.eval()
    known: tuple[list[int], npt.NDArray[np.float32]] = ([], np.empty((0, 0), np.float32))

    def scores(tokens: list[int], start: int, end: int) -> npt.NDArray[np.float32]:
        nonlocal known
        if known[0] is not tokens:
            with torch.inference_mode():
                known = tokens, model(torch.tensor([tokens])).logits[0].numpy()
        return known[1][start:end]

    return scores
