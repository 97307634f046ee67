"""slipstream probe: what this machine reads and multiplies; measured once and kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from slipstream.cli.options import JsonOption, progress_bar, table
from slipstream.roofline.probe import Figure, Probe, this_machine


def probe(
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, even if a probe of this hardware is kept.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Measure read bandwidth, caches, peak arithmetic and the cost of a barrier; takes seconds, once."""
    from slipstream.kernels.native.instruments import NativeInstruments

    with progress_bar() as bar:
        result = this_machine(NativeInstruments(), lambda i, n: bar("probing", i, n), fresh=fresh)
    if json_output:
        print(json.dumps(asdict(result) | {"noisy": result.noisy}))
        return
    _show(result)


def _show(result: Probe) -> None:
    def rate(figure: Figure, unit: float, suffix: str) -> tuple[str, str]:
        low, high = figure.low / unit, figure.high / unit
        return f"{figure.median / unit:.3g} {suffix}", f"{low:.3g}-{high:.3g}{' (noisy)' if figure.noisy else ''}"

    rows = [(f"read, {n} thread{'s' if n > 1 else ''}", *rate(f, 1e9, "GB/s")) for n, f in result.read.items()]
    rows.append(("read, all threads, 4 KiB pages", *rate(result.read_small_pages, 1e9, "GB/s")))
    rows += [
        (f"read from {name} ({result.caches[name] / 1024:.0f} KiB), all threads", *rate(figure, 1e9, "GB/s"))
        for name, figure in result.cached.items()
    ]
    for isa, peaks in result.peak.items():
        rows += [(f"{kind}, {isa}", *rate(figure, 1e12, "TOP/s")) for kind, figure in peaks.items()]
    rows.append(("threads meet (barrier)", *rate(result.barrier, 1e-6, "µs")))
    table(
        f"{result.processor}, {result.cores} cores, {result.memory / 2**30:.1f} GiB", rows, ("what", "median", "turns")
    )
    if result.noisy:
        print(
            f"Noisy: {', '.join(result.noisy)}. Something else is using this machine; "
            "trust ratios from one run, and measure again with --fresh when it is quiet."
        )
