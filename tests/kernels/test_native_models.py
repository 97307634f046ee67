"""Whole models on the native backend: against the emulated reference, and bit by bit against itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from slipstream.kernels.native import NativeBackend, NativeExecutable, _native
from slipstream.kernels.native.packing import Quantization
from slipstream.models import ModelConfig, record_program
from slipstream.program import BLOCK_SLOTS, TENSOR_TYPES, KVFormat, Row, Rows
from tests import toys
from tests.blocks import BlockWeights
from tests.kernels.emulated import EmulatedExecutable
from tests.stepping import Sequence, advance, advance_some, run_alone

ISAS = [*_native.available_isas(), *_native.emulated_isas()]
CONFIGS = {"plain": toys.PLAIN, "windowed": toys.WINDOWED, "wide": toys.WIDE}
LENGTH = 80


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.select_isa(before)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, toys.VOCABULARY, count)]


def native(
    config: ModelConfig,
    kind: str,
    kv_format: KVFormat = KVFormat.BF16,
    threads: int = 2,
    blocks: int = 8,
    isa: str | None = None,
) -> NativeExecutable:
    if isa:
        _native.select_isa(isa)
    program = record_program(config, kv_format=kv_format)
    return NativeBackend(threads, max_rows=96).compile(program, BlockWeights(kind), blocks)


def close_but_for_roundings(actual: np.ndarray, expected: np.ndarray) -> None:
    """Many rows agree to float precision; an activation that rounds the other way moves the others a little."""
    difference = np.abs(actual - expected) / expected.std()
    assert (difference.max(-1) < 1e-5).mean() > 0.15
    assert np.percentile(difference, 99) < 0.03


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize("name", CONFIGS)
def test_follows_the_numerics_contract(name: str, kv_format: KVFormat) -> None:
    config, ids = CONFIGS[name], tokens(LENGTH)
    kind = "Q4_K" if name == "wide" else "Q4_1"
    program = record_program(config, kv_format=kv_format)
    expected = run_alone(EmulatedExecutable(program, BlockWeights(kind), 8), ids)
    actual = run_alone(native(config, kind, kv_format), ids)
    assert expected.std() > 0.3
    close_but_for_roundings(actual, expected)


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_every_stored_type_runs(kind: str) -> None:
    ids = tokens(24)
    expected = run_alone(EmulatedExecutable(record_program(toys.WIDE), BlockWeights(kind), 2), ids)
    actual = run_alone(native(toys.WIDE, kind, blocks=2), ids)
    if kind == "Q2_K":  # has no kernel of its own and becomes int8
        assert np.abs(actual - expected).max() < 0.06 * expected.std()
    else:
        close_but_for_roundings(actual, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "F16", "F32"])
def test_instruction_sets_agree_bit_for_bit(kind: str) -> None:
    ids = tokens(40)
    config = toys.WIDE
    results = [run_alone(native(config, kind, blocks=2, isa=isa), ids, chunk=9) for isa in ISAS]
    for isa, result in zip(ISAS, results, strict=True):
        assert np.array_equal(result, results[0]), isa


@pytest.mark.parametrize(("quantization", "alike"), [("int8", 0.999), ("int4", 0.93), ("int4-128", 0.9)])
def test_floats_quantised_at_load(quantization: Quantization, alike: float) -> None:
    """The same bits on every instruction set, and about the logits of the floats."""
    ids = tokens(40)
    program = record_program(toys.WIDE, kv_format=KVFormat.BF16)

    def logits(isa: str, how: Quantization) -> np.ndarray:
        _native.select_isa(isa)
        return run_alone(NativeBackend(2, 96, how).compile(program, BlockWeights("F32"), 2), ids, chunk=9)

    results = [logits(isa, quantization) for isa in ISAS]
    for isa, result in zip(ISAS, results, strict=True):
        assert np.array_equal(result, results[0]), isa
    plain = logits(ISAS[0], "none")
    assert not np.array_equal(results[0], plain)
    assert np.corrcoef(results[0].ravel(), plain.ravel())[0, 1] > alike


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "BF16"])
def test_rows_do_not_depend_on_their_company(kind: str, kv_format: KVFormat, isa: str) -> None:
    """Random batches, chunkings, thread counts and preemptions give the bits of running alone."""
    rng = np.random.default_rng(7)
    lengths = [int(n) for n in rng.integers(3, 60, 12)]
    prompts = [tokens(n, seed) for seed, n in enumerate(lengths)]
    alone = native(toys.PLAIN, kind, kv_format, threads=1, blocks=3, isa=isa)
    expected = [run_alone(alone, prompt) for prompt in prompts]
    for threads in (1, 2, 3):
        executable = native(toys.PLAIN, kind, kv_format, threads, blocks=3 * len(prompts), isa=isa)
        order = rng.permutation(3 * len(prompts)).tolist()
        sequences = [Sequence(p, order[3 * i : 3 * i + 3]) for i, p in enumerate(prompts)]
        while any(s.computed < len(s.tokens) for s in sequences):
            advance_some(executable, sequences, rng, room=64)
            victim = sequences[int(rng.integers(len(sequences)))]
            if rng.random() < 0.1 and victim.computed < len(victim.tokens):
                victim.computed, victim.logits = 0, []  # preempted: computed anew
        for sequence, wanted in zip(sequences, expected, strict=True):
            assert np.array_equal(np.stack(sequence.logits), wanted)


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize("name", ["plain", "windowed"])
def test_long_contexts_cross_splits_with_the_same_bits(name: str, kv_format: KVFormat) -> None:
    ids = tokens(900)
    whole = run_alone(native(CONFIGS[name], "Q4_1", kv_format, 2, 29), ids, chunk=96)
    single = native(CONFIGS[name], "Q4_1", kv_format, 3, 29)
    sequence = Sequence(ids, list(range(29)))
    while sequence.computed < 880:
        advance(single, [(sequence, min(31, 880 - sequence.computed))])
    for _ in range(20):
        advance(single, [(sequence, 1)])
    assert np.array_equal(np.stack(sequence.logits), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kind", "kv_format"), [("Q4_1", KVFormat.BF16), ("Q8_0", KVFormat.INT8), ("BF16", KVFormat.BF16)]
)
def test_long_contexts_in_company_on_every_instruction_set(kind: str, kv_format: KVFormat, isa: str) -> None:
    """Contexts of several splits beside short ones, in random chunks, one of them given up and computed anew."""
    rng = np.random.default_rng(11)
    lengths = (610, 300, 40, 7)
    prompts = [tokens(n, seed) for seed, n in enumerate(lengths)]
    alone = native(toys.PLAIN, kind, kv_format, threads=1, blocks=20, isa=isa)
    expected = [run_alone(alone, prompt, chunk=64)[-8:] for prompt in prompts]
    executable = native(toys.PLAIN, kind, kv_format, 2, 44, isa=isa)
    order = rng.permutation(44).tolist()
    tables = [order[:20], order[20:30], order[30:32], order[32:33]]
    sequences = [Sequence(p, table) for p, table in zip(prompts, tables, strict=True)]
    given_up = False
    while any(s.computed < len(s.tokens) for s in sequences):
        advance_some(executable, sequences, rng, room=96, singly=3)
        if not given_up and sequences[1].computed > 270:
            sequences[1].computed, sequences[1].logits, given_up = 0, [], True
    for sequence, wanted in zip(sequences, expected, strict=True):
        assert np.array_equal(np.stack(sequence.logits)[-8:], wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "BF16"])
def test_as_many_sequences_as_a_step_has_rows_for(kind: str, isa: str) -> None:
    """Sixty-four that decode together, each as alone."""
    _native.select_isa(isa)
    prompts = [tokens(3 + n % 9, n) for n in range(64)]
    expected = [run_alone(native(toys.PLAIN, kind, blocks=1), prompt) for prompt in prompts[::7]]
    executable = native(toys.PLAIN, kind, threads=2, blocks=64)
    sequences = [Sequence(prompt, [n]) for n, prompt in enumerate(prompts)]
    while going := [s for s in sequences if s.computed < len(s.tokens)]:
        advance(executable, [(sequence, 1) for sequence in going])
    for sequence, wanted in zip(sequences[::7], expected, strict=True):
        assert np.array_equal(np.stack(sequence.logits), wanted)


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize("base", [5, 250, 290])
def test_a_tree_has_the_bits_of_its_chains(base: int, kv_format: KVFormat) -> None:
    """Each path of a token tree equals decoding that path alone."""
    prefix = tokens(base)
    paths = [[3, 4, 5], [3, 4, 9], [3, 8], [7]]
    blocks = base // BLOCK_SLOTS + 2
    expected = {
        tuple(path): run_alone(native(toys.WINDOWED, "Q4_1", kv_format, blocks=blocks), prefix + path, 96)[-1]
        for path in paths
    }
    executable = native(toys.WINDOWED, "Q4_1", kv_format, blocks=blocks + 2)
    table = list(range(blocks))
    sequence = Sequence(prefix, table)
    while sequence.computed < base:
        advance(executable, [(sequence, min(96, base - sequence.computed))])
    nodes: dict[tuple[int, ...], int] = {}
    rows: list[Row] = []
    for path in paths:
        for depth in range(1, len(path) + 1):
            node = tuple(path[:depth])
            if node in nodes:
                continue
            parent = nodes.get(node[:-1], -1)
            slot = (blocks + 1) * BLOCK_SLOTS - 20 + len(rows)  # anywhere but where a chain would be
            nodes[node] = len(rows)
            rows.append(Row(0, node[-1], base + depth - 1, slot, parent, True))
    logits = executable.step(Rows.of(rows, [table]), None, logits=True).logits
    assert logits is not None
    for path, wanted in expected.items():
        assert np.array_equal(logits[nodes[path]], wanted), path


def test_bad_rows_are_refused() -> None:
    executable = native(toys.PLAIN, "Q4_1")
    good = Row(0, 1, 0, 0, -1, True)
    for bad in (
        good._replace(token=-2),
        good._replace(token=toys.VOCABULARY),
        good._replace(slot=8 * BLOCK_SLOTS),
        good._replace(slot=-1),
        good._replace(position=10_000),
        good._replace(sequence=3),
    ):
        with pytest.raises(RuntimeError):
            executable.step(Rows.of([bad], [[0]]), None)
    with pytest.raises(RuntimeError):
        executable.step(Rows.of([good._replace(position=40, slot=40)], [[0, 99]]), None)
    with pytest.raises(RuntimeError):
        executable.step(Rows.of([good._replace(slot=i, position=i, parent=i - 1) for i in range(97)], [[0] * 4]), None)
    executable.step(Rows.of([good], [[0]]), None)


def test_copied_blocks_are_the_same_context() -> None:
    executable = native(toys.PLAIN, "Q4_1", KVFormat.INT8)
    ids = tokens(20)
    sequence = Sequence(ids, [0])
    advance(executable, [(sequence, 19)])
    executable.copy_blocks(np.array([[0, 5]], np.int32))
    copy = Sequence(ids, [5], computed=19)
    advance(executable, [(sequence, 1)])
    advance(executable, [(copy, 1)])
    assert np.array_equal(sequence.logits[-1], copy.logits[-1])


def test_isa_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    code = "from slipstream.kernels.native import _native; print(_native.isa())"
    for isa in ISAS:
        environment = {**os.environ, "SLIPSTREAM_ISA": isa}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert out.stdout.strip() == isa
    with pytest.raises(RuntimeError, match="available"):
        _native.select_isa("abacus")
