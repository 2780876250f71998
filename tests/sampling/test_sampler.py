"""Drawing a step: the tokens of plain decoding, and what of the logits has to be sound."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import (
    BatchSampler,
    Draw,
    KeyedChance,
    RowSampler,
    Sampler,
    SamplingRow,
    Selector,
    block,
    probabilities,
    process_logits,
    rejection,
)
from tests.sampling.support import make_row, select_tokens

V, PADDED = 50, 56
SAMPLERS = [RowSampler, BatchSampler]

ASKS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {7: 2.0}},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 5, "presence_penalty": 1.0},
    {"min_p": 0.1, "repetition_penalty": 1.3},
    {},
]


def context(ask: dict[str, Any], seed: int, draft: Sequence[int], depth: int) -> SamplingRow:
    return make_row((3, 4), [9, *draft[:depth]], seed=seed, **ask)


def step(seed: int) -> tuple[Tensor, list[Draw]]:
    """Logits of a step, and draws of all kinds in it: drafts that hold for a while, none at all,
    rows of a prompt before them, a sequence that draws nothing."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    draws: list[Draw] = []
    tables: list[Tensor] = []
    row = 0
    for i in range(8):
        ask, before, length = dice.choice(ASKS), dice.choice((0, 0, 3)), dice.randint(0, 4)
        logits = torch.randn(before + 1 + length, PADDED, generator=generator) * 3
        logits[:, V:] = 50.0  # padding is never drawn
        tables.append(logits)
        rows = range(row, row + len(logits))
        row = rows.stop
        if i == 5:
            draws.append(Draw(rows, None, partial(context, ask, i, [])))
            continue
        draft: list[int] = []
        holds = dice.randint(0, length)
        for depth in range(length):
            said = select_tokens(logits[before + depth, :V][None], [context(ask, i, draft, depth)])
            draft.append(said[0] if depth < holds else (said[0] + 1) % V)
        draws.append(Draw(rows, draft, partial(context, ask, i, draft)))
    return torch.cat(tables), draws


def one_by_one(logits: Tensor, draw: Draw) -> list[int]:
    """What plain decoding says, until the draft says something else."""
    if draw.draft is None:
        return []
    said: list[int] = []
    own = logits[draw.rows.start : draw.rows.stop, :V][-1 - len(draw.draft) :]
    for depth, row in enumerate(own):
        said += select_tokens(row[None], [draw.context(depth)])
        if list(draw.draft[depth : depth + 1]) != said[-1:]:
            break
    return said


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", range(30))
def test_tokens_are_those_of_plain_decoding(seed: int, sampler: type[Sampler]) -> None:
    logits, draws = step(seed)
    before = logits.clone()
    drawn = sampler(V).draw(logits, draws)
    assert [one.tokens for one in drawn] == [one_by_one(logits, draw) for draw in draws]
    assert all(one.sound for one in drawn)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_counts_exactly_if_plain_decoding_would_have_it(
    seed: int, bad: float, sampler: type[Sampler]
) -> None:
    logits, draws = step(seed)
    kept = [one.tokens for one in sampler(V).draw(logits, draws)]
    for i, (draw, tokens) in enumerate(zip(draws, kept, strict=True)):
        for row in draw.rows:
            spoiled = logits.clone()
            spoiled[row, 11] = bad
            drawn = sampler(V).draw(spoiled, draws)
            behind = draw.rows.stop - row <= len(draw.draft or ()) + 1 - len(tokens)
            sound = [one.sound for one in drawn]
            assert sound == [j != i or (behind and draw.draft is not None) for j in range(8)]
            assert [t.tokens for t in drawn if t.sound] == [
                t for t, ok in zip(kept, sound, strict=True) if ok
            ]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_with_probabilities_are_judged_by_the_rule(
    rule: str, sampler: type[Sampler]
) -> None:
    apply = {"rejection": rejection, "block": block}[rule]
    lengths = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, PADDED, generator=generator)
        weights = torch.randn(3, V - 2, generator=generator).softmax(-1)  # a smaller vocabulary
        logits[:3, : V - 2] = 8 + 2 * weights.log() + seed % 3 * logits[:3, : V - 2]  # often agrees
        logits[:, V:] = 50.0
        draft = weights.argmax(-1).tolist()
        rows = [context({"temperature": 0.9}, seed, draft, depth) for depth in range(4)]
        draw = Draw(range(4), draft, rows.__getitem__, rule, weights)
        (drawn,) = sampler(V).draw(logits, [draw])
        target = probabilities(process_logits(logits[:, :V].contiguous(), rows))
        chance = KeyedChance(rows[0].seed, rows[0].choice, rows[0].position, rows[0].step)
        padded = torch.nn.functional.pad(weights, (0, 2))
        outcome = apply(target, draft, padded, chance)
        assert drawn.tokens == [*draft[: outcome.accepted], outcome.token]
        lengths.add(len(drawn.tokens))
        matched = sampler(V).draw(logits, [Draw(range(4), draft, rows.__getitem__)])
        assert matched[0].tokens == one_by_one(logits, draw)
    assert len(lengths) >= 3, lengths


class Reads(TorchDispatchMode):
    """Counts reads of single numbers, each of which a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ask", [ASKS[0], ASKS[1], ASKS[5], {"presence_penalty": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_is_waited_for_alone(ask: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.randn(32, V, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = [make_row((3, 4), (9,), seed=i, **ask) for i in range(32)]
    selector = Selector(logits)
    with Reads() as reads:
        selector.select(range(32), rows)
        selector.sound()
    assert reads.count == 0


@pytest.mark.parametrize("ask", ASKS)
def test_a_batch_is_read_back_once(ask: dict[str, Any]) -> None:
    """Nothing of a step but its end is waited for, however many rows there are."""
    logits = torch.randn(33, V, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(range(3 * i, 3 * i + 3), [1, 2], partial(context, ask, i, [1, 2])) for i in range(11)
    ]
    with Reads() as reads:
        BatchSampler(V).draw(logits, draws)
    # The largest k of all rows is one number more. On the host `max` of it is not a wait.
    assert reads.count <= 1
