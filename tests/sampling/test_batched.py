"""Drawing rows side by side: the very tokens of drawing them one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.sampling import SamplingRow, Selector, gumbel
from engine.sampling.batched import select
from engine.sampling.noise import gumbel_rows
from tests.sampling.support import EOS, make_row


def some_ask(dice: random.Random, size: int) -> dict[str, Any]:
    """Parameters of a request, some of them at their edges."""

    def ids(count: int) -> list[int]:
        return [dice.randrange(size + 3) for _ in range(count)]

    ask: dict[str, Any] = {"temperature": dice.choice((0.0, 0.3, 1.0, 1.7))}
    may: dict[str, Any] = {
        "top_k": dice.choice((1, 3, size, size + 5)),
        "top_p": dice.choice((0.01, 0.5, 0.95, 0.999)),
        "min_p": dice.choice((0.05, 0.5, 1.0)),
        "repetition_penalty": dice.choice((0.7, 1.4)),
        "presence_penalty": dice.choice((-1.0, 0.6)),
        "frequency_penalty": dice.choice((-0.5, 0.9)),
        "logit_bias": {i: dice.uniform(-9, 9) for i in ids(4)},
        "allowed_token_ids": frozenset(ids(dice.choice((1, 9)))),
        "bad_words": tuple((i,) for i in ids(2)),
        "min_tokens": 9,
        "stop_token_ids": frozenset(ids(2)),
    }
    return ask | {name: value for name, value in may.items() if dice.random() < 0.3}


def make_rows(dice: random.Random, count: int, size: int) -> list[SamplingRow]:
    rows = []
    for _ in range(count):
        prompt, said = ([dice.randrange(size) for _ in range(dice.randrange(1, 9))] for _ in "ab")
        rows.append(make_row(prompt, said, dice.randrange(2**63), **some_ask(dice, size)))
    return rows


@pytest.mark.parametrize("size", [7, 50, 3000])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_single_rows(seed: int, size: int) -> None:
    """Whatever is asked for; with ties among the logits, and rows that are no numbers."""
    dice = random.Random(f"{seed} {size}")
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(24, size, generator=generator)
    logits[::2] = logits[::2].round()
    logits[5, 1:] = -torch.inf
    logits[9, 3], logits[10, 2] = torch.nan, torch.inf
    if seed % 2:
        logits = logits.to(torch.bfloat16)
    rows = make_rows(dice, 40, size)
    places = [dice.randrange(24) for _ in rows]
    before = logits.clone()
    found, sound = select(logits, places, rows)
    single = Selector(logits)
    assert sound == single.sound()
    wanted = single.select(places, rows)
    assert [(p, t) for p, t in zip(places, found, strict=True) if sound[p]] == [
        (p, t) for p, t in zip(places, wanted, strict=True) if sound[p]
    ]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_equal_weights_are_cut_by_id() -> None:
    """Of equally likely tokens the nucleus takes the lowest ids."""
    logits = torch.zeros(1, 8)
    for share, most in ((0.5, 4), (0.51, 5), (0.1, 1)):
        rows = [make_row(seed=i, top_p=share) for i in range(200)]
        tokens, _ = select(logits, [0] * 200, rows)
        assert set(tokens) == set(range(most))


def test_masks_may_leave_nothing() -> None:
    """All that is allowed is impossible: then it is all alike."""
    logits = torch.zeros(2, 6)
    logits[0, 2:4] = -torch.inf
    only = {"allowed_token_ids": frozenset({2, 3})}
    rows = [make_row(seed=i, **only) for i in range(64)]
    tokens, sound = select(logits, [0] * 64, rows)
    assert set(tokens) == {2, 3}
    assert sound == [True, True]
    rows = [make_row(seed=i, allowed_token_ids=EOS, min_tokens=3) for i in range(8)]
    assert select(logits, [1] * 8, rows)[0] == [2] * 8  # what is allowed binds harder


def test_the_noise_is_the_same_for_many_keys() -> None:
    ids = torch.arange(100)
    keys = [0, 1, 2**64 - 1, 2**63, 12345678901234567890]
    table = gumbel_rows(keys, 100, torch.device("cpu"))
    assert all(torch.equal(row, gumbel(key, ids)) for key, row in zip(keys, table, strict=True))


def test_nothing_to_draw() -> None:
    assert select(torch.empty(0, 5), [], []) == ([], [])
    assert select(torch.zeros(2, 5), [], []) == ([], [True, True])
