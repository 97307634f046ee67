"""Bad sampling settings are refused by name and range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", 101),
        ("n", 0),
        ("n", 16384),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_refused_together_and_against_the_vocabulary() -> None:
    with pytest.raises(UsageError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    for name in ("banned_tokens", "allowed_tokens", "stop_token_ids"):
        with pytest.raises(UsageError, match=name):
            SamplingParams(**{name: (100,)}).check_vocabulary(100)
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias={-1: 1.0}).check_vocabulary(100)
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(0,)).check_vocabulary(100)
