"""Drafts from text that was there before: the answer's own (n-gram, suffix), and earlier answers' (suffix).

N-gram: prompt lookup (Saxena 2023). Suffix: SuffixDecoding (Oliaro et al., arXiv 2411.04975), with a suffix index in
place of suffix trees: the same longest match and the same frequencies, in 20 bytes a token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from slipstream.kernels.native import SuffixIndex
from slipstream.program import Draft
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Drafter

LEAST_MATCH = 3
"""Tokens that must agree before anything is proposed."""
OWN_TOKENS = 1 << 17
LEARNED_TOKENS = 1 << 18
"""Tokens that are kept of an answer, and of all earlier answers of a tenant."""
MOST_TENANTS = 64
CONTEXT_LEARNED = 32
"""Tokens of the prompt's end that are learned with an answer."""
BOUNDARY = -1
_LENGTHS = (4, 6, 9, 16, 32)
"""Where classes of match length begin, after the first."""
_SHARES = (0.55, 0.999)
"""Where classes of how alike earlier continuations were begin, after the first."""
_PRIORS = (
    (0.15, 0.25, 0.40),
    (0.20, 0.35, 0.50),
    (0.30, 0.45, 0.65),
    (0.40, 0.55, 0.80),
    (0.45, 0.60, 0.90),
    (0.50, 0.70, 0.95),
)


def class_of(matched: int, share: float) -> int:
    """The class of confidence of a draft after `matched` tokens that agree, which `share` of occurrences go on with."""
    return bisect_right(_LENGTHS, matched) * 3 + bisect_right(_SHARES, share)


class SuffixDrafter(Drafter):
    """Proposes what followed the longest match of an answer's last tokens.

    With `learn`, earlier answers count as well, each tenant's for that tenant only.
    """

    classes = 3 * len(_PRIORS)

    def __init__(self, *, learn: bool = True, most: int = 16):
        self.name = "suffix" if learn else "ngram"
        self.learn, self.most = learn, most
        self._own: dict[int, SuffixIndex] = {}
        self._learned: OrderedDict[str, SuffixIndex] = OrderedDict()

    def prior(self, draft_class: int) -> float:
        """From match length and share."""
        return _PRIORS[draft_class // 3][draft_class % 3]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """The better one of what the answer itself and earlier answers have."""
        return [self.draft(ask.answer, ask.most) for ask in asks]

    def draft(self, answer: Answer, most: int) -> Draft | None:
        """The draft of one answer; most answers have none, and are told so quickly."""
        learned = self._learned.get(answer.tenant) if self._learned else None
        found = self._index(answer).propose(learned, most) if most > 0 else None
        if found is None:
            return None
        tokens, matched, shares = found
        classes = [class_of(*pair) for pair in zip(matched, shares, strict=True)]
        return Draft.chain(tokens, classes, self.name)

    def _index(self, answer: Answer) -> SuffixIndex:
        """The answer's own index, up to date."""
        index = self._own.get(id(answer))
        if index is None:
            index = self._own[id(answer)] = SuffixIndex(OWN_TOKENS, LEAST_MATCH)
            index.append(answer.tokens)
        elif fresh := len(answer.tokens) - index.appended:
            index.append(answer.tokens[-fresh:])
        return index

    def free(self, answer: Answer, *, learn: bool = True) -> None:
        """Learn what was answered."""
        self._own.pop(id(answer), None)
        if not (learn and self.learn and answer.generated):
            return
        index = self._learned.get(answer.tenant)
        if index is None:
            index = self._learned[answer.tenant] = SuffixIndex(LEARNED_TOKENS, LEAST_MATCH)
            if len(self._learned) > MOST_TENANTS:
                self._learned.popitem(last=False)
        self._learned.move_to_end(answer.tenant)
        index.append([*answer.tokens[max(0, answer.prompt_length - CONTEXT_LEARNED) :], BOUNDARY])

    def forget(self) -> None:
        """Forget earlier answers."""
        self._learned.clear()

    @property
    def bytes(self) -> int:
        """Memory of everything kept."""
        return sum(index.bytes for index in self._own.values()) + sum(i.bytes for i in self._learned.values())
