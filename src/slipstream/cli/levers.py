"""slipstream levers: what every known optimisation would bring here; --verify runs those that exist."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from slipstream.cli.ceiling import (
    HardwareOption,
    KvPrecisionOption,
    PrecisionOption,
    ShapeArgument,
    the_setting,
)
from slipstream.cli.commands import Option
from slipstream.cli.options import JsonOption, progress_bar, table
from slipstream.errors import UsageError
from slipstream.roofline.levers import TERMS, Gain, levers, parse_own


def levers_command(
    model: ShapeArgument,
    at: Annotated[str, Option("--at", help="BATCH,CONTEXT of the question.")] = "1,1024",
    hardware: HardwareOption = "auto",
    precision: PrecisionOption = None,
    kv_precision: KvPrecisionOption = "bf16",
    own: Annotated[
        list[str],
        Option("--own", help='Your own: "name: bytes=0.5,kv=1,bandwidth=1.2,operations=2" or tau, c, k.'),
    ] = [],  # noqa: B006
    verify: Annotated[bool, Option("--verify", help="Run those that exist here and compare.")] = False,
    json_output: JsonOption = False,
    out: Annotated[Path | None, Option("--out", help="Also write the JSON to this file.")] = None,
) -> None:
    """Sort optimisations by the term of the ceiling they touch; what does not help one user comes last."""
    batch, context = _at(at)
    setting = the_setting(model, hardware, precision, kv_precision, batch, context, 1)
    gains = levers(setting, tuple(parse_own(text) for text in own))
    measured = []
    if verify:
        if hardware != "auto":
            raise UsageError("--verify measures this machine; leave --hardware out")
        from slipstream.bench.levers import verify as run

        with progress_bar() as bar:
            measured = run(model, setting, bar)
    report = {
        "model": model,
        "at": {"batch": batch, "context": context},
        "levers": [asdict(g) for g in gains],
        "verified": [asdict(m) for m in measured],
    }
    if out is not None:
        from slipstream.bench.machine import described, save

        save(described(report), out)
    if json_output:
        print(json.dumps(report))
        return
    _show(gains, f"{setting.shape.name} on {setting.hardware.name}, batch {batch}, context {context}")
    if measured:
        table(
            "predicted and measured: tokens/s of all together against the setting asked about",
            [
                (
                    m.name,
                    f"{m.predicted:.2f}",
                    f"{m.fitted:.2f}" if m.fitted else "",
                    f"{m.measured:.2f}",
                    f"{m.low:.2f}-{m.high:.2f}",
                )
                for m in measured
            ],
            ("lever", "roofline ×", "cost model ×", "measured ×", "turns"),
        )


def _at(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts) or int(parts[0]) < 1:
        raise UsageError(f"--at takes BATCH,CONTEXT such as 1,1024, not {text!r}")
    return int(parts[0]), int(parts[1])


def _show(gains: list[Gain], title: str) -> None:
    for term in TERMS:
        rows = [g for g in gains if g.term == term and g.helps_one_user]
        if rows:
            table(f"{title}: {term}", [_row(g) for g in rows], ("lever", "layer", "one user ×", "throughput ×", "note"))
    rest = [g for g in gains if not g.helps_one_user]
    table(
        f"{title}: no help for one user",
        [_row(g) for g in rest],
        ("lever", "layer", "one user ×", "throughput ×", "note"),
    )


def _row(gain: Gain) -> tuple[str, ...]:
    note = f"{gain.flag}; {gain.note}" if gain.flag and gain.note else gain.flag or gain.note
    if gain.fits is False:
        note = f"does not fit; {note}" if note else "does not fit"
    return gain.name, gain.layer, f"{gain.one_user:.2f}", f"{gain.throughput:.2f}", note
