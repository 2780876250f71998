"""The draft model: it may only ever change the time an answer takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.build import assemble
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.control.planner import Assignment
from engine.model.loader import LoadedModel
from engine.types import SpeculationParams
from tests.fakes import Run, ask, run
from tests.tiny_models import VOCAB, load

PROMPTS = [tuple((7 * i + j * j) % VOCAB for j in range(3 + 5 * i)) for i in range(8)]


def engine(draft: LoadedModel | None, target: LoadedModel | None = None, **cache: object):
    """An engine with a draft model; without one, plain decoding."""
    config = EngineConfig(
        model=ModelConfig("tiny"),
        cache=CacheConfig(**{"page_size": 4, "num_pages": 400, **cache}),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_batch_tokens=64, max_sequences=8),
        speculation=SpeculationConfig(
            mode="fixed", drafter="model" if draft else "none", max_draft=4
        ),
    )
    return assemble(config, target or load("llama"), {"model": draft} if draft else {})


def requests(count: int = 30, **sampling: object):
    return [ask(f"r{i}", p, count, ignore_eos=True, **sampling) for i, p in enumerate(PROMPTS)]


def said(done: Run) -> list[object]:
    return [done.said(f"r{i}") for i in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}],
    ids=["greedy", "seeded"],
)
def test_answers_do_not_depend_on_the_draft_model(dtype, sampling):
    target = load("llama", dtype)
    plain = run(engine(None, target), requests(**sampling), check=True)
    for draft in (load("llama", dtype), load("qwen3", dtype)):
        drafted = run(engine(draft, target), requests(**sampling), check=True)
        assert said(drafted) == said(plain)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"]
)
def test_a_draft_model_equal_to_the_target_is_always_right(sampling):
    """Also after fully accepted drafts, whose last token it proposed but never read."""
    done = run(engine(load("llama")), requests(31, **sampling))
    for i in range(len(PROMPTS)):
        stats = done.answers[f"r{i}"].choices[0].end.stats
        assert stats.accepted_tokens == stats.draft_tokens
        assert stats.target_passes == 1 + 30 // 5  # the prefill's token, then 1 + 4 a pass
    # One pass catches up, one more for every further token of the longest draft.
    for step in done.stats:
        assert step.draft_forwards == len(step.drafted_by_position)


def test_pages_run_out_and_answers_stay():
    plain = run(engine(None), requests(40))
    tight = run(engine(load("qwen2"), num_pages=40), requests(40), check=True)
    assert tight.preemptions > 0
    assert said(tight) == said(plain)


def test_a_prefix_known_to_the_target_only_is_caught_up():
    """The first request runs without drafts, so the draft store never sees its prompt."""
    built = engine(load("llama"))
    prompt = PROMPTS[7]
    off = SpeculationParams(enabled=False)
    run(built, [dataclasses.replace(ask("off", prompt, 9, ignore_eos=True), speculation=off)])
    done = run(built, [ask("on", prompt, 31, ignore_eos=True)])
    stats = done.answers["on"].choices[0].end.stats
    assert stats.cached_prompt_tokens > 0
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_a_pause_costs_no_acceptance():
    """Drafts resume at full acceptance after steps in which nobody asked for any."""
    built = engine(load("llama"))
    planner = built.engine.parts.planner
    step = 0

    def choose(plan):
        nonlocal step
        step += 1
        lengths = [0 if 5 < step < 20 else s.granted_drafts for s in plan.scheduled]
        return Assignment(lengths, ["model"] * len(lengths))

    object.__setattr__(planner, "choose", choose)
    done = run(built, [ask("r", PROMPTS[3], 80, ignore_eos=True)])
    stats = done.answers["r"].choices[0].end.stats
    assert stats.accepted_tokens == stats.draft_tokens > 40


def test_it_falls_silent_at_its_own_context():
    short = dataclasses.replace(load("llama"), max_model_len=40)
    plain = run(engine(None), requests(60))
    done = run(engine(short), requests(60), check=True)
    assert said(done) == said(plain)
    stats = done.answers["r0"].choices[0].end.stats
    assert 0 < stats.draft_tokens < 40
