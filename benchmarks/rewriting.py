"""Prompts that ask for source files to be written again with a small change: what editors and agents do all day.

python benchmarks/rewriting.py src/slipstream/kvcache/*.py --out rewrite-files.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MOST_LINES = 60
_NAME = re.compile(r"\b[a-z_]{4,}\b")


def prompts(files: Iterable[Path]) -> Iterable[dict[str, str | list[dict[str, str]]]]:
    """A conversation for each file: its first lines, and its most frequent name to be replaced."""
    for file in files:
        text = "\n".join(file.read_text().splitlines()[:MOST_LINES])
        name, _ = Counter(_NAME.findall(text)).most_common(1)[0]
        wish = f"Write this file again, all of it, with `{name}` renamed to `{name}_`:\n\n```python\n{text}\n```"
        yield {"category": "rewrite", "messages": [{"role": "user", "content": wish}]}


def main() -> None:
    """Read the arguments and write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts(options.files)))


if __name__ == "__main__":
    main()
