"""What one row may and may not do to its logits, and that rows never meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import SamplingRow, Selector, process_logits, race
from engine.sampling.processors import peaks
from tests.sampling.support import EOS, make_row, select_tokens

INF = torch.inf


def row_strategy(vocabulary: int) -> st.SearchStrategy[SamplingRow]:
    """Any combination of features, each off more often than on."""
    token = st.integers(0, vocabulary - 1)

    def maybe(value: st.SearchStrategy[Any], off: Any) -> st.SearchStrategy[Any]:
        return st.one_of(st.just(off), st.just(off), value)

    return st.builds(
        make_row,
        prompt=st.lists(token, min_size=1, max_size=8).map(tuple),
        generated=st.lists(token, max_size=8),
        seed=st.integers(0, 2**64 - 1),
        choice=st.integers(0, 3),
        max_tokens=st.just(100),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=maybe(st.integers(1, vocabulary + 5), 0),
        top_p=maybe(st.floats(0.01, 0.999), 1.0),
        min_p=maybe(st.floats(0.001, 1.0), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        logit_bias=maybe(st.dictionaries(token, st.floats(-100, 100), max_size=5), {}),
        allowed_token_ids=maybe(st.frozensets(token, min_size=1, max_size=30), None),
        bad_words=maybe(
            st.lists(st.lists(token, min_size=1, max_size=2).map(tuple)).map(tuple), ()
        ),
        min_tokens=maybe(st.integers(0, 20), 0),
        ignore_eos=st.booleans(),
        stop_token_ids=maybe(st.frozensets(token, max_size=3), frozenset()),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_row_never_depends_on_its_neighbours(data: st.DataObject) -> None:
    """Bit for bit, alone or in any batch, at any place in it, and the input is left alone."""
    size = data.draw(st.sampled_from([5, 63, 257, 2500]))
    rows = data.draw(st.lists(row_strategy(size), min_size=1, max_size=6))
    padding = data.draw(st.sampled_from([0, 3]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = (torch.randn(len(rows), size + padding, generator=generator) * 4).to(dtype)
    before = logits.clone()

    together = process_logits(logits, rows, size)
    chosen = select_tokens(logits, rows, size)

    assert together.dtype == torch.float32
    assert not bool(together.isnan().any())
    assert bool((together[:, size:] == -INF).all())
    for i, row in enumerate(rows):
        alone = logits[i : i + 1].clone()
        assert torch.equal(process_logits(alone, [row], size)[0], together[i])
        assert select_tokens(alone, [row], size) == [chosen[i]]
        assert bool(together[i, chosen[i]].isfinite())
        drawn = (
            int(together[i].argmax()) if row.params.greedy else race(together[i : i + 1], [row])[0]
        )
        assert chosen[i] == drawn
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = process_logits(logits[order], [rows[i] for i in order], size)
    assert torch.equal(shuffled, together[order])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [4099, 50257])
def test_a_row_never_depends_on_its_neighbours_at_full_size(size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 3
    rows = [
        make_row(seed=1),
        make_row(seed=2, temperature=0.8, top_p=0.95),
        make_row(seed=3, temperature=1.5, top_p=0.99, min_p=0.001),
        make_row(seed=4, top_k=50, repetition_penalty=1.2),
    ]
    together, chosen = process_logits(logits, rows), select_tokens(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(process_logits(logits[i : i + 1].clone(), [row])[0], together[i])
        assert select_tokens(logits[i : i + 1].clone(), [row]) == [chosen[i]]
        assert race(together[i : i + 1], [row]) == [chosen[i]]


@given(row_strategy(40))
def test_a_plain_row_keeps_its_logits_beside_any_other(other: SamplingRow) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = [make_row(temperature=0.0), other, make_row()]
    processed = process_logits(logits, rows)
    assert torch.equal(processed[0], logits[0])
    assert torch.equal(processed[2], logits[2])


@given(row_strategy(40))
def test_penalties_touch_only_the_tokens_they_concern(row: SamplingRow) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    processed = process_logits(logits, [row])[0]
    concerned = {*row.prompt, *row.generated, *row.params.logit_bias}
    untouched = [i for i in range(40) if i not in concerned and processed[i] > -INF]
    scaled = logits[0] if row.params.greedy else logits[0] / row.params.temperature
    assert torch.equal(processed[untouched], scaled[untouched])


def test_nothing_asked_is_nothing_copied() -> None:
    logits = torch.randn(3, 50)
    rows = [make_row(temperature=0.0), make_row(), make_row(top_p=0.0)]
    assert process_logits(logits, rows) is logits
    assert process_logits(logits.bfloat16(), rows).dtype == torch.float32


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 3.0, 10.0])
def test_a_large_nucleus_is_the_sorted_prefix(top_p: float, scale: float) -> None:
    """Against the definition in float64, where candidates are bracketed before sorting."""
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(3)) * scale
    processed = process_logits(logits, [make_row(top_p=top_p)])[0]
    weights = (logits[0] - logits.max()).exp().double()
    heaviest, order = weights.sort(descending=True, stable=True)
    before = heaviest.cumsum(0) - heaviest
    margin = (before / weights.sum() - top_p).abs().min()
    kept = set(order[before < top_p * weights.sum()].tolist())
    ours = set(processed.isfinite().nonzero().flatten().tolist())
    assert ours == kept or (margin < 1e-9 and len(ours ^ kept) == 1)


def test_of_equally_likely_tokens_top_p_keeps_the_lowest_ids() -> None:
    processed = process_logits(torch.zeros(1, 10), [make_row(top_p=0.35)])
    assert processed[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_top_k_keeps_all_that_equal_the_kth() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    processed = process_logits(logits, [make_row(top_k=2)])
    assert processed[0].isfinite().nonzero().flatten().tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 1000, dtype=dtype)
    logits[:, [400, 30, 999]] = 1.0
    rows = [make_row(temperature=0.0), make_row(temperature=0.0, logit_bias={0: -1.0})]
    assert select_tokens(logits, rows) == [30, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 511, 512, 1000, 4096, 5003])
def test_peaks_are_the_maximum_and_its_first_place(size: int, dtype: torch.dtype) -> None:
    """Few distinct values, so that ties abound, within blocks and across them."""
    make = torch.Generator().manual_seed(size)
    padded = torch.randint(-3, 4, (64, size + 5), generator=make).to(dtype)
    padded[:, size:] = 9.0
    rare = torch.full((size + 2, size), -1.0, dtype=dtype)
    rare[range(size), range(size)] = 0.0
    for logits in (padded[:, :size], rare[:, :size], padded[:2, :size], padded[:0, :size]):
        values, ids = peaks(logits)
        assert values == logits.amax(-1).tolist()
        assert ids == logits.float().argmax(-1).tolist()


def test_peaks_show_what_is_no_number() -> None:
    logits = torch.zeros(5, 700)
    for row, (place, bad) in enumerate([(3, torch.nan), (699, torch.nan), (650, INF), (0, -INF)]):
        logits[row, place] = bad
    logits[4] = -INF
    for table in (logits, logits.double()):
        assert list(map(math.isfinite, peaks(table)[0])) == [False, False, False, True, False]
    assert Selector(logits).sound() == [False, False, False, True, False]


def test_rows_are_chosen_from_in_any_order() -> None:
    """What is asked of other rows, and when, changes nothing."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    asks: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"temperature": 0.0, "top_k": 4}]
    asks += [{"temperature": 0.0, "logit_bias": {7: 9.0}}, {"top_p": 0.5}, {"min_p": 0.2}]
    rows = [make_row(seed=i, **ask) for i, ask in enumerate(asks)]
    expected = select_tokens(logits, rows)
    selector = Selector(logits)
    for picks in ([5, 0], [3], [4, 2, 1], [0, 0]):
        chosen = selector.select(picks, [rows[i] for i in picks])
        assert chosen == [expected[i] for i in picks]
    assert selector.select([], []) == []
    with pytest.raises(ValueError, match="1 rows for 2 rows of logits"):
        selector.select([0, 1], rows[:1])


def test_greedy_choice_is_of_the_processed_logits() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for params, token in [
        ({"logit_bias": {2: 5.0}}, 2),
        ({"allowed_token_ids": frozenset({1, 3})}, 1),
        ({"bad_words": ((0,),)}, 1),
        ({"repetition_penalty": 4.0}, 1),
    ]:
        row = make_row((0,), temperature=0.0, **params)
        assert select_tokens(logits, [row]) == [token]


def test_penalties_count_generated_tokens_and_their_drafts_but_no_prompt() -> None:
    row = make_row((5, 5, 6), (6, 7, 7, 7), presence_penalty=0.5, frequency_penalty=0.25)
    processed = process_logits(torch.zeros(1, 9), [row])[0]
    assert processed.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.75, -1.25, 0.0]


def test_min_tokens_bars_every_way_to_stop_until_it_is_reached() -> None:
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": frozenset({4})}
    for generated, ignore_eos, barred in [
        ((), False, [2, 4]),
        ((7,), False, [2, 4]),
        ((7, 7), False, []),
        ((), True, [4]),  # an ignored end of sequence stops nothing
    ]:
        row = make_row((1,), generated, ignore_eos=ignore_eos, **params)
        processed = process_logits(torch.zeros(1, 8), [row])[0]
        assert processed.isinf().nonzero().flatten().tolist() == barred


IMPOSSIBLE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "allowed is only the end": ({"allowed_token_ids": EOS, "min_tokens": 5}, [2]),
    "allowed is only a bad word": (
        {"allowed_token_ids": frozenset({4, 5}), "bad_words": ((4,), (5,))},
        [4, 5],
    ),
    "every token is a bad word, but the end never is": (
        {"bad_words": tuple((i,) for i in range(6))},
        [2],
    ),
    "every token is a bad word, and it may not end": (
        {"bad_words": tuple((i,) for i in range(6)), "min_tokens": 3},
        [0, 1, 2, 3, 4, 5],
    ),
    "allowed is beyond the vocabulary": (
        {"allowed_token_ids": frozenset({10**6})},
        [0, 1, 2, 3, 4, 5],
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_row_masked_entirely_still_yields_a_token(name: str, temperature: float) -> None:
    params, possible = IMPOSSIBLE[name]
    row = make_row(temperature=temperature, **params)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    processed = process_logits(logits, [row])[0]
    assert not bool(processed.isnan().any())
    assert processed.isfinite().nonzero().flatten().tolist() == possible
    beyond = name == "allowed is beyond the vocabulary"
    kept = torch.zeros(6) if beyond else logits[0] / (temperature or 1.0)
    assert torch.equal(processed[possible], kept[possible])
    assert select_tokens(logits, [row])[0] in possible


@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}]
)
def test_numbers_that_are_none_never_spread(bad: float, params: dict[str, Any]) -> None:
    logits = torch.zeros(3, 8)
    logits[0, 3] = bad
    logits[1] = bad
    rows = [make_row(**params) for _ in range(3)]
    processed, chosen = process_logits(logits, rows), select_tokens(logits, rows)
    assert not bool(processed.isnan().any())
    assert not bool((processed == INF).any())
    assert (chosen[0] == 3) is (bad == INF)
    assert all(0 <= token < 8 for token in chosen)
    assert torch.equal(processed[2], process_logits(torch.zeros(1, 8), rows[:1])[0])


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 2e38, -3e38, 0.0]])
    for params in ({"temperature": 1e-4}, {"temperature": 0.01, "top_p": 0.5}, {"top_k": 2}):
        processed = process_logits(logits, [make_row(**params)])
        assert not bool(processed.isnan().any())
        assert bool(processed[0, 0].isfinite())


def test_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    cold = [make_row(seed=i, temperature=1.1e-5) for i in range(50)]
    assert select_tokens(logits, cold) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_never_chosen(temperature: float) -> None:
    logits = torch.zeros(20, 12)
    logits[:, 10:] = 50.0
    rows = [make_row(seed=i, temperature=temperature, logit_bias={11: 9.0}) for i in range(20)]
    assert max(select_tokens(logits, rows, vocab_size=10)) < 10
    processed = process_logits(logits, rows, vocab_size=10)
    assert bool((processed[:, 10:] == -INF).all())
    assert bool((processed[:, :10] == 0.0).all())


def test_ids_the_model_has_no_logit_for_are_passed_over() -> None:
    row = make_row(
        (1, 900),
        (3, 901),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias={5: 1.0, 902: 1.0},
        bad_words=((903,),),
        allowed_token_ids=frozenset({1, 3, 5, 904}),
    )
    processed = process_logits(torch.ones(1, 8), [row])[0]
    assert processed[[1, 3, 5]].tolist() == [0.5, -0.5, 2.0]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="1 rows for 2 rows of logits"):
        process_logits(torch.zeros(2, 4), [make_row()])
    with pytest.raises(ValueError, match=r"vocab_size is 5, .* have 4 entries"):
        select_tokens(torch.zeros(1, 4), [make_row()], vocab_size=5)
    assert select_tokens(torch.zeros(0, 4), []) == []
    assert process_logits(torch.zeros(0, 4), []).shape == (0, 4)
