"""Fixtures: a tiny GGUF model with a tokenizer, and the default model if it can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import gguf
import numpy as np
import pytest

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.text.tokenizer import byte_alphabet
from slipstream.weights.references import FetchError, resolve

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 512


def write_tiny_gguf(
    path: Path,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
    says: str = "",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
) -> None:
    """A random Llama whose vocabulary is the 256 bytes and three special tokens.

    With `says` that is one more token, and no chance: it says this after whatever it is asked, and ends.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads, ffn = 4, 2, 2 * hidden
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    said = ["".join(letters[byte] for byte in says.encode())] if says else []
    writer.add_token_list([*byte_alphabet(), *SPECIAL, *said])
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * len(said))
    writer.add_token_merges([])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = (gain * rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    if says:  # everything means the first axis and is followed by the text; the text means the second, and ends
        meanings, following = np.zeros((260, hidden), np.float32), np.zeros((260, hidden), np.float32)
        meanings[:259, 0] = meanings[259, 1] = 1.0
        following[259, 0] = following[258, 1] = 5.0
        for name, values in (("token_embd.weight", meanings), ("output.weight", following)):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        matrix("token_embd.weight", 259, hidden, 3.0)
    norm("output_norm.weight")
    for layer in range(layers):
        at = f"blk.{layer}."
        norm(at + "attn_norm.weight")
        norm(at + "ffn_norm.weight")
        matrix(at + "attn_q.weight", hidden, hidden, 2.0)
        matrix(at + "attn_k.weight", hidden // 2, hidden, 2.0)
        matrix(at + "attn_v.weight", hidden // 2, hidden)
        matrix(at + "attn_output.weight", hidden, hidden, 0.0 if says else 1.0)
        matrix(at + "ffn_gate.weight", ffn, hidden)
        matrix(at + "ffn_up.weight", ffn, hidden)
        matrix(at + "ffn_down.weight", hidden, ffn, 0.0 if says else 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep their caches to themselves."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def _engines() -> Iterator[tuple[list[Engine], WeakSet[Engine]]]:
    """The engines that were made since the last test ended, and all that are still there."""
    fresh, known = list[Engine](), WeakSet[Engine]()
    with pytest.MonkeyPatch.context() as patch:
        make = Engine.__init__

        def made(engine: Engine, *arguments: Any, **named: Any) -> None:
            make(engine, *arguments, **named)
            fresh.append(engine)
            known.add(engine)

        patch.setattr(Engine, "__init__", made)
        yield fresh, known


@pytest.fixture(autouse=True)
def _no_block_is_leaked(_engines: tuple[list[Engine], WeakSet[Engine]]) -> Iterator[None]:
    """Every engine that a test made or used has its blocks in order when the test ends."""
    fresh, known = _engines
    yield
    idle = [engine for engine in known if not engine.flying]
    fresh.clear()
    known.clear()  # one that is damaged fails one test
    for engine in idle:
        engine.check()
    known.update(idle)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_gguf: Path, _own_cache: None) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64))


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The default model; skipped where it cannot be fetched, except in CI."""
    try:
        return resolve("smollm2-135m")
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
