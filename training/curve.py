"""A lesson as a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path


def draw_curve(path: Path, curve: Sequence[tuple[int, float, tuple[float, ...]]]) -> None:
    """The training curve as a picture, where matplotlib is there."""
    with contextlib.suppress(ImportError):
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        steps = [entry[0] for entry in curve]
        left.plot(steps, [entry[1] for entry in curve], marker="o")
        left.set(xlabel="steps", ylabel="loss, mean of the epoch")
        for depth, shares in enumerate(zip(*(entry[2] for entry in curve), strict=True), start=1):
            right.plot(steps, shares, marker="o", label=f"depth {depth}")
        right.set(xlabel="steps", ylabel="kept, held out", ylim=(0, 1))
        right.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)
