"""Sampled answers: the same tokens and log probabilities with and without speculation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest
import torch

from engine.types import Request, SamplingParams
from tests.drafters import Answers, adversaries
from tests.fakes import Run, Setup, ask, make_engine, run, tiny
from tests.tiny_models import EOS, VOCAB, eager

DTYPES = [torch.float32, torch.bfloat16]
DRAFTERS = ("lookup", "right", "right at first", "wrong", "random")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: What each request of a mixed batch asks for.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "hot": {"temperature": 2.0},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "reward": {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    "bias": {"temperature": 0.8, "logit_bias": {7: 4.0, 8: -100.0, EOS: 1.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": frozenset(range(10, 20))},
    "bad words": {"temperature": 0.3, "bad_words": ((5,), (11, 12), (13, 14, 15))},
    "late end": {"temperature": 1.0, "min_tokens": 9, "logit_bias": {EOS: 6.0}},
    "no end": {"temperature": 1.0, "ignore_eos": True, "logit_bias": {EOS: 6.0}},
    "stop tokens": {"temperature": 0.8, "stop_token_ids": frozenset(range(60, 70))},
    "choices": {"temperature": 0.8, "n": 3},
    "greedy choices": {"temperature": 0.0, "n": 2},
}


def requests(**extra: Any) -> list[Request]:
    """One request of each kind, with prompts of their own that repeat themselves."""
    dice = random.Random(3)
    made = []
    for i, (name, params) in enumerate(KINDS.items()):
        part = [dice.randrange(VOCAB) for _ in range(3 + i % 4)]
        sampling = SamplingParams(**({"max_tokens": 18, "seed": 100 + i} | params | extra))
        made.append(Request(name, (i + 3, *part, *part, *part), sampling))
    return made


@functools.cache
def baseline(setup: Setup, logprobs: int | None, prompt_logprobs: int | None) -> dict[str, Any]:
    """What every request says alone, without speculation, prefix reuse or chunks."""
    said = {}
    for request in requests(logprobs=logprobs, prompt_logprobs=prompt_logprobs):
        engine = make_engine(setup, drafter="none", prefix_reuse=False, page_size=16)
        said[request.request_id] = run(engine, [request]).said(request.request_id)
    return said


@functools.cache
def answers(setup: Setup) -> Answers:
    """The target's own continuations, for drafters that know them."""
    known: Answers = {}
    for request in requests():
        done = run(make_engine(setup, drafter="none"), [request])
        for i, choice in done.answers[request.request_id].choices.items():
            known[request.prompt, i] = tuple(choice.tokens)
    return known


def check_same(done: Run, expected: dict[str, Any]) -> None:
    """Tokens, log probabilities to the last bit, reasons, stop tokens."""
    for request_id in done.requests:
        assert done.said(request_id) == expected[request_id], request_id


SETUPS = {
    f"{family}-{str(dtype).removeprefix('torch.')}-{runner}": (family, dtype, runner)
    for dtype in DTYPES
    for family, runner in (("llama", "native"), ("qwen3", "native"), ("qwen2", "torch"))
}


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return tiny_of(*SETUPS[request.param])


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> int:
    """The number of the test's setup, which decides whose turn it is."""
    return list(SETUPS).index(request.node.callspec.params["setup"])


@functools.cache
def tiny_of(family: str, dtype: torch.dtype, runner: str) -> Setup:
    return tiny(family, dtype, runner)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_and_logprobs_with_speculation(setup: Setup, turn: int, drafter: str) -> None:
    """Every kind of sampling in one batch, whatever is drafted, to the last bit; twice. Draft
    lengths and page sizes take turns: each meets every setup and every drafter."""
    made = drafter if drafter == "lookup" else adversaries(answers(setup))[drafter]
    expected = baseline(setup, 3, None)
    max_draft, page_size = ((1, 3), (4, 8), (8, 1))[(turn + DRAFTERS.index(drafter)) % 3]
    engine = make_engine(setup, drafter=made, max_draft=max_draft, page_size=page_size)
    for _ in range(2):  # the second time from the prefix index
        done = run(engine, requests(logprobs=3))
        check_same(done, expected)
    assert done.accepted or drafter != "right"


def test_same_under_preemption(setup: Setup) -> None:
    expected = baseline(setup, 3, None)
    for drafter in ("none", "lookup"):
        engine = make_engine(setup, drafter=drafter, page_size=4, num_pages=30)
        done = run(engine, requests(logprobs=3), check=True)
        assert done.preemptions
        check_same(done, expected)


def test_same_in_small_steps(setup: Setup) -> None:
    """A budget so small that prompts are cut into chunks and drafts are cut short."""
    expected = baseline(setup, 3, None)
    engine = make_engine(setup, drafter="lookup", max_sequences=3, max_batch_tokens=5)
    check_same(run(engine, requests(logprobs=3)), expected)


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_prompt_logprobs_are_those_of_one_pass(setup: Setup, turn: int, drafter: str) -> None:
    """Chunks, company, drafts, prefix reuse and preemption leave them as they are."""
    expected = baseline(setup, 2, 2)
    num_pages = (256, 30)[(turn + (drafter == "lookup")) % 2]  # plenty, or too few
    engine = make_engine(
        setup, drafter=drafter, num_pages=num_pages, max_sequences=6, max_batch_tokens=13
    )
    for _ in range(2):
        check_same(run(engine, requests(logprobs=2, prompt_logprobs=2), check=True), expected)


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    """An old sequence takes the pages of one that has read only half of its prompt."""
    setup = tiny()
    prompt = tuple(range(3, 35))
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    probe = Request("probe", prompt, sampling)
    alone = run(make_engine(setup), [probe]).said("probe")
    engine = make_engine(setup, page_size=4, num_pages=12, max_sequences=2, max_batch_tokens=4)
    elder = ask("elder", (9,) * 8, 30, ignore_eos=True)
    done = Run(engine, [elder])
    for _ in range(3):
        done.step()
    done.add(probe)
    done.finish(check=True)
    assert done.answers["probe"].choices[0].end.stats.preemptions
    assert done.said("probe") == alone


def test_logprobs_are_the_models_own() -> None:
    """Penalties, temperature and masks choose the token; log probabilities know nothing of them.
    Checked against transformers' forward over prompt and answer."""
    done = run(make_engine(tiny("qwen3"), drafter="lookup"), requests(logprobs=4))
    for request_id, request in done.requests.items():
        for choice in done.answers[request_id].choices.values():
            ids = torch.tensor([[*request.prompt, *choice.tokens]])
            logits = eager("qwen3")(ids).logits[0]
            wanted = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
            for row, entry in zip(wanted, choice.logprobs, strict=True):
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
                assert len(entry.top) == 4
                for token, logprob in entry.top:
                    assert logprob == pytest.approx(float(row[token]), abs=1e-4)
                best = row.topk(4).values.tolist()
                assert [p for _, p in entry.top] == pytest.approx(best, abs=1e-4)
                rank = int((row > row[entry.token_id]).sum()) + 1
                assert abs(entry.rank - rank) <= 1


def test_parameters_take_effect_at_every_draft_position() -> None:
    """Not only the same as without speculation, but what was asked for."""
    setup = tiny()
    drafter = adversaries(answers(setup))["right"]
    done = run(make_engine(setup, drafter=drafter, max_draft=8), requests())
    assert done.accepted
    said = {name: a.choices[0] for name, a in done.answers.items()}
    assert set(said["allowed"].tokens) - {EOS} <= set(range(10, 20))
    assert 8 not in said["bias"].tokens
    assert 5 not in said["bad words"].tokens
    text = [*done.requests["bad words"].prompt, *said["bad words"].tokens]
    assert (11, 12) not in list(itertools.pairwise(text))
    assert len(said["late end"].tokens) >= 9
    assert EOS in said["no end"].tokens
    assert len(said["no end"].tokens) == 18
    assert len(set(said["reward"].tokens)) < 5
    assert max(map(said["greedy penalties"].tokens.count, range(VOCAB))) <= 3
    choices = done.answers["greedy choices"].choices
    assert choices[0].tokens == choices[1].tokens
    three = done.answers["choices"].choices
    assert len({tuple(c.tokens) for c in three.values()}) == 3


def test_seeds_decide() -> None:
    """Another seed, another text; without a seed every request has its own."""
    setup = tiny()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    seeds = [1, 1, 2, -1, 2**63 - 1, None, None]
    asked = [
        Request(str(i), (4, 5, 6), dataclasses.replace(params, seed=seed))
        for i, seed in enumerate(seeds)
    ]
    done = run(make_engine(setup, drafter="lookup"), asked)
    said = [done.answers[str(i)].tokens for i in range(len(seeds))]
    assert said[0] == said[1]
    assert len(set(said)) == len(said) - 1
