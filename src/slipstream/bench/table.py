"""A Markdown table of recorded results: one section per folder, one row per file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_LENGTHS = 3
"""Numbers of drafts of which it is told what they took."""


def _decode(r: dict[str, Any]) -> str:
    ratios = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in r["step_ratio"].items() if n != "1")
    spread = r["spread"]["fraction_of_ceiling"]
    return (
        f"{r['tok_s']:.1f} tokens/s, {r['fraction_of_ceiling']:.0%} of the ceiling of {r['ceiling_tok_s']:.1f} "
        f"(turns {spread['min']:.0%}-{spread['max']:.0%}; read {r['read_gb_s']:.1f} GB/s, "
        f"{r['bytes_per_token'] / 1e6:.0f} MB a token); step over one row at {ratios}"
    )


def _prefill(r: dict[str, Any]) -> str:
    return (
        f"{r['tok_s']:.0f} tokens/s over {r['tokens']} tokens, "
        f"{r['ops'] / 1e12:.3f} of {r['peak_ops'] / 1e12:.3f} TOP/s "
        f"({r['fraction_of_peak']:.0%})"
    )


def _quality(r: dict[str, Any]) -> str:
    return (
        f"mean KL {r['mean_kl']:.5f}, top-1 {r['top1_agreement']:.2%} over {r['tokens']} tokens; "
        f"keys and values {r['kv_cache_dtype']}; against float32 by {r.get('reference', 'numpy')}"
    )


def _peers(r: dict[str, Any]) -> str:
    spread = r["spread"]["decode_ratio"]
    return (
        f"decode {r['decode_tok_s']:.1f} against {r['peer_decode_tok_s']:.1f} tokens/s: {r['decode_ratio']:.2f} times "
        f"(turns {spread['min']:.2f}-{spread['max']:.2f}; {r['fraction_of_ceiling']:.0%} and "
        f"{r['peer_fraction_of_ceiling']:.0%} of the ceiling); prefill of {r['prompt']}: {r['prefill_tok_s']:.0f} "
        f"against {r['peer_prefill_tok_s']:.0f}: {r['prefill_ratio']:.2f} times; {r['peer']}"
    )


def _start(r: dict[str, Any]) -> str:
    first, later, spread = r["first_start"], r["later_starts"], r["spread"]["seconds"]
    size = r.get("installed")
    return (
        f"first output after {later['seconds']:.2f} s (turns {spread['min']:.2f}-{spread['max']:.2f}), peak memory "
        f"{later['peak_bytes'] / 1e6:.0f} MB; the first start, which packs: {first['seconds']:.2f} s, "
        f"{first['peak_bytes'] / 1e6:.0f} MB"
        + (f" (weights {weights / 1e6:.0f} MB)" if (weights := r.get("weight_bytes")) else "")
        + (f"; installed {size['bytes'] / 1e6:.1f} MB in {size['packages']} packages" if size else "")
    )


def _cost(r: dict[str, Any]) -> str:
    return (
        f"median error {r['median_error']:.1%}, 90 % below {r['p90_error']:.1%} over {len(r['grid'])} steps it was not "
        f"fitted to; knee {r['knee_rows']} rows; one more row after 1: {r['marginal_row_seconds']['1'] * 1e3:.2f} ms, "
        f"after 16: {r['marginal_row_seconds']['16'] * 1e3:.2f} ms"
    )


def _levers(r: dict[str, Any]) -> str:
    def line(v: dict[str, Any]) -> str:
        fitted = f", cost model {v['fitted']:.2f}" if v["fitted"] else ""
        return f"{v['name']}: roofline {v['predicted']:.2f}{fitted}, measured {v['measured']:.2f}"

    at = r["at"]
    return f"from batch {at['batch']}, context {at['context']}: " + "; ".join(line(v) for v in r["verified"])


def _explain(r: dict[str, Any]) -> str:
    def points(seconds: float) -> str:
        return f"{100 * seconds / r['seconds_per_token']:.1f}"

    parts = ", ".join(f"{name} {points(seconds)}" for name, seconds in r["parts"].items())
    return f"{r['tok_s']:.1f} tokens/s, {r['fraction_of_ceiling']:.0%} of the ceiling; % of the time: {parts}"


def _self_test(r: dict[str, Any]) -> str:
    return "; ".join(
        f"{v['part']}: {v['blamed'] / v['injected']:.0%} of the injected {v['injected'] * 1e6:.0f} µs blamed on it"
        f"{'' if v['passed'] else ' (FAILED)'}"
        for v in r["self_test"]
    )


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def _serve(r: dict[str, Any]) -> str:
    by = "; ".join(
        f"{n} streams: {s['output_tok_s']:.0f} tokens/s, TTFT {s['ttft']['median'] * 1e3:.0f} ms, "
        f"TPOT {s['tpot']['median'] * 1e3:.1f} (p99 {s['tpot']['p99'] * 1e3:.1f}) ms"
        for n, s in r["serve_streams"].items()
    )
    host = "; ".join(
        f"{n}: {s['host_us']['outside_kernels']:.0f} µs a step outside the kernels, "
        f"{s['host_us']['server_us_a_token']:.0f} a token of the server's process"
        for n, s in r["serve_streams"].items()
        if "host_us" in s
    )
    by += f" ({host})" if host else ""
    return (
        f"{r['prompt']} in, {r['answer']} out. {by}. A {r['interference']['prompt']}-token prompt among 4 streams: "
        f"gap p99 × {r['interference']['ratio']:.2f} (turns {_range(r['interference']['turns'], 2)}); a "
        f"{r['prefix']['prompt']}-token prompt again: TTFT × {r['prefix']['ratio']:.3f} "
        f"({_range(r['prefix']['turns'], 3)}); /v1/models under the last load in "
        f"{r['api_under_load']['median'] * 1e3:.1f} ms (p99 {r['api_under_load']['p99'] * 1e3:.1f}); "
        f"idle {r['idle']['cpu']:.1%} of a core, "
        f"{r['idle']['beyond_weights_bytes'] / 1e6:.0f} MB beyond the weights; half of the most: TPOT p99 × "
        f"{r['half_load']['p99_tpot_over_alone']:.2f} of alone, × "
        f"{r['half_load_with_target']['p99_tpot_over_alone']:.2f} with a target; one stream "
        f"{r['one_stream']['ratio']:.2f} of in process (turns {_range(r['one_stream']['turns'], 2)})"
    )


def _host(r: dict[str, Any]) -> str:
    def one(modes: dict[str, Any]) -> str:
        return ", ".join(
            f"planned {mode} with {r['threads'][mode]} threads {v['outside_kernels']:.0f} µs of {v['step']:.0f} "
            f"({v['tok_s']:.0f} tokens/s)"
            for mode, v in modes.items()
        )

    said = "outside the kernels, per step: " + "; ".join(f"{n} sequences: {one(m)}" for n, m in r["host"].items())
    if busy := r.get("busy"):
        said += (
            f"; beside a process that keeps a core busy {busy['adapting']:.0f} of {busy['alone']:.0f} tokens/s (turns "
            f"{_range(busy['turns']['adapting'], 0)}), {busy['all_threads']:.0f} if all threads share the cores"
        )
    return said


def _beside(r: dict[str, Any]) -> str:
    by = "; ".join(
        f"{n} streams: {v['ours']['output_tok_s']:.0f} tokens/s beside {v['theirs']['output_tok_s']:.0f} "
        f"(× {v['ratio']:.2f}), TTFT {v['ours']['ttft']['median'] * 1e3:.0f} beside "
        f"{v['theirs']['ttft']['median'] * 1e3:.0f} ms"
        for n, v in r["beside"].items()
    )
    served = r.get("served")
    ours = f"ours: weights {served['weights']}, cache {served['kv_cache']}, " if served else ""
    return f"{r['prompt']} in, {r['answer']} out, {ours}the other: {r['peer_precision']}. {by}"


def _replay(r: dict[str, Any]) -> str:
    cached = "nothing to find in a cache"
    if r["hits_of_infinite"] is not None:
        cached = f"{r['hit_rate']:.1%} of the prompts from the cache, {r['hits_of_infinite']:.1%} of an infinite one's"
    return (
        f"{r['requests']} requests, {r['mean_prompt']:.0f} in and {r['mean_answer']:.0f} out, {r['rate']:.2f} a second "
        f"({r['load']:.0%} of the most): goodput {r['goodput']:.2f}/s ({r['good_share']:.0%} within TTFT "
        f"{r['slo']['ttft']:g} s and TPOT {r['slo']['tpot'] * 1e3:g} ms), TTFT p99 {r['ttft']['p99'] * 1e3:.0f} ms, "
        f"TPOT p99 {r['tpot']['p99'] * 1e3:.1f} ms; {cached}"
    )


def _spec(r: dict[str, Any]) -> str:
    by = "; ".join(
        f"{name} S {e['speedup']:.2f} (answers {e['spread']['min']:.2f}-{e['spread']['max']:.2f}; tau {e['tau']:.2f}, "
        f"{e['accepted']} of {e['drafted']} drafts)"
        for name, e in r["categories"].items()
    )
    cost = f"v(K + 1) for K = 1, 4, 8: {', '.join(format(r['verify_cost'][k], '.2f') for k in ('1', '4', '8'))}"
    cost += f", c {r['c']:.3f}" if r["c"] else ""
    by_coin = forced(r) if "forced_acceptance" in r else ""
    if (passes := (r.get("overheads") or {}).get("pass")) is not None:
        cost += f" ({passes['median']:.3f} beside a plain step after each round)"
    if "overheads" in r:
        cost += f"; drafters that never draft take {r['overheads']['silent_drafters']['median'] - 1:+.1%} of a step"
        if (unasked := r["overheads"].get("unasked_drafter")) is not None:
            cost += f", the drafter that is not asked {unasked['median'] - 1:+.1%}"
    drawn = f", drafts drawn {r['drawing']}" if r.get("drawing") else ""
    same = "answers those of plain decoding" if r["identical"] else "answers NOT those of plain decoding"
    return (
        f"{r['speculative']}{drawn}, {r['prompt_set']}, "
        f"temperature {r['temperature']:g}: mean S {r['mean_speedup']:.2f}, "
        f"least {r['least_speedup']:.2f}; {by}; {cost}; {same}{by_coin}"
    )


def forced(r: dict[str, Any]) -> str:
    """What rounds took in a run whose drafts were accepted by coin, at the numbers of drafts that came most often."""
    measured = r["measured_costs"]
    often = sorted(measured["rounds"], key=measured["rounds"].get, reverse=True)[:MOST_LENGTHS]
    rows = (
        f"{drafts} drafts v {measured['verify_cost'][drafts]:.2f}, d {measured['draft_cost'][drafts]:.2f}, the rest "
        f"{measured['overhead'][drafts]:.2f}"
        for drafts in sorted(often, key=int)
    )
    took = f", measured at every step: {'; '.join(rows)}" if often else ""
    return f"; drafts accepted by force, {r['forced_acceptance']:.0%}{took}"


def _spec_streams(r: dict[str, Any]) -> str:
    return (
        f"{r['speculative']}, {r['prompt_set']}, {r['streams']} streams: {r['tok_s']:.0f} against "
        f"{r['plain_tok_s']:.0f} tokens/s, S {r['speedup']:.3f} "
        f"(turns {r['spread']['min']:.3f}-{r['spread']['max']:.3f}); TPOT p99 "
        f"{r['tpot']['p99'] * 1e3:.1f} against {r['plain_tpot']['p99'] * 1e3:.1f} ms (turns "
        f"{r['p99_tpot_ratio']['median']:.3f}); tau {r['tau']:.2f}"
    )


def _spec_prediction(r: dict[str, Any]) -> str:
    cells = r["cells"]
    by = "; ".join(
        f"batch {c['batch']}, context {c['context']}, K {c['drafted']:.1f}: {c['predicted']:.2f} / {c['measured']:.2f}"
        for c in cells
    )
    return (
        f"each draft holds with chance {r['acceptance']:.2f}; {len(cells)} cells, predicted against measured S: median "
        f"error {r['median_error']:.1%}, worst {r['worst_error']:.1%}; least S {r['least_measured']:.3f}; {by}"
    )


def _record(r: dict[str, Any]) -> str:
    turns = r["recording"]
    return (
        f"{r['streams']} streams, {r['prompt']} in, {r['answer']} out: {r['tok_s']:.0f} tokens/s with --record, "
        f"{r['tok_s_without']:.0f} without, x {turns['median']:.3f} (turns {turns['min']:.3f}-{turns['max']:.3f}); "
        f"{_recorders_work(r)}{r['recorded']} answers take {r['bytes'] / 1e3:.0f} kB"
    )


def _recorders_work(r: dict[str, Any]) -> str:
    if "server_us_a_token" not in r:  # records of before it was measured
        return ""
    more = r["server_us_a_token"] - r["server_us_a_token_without"]
    return (
        f"the server's process takes {r['server_us_a_token']:.1f} us of a processor a token, {more:+.1f} for it "
        f"({more * r['tok_s_without'] / 1e6:.2%} of one processor at that speed); "
    )


def _structured(r: dict[str, Any]) -> str:
    speed, compiled = r["speed"], r["compile_seconds"]
    return (
        f"{r['schemas']} schemas, {r['whole']} answers whole, {r['valid']:.1%} of them valid; x {speed['median']:.3f} "
        f"of the free speed (schemas {speed['min']:.2f}-{speed['max']:.2f}; of all tokens {r['overall_speed']:.3f}); "
        f"compiled in "
        f"{compiled['median'] * 1e3:.1f} ms, at most {compiled['max'] * 1e3:.0f}"
    )


def _bombs(r: dict[str, Any]) -> str:
    bombs, dearest, worst = r["bombs"], r["dearest"], r["worst_beside"]
    took, beside = bombs[dearest]["seconds"], bombs[worst]["tpot"]
    refused = sum(entry["status"] == 400 for entry in bombs.values())
    return (
        f"{len(bombs)} schemas made to hurt, {refused} refused; the dearest ({dearest}) in "
        f"{took['median'] * 1e3:.0f} ms (turns {took['min'] * 1e3:.0f}-{took['max'] * 1e3:.0f}); TPOT of a stream "
        f"beside them x {r['median_tpot']:.2f} of one alone, the most x {beside['median']:.2f} ({worst})"
    )


def _restart(r: dict[str, Any]) -> str:
    ratio = r["restart"]
    return (
        f"first token of a known {r['prompt_tokens']}-token prompt after a restart x {ratio['median']:.3f} of a cold "
        f"one ({ratio['min']:.3f}-{ratio['max']:.3f}): {r['known_seconds']['median'] * 1e3:.0f} ms against "
        f"{r['cold_seconds']['median'] * 1e3:.0f}; {r['stored_bytes'] / 1e6:.0f} MB on disk"
    )


def _drafters(r: dict[str, Any]) -> str:
    def one(name: str, served: dict[str, Any]) -> str:
        replayed = r["replayed"].get(name, {}).get("")
        tau = (
            f"tau {replayed['tau']:.2f} ({replayed['interval'][0]:.2f}-{replayed['interval'][1]:.2f}), "
            if replayed
            else ""
        )
        low, high = served["speedup_interval"]
        foreseen = served["speedup_predicted"]
        predicted = f"; predicted {foreseen:.2f}" if foreseen is not None else ""
        speedup = f"S {served['speedup']:.2f} ({low:.2f}-{high:.2f}{predicted})"
        return f"{name} {tau}{served['tok_s']:.0f} tokens/s, {speedup}"

    def positions(chances: list[float]) -> str:
        return " ".join(f"{chance:.2f}" for chance in chances)

    first, ceiling = r["teacher_forced_against_served"], r["ceiling_tok_s"]
    by = "; ".join(one(name, served) for name, served in r["served"]["contenders"].items())
    above = f", ceiling of plain decoding {ceiling:.0f} tokens/s" if ceiling else ""
    return (
        f"{r['traffic']}, {r['held_out']['answers']} held-out answers replayed at K = {r['draft_len']}, "
        f"{r['served']['answers']} served in turns{above}: {by}; acceptance by position replayed "
        f"{positions(first['replayed'])}, served {positions(first['served'])}; c {r['costs']['c']:.3f}"
    )


def _training(r: dict[str, Any]) -> str:
    checked = f"{r['checked_answers']} " if "checked_answers" in r else ""
    return (
        f"{r['kind']}, {r['parameters'] / 1e6:.1f} M parameters ({r['share_of_the_targets_bytes']:.1%} of the target's "
        f"bytes): {r['tokens_seen'] / 1e6:.2f} M tokens of answers seen in {r['minutes']:.1f} min, "
        f"{r['peak_memory_bytes'] / 1e9:.1f} GB of memory; tau of {checked}held-out answers about "
        f"{r['tau_estimate']:.2f}, S foreseen {r['speedup_estimate']:.2f}"
    )


def _idle_training(r: dict[str, Any]) -> str:
    def one(name: str) -> str:
        ratio, beside, without = r["idle_training"][name], r["with_it"][name], r["without"][name]
        return (
            f"{name.upper()} x {ratio['median']:.3f} (turns {ratio['min']:.3f}-{ratio['max']:.3f}): "
            f"{beside['median'] * 1e3:.1f} ms, p99 {beside['p99'] * 1e3:.1f}, without {without['median'] * 1e3:.1f}, "
            f"{without['p99'] * 1e3:.1f}"
        )

    return (
        f"{r['requests']} requests a turn, each after {r['pause']:.0f} s of quiet, {r['prompt']} in, {r['answer']} out"
        f": {one('ttft')}; {one('tpot')}; the training ran {r['trained_seconds']['with_it']:.0f} s"
    )


def _row(result: dict[str, Any]) -> tuple[str, str] | None:
    for key, kind, describe in (
        ("categories", "speculation", _spec),
        ("teacher_forced_against_served", "drafters", _drafters),
        ("tokens_seen", "training", _training),
        ("recording", "recording traffic", _record),
        ("idle_training", "a training in idle time", _idle_training),
        ("compile_seconds", "structured answers", _structured),
        ("bombs", "schema bombs", _bombs),
        ("restart", "prefix store", _restart),
        ("least_measured", "predicted S", _spec_prediction),
        ("plain_tpot", "speculation, many streams", _spec_streams),
        ("serve_streams", "serving", _serve),
        ("goodput", "trace", _replay),
        ("beside", "serving beside another", _beside),
        ("host", "host", _host),
        ("parts", "waterfall", _explain),
        ("step_seconds", "decode", _decode),
        ("peak_ops", "prefill", _prefill),
        ("peer", "beside a peer", _peers),
        ("later_starts", "start", _start),
        ("p90_error", "cost model", _cost),
        ("verified", "levers", _levers),
        ("self_test", "accounting self-test", _self_test),
        ("mean_kl", "quality", _quality),
    ):
        if key in result:
            return f"{kind}, {result.get('model') or result['target']}", describe(result)
    return None


def results_table(folder: Path) -> str:
    """Markdown of all recorded results under `folder`; files that are no results are passed over."""
    sections: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        try:
            result = json.loads(path.read_text())
            row, m, origin = _row(result), result["machine"], (result["date"], result["command"])
            section = f"{m['processor']}, {m['cores']} cores, {m['isa']}"
        except (ValueError, KeyError, TypeError):
            continue
        if row is not None:
            sections[section].append(f"| {row[0]} | {row[1]} | {origin[0]} | `{origin[1]}` |")
    lines = ["# Recorded results", "", "Made by `slipstream bench table benchmarks`; each row is a JSON file here."]
    for section, rows in sections.items():
        lines += ["", f"## {section}", "", "| what | result | date | command |", "|---|---|---|---|", *rows]
    return "\n".join(lines)
