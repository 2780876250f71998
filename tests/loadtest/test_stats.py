from __future__ import annotations

import pytest

from loadtest.measure import Answer
from loadtest.stats import Slo, error_rate, spread, spread_of, summarise, throughput
from tests.loadtest.making import LEVEL, OFF, answer, result


def test_quantiles_weigh_samples_by_tokens() -> None:
    values = spread([(1.0, 98), (5.0, 2)])
    assert values is not None
    assert (values.count, values.p50, values.p90, values.p99) == (100, 1.0, 1.0, 5.0)
    assert values.mean == pytest.approx(1.08)


def test_unknown_values_are_left_out_and_nothing_has_no_spread() -> None:
    values = spread_of([None, 2.0, 4.0, 9.0])
    assert values is not None
    assert (values.count, values.p50) == (3, 4.0)
    assert spread_of([None]) is None


def test_throughput_is_a_ratio_of_sums() -> None:
    blocks = [result(OFF, 0, [answer(10)], 1.0), result(OFF, 1, [answer(10)], 4.0)]
    assert throughput(blocks) == pytest.approx(20 / 5)  # and not (10 + 2.5) / 2
    summary = summarise(OFF, LEVEL, blocks, Slo())
    assert summary.tokens_per_second == pytest.approx(4.0)
    assert summary.median_tokens_per_second == pytest.approx(6.25)


def test_failed_requests_bring_no_tokens_and_are_counted_by_kind() -> None:
    answers = [answer(10), answer(10, error="timeout"), answer(10, error="http 503")]
    summary = summarise(OFF, LEVEL, [result(OFF, 0, answers, 2.0)], Slo())
    assert (summary.requests, summary.failed) == (3, 2)
    assert summary.errors == {"timeout": 1, "http 503": 1}
    assert summary.output_tokens == 10
    assert summary.requests_per_second == pytest.approx(0.5)
    assert summary.ttft is not None
    assert summary.ttft.count == 1


def test_one_answer_without_usage_makes_token_numbers_unknown() -> None:
    summary = summarise(OFF, LEVEL, [result(OFF, 0, [answer(10), answer(None)])], Slo())
    assert summary.output_tokens is None
    assert summary.tokens_per_second is None
    assert summary.median_tokens_per_second is None
    assert summary.requests_per_second == pytest.approx(2.0)


def test_goodput_counts_requests_that_keep_to_both_limits() -> None:
    answers = [
        answer(8, first=0.5, last=1.2),  # TPOT 0.1
        answer(8, first=0.9, last=1.6),  # starts too late
        answer(8, first=0.5, last=7.5),  # TPOT 1.0: too slow
        answer(8, error="timeout"),
    ]
    block = result(OFF, 0, answers, 2.0)
    summary = summarise(OFF, LEVEL, [block], Slo(ttft=0.6, tpot=0.2))
    assert summary.goodput == pytest.approx(1 / 2.0)
    assert summary.good_share == pytest.approx(1 / 4)
    assert summarise(OFF, LEVEL, [block], Slo()).goodput is None


def test_goodput_is_unknown_where_tpot_cannot_be_judged() -> None:
    block = result(OFF, 0, [answer(None)])
    assert summarise(OFF, LEVEL, [block], Slo(tpot=1.0)).goodput is None
    assert summarise(OFF, LEVEL, [block], Slo(ttft=1.0)).goodput == pytest.approx(1.0)


def test_tokens_per_chunk() -> None:
    summary = summarise(OFF, LEVEL, [result(OFF, 0, [answer(9)])], Slo())
    assert summary.tokens_per_chunk == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("answers", "rate"),
    [([], 1.0), ([answer()], 0.0), ([answer(), answer(error="stream")], 0.5)],
)
def test_error_rate(answers: list[Answer], rate: float) -> None:
    assert error_rate([result(OFF, 0, answers)]) == rate
