"""Logs of other servers, in the shapes they come in, and records as text and as tables."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.training.logs import Exchange, LogError, Unread, _line, read_log, row_of
from slipstream.training.records import Record
from slipstream.training.tables import read_parquet, write_parquet
from tests.training.test_store import record

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def read(path: Path, *rows: Any) -> list[Exchange]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return [item for item in read_log(path) if isinstance(item, Exchange)]


def test_shapes(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    body = {"model": "x", "messages": CHAT, "temperature": 0.7, "max_tokens": 9, "metadata": {"tag": "code"}}
    response = {"choices": [{"message": {"role": "assistant", "content": "a"}}], "created": 5}
    found = read(
        file,
        {"messages": CHAT},
        {"messages": [*CHAT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]},
        {"prompt": "p", "completion": "c", "top_p": 0.5},
        {"custom_id": "one", "body": body, "response": {"status_code": 200, "body": response}},
        {"request": {"prompt": "p"}, "response": {"choices": [{"text": "c"}]}, "created": 7},
        {"question": "2 + 2?", "answer": "4"},
        {"category": "writing", "turns": ["first", "second"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]},
    )
    assert [(len(e.messages), e.prompt, e.answer) for e in found] == [
        (2, "", None), (2, "", "a"), (0, "p", "c"), (2, "", "a"), (0, "p", "c"), (1, "", None), (1, "", None),
        (1, "", None),
    ]  # fmt: skip
    assert found[2].settings == {"top_p": 0.5}
    assert (found[3].request, found[3].tag, found[3].settings, found[3].max_tokens) == (
        "one", "code", {"temperature": 0.7}, 9
    )  # fmt: skip
    assert found[4].time == 7
    assert found[6].tag == "writing"
    assert found[7].messages[0]["content"] == "part"
    assert len({e.request for e in found}) == len(found)
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert list(read_log(tmp_path / "log.jsonl.gz")) == list(read_log(file))


def test_a_request_that_failed_is_one_without_an_answer(tmp_path: Path) -> None:
    """One of a thousand lines that says so must not end the import."""
    body = {"messages": CHAT}
    failed = [
        {"status_code": 500, "body": {"error": {"message": "x"}}}, {"status_code": 200, "body": {"choices": []}},
        {"error": "x"},
    ]  # fmt: skip
    found = read(tmp_path / "log.jsonl", *({"body": body, "response": response} for response in failed))
    assert [(e.answer, len(e.messages)) for e in found] == [(None, 2)] * 3


def test_dates_and_damage(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "time": when} for when in ("1970-01-01T00:01:00+00:00", "yesterday", 5, None)]
    assert [e.time for e in read(tmp_path / "log.jsonl", *rows)] == [60.0, 0.0, 5.0, 0.0]
    whole = gzip.compress(b"\n".join([json.dumps(rows[0]).encode()] * 999), mtime=0)
    (tmp_path / "log.jsonl.gz").write_bytes(whole[:20] + b"\xff" * 20 + whole[40:])
    with pytest.raises(LogError):
        list(read_log(tmp_path / "log.jsonl.gz"))
    lines = "\n".join(json.dumps({"prompt": random.Random(n).randbytes(99).hex()}) for n in range(2000))
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-20_000])  # half written
    *before, last = read_log(tmp_path / "log.jsonl.gz")
    assert len(before) > 1000
    assert all(isinstance(item, Exchange) for item in before)
    assert isinstance(last, Unread)
    assert (last.line, "nor what follows" in last.problem) == (len(before) + 1, True)


def test_every_answer_of_a_conversation_counts(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    found = read(tmp_path / "log.jsonl", {"messages": turns})
    assert [(len(e.messages), e.answer) for e in found] == [(1, "assistant 0"), (3, "assistant 1"), (5, "assistant 2")]
    assert len({e.request for e in found}) == 3


@pytest.mark.parametrize(
    "row", ["[1]", "{", '{"messages": 5}', '{"messages": [{"role": "king", "content": "x"}]}', '{"what": 1}',
            '{"tokens": [1, -2, 3], "spans": [[1, 2]]}', '{"tokens": [1, 2], "spans": [[0, 2]]}',
            '{"tokens": [1, 2], "spans": [[1, 9]]}', '{"request": 4, "response": {}}', "[" * 5000,
            '{"prompt": "x", "stop": [4]}', '{"prompt": "x", "top_p": ' + "9" * 400 + "}", "x" * ((16 << 20) + 9)]
)  # fmt: skip
def test_what_is_none_says_where(tmp_path: Path, row: str) -> None:
    """And brings nothing; all around it is read."""
    (tmp_path / "log.jsonl").write_text('{"prompt": "fine"}\n\n' + row + '\n{"prompt": "fine, too"}')
    first, bad, last = read_log(tmp_path / "log.jsonl")
    assert isinstance(first, Exchange)
    assert isinstance(bad, Unread)
    assert bad.line == 3
    assert isinstance(last, Exchange)
    assert last.prompt == "fine, too"


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        list(read_log(tmp_path / "none.jsonl"))
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}' * 999)[:60])
    with pytest.raises(LogError, match=r"log\.jsonl\.gz"):
        list(read_log(tmp_path / "log.jsonl.gz"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "prompt", "request", "response", "choices", "tokens",
                             "spans", "steps", "settings", "body", "text", "turns", "metadata", "tag"]),
            inner, max_size=5),
        max_leaves=20,
    )
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_any_line_is_read_or_told_of(value: Any) -> None:
    for texts in (False, True):
        list(_line(json.dumps(value).encode(), 1, texts=texts))


def test_records_go_out_and_come_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    records = [record(n) for n in range(2100)] + [Record((1, 2, 3, 4, 5), ((1, 2), (3, 5)))]
    assert write_parquet(records, tmp_path / "r.parquet") == len(records)
    assert list(read_parquet(tmp_path / "r.parquet")) == records
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row_of(r)) for r in records))
    assert list(read_log(tmp_path / "r.jsonl")) == records
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    with pytest.raises(LogError, match="no table of records"):
        list(read_parquet(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
def test_what_is_not_in_the_prompt_is_not_learned_from(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The prompt would not be the one that was served."""
    assert all(exchange.problem for exchange in read(tmp_path / "l.jsonl", asked))
    plain = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    (exchange,) = read(tmp_path / "l.jsonl", plain)
    assert not exchange.problem


def test_whether_an_answer_was_cut_off_is_known(tmp_path: Path) -> None:
    def row(reason: str) -> dict[str, Any]:
        said = {"choices": [{"message": {"content": "yes"}, "finish_reason": reason}]}
        return {"request": {"messages": [{"role": "user", "content": "x"}]}, "response": said}

    assert [exchange.cut for exchange in read(tmp_path / "l.jsonl", row("length"), row("stop"))] == [True, False]


def test_every_choice_is_an_answer(tmp_path: Path) -> None:
    """Of n > 1, each with a name of its own; one is called as its request is."""
    said = [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}, {"text": None}]
    row = {"custom_id": "r", "body": {"prompt": "p", "n": 3}, "response": {"choices": said}}
    assert [(e.request, e.answer, e.cut) for e in read(tmp_path / "l.jsonl", row)] == [
        ("r/0", "a", False), ("r/1", "b", True), ("r/2", None, False),
    ]  # fmt: skip
    (one,) = read(tmp_path / "l.jsonl", row | {"response": {"choices": said[:1]}})
    assert one.request == "r"


def test_stops_are_read_to_answer_with(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "stop": stop} for stop in ("x", ["x", "y"], None)]
    assert [e.stop for e in read(tmp_path / "l.jsonl", *rows)] == [("x",), ("x", "y"), ()]


def test_text_is_taken_for_another_target(tmp_path: Path) -> None:
    """Of rows that have both; without it they are records still."""
    chat = [*CHAT, {"role": "assistant", "content": "a"}]
    kept = record(1)
    rows = [row_of(kept) | text for text in ({"messages": chat}, {"prompt": "p", "completion": "c"}, {})]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second, third = read_log(tmp_path / "l.jsonl", texts=True)
    assert isinstance(first, Exchange)
    assert isinstance(second, Exchange)
    assert ([*first.messages], first.answer) == (CHAT, None)
    assert (second.prompt, second.answer) == ("p", None)
    for found in (first, second):
        assert (found.request, found.time, found.tag, found.settings) == (
            kept.request, kept.time, kept.tag, kept.settings
        )  # fmt: skip
    assert third == kept
    assert list(read_log(tmp_path / "l.jsonl")) == [kept] * 3
