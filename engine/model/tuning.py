"""Picks what is fast on this processor and slow on others, by timing passes at start.

How long before their use weights are fetched, and for how many rows: too late and a pass waits
for memory, too early and what was fetched is gone again; and some processors fetch by themselves.
No choice changes a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from engine.model.fewbit import FORMS
from engine.model.native import check_layouts, fields, load_kernels

#: Another choice than the usual one must be faster by so much, in the median of so many rounds, and
#: in all of them but one: less is noise.
_GAIN = 0.05
_ROUNDS = 9

#: What was chosen, by the name of what there was to choose.
Choices = Mapping[str, int]


class _Tuning(ctypes.Structure):
    """Mirrors `Tuning` in kernels/tuning.h."""

    _fields_ = fields(ctypes.c_int32, "dense_ahead dense_fetched fewbit_ahead fewbit_rows")


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing to choose.

    Attributes:
        name: in the kernels.
        values: the usual one first.
        rows: query tokens of the passes that show it best.
    """

    name: str
    values: tuple[int, ...]
    rows: int


DENSE = (Knob("dense_fetched", (7, 1, 1 << 20), 4), Knob("dense_ahead", (48, 24, 96), 8))
FEWBIT = (Knob("fewbit_ahead", (12, 4, 32), 1), Knob("fewbit_rows", (0, 3, 2), 8))


def knobs_for(kinds: str) -> tuple[Knob, ...]:
    """What there is to choose for weights of these kinds (see `WeightsInfo`)."""
    return FEWBIT if any(kind in FORMS for kind in kinds.split(", ")) else DENSE


def tune(seconds: Callable[[int], float], knobs: tuple[Knob, ...]) -> dict[str, int]:
    """Tries one thing after the other, and leaves the best applied.

    Args:
        seconds: what a pass of so many query tokens takes.
        knobs: what there is to choose.

    Returns:
        All of what was chosen.
    """
    chosen = {knob.name: knob.values[0] for knob in (*DENSE, *FEWBIT)}
    for knob in knobs:
        rounds: list[list[float]] = []
        for _ in range(_ROUNDS):  # in turn, since the machine's speed changes
            times = []
            for value in knob.values:
                apply({**chosen, knob.name: value})
                times.append(seconds(knob.rows))
            rounds.append(times)
        ratios = [median(times[i] / times[0] for times in rounds) for i in range(len(knob.values))]
        best = min(range(len(ratios)), key=ratios.__getitem__)
        slower = sum(times[best] >= times[0] for times in rounds)
        if ratios[best] < 1 - _GAIN and slower <= 1:
            chosen[knob.name] = knob.values[best]
    apply(chosen)
    return chosen


def apply(choices: Choices) -> None:
    """Has the kernels do so from the next pass on.

    Raises:
        NativeUnavailable: there are none.
        TypeError: something is not known.
    """
    library = load_kernels()
    check_layouts(library, _Tuning)
    library.specserve_tune.argtypes, library.specserve_tune.restype = [ctypes.c_void_p], None
    library.specserve_tune(ctypes.byref(_Tuning(**choices)))
