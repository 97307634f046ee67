"""A maths tutor's own drafter, from recorded traffic to a figure: `python examples/own_drafter/own_drafter.py DATA`.

DATA is a folder with prompts as JSON lines: `maths.jsonl` (what users of the service ask; GSM8K's training set serves
well), `maths-later.jsonl` (what they ask later: never learned from), `mixed.jsonl` (any prompts, for a drafter that
knows no service), and `foreign-*.jsonl` (what others ask). Every answer is made by the target itself. Steps whose
outcome is there already are left out, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.machine import described

SYSTEM = "You are a patient maths tutor. Solve the problem step by step and end with the answer."
MODEL = "smollm2-135m"
FIGURE = "own-drafter.svg"


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    own_tokens: int
    mixed_tokens: int
    later_tokens: int
    max_tokens: int
    own: tuple[str, ...]
    generic: tuple[str, ...]
    limit: int
    serve: int


FULL = Sizes(1_000_000, 60_000, 40_000, 256, ("--budget", "25m"), ("--budget", "4m"), 180, 28)
FEW = ("--rounds", "4", "--round-tokens", "2048", "--batch-tokens", "512", "--draft-vocabulary", "1024")
SMALL = Sizes(6_000, 3_000, 2_000, 64, FEW, FEW, 12, 4)


class Example:
    """The steps, over one folder of data and one of results."""

    def __init__(self, data: Path, out: Path, model: str, sizes: Sizes):
        self.data, self.out, self.model, self.sizes = data, out, model, sizes
        self.seconds: dict[str, float] = {}
        out.mkdir(parents=True, exist_ok=True)

    def slipstream(self, step: str, *arguments: object) -> None:
        """Run a command, and note what it took."""
        command = [sys.executable, "-m", "slipstream", *map(str, arguments)]
        print(f"\n== {step}\n$ slipstream {' '.join(map(str, arguments))}", flush=True)
        begun = time.monotonic()
        subprocess.run(command, check=True)
        self.seconds[step] = time.monotonic() - begun

    def traffic(self, name: str, tokens: int, system: str = "", into: str = "") -> Path:
        """Answers of the target to a file's prompts; `into` another one's traffic, after what is there."""
        file = self.out / f"{into or name}.db"
        self.slipstream(
            f"answers: {name}", "traffic", "import", self.data / f"{name}.jsonl", file, "--model", self.model,
            "--regenerate", "--tag", name, "--system", system, "--max-tokens", self.sizes.max_tokens, "--most-tokens",
            tokens,
        )  # fmt: skip
        return file

    def train(self, name: str, traffic: Path, how: tuple[str, ...], *options: object) -> Path:
        """A drafter from a traffic file."""
        folder = self.out / name
        if not (folder / "training-card.json").exists():
            self.slipstream(
                f"training: {name}", "drafter", "train", "--model", self.model, "--traffic", traffic, "--out", folder,
                *how, *options,
            )  # fmt: skip
        return folder

    def measure(self, name: str, traffic: Path, own: Path, mixed: Path, *which: str) -> dict[str, Any]:
        """Both drafters beside plain decoding, n-gram and suffix on answers that neither has learned from."""
        report = self.out / f"eval-{name}.json"
        if not report.exists():
            self.slipstream(
                f"eval: {name}", "drafter", "eval", "--model", self.model, "--traffic", traffic, "--drafter", own,
                "--against", mixed, *which, "--limit", self.sizes.limit, "--serve-limit", self.sizes.serve,
                "--out", report, "--figure", self.out / f"eval-{name}.svg",
            )  # fmt: skip
        return dict(json.loads(report.read_text()))

    def run(self) -> dict[str, Any]:
        """All steps."""
        sizes = self.sizes
        maths = self.traffic("maths", sizes.own_tokens, SYSTEM)
        mixture = self.traffic("mixed", sizes.mixed_tokens)
        own = self.train("own", maths, sizes.own, "--generic", mixture)
        mixed = self.train("generic", mixture, sizes.generic)
        asked_later = self.data / "maths-later.jsonl"
        if asked_later.stat().st_mtime < (own / "training-card.json").stat().st_mtime:
            asked_later.touch()  # a log without times is as old as its file; this one is newer than what was learned
        later = self.traffic("maths-later", sizes.own_tokens + sizes.later_tokens, SYSTEM, "maths")
        reports = {"maths-later": self.measure("maths-later", later, own, mixed, "--tag", "maths-later")}
        for prompts in sorted(self.data.glob("foreign-*.jsonl")):
            traffic = self.traffic(prompts.stem, sizes.later_tokens // 2)
            reports[prompts.stem] = self.measure(prompts.stem, traffic, own, mixed, "--everything")
        records = [part for name in reports for part in ("--record", self.out / f"eval-{name}.json")]
        self.slipstream("figure", "drafter", "figure", "--out", self.out / FIGURE, *records)
        return {"seconds": self.seconds, "reports": reports}


def main() -> None:
    """Read the command line, run, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("own-drafter"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--small", action="store_true", help="minutes instead of an hour, to see that it runs")
    arguments = parser.parse_args()
    begun = time.monotonic()
    found = Example(arguments.data, arguments.out, arguments.model, SMALL if arguments.small else FULL).run()
    found["minutes"] = (time.monotonic() - begun) / 60.0
    found = described({}) | {"command": shlex.join(["python", *sys.argv])} | found
    (arguments.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, report in found["reports"].items():
        print(f"\n{name}")
        for drafter, served in report["served"]["contenders"].items():
            tau = report["replayed"].get(drafter, {}).get("", {}).get("tau", 1.0)
            print(f"  {drafter:10} tau {tau:.2f}   {served['tok_s']:.0f} tokens/s   S {served['speedup']:.2f}")
    print(f"\n{found['minutes']:.1f} minutes in all; figure: {arguments.out / FIGURE}")


if __name__ == "__main__":
    main()
