"""Make a Llama of any shape with random weights, with the tokenizer of a model that exists: for speed, not for sense.

python benchmarks/shape.py smollm2.gguf 1b.gguf --layers 16 --width 2048 --heads 32 --kv-heads 8 --mlp 8192
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

SPREAD = 0.02


def make(
    source: Path, to: Path, kind: str, *, layers: int, width: int, heads: int, kv_heads: int, mlp: int, seed: int = 0
) -> None:
    """Write it. `kind` is a type that the gguf package quantises to: Q4_0, Q8_0, F16, …"""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(to, "llama")
    head, quantised = width // heads, gguf.GGMLQuantizationType[kind]
    changed = {
        "block_count": layers, "embedding_length": width, "feed_forward_length": mlp, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": head, "attention.value_length": head,
        "rope.dimension_count": head,
    }  # fmt: skip
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = [*field.types, None]
        value = changed.get(name.removeprefix("llama."), field.contents())
        writer.add_key_value(name, value, kinds[0], sub_type=kinds[1])
    rng = np.random.default_rng(seed)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        values = rng.standard_normal((outputs, inputs), dtype=np.float32) * SPREAD
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, quantised), raw_dtype=quantised)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", vocabulary, width)
    norm("output_norm")
    for layer in (f"blk.{index}." for index in range(layers)):
        norm(layer + "attn_norm")
        norm(layer + "ffn_norm")
        matrix(layer + "attn_q", width, width)
        matrix(layer + "attn_k", kv_heads * head, width)
        matrix(layer + "attn_v", kv_heads * head, width)
        matrix(layer + "attn_output", width, width)
        matrix(layer + "ffn_gate", mlp, width)
        matrix(layer + "ffn_up", mlp, width)
        matrix(layer + "ffn_down", width, mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="a GGUF file of a Llama, for its tokenizer and settings")
    parser.add_argument("to", type=Path)
    parser.add_argument("--type", default="Q4_0", help="how the matrices are stored (default Q4_0)")
    for name in ("layers", "width", "heads", "kv-heads", "mlp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = vars(parser.parse_args())
    make(given.pop("source"), given.pop("to"), given.pop("type"), **given)


if __name__ == "__main__":
    main()
