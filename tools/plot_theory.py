"""Draws docs/theory.png from the formulas of server/cli/formulas.py.

    pip install matplotlib
    python tools/plot_theory.py            # writes docs/theory.png

Left: speed-up by draft length for a memory-bound target, with the best length marked. Right:
the best speed-up by batch size on machines that become compute-bound at different knees.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server.cli.formulas import best_draft, roofline, speedup

TARGET = Path(__file__).parent.parent / "docs" / "theory.png"

DRAFT_COST = 0.05
ACCEPTANCES = (0.3, 0.5, 0.7, 0.8, 0.9)
KNEES = ((6, "2-core CPU"), (64, "mid-range GPU"), (206, "H200"))


def plot_lengths(axes: Axes) -> None:
    """Speed-up by draft length."""
    lengths = range(17)
    for acceptance in ACCEPTANCES:
        gains = [speedup(acceptance, k, DRAFT_COST) for k in lengths]
        (line,) = axes.plot(lengths, gains, label=f"acceptance {acceptance}")
        best, gain = best_draft(acceptance, DRAFT_COST, longest=16)
        axes.plot([best], [gain], "o", color=line.get_color())
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("draft length k")
    axes.set_ylabel("speed-up")
    axes.set_title(f"Memory-bound target, draft cost c = {DRAFT_COST}")
    axes.legend()


def plot_batches(axes: Axes) -> None:
    """Best speed-up by batch size."""
    batches = range(1, 257)
    for knee, name in KNEES:
        gains = [best_draft(0.7, DRAFT_COST, roofline(batch, knee))[1] for batch in batches]
        axes.plot(batches, gains, label=f"{name}, knee {knee}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("decoding sequences B")
    axes.set_ylabel("speed-up at the best draft length")
    axes.set_title(f"Acceptance 0.7, draft cost c = {DRAFT_COST}")
    axes.legend()


def main() -> None:
    """Writes the picture."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_lengths(left)
    plot_batches(right)
    figure.savefig(TARGET, dpi=110)
    print(TARGET)


if __name__ == "__main__":
    main()
