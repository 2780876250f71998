"""What a step costs on this machine: a calibrated table, and a few slow scales that follow service.

A step is the target's pass (verify cost), drafting (draft cost), and everything else (scheduling,
sampling, pages, what happens between steps). The pass is predicted as

    seconds = scale * (body(rows) * correction(rows) + head(logits) + by sequence, token, pair)

where body, head and terms are calibrated at start. Scale and corrections follow the same error, or
they would pull at each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.calibration import ASSUMED, Calibration
from engine.load import Load

Floats = NDArray[np.float64]

#: 0, 1, 2, ...: parts of it are read, never written.
COUNTS: Floats = np.arange(1 << 16, dtype=np.float64)

#: Errors (logarithms of measured over predicted seconds) below this are all the same, and one
#: error counts for at most three times the usual one: step times have a heavy upper tail.
_SMALLEST_ERROR = 0.02
_MOST_ERRORS = 3.0

#: Shares of an error that the scale of all passes and that of an octave correct: most changes
#: concern all sizes, but where nothing was calibrated each octave has much to learn.
_GAIN, _OCTAVE_GAIN, _UNKNOWN_GAIN = 0.1, 0.03, 0.1

#: The table is made anew once its factors have moved by this much.
_STALE = 0.005

#: What a sample of the time that draft tokens add outside of passes counts after the next one, and
#: a multiple of the usual time beyond which that time holds a pause.
_KEEP, _PAUSE = 0.98, 2.0

#: Query tokens over which the price of reading a token is taken from a calibration.
_MANY_ROWS = 128


class Terms:
    """seconds = sum of weights[i] * features[i], with weights that stay above 0.

    An error is taken back by the terms in proportion to their share, so that one that was not
    involved does not move, and nothing runs away while the features stand still.

    Args:
        weights: initial values, above 0.
        known: whether they were measured; else the first three samples set the scale.
        gain: share of an error that one sample corrects; the first ones correct more.
    """

    __slots__ = ("_gain", "_usual", "count", "weights")

    def __init__(
        self, weights: Sequence[float], *, known: bool = False, gain: float = 0.05
    ) -> None:
        self.weights = list(weights)
        self.count = 3 if known else 0
        self._gain = gain
        self._usual = 0.3

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features."""
        return sum(map(float.__mul__, self.weights, map(float, features)))

    def update(self, features: Sequence[float], seconds: float) -> float:
        """Learns from one measurement; returns the error as far as it counted."""
        predicted = self.predict(features)
        error = math.log(max(seconds / predicted, 1e-6))
        self.count += 1
        if self.count <= 3:  # a first call takes too long, never too short
            error = error if self.count == 1 else min(error, 0.0)
            self.weights = [weight * math.exp(error) for weight in self.weights]
            return error
        bound = _MOST_ERRORS * self._usual
        self._usual += 0.25 * (max(abs(error), _SMALLEST_ERROR) - self._usual)
        error = min(max(error, -bound), bound)
        shares = [w * f / predicted for w, f in zip(self.weights, features, strict=True)]
        step = max(self._gain, min(0.2, 1.0 / self.count)) * error
        step /= sum(share * share for share in shares)
        for i, share in enumerate(shares):
            self.weights[i] *= math.exp(min(max(step * share, -0.7), 0.7))
        return error


class VerifyCost:
    """Seconds of the target's pass over at most `most_rows` query tokens, which verifies; it is an
    `engine.pace.PassCost`. Learning starts from `calibration`."""

    def __init__(self, calibration: Calibration, most_rows: int) -> None:
        rows = range(most_rows + 1)
        self._curve = np.array([calibration.prompt_seconds(n) for n in rows])
        self._head = np.array([calibration.rows_seconds(n) for n in rows]) - self._curve
        self._octave = np.log2(np.maximum(COUNTS[: most_rows + 1], 1.0))
        self._corrections = np.zeros(int(self._octave[-1]) + 2)  # logarithms, by octave
        self._terms = calibration.terms
        self._known = known = calibration.measured
        self._scale = Terms((1.0,), known=known, gain=_GAIN)
        self._gain = _OCTAVE_GAIN if known else _UNKNOWN_GAIN
        self._rebuild()
        self.samples = 0

    def seconds(
        self, rows: int, sequences: int, context: int, attention: int, silent: int = 0
    ) -> float | None:
        """See `engine.pace.PassCost`."""
        load = Load(0, sequences, rows, context, attention, silent)
        return self.predict(load) if self._known else None

    def predict(self, load: Load) -> float:
        """Seconds of one pass."""
        rows, loud = self._places(load)
        seconds = float(self._table[loud] + self._body[rows] - self._body[loud])
        return self._scale.weights[0] * (seconds + self._linear(load))

    def table(self, load: Load, extra: int) -> Floats:
        """Seconds with 0, 1, ..., `extra` more query tokens, all with logits; never falling."""
        first, loud = self._places(load)
        count = min(extra + 1, len(self._table) - first)
        rows = self._table[loud : loud + count]
        if load.silent:
            body = self._body[first : first + count] - self._body[loud : loud + count]
            rows = np.maximum.accumulate(rows + body)
        if count <= extra:  # beyond the most that a pass may have
            rows = np.append(rows, np.full(extra + 1 - count, rows[-1]))
        pair = self._terms[2] * load.context / max(1, load.sequences)
        return self._scale.weights[0] * (rows + (pair * COUNTS[: extra + 1] + self._linear(load)))

    def update(self, load: Load, seconds: float) -> None:
        """Learns from one measured pass, drafts included in `load`."""
        self.samples += 1
        rows, loud = self._places(load)
        share, low = math.modf(self._octave[rows])
        own = self._corrections[int(low) : int(low) + 2]
        shares = np.array((1.0 - share, share))
        curve = float(self._curve[rows]) * math.exp(float(own @ shares))
        predicted = curve + float(self._head[loud]) + self._linear(load)
        settled = self._scale.count >= 3
        error = self._scale.update((predicted,), seconds)
        if settled:
            own += self._gain * error * curve / predicted * shares
            self._moved += self._gain * abs(error)
        if self._moved > _STALE:
            self._rebuild()

    def _places(self, load: Load) -> tuple[int, int]:
        last = len(self._curve) - 1
        return min(load.rows, last), min(load.rows - load.silent, last)

    def _linear(self, load: Load) -> float:
        sequence, context, pair = self._terms
        return sequence * load.sequences + context * load.context + pair * load.attention

    def _rebuild(self) -> None:
        octaves = COUNTS[: len(self._corrections)]
        body = self._curve * np.exp(np.interp(self._octave, octaves, self._corrections))
        # More rows cannot cost less; and what was never met must not look cheaper for it.
        self._body = np.maximum.accumulate(body)
        self._table = np.maximum.accumulate(body + self._head)
        self._moved = 0.0


class DraftCost:
    """Seconds one drafter takes to propose: per call, sequence, round, token and token read, and
    the passes of its model, one in each round over one token of each sequence that still drafts; a
    round of average size stands for all of them.

    Args:
        calibration: what a pass of the drafter's model costs; None if it runs none, or it is
            not known.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.runs_model = calibration is not None
        self._curve: tuple[Floats, Floats] = (np.ones(1), np.zeros(1))
        self._terms = Terms((2e-5, 1e-5, 5e-6, 1e-6, 1e-6, 0.0), gain=0.1)
        if calibration is not None:
            rows = np.arange(1.0, calibration.curve[-1][0] + 1.0)
            self._curve = rows, np.array([calibration.rows_seconds(n) for n in rows])
            grown = calibration.prompt_seconds(_MANY_ROWS) - calibration.prompt_seconds(1)
            read = max(grown / (_MANY_ROWS - 1), 1e-6)
            # Around its passes: a batch is put together and tokens are drawn in each round.
            self._terms = Terms((5e-5, 5e-6, 1e-4, 1e-5, read, 1.0), known=True, gain=0.1)

    @property
    def has_rounds(self) -> bool:
        """Whether longer drafts cost more than their tokens."""
        call, _, each, _, _, passes = self._terms.weights
        return passes > 0.0 or each > 0.5 * call

    @property
    def each_seconds(self) -> tuple[float, float, float]:
        """For each sequence that drafts, draft token, and token that has to be read first."""
        _, sequence, _, token, read, _ = self._terms.weights
        return sequence, token, read

    def shared_seconds(self, rounds: Floats, tokens: Floats) -> Floats:
        """Elementwise, what sequences share: the call, and so many rounds for so many tokens."""
        call, _, each, _, _, passes = self._terms.weights
        result = each * rounds
        result += call * (rounds > 0)
        if self.runs_model:
            sizes = tokens / np.maximum(rounds, 1.0)
            result += passes * rounds * np.interp(sizes, *self._curve)
        return result

    def seconds_of(self, lengths: Sequence[int]) -> float:
        """For draft lengths above 0, one per sequence."""
        return self._terms.predict(self._features(lengths, 0))

    def update(self, lengths: Sequence[int], seconds: float, read: int) -> None:
        """Learns from one call.

        Args:
            lengths: draft lengths that were asked for, all above 0.
            seconds: that it took.
            read: tokens that were caught up with in it.
        """
        self._terms.update(self._features(lengths, read), max(seconds, 1e-9))

    def _features(self, lengths: Sequence[int], read: int) -> tuple[float, ...]:
        rounds, tokens = max(lengths), sum(lengths)
        passes = rounds * float(np.interp(tokens / rounds, *self._curve)) if self.runs_model else 0
        return 1.0, float(len(lengths)), float(rounds), float(tokens), float(read), float(passes)


class CostModel:
    """All of a step's times.

    Args:
        calibration: of the target; None = its scale is unknown.
        most_rows: most query tokens of a pass.
        draft_calibrations: of the models that drafters run, by drafter.
    """

    def __init__(
        self,
        calibration: Calibration | None = None,
        most_rows: int = 4096,
        draft_calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self.calibrated = calibration is not None
        self.target = VerifyCost(calibration or ASSUMED, most_rows)
        self._draft_calibrations = draft_calibrations or {}
        self.drafts: dict[str, DraftCost] = {}
        self._overhead = Terms((2e-4, 5e-5))  # by step and sequence; half of it between steps
        # A ratio of two sums: single differences are noise, negative half of the time.
        self._extra_seconds, self._extra_tokens = 5e-4, 50.0

    def draft(self, drafter: str) -> DraftCost:
        """The times of one drafter."""
        if drafter not in self.drafts:
            self.drafts[drafter] = DraftCost(self._draft_calibrations.get(drafter))
        return self.drafts[drafter]

    def overhead(self, batch: int) -> float:
        """Seconds of a plain step outside of its pass."""
        return self._overhead.predict((1.0, batch))

    @property
    def extra(self) -> float:
        """Seconds outside of pass and drafting that a draft token adds; never negative."""
        return max(self._extra_seconds / self._extra_tokens, 0.0)

    def plain_seconds(self, load: Load) -> float:
        """A step without speculation."""
        return self.target.predict(load) + self.overhead(load.batch)

    def observe_overhead(self, batch: int, tokens: int, seconds: float) -> None:
        """Learns from the time of a step outside of pass, drafting and planning.

        Args:
            batch: sequences that emitted.
            tokens: draft tokens that were checked.
            seconds: that it was.
        """
        usual = self.overhead(batch)
        if tokens == 0:
            self._overhead.update((1.0, batch), max(seconds, 1e-6))
        elif self._overhead.count >= 3:
            more = min(max(seconds - usual, -usual), _PAUSE * usual)
            self._extra_seconds = _KEEP * self._extra_seconds + more
            self._extra_tokens = _KEEP * self._extra_tokens + tokens
