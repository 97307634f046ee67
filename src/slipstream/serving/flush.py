"""How an answer's tokens are put into events: those of a step together, or always so many.

A step that verifies a draft brings several tokens, and how many tells whoever watches the wire something of the text:
the counts of a few hundred steps identify most prompts. Events of one size do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slipstream.engine.output import Chunk


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """News of one choice as one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


class Flush:
    """Chunks of an answer's choices, joined. `size` tokens in each event but the last; 0: what a step brought."""

    def __init__(self, size: int = 0):
        self._size = size
        self._held: dict[int, list[Chunk]] = {}

    def add(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """News of a step; returns what is to be sent now."""
        if len(chunks) == 1 and not self._size:
            return list(chunks)
        ready: list[Chunk] = []
        for chunk in chunks:
            held = self._held.setdefault(chunk.choice, [])
            held.append(chunk)
            if self._size and (chunk.finish_reason is not None or sum(len(c.token_ids) for c in held) >= self._size):
                ready.append(joined(self._held.pop(chunk.choice)))
        if not self._size:
            ready = [joined(held) for held in self._held.values()]
            self._held.clear()
        return ready
