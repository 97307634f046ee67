"""slipstream drafter on the command line: trained, measured, deployed to a server, watched."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import __version__
from slipstream.cli.drafter import seconds_of
from slipstream.engine import Engine, LoadOptions, load_model
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program import KVFormat
from slipstream.program.sampling import SamplingParams
from slipstream.speculation.dspark_model import read_dspark
from slipstream.training.contest import problems
from slipstream.training.records import Record
from slipstream.training.store import TrafficStore
from slipstream.weights.open import open_checkpoint
from tests.cli.test_cli import COMMAND, run
from tests.engine.test_jitter import collect
from tests.serving.conftest import start, stop
from tests.speculation.folders import eagle3_folder
from tests.training.conftest import greedy_records
from tests.training.test_precision import traffic_of

TRAIN = (
    "--rounds",
    "12",
    "--round-tokens",
    "1024",
    "--batch-tokens",
    "256",
    "--learning-rate",
    "3e-3",
    "--max-len",
    "128",
)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_train_and_eval(kind: str, tiny_gguf: Path, tmp_path: Path) -> None:
    tiny_traffic = tmp_path / "traffic.db"
    with TrafficStore(tiny_traffic) as store:  # with a beginning of more than one block, as of a system message
        records = greedy_records(tiny_gguf, b"You are a teacher of mathematics. Be kind. ")
        store.add([*records, replace(records[0], target="another")])
    folder, report, figure = tmp_path / "mine", tmp_path / "eval.json", tmp_path / "eval.svg"
    common = ("--model", str(tiny_gguf), "--traffic", str(tiny_traffic))
    out = run("drafter", "train", *common, "--out", str(folder), "--kind", kind, *TRAIN)
    assert out.returncode == 0, out.stderr
    assert ("say --layout speculators" in out.stderr) == (kind == "eagle3"), "a target of two layers has no usual taps"
    assert "tau of held-out answers" in out.stdout
    assert f"{tiny_traffic}: left out of what is learned: 1 another target's" in out.stderr
    assert "sizes, as foreseen" in out.stdout
    (card,) = json.loads(run("drafter", "list", str(tmp_path), "--json").stdout)
    assert (card["folder"], card["kind"]) == (str(folder), kind)
    assert card["command"].startswith(f"slipstream drafter train --model {tiny_gguf} --traffic {tiny_traffic}")
    assert card["version"] == __version__
    assert card["machine"]["cores"] > 0
    written = run("bench", "table", str(tmp_path)).stdout
    (row,) = (line for line in written.splitlines() if line.startswith(f"| training, {tiny_gguf} | {kind}, "))
    assert f"tau of {card['checked_answers']} held-out answers" in row
    assert f"S foreseen {card['speedup_estimate']:.2f} | {card['date']} | `{card['command']}` |" in row
    assert "mine" in run("drafter", "list", str(tmp_path)).stdout
    measured = run(
        "drafter", "eval", *common, "--drafter", str(folder), "--serve-limit", "4", "--out", str(report), "--figure",
        str(figure),
    )  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    assert "acceptance" in measured.stdout
    found = json.loads(report.read_text())
    assert found["replayed"].keys() == {"n-gram", "suffix", "mine"}
    assert found["served"]["contenders"].keys() == {"plain", "n-gram", "suffix", "mine", "mine, 5 always"}
    compared = found["teacher_forced_against_served"]
    assert len(compared["served"]) > 1, "drafts were made at every step, whatever they cost"
    assert compared["replayed"] == pytest.approx(compared["served"], abs=0.02)
    assert compared["apart"] <= 0.02
    assert found["served"]["identical"]
    assert found["leaks"] == []
    assert found["held_out"]["answers"] == 6
    tags = found["replayed"]["mine"]
    assert tags.keys() == {"", "tag0", "tag1"}
    for entry in found["served"]["contenders"].values():
        assert entry["tags"].keys() == {"tag0", "tag1"}
        assert sum(one["accepted"] for one in entry["tags"].values()) == entry["accepted"]
        assert min(one["tok_s"] for one in entry["tags"].values()) <= entry["tok_s"]
    assert "tag tag1: S plain 1.00" in measured.stdout
    low, high = tags[""]["interval"]
    assert low <= tags[""]["tau"] <= high
    assert figure.read_text().startswith("<svg")
    assert "| drafters, " in run("bench", "table", str(tmp_path)).stdout


def test_a_drafter_that_looks_ahead_fails_its_measurement(
    tiny_gguf: Path,
    tiny_traffic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever of those that are compared, and for programs too; without serving the report is there all the same."""
    import slipstream.training.contest as contest_module
    from slipstream.cli.drafter import evaluate

    folders = [eagle3_folder(tmp_path / name, salt=salt) for salt, name in enumerate(("mine", "other"))]
    told = iter([[], [2], [], []])
    monkeypatch.setattr(contest_module, "leaks", lambda *arguments: next(told))
    common: dict[str, Any] = {"against": folders[1:], "everything": True, "limit": 8, "threads": 1}
    for json_output in (True, False):
        out, figure = tmp_path / f"{json_output}.json", tmp_path / f"{json_output}.svg"
        with pytest.raises(SlipstreamError, match="other, answer 2") if json_output else contextlib.nullcontext():
            evaluate(
                str(tiny_gguf), tiny_traffic, folders[0], serve_limit=0, out=out, figure=figure,
                json_output=json_output, **common,
            )  # fmt: skip
        said, report = capsys.readouterr().out, json.loads(out.read_text())
        assert report["replayed"].keys() == {"n-gram", "suffix", "mine", "other"}
        assert report["served"] is None
        assert figure.read_text().count("<svg") == 1
        assert json.loads(said) == report if json_output else "0 served" in said
    assert problems(report | {"served": {"identical": False}, "leaks": []})


def test_for_a_target_that_is_served_in_other_precision(tiny_floats: Path, tmp_path: Path) -> None:
    """Trained and measured on the numbers that are served; what to do next says so, and so do card and report."""
    log, db, folder = tmp_path / "log.jsonl", tmp_path / "t.db", tmp_path / "mine"
    log.write_text("\n".join(json.dumps({"prompt": f"abc {n} def {7 * n}"}) for n in range(24)))
    common = ("--model", str(tiny_floats), "--kv-cache-dtype", "int8", "--quantization", "int4")
    made = run("traffic", "import", str(log), str(db), *common, "--regenerate", "--max-tokens", "40")
    assert made.returncode == 0, made.stderr
    with TrafficStore(db) as store:
        records = list(store.records())
    params = SamplingParams(temperature=0.0, max_tokens=40)
    served = LoadOptions(kv_format=KVFormat.INT8, quantization="int4", threads=1)
    for options, same in ((served, True), (LoadOptions(threads=1), False)):
        engine = Engine(load_model(str(tiny_floats), options))
        found = [collect(engine.run(engine.add(list(record.prompt), params)))[0].tokens for record in records]
        assert (found == [[*record.tokens[len(record.prompt) :]] for record in records]) == same
    trained = run("drafter", "train", *common, "--traffic", str(db), "--out", str(folder), *TRAIN, "--rounds", "1")
    assert trained.returncode == 0, trained.stderr
    flags = "--kv-cache-dtype int8 --quantization int4"
    assert trained.stdout.count(flags) == 2
    card = json.loads((folder / "training-card.json").read_text())
    assert (card["kv_cache_dtype"], card["quantization"]) == ("int8", "int4")
    measure = ("drafter", "eval", "--traffic", str(db), "--drafter", str(folder), "--serve-limit", "2", "--json")
    right = run(*measure, *common)
    assert right.returncode == 0, right.stderr
    report = json.loads(right.stdout)
    assert (report["kv_cache_dtype"], report["quantization"]) == ("int8", "int4")
    assert report["teacher_forced_against_served"]["apart"] <= 0.02
    assert "was trained for" not in right.stderr
    wrong = run(*measure, *common[:2])
    assert wrong.returncode == 2, wrong.stderr
    assert f"of this target served with {flags}: say so, too" in wrong.stderr
    untold = tmp_path / "untold.db"
    with TrafficStore(untold) as store:  # as of a server that recorded nothing of its precision
        store.add([replace(record, target=record.target.split()[0]) for record in records])
    other = run(*measure[:2], "--traffic", str(untold), *measure[4:], *common[:2])
    assert other.returncode == 0, other.stderr
    assert f"was trained for a target served with {flags}" in other.stderr
    nothing = tmp_path / "nothing.db"
    with TrafficStore(nothing) as store:
        store.add([replace(record, target="another") for record in records])
    more = ("--traffic", str(db), "--generic", str(nothing), "--out", str(tmp_path / "more"))
    asked = run("drafter", "train", *common, *more, *TRAIN)
    assert (asked.returncode, "generic records can be mixed in: 24 are of another" in asked.stderr) == (2, True)
    with TrafficStore(tmp_path / "held.db") as store:
        store.add(sorted(records, key=lambda record: record.time)[-1:])
    more = ("--traffic", str(db), "--generic", str(tmp_path / "held.db"), "--out", str(tmp_path / "more"))
    asked = run("drafter", "train", *common, *more, *TRAIN)
    assert (asked.returncode, "no answer to a prompt that is not held out" in asked.stderr) == (2, True), asked.stderr


def test_what_the_present_drafter_would_reach(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "mine")
    asked = ("traffic", "stats", str(tiny_traffic), "--model", str(tiny_gguf), "--drafter", str(folder))
    out = run(*asked, "--json")
    assert out.returncode == 0, out.stderr
    for tag in json.loads(out.stdout)["tags"].values():
        assert set(tag["drafters"]) == {"ngram", "suffix", "eagle3"}
        assert tag["drafters"]["eagle3"]["verifications"] > 100
        assert tag["drafters"]["eagle3"]["tokens_a_step"] >= 1.0
    assert "eagle3" in run(*asked).stdout
    assert run(*asked[:-2]).returncode == 2


def test_wrong_use(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    common = ("--model", str(tiny_gguf), "--traffic", str(tiny_traffic))
    out = ("--out", str(tmp_path / "d"))
    with TrafficStore(tmp_path / "empty.db"):
        pass
    for arguments, code, problem in (
        (("train", *common, *out, "--kind", "medusa"), 2, "eagle3 or dspark"),
        (("train", *common, *out, "--layout", "deepspec"), 2, "--layout"),
        (("train", *common, *out, "--budget", "soon"), 2, "20m"),
        (("train", *common, *out, "--taps", "2;3"), 2, "numbers with commas"),
        (("train", *common, *out, "--taps", "1,2"), 2, "--layout speculators"),
        (("train", *common, *out, "--taps", "0,77"), 2, "from 0 to 2"),
        (("train", *common, *out, "--layers", "2"), 2, "for --kind dspark"),
        (("train", *common, *out, "--kind", "dspark", "--layers", "0"), 2, "--layers is from 1"),
        (("train", *common, *out, "--held-out", "2"), 2, "--held-out"),
        (("train", *common, *out, "--kv-cache-dtype", "fp8"), 2, "--kv-cache-dtype must be"),
        (("eval", *common, *out, "--drafter", "x", "--quantization", "int3"), 2, "--quantization must be"),
        (("train", *common[:2], "--traffic", str(tmp_path / "empty.db"), *out), 2, "too few"),
        (("eval", *common, "--drafter", str(tmp_path)), 2, "--everything"),
        (("deploy", "x", "--url", "ftp://x"), 2, "http://"),
        (("deploy", "x", "--url", "http://127.0.0.1:9"), 1, "refused"),
        (("watch", *common, "--every", "0"), 2, "--every"),
    ):
        result = run("drafter", *arguments)
        assert (result.returncode, problem in result.stderr) == (code, True), result.stderr
    assert [seconds_of(text) for text in ("90", "90s", "20m", "2h")] == [90, 90, 1200, 7200]
    with pytest.raises(UsageError):
        seconds_of("-3m")


def test_deploy_and_watch(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    common = ("--model", str(tiny_gguf), "--traffic", str(tiny_traffic))
    assert run("drafter", "train", *common, "--out", str(folder), *TRAIN).returncode == 0
    server = start(tiny_gguf, "--kv-cache-gb", "0.02", "--max-model-len", "256", "--threads", "1")
    try:
        at = ("--url", server.url)
        deployed = run("drafter", "deploy", str(folder), "--stage", "canary", "--share", "0.3", "--auto", *at)
        assert deployed.returncode == 0, deployed.stderr
        report = json.loads(run("drafter", "deploy", "--stage", "all", *at, "--json").stdout)
        assert report["rollout"]["stage"] == "all"
        assert report["rollout"]["candidate"] == report["present"] == str(folder)
        assert json.loads(run("drafter", "deploy", "--stage", "back", *at, "--json").stdout)["present"] is None
        watched = run("drafter", "watch", *common, *at, "--once", "--json")
        assert watched.returncode == 0, watched.stderr
        assert json.loads(watched.stdout)["tags"] == []
        renewed = run(
            "drafter", "watch", *common, *at, "--once", "--auto", "--least-tokens", "1", "--budget", "5s", "--out",
            str(tmp_path / "more"), timeout=400,
        )  # fmt: skip  # of the lowest priority: beside busy processes it takes its time
        assert renewed.returncode == 0, renewed.stderr
        (card,) = (tmp_path / "more").glob("*/training-card.json")
        replayed = json.loads((card.parent / "eval.json").read_text())["replayed"]
        mine = replayed.pop(card.parent.name)[""]
        better = all(
            mine["interval"][0] > other[""]["tau"] for other in replayed.values()
        )  # a fast machine trains more
        assert better or "not surely better" in renewed.stderr
        again = run(
            "drafter", "watch", *common, *at, "--once", "--auto", "--least-tokens", "1", "--out",
            str(tmp_path / "more"), "--json",
        )  # fmt: skip
        assert json.loads(again.stdout)["new_tokens"] == 0, "nothing has come since that one was trained"
        assert len(list((tmp_path / "more").iterdir())) == 1
        rollout = json.loads(run("drafter", "deploy", *at, "--json").stdout)["rollout"]
        assert rollout["candidate"] == str(card.parent if better else folder)
        assert (rollout["outcome"] is None) == better, "looking changes nothing"
    finally:
        stop(server)


@pytest.mark.long
def test_a_drafter_is_trained_anew_as_the_one_at_work(
    tiny_gguf: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    """Of its kind, layers and taps, for the precision that is served; and it is measured beside that one."""
    folder, more = tmp_path / "mine", tmp_path / "more"
    traffic = traffic_of(tiny_records, tmp_path / "t.db", KVFormat.INT8, "none")
    common = ("--model", str(tiny_gguf), "--traffic", str(traffic))
    shape = ("--kind", "dspark", "--layers", "3", "--taps", "0,1", "--rounds", "1", "--kv-cache-dtype", "int8")
    made = run("drafter", "train", *common, "--out", str(folder), *TRAIN, *shape)
    assert made.returncode == 0, made.stderr
    options = ("--kv-cache-gb", "0.02", "--max-model-len", "256", "--threads", "1", "--kv-cache-dtype", "int8")
    server = start(tiny_gguf, *options, "--speculative", str(folder))
    try:
        at = ("--url", server.url)
        for told in ("2", "0,1,2"):
            wrong = run("drafter", "watch", *common, *at, "--once", "--auto", "--least-tokens", "1", "--taps", told)
            assert (wrong.returncode, "must read the same" in wrong.stderr) == (2, True), wrong.stderr
        renewed = run(
            "drafter", "watch", *common, *at, "--once", "--auto", "--least-tokens", "1", "--budget", "2s", "--out",
            str(more), timeout=400,
        )  # fmt: skip  # of the lowest priority: beside busy processes it takes its time
        assert renewed.returncode == 0, renewed.stderr
        card, report = (json.loads(next(more.glob(f"*/{name}.json")).read_text()) for name in ("training-card", "eval"))
        assert (card["kind"], card["taps"], card["kv_cache_dtype"]) == ("dspark", [0, 1], "int8")
        found = read_dspark(open_checkpoint(next(more.iterdir())), 2, 64)
        assert (found.layers, found.taps) == (3, (0, 1))
        assert [Path(one).name for one in report["drafters"]] == [next(more.iterdir()).name, "mine"]
        assert report["kv_cache_dtype"] == "int8"
    finally:
        stop(server)


def test_which_drafter_is_at_work(tiny_gguf: Path, tmp_path: Path) -> None:
    """Begun with, deployed, and beside others that look on, draft for a few, or were taken back."""
    first, second = eagle3_folder(tmp_path / "first"), eagle3_folder(tmp_path / "second", salt=1)
    options = ("--kv-cache-gb", "0.02", "--max-model-len", "256", "--threads", "1")
    server = start(tiny_gguf, *options, "--speculative", str(first), "--quantization", "int8")
    try:
        for asked, present in (
            ((), first), ((str(second), "--stage", "canary"), first), (("--stage", "all"), second),
            ((str(first), "--stage", "shadow"), second), (("--stage", "back"), second),
        ):  # fmt: skip
            said = run("drafter", "deploy", *asked, "--url", server.url, "--json")
            report = json.loads(said.stdout)
            assert report["present"] == str(present), (asked, said.stderr)
            assert (report["kv_cache_dtype"], report["quantization"]) == ("bf16", "int8")
    finally:
        stop(server)


def test_a_folder_by_default(tiny_gguf: Path, tiny_traffic: Path, tmp_path: Path) -> None:
    """Named by the traffic and the kind, where `drafter watch` puts its own."""
    asked = ("drafter", "train", "--model", str(tiny_gguf), "--traffic", str(tiny_traffic), *TRAIN, "--rounds", "1")
    out = subprocess.run([*COMMAND, *asked], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    (card,) = tmp_path.rglob("training-card.json")
    assert card.parent == tmp_path / "drafters" / f"{tiny_traffic.stem}-eagle3"
