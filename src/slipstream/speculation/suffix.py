"""Drafts from text that was there before: the answer's own (n-gram, suffix), and earlier answers' (suffix).

N-gram: prompt lookup (Saxena 2023). Suffix: SuffixDecoding (Oliaro et al., arXiv 2411.04975), with a suffix index in
place of suffix trees: the same longest match and the same frequencies, in 20 bytes a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from slipstream.kernels.native import SuffixIndex
from slipstream.program import Draft
from slipstream.scheduling import Sequence as Answer
from slipstream.speculation.drafter import Ask, Drafter

LEAST_MATCH = 3
"""Tokens that must agree before anything is proposed."""
MOST_CONTEXT = 64
"""Tokens of an answer that are compared with what was there before."""
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
    return sum(matched >= least for least in _LENGTHS) * 3 + sum(share >= least for least in _SHARES)


class SuffixDrafter(Drafter):
    """Proposes what followed the longest match of an answer's last tokens.

    With `learn`, earlier answers count as well, each tenant's for that tenant only.
    """

    classes = 3 * len(_PRIORS)

    def __init__(self, *, learn: bool = True, most: int = 16):
        self.name = "suffix" if learn else "ngram"
        self.learn, self.most = learn, most
        self._own: dict[int, tuple[SuffixIndex, int]] = {}
        self._learned: OrderedDict[str, SuffixIndex] = OrderedDict()

    def prior(self, draft_class: int) -> float:
        """From match length and share."""
        return _PRIORS[draft_class // 3][draft_class % 3]

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """The better one of what the answer itself and earlier answers have."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        answer = ask.answer
        own, context = self._index(answer), answer.tokens[-MOST_CONTEXT:]
        tokens, matched, shares = own.propose(context, ask.most)
        learned = self._learned.get(answer.tenant) if self.learn else None
        if learned is not None:
            others = learned.propose(context, ask.most)
            if others[1] and (not matched or others[1][0] > matched[0]):
                tokens, matched, shares = others
        if not tokens:
            return None
        classes = [class_of(*pair) for pair in zip(matched, shares, strict=True)]
        return Draft.chain(tokens, classes, self.name)

    def _index(self, answer: Answer) -> SuffixIndex:
        """The answer's own index, up to date."""
        index, fed = self._own.get(id(answer), (None, 0))
        if index is None:
            index = SuffixIndex(OWN_TOKENS, LEAST_MATCH)
        if fed < len(answer.tokens):
            index.append(answer.tokens[fed:] if fed else answer.tokens)
            self._own[id(answer)] = index, len(answer.tokens)
        return index

    def free(self, answer: Answer) -> None:
        """Learn what was answered."""
        self._own.pop(id(answer), None)
        if not self.learn or not answer.generated:
            return
        index = self._learned.get(answer.tenant)
        if index is None:
            index = self._learned[answer.tenant] = SuffixIndex(LEARNED_TOKENS, LEAST_MATCH)
            if len(self._learned) > MOST_TENANTS:
                self._learned.popitem(last=False)
        self._learned.move_to_end(answer.tenant)
        index.append([*answer.tokens[max(0, answer.prompt_length - CONTEXT_LEARNED) :], BOUNDARY])

    @property
    def bytes(self) -> int:
        """Memory of everything kept."""
        return sum(index.bytes for index, _ in self._own.values()) + sum(i.bytes for i in self._learned.values())
