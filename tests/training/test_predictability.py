"""What drafting from text would reach, replayed: on text that repeats itself, and on text that does not."""

from __future__ import annotations

import random

import pytest

from slipstream.training.predictability import counted, predictability
from slipstream.training.records import Record


def answers(tokens: list[list[int]], tag: str = "") -> list[Record]:
    return [Record((1, 2, 3, *t), ((3, 3 + len(t)),), tag=tag, time=n) for n, t in enumerate(tokens)]


def test_repetition_is_found_within_and_between_answers() -> None:
    rng = random.Random(0)
    noise = [[rng.randrange(5, 40_000) for _ in range(200)] for _ in range(8)]
    loop = [[7, 8, 9, 10, 11, 12, 13, 14] * 25]
    same = [noise[0]] * 8
    found = predictability([*answers(noise, "noise"), *answers(loop, "loop"), *answers(same, "same")])
    assert {name: p.records for name, p in found.items()} == {"noise": 8, "loop": 1, "same": 8}
    assert found["noise"].repetition == 0
    assert found["noise"].tokens_a_step("suffix") == 1.0
    assert found["loop"].repetition > 0.9
    assert found["loop"].tokens_a_step("ngram") > 5
    assert found["same"].repetition == 0
    assert found["same"].tokens_a_step("ngram") == 1.0
    assert found["same"].tokens_a_step("suffix") > 4
    assert found["same"].drafts["suffix"].tau == pytest.approx(9, abs=1)


def test_a_token_is_drafted_from_earlier_ones_only() -> None:
    """The same tokens after a new beginning: were later tokens looked at, the first answer would be drafted too."""
    rng = random.Random(1)
    tokens = [rng.randrange(5, 40_000) for _ in range(300)]
    once = predictability(answers([tokens]))[""]
    assert once.steps == {"ngram": 299, "suffix": 299}
    twice = predictability(answers([tokens, tokens]))[""]
    assert twice.steps["ngram"] == 598
    assert 300 < twice.steps["suffix"] < 345


def test_whoever_waits_is_told_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    records = answers([[7, 8, 9]] * 3)
    assert predictability(counted(records, 3, lambda *at: told.append(at)))[""].records == 3
    assert told == [(1, 3), (2, 3), (3, 3)]
