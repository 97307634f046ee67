"""What decided which tokens might come is in a record, from the request to the measurement; what was said is not."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import LoadOptions
from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.training import contest
from slipstream.training.contest import HeldOut
from slipstream.training.dataset import examples_of
from slipstream.training.logs import Exchange, read_log
from slipstream.training.records import RESTRICTIONS, SETTINGS, Record, restricted, sampled_with, settings_of
from slipstream.training.store import TrafficStore
from tests.speculation.folders import eagle3_folder
from tests.training.test_store import record

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": 0.3, "min_tokens": 4, "ignore_eos": True, "logit_bias": {3: 5.0, 4: -5.0},
    "banned_tokens": (9,), "allowed_tokens": (1, 2, 3), "grammar": "root ::= secret",
}  # fmt: skip
APART = {"stop", "stop_token_ids", "max_tokens", "logprobs", "n", "seed", "shown"}
"""What ends an answer, how often it is made, with what noise, and what of it is shown: tokens come as they would."""


def test_whatever_decides_which_tokens_may_come_is_kept() -> None:
    """A setting that is new here has to be one or the other."""
    assert {field.name for field in fields(SamplingParams)} == {*EVERYTHING} | APART
    kept = settings_of(SamplingParams(**EVERYTHING, stop=("secret",), seed=77, max_tokens=9))
    assert kept.keys() == EVERYTHING.keys() == {*SETTINGS, *RESTRICTIONS}
    assert [kept[name] for name in RESTRICTIONS] == [2, 1, 3, 1]
    assert "secret" not in json.dumps(kept)
    assert settings_of(SamplingParams(stop=("x",), seed=5)) == {}
    again = SamplingParams(**sampled_with(kept))
    assert again == SamplingParams(**{name: EVERYTHING[name] for name in SETTINGS})
    assert type(again.min_tokens) is type(again.top_k) is int
    assert restricted(kept)
    assert not restricted(settings_of(again))


def test_they_are_read_from_logs(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "min_tokens": 3, "ignore_eos": True}, {"prompt": "p", "logit_bias": {"5": 1, "6": -1}},
        {"prompt": "p", "response_format": {"type": "json_object"}}, {"prompt": "p", "guided_regex": "a+"},
        {"prompt": "p", "structured_outputs": {"choice": ["a"]}}, {"prompt": "p", "response_format": {"type": "text"}},
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, rows)))
    found = [item.settings for item in read_log(log) if isinstance(item, Exchange)]
    assert found == [
        {"min_tokens": 3.0, "ignore_eos": 1.0}, {"logit_bias": 2.0}, {"grammar": 1.0}, {"grammar": 1.0},
        {"grammar": 1.0}, {},
    ]  # fmt: skip


def test_an_answer_that_is_cut_has_no_more_least_tokens_than_are_left() -> None:
    (example,), _ = examples_of(
        [record(1, tokens=tuple(range(20)), spans=((5, 20),), settings={"min_tokens": 15.0})], "t", 12
    )
    assert dict(example.settings) == {"min_tokens": 7}


def test_restricted_answers_are_replayed_but_not_made_again(
    tiny_gguf: Path, tiny_records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What restricted them is not kept: made again without it, they would be others."""
    served: list[Any] = []
    turns = contest.served_in_turns

    def watched(model: Any, cost: Any, contenders: Any, examples: Any, earlier: Any, progress: Any) -> Any:
        served.extend(examples)
        return turns(model, cost, contenders, examples, earlier, progress)

    monkeypatch.setattr(contest, "served_in_turns", watched)
    folder = eagle3_folder(tmp_path / "d")
    records = [
        replace(r, settings=r.settings | ({"grammar": 1.0} if n % 2 else {})) for n, r in enumerate(tiny_records)
    ]

    def measured(some: list[Record], name: str) -> dict[str, Any]:
        with TrafficStore(tmp_path / name) as store:
            store.add(some)
        held = HeldOut(tmp_path / name, None, None)
        return contest.contest(
            str(tiny_gguf), held, [folder], 8, 4, 3, LoadOptions(threads=1), lambda title, done, total: None
        )

    report = measured(records[:8], "some.db")
    assert (report["held_out"]["answers"], report["served"]["answers"]) == (8, 4)
    assert not any(restricted(dict(example.settings)) for example in served)
    with pytest.raises(UsageError, match="a grammar or a bias restricted all"):
        measured(records[1:8:2], "none.db")
