from __future__ import annotations

import pytest

from loadtest.plan import UNBOUNDED, Arm, Level, Target, UsageError, lay_out, make_lanes
from tests.loadtest.making import LEVEL, OFF, ON


def test_lanes_alternate_abba_over_the_same_requests() -> None:
    blocks = lay_out(LEVEL, [OFF, ON], rounds=4, requests=12)
    assert [block.lane.name for block in blocks] == ["off", "on", "on", "off"] * 2
    for number in range(4):
        pair = [block.indices for block in blocks if block.round == number]
        assert pair[0] == pair[1] == range(3 * number, 3 * number + 3)


def test_the_last_round_takes_what_does_not_divide() -> None:
    blocks = lay_out(LEVEL, [OFF], rounds=3, requests=11)
    assert [len(block.indices) for block in blocks] == [3, 3, 5]


def test_time_bounded_rounds_have_requests_enough() -> None:
    blocks = lay_out(LEVEL, [OFF], rounds=2, requests=None)
    assert [len(block.indices) for block in blocks] == [UNBOUNDED, UNBOUNDED]
    assert blocks[0].indices[-1] < blocks[1].indices[0]


def test_a_round_that_cannot_reach_its_concurrency_is_refused() -> None:
    with pytest.raises(UsageError, match="Ask for at least 64 requests"):
        lay_out(Level("concurrency", 16), [OFF, ON], rounds=4, requests=32)


def test_a_round_without_requests_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 6 requests"):
        lay_out(Level("rate", 0.5), [OFF, ON], rounds=6, requests=5)


def test_lane_names_are_short_where_they_can_be() -> None:
    a, b = Target("a", "http://a"), Target("b", "http://b")
    on, off = Arm("on"), Arm("off")
    assert [lane.name for lane in make_lanes([a], [off, on])] == ["off", "on"]
    assert [lane.name for lane in make_lanes([a, b], [off])] == ["a", "b"]
    names = [lane.name for lane in make_lanes([a, b], [off, on])]
    assert names == ["a/off", "a/on", "b/off", "b/on"]
