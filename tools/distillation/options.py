"""What to make, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """What to make, and how long it may take.

    Args:
        target: directory of the target.
        source: what the user called the target.
        out: directory of the draft model.
        text: directory where text and labels are kept.
        tokens: answer tokens to generate.
        minutes: for everything together.
    """

    target: Path
    source: str
    out: Path
    text: Path
    layers: int = 2
    tokens: int = 300_000
    minutes: float = 45.0
    epochs: int = 8
    seed: int = 0
    threads: int = 2
    learning_rate: float = 3e-3
