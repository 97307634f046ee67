"""Drafters' folders for the tiny target: random weights in published layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.speculation import checkpoints
from tests.speculation.test_layouts import DSPARK, EAGLE3

VOCABULARY, DRAFTED = 259, 100
"""Tokens of the tiny target, and those its drafters know. Another salt gives other weights and other tokens."""


def _resized(case: dict[str, Any], sizes: dict[int, int]) -> dict[str, Any]:
    """The same case for other vocabularies."""
    case = copy.deepcopy(case)
    for entry in case["tensors"].values():
        shape = entry["shape"] if isinstance(entry, dict) else entry
        if shape[0] in sizes:
            shape[0] = sizes[shape[0]]
    return case


def eagle3_folder(path: Path, drafted: int = DRAFTED, salt: int = 0) -> Path:
    """An EAGLE-3 drafter that reads the inputs of both layers and the last hidden state."""
    case = _resized(EAGLE3["speculators-nbr_true"], {160: VOCABULARY, 48: drafted}) | {"salt": salt}
    case["config"] |= {"draft_vocab_size": drafted, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    case["config"]["transformer_layer_config"]["vocab_size"] = VOCABULARY
    checkpoints.write(case, path)
    return path


def dspark_folder(path: Path, drafted: int = DRAFTED, salt: int = 1) -> Path:
    """A DSpark drafter that reads the same."""
    case = _resized(DSPARK["speculators-draftvocab"], {160: VOCABULARY, 96: drafted}) | {"salt": salt}
    case["config"] |= {"draft_vocab_size": drafted, "aux_hidden_state_layer_ids": [0, 1, 2]}
    case["config"]["transformer_layer_config"]["vocab_size"] = VOCABULARY
    checkpoints.write(case, path)
    return path
