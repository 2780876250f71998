"""Every sampling parameter and random combinations of them, in batches whose rows differ.

Tokens and log probabilities equal the run without speculation to the last bit, in float32 and
bfloat16; and, for greedy requests, a plain loop over transformers' own model and processors
within rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.judge import Judge
from engine.types import Request, SamplingParams
from tests.drafters import ScriptedDrafter, guess
from tests.fakes import Choice, Run, Setup, make_engine, run, tiny
from tests.grammars import random_automaton
from tests.lossless.broken import Leaky
from tests.sampling.support import make_row
from tests.sampling.test_transformers import reference
from tests.tiny_models import EOS, VOCAB, eager, load

FAMILY = "qwen3"
BOUNDED = settings(
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

tokens = st.integers(0, VOCAB - 1)
prompts = st.builds(
    lambda part, repeats, tail: tuple(part * repeats + tail),
    st.lists(tokens, min_size=1, max_size=5),
    st.integers(1, 4),
    st.lists(tokens, max_size=3),
)

#: One strategy per parameter; each request names a few of them.
WISHES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 2.0]),
    "top_k": st.integers(0, 12),
    "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    "presence_penalty": st.floats(-2, 2, width=16),
    "frequency_penalty": st.floats(-2, 2, width=16),
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 1.5, 4.0]), max_size=4),
    "allowed_token_ids": st.none() | st.frozensets(tokens, min_size=1, max_size=30),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=4).map(
        tuple
    ),
    "min_tokens": st.integers(0, 8),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.frozensets(tokens, max_size=4),
    "n": st.integers(1, 3),
    "logprobs": st.none() | st.integers(0, 3),
    "prompt_logprobs": st.none() | st.integers(0, 2),
    "grammar": st.builds(random_automaton, st.integers(0, 40)),
}


@st.composite
def requests(draw: st.DrawFn, **fixed: Any) -> list[Request]:
    """Three to six requests, each with wishes of its own and a seed."""
    made = []
    for i in range(draw(st.integers(3, 6))):
        named = draw(st.sets(st.sampled_from(sorted(WISHES)), max_size=6)) - fixed.keys()
        wishes = {name: draw(WISHES[name]) for name in sorted(named)}
        most = {"max_tokens": draw(st.integers(8, 14)), "seed": draw(st.integers(-5, 5))}
        sampling = SamplingParams(**(most | wishes | fixed))
        made.append(Request(f"r{i}", draw(prompts), sampling))
    return made


@functools.cache
def setup_of(dtype: torch.dtype) -> Setup:
    return dataclasses.replace(tiny(FAMILY, dtype), page_size=4, num_pages=200)


def echo(done: Run) -> ScriptedDrafter:
    """A drafter that knows the answers, and is wrong at every fifth position."""

    def draft(sequence: Any, length: int) -> list[int]:
        said = done.answers[sequence.request.request_id].choices[sequence.choice].tokens
        start = sequence.num_generated
        guesses = said[start : start + length]
        return [(t + (start + i) % 5 // 4) % VOCAB for i, t in enumerate(guesses)]

    return ScriptedDrafter(draft)


def check_nothing_differs(
    dtype: torch.dtype, asked: list[Request], judge: type[Judge] = Judge
) -> None:
    """Whoever drafts, in one batch, in small steps, and when pages run out."""
    setup = setup_of(dtype)
    plain = run(make_engine(setup, prefix_reuse=False), asked)
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in asked)
    for changes in (
        {"drafter": echo(plain), "max_draft": 4},
        {"drafter": ScriptedDrafter(guess()), "max_draft": 2, "max_batch_tokens": 17},
        {"drafter": "lookup", "page_size": 1, "num_pages": longest + 8},
        {"drafter": "model", "draft": load("llama", dtype), "max_draft": 3},
    ):
        built = make_engine(setup, **changes)
        parts = built.engine.parts
        built.engine.parts = dataclasses.replace(
            parts, judge=judge(parts.judge.vocab_size, parts.judge.eos_token_ids)
        )
        done = run(built, asked)
        for request in asked:
            assert done.said(request.request_id) == plain.said(request.request_id), changes


@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), asked=requests())
@settings(BOUNDED, max_examples=60)
def test_nothing_differs_from_plain_decoding(dtype: torch.dtype, asked: list[Request]) -> None:
    check_nothing_differs(dtype, asked)


def test_penalties_that_see_rejected_tokens_would_be_noticed() -> None:
    @given(asked=requests())
    @settings(BOUNDED, phases=[Phase.generate])
    def leaky(asked: list[Request]) -> None:
        check_nothing_differs(torch.float32, asked, Leaky)

    with pytest.raises((AssertionError, ExceptionGroup)):
        leaky()


@given(asked=requests(temperature=0.0, grammar=None))
@BOUNDED
def test_greedy_answers_are_transformers(asked: list[Request]) -> None:
    plain_words = [
        dataclasses.replace(
            r,
            sampling=dataclasses.replace(
                # transformers' minimum length knows no text that ignores its end
                r.sampling,
                ignore_eos=r.sampling.ignore_eos and not r.sampling.min_tokens,
            ),
        )
        for r in asked
    ]
    done = run(make_engine(setup_of(torch.float32), drafter="lookup"), plain_words)
    for request in plain_words:
        for choice in done.answers[request.request_id].choices.values():
            check_greedy(request, choice)


def check_greedy(request: Request, choice: Choice) -> None:
    """Every token is the best one after those before it, or as good to within rounding."""
    params = request.sampling
    ids = torch.tensor([[*request.prompt, *choice.tokens]])
    with torch.inference_mode():
        logits = eager(FAMILY)(ids).logits[0, len(request.prompt) - 1 : -1].float()
    for i, (token, row) in enumerate(zip(choice.tokens, logits, strict=True)):
        asked = dataclasses.replace(
            make_row(prompt=request.prompt, generated=choice.tokens[:i]), params=params
        )
        prefix = ids[:, : len(request.prompt) + i]
        scores = reference(asked)(prefix, row[None].clone())[0]
        if scores.max().isfinite():  # else everything was forbidden, and ours forgives a little
            assert float(scores.max() - scores[token]) < 1e-3
        ends = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        assert ends <= (i == len(choice.tokens) - 1)
    if params.logprobs is not None:
        for entry, row in zip(choice.logprobs, logits.log_softmax(-1), strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert len(entry.top) == params.logprobs
