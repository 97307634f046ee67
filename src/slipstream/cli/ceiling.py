"""slipstream ceiling: how fast a model can be on a machine, before either is there."""

from __future__ import annotations

import json
from typing import Annotated, Any

from slipstream.cli.commands import Argument, Option
from slipstream.cli.options import JsonOption, progress_bar, table
from slipstream.errors import UsageError
from slipstream.roofline import Ceiling, Hardware, Setting, find_hardware, find_precision, find_source
from slipstream.roofline.ceiling import ceiling as compute
from slipstream.roofline.ceiling import prefill_seconds, verify_cost
from slipstream.roofline.levers import by_layer
from slipstream.roofline.precision import kv_bits
from slipstream.roofline.speculation import ACCEPTANCES, DraftPlan, SpeculationReport, report

ShapeArgument = Annotated[
    str,
    Argument(
        metavar="MODEL|SHAPE",
        help="A GGUF file (its header is enough), config.json or its folder, a named shape, or a size such as 70b.",
    ),
]
HardwareOption = Annotated[str, Option("--hardware", help="auto (this machine) or a name of the catalogue.")]
PrecisionOption = Annotated[str | None, Option(help="Of the weights; default: as stored, else bf16.")]
KvPrecisionOption = Annotated[str, Option("--kv-precision", help="bf16, int8, fp8 …")]
BatchOption = Annotated[int, Option("--batch", help="Sequences that decode together.")]
ContextOption = Annotated[int, Option("--context", help="Tokens in the cache of each.")]
DevicesOption = Annotated[int, Option("--tp", help="Devices that share every layer.")]


def the_hardware(name: str) -> Hardware:
    """The named machine, or this one. Raises UsageError."""
    if name != "auto":
        return find_hardware(name)
    from slipstream.kernels.native.instruments import NativeInstruments
    from slipstream.roofline.probe import this_machine

    with progress_bar() as bar:
        return this_machine(NativeInstruments(), lambda i, n: bar("probing", i, n)).hardware()


def the_setting(
    model: str, hardware: str, precision: str | None, kv_precision: str, batch: int, context: int, devices: int
) -> Setting:
    """What the options ask about. Raises UsageError."""
    if not 1 <= batch <= 1 << 20 or not 0 <= context <= 1 << 30 or not 1 <= devices <= 1 << 16:
        raise UsageError("--batch and --tp must be positive, --context at least 0")
    source = find_source(model)
    weights = find_precision(precision) if precision else source.precision or find_precision("bf16")
    return Setting(source.shape, the_hardware(hardware), weights, kv_bits(kv_precision), batch, context, devices)


def ceiling(
    model: ShapeArgument,
    hardware: HardwareOption = "auto",
    precision: PrecisionOption = None,
    kv_precision: KvPrecisionOption = "bf16",
    batch: BatchOption = 1,
    context: ContextOption = 0,
    tp: DevicesOption = 1,
    prompt: Annotated[int, Option(help="Also the time to read a prompt of this length.")] = 0,
    draft: Annotated[str | None, Option(help="A drafter: tau=3.2,c=0.07,k=5[,o=0.02].")] = None,
    json_output: JsonOption = False,
) -> None:
    """Tokens a second that memory, arithmetic and links allow; needs no weights."""
    setting = the_setting(model, hardware, precision, kv_precision, batch, context, tp)
    result = compute(setting)
    drafting = None
    if draft is not None:
        drafting = report(DraftPlan.parse(draft), lambda rows: verify_cost(setting, rows))
    if json_output:
        print(json.dumps(_json(result, prompt, drafting)))
    else:
        _show(result, prompt, drafting)


def _json(result: Ceiling, prompt: int, drafting: SpeculationReport | None) -> dict[str, Any]:
    setting, shape = result.setting, result.setting.shape
    answer: dict[str, Any] = {
        "model": shape.name,
        "hardware": setting.hardware.name,
        "hardware_source": setting.hardware.source,
        "precision": setting.precision.name,
        "batch": setting.batch,
        "context": setting.context,
        "tp": setting.devices,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "bytes_per_token": result.bytes_per_token,
        "weight_bytes": result.work.weight_bytes,
        "kv_bytes": result.work.kv_bytes,
        "kv_bytes_per_token": shape.kv_bits_per_token(setting.kv_bits, 32.0 if setting.kv_bits <= 8 else 0.0) / 8,
        "distinct_experts": result.work.distinct_experts,
        "operations": result.work.operations,
        "intensity": result.work.intensity,
        "hardware_ops_per_byte": setting.hardware.ops_per_byte(setting.precision.arithmetic),
        "step_seconds": result.time.seconds,
        "memory_seconds": result.time.memory,
        "arithmetic_seconds": result.time.arithmetic,
        "collective_seconds": result.time.collectives,
        "bound": result.time.bound,
        "ceiling_tok_s": result.tok_s,
        "total_tok_s": result.total_tok_s,
        "knee_rows": result.knee_rows,
        "needed_bytes": result.needed_bytes,
        "fits": result.fits,
        "devices_needed": result.devices_needed,
        "layers": {
            layer: {"lever": best.name, "gain_one_user": best.one_user, "gain_throughput": best.throughput}
            for layer, best in by_layer(setting).items()
        },
    }
    if prompt:
        answer["prefill_seconds"] = prefill_seconds(setting, prompt)
    if drafting is not None:
        answer["speculation"] = {
            "speedup": drafting.speedup,
            "simple_speedup": drafting.simple_speedup,
            "ceiling_tok_s": result.tok_s * drafting.speedup,
            "break_even_tau": drafting.break_even_tau,
            "best_draft_len": drafting.best_draft_len,
            "best_speedup": drafting.best_speedup,
            "table": [
                {"draft_len": k, "tau": tau, "break_even_tau": least, "speedup": gain}
                for k, tau, least, gain in drafting.table
            ],
            "grid": [
                {"draft_len": k, "tau": tau, "speedup": gain} for k, cells in drafting.grid for tau, gain in cells
            ],
        }
    return answer


def _show(result: Ceiling, prompt: int, drafting: SpeculationReport | None) -> None:
    setting, work, hardware = result.setting, result.work, result.setting.hardware
    rows = [
        ("weights", f"{setting.shape.parameters / 1e9:.3g} B, {setting.precision.name}"),
        ("read per step", f"{work.weight_bytes / 1e9:.3g} GB weights + {work.kv_bytes / 1e9:.3g} GB cache"),
        (
            "bandwidth",
            f"{hardware.bandwidth / 1e9:.4g} GB/s" + (f" × {setting.devices}" if setting.devices > 1 else ""),
        ),
        ("arithmetic intensity", f"{work.intensity:.3g} operations per byte"),
        ("step", f"{result.time.seconds * 1e3:.3g} ms, bound by {result.time.bound}"),
        ("ceiling for one user", f"{result.tok_s:.1f} tokens/s"),
    ]
    if setting.batch > 1:
        rows.append((f"all {setting.batch} together", f"{result.total_tok_s:.1f} tokens/s"))
    if work.distinct_experts:
        rows.append(("distinct experts a layer", f"{work.distinct_experts:.1f} expected"))
    rows.append(("knee", f"{result.knee_rows} rows" if result.knee_rows else "none: bound by memory at any batch"))
    if prompt:
        rows.append((f"prompt of {prompt}", f"{prefill_seconds(setting, prompt) * 1e3:.3g} ms"))
    if result.fits is not None:
        held = hardware.memory * setting.devices / 1e9
        verdict = "fits" if result.fits else f"does not fit; {result.devices_needed} devices would hold it"
        rows.append(("memory", f"{result.needed_bytes / 1e9:.3g} of {held:.3g} GB: {verdict}"))
    title = f"{setting.shape.name} on {hardware.name}, batch {setting.batch}, context {setting.context}"
    table(title, rows)
    gains = [
        (layer, best.name, f"{best.one_user:.2f}", f"{best.throughput:.2f}")
        for layer, best in by_layer(setting).items()
    ]
    table("what each layer may still bring", gains, ("layer", "lever", "one user ×", "throughput ×"))
    if drafting is None:
        return
    table(
        f"speculation: × {drafting.speedup:.2f} = {result.tok_s * drafting.speedup:.1f} tokens/s "
        f"(τ / (1 + cK) says {drafting.simple_speedup:.2f}; breaks even at τ {drafting.break_even_tau:.2f})",
        [
            (f"{k}{' *' if k == drafting.best_draft_len else ''}", f"{tau:.2f}", f"{least:.2f}", f"{gain:.2f}")
            for k, tau, least, gain in drafting.table
        ],
        ("K", "τ", "break-even τ", "speed-up"),
    )
    table(
        "τ → speed-up by K, at other acceptances",
        [(str(k), *(f"{tau:.2f} → {gain:.2f}" for tau, gain in cells)) for k, cells in drafting.grid],
        ("K", *(f"{acceptance:.0%}" for acceptance in ACCEPTANCES)),
    )
