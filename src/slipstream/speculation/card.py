"""A drafter's card: for which target it was made, and what it promises. A file beside its weights.

`slipstream-drafter.json`: {"target_fingerprint": "…", "tau": 2.9, "draft_len": 5}; everything may be missing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.models.config import Fields, ModelConfig
from slipstream.weights import Checkpoint
from slipstream.weights.safetensors import load_json

FILE = "slipstream-drafter.json"
_SAMPLE = 256
"""Bytes of each tensor that a fingerprint looks at."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a drafter says about itself. Empty, 0: it does not say."""

    target_fingerprint: str = ""
    tau: float = 0.0
    draft_len: int = 0
    made_for: str = ""
    """The target by name, as some layouts have it."""


def read_card(folder: Path) -> Card:
    """The card in a drafter's folder, empty if there is none. Raises ModelFileError for one that is damaged."""
    path = folder / FILE
    if not path.exists():
        return Card()
    f = Fields(path, load_json(path))
    return Card(
        str(f.get("target_fingerprint", "")),
        f.number("tau", 0.0),
        f.integer("draft_len", 0),
        str(f.get("made_for", "")),
    )


def write_card(folder: Path, card: Card) -> None:
    """Put a card beside a drafter's weights."""
    (folder / FILE).write_text(json.dumps(asdict(card), indent=1) + "\n")


def fingerprint_of(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Names a target: its shape, and a sample of each of its tensors. Other weights, or other precision, differ."""
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.type.name} {tensor.shape}".encode())
        digest.update(tensor.data[:_SAMPLE].tobytes())
    return digest.hexdigest()[:32]


def warnings_for(belongs_to: str, fingerprint: str, name: str, made_for: str = "") -> list[str]:
    """What speaks against using a drafter that belongs to a target for the target of a fingerprint.

    `made_for` is what its card calls its target.
    """
    if belongs_to and belongs_to != fingerprint:
        return [
            f"the drafter {name} was made for another target{f' ({made_for})' if made_for else ''} than this one: "
            "answers stay right, but expect fewer of its drafts to be accepted; train it again for this target"
        ]
    return []
