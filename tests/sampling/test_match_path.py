"""Match verification walks the path of plain decoding: any draft, any parameters, any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import SamplingRow, match
from tests.sampling.support import make_row, select_tokens

V = 12
LENGTH = 14

#: (text so far, draft length) -> draft
Drafter = Callable[[list[int], int], list[int]]


def model(tokens: Sequence[int]) -> Tensor:
    """Logits [V] that depend on every token."""
    state = 1
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1) % 2**63
    return torch.randn(V, generator=torch.Generator().manual_seed(state)) * 2


def row_after(prompt: list[int], generated: list[int], seed: int, params: Any) -> SamplingRow:
    return make_row(prompt, generated, seed=seed, max_tokens=LENGTH, **params)


def plain(prompt: list[int], seed: int, params: Any) -> list[int]:
    text: list[int] = []
    for _ in range(LENGTH):
        row = row_after(prompt, text, seed, params)
        text += select_tokens(model(prompt + text)[None], [row])
    return text


def speculative(
    prompt: list[int], seed: int, params: Any, drafter: Drafter, lengths: Sequence[int]
) -> tuple[list[int], int]:
    """The text, and the number of passes it took."""
    text: list[int] = []
    passes = 0
    while len(text) < LENGTH:
        draft = drafter(prompt + text, lengths[passes % len(lengths)])
        befores = [text + draft[:depth] for depth in range(len(draft) + 1)]
        logits = torch.stack([model(prompt + before) for before in befores])
        rows = [row_after(prompt, before, seed, params) for before in befores]
        target = select_tokens(logits, rows)
        text = text + target[: match(target, draft) + 1]
        passes += 1
    return text[:LENGTH], passes


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 4, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.6},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "temperature": 0.5},
    {"bad_words": ((3,), (4, 5), (1, 6)), "logit_bias": {7: 3.0}},
    {"min_tokens": 9, "stop_token_ids": frozenset({1, 8}), "temperature": 0.0},
    {"allowed_token_ids": frozenset({1, 4, 5, 9}), "repetition_penalty": 1.2},
]


@settings(max_examples=60, deadline=None)
@given(
    params=st.sampled_from(PARAMS),
    seed=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    drafts=st.lists(st.integers(0, V + 3), min_size=7, max_size=7),
)
def test_any_draft_leads_to_the_plain_text(
    params: Any, seed: int, prompt: list[int], lengths: list[int], drafts: list[int]
) -> None:
    """Garbage, tokens beyond the vocabulary included, costs passes and nothing else."""
    expected = plain(prompt, seed, params)

    def garbage(text: list[int], length: int) -> list[int]:
        return [drafts[(len(text) + i) % 7] for i in range(length)]

    def oracle(text: list[int], length: int) -> list[int]:
        start = len(text) - len(prompt)
        return expected[start : start + length]

    assert speculative(prompt, seed, params, garbage, lengths)[0] == expected
    text, passes = speculative(prompt, seed, params, oracle, [4])
    assert text == expected
    assert passes == -(-LENGTH // 5)


@pytest.mark.parametrize("params", PARAMS[4:6])
def test_penalties_that_see_rejected_tokens_are_noticed(params: Any) -> None:
    """The bug that keeps a step's draft in the text that penalties look at."""
    differing = 0
    for seed in range(10):
        expected = plain([1], seed, params)
        text: list[int] = []
        ghosts: list[int] = []
        while len(text) < LENGTH:
            draft = [(len(text) + i) % V for i in range(3)]
            befores = [text + draft[:depth] for depth in range(4)]
            logits = torch.stack([model([1, *before]) for before in befores])
            rows = [row_after([1], before, seed, params) for before in befores]
            haunted = [
                SamplingRow(
                    r.params,
                    r.prompt,
                    [*ghosts, *r.generated],
                    r.position,
                    seed,
                    0,
                    r.eos_token_ids,
                )
                for r in rows
            ]
            target = select_tokens(logits, haunted)
            accepted = match(target, draft)
            ghosts += draft[accepted:]
            text = text + target[: accepted + 1]
        differing += text[:LENGTH] != expected
    assert differing >= 5


def test_penalties_that_miss_the_draft_are_noticed() -> None:
    """The bug that gives every row of a step the same text to look at."""
    params = {"temperature": 0.0, "repetition_penalty": 3.0}
    differing = 0
    for start in range(V):
        expected = plain([start], 0, params)
        draft = expected[:4]
        befores = [draft[:depth] for depth in range(5)]
        logits = torch.stack([model([start, *before]) for before in befores])
        stale = [row_after([start], [], 0, params) for _ in befores]
        differing += select_tokens(logits, stale) != expected[:5]
    assert differing >= 3


def test_choices_of_one_request_differ_and_are_reproducible() -> None:
    logits = torch.zeros(8, 1000)
    rows = [make_row(seed=5, choice=i) for i in range(8)]
    chosen = select_tokens(logits, rows)
    assert len(set(chosen)) == 8
    assert select_tokens(logits, rows) == chosen
