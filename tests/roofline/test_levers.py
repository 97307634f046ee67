"""Levers: each moves the term it claims to move, and what moves none is said to be no help."""

from __future__ import annotations

import pytest

from slipstream.errors import UsageError
from slipstream.roofline import Setting, ceiling, find_hardware, find_precision, find_source
from slipstream.roofline.levers import LAYERS, LEVERS, TERMS, by_layer, levers, parse_own


def setting(**options: float) -> Setting:
    shape, machine = find_source("llama-3-8b").shape, find_hardware("h100-sxm")
    return Setting(shape, machine, find_precision("bf16"), **options)  # type: ignore[arg-type]


def test_every_layer_and_term_has_levers() -> None:
    assert {lever.layer for lever in LEVERS} == set(LAYERS)
    assert {lever.term for lever in LEVERS} == set(TERMS)


def test_what_touches_no_term_changes_nothing() -> None:
    for gain in levers(setting(context=4096)):
        if gain.term == "none":
            assert gain.one_user == gain.throughput == 1.0, gain.name


def test_levers_move_the_term_they_name() -> None:
    base = setting(context=4096)
    before = ceiling(base)
    for lever in LEVERS:
        if lever.change is None:
            assert lever.term in ("none", "rows per read")
            continue
        after = ceiling(lever.change(base))
        reads_less = after.bytes_per_token < before.bytes_per_token
        assert reads_less == (lever.term == "bytes"), lever.name
        if lever.term == "bandwidth" and lever.layer == "parallelism":
            assert after.time.memory < before.time.memory


def test_gains_follow_from_the_ceiling() -> None:
    gains = {gain.name: gain for gain in levers(setting(batch=8, context=8192))}
    assert 1.0 < gains["8-bit keys and values"].one_user < gains["8-bit keys and values"].throughput
    assert gains["4-bit weights"].one_user > gains["fp8 or int8 weights"].one_user > 1.5
    assert gains["continuous batching, up to the knee"].one_user == 1.0
    assert gains["continuous batching, up to the knee"].throughput > 1.0
    assert gains["EAGLE-3 chain"].one_user > 2
    assert gains["chunked prefill beside decodes"].helps_one_user is False


def test_the_useless_ones_come_last() -> None:
    helps = [gain.helps_one_user for gain in levers(setting())]
    assert helps == sorted(helps, reverse=True)
    assert set(by_layer(setting())) == set(LAYERS)


def test_an_optimisation_of_ones_own() -> None:
    base = setting()
    half = parse_own("my codebook: bytes=0.5")
    twice = parse_own("faster memory: bandwidth=2")
    gains = {gain.name: gain for gain in levers(base, (half, twice, parse_own("my drafter: tau=3,c=0.1,k=4")))}
    assert gains["my codebook"].one_user == pytest.approx(2, rel=0.01)
    assert gains["my codebook"].term == "bytes"
    assert gains["faster memory"].one_user == pytest.approx(2)
    assert 1.9 < gains["my drafter"].one_user < 3 / 1.4
    for bad in ("x", "x: y=1", "x: bytes", "x: bytes=0", "x: tau=9,k=2", "x: bytes=-1"):
        with pytest.raises(UsageError):
            parse_own(bad)
