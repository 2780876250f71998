"""The promise of the engine: drafts, company, pages and preemption never change an answer."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from engine.types import FinishReason, Request, SpeculationParams
from tests.drafters import Answers, adversaries
from tests.fakes import Run, Setup, ask, make_engine, run, tiny
from tests.tiny_models import FAMILIES, VOCAB, generated, load

COUNT = 20
DRAFTERS = ("none", "lookup", *adversaries({}))
LENGTHS, PAGE_SIZES = (1, 2, 4, 8), (1, 8, 16)
#: What one family's cases go through (draft length, page size), and of the rest one a case.
FEW = [(1, 16), (4, 1), (8, 8)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Sixteen prompts: short, long, repetitive, and with a common beginning."""
    dice = random.Random(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(VOCAB) for _ in range(count))

    start = some(20)
    repeats = tuple(some(4) * 5 for _ in range(4))
    shared = tuple(start + some(n) for n in (1, 2, 9))
    return (start, *shared, *repeats, *(some(n) for n in (1, 2, 7, 8, 9, 15, 33, 70)))


def greedy(count: int = COUNT) -> list[Request]:
    """One greedy request per prompt, which nothing but its length ends."""
    return [ask(f"r{i}", p, count, ignore_eos=True) for i, p in enumerate(prompts())]


@functools.cache
def truth(family: str) -> Answers:
    """What transformers generates."""
    return {(p, 0): generated(family, p, COUNT) for p in prompts()}


def check_truth(done: Run, family: str) -> None:
    """Every answer is transformers', token by token."""
    for request_id, request in done.requests.items():
        expected = truth(family)[request.prompt, 0][: request.sampling.max_tokens]
        assert done.answers[request_id].tokens == expected
        end = done.answers[request_id].choices[0].end
        assert end is not None
        assert end.reason is FinishReason.LENGTH


def check_books(done: Run) -> None:
    """Statistics of steps, statistics of choices, events and drafts tell the same story."""
    ends = [c.end for a in done.answers.values() for c in a.choices.values()]
    stats = [end.stats for end in ends if end]
    accepted = [n for s in done.stats for n in s.accepted_by_position]
    drafted = [n for s in done.stats for n in s.drafted_by_position]
    assert sum(accepted) == sum(s.accepted_tokens for s in stats)
    assert sum(drafted) == sum(s.draft_tokens for s in stats)
    emitted = sum(s.emitted_tokens for s in done.stats)
    assert emitted == sum(s.generated_tokens for s in stats)
    for s in stats:
        assert 0 <= s.accepted_tokens <= s.draft_tokens
        # Every pass gives one token of the target's own, unless the text ends on a draft token.
        own = s.generated_tokens - s.accepted_tokens
        assert own in (s.target_passes, s.target_passes - 1)
    for step in done.stats:
        drafted_here, accepted_here = step.drafted_by_position, step.accepted_by_position
        assert list(drafted_here) == sorted(drafted_here, reverse=True)
        assert list(accepted_here) == sorted(accepted_here, reverse=True)
        assert all(a <= d for a, d in zip(accepted_here, drafted_here, strict=False))
        assert len(accepted_here) <= len(drafted_here)
        assert step.pages_used <= step.pages_total
    assert sum(s.preemptions for s in done.stats) == sum(s.preemptions for s in stats)


def with_drafter(setup: Setup, name: str, answers: Answers) -> Setup:
    """`setup` with a built-in drafter or a new adversary."""
    drafter = name if name in ("none", "lookup") else adversaries(answers)[name]
    return dataclasses.replace(setup, drafter=drafter)


# -- greedy: transformers says the same ------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_whatever_is_drafted(family: str, drafter: str) -> None:
    """All prompts in one batch. Every family meets every drafter; draft lengths, page sizes and
    prefix reuse take turns, and every length meets every page size with some drafters."""
    turn = DRAFTERS.index(drafter)
    few = [FEW[(turn + FAMILIES.index(family)) % 3]]
    if family == "llama":
        few = [(k, PAGE_SIZES[(turn + i) % 3]) for i, k in enumerate(LENGTHS)]
    for i, (max_draft, page_size) in enumerate(few, turn):
        setup = with_drafter(tiny(family), drafter, truth(family))
        pages = {"page_size": page_size, "num_pages": 2048 // page_size}
        engine = make_engine(setup, max_draft=max_draft, prefix_reuse=bool(i % 2), **pages)
        done = run(engine, greedy())
        check_truth(done, family)
        check_books(done)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("reuse", [True, False])
def test_greedy_is_transformers_when_pages_run_out(drafter: str, reuse: bool) -> None:
    """Pools take turns: every drafter meets two, and every pool most drafters."""
    pools = ((1, 100), (8, 14), (16, 7))
    page_size, num_pages = pools[(DRAFTERS.index(drafter) + reuse) % 3]
    setup = with_drafter(tiny("llama"), drafter, truth("llama"))
    engine = make_engine(setup, page_size=page_size, num_pages=num_pages, prefix_reuse=reuse)
    done = run(engine, greedy(), check=True)
    assert done.preemptions, "the pool was not small enough"
    check_truth(done, "llama")
    check_books(done)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("runner", ["native", "torch", "reference"])
def test_every_runner_is_transformers_alone_and_in_company(family: str, runner: str) -> None:
    requests = greedy(12)
    together = make_engine(tiny(family, runner=runner), drafter="lookup", max_batch_tokens=40)
    check_truth(run(together, requests), family)
    for request in requests[::3]:
        alone = make_engine(tiny(family, runner=runner), drafter="lookup", prefix_reuse=False)
        check_truth(run(alone, [request]), family)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_greedy_is_transformers_whatever_the_planner_decides(mode: str) -> None:
    """The planner follows measured times, so no two runs draft alike; the answers are."""
    setup = with_drafter(tiny("llama"), "right at first", truth("llama"))
    done = run(make_engine(setup, mode=mode), greedy())
    check_truth(done, "llama")
    check_books(done)
    assert mode == "auto" or not any(s.drafted_by_position for s in done.stats)


@pytest.mark.parametrize("draft", ["llama", "qwen3", "smollm"])
def test_greedy_is_transformers_with_a_draft_model(draft: str) -> None:
    """One that is the target itself, and two that know nothing of it."""
    setup = dataclasses.replace(tiny("llama"), draft=load(draft), drafter="model")
    for page_size, num_pages, reuse in ((4, 300, True), (8, 14, True), (1, 100, False)):
        engine = make_engine(setup, page_size=page_size, num_pages=num_pages, prefix_reuse=reuse)
        done = run(engine, greedy(), check=True)
        check_truth(done, "llama")
        check_books(done)
        assert done.accepted or draft != "llama"
        assert done.preemptions or num_pages == 300


def test_drafts_pay() -> None:
    """With a drafter that is always right, k drafts make a pass worth k + 1 tokens."""
    setup = with_drafter(tiny("llama"), "right", truth("llama"))
    done = run(make_engine(setup, max_draft=4), [greedy()[0]])
    stats = done.answers["r0"].choices[0].end.stats
    # 1 with the prompt, then 19 = 5 + 5 + 5 + 4: the last pass drafts what there is room for.
    assert stats.target_passes == 5
    assert stats.accepted_tokens == 15
    assert stats.draft_tokens == 15


def test_a_drafter_that_fails_is_switched_off_and_nobody_notices() -> None:
    for name in ("raises", "raises in observe", "raises in release", "forgetful"):
        setup = with_drafter(tiny("llama"), name, truth("llama"))
        engine = make_engine(setup)
        done = run(engine, greedy())
        check_truth(done, "llama")
        assert engine.engine.parts.drafters.names == (), name


def test_drafter_is_told_everything() -> None:
    """One verdict per decoding step, one release per sequence (and per preemption none)."""
    setup = with_drafter(tiny("llama"), "right", truth("llama"))
    done = run(make_engine(setup), greedy())
    drafter = setup.drafter
    assert len(drafter.released) == len(done.requests)
    assert len(set(drafter.released)) == len(done.requests)
    emitted = sum(len(verdict.emitted) for _, verdict in drafter.committed)
    assert emitted == COUNT * len(done.requests)


def test_one_request_opts_out_and_the_rest_goes_on() -> None:
    setup = with_drafter(tiny("llama"), "right", truth("llama"))
    requests = greedy()
    asks = (
        SpeculationParams(enabled=False),
        SpeculationParams(num_speculative_tokens=0),
        SpeculationParams(drafter="none"),
        SpeculationParams(num_speculative_tokens=2),
        SpeculationParams(num_speculative_tokens=64),
    )
    requests[:5] = [
        dataclasses.replace(r, speculation=a) for r, a in zip(requests, asks, strict=False)
    ]
    done = run(make_engine(setup, max_draft=4), requests)
    check_truth(done, "llama")
    check_books(done)
    drafts = [done.answers[r.request_id].choices[0].end.stats.draft_tokens for r in requests]
    assert drafts[:3] == [0, 0, 0]
    assert all(drafts[3:])
    passes = [done.answers[r.request_id].choices[0].end.stats.target_passes for r in requests]
    assert passes[0] == COUNT
    assert passes[3] > passes[4]  # 2 drafts a pass against the server's 4


@pytest.mark.parametrize("speculation", [None, SpeculationParams(drafter="none")])
def test_a_request_without_a_drafter_sets_nothing_aside(
    speculation: SpeculationParams | None,
) -> None:
    """Neither budget nor pages are kept from others for drafts that nobody will make."""
    engine = make_engine(tiny(), drafter="lookup" if speculation else "none", max_draft=8)
    engine.engine.add(ask("r", range(5), 10, speculation or SpeculationParams()))
    engine.engine.step()
    plan = engine.engine.parts.scheduler.plan()
    assert [s.granted_drafts for s in plan.scheduled] == [0]


def test_what_is_cached_stays_right() -> None:
    """The same prompts again find their pages, those of accepted drafts included."""
    setup = with_drafter(tiny("llama"), "right", truth("llama"))
    engine = make_engine(setup, page_size=4, num_pages=1024)
    run(engine, greedy())
    longer = []
    for i, prompt in enumerate(prompts()):
        said = truth("llama")[prompt, 0]
        longer.append(ask(f"again{i}", prompt + said[:10], 10, ignore_eos=True))
    done = run(engine, longer)
    for i, prompt in enumerate(prompts()):
        answer = done.answers[f"again{i}"]
        assert answer.tokens == truth("llama")[prompt, 0][10:20]
        cached = answer.choices[0].end.stats.cached_prompt_tokens
        assert cached == (len(prompt) + 9) // 4 * 4


@pytest.mark.parametrize("drafter", ["wrong", "right at first", "right"])
def test_pages_of_refused_drafts_are_given_back_in_the_same_step(drafter: str) -> None:
    setup = with_drafter(tiny("llama"), drafter, truth("llama"))
    engine = make_engine(setup, page_size=1, max_draft=8, prefix_reuse=False)
    done = Run(engine, [greedy()[0]])
    (sequence,) = engine.engine.parts.scheduler.waiting
    while not sequence.num_generated or sequence.room:
        done.step(check=True)
        if sequence.room:
            assert engine.engine.parts.pool.num_used <= len(sequence.tokens)
    check_truth(done.finish(), "llama")
