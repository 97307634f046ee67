"""slipstream drafter deploy and watch: a drafter goes to a running server, and is trained anew when traffic drifts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.cli.commands import Argument, Option
from slipstream.cli.drafter import TRAINING_CARD, seconds_of, taps_of
from slipstream.cli.options import JsonOption, table
from slipstream.errors import SlipstreamError, UsageError

if TYPE_CHECKING:
    from slipstream.training.drift import Drift
    from slipstream.training.remote import Server

WATCHED = 20_000
"""Answers, the newest ones, in which drift is looked for."""

Url = Annotated[str, Option("--url", help="The server's address.")]
Key = Annotated[str | None, Option("--api-key", help="A key that may; default: SLIPSTREAM_API_KEY.")]


def deploy(
    drafter: Annotated[str, Argument(help="A drafter's folder; - is the one that is there.")] = "-",
    stage: Annotated[
        str | None,
        Option(
            "--stage",
            help="shadow: look on; canary: a share of answers; all; back: take it back. "
            "Default: shadow for a folder; without one, show how drafters fare.",
        ),
    ] = None,
    share: Annotated[float, Option("--share", help="Share of the answers in shadow and canary.")] = 0.1,
    auto: Annotated[bool, Option("--auto", help="From stage to stage by itself, when enough was seen.")] = False,
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
    json_output: JsonOption = False,
) -> None:
    """Put a drafter to work on a running server; it is taken back by itself if it falls short of the present one."""
    folder = "" if drafter == "-" else str(Path(drafter).resolve())
    at = server(url, api_key)
    report = at.drafter() if not folder and stage is None else at.deploy(folder, stage or "shadow", share, auto=auto)
    if json_output:
        print(json.dumps(report))
        return
    for warning in report.get("warnings", []):
        print(warning, file=sys.stderr)
    show(report)


def watch(
    model: Annotated[str, Option("--model", help="The target.")],
    traffic: Annotated[Path, Option("--traffic", help="The traffic file that the server writes.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
    auto: Annotated[
        bool,
        Option("--auto", help="When drafts are accepted less: train, measure and deploy, in idle time only."),
    ] = False,
    budget: Annotated[str, Option("--budget", help="Time for a training.")] = "20m",
    out: Annotated[Path, Option("--out", help="Where trained drafters go, one folder each.")] = Path("drafters"),
    least_tokens: Annotated[
        int, Option("--least-tokens", help="With --auto: train too when so many new tokens were recorded.")
    ] = 500_000,
    kind: Annotated[str, Option("--kind", help="eagle3 or dspark; default: as the drafter at work.")] = "",
    layers: Annotated[int | None, Option("--layers", help="Of a DSpark drafter; default: as the one at work.")] = None,
    taps: Annotated[
        str, Option("--taps", help="Layers whose inputs it reads; default: as the drafter at work, which binds.")
    ] = "",
    every: Annotated[float, Option("--every", help="Seconds between two looks.")] = 60.0,
    once: Annotated[bool, Option("--once", help="Look once, and end.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Watch how drafts fare by tag; with --auto, train anew in idle time and deploy what is better."""
    from slipstream.training.drift import drift
    from slipstream.training.remote import UnreachableError
    from slipstream.training.store import TrafficStore, Which

    seconds_of(budget)
    if every < 1.0 or least_tokens < 1:
        raise UsageError("--every is at least a second, --least-tokens at least 1")
    if kind not in ("", "eagle3", "dspark"):
        raise UsageError(f"--kind is eagle3 or dspark, not {kind!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs meanwhile is ended, too
    at, trained = server(url, api_key), _trained(out)
    while True:
        newer = Which(since=trained)
        with TrafficStore(traffic, create=False) as store:
            found = drift(store.steps(newer, WATCHED))
            fresh = store.count(newer)[1]
        if json_output:
            print(json.dumps({"tags": [_row(one) for one in found], "new_tokens": fresh}), flush=True)
        else:
            _show_drift(found, fresh)
        if auto and (any(one.drifted for one in found) or fresh >= least_tokens):
            try:
                how = Retraining.like(at.drafter(), model, kind, layers, taps)
            except UnreachableError as error:
                print(f"{error}: nothing is trained for a server that is not there", file=sys.stderr)
            else:
                trained = time.time()  # whatever comes of it: what was seen so far is no reason for another one
                _renew(at, model, traffic, out / time.strftime("%Y%m%d-%H%M%S"), budget, how)
        if once:
            return
        time.sleep(every)


def _trained(folder: Path) -> float:
    """The time of the newest answer that a drafter in the folder was trained on."""
    times = [0.0]
    for card in folder.glob(f"*/{TRAINING_CARD}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            times.append(math.nextafter(float(json.loads(card.read_text())["newest"]), math.inf))
    return max(times)


@dataclass(frozen=True, slots=True)
class Retraining:
    """How a drafter is trained anew: with these flags, for a target served so, and better than the one at work."""

    target: tuple[str, ...]
    flags: tuple[str, ...]
    present: str | None = None

    @classmethod
    def like(cls, report: dict[str, Any], model: str, kind: str, layers: int | None, taps: str) -> Retraining:
        """Of the kind, the layers and the taps that were told, or else of those of the drafter at work.

        `report` is what the server says of its drafters. Raises UsageError for taps that its next drafter cannot have.
        """
        from slipstream.engine.drafters import Folder
        from slipstream.models import read_config
        from slipstream.weights.open import open_checkpoint
        from slipstream.weights.references import resolve

        present, read = report["present"], tuple[int, ...]()
        if present is not None and not Path(present).is_dir():
            print(f"{present}, which is at work, is not on this machine: nothing is compared with it", file=sys.stderr)
            present = None
        if present is not None:
            folder = Folder.open(Path(present), read_config(open_checkpoint(resolve(model))))
            kind, read = kind or folder.family, folder.config.taps
            if layers is None and kind == folder.family == "dspark":
                layers = folder.config.layers
        wanted = taps_of(taps) or read
        if read and wanted != read:
            said = ",".join(map(str, read))
            raise UsageError(f"the drafter at work reads the layers {said}, and its successor must read the same")
        kind = kind or "eagle3"
        if layers is not None and kind != "dspark":
            raise UsageError(f"--layers is for a DSpark drafter: an {kind} drafter has one")
        flags = ["--kind", kind, *(("--taps", ",".join(map(str, wanted))) if wanted else ())]
        flags += ["--layers", str(layers)] if layers is not None else []
        flags += ["--layout", "speculators"] if kind == "eagle3" and wanted[:1] == (1,) else []
        target = ("--kv-cache-dtype", report["kv_cache_dtype"], "--quantization", report["quantization"])
        return cls(target, tuple(flags), present)


def _renew(at: Server, model: str, traffic: Path, folder: Path, budget: str, how: Retraining) -> None:
    """Train and measure while the server is idle, and deploy what is surely better than all else."""
    from slipstream.training.idle import run_when_idle

    command = [sys.executable, "-m", "slipstream", "drafter"]
    common = ["--model", model, "--traffic", str(traffic), *how.target]
    against = ["--against", how.present] if how.present is not None else []
    report = folder / "eval.json"
    for name, arguments in (
        ("train", [*common, "--out", str(folder), "--budget", budget, *how.flags]),
        ("eval", [*common, "--drafter", str(folder), *against, "--out", str(report), "--serve-limit", "0"]),
    ):  # what stops for others cannot be timed
        status, spent = run_when_idle([*command, name, *arguments], at.busy)
        print(f"{name}: ran {spent.ran:.0f} s, held {spent.held:.0f} s for the server's sake", file=sys.stderr)
        if status:
            print(f"{name} failed with {status}; the present drafter stays", file=sys.stderr)
            return
    replayed = json.loads(report.read_text())["replayed"]
    mine = replayed.pop(folder.name if folder.name in replayed else str(folder))[""]
    for name, other in replayed.items():
        if mine["interval"][0] <= other[""]["tau"]:
            print(
                f"{folder}: tau {mine['tau']:.2f} ({mine['interval'][0]:.2f}-{mine['interval'][1]:.2f}) is not surely "
                f"better than the {other['']['tau']:.2f} of {name}",
                file=sys.stderr,
            )
            return
    try:
        at.deploy(str(folder.resolve()), "shadow", 0.1, auto=True)
    except SlipstreamError as error:
        print(f"{folder} could not be deployed: {error}", file=sys.stderr)


def server(url: str, key: str | None) -> Server:
    """The server that is meant."""
    from slipstream.training.remote import Server

    return Server(url, key or os.environ.get("SLIPSTREAM_API_KEY"))


def show(report: dict[str, Any]) -> None:
    """A rollout, and drafters by tag."""
    rollout = report["rollout"]
    if rollout is None:
        print("no drafter was deployed since the server's start")
    else:
        state = f"taken back: {rollout['outcome']}" if rollout["outcome"] else f"stage {rollout['stage']}"
        rows = [
            (name, str(arm["answers"]), str(arm["verifications"]), f"{arm['tau']:.2f}", f"{arm['lower']:.2f}")
            for name, arm in (("present", rollout["present"]), ("candidate", rollout["new"]))
        ]
        title = f"{rollout['candidate']}: {state}, share {rollout['share']:g}{', by itself' if rollout['auto'] else ''}"
        table(title, rows, ("drafter", "answers", "verifications", "tau", "at least"))
    if report["drafters"]:
        by_tag = [
            (str(d["drafter"]), d["tag"] or "(none)", str(d["verifications"]), f"{d['tau']:.2f}")
            for d in report["drafters"]
        ]
        table("drafters by tag", by_tag, ("drafter", "tag", "verifications", "tau"))


def _row(one: Drift) -> dict[str, Any]:
    return {
        "tag": one.tag, "answers": one.answers, "earlier": one.earlier, "recent": one.recent, "drifted": one.drifted,
        "earlier_interval": list(one.earlier_interval), "recent_interval": list(one.recent_interval),
    }  # fmt: skip


def _show_drift(found: list[Drift], fresh: int) -> None:
    if not found:
        print(f"too few answers of any tag to tell of drift; {fresh} new tokens", flush=True)
        return
    rows = [
        (
            one.tag or "(none)", str(one.answers),
            f"{one.earlier:.2f} ({one.earlier_interval[0]:.2f}-{one.earlier_interval[1]:.2f})",
            f"{one.recent:.2f} ({one.recent_interval[0]:.2f}-{one.recent_interval[1]:.2f})",
            "yes" if one.drifted else "no",
        )
        for one in found
    ]  # fmt: skip
    header = ("tag", "answers", "tokens/step earlier", "of late", "drifted")
    table(f"{time.strftime('%H:%M:%S')}, {fresh} new tokens", rows, header)
