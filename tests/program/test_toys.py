"""The value types proved on the reference backend with toys: trees, groups of every kind, shards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from slipstream.kernels import Backend
from slipstream.kernels.native import NativeBackend
from slipstream.kernels.reference import ReferenceBackend
from slipstream.kernels.reference.executable import ReferenceExecutable
from slipstream.models import ModelConfig, record_program
from slipstream.models.weights import ArrayWeights
from slipstream.program import (
    BLOCK_SLOTS,
    CacheGroup,
    CacheSpec,
    GroupKind,
    KVFormat,
    Namespace,
    Program,
    Recorder,
    Row,
    Rows,
    ShardPlan,
    StepShape,
    ops,
)
from slipstream.program.ops import MaskKind
from tests import toys
from tests.stepping import run_alone


def random_weights(program: Program, seed: int = 0) -> ArrayWeights:
    rng = np.random.default_rng(seed)
    arrays = {}
    for use in program.weights.values():
        values = rng.standard_normal(use.shape) / (use.shape[-1] ** 0.5 if len(use.shape) > 1 else 3)
        arrays[use.name] = (values + ("norm" in use.name)).astype(np.float32)
    return ArrayWeights(arrays)


def reference(config: ModelConfig, blocks: int = 8) -> ReferenceExecutable:
    program = record_program(config, kv_format=KVFormat.F32)
    return ReferenceBackend().compile(program, random_weights(program), blocks)


def chain(tokens: list[int], start: int = 0, block: int = 0) -> list[Row]:
    return [Row(0, token, start + i, block * BLOCK_SLOTS + start + i, i - 1, True) for i, token in enumerate(tokens)]


def test_a_token_tree_equals_its_paths() -> None:
    prefix, paths = [5, 6, 7], [[1, 2], [1, 3], [4]]
    expected = [run_alone(reference(toys.WINDOWED), prefix + path)[-1] for path in paths]
    executable = reference(toys.WINDOWED)
    executable.step(Rows.of(chain(prefix), [[0]]), None)
    rows = [
        Row(0, 1, 3, 20, -1, True),
        Row(0, 2, 4, 21, 0, True),
        Row(0, 3, 4, 22, 0, True),
        Row(0, 4, 3, 23, -1, True),
    ]
    logits = executable.step(Rows.of(rows, [[0]]), None, logits=True).logits
    assert logits is not None
    for row, wanted in zip((1, 2, 3), expected, strict=True):
        assert np.allclose(logits[row], wanted, atol=1e-5)


TREES = {"chain": (-1, 0, 1, 2, 3), "tree": (-1, 0, 0, -1, 3, 1)}
"""Parents of rows after a prefix."""


@pytest.mark.parametrize("backend", [ReferenceBackend(), NativeBackend(2)], ids=["reference", "native"])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_window_of_two_is_a_row_and_its_parent(backend: Backend, parents: tuple[int, ...]) -> None:
    """Another token changes its own row and its children's, and no bit of the others."""
    program = record_program(toys.NARROW)
    weights, prefix = random_weights(program), 3

    def run(tokens: list[int]) -> np.ndarray:
        executable = backend.compile(program, weights, 2)
        rows: list[Row] = []
        for i, (token, parent) in enumerate(zip(tokens[prefix:], parents, strict=True)):
            rows.append(Row(0, token, rows[parent].position + 1 if parent >= 0 else prefix, 20 + i, parent, True))
        first = executable.step(Rows.of(chain(tokens[:prefix]), [[0]]), None, logits=True).logits
        assert first is not None
        first = first.copy()
        second = executable.step(Rows.of(rows, [[0]]), None, logits=True).logits
        assert second is not None
        return np.concatenate([first, second])

    tokens = list(range(5, 5 + prefix + len(parents)))
    before = [-1, *range(prefix - 1), *(prefix + parent if parent >= 0 else prefix - 1 for parent in parents)]
    plain = run(tokens)
    for i in range(len(tokens)):
        changed = (run([token + 40 * (at == i) for at, token in enumerate(tokens)]) != plain).any(axis=1)
        assert set(np.flatnonzero(changed)) == {i} | {row for row, parent in enumerate(before) if parent == i}


def recurrent_program() -> Program:
    cache = CacheSpec((CacheGroup(GroupKind.RECURRENT, 1, 1, 8, 0),))
    p = Recorder(cache)
    x = p.embed("table", 11, 8)
    p.sample(p.logits(p.recurrence(x, "decay", 0, 0), "head", 11))
    return p.program()


def test_a_recurrent_group_rolls_back() -> None:
    program = recurrent_program()
    weights = random_weights(program)

    def run(tokens: list[int]) -> np.ndarray:
        return run_alone(ReferenceBackend().compile(program, weights, 2), tokens)

    executable = ReferenceBackend().compile(program, weights, 2)
    executable.step(Rows.of(chain([1, 2, 3]), [[0]]), None)
    drafted = [Row(0, 4, 3, 3, -1, True), Row(0, 5, 4, 4, 0, True)]
    executable.step(Rows.of(drafted, [[0]]), None)  # both rejected: the state goes back to position 2
    logits = executable.step(Rows.of([Row(0, 6, 3, 3, -1, True)], [[0]]), None, logits=True).logits
    assert logits is not None
    assert np.allclose(logits[0], run([1, 2, 3, 6])[-1], atol=1e-6)
    assert not np.allclose(run([1, 2, 3, 4, 6])[-1], run([1, 2, 3, 6])[-1], atol=1e-3)


def test_a_drafter_group_injects_keys_and_sees_its_block() -> None:
    """Keys come from one value, queries from another, K and V differ in width, the span sees itself whole."""
    cache = CacheSpec((CacheGroup(GroupKind.DRAFTER, 1, 2, 8, 4, KVFormat.F32, fingerprint="t"),))
    p = Recorder(cache)
    x = p.embed("table", 11, 16)
    p.kv_write(p.linear(x, "k.weight", 16), p.linear(x, "v.weight", 8), 0, 0)
    out = p.attention(p.linear(x, "q.weight", 32), 0, 0, 0.5, mask=MaskKind.BLOCK)
    p.sample(p.logits(out, "head", 11))
    program = p.program()
    weights = random_weights(program)
    executable = ReferenceBackend().compile(program, weights, 2)
    logits = executable.step(Rows.of(chain([1, 2, 3]), [[0]]), None, logits=True).logits
    a = weights.arrays
    x_rows = a["table"][[1, 2, 3]]
    k = (x_rows @ a["k.weight"].T).reshape(3, 2, 8)
    v = (x_rows @ a["v.weight"].T).reshape(3, 2, 4)
    q = (x_rows @ a["q.weight"].T).reshape(3, 2, 2, 8)
    scores = np.einsum("rhgd,thd->rhgt", q, k) * 0.5
    weights_of = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("rhgt,thd->rhgd", weights_of, v).reshape(3, -1) @ a["head"].T
    assert logits is not None
    assert np.allclose(logits, expected, atol=1e-5)
    with pytest.raises(ValueError, match="fingerprint"):
        CacheGroup(GroupKind.DRAFTER, 1, 2, 8, 4)


class Rendezvous:
    """A fake collective: both shards meet, and each gets the sum or the join of what they brought."""

    def __init__(self, size: int):
        self.barrier, self.parts = threading.Barrier(size), [np.empty(0)] * size

    def of(self, rank: int) -> Callable[[ops.Collective, np.ndarray], np.ndarray]:
        def collective(op: ops.Collective, x: np.ndarray) -> np.ndarray:
            self.parts[rank] = x
            self.barrier.wait(10)
            joined = sum(self.parts) if op.kind == "all_reduce" else np.concatenate(self.parts, -1)
            self.barrier.wait(10)
            return joined

        return collective


def test_sharded_linears_with_a_fake_collective_equal_the_whole() -> None:
    expected = run_alone(reference(toys.PLAIN), [1, 2, 3, 4])
    whole = record_program(toys.PLAIN, kv_format=KVFormat.F32)
    weights, meeting = random_weights(whole), Rendezvous(2)
    results: dict[int, np.ndarray] = {}

    def run(rank: int) -> None:
        program = record_program(toys.PLAIN, kv_format=KVFormat.F32, shard=ShardPlan(rank, 2))
        assert program.collectives == 2 * toys.PLAIN.layers
        results[rank] = run_alone(ReferenceExecutable(program, weights, 4, meeting.of(rank)), [1, 2, 3, 4])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert np.allclose(results[0], expected, atol=1e-4)
    assert np.array_equal(results[0], results[1])
    with pytest.raises(ValueError, match="equal shards"):
        record_program(toys.PLAIN, shard=ShardPlan(0, 4))


def test_taps_are_the_inputs_of_layers() -> None:
    program = record_program(toys.PLAIN, kv_format=KVFormat.F32, taps=(0, 1, 2))
    weights = random_weights(program)
    taps = ReferenceBackend().compile(program, weights, 2).step(Rows.of(chain([3, 4]), [[0]]), None).taps
    assert list(taps) == ["layer.0", "layer.1", "layer.2"]
    assert np.array_equal(taps["layer.0"], weights.arrays["embed.weight"][[3, 4]])
    assert not np.allclose(taps["layer.1"], taps["layer.0"])


def test_taps_side_by_side() -> None:
    program = record_program(toys.PLAIN, taps=(2, 0))
    weights, rows = random_weights(program), Rows.of(chain([3, 4]), [[0]])
    reference = ReferenceBackend().compile(program, weights, 2).step(rows, None)
    native = NativeBackend(2).compile(program, weights, 2).step(rows, None)
    for names in (list(program.taps), ["layer.2", "layer.0"], ["layer.2"]):
        joined = reference.joined(names)
        assert np.array_equal(joined, np.concatenate([reference.taps[name] for name in names], axis=1))
        assert native.joined(names).flags.c_contiguous
        assert np.allclose(native.joined(names), joined, atol=2e-2)


def test_rows_that_contradict_one_another() -> None:
    good = chain([1, 2])
    for bad, problem in (
        ([good[0], good[1]._replace(slot=0)], "same slot"),
        ([good[0], good[1]._replace(parent=1)], "no earlier row"),
        ([good[0], good[1]._replace(position=5)], "does not follow"),
        ([good[0], good[1]._replace(sequence=1, parent=-1), good[0]._replace(slot=9)], "contiguous"),
    ):
        with pytest.raises(ValueError, match=problem):
            Rows.of(bad, [[0], [1]])


def test_shape_and_bytes() -> None:
    cache = toys.WINDOWED.cache(KVFormat.INT8, 1)
    per_layer = 1 * (48 + 48) + 2 * 4
    assert cache.bytes_per_token == 3 * per_layer
    rows = [Row(0, 1, 99, 99, -1, True), Row(1, 1, 0, 200, -1), Row(1, 1, 1, 201, 1, True)]
    shape = StepShape.of(Rows.of(rows, [[0, 1, 2, 3], [6]]), cache)
    assert (shape.rows, shape.logit_rows, shape.row_context) == (3, 2, (2 * (100 + 3) + (40 + 3)) // 3)
    assert shape.kv_bytes == per_layer * ((100 + 2) + (100 + 2) + (40 + 2))
    assert Namespace("m", "n", KVFormat.BF16) != Namespace("m", "n", KVFormat.BF16, salt="s")
