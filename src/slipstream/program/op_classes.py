"""Classes of work: under which name the seconds, bytes and operations of an op are accounted for."""

from __future__ import annotations

OP_CLASSES = (
    "plan",
    "embed",
    "norm",
    "qkv",
    "attention",
    "attention_out",
    "gate_up",
    "down",
    "linear",
    "logits",
    "sample",
    "other",
)
"""In the order in which backends hand out their seconds."""

_PARTS = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "o": "attention_out",
    "gate": "gate_up",
    "up": "gate_up",
    "down": "down",
}


def linear_class(weight: str) -> str:
    """The class of a linear op by its weight: "layers.3.up.weight" counts as gate_up."""
    return _PARTS.get(weight.removesuffix(".weight").rpartition(".")[2], "linear")
