"""Lanes against the baseline: ratios with confidence intervals, and equality of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from loadtest.measure import Answer
from loadtest.plan import Lane, Level
from loadtest.runner import BlockResult
from loadtest.stats import spread_of, successes, throughput

#: A number of some blocks, or None when it is unknown.
Statistic = Callable[[Sequence[BlockResult]], float | None]

#: Fewer paired rounds than this say too little about the spread between rounds.
MIN_ROUNDS = 4

_RESAMPLES = 1000


def _ttft(blocks: Sequence[BlockResult]) -> float | None:
    values = spread_of(answer.ttft for answer in successes(blocks))
    return values.p50 if values else None


def _tpot(blocks: Sequence[BlockResult]) -> float | None:
    values = spread_of(answer.tpot for answer in successes(blocks))
    return values.p50 if values else None


def _end_to_end(blocks: Sequence[BlockResult]) -> float | None:
    values = spread_of(answer.seconds for answer in successes(blocks))
    return values.p50 if values else None


#: What is compared. Throughput is a ratio of sums; the latencies are medians over requests.
STATISTICS: dict[str, Statistic] = {
    "tokens per second": throughput,
    "median TTFT": _ttft,
    "median TPOT": _tpot,
    "median end-to-end": _end_to_end,
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A lane's statistic over the baseline's, at one level.

    `low` and `high` bound the 95 % bootstrap confidence interval; None with fewer than
    `MIN_ROUNDS` paired rounds.
    """

    level: str
    lane: str
    baseline: str
    statistic: str
    baseline_value: float
    value: float
    ratio: float
    low: float | None
    high: float | None
    rounds: int


def ratios(
    results: Sequence[BlockResult], level: Level, baseline: Lane, lane: Lane, seed: int
) -> list[Ratio]:
    """Every statistic of `lane` over `baseline`, from rounds that both of them completed.

    The bootstrap draws whole rounds, the same for both lanes: requests of one block share
    their neighbours and are no independent samples; and a round's two blocks ran the same
    requests next to each other.
    """
    pairs = _paired_rounds(results, level, baseline, lane)
    found = []
    for name, statistic in STATISTICS.items():
        base = statistic([pair[0] for pair in pairs])
        value = statistic([pair[1] for pair in pairs])
        if base and value:
            low, high = _interval(pairs, statistic, Random(f"{seed}:{name}"))
            found.append(
                Ratio(
                    level=str(level),
                    lane=lane.name,
                    baseline=baseline.name,
                    statistic=name,
                    baseline_value=base,
                    value=value,
                    ratio=value / base,
                    low=low,
                    high=high,
                    rounds=len(pairs),
                )
            )
    return found


def _paired_rounds(
    results: Sequence[BlockResult], level: Level, baseline: Lane, lane: Lane
) -> list[tuple[BlockResult, BlockResult]]:
    done = {(r.block.lane.name, r.block.round): r for r in results if _usable(r, level)}
    rounds = sorted({number for _, number in done})
    keys = [((baseline.name, number), (lane.name, number)) for number in rounds]
    return [(done[a], done[b]) for a, b in keys if a in done and b in done]


def _usable(result: BlockResult, level: Level) -> bool:
    return result.complete and result.block.level == level and bool(successes([result]))


def _interval(
    pairs: Sequence[tuple[BlockResult, BlockResult]], statistic: Statistic, rng: Random
) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % points of the ratio over resampled rounds."""
    if len(pairs) < MIN_ROUNDS:
        return None, None
    values = []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        base, other = statistic([a for a, _ in drawn]), statistic([b for _, b in drawn])
        if base and other is not None:
            values.append(other / base)
    values.sort()
    last = len(values) - 1
    return (values[round(0.025 * last)], values[round(0.975 * last)]) if values else (None, None)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two lanes answered the same request differently; excerpts start a little before `at`."""

    level: str
    lane: str
    index: int
    turn: int
    category: str
    what: str  # "text", "finish_reason" or "output_tokens"
    at: int  # first differing character of the text
    baseline_excerpt: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Equality:
    """Answers of all lanes held against the baseline's.

    `skipped` pairs could not be compared: one of the two failed or was not asked.
    """

    compared: int
    skipped: int
    mismatches: tuple[Mismatch, ...]


def check_equal(results: Sequence[BlockResult], lanes: Sequence[Lane]) -> Equality:
    """Compares text, finish reason and token count, request by request, with the first lane."""
    answers = {
        (r.block.lane.name, str(r.block.level), record.index, record.turn): record
        for r in results
        for record in r.records
        if record.answer.error is None
    }
    asked = {key[1:] for key in answers}
    compared = 0
    mismatches = []
    for level, index, turn in sorted(asked):
        base = answers.get((lanes[0].name, level, index, turn))
        for lane in lanes[1:]:
            other = answers.get((lane.name, level, index, turn))
            if base is None or other is None:
                continue
            compared += 1
            if what := _difference(base.answer, other.answer):
                at = _first_difference(base.answer.text, other.answer.text)
                cut = slice(max(0, at - 20), at + 40)
                excerpts = base.answer.text[cut], other.answer.text[cut]
                mismatches.append(
                    Mismatch(level, lane.name, index, turn, base.category, what, at, *excerpts)
                )
    return Equality(compared, len(asked) * (len(lanes) - 1) - compared, tuple(mismatches))


def _difference(base: Answer, other: Answer) -> str | None:
    if base.text != other.text:
        return "text"
    if base.finish_reason != other.finish_reason:
        return "finish_reason"
    return "output_tokens" if base.output_tokens != other.output_tokens else None


def _first_difference(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
