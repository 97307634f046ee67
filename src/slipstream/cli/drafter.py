"""slipstream drafter: train one on recorded traffic, and measure what it reaches."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.cli.commands import Argument, Option
from slipstream.cli.options import JsonOption, KvCacheDtype, Quantization, Threads, load_options, progress_bar, table
from slipstream.engine import LoadOptions
from slipstream.errors import SlipstreamError, UsageError
from slipstream.program import KVFormat
from slipstream.training.records import served_as

if TYPE_CHECKING:
    from slipstream.training.sizing import Choice
    from slipstream.training.trainer import Progress

TRAINING_CARD = "training-card.json"

Model = Annotated[str, Option("--model", help="The target.")]
Traffic = Annotated[Path, Option("--traffic", help="A traffic file, as serve --record writes.")]


def seconds_of(text: str) -> float:
    """90, 90s, 20m or 2h in seconds. Raises UsageError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UsageError(f"--budget is a time such as 90s, 20m or 2h, not {text!r}")
    return seconds


def train(
    model: Model,
    traffic: Traffic,
    out: Annotated[
        Path | None,
        Option("--out", help="Its folder; a stopped training goes on in it. Default: drafters/TRAFFIC-KIND."),
    ] = None,
    kind: Annotated[str, Option("--kind", help="eagle3 or dspark.")] = "eagle3",
    budget: Annotated[str, Option("--budget", help="Time for it, such as 20m.")] = "20m",
    rounds: Annotated[
        int | None, Option("--rounds", help="So many rounds in place of a budget: the same weights every time.")
    ] = None,
    generic: Annotated[
        Path | None, Option("--generic", help="Another traffic file, against forgetting everything else.")
    ] = None,
    generic_share: Annotated[float, Option("--generic-share", help="Share of what is learned from it.")] = 0.1,
    start_from: Annotated[Path | None, Option("--from", help="A drafter's folder to begin with.")] = None,
    draft_vocabulary: Annotated[
        int | None, Option("--draft-vocabulary", help="Tokens of its head; default: what should pay.")
    ] = None,
    taps: Annotated[
        str, Option("--taps", help="Layers whose inputs it reads, such as 2,15,27; default: the paper's three.")
    ] = "",
    layers: Annotated[
        int | None, Option("--layers", help="Layers of a DSpark drafter; default: what should pay.")
    ] = None,
    held_out: Annotated[float, Option("--held-out", help="Share of the newest answers, never learned from.")] = 0.1,
    tag: Annotated[str | None, Option("--tag", help="Only traffic with this tag.")] = None,
    layout: Annotated[str, Option("--layout", help="eagle3 or speculators; dspark: deepspec or speculators.")] = "",
    max_len: Annotated[int, Option("--max-len", help="Longer answers are cut.")] = 1024,
    learning_rate: Annotated[float, Option("--learning-rate")] = 1.5e-3,
    batch_tokens: Annotated[int, Option("--batch-tokens")] = 512,
    round_tokens: Annotated[
        int, Option("--round-tokens", help="Tokens whose features are in memory at a time, a few times over.")
    ] = 16384,
    seed: Annotated[int, Option()] = 0,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    json_output: JsonOption = False,
) -> None:
    """Train a drafter on recorded answers. Needs torch: pip install '.[train]' in Slipstream's folder."""
    _needs_torch()
    from slipstream.bench.machine import described
    from slipstream.training.kinds import layout_for
    from slipstream.training.sizes import MOST_SHARE
    from slipstream.training.store import TrafficStore, Which
    from slipstream.training.trainer import Schedule
    from slipstream.training.training import CURVES, TrainOptions, newest_within, prepare, read_until
    from slipstream.training.training import train as run

    for name, value, low, high in (
        ("--generic-share", generic_share, 0.0, 0.9), ("--held-out", held_out, 0.001, 0.9),
        ("--learning-rate", learning_rate, 1e-7, 1.0), ("--batch-tokens", batch_tokens, 64, 1 << 20),
        ("--round-tokens", round_tokens, 64, 1 << 24), ("--max-len", max_len, 16, 1 << 20),
        ("--rounds", 1 if rounds is None else rounds, 1, 1 << 30),
        ("--draft-vocabulary", draft_vocabulary or 0, 0, 1 << 24), ("--layers", 1 if layers is None else layers, 1, 64),
    ):  # fmt: skip
        if not low <= value <= high:
            raise UsageError(f"{name} is from {low:g} to {high:g}, not {value:g}")
    out = out or Path("drafters") / f"{traffic.stem}-{kind}"
    schedule = Schedule(1, round_tokens, batch_tokens, learning_rate=learning_rate, seed=seed)
    target = load_options(None, kv_cache_dtype, quantization, threads, "native")
    options = TrainOptions(
        kind, None if rounds is not None else seconds_of(budget), rounds, schedule, draft_vocabulary, held_out,
        generic_share if generic is not None else 0.0, max_len, layout_for(kind, layout), start_from, threads,
        taps_of(taps), layers, target.kv_format, target.quantization,
    )  # fmt: skip
    if layers is not None and kind != "dspark":
        raise UsageError(f"--layers is for --kind dspark: an {kind} drafter has one")
    if options.layout == "eagle3" and options.taps[:1] == (1,):
        raise UsageError("--taps that begin with 1 cannot be said in the layout eagle3: --layout speculators")
    which = Which(tag=tag, before=read_until(out))
    with TrafficStore(traffic, create=False) as store:
        records = list(store.records(which, newest_within(*store.count(which))))
    others = []
    if generic is not None:
        which = Which(before=which.before)
        with TrafficStore(generic, create=False) as store:
            others = list(store.records(which, newest_within(*store.count(which))))
    with progress_bar() as bar:
        bar("reading the target and the records", 0, 0)
        prepared = prepare(model, records, others, options)
        if generic is not None and not prepared.generic:
            raise UsageError(f"--generic: {generic} has no answer to a prompt that is not held out")
        if options.layout == "eagle3" and prepared.unusual_taps(options.taps):
            bar.close()
            print(
                "the layout eagle3 does not say whether layers are those whose inputs or whose outputs are read: for "
                "other engines say --layout speculators",
                file=sys.stderr,
            )
        if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
            run(prepared, options, out, about=described({}))
            return

        def show(at: Progress, speedup: float) -> None:
            said = f"tau {at.curve.tau[-1]:.2f}, S about {speedup:.2f}, {at.seconds_left / 60:.0f} min left"
            bar(said, at.round, at.rounds)

        def chose(choice: Choice) -> None:
            if not json_output:
                bar.close()
                _sizes(choice)

        card = run(prepared, options, out, show, chose, described({}))
    for of, left_out in ((traffic, prepared.left_out), (generic, prepared.generic_left_out)):
        if said := ", ".join(f"{count} {why}" for why, count in left_out.items() if count):
            print(f"{of}: left out of what is learned: {said}", file=sys.stderr)
    if json_output:
        print(json.dumps(card))
        return
    memory, seen = card["peak_memory_bytes"] / 1e9, card["tokens_seen"] / 1e6
    print(
        f"{out}: {card['parameters'] / 1e6:.1f} M parameters ({card['share_of_the_targets_bytes']:.1%} of the target's "
        f"bytes), {seen:.2f} M tokens of answers seen in {card['minutes']:.1f} min, {memory:.1f} GB of memory; "
        f"tau of held-out answers about {card['tau_estimate']:.2f}, S about {card['speedup_estimate']:.2f} (curves: "
        f"{out / CURVES})"
    )
    if card["share_of_the_targets_bytes"] > MOST_SHARE:
        print(
            f"that is more than the {MOST_SHARE:.0%} that can be expected to pay: the target is small beside its "
            "vocabulary; try --draft-vocabulary",
            file=sys.stderr,
        )
    how = f" {flags}" if (flags := served_as(target.kv_format, target.quantization)) else ""
    print(f"measure it: slipstream drafter eval --model {model} --traffic {traffic} --drafter {out}{how}")
    print(f"use it: slipstream serve {model} --speculative {_as_folder(out)}{how}")


def _sizes(choice: Choice) -> None:
    """What was chosen, and the runners-up."""
    rows = [
        (
            "*" if one["chosen"] else "", f"{one['layers']} x {one['ffn']}", str(one["vocabulary"]),
            f"{one['parameters'] / 1e6:.1f} M", f"{one['share_of_the_targets_bytes']:.1%}", f"{one['draft_cost']:.3f}",
            f"{one['tau']:.2f}", f"{one['speedup']:.2f}",
        )
        for one in choice.table()
    ]  # fmt: skip
    title = f"sizes, as foreseen with drafts of {choice.drafts} (* is trained: the largest that is as good as the best)"
    table(title, rows, ("", "layers x MLP", "head", "weights", "of the target", "d", "tau", "S"))


def taps_of(taps: str) -> tuple[int, ...]:
    """2,15,27 as numbers. Raises UsageError."""
    try:
        return tuple(int(tap) for tap in taps.split(",")) if taps else ()
    except ValueError as error:
        raise UsageError(f"--taps are numbers with commas between, not {taps!r}") from error


def evaluate(
    model: Model,
    traffic: Traffic,
    drafter: Annotated[Path, Option("--drafter", help="The drafter's folder.")],
    against: Annotated[
        list[Path], Option("--against", help="Another drafter's folder, such as the present one; repeatable.")
    ] = [],  # noqa: B006
    tag: Annotated[str | None, Option("--tag", help="Only traffic with this tag.")] = None,
    everything: Annotated[
        bool, Option("--everything", help="All of the file, not only what is newer than the training's.")
    ] = False,
    limit: Annotated[int, Option("--limit", help="The newest so many answers are replayed.")] = 400,
    serve_limit: Annotated[
        int, Option("--serve-limit", help="And so many of them served in turns; 0: none, nothing is timed.")
    ] = 24,
    draft_len: Annotated[int, Option("--draft-len", help="Tokens of a draft in the replay.")] = 5,
    figure: Annotated[Path | None, Option("--figure", help="Write the picture to this file.")] = None,
    out: Annotated[Path | None, Option("--out", help="Also write the JSON to this file.")] = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    json_output: JsonOption = False,
) -> None:
    """What a drafter reaches on held-out traffic beside n-gram, suffix, other drafters and plain decoding."""
    from slipstream.bench.machine import described, save
    from slipstream.training.contest import contest, held_out_of, picture, problems

    if limit < 2 or serve_limit < 0 or serve_limit == 1 or not 1 <= draft_len <= 16:
        raise UsageError("--limit must be at least 2, --serve-limit too, or 0, and --draft-len from 1 to 16")
    for file in (out, figure):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.absolute().parent}")
    target = load_options(None, kv_cache_dtype, quantization, threads, "native")
    held = held_out_of(traffic, drafter, against, tag, everything=everything)
    _say_if_other_precision(drafter, target)
    with progress_bar() as bar:
        report = contest(model, held, [drafter, *against], limit, serve_limit, draft_len, target, bar)
    report = described(report)
    if figure is not None:
        figure.write_text(picture(report))
    if out is not None:
        save(report, out)
    if json_output:
        print(json.dumps(report))
    else:
        _table(report)
    if found := problems(report):
        raise SlipstreamError(f"this drafter must not be used: {'; '.join(found)}")


def _say_if_other_precision(folder: Path, target: LoadOptions) -> None:
    """What a drafter learned from one precision of its target is worth less with another."""
    try:
        card = json.loads((folder / TRAINING_CARD).read_text())
        trained = LoadOptions(kv_format=KVFormat(card["kv_cache_dtype"]), quantization=card["quantization"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if (trained.kv_format, trained.quantization) != (target.kv_format, target.quantization):
        how = served_as(trained.kv_format, trained.quantization) or "the precision of its file"
        print(f"{folder} was trained for a target served with {how}, and is measured on another", file=sys.stderr)


def _table(report: dict[str, Any]) -> None:
    served = report["served"] or {"answers": 0, "contenders": dict.fromkeys(report["replayed"])}
    rows = []
    for name, entry in served["contenders"].items():
        replayed = report["replayed"].get(name, {}).get("", {})
        tau = "{:.2f} ({:.2f}-{:.2f})".format(replayed["tau"], *replayed["interval"]) if replayed else ""
        acceptance = " ".join(f"{a:.2f}" for a in replayed.get("acceptance_by_position", [])[:5])
        rows.append((name, tau, acceptance, *(_rates(entry) if entry is not None else ())))
    header = ("drafter", f"tau, K = {report['draft_len']}", "acceptance", "tok/s", "S", "S predicted")
    title = f"{report['model']}: {report['held_out']['answers']} held-out answers, {served['answers']} served"
    table(title, rows, header[: len(rows[0])])
    for tag in sorted({tag for entry in report["replayed"].values() for tag in entry if tag}):
        said = ", ".join(f"{name} {e[tag]['tau']:.2f}" for name, e in report["replayed"].items() if tag in e)
        print(f"tag {tag}: tau {said}")
        contenders = [(name, entry) for name, entry in served["contenders"].items() if entry is not None]
        by_tag = [f"{name} {e['tags'][tag]['speedup']:.2f}" for name, e in contenders if tag in e.get("tags", {})]
        if by_tag:
            print(f"tag {tag}: S {', '.join(by_tag)}")
    if report["served"] is None:
        return
    costs = report["costs"]
    print(
        f"verifying {report['draft_len']} drafts takes {costs['verify_cost']:.2f} steps of one row, drafting them "
        f"{costs['draft_cost']:.2f} (c = {costs['c']:.3f})"
    )
    apart = report["teacher_forced_against_served"]["apart"]
    print(f"acceptance as replayed is at most {apart * 100:.1f} points from what it is when drafting at every step")


def _rates(entry: dict[str, Any]) -> tuple[str, str, str]:
    low, high = entry["speedup_interval"]
    predicted = f"{entry['speedup_predicted']:.2f}" if entry["speedup_predicted"] is not None else ""
    return f"{entry['tok_s']:.0f}", f"{entry['speedup']:.2f} ({low:.2f}-{high:.2f})", predicted


def list_(
    folder: Annotated[Path, Argument(help="Where drafters are, one folder each.")] = Path("drafters"),
    json_output: JsonOption = False,
) -> None:
    """Drafters in a folder: for which target, trained on what, what is to be expected of them."""
    cards = []
    for path in sorted(folder.glob(f"*/{TRAINING_CARD}")):
        try:
            cards.append(json.loads(path.read_text()) | {"folder": str(path.parent)})
        except ValueError:
            print(f"{path} is damaged", file=sys.stderr)
    if json_output:
        print(json.dumps(cards))
        return
    if not cards:
        raise UsageError(f"{folder}: no drafter with a {TRAINING_CARD} in it")
    rows = [
        (
            Path(card["folder"]).name, card["kind"], Path(card["target"]).name, ", ".join(card["tags"]) or "(none)",
            f"{card['tokens_seen'] / 1e6:.2f} M", f"{card['tau_estimate']:.2f}", card["date"],
        )
        for card in cards
    ]  # fmt: skip
    table(str(folder), rows, ("drafter", "kind", "target", "tags", "tokens seen", "tau", "date"))


def _as_folder(path: Path) -> str:
    return str(path) if "/" in str(path) else f"./{path}"


def _needs_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError("training needs torch: pip install '.[train]' in Slipstream's folder")
