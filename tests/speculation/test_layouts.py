"""Published layouts of EAGLE-3 and DSpark against what upstream's own code computed on the same tiny checkpoints.

`upstream/*.npz` hold its outputs, `upstream/*.json` the configs, commits and shapes; weights are made from names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import ModelFileError, SlipstreamError, UnsupportedModelError
from slipstream.kernels import Backend, Executable
from slipstream.kernels.native import NativeBackend
from slipstream.kernels.reference import ReferenceBackend
from slipstream.models.weights import ArrayWeights
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace, Row, Rows
from slipstream.program.sampling import SamplingParams
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation import Ask, Computed
from slipstream.speculation.checkpoint import EMBEDDING, family_of
from slipstream.speculation.dspark import DSparkDrafter
from slipstream.speculation.dspark_model import dspark_weights, read_dspark, record_block, record_context
from slipstream.speculation.eagle3 import Eagle3Drafter
from slipstream.speculation.eagle3_model import (
    HIDDEN,
    Eagle3Config,
    eagle3_weights,
    read_eagle3,
    record_eagle3,
)
from slipstream.speculation.eagle3_tree import Eagle3TreeDrafter, TreeShape
from slipstream.speculation.markov import MarkovHeads, Slot
from slipstream.weights import Checkpoint
from slipstream.weights.open import open_checkpoint
from tests.speculation import checkpoints

UPSTREAM = Path(__file__).parent / "upstream"
EAGLE3 = {case["name"]: case for case in json.loads((UPSTREAM / "eagle3.json").read_text())}
DSPARK = {case["name"]: case for case in json.loads((UPSTREAM / "dspark.json").read_text())}
BLOCKS = 4


@dataclass
class Upstream:
    """A case: its checkpoint on disk, its inputs, and upstream's outputs."""

    case: dict[str, Any]
    checkpoint: Checkpoint
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    @classmethod
    def load(cls, case: dict[str, Any], folder: Path) -> Upstream:
        checkpoints.write(case, folder)
        family = "eagle3" if "tap_width" in case["facts"] else "dspark"
        stored = np.load(UPSTREAM / f"{family}.npz", allow_pickle=False)
        prefix = f"{case['name']}/"
        outputs = {key.removeprefix(prefix): stored[key] for key in stored.files if key.startswith(prefix)}
        return cls(case, open_checkpoint(folder), checkpoints.inputs(case), outputs)


def eagle3(up: Upstream) -> Eagle3Config:
    return read_eagle3(up.checkpoint, 8, up.case["facts"]["tap_width"])


def executables(up: Upstream, c: Eagle3Config, backend: Backend) -> tuple[Executable, Executable, np.ndarray | None]:
    """The drafter over the target's taps, and over its own hidden state."""
    target = ArrayWeights({EMBEDDING: up.inputs["target_embed"]} if "target_embed" in up.inputs else {})
    weights, tokens = eagle3_weights(c, up.checkpoint, target)
    kv_format = KVFormat.F32 if backend.name == "reference" else KVFormat.BF16
    programs = [record_eagle3(c, 128, kv_format, "test", from_taps=from_taps) for from_taps in (True, False)]
    over_taps = backend.compile(programs[0], weights, BLOCKS)
    return over_taps, over_taps.sibling(programs[1]), tokens


def chained(tokens: list[int], start: int) -> Rows:
    rows = [Row(0, t, start + i, start + i, i - 1 if i else -1, True) for i, t in enumerate(tokens)]
    return Rows.of(rows, [list(range(BLOCKS))])


def drafted(up: Upstream, c: Eagle3Config, backend: Backend) -> tuple[np.ndarray, np.ndarray]:
    """Logits over the target's taps [features, tokens], and of three passes over the drafter's own hidden state."""
    over_taps, over_hidden, _ = executables(up, c, backend)
    tokens = up.inputs["tokens"].tolist()
    first = over_taps.step(chained(tokens[1:], 1), None, logits=True, inputs=up.inputs["taps"])
    assert first.logits is not None
    fed, own = first.taps[HIDDEN][-1:], []
    window = "truewin_" if "truewin_ar_tokens" in up.outputs else ""
    for step, token in enumerate(up.outputs[f"{window}ar_tokens"][:3].tolist()):
        output = over_hidden.step(chained([token], len(tokens) + step), None, logits=True, inputs=fed)
        assert output.logits is not None
        own.append(output.logits[0])
        fed = output.taps[HIDDEN]
    return first.logits, np.stack(own)


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_computes_what_upstream_does(name: str, tmp_path: Path) -> None:
    up = Upstream.load(EAGLE3[name], tmp_path)
    window = "truewin_" if "truewin_ar_tokens" in up.outputs else ""
    c = eagle3(up)
    assert (family_of(up.checkpoint), len(c.taps)) == ("eagle3", up.case["facts"]["taps"])
    first, own = drafted(up, c, ReferenceBackend())
    assert np.abs(first - up.outputs["logits"]).max() < 1e-4
    assert np.abs(own - up.outputs[f"{window}ar_logits"]).max() < 1e-4
    first, own = drafted(up, c, NativeBackend(threads=1, max_rows=16))
    assert np.corrcoef(first.ravel(), up.outputs["logits"].ravel())[0, 1] > 0.999
    assert np.corrcoef(own.ravel(), up.outputs[f"{window}ar_logits"].ravel())[0, 1] > 0.999


@pytest.mark.parametrize("name", ["eagle3", "specforge", "speculators-qwen3"])
def test_taps_of_the_wrong_layers_show(name: str, tmp_path: Path) -> None:
    """Each tap in its place, and no other: shifted by one position, or in another order, the answer is another."""
    up = Upstream.load(EAGLE3[name], tmp_path)
    taps, width = up.inputs["taps"], up.case["facts"]["tap_width"]
    for wrong in (np.roll(taps, 1, axis=0), np.roll(taps, -1, axis=0), np.roll(taps, width, axis=1)):
        up.inputs["taps"] = wrong
        first, _ = drafted(up, eagle3(up), ReferenceBackend())
        agree = (first.argmax(1) == up.outputs["logits"].argmax(1)).mean()
        assert agree < 0.7
    up.inputs["taps"] = taps
    first, _ = drafted(up, eagle3(up), ReferenceBackend())
    assert (first.argmax(1) == up.outputs["logits"].argmax(1)).all()


def test_where_taps_are_taken(tmp_path: Path) -> None:
    """SafeAILab and speculators name inputs of layers, SpecForge outputs: the same states."""

    def taps(name: str, **config: object) -> tuple[int, ...]:
        case = {**EAGLE3[name], "config": {**EAGLE3[name]["config"], **config}}
        return read_eagle3(Upstream.load(case, tmp_path).checkpoint, 32, 64).taps

    assert taps("eagle3") == (2, 16, 29)
    assert taps("specforge") == (2, 16, 29)
    assert taps("specforge", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}) == (2, 16, 29)
    assert taps("speculators-nbr_true", eagle_aux_hidden_state_layer_ids=[2, 16, 29]) == (2, 16, 29)


def answer_of(tokens: list[int]) -> Answer:
    params = SamplingParams(temperature=0.0)
    answer = Answer(0, 0, tokens, len(tokens), params, 0, frozenset(), 1 << 20, Namespace("", "", KVFormat.F32))
    answer.blocks = list(range(BLOCKS))
    return answer


def ask(answer: Answer, most: int) -> Ask:
    return Ask(answer, most, 0.0, lambda draft_class: 1.0)


def eagle3_drafter(up: Upstream, tree: TreeShape | None = None) -> Eagle3Drafter:
    c = eagle3(up)
    over_taps, over_hidden, tokens = executables(up, c, ReferenceBackend())
    for executable in (over_taps, over_hidden):
        if tokens is not None:
            executable.set_vocabulary(tokens)
    parts = (c, over_taps, over_hidden, "test", 64, BLOCKS, tokens)
    return Eagle3Drafter(*parts) if tree is None else Eagle3TreeDrafter(*parts, tree)


@pytest.mark.parametrize("name", ["eagle3", "specforge-fc_norm-norm_output", "speculators-norm_before_fc"])
def test_eagle3_drafts_upstreams_chain(name: str, tmp_path: Path) -> None:
    up = Upstream.load(EAGLE3[name], tmp_path)
    drafter, tokens = eagle3_drafter(up), up.inputs["tokens"].tolist()
    answer = answer_of(tokens)
    drafter.commit([Computed(answer, 0, len(tokens) - 1, up.inputs["taps"])])
    (draft,) = drafter.propose([ask(answer, 4)])
    assert draft is not None
    assert list(draft.tokens) == up.outputs["ar_tokens"].tolist()


@pytest.mark.parametrize("name", ["tree0", "tree2"])
def test_eagle3_grows_upstreams_tree(name: str, tmp_path: Path) -> None:
    up = Upstream.load(EAGLE3["eagle3"], tmp_path)
    given = up.case["facts"]["trees"][name]
    shape = TreeShape(given["total_tokens"] - 1, given["depth"], given["top_k"])
    drafter, tokens = eagle3_drafter(up, shape), up.inputs["tokens"].tolist()
    answer = answer_of(tokens)
    drafter.commit([Computed(answer, 0, len(tokens) - 1, up.inputs["taps"])])
    (draft,) = drafter.propose([ask(answer, shape.tokens)])
    assert draft is not None
    assert list(draft.tokens) == up.outputs[f"{name}_tokens"][1:].tolist()
    assert [parent + 1 for parent in draft.parents] == up.outputs[f"{name}_parents"][1:].tolist()
    known = len(tokens)
    if name == "tree0":  # three more tokens were accepted: their rows are run again, and another tree grows
        answer.tokens += up.inputs["extra_tokens"].tolist()
        drafter.commit([Computed(answer, known - 1, 3, up.inputs["extra_taps"])])
        (draft,) = drafter.propose([ask(answer, shape.tokens)])
        assert draft is not None
        assert list(draft.tokens) == up.outputs["tree0_round2_tokens"][1:].tolist()


def dspark_drafter(up: Upstream, backend: Backend) -> DSparkDrafter:
    c = read_dspark(up.checkpoint, 10, 64)
    target = ArrayWeights({EMBEDDING: up.inputs["target_embed"], "head.weight": up.inputs["target_lm_head"]})
    weights, tokens = dspark_weights(c, up.checkpoint, target)
    kv_format = KVFormat.F32 if backend.name == "reference" else KVFormat.BF16
    block = backend.compile(record_block(c, 128, kv_format, "test"), weights, BLOCKS)
    context = block.sibling(record_context(c, 128, kv_format, "test"))
    return DSparkDrafter(c, context, block, MarkovHeads(c, up.checkpoint, tokens), "test", 64)


@pytest.mark.parametrize("name", [name for name in DSPARK if "gemma4" not in name])
def test_dspark_computes_what_upstream_does(name: str, tmp_path: Path) -> None:
    up = Upstream.load(DSPARK[name], tmp_path)
    facts = up.case["facts"]
    for backend in (ReferenceBackend(), NativeBackend(threads=1, max_rows=64)):
        drafter, before = dspark_drafter(up, backend), 0
        c = drafter.config
        assert (c.first_slot, c.block) == (facts["first_slot"], facts["block_size"])
        assert list(c.taps) == facts["target_layer_outputs"]
        for number, (context, anchor) in enumerate(zip(facts["contexts"], facts["anchors"], strict=True), 1):
            rows = chained([0] * (context - before), before)
            drafter.context.step(rows, None, inputs=up.inputs["taps"][before:context])
            masks = [c.mask_token] * (c.block - 1)
            output = drafter.block.step(chained([anchor, *masks], context), None, logits=True)
            before, hidden = context, output.taps[HIDDEN]
            assert output.logits is not None
            wanted = {key.removeprefix(f"b{number}_"): value for key, value in up.outputs.items()}
            everything = [Slot(logits, np.arange(logits.shape[-1])) for logits in output.logits[c.first_slot :]]
            walk = drafter.heads.walk(anchor, everything, hidden, lambda slot, scores, tokens: int(scores.argmax()))
            if backend.name == "native":
                assert np.corrcoef(hidden.ravel(), wanted["hidden"].ravel())[0, 1] > 0.999
                continue
            assert np.abs(hidden - wanted["hidden"]).max() < 1e-4
            assert np.abs(output.logits - wanted["base_logits"]).max() < 1e-4
            assert np.abs(np.stack(walk.logits) - wanted["logits"][c.first_slot :]).max() < 1e-4
            assert walk.tokens == wanted["tokens"].tolist()
            if c.confidence:
                sure = 1 / (1 + np.exp(-wanted["conf_logits"][c.first_slot :]))
                assert np.abs(np.array(walk.confidences) - sure).max() < 1e-4


def test_dspark_drafts_upstreams_block(tmp_path: Path) -> None:
    up = Upstream.load(DSPARK["speculators-draftvocab"], tmp_path)
    drafter, facts = dspark_drafter(up, ReferenceBackend()), up.case["facts"]
    answer = answer_of([*([0] * facts["contexts"][0]), facts["anchors"][0]])
    drafter.commit([Computed(answer, 0, facts["contexts"][0], up.inputs["taps"][: facts["contexts"][0]])])
    (draft,) = drafter.propose([ask(answer, 4)])
    assert draft is not None
    assert list(draft.tokens) == up.outputs["b1_tokens"].tolist()
    more = slice(facts["contexts"][0], facts["contexts"][1])
    answer.tokens = [*([0] * facts["contexts"][1]), facts["anchors"][1]]
    drafter.commit([Computed(answer, more.start, more.stop - more.start, up.inputs["taps"][more])])
    (draft,) = drafter.propose([ask(answer, 2)])
    assert draft is not None
    assert list(draft.tokens) == up.outputs["b2_tokens"][:2].tolist()


def test_nothing_at_or_after_the_anchor_is_context(tmp_path: Path) -> None:
    """A block's context are the hidden states before the anchor: those after it change nothing."""
    up = Upstream.load(DSPARK["deepspec-qwen3"], tmp_path)
    drafter, taps = dspark_drafter(up, ReferenceBackend()), up.inputs["taps"]
    drafter.context.step(chained([0] * 8, 0), None, inputs=taps[:8])
    block = chained([17, *[drafter.config.mask_token] * 3], 8)
    first = drafter.block.step(block, None, logits=True).logits
    drafter.context.step(chained([0, 0], 12), None, inputs=taps[8:10])
    again = drafter.block.step(block, None, logits=True).logits
    assert first is not None
    assert again is not None
    assert np.array_equal(first, again)


def changed(case: dict[str, Any], **config: object) -> dict[str, Any]:
    return {**case, "config": {**case["config"], **config}}


def without(case: dict[str, Any], tensor: str) -> dict[str, Any]:
    return {**case, "tensors": {name: entry for name, entry in case["tensors"].items() if name != tensor}}


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (changed(EAGLE3["specforge"], hidden_size=-4), "hidden size of -4"),
        (changed(EAGLE3["specforge"], target_hidden_size=80), "hidden size of 80"),
        (changed(EAGLE3["speculators-nbr_true"], eagle_aux_hidden_state_layer_ids=[2, 99]), "no layer of a target"),
        (changed(EAGLE3["specforge"], draft_vocab_size=47), "d2t"),
        (without(EAGLE3["specforge"], "norm.weight"), "norm.weight"),
        (without(without(EAGLE3["specforge"], "d2t"), "t2d"), "d2t"),
        (changed(DSPARK["deepspec-qwen3"], block_size=1000), "out of range"),
        (changed(DSPARK["deepspec-qwen3"], mask_token_id=160), "out of range"),
        (changed(DSPARK["deepspec-qwen3"], markov_rank=9), "markov_w1"),
        (changed(DSPARK["deepspec-qwen3"], markov_head_type="odd"), "not supported"),
        (changed(DSPARK["deepspec-qwen3"], hidden_act="gelu"), "hidden_act"),
        (changed(EAGLE3["specforge"], hidden_act="relu"), "hidden_act"),
        (DSPARK["deepspec-gemma4"], "Gemma 4"),
        (changed(EAGLE3["specforge"], architectures=["Medusa"]) | {"tensors": {"fc.weight": [2, 2]}}, "no drafter"),
    ],
)
def test_damaged_drafters(case: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """One clear error that names the file and the field."""
    checkpoints.write(case, tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    def read() -> None:
        if family_of(checkpoint) == "eagle3":
            c = read_eagle3(checkpoint, 8, 64)
            weights, _ = eagle3_weights(c, checkpoint, None)
            ReferenceBackend().compile(record_eagle3(c, 64, KVFormat.F32, "x", from_taps=True), weights, 1)
        else:
            d = read_dspark(checkpoint, 10, 64)
            MarkovHeads(d, checkpoint, dspark_weights(d, checkpoint, None)[1])

    with pytest.raises(SlipstreamError, match=problem) as caught:
        read()
    assert isinstance(caught.value, ModelFileError | UnsupportedModelError)
    assert str(tmp_path) in str(caught.value)


def test_block_slots_are_needed_for_a_whole_block(tmp_path: Path) -> None:
    up = Upstream.load(DSPARK["deepspec-qwen3"], tmp_path)
    drafter = dspark_drafter(up, ReferenceBackend())
    answer = replace_blocks(answer_of([0] * (BLOCK_SLOTS - 1)), 1)
    taps = np.zeros((BLOCK_SLOTS - 2, 192), np.float32)
    drafter.commit([Computed(answer, 0, BLOCK_SLOTS - 2, taps)])
    assert drafter.propose([ask(answer, 1)]) == [None]
    assert drafter.scratch(1) == 3


def replace_blocks(answer: Answer, count: int) -> Answer:
    answer.blocks = list(range(count))
    return replace(answer)
