"""Numbers of one lane at one level. Times are seconds; unknown is None, never 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.measure import Answer
from loadtest.plan import Lane, Level
from loadtest.runner import BlockResult


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread over `count` samples (tokens, for latencies by token)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, in seconds; None = no limit."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is reported of one lane at one level, over all its rounds.

    Args:
        seconds: sum of the windows of its blocks.
        output_tokens: of successful requests; None when a server sent no usage.
        tokens_per_second: output tokens / seconds: a ratio of sums.
        median_tokens_per_second: the median over rounds.
        tokens_per_chunk: output tokens / chunks, where chunks are counted.
        tokens_per_pass: output tokens / passes of the model, where a server tells those.
        acceptance: accepted / checked draft tokens, the same; None without any.
        goodput: successful requests a second that kept to the SLO; None without an SLO.
        good_share: the same as a share of all requests.
        errors: failed requests by kind.
    """

    lane: str
    level: str
    rounds: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    requests_per_second: float | None
    tokens_per_second: float | None
    median_tokens_per_second: float | None
    tokens_per_chunk: float | None
    tokens_per_pass: float | None
    acceptance: float | None
    ttft: Spread | None
    tpot: Spread | None
    inter_token: Spread | None
    chunk_gap: Spread | None
    end_to_end: Spread | None
    goodput: float | None
    good_share: float | None
    max_in_flight: int
    client_lag: float
    errors: Mapping[str, int]


def spread(samples: Iterable[tuple[float, int]]) -> Spread | None:
    """Mean and quantiles of (value, weight) samples; None without any.

    The q-quantile is the smallest value at or below which lies a share q of the weight.
    """
    ordered = sorted(samples)
    total = sum(weight for _, weight in ordered)
    if total == 0:
        return None
    points = {0.5: 0.0, 0.9: 0.0, 0.99: 0.0}
    for share in points:
        reached = 0
        for value, weight in ordered:
            reached += weight
            if reached >= share * total:
                points[share] = value
                break
    mean = sum(value * weight for value, weight in ordered) / total
    return Spread(total, mean, points[0.5], points[0.9], points[0.99])


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """`spread` of equally weighted values; None among them are left out."""
    return spread((value, 1) for value in values if value is not None)


def successes(blocks: Iterable[BlockResult]) -> list[Answer]:
    """The answers that did not fail."""
    return [r.answer for block in blocks for r in block.records if r.answer.error is None]


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None as soon as one count is unknown."""
    return None if None in counts else sum(count for count in counts if count is not None)


def throughput(blocks: Sequence[BlockResult]) -> float | None:
    """Output tokens a second: all tokens of successful requests / all seconds."""
    tokens = total([answer.output_tokens for answer in successes(blocks)])
    seconds = sum(block.seconds for block in blocks)
    return None if tokens is None or seconds <= 0 else tokens / seconds


def summarise(lane: Lane, level: Level, blocks: Sequence[BlockResult], slo: Slo) -> Summary:
    """The summary of the blocks of one lane at one level, at least one."""
    answers = [record.answer for block in blocks for record in block.records]
    good = successes(blocks)
    seconds = sum(block.seconds for block in blocks)
    by_round = [throughput([block]) for block in blocks]
    kept = _within(good, slo)
    return Summary(
        lane=lane.name,
        level=str(level),
        rounds=len(blocks),
        requests=len(answers),
        failed=len(answers) - len(good),
        seconds=seconds,
        prompt_tokens=total([answer.prompt_tokens for answer in good]),
        cached_tokens=total([answer.cached_tokens for answer in good]),
        output_tokens=total([answer.output_tokens for answer in good]),
        requests_per_second=len(good) / seconds if seconds > 0 else None,
        tokens_per_second=throughput(blocks),
        median_tokens_per_second=median([rate for rate in by_round if rate is not None])
        if any(rate is not None for rate in by_round)
        else None,
        tokens_per_chunk=_tokens_per_chunk(good),
        tokens_per_pass=_share([a.output_tokens for a in good], [a.passes for a in good]),
        acceptance=_share([a.accepted for a in good], [a.drafted for a in good]),
        ttft=spread_of(answer.ttft for answer in good),
        tpot=spread_of(answer.tpot for answer in good),
        inter_token=spread(gap for answer in good for gap in answer.token_gaps()),
        chunk_gap=spread_of(gap for answer in good for gap in answer.chunk_gaps()),
        end_to_end=spread_of(answer.seconds for answer in good),
        goodput=kept / seconds if kept is not None and seconds > 0 else None,
        good_share=kept / len(answers) if kept is not None and answers else None,
        max_in_flight=max(block.max_in_flight for block in blocks),
        client_lag=max(block.lag for block in blocks),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def _tokens_per_chunk(answers: Iterable[Answer]) -> float | None:
    counts = [chunk.tokens for a in answers if a.counted for chunk in a.chunks if chunk.tokens]
    return sum(counts) / len(counts) if counts else None


def _share(parts: Sequence[int | None], wholes: Sequence[int | None]) -> float | None:
    """The sum of the ones over that of the others; None where either is unknown, or of nothing."""
    part, whole = total(parts), total(wholes)
    return part / whole if part is not None and whole else None


def _within(answers: Iterable[Answer], slo: Slo) -> int | None:
    """Requests that kept to the SLO; None without an SLO, or when it cannot be judged."""
    if slo.ttft is None and slo.tpot is None:
        return None
    kept = 0
    for answer in answers:
        if slo.tpot is not None and answer.output_tokens is None:
            return None
        slow_start = slo.ttft is not None and (answer.ttft or 0.0) > slo.ttft
        # No TPOT means that nothing came after the first chunk: there was nothing to wait for.
        slow_tokens = slo.tpot is not None and (answer.tpot or 0.0) > slo.tpot
        kept += not (slow_start or slow_tokens)
    return kept


def error_rate(results: Iterable[BlockResult]) -> float:
    """Share of requests that failed; 1.0 when none was sent at all."""
    answers = [record.answer for block in results for record in block.records]
    failed = sum(answer.error is not None for answer in answers)
    return failed / len(answers) if answers else 1.0
