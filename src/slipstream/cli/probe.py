"""slipstream probe: what this machine reads and multiplies; measured once and kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from slipstream.cli.commands import Option
from slipstream.cli.options import JsonOption, progress_bar, table
from slipstream.errors import UsageError
from slipstream.roofline.hardware import add_hardware
from slipstream.roofline.probe import Figure, Probe, this_machine


def probe(
    fresh: Annotated[bool, Option("--fresh", help="Measure again, even if a probe of this hardware is kept.")] = False,
    device: Annotated[str, Option("--device", help="cpu, or a torch device such as cuda.")] = "cpu",
    save_as: Annotated[
        str | None, Option("--save-as", help="With --device: keep it as your own hardware of this name.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure read bandwidth, caches, peak arithmetic and the cost of a barrier; takes seconds, once."""
    if device != "cpu":
        _device(device, save_as, json_output)
        return
    if save_as is not None:
        raise UsageError("--save-as needs --device; this machine's own probe is kept anyway (--hardware auto)")
    from slipstream.kernels.native.instruments import NativeInstruments

    with progress_bar() as bar:
        result = this_machine(NativeInstruments(), lambda i, n: bar("probing", i, n), fresh=fresh)
    if json_output:
        print(json.dumps(asdict(result) | {"noisy": result.noisy}))
        return
    _show(result)


def _device(device: str, save_as: str | None, json_output: bool) -> None:
    try:
        from slipstream.kernels.torch.instruments import DeviceInstruments
    except ImportError as error:
        raise UsageError("--device needs torch: pip install '.[gpu]' in Slipstream's folder") from error
    try:
        result = DeviceInstruments(device).measure()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error
    entry = {
        "kind": "gpu",
        "memory_gb": result.memory / 1e9,
        "bandwidth_gb_s": result.bandwidth / 1e9,
        "tops": {kind: peak / 1e12 for kind, peak in result.peak.items()},
        "link_us": next((seconds * 1e6 for seconds in result.collective.values()), 0.0),
        "step_overhead_us": 0.0,
        "source": f"measured by slipstream probe --device {device}",
        "note": result.name,
    }
    if save_as is not None:
        add_hardware(save_as, entry)
    if json_output:
        print(json.dumps(asdict(result)))
        return
    rows = [("memory, copied", f"{result.bandwidth / 1e9:.4g} GB/s")]
    rows += [(f"{kind} products", f"{peak / 1e12:.3g} TOP/s") for kind, peak in result.peak.items()]
    rows.append(("launch", f"{result.launch * 1e6:.2g} µs"))
    rows += [(f"all-reduce over {n}", f"{seconds * 1e6:.3g} µs") for n, seconds in result.collective.items()]
    table(result.name, rows)


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
    rows.append(("a step with next to no work", *rate(result.empty_step, 1e-6, "µs")))
    table(
        f"{result.processor}, {result.cores} cores, {result.memory / 2**30:.1f} GiB", rows, ("what", "median", "turns")
    )
    if result.noisy:
        print(
            f"Noisy: {', '.join(result.noisy)}. Something else is using this machine; "
            "trust ratios from one run, and measure again with --fresh when it is quiet."
        )
