"""Drafts from the grammar that an answer keeps to: what it leaves no choice about need not be drawn token by token.

The idea is that of jump-forward decoding (SGLang 2024) and of llguidance's fast-forward tokens, made a draft. A forced
text's last letters may still belong to a token that goes on into free text: the draft ends before, or is found out.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.program import Draft
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Drafter

LIKELY = 0.95
"""How often a token of what must be said is the one that it is said with, before anything was seen."""


class GrammarDrafter(Drafter):
    """Proposes what must follow: names of fields, brackets, what is left of the only choice."""

    name, certain = "grammar", True

    def prior(self, draft_class: int) -> float:
        """The same for all."""
        return LIKELY

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """What must follow, for those who keep to a grammar."""
        return [self.draft(ask.answer, ask.most) for ask in asks]

    def draft(self, answer: Answer, most: int) -> Draft | None:
        """The draft of one answer."""
        tokens = answer.constraint.forced(most) if answer.constraint is not None and most > 0 else ()
        return Draft.chain(tokens, [0] * len(tokens), self.name) if tokens else None
