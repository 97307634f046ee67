"""DSpark's small heads: a Markov bias that makes a block's slots agree with one another, and how sure each slot is.

After the block is run, its slots are walked from the anchor: the token before, through a matrix of low rank, shifts the
logits of the next slot. The confidence head says how likely a slot's token is to be accepted if all before it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelFileError
from slipstream.speculation.checkpoint import Int32Array
from slipstream.speculation.dspark_model import DSparkConfig
from slipstream.weights import Checkpoint

Float32Array = npt.NDArray[np.float32]
Choose = Callable[[int, Float32Array, npt.NDArray[np.int64]], int]
"""Given a slot's number, logits of some tokens and the tokens, which of them (by index) is drafted."""


class Slot(NamedTuple):
    """The tokens of a slot that are looked at: their logits, but for a constant, and their rows of the head."""

    logits: Float32Array
    places: npt.NDArray[np.integer[Any]]


class Walk(NamedTuple):
    """The tokens of a block's drafting slots, how sure each is (1 without a confidence head), and their logits."""

    tokens: list[int]
    confidences: list[float]
    logits: list[Float32Array]


def _sigmoid(x: Float32Array) -> Float32Array:
    return (1.0 / (1.0 + np.exp(-x))).astype(np.float32)


class MarkovHeads:
    """The heads' weights, in float32."""

    def __init__(self, c: DSparkConfig, checkpoint: Checkpoint, vocabulary: Int32Array | None):
        """`vocabulary` are the tokens that the head's rows stand for; None: all."""
        self.config, self._checkpoint = c, checkpoint
        ids = np.arange(c.draft_vocabulary) if vocabulary is None else vocabulary
        self.tokens: npt.NDArray[np.int64] = ids.astype(np.int64)
        rank, hidden = c.rank, c.hidden
        if c.markov != "none":
            self.w1 = self._get("markov_head.markov_w1.weight", (c.vocabulary, rank))
            self.w2 = self._get("markov_head.markov_w2.weight", (c.draft_vocabulary, rank))
        if c.markov == "gated":
            self.gate = self._get("markov_head.gate_proj.weight", (rank, hidden + rank))
            self.gate_bias = self._get("markov_head.gate_proj.bias", (rank,))
        if c.markov == "rnn":
            self.joint = self._get("markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden))
            self.joint_bias = self._get("markov_head.joint_proj.bias", (3 * rank,))
        if c.confidence:
            width = hidden + (rank if c.confidence_with_markov else 0)
            self.sure = self._get("confidence_head.proj.weight", (1, width))[0]
            self.sure_bias = float(self._get("confidence_head.proj.bias", (1,))[0])

    def _get(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        tensor = self._checkpoint.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, expected {list(shape)}"
            raise ModelFileError(self._checkpoint.files[0], f"tensor {name!r}", found)
        return tensor.float32()

    def walk(self, anchor: int, slots: Sequence[Slot], hidden: Float32Array, choose: Choose) -> Walk:
        """Draft along a block whose rows have `hidden` [block, hidden]; `slots` are those that draft."""
        c, previous = self.config, anchor
        state: Float32Array = np.zeros(c.rank, np.float32)
        walk = Walk([], [], [])
        for row in range(c.block):
            before = self.w1[previous] if c.markov != "none" else state
            shift = before
            if c.markov == "rnn":
                state, shift = self._turn(state, before, hidden[row])
            elif c.markov == "gated":
                shift = _sigmoid(self.gate @ np.concatenate([hidden[row], before]) + self.gate_bias) * before
            if row < c.first_slot:
                continue
            scores, places = slots[row - c.first_slot]
            if c.markov != "none":
                scores = scores + self.w2[places] @ shift
            walk.logits.append(scores)
            tokens = self.tokens[places]
            previous = int(tokens[choose(row - c.first_slot, scores, tokens)])
            walk.tokens.append(previous)
            walk.confidences.append(self._confidence(hidden[row], before) if c.confidence else 1.0)
        return walk

    def _turn(
        self, state: Float32Array, before: Float32Array, hidden: Float32Array
    ) -> tuple[Float32Array, Float32Array]:
        joint = self.joint @ np.concatenate([state, before, hidden]) + self.joint_bias
        gate, new, out = np.split(joint, 3)
        kept = _sigmoid(gate)
        return kept * state + (1 - kept) * np.tanh(new), np.tanh(out)

    def _confidence(self, hidden: Float32Array, before: Float32Array) -> float:
        seen = np.concatenate([hidden, before]) if self.config.confidence_with_markov else hidden
        return float(1.0 / (1.0 + np.exp(-(float(self.sure @ seen) + self.sure_bias))))
