from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from loadtest.asking import Asking
from loadtest.client import Client
from loadtest.measure import Answer
from loadtest.plan import Arm, Block, Lane, Level, Prompt, Target, lay_out, make_lanes
from loadtest.runner import DEAD_AFTER, BlockResult, Runner
from tests.loadtest.fake_server import FakeServer

ARMS = [
    Arm("off", {"speculation": {"enabled": False}}),
    Arm("on", {"speculation": {"enabled": True}}),
]
PROMPTS = [Prompt((f"prompt {i}",), f"category {i % 2}") for i in range(5)]


class Quiet:
    """Progress that only counts, and may act on an answer."""

    def __init__(self) -> None:
        self.answers = 0
        self.blocks: list[str] = []
        self.on_answer: Callable[[], None] = lambda: None

    def block_started(self, block: Block) -> None:
        self.blocks.append(str(block))

    def answered(self, answer: Answer) -> None:
        assert answer.seconds >= 0
        self.answers += 1
        self.on_answer()

    def block_finished(self, result: BlockResult) -> None:
        assert str(result.block) == self.blocks[-1]


def lanes_of(server: FakeServer) -> list[Lane]:
    return make_lanes([Target("server", server.url, "m")], ARMS)


def run(
    blocks: Sequence[Block],
    prompts: Sequence[Prompt] = PROMPTS,
    duration: float | None = None,
    stop_after: int | None = None,
    **asking: Any,
) -> list[BlockResult]:
    async def work() -> list[BlockResult]:
        progress = Quiet()
        async with Client(20.0) as client:
            runner = Runner(client, Asking(**asking), prompts, progress)
            if stop_after is not None:
                progress.on_answer = lambda: (
                    runner.stop() if progress.answers >= stop_after else None
                )
            results = await runner.run(blocks, duration)
        assert progress.answers == sum(len(result.records) for result in results)
        return results

    return asyncio.run(work())


def test_closed_loop_keeps_the_concurrency_and_asks_everything_once(server: FakeServer) -> None:
    server.script.together = 3
    (result,) = run(lay_out(Level("concurrency", 3), lanes_of(server)[:1], 1, 12))
    assert server.max_in_flight == result.max_in_flight == 3
    # Records lie in the order in which their answers ended, which is nobody's promise.
    records = sorted(result.records, key=lambda record: record.index)
    assert [record.index for record in records] == list(range(12))
    assert all(record.answer.output_tokens == 8 for record in records)
    assert [record.category for record in records] == [
        PROMPTS[index % len(PROMPTS)].category for index in range(12)
    ]
    assert result.complete
    last = max(r.answer.started + r.answer.seconds for r in result.records)
    first = min(r.answer.started for r in result.records)
    assert result.seconds >= last - first


def test_only_one_arm_runs_at_a_time_in_abba_order_with_equal_requests(server: FakeServer) -> None:
    server.script.delay = 0.002
    run(lay_out(Level("concurrency", 2), lanes_of(server), rounds=4, requests=16))
    order = [seen.body["speculation"]["enabled"] for seen in server.seen]
    assert order == [False] * 4 + [True] * 8 + [False] * 8 + [True] * 8 + [False] * 4
    for number in range(0, 32, 4):  # blocks do not overlap
        before, after = server.seen[:number], server.seen[number : number + 4]
        assert all(a.ended <= b.started for a in before for b in after)
    by_arm: list[list[Any]] = [[], []]
    for seen in server.seen:
        by_arm[seen.body.pop("speculation")["enabled"]].append(seen.body)

    def key(body: dict[str, Any]) -> int:
        return int(body["seed"])

    assert sorted(by_arm[0], key=key) == sorted(by_arm[1], key=key)


def test_open_loop_starts_without_waiting_for_answers(server: FakeServer) -> None:
    server.script.together = 20  # whoever waits for an answer first gets none
    (result,) = run(lay_out(Level("rate", 200.0), lanes_of(server)[:1], 1, 20))
    assert len(result.records) == 20
    assert all(record.answer.error is None for record in result.records)
    assert result.max_in_flight == 20
    starts = sorted(record.answer.started for record in result.records)
    assert len(set(starts)) == 20  # Poisson arrivals, not a burst


def test_open_loop_arrivals_are_the_same_in_both_lanes(server: FakeServer) -> None:
    results = run(lay_out(Level("rate", 500.0), lanes_of(server), rounds=1, requests=10))
    gaps = []
    for result in results:
        starts = [r.answer.started for r in sorted(result.records, key=lambda r: r.index)]
        gaps.append([start - starts[0] for start in starts])
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-9)


def test_turns_of_a_conversation_follow_one_another(server: FakeServer) -> None:
    server.script.chunks = (2,)
    prompts = [Prompt(("first", "second"))]
    blocks = lay_out(Level("concurrency", 1), lanes_of(server)[:1], 1, 1)
    (result,) = run(blocks, prompts)
    assert [(record.index, record.turn) for record in result.records] == [(0, 0), (0, 1)]
    assert server.seen[1].body["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "t0 t1 "},
        {"role": "user", "content": "second"},
    ]
    (result,) = run(blocks, prompts, max_turns=1)
    assert len(result.records) == 1


def test_a_conversation_ends_where_a_turn_fails(server: FakeServer) -> None:
    server.script.fail = "http"
    blocks = lay_out(Level("concurrency", 1), lanes_of(server)[:1], 1, 2)
    (result,) = run(blocks, [Prompt(("first", "second"))])
    assert [(record.index, record.turn) for record in result.records] == [(0, 0), (1, 0)]
    assert [record.answer.error for record in result.records] == ["http 503"] * 2


def test_each_block_can_have_a_prefix_cache_of_its_own(server: FakeServer) -> None:
    blocks = lay_out(Level("concurrency", 1), lanes_of(server), rounds=2, requests=4)
    run(blocks, isolate_cache=True)
    salts = [seen.body["cache_salt"] for seen in server.seen]
    assert len(set(salts)) == 4
    assert all(salts[i] == salts[i + 1] for i in range(0, 8, 2))
    run(blocks, isolate_cache=True)
    assert not {seen.body["cache_salt"] for seen in server.seen[8:]} & set(salts)
    run(blocks)
    assert "cache_salt" not in server.seen[-1].body


def test_time_bounds_a_run_and_every_lane_gets_a_share(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # a clock that goes on by 0.1 s each time it is looked at
    monkeypatch.setattr("loadtest.runner.perf_counter", lambda: next(ticks) / 10)
    monkeypatch.setattr("loadtest.runner._LAG_INTERVAL", 3600.0)
    blocks = lay_out(Level("concurrency", 2), lanes_of(server), rounds=2, requests=None)
    results = run(blocks, duration=6.0)
    assert [result.block for result in results] == blocks
    assert all(result.complete for result in results)
    assert all(5 <= len(result.records) <= 16 for result in results)
    assert all(record.answer.error is None for r in results for record in r.records)


def test_stop_cuts_what_is_in_flight_and_keeps_what_is_finished(server: FakeServer) -> None:
    server.script.delay = 0.01
    blocks = lay_out(Level("concurrency", 2), lanes_of(server), rounds=2, requests=40)
    results = run(blocks, stop_after=5)
    assert len(results) == 1
    assert not results[0].complete
    assert 5 <= len(results[0].records) <= 6
    assert all(record.answer.error is None for record in results[0].records)
    assert results[0].seconds > 0


def test_a_dead_server_does_not_keep_the_run_busy() -> None:
    lane = Lane("dead", Target("dead", "http://127.0.0.1:1", "m"), Arm("plain"))
    (result,) = run(lay_out(Level("concurrency", 1), [lane], 1, None), duration=60.0)
    assert len(result.records) == DEAD_AFTER
    assert {record.answer.error for record in result.records} == {"connection"}


def test_warm_up_is_not_measured(server: FakeServer) -> None:
    async def work() -> Quiet:
        progress = Quiet()
        async with Client(20.0) as client:
            runner = Runner(client, Asking(), PROMPTS, progress)
            await runner.warm_up(lanes_of(server)[1], requests=7, concurrency=3)
        return progress

    assert asyncio.run(work()).answers == 0
    assert len(server.seen) == 7
    assert all(seen.body["speculation"] == {"enabled": True} for seen in server.seen)
