"""`trace` in a choice: which of its tokens were drafted, by whom, and what was refused."""

from __future__ import annotations

from server.api.answers import Trace, TracedToken
from server.text.choice import Delta
from server.text.codec import TextCodec


def write_trace(delta: Delta, codec: TextCodec, speedup: float | None) -> Trace:
    """The trace of a chunk, or of a whole answer.

    `drafted` counts draft tokens that the model checked, `accepted` those of the answer's tokens
    that were drafted; `tokens` has the text piece by piece. Guesses that were refused stand with
    the token that the model said in their place.

    Args:
        speedup: of the choice so far; None = unknown.
    """
    tokens: list[TracedToken] = []
    for piece in delta.pieces:
        token: TracedToken = {"text": piece.text, "drafter": piece.drafter}
        if piece.refused:
            token["refused"] = [codec.token_text(refused) for refused in piece.refused]
        tokens.append(token)
    return {
        "drafted": sum(piece.drafted for piece in delta.pieces),
        "accepted": sum(p.drafter is not None and not p.partial for p in delta.pieces),
        "tokens": tokens,
        "speedup": None if speedup is None else round(speedup, 4),
    }
