"""What answers took, in words. What nobody knows is "unknown"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from server.terminal.answer import Answer


def running(answer: Answer) -> str:
    """The line under an answer that is still coming."""
    if answer.first_seconds is None:
        return "waiting for the first token · ctrl-c stops"
    parts = [f"{answer.tokens} tokens"] if answer.tokens else []
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tokens/s")
    return " · ".join([*parts, "ctrl-c stops"])


def summary(answer: Answer) -> str:
    """The line under a whole answer."""
    parts = [_count(answer.tokens, "token")]
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tokens/s")
    if answer.first_seconds is not None:
        parts.append(f"first after {answer.first_seconds:.2f} s")
    if answer.guesses is not None and answer.guesses[1]:
        parts.append(f"{answer.guesses[0]} of {answer.guesses[1]} guesses kept")
    if answer.tokens_per_pass is not None:
        parts.append(f"{answer.tokens_per_pass:.2f} tokens a pass")
    if answer.speculation:
        parts.append(f"speed-up {times(answer.speedup)}")
    if answer.stopped:
        parts.append("stopped")
    return " · ".join(parts)


def times(factor: float | None) -> str:
    """A factor, or that it is not known."""
    return "unknown" if factor is None else f"{factor:.2f}×"


def table(answers: Sequence[Answer], status: Mapping[str, Any]) -> Table:
    """The last answer beside all of the session.

    Args:
        answers: at least one.
        status: of the server's speculation; may be empty.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    made.add_column("", style="dim")
    made.add_column("last answer", justify="right")
    made.add_column("session", justify="right")
    last, every = _column(answers[-1:]), _column(answers)
    for name, value in last.items():
        made.add_row(name, value, every[name])
    if server := status.get("speedup"):
        low, high = server.get("low"), server.get("high")
        between = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        made.caption_justify = "left"
        made.caption = f"speed-up of all the server's answers: {times(server['ratio'])}{between}"
    return made


def _column(answers: Sequence[Answer]) -> dict[str, str]:
    decoded = [answer.decoding for answer in answers if answer.decoding is not None]
    seconds = sum(pair[1] for pair in decoded)
    firsts = [a.first_seconds for a in answers if a.first_seconds is not None]
    counted = [(a.tokens_per_pass, a.passes) for a in answers]
    known = [(rate, passes) for rate, passes in counted if rate is not None and passes is not None]
    fast = [(a.speedup, a.passes) for a in answers if a.speedup is not None]
    weighed = [(speedup, passes) for speedup, passes in fast if passes is not None]
    guesses = [a.guesses for a in answers if a.guesses is not None]
    drafted = sum(pair[1] for pair in guesses)
    rate = sum(pair[0] for pair in decoded) / seconds if seconds else None
    per_pass, speedup = _mean(known), _mean(weighed)
    return {
        "answers": str(len(answers)),
        "tokens": str(sum(answer.tokens or 0 for answer in answers)),
        "tokens/s": "unknown" if rate is None else f"{rate:.1f}",
        "first token": f"{median(firsts):.2f} s" if firsts else "unknown",
        "tokens a pass": "unknown" if per_pass is None else f"{per_pass:.2f}",
        "guesses kept": f"{sum(pair[0] for pair in guesses)} of {drafted} "
        f"({100 * sum(pair[0] for pair in guesses) / drafted:.0f} %)"
        if drafted
        else ("none made" if guesses else "unknown"),
        "speed-up": times(speedup),
    }


def _mean(weighed: Sequence[tuple[float, int]]) -> float | None:
    """Each value weighs as much as its passes."""
    passes = sum(weight for _, weight in weighed)
    return sum(value * weight for value, weight in weighed) / passes if passes else None


def _count(number: int | None, noun: str) -> str:
    return f"unknown {noun}s" if number is None else f"{number} {noun}{'s' * (number != 1)}"
