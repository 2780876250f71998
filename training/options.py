"""What head to make, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError

KINDS = ("eagle",)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What head to make, and how long it may take.

    Args:
        target: directory of the target.
        source: what the user called the target.
        out: directory of the head; what is worked with lies beside it, in `OUT-work`.
        kind: of head.
        prompts: a file of questions to answer; None = the target thinks of some itself.
        tokens: answer tokens to train on.
        minutes: for everything together; what earlier runs took counts.
        draft_vocab: tokens that the head may guess, the most frequent ones.
        depth: rounds that are trained one after the other.
        epochs: at most, within the time.
        learning_rate: at its peak.
        seed: of text, order and what is held out.
        threads: compute threads.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    target: Path
    source: str
    out: Path
    kind: str = "eagle"
    prompts: Path | None = None
    tokens: int = 500_000
    minutes: float = 60.0
    draft_vocab: int = 8192
    depth: int = 4
    epochs: int = 10
    learning_rate: float = 5e-4
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}.")
        for name, least in (("tokens", 1), ("draft_vocab", 1), ("epochs", 1), ("threads", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(f"{name} is {value}; it must be {least} or more.")
        if not 1 <= self.depth <= 8:
            raise ConfigurationError(f"depth is {self.depth}; it must be from 1 to 8.")
        if not 0 < self.minutes < float("inf"):
            raise ConfigurationError(f"minutes is {self.minutes}; it must be above 0.")
        if not 0 < self.learning_rate < 1:
            raise ConfigurationError(
                f"learning_rate is {self.learning_rate}; it must lie between 0 and 1."
            )

    @property
    def work(self) -> Path:
        """Where text, features and the state of the lesson are kept."""
        return self.out.with_name(f"{self.out.name}-work")
