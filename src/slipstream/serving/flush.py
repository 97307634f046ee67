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
    """Chunks of an answer's choices, joined. `size` tokens in each event but the last; 0: what a step brought.

    With a size no step sends a choice more than one event, whatever it brought: what is left waits for the next step,
    or for the end.
    """

    def __init__(self, size: int = 0):
        self._size = size
        self._held: dict[int, list[Chunk]] = {}

    def add(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """News of a step; returns what is to be sent now."""
        if len(chunks) == 1 and not self._size:
            return list(chunks)
        for chunk in chunks:
            self._held.setdefault(chunk.choice, []).append(chunk)
        if not self._size:
            ready = [joined(held) for held in self._held.values()]
            self._held.clear()
            return ready
        return [event for choice in dict.fromkeys(chunk.choice for chunk in chunks) for event in self._due(choice)]

    def _due(self, choice: int) -> list[Chunk]:
        """One event, if there are enough tokens for it; all that is left of a choice that has ended."""
        held = self._held.pop(choice)
        ended, due = held[-1].finish_reason is not None, list[Chunk]()
        while held:
            count = tokens = 0
            while count < len(held) and tokens < self._size:
                tokens += len(held[count].token_ids)
                count += 1
            if not ended and (due or tokens < self._size):
                self._held[choice] = held
                break
            due.append(joined(held[:count]))
            held = held[count:]
        return due
