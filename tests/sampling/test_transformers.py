"""Equality with transformers' own logits processors, in our documented order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import SamplingRow, process_logits
from tests.sampling.support import EOS, make_row

V = 997
NEVER = -math.inf


class Counts(LogitsProcessor):
    """Presence and frequency penalty from dense counts of the generated tokens."""

    def __init__(self, row: SamplingRow) -> None:
        self.row = row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated = input_ids[0, len(self.row.prompt) :]
        counts = torch.bincount(generated, minlength=scores.shape[1]).double()
        params = self.row.params
        penalty = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
        return scores - penalty.float()


class Bias(LogitsProcessor):
    """logit_bias and allowed_token_ids."""

    def __init__(self, row: SamplingRow) -> None:
        self.row = row

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores)
        for token, value in self.row.params.logit_bias.items():
            bias[0, token] = value
        scores = scores + bias
        if self.row.params.allowed_token_ids is not None:
            barred = torch.ones_like(scores, dtype=torch.bool)
            barred[0, list(self.row.params.allowed_token_ids)] = False
            scores = scores.masked_fill(barred, NEVER)
        return scores


def reference(row: SamplingRow) -> LogitsProcessorList:
    p = row.params
    steps = LogitsProcessorList()
    if p.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    steps += [Counts(row), Bias(row)]
    if p.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(w) for w in p.bad_words], list(EOS)))
    if p.min_tokens:
        stops = sorted(EOS | p.stop_token_ids)
        steps.append(MinNewTokensLengthLogitsProcessor(len(row.prompt), p.min_tokens, stops))
    if not p.greedy:
        steps.append(TemperatureLogitsWarper(p.temperature))
        if p.top_k:
            steps.append(TopKLogitsWarper(p.top_k))
        if p.top_p < 1.0:
            steps.append(TopPLogitsWarper(p.top_p))
        if p.min_p > 0.0:
            steps.append(MinPLogitsWarper(p.min_p))
    return steps


def expected(logits: Tensor, row: SamplingRow) -> Tensor:
    ids = torch.tensor([[*row.prompt, *row.generated]])
    return reference(row)(ids, logits[None].float())[0]


def edge(logits: Tensor, row: SamplingRow) -> float:
    """How near the nucleus's mass comes to top_p: closer than rounding, either answer is right."""
    if row.params.top_p >= 1.0:
        return 1.0
    before = expected(logits, replace(row, params=replace(row.params, top_p=1.0, min_p=0.0)))
    mass = before.double().softmax(0).sort(descending=True).values.cumsum(0)
    return float((mass - row.params.top_p).abs().min())


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 20},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.9},
    "top_p small": {"top_p": 1e-6},
    "top_p nearly 1": {"top_p": 0.9995},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "all truncations": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {3: 5.0, 700: -100.0, 996: 100.0}},
    "allowed": {"allowed_token_ids": frozenset(range(0, 900, 7))},
    "bad words": {"bad_words": ((17,), (5, 9), (8, 5, 11), (2,), (1, 2, 3, 4, 5, 6, 7, 8))},
    "min_tokens": {"min_tokens": 15, "stop_token_ids": frozenset({40, 41})},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": frozenset({40, 41})},
    "everything": {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 2.5, 8: -1.0},
        "allowed_token_ids": frozenset(range(2, 950)),
        "bad_words": ((5, 9), (30,)),
        "min_tokens": 9,
        "stop_token_ids": frozenset({12}),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_transformers(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    compared = 0
    for scale in (0.5, 2.0, 6.0):
        logits = (torch.randn(8, V, generator=generator) * scale).to(dtype)
        rows = [
            make_row(
                (1, 6, 8, 6), (4, 4, 4, 9, 100 + i, 3, 8, 5), **{"max_tokens": 99} | CASES[name]
            )
            for i in range(8)
        ]
        processed = process_logits(logits, rows)
        for ours, row_logits, row in zip(processed, logits, rows, strict=True):
            if edge(row_logits, row) > 2e-6:
                compared += 1
                assert_same_distribution(ours, expected(row_logits, row), row)
    assert compared >= 20


def assert_same_distribution(ours: Tensor, theirs: Tensor, row: SamplingRow) -> None:
    """Bit for bit, but for which of equally likely tokens top-p cuts: transformers' sort leaves
    that open, ours keeps the lowest ids."""
    if torch.equal(ours, theirs):
        return
    assert row.params.top_p < 1.0
    assert torch.equal(ours.sort().values, theirs.sort().values)
    differs = ours != theirs
    cut = torch.where(ours.isfinite(), ours, theirs)[differs].unique()
    assert cut.numel() == 1
    assert cut[0] == ours[ours.isfinite()].min()


def test_a_bad_word_is_barred_only_after_its_beginning() -> None:
    logits = torch.zeros(1, 20)
    for prompt, generated, barred in [
        ((1, 5), (), True),  # its beginning may lie in the prompt,
        ((1,), (5,), True),
        ((1, 4), (5,), False),
        ((4,), (5, 6), False),
        ((4, 1), (6, 5), False),
    ]:
        row = make_row(prompt, generated, bad_words=((1, 5, 9),))
        assert bool(process_logits(logits, [row])[0, 9].isinf()) is barred
    assert process_logits(logits, [make_row((5,), bad_words=((1, 5, 9),))])[0, 9] == 0.0
    across = make_row((7, 1), (5,), bad_words=((1, 5, 9), (7, 1, 5, 3)))
    processed = process_logits(logits, [across])[0]
    assert processed.isinf().nonzero().flatten().tolist() == [3, 9]
