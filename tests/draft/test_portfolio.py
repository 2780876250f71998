"""Several drafters at once, and switching between them: it may only ever change the time."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.build import BuiltEngine
from engine.control.planner import Assignment, FixedPlanner, nobody
from engine.draft.portfolio import DrafterPortfolio
from engine.scheduler import StepPlan
from engine.types import Request, SpeculationParams
from tests.drafters import RaisingDrafter, ScriptedDrafter, adversaries, follow
from tests.fakes import Run, Setup, ask, make_engine, run, tiny
from tests.test_core import check_books, check_truth, greedy, truth
from tests.test_core_sampling import KINDS, baseline, check_same, requests
from tests.tiny_models import VOCAB, load

BOTH = ("lookup", "model")


class Switching(FixedPlanner):
    """Another drafter, draft length or none at all in every step, at random."""

    def __init__(self, seed: int = 0, pause: int = 0) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self._pause = pause
        self._left = 0

    def choose(self, plan: StepPlan) -> Assignment:
        lengths, drafters = [], []
        for scheduled in plan.scheduled:
            drafters.append(self._dice.choice(scheduled.sequence.drafters))
            silent = self._left > 0 or self._dice.random() < 0.25
            lengths.append(0 if silent else self._dice.randint(0, scheduled.granted_drafts))
        self._left = self._left - 1 if self._left else self._pause * (self._dice.random() < 0.1)
        return Assignment(lengths, drafters)


class Pausing(FixedPlanner):
    """All that is allowed, but for a pause of so many steps."""

    def __init__(self, begin: int, steps: int) -> None:
        super().__init__()
        self._pause = range(begin, begin + steps)
        self._step = 0

    def choose(self, plan: StepPlan) -> Assignment:
        self._step += 1
        return nobody(plan) if self._step in self._pause else super().choose(plan)


def planned_by(built: BuiltEngine, planner: FixedPlanner) -> BuiltEngine:
    engine = built.engine
    engine.parts = dataclasses.replace(engine.parts, planner=planner)
    return built


def both(draft: str = "llama", **changes: object) -> Setup:
    """The tiny target with lookup and a draft model."""
    setup = dataclasses.replace(tiny("llama"), draft=load(draft), drafters=BOTH, store=1 << 20)
    return dataclasses.replace(setup, **changes)  # type: ignore[arg-type]


def check_empty(built: BuiltEngine) -> None:
    """Neither store has a page in use, no drafter remembers anybody."""
    built.engine.check()
    pool = built.engine.parts.pool
    assert pool.num_used == 0
    pool.drop_cache()
    built.engine.check()
    drafters = built.engine.parts.drafters._drafters
    assert not drafters["lookup"]._memories  # type: ignore[attr-defined]
    assert not drafters["model"]._read  # type: ignore[attr-defined]


# -- equality --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_transformers_while_drafters_switch(draft: str, seed: int) -> None:
    """At every step, with pauses, plenty of pages or too few; asked twice, so that prefixes and
    past answers are found. A draft model that is the target, and one that knows nothing."""
    for page_size, num_pages, reuse in ((4, 300, True), (8, 16, True), (1, 110, False)):
        setup = both(draft, page_size=page_size, num_pages=num_pages, prefix_reuse=reuse)
        built = planned_by(make_engine(setup), Switching(seed, pause=5))
        for _ in range(2):
            done = run(built, greedy(), check=True)
            check_truth(done, "llama")
            check_books(done)
        assert done.accepted
        assert done.preemptions or num_pages == 300
        check_empty(built)


@pytest.mark.parametrize("mode", ["auto", "fixed"])
@pytest.mark.parametrize("drafters", [BOTH, BOTH[::-1], ("lookup",), ("model",)])
def test_greedy_is_transformers_whoever_is_chosen(mode: str, drafters: tuple[str, ...]) -> None:
    built = make_engine(both("llama", drafters=drafters, mode=mode))
    for _ in range(2):
        done = run(built, greedy())
        check_truth(done, "llama")
        check_books(done)
    check_empty(built)


def test_sampled_answers_are_the_same_while_drafters_switch() -> None:
    """Every kind of sampling in one batch, tokens and log probabilities to the last bit."""
    plain = tiny("llama")
    expected = baseline(plain, 3, None)
    for seed in range(3):
        setup = dataclasses.replace(both("qwen3"), page_size=4, num_pages=60)
        built = planned_by(make_engine(setup), Switching(seed, pause=4))
        for _ in range(2):
            done = run(built, requests(logprobs=3), check=True)
            check_same(done, expected)
        check_empty(built)
    assert len(KINDS) > 10


@pytest.mark.parametrize("names", [("right", "wrong"), ("raises", "right"), ("random", "negative")])
def test_misbehaving_drafters_side_by_side(names: tuple[str, str]) -> None:
    every = adversaries(truth("llama"))
    pair = []
    for name in names:
        every[name].name = name
        pair.append(every[name])
    for planner in (Switching(1), None):
        built = make_engine(dataclasses.replace(tiny("llama"), drafters=tuple(pair)))
        if planner is not None:
            planned_by(built, planner)
        check_truth(run(built, greedy()), "llama")


def test_a_drafter_that_cannot_tell_its_outlook_is_switched_off() -> None:
    class Confused(ScriptedDrafter):
        def outlook(self, _: object) -> int:
            raise ZeroDivisionError

    bad, good = Confused(follow(truth("llama"))), ScriptedDrafter(follow(truth("llama")))
    bad.name, good.name = "bad", "good"
    built = make_engine(dataclasses.replace(tiny("llama"), drafters=(bad, good), mode="auto"))
    check_truth(run(built, greedy()), "llama")
    assert built.engine.parts.drafters.names == ("good",)
    assert bad.proposals == 0 < good.proposals


# -- one request and another -----------------------------------------------------------------


def test_one_requests_drafter_or_length_never_changes_anothers_answer() -> None:
    """Half of the requests ask for everything there is to ask; all say what they say alone."""
    wishes = [
        SpeculationParams(drafter="lookup", num_speculative_tokens=1),
        SpeculationParams(drafter="model", num_speculative_tokens=8),
        SpeculationParams(drafter="none"),
        SpeculationParams(enabled=False),
        SpeculationParams(num_speculative_tokens=0),
        SpeculationParams(prediction=tuple(range(30))),
        SpeculationParams(num_speculative_tokens=64),
    ]
    asked = greedy()
    for shift in range(3):
        mixed = [
            dataclasses.replace(r, speculation=wishes[(i + shift) % 7]) if i % 2 else r
            for i, r in enumerate(asked)
        ]
        built = make_engine(both("qwen3", max_draft=6, mode="auto"))
        for _ in range(2):
            check_truth(run(built, mixed), "llama")


def test_a_pinned_drafter_drafts_alone() -> None:
    seen: dict[str, set[str]] = {}
    a, b = (ScriptedDrafter(note(seen, name)) for name in ("a", "b"))
    a.name, b.name = "a", "b"
    built = make_engine(dataclasses.replace(tiny("llama"), drafters=(a, b)))
    planned_by(built, Switching(2))
    pinned = [
        dataclasses.replace(r, speculation=SpeculationParams(drafter="b")) if i % 2 else r
        for i, r in enumerate(greedy())
    ]
    run(built, pinned)
    for i, request in enumerate(pinned):
        assert seen[request.request_id] == ({"b"} if i % 2 else {"a", "b"})


def note(seen: dict[str, set[str]], name: str):
    """A drafter's guess that leaves a note who was asked."""

    def draft(sequence, length):
        seen.setdefault(sequence.request.request_id, set()).add(name)
        return [1] * length

    return draft


def test_every_drafter_of_a_sequence_hears_what_was_said() -> None:
    a, b = ScriptedDrafter(follow(truth("llama"))), ScriptedDrafter(follow({}))
    a.name, b.name = "a", "b"
    built = make_engine(dataclasses.replace(tiny("llama"), drafters=(a, b)))
    done = run(planned_by(built, Switching(3)), greedy())
    for drafter in (a, b):
        emitted = sum(len(verdict.emitted) for _, verdict in drafter.committed)
        assert emitted == 20 * len(done.requests)
        assert len(set(drafter.released)) == len(done.requests)


# -- fixed: the first that has something ------------------------------------------------------


def test_fixed_drafts_from_lookup_where_it_matches_and_else_from_the_model() -> None:
    built = make_engine(both("llama", max_draft=4))
    asked: dict[str, int] = {"lookup": 0, "model": 0}
    portfolio = built.engine.parts.drafters
    propose = DrafterPortfolio.propose

    def counting(sequences, lengths, drafters):
        for one, length, name in zip(sequences, lengths, drafters, strict=True):
            if length:
                asked[name] += 1
                offers = portfolio.outlook("lookup", one) is not None
                assert name == ("lookup" if offers else "model")
        return propose(portfolio, sequences, lengths, drafters)

    portfolio.propose = counting  # type: ignore[method-assign]
    check_truth(run(built, greedy()), "llama")
    assert min(asked.values()) > 0


def passes(done: Run) -> int:
    return sum(c.end.stats.target_passes for a in done.answers.values() for c in a.choices.values())


def test_yesterdays_answers_are_drafted_from_but_only_within_a_tenant() -> None:
    """The same questions again take a fraction of the passes; another tenant's do not."""
    setup = dataclasses.replace(tiny("llama"), drafter="lookup", store=1 << 20, max_draft=4)
    built = make_engine(setup)
    first, again = run(built, greedy()), run(built, greedy())
    salted = [dataclasses.replace(r, cache_salt="other") for r in greedy()]
    other = run(built, salted)
    for done in (first, again, other):
        check_truth(done, "llama")
    # Twenty tokens, five at a time after the first; prompts below four tokens find nothing.
    assert passes(again) < 0.5 * passes(first)
    assert passes(other) == pytest.approx(passes(first), rel=0.15)


# -- pauses ----------------------------------------------------------------------------------


def kept(built: BuiltEngine, asked: list[Request]) -> float:
    """Share of draft tokens that were accepted after step 70."""
    done = Run(built, asked)
    for _ in range(70):
        done.step()
    before = len(done.stats)
    done.finish()
    late = done.stats[before:]
    drafted = sum(sum(s.drafted_by_position) for s in late)
    assert drafted > 100
    return sum(sum(s.accepted_by_position) for s in late) / drafted


@pytest.mark.parametrize("drafters", [("model",), ("lookup",), BOTH])
def test_acceptance_after_a_pause_of_fifty_steps_is_what_it_is_without(
    drafters: tuple[str, ...],
) -> None:
    """The same prompts; without the pause, texts are further on at the same step. Texts repeat
    themselves, so that lookup has something to find; the model is the target itself."""
    dice = random.Random(4)
    prompts = [tuple(dice.randrange(VOCAB) for _ in range(6)) * 4 for _ in range(6)]
    asked = [ask(f"r{i}", p, 215, ignore_eos=True) for i, p in enumerate(prompts)]
    shares = []
    for pause in (50, 0):
        built = planned_by(
            make_engine(both("llama", drafters=drafters, max_draft=2, num_pages=600)),
            Pausing(10, pause) if pause else Halved(10, 50),
        )
        shares.append(kept(built, asked))
        built.engine.check()
        assert built.engine.parts.pool.num_used == 0
    assert shares[0] == pytest.approx(shares[1], abs=0.05)
    assert drafters != ("model",) or shares == [1.0, 1.0]


class Halved(FixedPlanner):
    """Drafts in every step; in the steps that others pause a single token of it, so that it is
    not at the end before they go on."""

    def __init__(self, begin: int, steps: int) -> None:
        super().__init__()
        self._slow = range(begin, begin + steps)
        self._step = 0

    def choose(self, plan: StepPlan) -> Assignment:
        self._step += 1
        chosen = super().choose(plan)
        if self._step not in self._slow:
            return chosen
        return Assignment([min(1, n) for n in chosen.lengths], chosen.drafters)


# -- soak ------------------------------------------------------------------------------------


def test_both_stores_are_empty_after_a_soak() -> None:
    """Requests come, are aborted, preempted and end, while the planner chooses for itself."""
    dice = random.Random(7)
    setup = both("qwen3", mode="auto", num_pages=60, page_size=4, max_sequences=8)
    built = make_engine(setup)
    done = Run(built)
    prompts = [request.prompt for request in greedy()]
    for number in range(120):
        speculation = SpeculationParams(drafter=dice.choice([None, None, "lookup", "model"]))
        prompt = dice.choice(prompts)[:60]
        done.add(ask(f"s{number}", prompt, dice.randint(1, 40), speculation, n=dice.choice([1, 2])))
        for _ in range(dice.randint(0, 6)):
            done.step(check=True)
        if dice.random() < 0.2:
            done.abort(f"s{dice.randint(0, number)}")
    done.finish(check=True)
    assert done.preemptions
    check_empty(built)
    planner = built.engine.parts.planner.inner  # type: ignore[attr-defined]
    assert planner.acceptance.num_sequences == planner.prober.num_sequences == 0
    assert built.engine.parts.meter.num_requests == 0


def test_a_failing_drafter_of_two_leaves_the_other() -> None:
    bad = RaisingDrafter(follow(truth("llama")), "propose", after=2)
    good = ScriptedDrafter(follow(truth("llama")))
    bad.name, good.name = "bad", "good"
    built = make_engine(dataclasses.replace(tiny("llama"), drafters=(bad, good)))
    done = run(built, greedy())
    check_truth(done, "llama")
    assert built.engine.parts.drafters.names == ("good",)
    assert good.proposals > 3
    assert done.accepted
