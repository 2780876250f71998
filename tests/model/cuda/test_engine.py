"""The whole engine through the runner for GPUs: drafts, company, pages and preemption change
nothing. Where there is no GPU the kernels are interpreted, so models and texts are small."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("engine.model.cuda.kernels")

from engine.build import check_numerics
from engine.config import ModelConfig
from engine.model import selftest
from engine.model.loader import LoadedModel, adopt_model
from engine.types import Request, SamplingParams
from tests.drafters import Answers, adversaries
from tests.fakes import Run, Setup, ask, make_engine, run
from tests.tiny_models import VOCAB, generated, make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 7


@functools.cache
def loaded(family: str = "llama", numerics: str = "exact", layers: int = 2) -> LoadedModel:
    config = ModelConfig("tiny", runner="cuda", numerics=numerics)
    return adopt_model(make_model(family, num_hidden_layers=layers).to(DEVICE), config)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Short ones, a repetitive one, and two with a common beginning."""
    dice = random.Random(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(VOCAB) for _ in range(count))

    start = some(9)
    return (*((*start, *some(n)) for n in (1, 2)), some(3) * 4, some(1))


def truth(family: str, count: int = COUNT) -> Answers:
    return {(p, 0): generated(family, p, count) for p in prompts()}


def check_greedy(setup: Setup, family: str, count: int = COUNT) -> Run:
    """Every answer is transformers', token by token."""
    asked = [ask(f"r{i}", p, count, ignore_eos=True) for i, p in enumerate(prompts())]
    done = run(make_engine(setup), asked, check=True)
    for request_id, request in done.requests.items():
        assert done.answers[request_id].tokens == truth(family, count)[request.prompt, 0]
    return done


@pytest.mark.parametrize("family", ["smollm", "qwen2-window"])
def test_greedy_is_transformers_with_drafts_that_are_partly_right(family: str) -> None:
    drafter = adversaries(truth(family))["right at first"]
    done = check_greedy(Setup(loaded(family), drafter=drafter, max_draft=3), family)
    assert done.accepted > 0


def test_greedy_is_transformers_when_pages_run_out() -> None:
    """Preempted, and read again with pages that are found by their prefix."""
    drafter = adversaries(truth("llama", 9))["right at first"]
    done = check_greedy(Setup(loaded(), drafter=drafter, num_pages=9, max_draft=2), "llama", 9)
    assert done.preemptions > 0


def test_greedy_is_transformers_with_a_draft_model() -> None:
    setup = Setup(loaded(), draft=loaded("qwen3", layers=1), drafter="model", max_draft=2)
    done = check_greedy(setup, "llama")
    assert sum(sum(s.drafted_by_position) for s in done.stats) > 0


def test_greedy_is_transformers_under_fast_numerics() -> None:
    """In float32 and with random weights no near-tie is turned by another order of summing."""
    check_greedy(Setup(loaded(numerics="fast"), drafter="lookup"), "llama")


SAMPLED: dict[str, dict[str, Any]] = {
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.3},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.5},
}


def test_sampled_answers_are_the_same_with_and_without_speculation() -> None:
    """Tokens and log probabilities, to the last bit."""
    asked = [
        Request(name, prompts()[i], SamplingParams(max_tokens=8, seed=i, logprobs=2, **params))
        for i, (name, params) in enumerate(SAMPLED.items())
    ]
    model = loaded("qwen3", layers=1)
    alone = {r.request_id: run(make_engine(Setup(model)), [r]).said(r.request_id) for r in asked}
    known = {(r.prompt, 0): alone[r.request_id][0][0] for r in asked}
    drafter = adversaries(known)["right at first"]
    together = run(make_engine(Setup(model, drafter=drafter, max_draft=2)), asked)
    assert together.accepted > 0
    for request in asked:
        assert together.said(request.request_id) == alone[request.request_id]


def test_the_self_test_says_which_numerics_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SHAPES", (1, 3, 8))
    monkeypatch.setattr(selftest, "_LENGTH", 8)
    built = make_engine(Setup(loaded(layers=1)))
    assert check_numerics(built).info.row_invariant

    class Dependent:
        """A row is a little larger for every row beside it."""

        def __init__(self, runner: Any) -> None:
            self.inner = runner
            self.store, self.device, self.min_rows = runner.store, runner.device, runner.min_rows

        def forward(self, batch: Any, features: tuple[int, ...] = ()) -> Any:
            passed = self.inner.forward(batch, features)
            return dataclasses.replace(passed, logits=passed.logits + 1e-3 * len(batch.input_ids))

    found = check_numerics(make_engine(Setup(loaded(layers=1)), wrap=Dependent))
    assert not found.info.row_invariant
