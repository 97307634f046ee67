"""The example's data from public sets: `python examples/own_drafter/prepare.py DATA --maths train.jsonl …`.

Files are taken in the shapes that they are published in: GSM8K's JSON lines, prompts with `turns` (Spec-Bench, EAGLE's
sets) or a `prompt` (IFEval, HumanEval), WikiText as plain text. What is asked later was not asked before, and what is
foreign is not in the mixture either.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LATER, PARAGRAPHS, LEAST_WORDS, BEGINNING = 400, 200, 60, 48
"""Questions that are held out, paragraphs of foreign text, words that one must have, and those that are given."""
MATHS = frozenset({"math", "math_reasoning", "gsm8k"})
Row = dict[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    """JSON lines, gzip or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return (json.loads(line) for line in text.splitlines() if line.strip())


def questions(path: Path) -> list[Row]:
    """GSM8K's questions, without their answers."""
    return [{"question": row["question"]} for row in rows_of(path)]


def conversations(paths: Iterable[Path], foreign: Iterable[str]) -> list[Row]:
    """First turns of prompt sets, mixed; maths is left out, and whatever contains something `foreign`."""
    asked = (
        row["turns"][0] if "turns" in row else row["prompt"]
        for path in paths
        for row in rows_of(path)
        if row.get("category") not in MATHS and path.stem not in MATHS
    )
    known = [plain(text) for text in foreign]
    kept = [text for text in asked if not any(one in plain(text) for one in known)]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in kept]
    random.Random(0).shuffle(rows)
    return rows


def plain(text: str) -> str:
    """Without what prompt sets do with spaces."""
    return "".join(text.split())


def functions(prompts: Iterable[str]) -> list[Row]:
    """HumanEval's functions, to be completed."""
    asked = (f"Complete this function:\n```python\n{prompt}```" for prompt in prompts)
    return [{"messages": [{"role": "user", "content": text}]} for text in asked]


def beginnings(path: Path) -> list[Row]:
    """Beginnings of long paragraphs."""
    long = [line.split() for line in path.read_text().splitlines() if not line.strip().startswith("=")]
    chosen = random.Random(0).sample([words for words in long if len(words) >= LEAST_WORDS], PARAGRAPHS)
    return [{"prompt": " ".join(words[:BEGINNING])} for words in chosen]


def write(path: Path, rows: list[Row]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows):6} {path}")


def main() -> None:
    """Read the command line, and write what there are files for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder that own_drafter.py takes")
    parser.add_argument("--maths", type=Path, required=True, help="GSM8K's training set")
    parser.add_argument("--maths-later", type=Path, required=True, help="its test set")
    parser.add_argument("--mixed", type=Path, nargs="+", required=True, help="prompts of any kind")
    parser.add_argument("--code", type=Path, help="HumanEval")
    parser.add_argument("--text", type=Path, help="WikiText")
    given = parser.parse_args()
    given.data.mkdir(parents=True, exist_ok=True)
    before, later = questions(given.maths), questions(given.maths_later)
    asked = {row["question"] for row in before}
    write(given.data / "maths.jsonl", before)
    write(given.data / "maths-later.jsonl", [row for row in later if row["question"] not in asked][:LATER])
    code = [row["prompt"] for row in rows_of(given.code)] if given.code is not None else []
    text = beginnings(given.text) if given.text is not None else []
    write(given.data / "mixed.jsonl", conversations(given.mixed, [*code, *(row["prompt"] for row in text)]))
    if given.code is not None:
        write(given.data / "foreign-code.jsonl", functions(code))
    if given.text is not None:
        write(given.data / "foreign-wiki.jsonl", text)


if __name__ == "__main__":
    main()
