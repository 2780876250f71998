from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import token_logprobs


def test_equal_to_log_softmax() -> None:
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)) * 5
    tokens = torch.randint(0, 500, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits.double().log_softmax(-1)
    for i, entry in enumerate(token_logprobs(logits, tokens, 5)):
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(float(expected[i, tokens[i]]), abs=2e-6)
        best = expected[i].topk(5)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=2e-6)
        assert entry.rank == 1 + int((logits[i] > logits[i, tokens[i]]).sum())


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([7, 100, 3001]), st.integers(0, 9))
def test_a_row_never_depends_on_its_neighbours(seed: int, rows: int, size: int, top: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, size, generator=generator) * 3).bfloat16()  # many ties
    tokens = torch.randint(0, size, (rows,), generator=generator).tolist()
    together = token_logprobs(logits, tokens, top)
    for i in range(rows):
        assert token_logprobs(logits[i : i + 1].clone(), tokens[i : i + 1], top) == [together[i]]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=12), st.data())
def test_ties_rank_by_token_id(values: list[float], data: st.DataObject) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    token = data.draw(st.integers(0, len(values) - 1))
    top = data.draw(st.integers(0, len(values) + 3))  # more than there are: all of them
    (entry,) = token_logprobs(torch.tensor([values]), [token], top)
    assert entry.rank == order.index(token) + 1
    assert [t for t, _ in entry.top] == order[:top]
    if entry.rank <= top:
        assert entry.top[entry.rank - 1] == (token, entry.logprob)


def test_hundreds_of_ties_rank_by_token_id() -> None:
    (entry,) = token_logprobs(torch.arange(2000)[None] % 3 * 1.0, [5], 700)
    assert [t for t, _ in entry.top] == [*range(2, 2000, 3), *range(1, 103, 3)]
    assert entry.rank == 2


def test_no_alternates_asked_is_still_an_entry() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 4), [2], 0)
    assert entry.top == ()
    assert entry.rank == 3
    assert entry.logprob == pytest.approx(-math.log(4))


def test_padding_takes_no_part() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 4:] = 100.0
    (entry,) = token_logprobs(logits, [1], 10, vocab_size=4)
    assert entry.logprob == pytest.approx(-math.log(4))
    assert [t for t, _ in entry.top] == [0, 1, 2, 3]


def test_an_impossible_token_is_minus_infinity_not_nan() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -torch.inf]]), [1], 2)
    assert entry.logprob == -math.inf
    assert entry.rank == 2
    assert entry.top == ((0, 0.0), (1, -math.inf))


def test_a_certain_token_is_zero() -> None:
    (entry,) = token_logprobs(torch.tensor([[500.0, 0.0]]), [0], 1)
    assert entry.logprob == 0.0


def test_every_row_needs_its_token() -> None:
    with pytest.raises(ValueError, match="zip"):
        token_logprobs(torch.zeros(2, 4), [1], 0)
    assert token_logprobs(torch.zeros(0, 4), [], 5) == []
