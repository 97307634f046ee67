"""Redraw: tokens are drawn from all there are, and again by the grammar's mask only where the grammar forbids them.

Gumbel noise is a token's own, whatever else may be drawn: the best of all tokens, if it is allowed, is the best of
those that are allowed. Whether one token is allowed takes microseconds; a mask of all, with what the weights left of
the caches, a hundred.
"""

from __future__ import annotations

import numpy as np

from slipstream.engine.flight import Flight
from slipstream.kernels.backend import Executable
from slipstream.program.draft import ROOT


def redraw_forbidden(flight: Flight, executable: Executable) -> None:
    """Draw again, in place, what a step drew although it may not follow: after known tokens and drafts that hold."""
    drawn = flight.output.drawn if flight.output is not None else None
    if drawn is None or flight.draws is None:
        return
    for index in flight.unmasked:
        first, sequence = flight.firsts[index], flight.drawing[index]
        constraint = sequence.constraint
        if constraint is None or sequence.ended:
            continue
        draft, node = flight.drafts.get(id(sequence)), ROOT
        while True:
            row = first + 1 + node
            token = int(drawn.tokens[row, 0])
            if (mask := constraint.instead(token)) is not None:
                again = executable.redraw(np.array([row], np.int32), flight.draws.of_row(row, mask))
                drawn.tokens[row], drawn.logprobs[row] = again.tokens[0], again.logprobs[0]
                token = int(drawn.tokens[row, 0])
            following = draft.child(node, token) if draft is not None else None
            if following is None:
                break
            node = following
            constraint.suppose(token)
            if constraint.over:
                break
        if node != ROOT:
            constraint.take_back()
