"""Ceilings against cases worked by hand, and the worked figures of the write-ups that the field cites."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError, UsageError
from slipstream.roofline import Hardware, Setting, catalogue, ceiling, find_hardware, find_precision, find_source
from slipstream.roofline.ceiling import collective_seconds, knee_rows, prefill_seconds, verify_cost
from slipstream.roofline.shape import shape_of
from slipstream.roofline.source import named_shapes
from slipstream.roofline.work import decode_work, distinct_experts, kv_bytes_held, prefill_operations

MIB = 1 << 20


def setting(shape: str, hardware: str | Hardware, precision: str = "bf16", **options: float) -> Setting:
    machine = find_hardware(hardware) if isinstance(hardware, str) else hardware
    return Setting(find_source(shape).shape, machine, find_precision(precision), **options)  # type: ignore[arg-type]


def test_seventy_billion_in_fp8_on_an_h200() -> None:
    result = ceiling(setting("70b", "h200", "fp8"))
    assert result.bytes_per_token == 70e9
    assert f"{result.tok_s:.1f}" == "68.6"
    assert result.fits


def test_transformer_inference_arithmetic() -> None:
    """The figures of https://kipp.ly/transformer-inference-arithmetic/ (C. Chen, 2022)."""
    plain = {"hidden_size": 8192, "num_hidden_layers": 64, "num_attention_heads": 64, "vocab_size": 51200}
    shape = shape_of("52b", plain | {"intermediate_size": 4 * 8192, "ffn_matrices": 2, "tie_word_embeddings": True})
    assert shape.kv_bits_per_token(16) / 8 == 2 * MIB
    assert shape.parameters == pytest.approx(52e9, rel=0.01)
    a100 = Hardware("a100 at 1.5 TB/s", 1.5e12, 40e9, {"bf16": 312e12}, 300e9)
    assert a100.ops_per_byte("bf16") == 208
    four = Setting(find_source("52b").shape, a100, find_precision("fp16"), devices=4)
    assert ceiling(four).tok_s == pytest.approx(1 / 17.3e-3, rel=0.01)
    assert ceiling(four).fits
    assert ceiling(replace(four, devices=2)).fits is False


def test_guide_to_llm_inference_and_performance() -> None:
    """The figures of https://www.baseten.co/blog/llm-transformer-inference-guide/ (2023)."""
    a10 = find_hardware("a10")
    assert a10.ops_per_byte("bf16") == pytest.approx(208.3, abs=0.05)
    seven = Setting(find_source("7b").shape, a10, find_precision("fp16"))
    assert 1e3 / ceiling(seven).tok_s == pytest.approx(23, abs=0.5)
    assert prefill_seconds(seven, 350) * 1e3 == pytest.approx(39, abs=0.5)
    llama = find_source("llama-2-7b").shape
    assert llama.kv_bits_per_token(16) / 8 == MIB / 2
    assert llama.parameters == pytest.approx(6.74e9, rel=0.001)


# Worked by hand: what is asked, and the arithmetic of the answer.
GB = 1e9
L3_70B = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672)  # projections and feed-forward of llama-3-70b
L3_HEAD = 128256 * 8192
MIX = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 4096 * 8)  # mixtral-8x7b without its experts
MIX_EXPERT = 32 * 3 * 4096 * 14336
DS_ATTENTION = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
CASES: dict[str, tuple[Callable[[], float], float]] = {
    "GQA: weights of llama-3-70b, bf16, head but not the embedding table": (
        lambda: ceiling(setting("llama-3-70b", "h200")).work.weight_bytes,
        2 * (L3_70B + L3_HEAD + 8192),
    ),
    "GQA: 8 of 64 heads keep an eighth of the cache": (
        lambda: find_source("llama-3-70b").shape.kv_bits_per_token(16) / 8,
        2 * 80 * 8 * 128 * 2,
    ),
    "MHA: llama-2-13b keeps all 40 heads": (
        lambda: find_source("llama-2-13b").shape.kv_bits_per_token(16) / 8,
        2 * 40 * 40 * 128 * 2,
    ),
    "MHA against GQA: the cache of 32 users at 4096": (
        lambda: ceiling(setting("llama-2-7b", "h100-sxm", batch=32, context=4096)).work.kv_bytes,
        32 * 4096 * 0.5 * MIB,
    ),
    "a cache in int8 halves, its float32 scales come on top": (
        lambda: ceiling(setting("llama-3-8b", "h100-sxm", context=1000, kv_bits=8.0)).work.kv_bytes,
        1000 * 32 * (2 * 8 * 128 * 1 + 2 * 8 * 4),
    ),
    "MoE, one row: two experts of mixtral": (
        lambda: ceiling(setting("mixtral-8x7b", "h200")).work.weight_bytes,
        2 * (MIX + 2 * MIX_EXPERT + 32000 * 4096 + 4096),
    ),
    "MoE: 4 rows reach 8 (1 - (3/4)^4) experts": (lambda: distinct_experts(8, 2, 4), 8 * (1 - 81 / 256)),
    "MoE: what a row computes is two experts, whatever the batch": (
        lambda: ceiling(setting("mixtral-8x7b", "h200", batch=16)).work.weight_operations,
        2 * 16 * (MIX + 2 * MIX_EXPERT + 32000 * 4096),
    ),
    "MLA: deepseek-v3 keeps 512 + 64 numbers a layer": (
        lambda: find_source("deepseek-v3").shape.kv_bits_per_token(16) / 8,
        61 * 576 * 2,
    ),
    "MLA and MoE: all weights of deepseek-v3": (
        lambda: find_source("deepseek-v3").shape.parameters,
        61 * DS_ATTENTION + 3 * 3 * 7168 * 18432 + 58 * (257 * 3 * 7168 * 2048 + 256 * 7168) + 2 * 129280 * 7168,
    ),
    "sliding window: gemma-3-27b at 32768, 10 of 62 layers see it all": (
        lambda: ceiling(setting("gemma-3-27b", "h100-sxm", context=32768)).work.kv_bytes,
        2 * 16 * 128 * 2 * (10 * 32768 + 52 * 1024),
    ),
    "long context: llama-3-8b at 131072 reads more cache than weights": (
        lambda: ceiling(setting("llama-3-8b", "h100-sxm", context=131072)).work.kv_bytes / GB,
        131072 * 2 * 32 * 8 * 128 * 2 / GB,
    ),
    "TP 8 of llama-3-70b: 160 all-reduces of 10 µs and 16 KiB": (
        lambda: collective_seconds(setting("llama-3-70b", "h100-sxm", devices=8), 1),
        160 * (10e-6 + 2 * 7 / 8 * 16384 / 450e9),
    ),
    "TP 8: reading is shared, collectives are not": (
        lambda: ceiling(setting("llama-3-70b", "h100-sxm", devices=8)).tok_s,
        1 / (2 * (L3_70B + L3_HEAD + 8192) / 3350e9 / 8 + 160 * (10e-6 + 1.75 * 16384 / 450e9)),
    ),
    "SRAM: 8 bits of 70b need 305 chips of 230 MB": (
        lambda: ceiling(setting("70b", "groq-lpu", "fp8")).devices_needed or 0,
        305,
    ),
    "SRAM: 8b in fp16 at 21 PB/s": (lambda: ceiling(setting("8b", "cerebras-wse-3", "fp16")).tok_s, 21e15 / 16e9),
    "the knee: 2 b rows / (8 bits) reaches 989.5e12 / 3350e9 with bf16": (
        lambda: knee_rows(setting("8b", "h100-sxm", "bf16")) or 0,
        296,
    ),
    "prefill of 10 tokens: pairs 55, head once": (
        lambda: prefill_operations(find_source("llama-3-70b").shape, 10),
        2 * 10 * L3_70B + 2 * L3_HEAD + 80 * 2 * 55 * 2 * 64 * 128,
    ),
    "memory: a window's cache stops growing": (
        lambda: kv_bytes_held(find_source("gpt-oss-20b").shape, 10_000, 16),
        2 * 8 * 64 * 2 * (12 * 10_000 + 12 * 128),
    ),
    "no head, no table: a number of weights reads just these": (
        lambda: ceiling(setting("1.5B", "rtx-4090", "int8")).bytes_per_token,
        1.5e9 * 8.5 / 8,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_worked_by_hand(case: str) -> None:
    computed, by_hand = CASES[case]
    assert computed() == pytest.approx(by_hand, rel=1e-9)


PUBLISHED = {
    "smollm2-135m": 0.1345, "llama-3-8b": 8.03, "llama-3-405b": 405.85, "mixtral-8x7b": 46.7, "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "deepseek-v3": 671.0, "gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9,
    "gemma-3-27b": 27.0, "kimi-k2": 1026.0, "gpt-3-175b": 174.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_their_published_size(name: str) -> None:
    assert find_source(name).shape.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_active_parameters() -> None:
    assert find_source("qwen3-30b-a3b").shape.active_parameters / 1e9 == pytest.approx(3.0, rel=0.05)
    assert find_source("deepseek-v3").shape.active_parameters / 1e9 == pytest.approx(37, rel=0.03)


def test_every_named_shape_and_machine_gives_a_ceiling() -> None:
    for name in named_shapes():
        assert named_shapes()[name]["source"].startswith("http"), name
        assert ceiling(setting(name, "h200", context=1000)).tok_s > 0
    for hardware in catalogue().values():
        assert hardware.source, hardware.name
        assert ceiling(setting("llama-3-8b", hardware)).tok_s > 0


def test_more_rows_never_read_less_and_never_take_less_time() -> None:
    for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3"):
        base = setting(name, "h200", context=2000)
        works = [decode_work(base.shape, base.precision, n, 2000) for n in (1, 2, 8, 64, 512)]
        assert all(a.bytes < b.bytes and a.operations < b.operations for a, b in pairwise(works))
        costs = [verify_cost(base, n) for n in (1, 2, 8, 64, 512)]
        assert costs == sorted(costs)
        assert costs[0] == 1


def test_a_draft_of_one_sequence_reads_its_cache_once() -> None:
    base = setting("llama-3-8b", "h200", context=100_000)
    apart = decode_work(base.shape, base.precision, 4, 100_000)
    together = decode_work(base.shape, base.precision, 4, 100_000, rows_per_sequence=4)
    assert apart.kv_bytes == 4 * together.kv_bytes


def test_the_user_adds_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    file = tmp_path / "config" / "hardware.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"My Box": {"bandwidth_gb_s": 90, "tops": {"int8": 4}}}))
    assert find_hardware("my_box").bandwidth == 90e9
    assert "h200" in catalogue()
    for bad in (
        "[]",
        "{",
        '{"a": {}}',
        '{"a": {"bandwidth_gb_s": -1}}',
        '{"a": {"bandwidth_gb_s": 1, "tops": {"x": 1}}}',
    ):
        file.write_text(bad)
        with pytest.raises(SlipstreamError, match=r"hardware\.json"):
            catalogue()


@pytest.mark.parametrize("name", ["", "h", "nothing-like-it", "h100"])
def test_unknown_hardware_is_named(name: str) -> None:
    with pytest.raises(UsageError, match="no hardware"):
        find_hardware(name)


BROKEN = [
    {},
    {"hidden_size": 64},
    {"hidden_size": 64, "num_hidden_layers": 0, "num_attention_heads": 4, "vocab_size": 10},
    {"hidden_size": -1, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10},
    {"hidden_size": 64, "num_hidden_layers": "2", "num_attention_heads": 4, "vocab_size": 10},
    {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10, "num_experts": 4,
     "num_experts_per_tok": 5, "moe_intermediate_size": 8},
]  # fmt: skip


@pytest.mark.parametrize("config", BROKEN)
def test_configs_without_sense_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="broken"):
        shape_of("broken", config)
