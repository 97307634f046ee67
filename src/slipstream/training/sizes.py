"""Sizes: how large a drafter may be for its target, and how many tokens its head should know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError
from slipstream.models import ModelConfig
from slipstream.models.rope import RopeConfig
from slipstream.speculation.dspark_model import DSparkConfig
from slipstream.speculation.eagle3_model import Eagle3Config, default_taps
from slipstream.training.dataset import Example, coverage, vocabulary_of

BYTES_A_WEIGHT = 0.5625
"""int4 with a scale for every 32 weights: how drafters are run."""
MOST_SHARE = 0.08
"""Of the target's bytes: each draft pass reads all of the drafter, and what it brings is bounded."""
COVERED = 0.97
"""Share of the answers' tokens that a draft vocabulary should hold. Whatever is outside is never accepted; but what it
takes to hold the last ones makes every pass dearer than they are worth.
"""
DSPARK_BLOCK, DSPARK_RANK = 7, 64
VOCABULARIES = (1024, 2048, 4096, 8192, 16384, 32768)


def taps_for(layers: int, wanted: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The layers whose inputs a drafter reads: those `wanted`, or the paper's, or first, middle and last of a target
    that is not deep. Raises UsageError for layers that the target lacks.
    """
    if wanted:
        if sorted(set(wanted)) != list(wanted) or not 0 <= wanted[0] <= wanted[-1] <= layers:
            raise UsageError(f"--taps are rising numbers of layers, from 0 to {layers} (the last one's output)")
        return wanted
    return default_taps(layers) if layers >= 6 else tuple(sorted({0, layers // 2, layers}))


def draft_vocabulary(
    examples: Sequence[Example], size: int | None, vocabulary: int, always: Sequence[int]
) -> npt.NDArray[np.int32]:
    """The tokens of the head: `size` of them (0: all), or as many as hold nearly all that is said."""
    if size == 0:
        return np.arange(vocabulary, dtype=np.int32)
    if size is not None:
        return vocabulary_of(examples, size, vocabulary, always)
    tokens = vocabulary_of(examples, VOCABULARIES[0], vocabulary, always)
    for larger in VOCABULARIES[1:]:
        if coverage(examples, tokens) >= COVERED:
            break
        tokens = vocabulary_of(examples, larger, vocabulary, always)
    return tokens


def eagle3_config(target: ModelConfig, tokens: int, target_bytes: int, taps: tuple[int, ...] = ()) -> Eagle3Config:
    """One layer of the shape of the target's; its MLP is as wide as leaves the drafter cheap enough."""
    for share in (1.0, 0.75, 0.5, 0.25):
        ffn = max(64, round(share * target.ffn / 64) * 64)
        config = Eagle3Config(
            taps_for(target.layers, taps), target.hidden, target.hidden, 1, target.heads, target.kv_heads,
            target.head_dim, ffn, target.vocabulary, tokens, target.norm_eps,
            RopeConfig(target.head_dim, target.rope.theta),
        )  # fmt: skip
        if BYTES_A_WEIGHT * eagle3_parameters(config) <= MOST_SHARE * target_bytes:
            break
    return config


def dspark_config(
    target: ModelConfig,
    tokens: int,
    target_bytes: int,
    mask_token: int,
    taps: tuple[int, ...] = (),
    layers: int | None = None,
) -> DSparkConfig:
    """Layers of the target's shape (so many; or two or one), with an MLP as wide as leaves the drafter cheap enough."""
    shapes: tuple[tuple[int, float], ...] = ((2, 1.0), (2, 0.5), (1, 1.0), (1, 0.5), (1, 0.25))
    if layers is not None:
        shapes = tuple((layers, share) for share in (1.0, 0.5, 0.25))
    for count, share in shapes:
        ffn = max(64, round(share * target.ffn / 64) * 64)
        config = DSparkConfig(
            taps_for(target.layers, taps), target.hidden, target.hidden, count, target.heads, target.kv_heads,
            target.head_dim, ffn, target.vocabulary, tokens, target.norm_eps,
            RopeConfig(target.head_dim, target.rope.theta), (None,) * count, "anchor", False, DSPARK_BLOCK, mask_token,
            0, "vanilla", DSPARK_RANK, True, True,
        )  # fmt: skip
        if BYTES_A_WEIGHT * dspark_parameters(config) <= MOST_SHARE * target_bytes:
            break
    return config


def dspark_parameters(c: DSparkConfig) -> int:
    """Weights that a block reads."""
    attention = 2 * c.hidden * (c.heads + c.kv_heads) * c.head_dim
    layer = attention + 3 * c.hidden * c.ffn
    return len(c.taps) * c.tap_width * c.hidden + c.layers * layer + c.draft_vocabulary * (c.hidden + c.rank)


def mask_token_of(examples: Sequence[Example], vocabulary: int) -> int:
    """A token that nobody ever says: what stands in a block for what is not known yet."""
    said = {token for example in examples for token in example.tokens}
    return next((token for token in range(vocabulary - 1, -1, -1) if token not in said), vocabulary - 1)


def eagle3_parameters(c: Eagle3Config) -> int:
    """Weights that a pass reads."""
    attention = 2 * c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.hidden
    return len(c.taps) * c.tap_width * c.hidden + attention + 3 * c.hidden * c.ffn + c.draft_vocabulary * c.hidden
