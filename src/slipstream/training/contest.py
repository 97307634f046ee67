"""Contest: drafters side by side on the answers that none of them has learned from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.engine import LoadOptions, load_model
from slipstream.engine.ceiling import measure_ceiling
from slipstream.engine.cost import cost_model
from slipstream.engine.drafters import Folder, load_tapped_drafter
from slipstream.errors import UsageError
from slipstream.models import read_config
from slipstream.models.weights import ModelWeights
from slipstream.speculation import SuffixDrafter
from slipstream.speculation.card import fingerprint_of
from slipstream.training.dataset import Example, examples_of, told
from slipstream.training.evaluate import Contender, Progress, costs, leaks, pooled, replayed_tau, served_in_turns
from slipstream.training.features import FeatureSource
from slipstream.training.figures import WIDTH, Bar, bars, image
from slipstream.training.records import restricted, target_of
from slipstream.training.replay import LANES, replay
from slipstream.training.store import TrafficStore, Which
from slipstream.weights.open import open_checkpoint
from slipstream.weights.references import resolve

EARLIER = 1000
"""Answers before the held-out ones that suffix drafting has learned, as it would have in serving."""
TRAINING_CARD = "training-card.json"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Records of a file on both sides of a time."""

    traffic: Path
    tag: str | None
    since: float | None

    def examples(self, target: str, max_len: int) -> tuple[list[Example], list[Example]]:
        """(before, after), in order of time; before are those of all tags. Raises UsageError if nothing is held out."""
        with TrafficStore(self.traffic, create=False) as store:
            after, left_out = examples_of(store.records(Which(tag=self.tag, since=self.since)), target, max_len)
            before: list[Example] = []
            if self.since is not None:
                before, _ = examples_of(store.records(Which(before=self.since)), target, max_len)
        if not after:
            if any(left_out.values()):
                raise UsageError(f"{self.traffic}: nothing is held out; {told(left_out)}")
            raise UsageError(f"{self.traffic}: no answer is newer than the training's; say --everything")
        return before[-EARLIER:], after


def held_out_of(traffic: Path, drafter: Path, others: Sequence[Path], tag: str | None, *, everything: bool) -> HeldOut:
    """What no drafter has learned from: everything since the first answer held out, by their training cards.

    `others` may have none: who trained them did not know this traffic. Raises UsageError.
    """
    if everything:
        return HeldOut(traffic, tag, None)
    try:
        cards = [drafter, *(other for other in others if (other / TRAINING_CARD).exists())]
        since = [float(json.loads((card / TRAINING_CARD).read_text())["held_out_since"]) for card in cards]
        return HeldOut(traffic, tag, max(since))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{drafter}: no {TRAINING_CARD} says what it was trained on, so nothing is known to be held out; say "
            "--everything to measure it on all of the traffic"
        ) from error


def contest(
    reference: str,
    held: HeldOut,
    folders: Sequence[Path],
    limit: int,
    serve_limit: int,
    draft_len: int,
    target: LoadOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Plain decoding, n-gram, suffix, and the drafters in `folders`; these have suffix beside them when served.

    `target` says how the target is served: threads, precision of its weights and its cache. With a `serve_limit` of 0
    nothing is served, and so nothing is timed.
    """
    checkpoint = open_checkpoint(resolve(reference))
    config = read_config(checkpoint)
    opened = [Folder.open(folder, config) for folder in folders]
    taps = tuple(sorted({tap for folder in opened for tap in folder.config.taps}))
    if any(folder.config.taps != taps for folder in opened):
        raise UsageError("the drafters read different layers of the target, and cannot be compared in one run")
    called = target_of(fingerprint_of(config, checkpoint), target.kv_format, target.quantization)
    earlier, examples = held.examples(called, min(config.context, LoadOptions().max_rows * 8))
    examples = examples[-limit:]
    longest = max(len(example.tokens) for example in (*examples, *earlier)) + 64
    options = replace(target, max_len=min(longest, config.context), sequences=LANES, taps=taps)
    model = load_model(reference, options)
    weights = ModelWeights(config, checkpoint)
    neural = [load_tapped_drafter(folder, model, weights) for folder in opened]
    names = _names(folders)
    ngram = Contender("n-gram", (SuffixDrafter(learn=False),))
    alone: list[Contender] = [ngram, Contender("suffix", (SuffixDrafter(),))]
    alone += [Contender(name, (drafter,)) for name, drafter in zip(names, neural, strict=True)]
    source = FeatureSource(model, taps)
    replayed = replayed_tau(alone, examples, earlier, draft_len, source, progress)
    leaking = [
        f"{name}, answer {number}"
        for name, drafter in zip(names, neural, strict=True)
        for number in leaks(drafter, examples, source, draft_len)
    ]
    report: dict[str, Any] = {
        "model": reference,
        "kv_cache_dtype": target.kv_format.value,
        "quantization": target.quantization,
        "drafters": [str(folder) for folder in folders],
        "traffic": str(held.traffic.name),
        "tag": held.tag,
        "draft_len": draft_len,
        "held_out": {"answers": len(examples), "tokens": sum(example.answered for example in examples)},
        "replayed": replayed,
        "leaks": leaking,
        "served": None,
    }
    if not serve_limit:
        return report
    together = [Contender(n, (SuffixDrafter(), d)) for n, d in zip(names, neural, strict=True)]
    cost = cost_model(model, fresh=True)  # memory's speed is the machine's of this hour
    always = f"{names[0]}, {draft_len} always"
    contenders = [Contender("plain"), ngram, Contender("suffix", (SuffixDrafter(),)), *together]
    contenders.append(Contender(always, (neural[0],), draft_len))
    chosen = _spread([e for e in examples if not restricted(dict(e.settings))], serve_limit)
    if not chosen:
        raise UsageError(f"{held.traffic}: a grammar or a bias restricted all of the answers: none can be made again")
    served = served_in_turns(model, cost, contenders, chosen, earlier, progress)
    source.forget()
    ceiling = measure_ceiling(model)
    same = pooled(replay(neural[0], chosen, draft_len, source)).conditional()
    return report | {
        "served": served,
        "costs": costs(cost, neural[0], draft_len),
        "ceiling_tok_s": ceiling.tok_s if ceiling is not None else None,
        "teacher_forced_against_served": _difference(same, served["contenders"][always]["acceptance_by_position"]),
    }


def problems(report: dict[str, Any]) -> list[str]:
    """What no drafter may have: why one that was measured is not to be used."""
    found = []
    if report["served"] is not None and not report["served"]["identical"]:
        found.append("some answers were NOT those of plain decoding: please report this")
    if report["leaks"]:
        found.append(f"drafts depend on tokens that are not known yet ({'; '.join(report['leaks'])})")
    return found


def _difference(replayed: list[float], served: list[float]) -> dict[str, Any]:
    """Acceptance by position in the same answers, replayed and served with drafts of one length, and how far they are
    `apart` where they are most.
    """
    pairs = list(zip(replayed, served, strict=False))
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    return {"replayed": [a for a, _ in pairs], "served": [b for _, b in pairs], "apart": apart}


def _names(folders: Sequence[Path]) -> list[str]:
    names = [folder.name or str(folder) for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def _spread(examples: Sequence[Example], count: int) -> list[Example]:
    """So many, from all of the range."""
    every = max(1, len(examples) // count)
    return list(examples[::every][:count])


def picture(report: dict[str, Any]) -> str:
    """tau with its intervals, and tokens a second with the ceiling of plain decoding."""
    taus = [Bar("plain", 1.0)]  # in the same places, so in the same colours, as on the other side
    taus += [Bar(name, entry[""]["tau"], *entry[""]["interval"]) for name, entry in report["replayed"].items()]
    if report["served"] is None:
        left, height = bars(f"tau, K = {report['draft_len']}", taus)
        return image([(0, 0, left)], WIDTH, height + 10)
    rates = [Bar(name, entry["tok_s"]) for name, entry in report["served"]["contenders"].items()]
    ceiling = report["ceiling_tok_s"]
    left, first = bars(f"tau, K = {report['draft_len']}", taus)
    right, second = bars(
        "tokens a second, one user", rates, mark=(ceiling, "ceiling of plain decoding") if ceiling else None
    )
    return image([(0, 0, left), (WIDTH, 0, right)], 2 * WIDTH, max(first, second) + 10)
