"""Prompts for benchmarks from files: JSON lines in the shapes that public prompt sets have."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import UsageError

Message = dict[str, str]
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""Categories that Spec-Bench counts as one."""


OWN = {
    "writing": (
        "Write a short letter to a friend who has moved to another town.",
        "Describe a market on a winter morning in a few sentences.",
    ),
    "maths": (
        "Anna has 14 apples and gives 5 of them to her brother. Then she buys twice as many as are left. How many?",
        "A train leaves at 9:40 and arrives at 12:25. How long does it take? Explain each step.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
        "Write a Python function that counts the words of a text and returns the ten that occur most.",
    ),
    "repeating": (
        "Write this list again, every line in capital letters:\n- red apples\n- green pears\n- yellow lemons\n- plums",
        "Repeat the following text, with 'cat' in place of 'dog': The dog sat on the mat. The dog saw the bird. "
        "The bird saw the dog, and the dog slept.",
    ),
}
"""Prompts by category: what is drafted well and what is not."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation to be had: what comes before, and the user's turns, each answered before the next."""

    category: str
    before: tuple[Message, ...]
    turns: tuple[str, ...]


def read_talks(path: Path, limit: int) -> list[Talk]:
    """At most `limit` talks of each category. Raises UsageError for a file in no known shape.

    Known are lines with `turns` (Spec-Bench, MT-Bench, EAGLE's sets), `messages` (OpenAI), `prompt` (HumanEval),
    `question` (GSM8K), or `messages_display` (tau-bench: every answer of an agent's run is asked for anew).
    """
    talks: dict[str, list[Talk]] = defaultdict(list)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise UsageError(f"{path}: {error}") from error
    stem = path.name.split(".")[0].lower()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            for talk in _talks(row, stem):
                if len(talks[talk.category]) < limit:
                    talks[talk.category].append(talk)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: no prompt that is known how to read ({error})") from error
    if not talks:
        raise UsageError(f"{path} has no prompts")
    return [talk for category in talks.values() for talk in category]


def own_talks(limit: int) -> list[Talk]:
    """At most `limit` of each category of a few prompts of our own, for when no file is named."""
    return [Talk(category, (), (text,)) for category, texts in OWN.items() for text in texts[:limit]]


def _talks(row: dict[str, Any], stem: str) -> Iterator[Talk]:
    category = str(row.get("category", stem))
    category = "mt_bench" if category in MT_BENCH else category
    if "turns" in row:
        yield Talk(category, (), tuple(map(str, row["turns"])))
    elif "messages_display" in row:
        yield from _agent(row["messages_display"], category)
    elif "messages" in row:
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        yield Talk(category, tuple(messages[:-1]), (messages[-1]["content"],))
    elif "prompt" in row:
        yield Talk(category, (), (f"Complete this function:\n```python\n{row['prompt']}\n```",))
    else:
        yield Talk(category, (), (str(row["question"]),))


def _agent(display: str, category: str) -> Iterator[Talk]:
    """Every answer of a run, after what was said and what tools returned before it."""
    messages: list[Message] = []
    for line in display.split("\n"):
        role, separator, content = line.partition(": ")
        if not separator or role not in ("user", "assistant", "tool"):
            if messages:
                messages[-1]["content"] += f"\n{line}"
            continue
        if role == "assistant" and content != "None" and messages and messages[-1]["role"] == "user":
            yield Talk(category, tuple(dict(m) for m in messages[:-1]), (messages[-1]["content"],))
        if role == "assistant" and content == "None":
            continue
        if role == "tool":
            role, content = "user", f"Result of a tool:\n{content}"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{content}"
        else:
            messages.append({"role": role, "content": content})
