from __future__ import annotations

from random import Random

import pytest

from loadtest.compare import MIN_ROUNDS, check_equal, ratios
from loadtest.measure import Answer
from loadtest.runner import BlockResult
from tests.loadtest.making import LEVEL, OFF, ON, answer, result


def rounds(seconds_off: list[float], seconds_on: list[float]) -> list[BlockResult]:
    off = [result(OFF, i, [answer(10)], s) for i, s in enumerate(seconds_off)]
    on = [result(ON, i, [answer(10)], s) for i, s in enumerate(seconds_on)]
    return off + on


def test_the_ratio_is_one_of_sums_and_its_interval_holds_it() -> None:
    results = rounds([2.0, 2.2, 1.8, 2.0, 2.1, 1.9], [1.0, 1.2, 0.9, 1.0, 1.0, 1.1])
    ratio = ratios(results, LEVEL, OFF, ON, seed=0)[0]
    assert ratio.statistic == "tokens per second"
    assert ratio.ratio == pytest.approx(12.0 / 6.2)
    assert ratio.rounds == 6
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.7 < ratio.low < ratio.ratio < ratio.high < 2.2
    assert ratio == ratios(results, LEVEL, OFF, ON, seed=0)[0]  # seeded


def test_pairing_takes_drift_out_of_the_interval() -> None:
    seconds = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # a machine that gets slower and slower
    ratio = ratios(rounds(seconds, [s / 2 for s in seconds]), LEVEL, OFF, ON, seed=0)[0]
    assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # 10 rounds of noise around a true ratio of 1. A percentile bootstrap over 10 rounds covers
    # about 90 %; fewer than 28 of 40 then has odds below 1 in 10000 (and the seed is fixed).
    rng = Random(0)
    covered = 0
    for seed in range(40):
        noise = [[rng.lognormvariate(0, 0.2) for _ in range(10)] for _ in range(2)]
        results = [
            result(lane, i, [answer(10)], s)
            for lane, times in zip((OFF, ON), noise, strict=True)
            for i, s in enumerate(times)
        ]
        ratio = ratios(results, LEVEL, OFF, ON, seed=seed)[0]
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered >= 28


def test_too_few_rounds_have_no_interval() -> None:
    ratio = ratios(rounds([1.0] * (MIN_ROUNDS - 1), [1.0] * (MIN_ROUNDS - 1)), LEVEL, OFF, ON, 0)[0]
    assert (ratio.low, ratio.high) == (None, None)


def test_only_rounds_that_both_lanes_completed_are_compared() -> None:
    results = rounds([1.0, 1.0], [1.0])
    results.append(result(ON, 1, [answer(10)], 99.0, complete=False))
    ratio = ratios(results, LEVEL, OFF, ON, seed=0)[0]
    assert (ratio.rounds, ratio.ratio) == (1, pytest.approx(1.0))
    assert ratios([], LEVEL, OFF, ON, seed=0) == []


def test_latencies_are_compared_too() -> None:
    results = [
        result(OFF, 0, [answer(8, first=0.4, last=1.1)]),
        result(ON, 0, [answer(8, first=0.2, last=0.55)]),
    ]
    found = {r.statistic: r.ratio for r in ratios(results, LEVEL, OFF, ON, seed=0)}
    assert found["median TTFT"] == pytest.approx(0.5)
    assert found["median TPOT"] == pytest.approx(0.5)
    assert found["median end-to-end"] == pytest.approx(0.5)


def equal(off: list[Answer], on: list[Answer]) -> tuple[int, int, list[str]]:
    found = check_equal([result(OFF, 0, off), result(ON, 0, on)], [OFF, ON])
    return found.compared, found.skipped, [m.what for m in found.mismatches]


def test_equal_answers_are_equal() -> None:
    assert equal([answer(), answer()], [answer(), answer()]) == (2, 0, [])


def test_a_different_text_is_found_with_its_place() -> None:
    results = [
        result(OFF, 0, [answer(text="the same"), answer(text="a" * 50 + "bc")]),
        result(ON, 0, [answer(text="the same"), answer(text="a" * 50 + "xc")]),
    ]
    (mismatch,) = check_equal(results, [OFF, ON]).mismatches
    assert (mismatch.lane, mismatch.index, mismatch.at) == ("on", 1, 50)
    assert mismatch.baseline_excerpt == "a" * 20 + "bc"
    assert mismatch.excerpt == "a" * 20 + "xc"


def test_a_text_that_ends_early_is_different() -> None:
    results = [result(OFF, 0, [answer(text="abc")]), result(ON, 0, [answer(text="ab")])]
    assert check_equal(results, [OFF, ON]).mismatches[0].at == 2


def test_a_different_token_count_is_different() -> None:
    assert equal([answer(8)], [answer(9)]) == (1, 0, ["output_tokens"])


def test_failures_are_not_compared() -> None:
    assert equal([answer()], [answer(text="other", error="timeout")]) == (0, 1, [])
