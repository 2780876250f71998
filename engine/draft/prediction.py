"""Drafts from the text a caller expects as the answer (OpenAI's Predicted Outputs)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

#: Tokens of output that must reappear in the prediction before it is trusted again.
_ANCHOR = 3


class PredictionCursor:
    """A place in the predicted text, which follows the output and finds its way back.

    While the output equals the prediction, the cursor moves along. Where they part, it waits
    until the last `_ANCHOR` tokens of output occur in the prediction again, and goes on behind
    the occurrence nearest to where it stood: an edit is usually small and moves forward.

    Args:
        prediction: token ids of the expected answer.
    """

    def __init__(self, prediction: Seq[int]) -> None:
        self._prediction = list(prediction)
        self._position = 0
        self._aligned = bool(prediction)
        self._recent: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(_ANCHOR, len(self._prediction) + 1):
            self._places[tuple(self._prediction[end - _ANCHOR : end])].append(end)

    def follow(self, tokens: Seq[int]) -> None:
        """Reads newly committed output tokens."""
        for token in tokens:
            self._recent = [*self._recent[1 - _ANCHOR :], token]
            expected = self._prediction[self._position : self._position + 1]
            if self._aligned and expected == [token]:
                self._position += 1
            else:
                self._realign()

    def draft(self, max_tokens: int) -> list[int]:
        """What the prediction says comes next; nothing while it has lost its place."""
        if not self._aligned:
            return []
        return self._prediction[self._position : self._position + max_tokens]

    def _realign(self) -> None:
        places = self._places.get(tuple(self._recent), ())
        self._aligned = bool(places)
        if places:
            # Forward first: (behind, distance) sorts places at or after the cursor to the front.
            self._position = min(
                places, key=lambda p: (p < self._position, abs(p - self._position))
            )
