"""Draws speed-ups by number of streams from runs of the load generator.

python -m loadtest run --target off=URL --target auto=URL ... --concurrency 4 --output DIR/4
python tools/plot_lengths.py DIR/*/results.json --output docs/lengths.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(paths: list[Path]) -> dict[str, list[tuple[int, float, float, float]]]:
    """By lane: streams, ratio of tokens per second to the first lane, and its 95 % interval."""
    lanes: dict[str, list[tuple[int, float, float, float]]] = defaultdict(list)
    for path in paths:
        for ratio in json.loads(path.read_text("utf-8"))["ratios"]:
            if ratio["statistic"] == "tokens per second":
                streams = int(ratio["level"].removeprefix("concurrency "))
                lanes[ratio["lane"]].append((streams, ratio["ratio"], ratio["low"], ratio["high"]))
    return {lane: sorted(points) for lane, points in lanes.items()}


def main() -> None:
    """Writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.axhline(1.0, color="black", linewidth=1, label="off")
    lanes = read(options.results)
    for number, (lane, points) in enumerate(lanes.items()):
        streams, ratios, lows, highs = zip(*points, strict=True)
        spread = (
            [r - low for r, low in zip(ratios, lows, strict=True)],
            [high - r for r, high in zip(ratios, highs, strict=True)],
        )
        places = [n * 1.04 ** (number - len(lanes) / 2) for n in streams]
        width = 2.5 if lane == "auto" else 1.2
        axes.errorbar(places, ratios, spread, label=lane, linewidth=width, marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    ticks = sorted({n for points in lanes.values() for n, *_ in points})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("concurrent streams")
    axes.set_ylabel("tokens per second over off")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
