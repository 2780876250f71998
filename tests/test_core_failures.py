"""What goes wrong stays with whom it concerns: bad logits, failing passes, callers that leave."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.errors import RequestFailed
from engine.types import Failed, FinishReason, Request
from tests.drafters import ScriptedDrafter, adversaries, follow
from tests.fakes import Around, Run, ask, make_engine, run
from tests.test_core_limits import greedy_text
from tests.tiny_models import VOCAB

POISON = 96


class Poisoned(Around):
    """A runner whose logits are `value` wherever the query token is `POISON`."""

    def __init__(self, runner: Any, value: float) -> None:
        super().__init__(runner)
        self._value = value
        self.spoiled = 0

    def change(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        for i, row in enumerate(batch.logit_rows.tolist()):
            if batch.input_ids[row] == POISON:
                self.spoiled += 1
                logits[i, 3 if self._value > 0 else slice(None)] = self._value
        return logits


class Failing(Around):
    """A runner that raises in the passes whose numbers are given, after writing the cache."""

    def __init__(self, runner: Any, passes: set[int]) -> None:
        super().__init__(runner)
        self._passes = passes
        self.count = 0

    def change(self, _batch: Batch, logits: torch.Tensor, /) -> torch.Tensor:
        self.count += 1
        if self.count in self._passes:
            raise RuntimeError("injected: secret prompt text")
        return logits


def clean_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts, none with a poisoned token in it or in the ten tokens that follow."""
    dice = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    while len(prompts) < count:
        prompt = tuple(dice.randrange(3, 90) for _ in range(dice.randint(1, 12)))
        if POISON not in greedy_text(prompt, 10):
            prompts.append(prompt)
    return prompts


def check_texts(done: Run, *, but: set[str] = frozenset()) -> None:
    """Every answer is the fake model's, or so much of it as was wanted."""
    for request_id, request in done.requests.items():
        answer = done.answers[request_id]
        if request_id in but:
            continue
        assert answer.failed is None, request_id
        wanted = greedy_text(request.prompt, request.sampling.max_tokens)
        for choice in answer.choices.values():
            assert choice.end is not None
            count = len(choice.tokens) if choice.end.reason is FinishReason.ABORT else len(wanted)
            assert tuple(choice.tokens) == wanted[:count], request_id


# -- logits that are no numbers --------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("drafter", ["none", "lookup", "random"])
def test_bad_logits_fail_one_request(value: float, drafter: str) -> None:
    made = ScriptedDrafter(adversaries({})["random"]._draft) if drafter == "random" else drafter
    requests = [ask(f"r{i}", p, 10, ignore_eos=True) for i, p in enumerate(clean_prompts(8))]
    requests.insert(3, ask("bad", (5, 6, POISON), 10, logprobs=2))
    requests.insert(5, ask("bad too", (5, POISON), 10, temperature=1.0, seed=1, n=3))
    engine = make_engine(drafter=made, wrap=lambda runner: Poisoned(runner, value))
    done = run(engine, requests, check=True)
    check_texts(done, but={"bad", "bad too"})
    for request_id in ("bad", "bad too"):
        failed = done.answers[request_id].failed
        assert failed
        assert isinstance(failed.error, RequestFailed)
        assert "finite" in str(failed.error)
    assert engine.engine.parts.target.spoiled


def test_a_bad_choice_fails_its_request_in_the_step_in_which_another_choice_ends() -> None:
    """Whichever comes first in the step; afterwards the engine still serves."""
    for n, steps in ((2, 3), (4, 6)):
        texts = sampled_choices(n, steps)
        assert len(set(texts)) == n
        for bad in range(n):
            engine = make_engine(
                prefix_reuse=False, wrap=functools.partial(FailsChoice, text=texts[bad])
            )
            done = run(engine, [sampled(n, steps), ask("after", (5, 6), 4)], check=True)
            assert done.answers["r"].failed
            assert done.answers["after"].failed is None


def sampled(n: int, steps: int) -> Request:
    """A request whose choices differ and end in the same step."""
    return ask("r", (5, 6, 7), steps, temperature=1.5, seed=3, n=n, ignore_eos=True)


def sampled_choices(n: int, steps: int) -> list[tuple[int, ...]]:
    """What they say if nothing fails."""
    done = run(make_engine(prefix_reuse=False), [sampled(n, steps)])
    return [tuple(choice.tokens) for _, choice in sorted(done.answers["r"].choices.items())]


class FailsChoice(Around):
    """A runner that gives NaN in the row that would end the given text."""

    def __init__(self, runner: Any, text: tuple[int, ...]) -> None:
        super().__init__(runner)
        self._text = text
        self._position = 3 + len(text) - 2

    def change(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        for i, row in enumerate(batch.logit_rows.tolist()):
            here = int(batch.input_ids[row]), int(batch.positions[row])
            if here == (self._text[-2], self._position):
                logits[i] = float("nan")
        return logits


def test_bad_logits_behind_a_refused_draft_are_never_looked_at() -> None:
    """Plain decoding would not have computed that row: the answer must not depend on it."""
    prompts = clean_prompts(6, seed=4)
    requests = [ask(f"r{i}", p, 10, ignore_eos=True) for i, p in enumerate(prompts)]
    answers = {(p, 0): greedy_text(p, 10) for p in prompts}
    for hits in (0, 1, 2):
        right = follow(answers)
        drafter = ScriptedDrafter(lambda s, n, r=right, h=hits: (r(s, h) + [POISON] * n)[:n])
        engine = make_engine(drafter=drafter, wrap=lambda r: Poisoned(r, float("nan")))
        done = run(engine, requests)
        check_texts(done)
        assert engine.engine.parts.target.spoiled


# -- passes that raise -----------------------------------------------------------------------


def test_a_failing_pass_fails_its_requests_and_no_others() -> None:
    """Those that wait are served after it, from a cache that holds nothing wrong."""
    prompts = clean_prompts(8, seed=5)
    requests = [ask(f"r{i}", p, 10, ignore_eos=True) for i, p in enumerate(prompts)]
    for passes in ({1}, {4}, {1, 2}, {3, 9, 15}):
        engine = make_engine(
            drafter="lookup", max_sequences=2, wrap=lambda r, p=passes: Failing(r, p)
        )
        done = Run(engine, requests)
        failed: set[str] = set()
        while done.engine.has_work:
            events = done.step(check=True)
            now = {e.request_id for e in events if isinstance(e, Failed)}
            assert len(now) <= 2
            failed |= now
        done.finish()
        assert failed
        assert len(failed) <= 2 * len(passes)
        check_texts(done, but=failed)
        for request_id in failed:
            error = str(done.answers[request_id].failed.error)
            assert "RuntimeError" in error
            assert "secret" not in error
        again = Run(engine)  # the same engine, the same prompts
        for request in requests:
            again.add(request)
        check_texts(again.finish())


def test_a_failing_pass_takes_all_choices_of_a_request_with_it() -> None:
    """Those that waited, too: one event ends the request."""
    engine = make_engine(max_sequences=2, wrap=lambda runner: Failing(runner, {3}))
    done = Run(engine, [ask("r", (5, 6, 7), 10, n=6)])
    done.finish(check=True)
    assert done.answers["r"].failed
    again = run(engine, [ask("r", (5, 6, 7), 10, n=6, ignore_eos=True)], check=True)
    check_texts(again)


# -- callers that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_abort_after_any_number_of_steps(steps: int, drafter: str) -> None:
    """While it waits, between chunks of its prompt, between tokens, when it is over."""
    prompts = [*clean_prompts(5, seed=6), tuple(range(3, 33))]
    requests = [ask(f"r{i}", p, 6, ignore_eos=True) for i, p in enumerate(prompts)]
    for victim in range(len(requests)):
        engine = make_engine(
            drafter=drafter, max_sequences=3, max_batch_tokens=7, num_pages=16, page_size=3
        )
        done = Run(engine, requests)
        for _ in range(steps):
            done.step()
        for _ in range(2):  # the second time there is nothing left to abort
            done.abort(f"r{victim}")
        done.abort("unknown")
        done.finish(check=True)
        check_texts(done)


def test_abort_frees_pages_at_once_and_says_so_in_the_next_step() -> None:
    engine = make_engine(prefix_reuse=False)
    done = Run(engine, [ask("r", range(9), 50, ignore_eos=True)])
    done.step()
    assert engine.engine.parts.pool.num_used
    done.abort("r")
    assert engine.engine.parts.pool.num_used == 0
    assert engine.engine.has_work
    done.step()
    assert not engine.engine.has_work
    end = done.answers["r"].choices[0].end
    assert end.reason is FinishReason.ABORT
    assert end.stop_token_id is None
    assert end.stats.generated_tokens == 1


def test_abort_one_choice() -> None:
    """The others go on; those that have not started do not miss the first."""
    for victim in range(4):
        for steps in range(4):
            engine = make_engine(drafter="lookup", max_sequences=2, max_batch_tokens=6)
            done = Run(engine, [ask("r", range(3, 20), 8, n=4, ignore_eos=True)])
            for _ in range(steps):
                done.step()
            done.abort("r", victim)
            done.finish(check=True)
            ends = [c.end.reason for _, c in sorted(done.answers["r"].choices.items())]
            assert ends.count(FinishReason.ABORT) == 1
            assert ends[victim] is FinishReason.ABORT
            check_texts(done)


def test_abort_of_a_preempted_sequence() -> None:
    done = Run(make_engine(page_size=1, num_pages=24), [])
    for i in range(3):
        done.add(ask(f"r{i}", range(3 + i, 8 + i), 15, ignore_eos=True))
    while not done.preemptions:
        done.step()
    (victim,) = [s for s in done.engine.parts.scheduler.waiting if s.preemptions]
    done.abort(victim.request.request_id)
    done.finish(check=True)
    check_texts(done)


# -- everything at once ----------------------------------------------------------------------


def soak(seed: int, **settings: Any) -> Run:
    """Random arrivals, lengths, choices, priorities and aborts; pages that do not suffice."""
    dice = random.Random(seed)
    done = Run(make_engine(**settings))
    starts = [tuple(dice.randrange(3, VOCAB) for _ in range(12)) for _ in range(3)]
    alive: list[str] = []
    for step in range(90):
        if dice.random() < 0.5:
            prompt = dice.choice(starts)[: dice.randint(1, 12)] * dice.randint(1, 2)
            done.add(
                ask(
                    f"r{step}",
                    prompt,
                    dice.randint(0, 14),
                    ignore_eos=True,
                    n=dice.choice([1, 1, 1, 2, 5]),
                )
            )
            alive.append(f"r{step}")
        if alive and dice.random() < 0.1:
            done.abort(dice.choice(alive), dice.choice([None, 0, 1]))
        done.step(check=True)
    return done.finish(check=True)


@pytest.mark.parametrize("seed", range(6))
def test_soak(seed: int) -> None:
    settings: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
        "page_size": (1, 2, 4)[seed % 3],
        "num_pages": (40, 22, 12)[seed % 3],
        "prefix_reuse": bool(seed % 2),
        "max_batch_tokens": 12,
        "max_sequences": 6,
    }
    for drafter in ("none", "lookup", ScriptedDrafter(adversaries({})["random"]._draft)):
        done = soak(seed, drafter=drafter, **settings())
        check_texts(done)
        assert done.preemptions
        assert len(done.requests) > 30
