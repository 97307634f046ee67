"""The matrix of features: which pairs some test uses together. `python -m tests.matrix > docs/features.md` makes it.

A test says so itself: @pytest.mark.features("grammar", "drafts", "n") claims every pair of these three.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from pathlib import Path

FEATURES = {
    "sampling": "temperature above 0, top-p, top-k, seeds", "n": "several answers to one prompt",
    "penalties": "repetition, presence, frequency", "logprobs": "log-probabilities", "stop": "stop strings and tokens",
    "grammar": "structured answers, forced tool calls", "text drafts": "n-gram and suffix",
    "neural drafts": "draft model, EAGLE-3, DSpark", "rejection": "drafts verified by the classical rule",
    "rollout": "drafters exchanged while answers are made",
    "prefix cache": "beginnings computed before", "prefix store": "the same, from disk", "giving way": "preemption",
    "moved out": "blocks saved beside the cache and restored", "ahead": "a step planned while the one before runs",
    "int8 cache": "keys and values in int8", "embeddings": "vectors beside answers",
    "recording": "traffic for training", "keys": "API keys, their limits and rules",
    "streaming": "answers in events", "tools": "calls", "thoughts": "reasoning",
}  # fmt: skip
"""By the names that tests use, and what each is."""
MARK = "features"


def claims(folder: Path) -> Counter[frozenset[str]]:
    """How many tests claim each pair."""
    pairs: Counter[frozenset[str]] = Counter()
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{MARK}":
                    named = [ast.literal_eval(argument) for argument in decorator.args]
                    if unknown := set(named) - FEATURES.keys():
                        raise ValueError(f"{path}:{node.lineno}: there is no feature {sorted(unknown)}")
                    pairs.update(frozenset(pair) for pair in itertools.combinations(named, 2))
    return pairs


def page(pairs: Counter[frozenset[str]]) -> str:
    """The matrix as Markdown; the number of tests, or an honest dot."""
    names = list(FEATURES)
    lines = [
        "# Which features are tested together", "",
        "Made by `python -m tests.matrix` from what the tests say of themselves. A number: so many tests use both. A",
        "dot: untested; nothing is known against it, and nothing for it.", "",
        "| | " + " | ".join(f"{place} {name}" for place, name in enumerate(names, 1)) + " |",
        "|---|" + "---|" * len(names),
    ]  # fmt: skip
    for place, name in enumerate(names):
        cells = [
            "" if other == name else str(pairs[frozenset((name, other))] or "·") for other in names[: place + 1]
        ] + [""] * (len(names) - place - 1)
        lines.append(f"| {place + 1} {name}: {FEATURES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(claims(Path(__file__).parent)), end="")
