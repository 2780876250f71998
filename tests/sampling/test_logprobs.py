from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import token_logprobs
from engine.types import TokenLogprobs


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


def plain_logprobs(logits: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """One row by itself, step by step, everything sorted."""
    row = logits.float()
    total = float(row.max()) + math.log(float((row - row.max()).exp().sum(dtype=torch.float64)))
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    best = tuple((i, float(row[i]) - total) for i in order[:top])
    return TokenLogprobs(token, float(row[token]) - total, order.index(token) + 1, best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_what_each_is_by_itself_bit_for_bit(dtype: torch.dtype) -> None:
    """More than are computed at a time, with and without ties."""
    logits = (torch.randn(21, 3000, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    tokens = torch.randint(0, 3000, (21,), generator=torch.Generator().manual_seed(4)).tolist()
    for top in (0, 1, 20):
        expected = [plain_logprobs(r, t, top) for r, t in zip(logits, tokens, strict=True)]
        assert token_logprobs(logits, tokens, top) == expected


def test_rows_are_computed_by_one_thread_and_do_not_depend_on_how_many_there_are() -> None:
    """Threads that meet a dozen times a row stand still on a busy machine; and a sum that is
    shared out depends on how many share it."""
    logits = (torch.randn(3, 200_000, generator=torch.Generator().manual_seed(5)) * 4).bfloat16()
    alone = token_logprobs(logits, [1, 2, 3], 3)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(torch.get_num_threads())
            return func(*args, **(kwargs or {}))

    try:
        with Watch():
            assert token_logprobs(logits, [1, 2, 3], 3) == alone
        assert seen == {1}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_every_row_needs_its_token() -> None:
    with pytest.raises(ValueError, match="1 tokens cannot be looked up in 2 rows"):
        token_logprobs(torch.zeros(2, 4), [1], 0)
    assert token_logprobs(torch.zeros(0, 4), [], 5) == []
