"""Sizes: the shapes that a drafter may have for its target, and the tokens that its head may know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError
from slipstream.models import ModelConfig
from slipstream.models.rope import RopeConfig
from slipstream.speculation.dspark_model import DSparkConfig
from slipstream.speculation.eagle3_model import Eagle3Config, default_taps
from slipstream.training.dataset import Example, coverage, vocabulary_of
from slipstream.training.sizing import Candidate, Shape

MOST_SHARE = 0.08
"""Of the target's bytes. None larger was ever measured, so what is foreseen of them is not to be relied on."""
COVERED = 0.97
"""Share of the answers' tokens that the largest draft vocabulary should hold. Whatever is outside is never accepted;
but what it takes to hold the last ones makes every pass dearer than they are worth.
"""
MOST_LAYERS = {"eagle3": 1, "dspark": 2}
MLP_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Widths of a drafter's MLP, over its target's."""
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


@dataclass(frozen=True, slots=True)
class Head:
    """Tokens that a drafter's head may know, and the share of what is said that they hold."""

    tokens: npt.NDArray[np.int32]
    covers: float


def heads(examples: Sequence[Example], size: int | None, vocabulary: int, always: Sequence[int]) -> list[Head]:
    """Heads that rise: one of `size` tokens (0: all), or several, the last of which holds nearly all that is said."""
    if size == 0:
        return [Head(np.arange(vocabulary, dtype=np.int32), 1.0)]
    found: list[Head] = []
    for count in VOCABULARIES if size is None else (size,):
        tokens = vocabulary_of(examples, count, vocabulary, always)
        found.append(Head(tokens, coverage(examples, tokens)))
        if found[-1].covers >= COVERED or len(tokens) == vocabulary:
            break
    return found


def candidates(
    kind: str,
    target: ModelConfig,
    target_bytes: int,
    known: Sequence[Head],
    layers: int | None = None,
    ffn: int | None = None,
    taps: tuple[int, ...] = (),
) -> list[Candidate]:
    """The shapes to choose from: those small enough, if there are any. `layers` and `ffn` are set where not None."""
    counts = range(1, MOST_LAYERS[kind] + 1) if layers is None else (layers,)
    widths = sorted({max(64, round(share * target.ffn / 64) * 64) for share in MLP_SHARES}) if ffn is None else (ffn,)
    whole = 2 * target.hidden * (target.heads + target.kv_heads) * target.head_dim + 3 * target.hidden * target.ffn
    found = []
    for count in counts:
        for width in widths:
            for head in known:
                shape = Shape(count, width, len(head.tokens))
                body, parameters = _weights(kind, target, shape, taps)
                found.append(Candidate(shape, parameters, body / whole, head.covers))
    return [one for one in found if one.bytes <= MOST_SHARE * target_bytes] or found


def _weights(kind: str, target: ModelConfig, shape: Shape, taps: tuple[int, ...]) -> tuple[int, int]:
    """(of the layers, of all that a pass reads)."""
    if kind == "eagle3":
        eagle3 = eagle3_config(target, shape.vocabulary, shape.ffn, taps)
        return eagle3_layer(eagle3), eagle3_parameters(eagle3)
    dspark = dspark_config(target, shape.vocabulary, shape.ffn, shape.layers, 0, taps)
    return dspark.layers * dspark_layer(dspark), dspark_parameters(dspark)


def eagle3_config(target: ModelConfig, tokens: int, ffn: int, taps: tuple[int, ...] = ()) -> Eagle3Config:
    """One layer of the shape of the target's, but for the width of its MLP."""
    return Eagle3Config(
        taps_for(target.layers, taps), target.hidden, target.hidden, 1, target.heads, target.kv_heads,
        target.head_dim, ffn, target.vocabulary, tokens, target.norm_eps,
        RopeConfig(target.head_dim, target.rope.theta),
    )  # fmt: skip


def dspark_config(
    target: ModelConfig, tokens: int, ffn: int, layers: int, mask_token: int, taps: tuple[int, ...] = ()
) -> DSparkConfig:
    """Layers of the target's shape, but for the width of their MLPs."""
    return DSparkConfig(
        taps_for(target.layers, taps), target.hidden, target.hidden, layers, target.heads, target.kv_heads,
        target.head_dim, ffn, target.vocabulary, tokens, target.norm_eps,
        RopeConfig(target.head_dim, target.rope.theta), (None,) * layers, "anchor", False, DSPARK_BLOCK, mask_token,
        0, "vanilla", DSPARK_RANK, True, True,
    )  # fmt: skip


def dspark_layer(c: DSparkConfig) -> int:
    """Weights of a layer."""
    return 2 * c.hidden * (c.heads + c.kv_heads) * c.head_dim + 3 * c.hidden * c.ffn


def dspark_parameters(c: DSparkConfig) -> int:
    """Weights that a block reads."""
    head = c.draft_vocabulary * (c.hidden + c.rank)
    return len(c.taps) * c.tap_width * c.hidden + c.layers * dspark_layer(c) + head


def mask_token_of(examples: Sequence[Example], vocabulary: int) -> int:
    """A token that nobody ever says: what stands in a block for what is not known yet."""
    said = {token for example in examples for token in example.tokens}
    return next((token for token in range(vocabulary - 1, -1, -1) if token not in said), vocabulary - 1)


def eagle3_layer(c: Eagle3Config) -> int:
    """Weights of its layer, whose attention reads two inputs."""
    attention = 2 * c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.hidden
    return attention + 3 * c.hidden * c.ffn


def eagle3_parameters(c: Eagle3Config) -> int:
    """Weights that a pass reads."""
    return len(c.taps) * c.tap_width * c.hidden + eagle3_layer(c) + c.draft_vocabulary * c.hidden
