"""--speculative and bench spec on the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench import spec_costs, table
from slipstream.bench.prompts import read_talks
from slipstream.bench.spec import forced
from slipstream.engine.drafters import Speculative
from slipstream.errors import UsageError
from slipstream.program import Draft
from tests.cli.test_cli import run
from tests.speculation.folders import dspark_folder, eagle3_folder

PROMPT = "one two three one two three one two three one two"


def said(*options: str) -> dict[str, object]:
    out = run("generate", *options, "-p", PROMPT, "--max-tokens", "100", "--ignore-eos", "--seed", "3", "--json")
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_generate_says_the_same_whatever_drafts(tiny_gguf: Path, tmp_path: Path) -> None:
    eagle, dspark = eagle3_folder(tmp_path / "eagle"), dspark_folder(tmp_path / "dspark")
    model = str(tiny_gguf)
    plain = said(model, "--speculative", "off")
    assert plain["speculation"]["verifications"] == 0  # type: ignore[index]
    for speculative in ("auto", "ngram", "suffix", f"draft:{model}", f"draft:{model},only", str(eagle),
                        f"{eagle},tree=8x2x2", str(dspark)):  # fmt: skip
        drafted = said(model, "--speculative", speculative)
        assert drafted["token_ids"] == plain["token_ids"], speculative
        assert drafted["text"] == plain["text"]
    greedy = said(model, "--speculative", f"draft:{model}", "--verify", "rejection", "--temperature", "0")
    assert greedy["token_ids"] == said(model, "--temperature", "0", "--speculative", "off")["token_ids"]
    sampled = said(model, "--speculative", f"draft:{model},only", "--verify", "rejection")
    assert len(sampled["token_ids"]) == 100  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--speculative", "always"), "--speculative is auto"),
        (("--speculative", "suffix,only"), "only a draft model"),
        (("--speculative", "./nowhere"), "nowhere"),
        (("--speculative", "./x,tree=0x1x1"), "TOKENSxDEPTHxBRANCHES"),
        (("--verify", "maybe"), "exact or rejection"),
        (("--speculative", "suffix", "--backend", "reference"), "native backend"),
    ],
)
def test_wrong_use(tiny_gguf: Path, options: tuple[str, ...], problem: str) -> None:
    out = run("generate", str(tiny_gguf), "-p", "x", *options)
    assert out.returncode in (1, 2)
    assert problem in out.stderr
    assert "Traceback" not in out.stderr


CARD = {"target_fingerprint": "0" * 32, "tau": 3.0, "draft_len": 5, "made_for": "a/b"}


def test_a_drafter_for_another_target_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path)
    (folder / "slipstream-drafter.json").write_text(json.dumps(CARD))
    out = run("generate", str(tiny_gguf), "-p", "x", "--max-tokens", "4", "--speculative", str(folder))
    assert out.returncode == 0
    assert "made for another target (a/b)" in out.stderr


def test_a_model_with_another_tokenizer_cannot_draft(tiny_gguf: Path, smollm: Path) -> None:
    out = run("generate", str(smollm), "-p", "x", "--speculative", f"draft:{tiny_gguf}")
    assert out.returncode == 2
    assert "another tokenizer" in out.stderr


def test_bench_spec(tiny_gguf: Path, tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "spec.json"
    rows = [{"category": name, "turns": [PROMPT, "again"]} for name in ("coding", "writing", "rag")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    common = ("bench", "spec", str(tiny_gguf), "--prompts", str(prompts), "--max-tokens", "40", "--out", str(file))
    out = run(*common)
    assert out.returncode == 0, out.stderr
    report = json.loads(file.read_text())
    assert report["identical"]
    assert report["categories"].keys() == {"mt_bench", "rag"}
    assert report["categories"]["mt_bench"]["answers"] == 4
    assert {"verify_cost", "draft_cost", "c", "mean_speedup", "drafters"} <= report.keys()
    by_coin = run(*common, "--force-accept", "0.7")
    assert by_coin.returncode == 0, by_coin.stderr
    assert json.loads(file.read_text())["forced_acceptance"] == 0.7
    assert "verifying K drafts took, in plain steps of this run: " in by_coin.stdout
    own = f"draft:{tiny_gguf},only"
    apart = run(*common, "--force-accept", "0.9", "--speculative", own)
    assert apart.returncode == 0, apart.stderr
    measured = json.loads(file.read_text())["measured_costs"]
    assert measured["plain_step_seconds"] > 0
    assert measured["verify_cost"].keys() == measured["draft_cost"].keys() == measured["rounds"].keys()
    assert all(cost > 0 for key in ("verify_cost", "draft_cost") for cost in measured[key].values())
    assert "; drafts accepted by force, 90%" in run("bench", "table", str(tmp_path)).stdout
    streams = run(*common, "--streams", "2", "--turns", "1")
    assert streams.returncode == 0, streams.stderr
    assert json.loads(file.read_text())["p99_tpot_ratio"]["median"] > 0
    for other in (("--force-accept", "0.5"), ("--verify", "rejection")):
        refused = run(*common, "--streams", "2", *other)
        assert (refused.returncode, "--verify exact" in refused.stderr) == (2, True)
    table = run("bench", "table", str(tmp_path)).stdout
    assert "| speculation, many streams, " in table
    without = run(*common[:3], "--max-tokens", "20", "--limit", "1", "--force-accept", "0.6", "--json")
    assert without.returncode == 0, without.stderr
    ours = json.loads(without.stdout)
    assert (ours["prompt_set"], ours["forced_acceptance"]) == ("our own", 0.6)
    assert ours["categories"].keys() == {"writing", "maths", "code", "repeating"}
    beside = run(*common[:-2], "--speculative", own, "--limit", "1", "--overheads", "--out", str(file))
    assert beside.returncode == 0, beside.stderr
    overheads = json.loads(file.read_text())["overheads"]
    assert overheads["pass"]["median"] > 0
    assert overheads["silent_drafters"]["median"] > 0
    assert overheads["unasked_drafter"]["median"] > 0
    assert "drafters that never draft take" in run("bench", "table", str(tmp_path)).stdout


class _Machine:
    """An engine and a controller on a clock of their own: a plain step takes 10 s; one with K drafts 2 s a draft to
    make them, 1 s to look whether to, and 10 + K to verify them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.clock, self.drafts = 0.0, 0
        self.drafting = SimpleNamespace(resting=False)
        self.timings = {0: SimpleNamespace(first_token=None)}
        monkeypatch.setattr(spec_costs.time, "perf_counter", lambda: self.clock)

    def offers(self, eligible: object, cost: object) -> dict[int, object]:
        self.clock += 1.0
        return {}

    def draft(self, plan: object) -> dict[int, Draft]:
        self.clock += 2.0 * self.drafts
        return {0: Draft.chain([1] * self.drafts, [0] * self.drafts, "x")} if self.drafts else {}

    def step(self) -> list[object]:
        if not self.drafting.resting:
            self.offers([], None)
            self.draft(None)
        self.clock += 10.0 + self.drafts
        return []


def test_what_a_round_costs_is_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Any = _Machine(monkeypatch)
    rounds = spec_costs.Rounds(machine)

    def play(resting: bool, drafts: int, times: int) -> None:
        machine.drafting.resting, machine.drafts = resting, drafts
        for _ in range(times):
            rounds.step(machine, 0)

    play(False, 4, 5)  # the prompt's
    machine.timings[0].first_token = 1.0
    for drafts, times in ((2, 3), (4, 7), (5, 1), (0, 9)):
        play(False, drafts, times)
        play(True, 0, 4)
    assert rounds.report() == {
        "plain_step_seconds": 10.0, "verify_cost": {"2": 1.2, "4": 1.4}, "draft_cost": {"2": 0.4, "4": 0.8},
        "overhead": {"2": 0.1, "4": 0.1}, "rounds": {"2": 3, "4": 7},
    }  # fmt: skip
    entry = {"verifications": 10, "drafted": 39, "tau": 3.0}
    result = forced({"categories": {"maths": entry}}, 0.7, rounds)
    (row,) = result["formula"]
    assert (row["draft_len"], row["formula_speedup"]) == (4, pytest.approx(3.0 / (1.4 + 0.8 + 0.1)))
    costs = "2 drafts v 1.20, d 0.40, the rest 0.10; 4 drafts v 1.40, d 0.80, the rest 0.10"
    assert table.forced(result) == f"; drafts accepted by force, 70%, measured at every step: {costs}"
    bare = forced({"categories": {}}, 0.7, spec_costs.Rounds(machine))
    assert table.forced(bare) == "; drafts accepted by force, 70%"


def test_bench_spec_prediction(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "prediction.json"
    out = run("bench", "spec-prediction", str(tiny_gguf), "--turns", "1", "--out", str(file))
    assert out.returncode == 0, out.stderr
    report = json.loads(file.read_text())
    assert {(cell["batch"], cell["draft_len"]) for cell in report["cells"]} >= {(1, 1), (16, 8)}
    assert "| predicted S, " in run("bench", "table", str(tmp_path)).stdout


def test_prompt_files(tmp_path: Path) -> None:
    code = tmp_path / "HumanEval.jsonl.gz"
    code.write_bytes(gzip.compress(json.dumps({"prompt": "def f():"}).encode()))
    (talk,) = read_talks(code, 3)
    assert (talk.category, "def f():" in talk.turns[0]) == ("humaneval", True)
    agents = tmp_path / "agents.jsonl"
    display = "user: hi\nassistant: hello\nuser: look\nassistant: None\ntool: {}\nassistant: found\nit"
    agents.write_text(json.dumps({"messages_display": display}))
    first, second = read_talks(agents, 9)
    assert (first.before, first.turns) == ((), ("hi",))
    assert [m["role"] for m in second.before] == ["user", "assistant"]
    assert "Result of a tool" in second.turns[0]
    chats = tmp_path / "chats.jsonl"
    roles = ("system", "user", "assistant")
    chats.write_text(json.dumps({"messages": [{"role": role, "content": role} for role in roles]}))
    assert read_talks(chats, 1)[0].turns == ("user",)
    for text, problem in (("", "no prompts"), ("{}", "line 1"), ("[1", "line 1"), ('{"turns": 3}', "line 1")):
        chats.write_text(text)
        with pytest.raises(UsageError, match=problem):
            read_talks(chats, 1)
    with pytest.raises(UsageError, match="nowhere"):
        read_talks(tmp_path / "nowhere", 1)


def test_what_speculative_may_say() -> None:
    assert Speculative.parse("auto") == Speculative("auto")
    assert Speculative.parse("draft:hf:org/name@rev") == Speculative("draft", "hf:org/name@rev")
    tree = Speculative.parse("./eagle,tree=16x4x3,only")
    assert (tree.kind, tree.reference, tree.only) == ("folder", "./eagle", True)
    assert tree.tree is not None
    assert (tree.tree.tokens, tree.tree.depth, tree.tree.branches) == (16, 4, 3)
