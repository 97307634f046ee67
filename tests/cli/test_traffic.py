"""slipstream traffic on the command line: a log in, answered anew, looked at, out again, deleted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.text.tokenizer import byte_alphabet
from slipstream.training.logs import row_of
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore
from tests.cli.test_cli import run


def test_import_stats_export_delete(tiny_gguf: Path, tmp_path: Path) -> None:
    log, db = tmp_path / "log.jsonl", tmp_path / "t.db"
    rows = [{"prompt": f"one two three {n}", "completion": "four five six seven", "tag": "count"} for n in range(6)]
    log.write_text("\n".join(map(json.dumps, rows)))
    first = run("traffic", "import", str(log), str(db), "--model", str(tiny_gguf))
    assert first.returncode == 0, first.stderr
    assert "6 records" in first.stdout
    assert "--regenerate" in first.stderr
    made = (
        "traffic",
        "import",
        str(log),
        str(db),
        "--model",
        str(tiny_gguf),
        "--regenerate",
        "--max-tokens",
        "20",
        "--json",
    )
    anew = run(*made)
    assert anew.returncode == 0, anew.stderr
    assert json.loads(anew.stdout)["records"] == 6
    again = json.loads(run(*made).stdout)
    assert (again["records"], again["known"]) == (0, 6)
    with TrafficStore(db) as store:
        records = list(store.records())
    assert len(records) == 12
    assert len({record.target for record in records}) == 2
    assert {record.tag for record in records} == {"count"}
    report = json.loads(run("traffic", "stats", str(db), "--json").stdout)
    assert report["records"] == 12
    assert report["tags"]["count"]["drafters"].keys() == {"ngram", "suffix"}
    assert "count" in run("traffic", "stats", str(db)).stdout
    out = tmp_path / "out.jsonl"
    assert run("traffic", "export", str(db), str(out), "--model", str(tiny_gguf)).returncode == 0
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(exported) == 12
    assert exported[0]["prompt"].startswith("one two three")
    assert exported[0]["completion"].startswith("four five")
    anew = run("traffic", "import", str(out), str(tmp_path / "anew.db"), *made[4:])
    assert json.loads(anew.stdout)["records"] == 6, anew.stderr
    with TrafficStore(tmp_path / "anew.db") as store:
        of_text = [(record.tokens, record.time, record.tag, record.target) for record in store.records()]
    ours = next(record.target for record in records if record.target)
    assert of_text == [(r.tokens, r.time, r.tag, r.target) for r in records if r.target == ours]
    back = run("traffic", "import", str(out), str(tmp_path / "b.db"), "--model", str(tiny_gguf))
    assert "12 records" in back.stdout
    with TrafficStore(tmp_path / "b.db") as store:
        assert list(store.records()) == records
    assert "12 records deleted" in run("traffic", "delete", str(db), "--tag", "count").stdout


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_was_exported_comes_back_whole(form: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """Token ids, which of them the target made, tags, settings, steps; only what was wanted; readable by its owner."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    rng, records = random.Random(0), []
    for number in range(70):  # more than are written at a time
        tokens = tuple(rng.randrange(259) for _ in range(rng.randrange(12, 60)))
        spans = ((3, 5), (6, 7), (9, len(tokens) - number % 3))[number % 3 :]
        settings = {"temperature": 0.25, "min_tokens": 2.0, "grammar": 1.0} if number % 2 else {}
        records.append(
            Record(
                tokens, spans, f"target{number % 2}", "template", f"tag {number % 4} é", f"key{number}", 1e9 + number,
                f"r{number}", settings, (1, 3, 2) if number % 5 else (),
            )
        )  # fmt: skip
    source, out = tmp_path / "a.db", tmp_path / f"out.{form}"
    with TrafficStore(source) as store:
        store.add(records)

    def came_back(name: str, *wanted: str) -> list[Record]:
        assert run("traffic", "export", str(source), str(out), *wanted).returncode == 0
        back = run("traffic", "import", str(out), str(tmp_path / name), "--model", str(tiny_gguf), "--tag", "another")
        assert back.returncode == 0, back.stderr
        with TrafficStore(tmp_path / name) as store:
            return list(store.records())

    assert came_back("all.db") == records
    assert out.stat().st_mode & 0o077 == 0
    assert came_back("tag.db", "--tag", "tag 1 é") == [record for record in records if record.tag == "tag 1 é"]
    again = run("traffic", "import", str(out), str(tmp_path / "all.db"), "--model", str(tiny_gguf), "--json")
    assert json.loads(again.stdout)["records"] == 0, "what is there does not come twice"


def test_wrong_use(tiny_gguf: Path, tmp_path: Path) -> None:
    db = str(tmp_path / "t.db")
    for arguments, code, problem in (
        (("stats", db), 1, "no such traffic file"),
        (("delete", db), 2, "say which"),
        (("import", "none.jsonl", db, "--model", str(tiny_gguf)), 1, "No such file"),
        (("import", "x.jsonl", db, "--model", str(tiny_gguf), "--own", "--regenerate"), 2, "say one of them"),
        (("export", db, "out.csv"), 2, "ends in"),
        (("stats", db, "--limit", "0"), 2, "--limit must be"),
        (("delete", db, "--older-than", "0"), 2, "--older-than must be"),
        (("delete", db, "--older-than", "nan"), 2, "--older-than must be"),
    ):
        out = run("traffic", *arguments)
        assert (out.returncode, problem in out.stderr) == (code, True), out.stderr


def test_answers_made_anew_do_not_share_their_noise(tiny_gguf: Path, tmp_path: Path) -> None:
    """The same prompt at a temperature, several times: each answer is drawn for itself, and the same again."""
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"prompt": "abc abc", "custom_id": f"r{n}"}) for n in range(6)))
    answers = []
    for name in ("a.db", "b.db"):
        made = run(
            "traffic", "import", str(log), str(tmp_path / name), "--model", str(tiny_gguf), "--regenerate",
            "--temperature", "1.0", "--max-tokens", "12",
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        with TrafficStore(tmp_path / name) as store:
            answers.append({record.request: record.tokens for record in store.records()})
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > 3


def test_an_answer_that_was_cut_off_has_no_end(tiny_gguf: Path, tmp_path: Path) -> None:
    def row(name: str, reason: str) -> str:
        said = {"choices": [{"message": {"content": "yes and"}, "finish_reason": reason}]}
        asked = {"messages": [{"role": "user", "content": f"x {name}"}]}
        return json.dumps({"custom_id": name, "request": asked, "response": said})

    log, db = tmp_path / "log.jsonl", tmp_path / "t.db"
    log.write_text(f"{row('whole', 'stop')}\n{row('cut', 'length')}")
    assert run("traffic", "import", str(log), str(db), "--model", str(tiny_gguf), "--own").returncode == 0
    with TrafficStore(db) as store:
        answered = {record.request: record.answered for record in store.records()}
    assert answered["whole"] == answered["cut"] + 1


KILLED = """
import os, signal
import slipstream.training.store as store
add, times = store.TrafficStore.add, []

def killed(self, records):
    add(self, records)
    times.append(1)
    if len(times) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

store.TrafficStore.add = killed
from slipstream.cli import main
main()
"""
"""An import that is killed when it has written twice, with many answers under way."""
IDLE = """
from slipstream.engine import Engine
Engine.add = None
from slipstream.cli import main
main()
"""
"""An import that cannot answer anything."""


def test_an_import_that_was_killed_goes_on_to_the_same(tiny_gguf: Path, tmp_path: Path) -> None:
    """The same answers with the same times, in the file's order, as if nothing had happened."""
    log, db, whole = tmp_path / "log.jsonl", tmp_path / "t.db", tmp_path / "whole.db"
    rng = random.Random(1)
    rows = [{"prompt": rng.randbytes(9).hex(), "custom_id": f"r{n}", "max_tokens": rng.randrange(2, 30)}
            for n in range(260)]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--model", str(tiny_gguf), "--regenerate", "--temperature", "1.0", "--threads", "1")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "traffic", "import", str(log), str(db), *arguments], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    with TrafficStore(db) as store:
        written = list(store.records())
    assert 0 < len(written) < len(rows)
    again = run("traffic", "import", str(log), str(db), *arguments, "--json")
    assert json.loads(again.stdout)["known"] == len(written), again.stderr
    assert run("traffic", "import", str(log), str(whole), *arguments).returncode == 0
    with TrafficStore(db) as store, TrafficStore(whole) as other:
        records = list(store.records())
        assert records == list(other.records())
    assert [record.request for record in records] == [row["custom_id"] for row in rows]
    more = subprocess.run([sys.executable, "-c", IDLE, "traffic", "import", str(log), str(db), *arguments], check=False)
    assert more.returncode == 0, "what was answered is not answered again"


def test_answers_made_anew_are_as_old_as_their_log(tiny_gguf: Path, tmp_path: Path) -> None:
    """What is newest is held out of a training: the log's newest, not what was last to be finished."""
    log, db = tmp_path / "log.jsonl", tmp_path / "t.db"
    rows: list[dict[str, object]] = [
        {"prompt": "long", "custom_id": "old", "max_tokens": 40, "created": 1000},
        {"prompt": "short", "custom_id": "new", "max_tokens": 2, "created": 2000},
        {"prompt": "longer", "custom_id": "first", "max_tokens": 30},
        {"prompt": "x", "custom_id": "next", "max_tokens": 2},
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, rows)))
    os.utime(log, (5000, 5000))
    for arguments in (("--regenerate",), ()):
        assert run("traffic", "import", str(log), str(db), "--model", str(tiny_gguf), *arguments).returncode == 0
        with TrafficStore(db) as store:
            records = list(store.records())
        assert [record.request for record in records] == ["old", "new", "first", "next"]
        assert [record.time for record in records] == pytest.approx([1000, 2000, 5000, 5000], abs=0.1)


def test_answers_end_where_their_requests_say(tiny_gguf: Path, tmp_path: Path) -> None:
    """A stop string is answered with and not kept; one that is none makes its line unusable."""
    log = tmp_path / "log.jsonl"

    def made(name: str, stop: object) -> list[Record]:
        log.write_text(json.dumps({"prompt": "abc abc", "custom_id": "r", "stop": stop}))
        arguments = ("--model", str(tiny_gguf), "--regenerate", "--temperature", "1.0", "--json")
        found = run("traffic", "import", str(log), str(tmp_path / name), *arguments)
        assert found.returncode == 0, found.stderr
        with TrafficStore(tmp_path / name) as store:
            records = list(store.records())
        assert json.loads(found.stdout)["unusable"] == (not records)
        return records

    (free,) = made("free.db", None)
    answer = free.tokens[free.spans[0][0] :]
    letters = [*byte_alphabet()]  # token by token
    letter = next(token for token in answer[3:] if letters[token].isascii() and letters[token].isalnum())
    (ended,) = made("ended.db", letters[letter])
    assert ended.answered == answer.index(letter) + 1 < free.answered
    assert ended.settings == free.settings
    assert not made("wrong.db", [""])


def test_a_line_that_cannot_be_read_ends_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    log, db = tmp_path / "log.jsonl", tmp_path / "t.db"
    rows = [json.dumps({"prompt": f"one {n}", "completion": "two"}) for n in range(70)]
    only_tokens = json.dumps(row_of(Record((65, 66), ((1, 2),), target="another", request="tokens")))
    log.write_text("\n".join([*rows[:3], "{", *rows[3:], rows[0][:9], only_tokens]))
    for arguments, records, problems in ((("--regenerate", "--max-tokens", "3"), 70, 3), ((), 71, 2)):
        made = run("traffic", "import", str(log), str(db), "--model", str(tiny_gguf), *arguments)
        assert made.returncode == 0, made.stderr
        assert f"{records} records" in made.stdout
        assert f"{problems} could not be used; the first: line 4: " in made.stderr
        assert "lines that could not be read: 4, 72" in made.stderr


def test_programs_are_told_what_was_done(tiny_gguf: Path, tmp_path: Path) -> None:
    db, out = tmp_path / "t.db", tmp_path / "o.jsonl"
    with TrafficStore(db) as store:
        store.add([Record((65, 66, 67), ((1, 3),), time=float(n)) for n in range(1, 4)])
    assert json.loads(run("traffic", "export", str(db), str(out), "--json").stdout) == {"records": 3, "file": str(out)}
    assert json.loads(run("traffic", "delete", str(db), "--older-than", "1", "--json").stdout) == {"deleted": 3}
