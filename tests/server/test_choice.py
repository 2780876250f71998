"""Stop strings, hold-back, and one answer however the tokens were grouped."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import DraftTrace
from server.text.choice import ChoiceText, Delta, TextRules
from server.text.codec import TextCodec
from server.text.stop import StopMatcher
from tests.server.support import TEXT, ids, logprob_of, make_tokenizer

AB = st.text("ab", max_size=24)


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The stop string that is complete first, by trying every prefix of the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


@settings(max_examples=500, deadline=None)
@given(AB, st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_matcher_equals_brute_force(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        found = matcher.feed(text[start:end])
        expected = first_stop(text[:end], stops)
        if expected is not None:
            assert found == (expected[0], expected[1] - start)
            return
        assert found is None
        held = max(
            (n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])),
            default=0,
        )
        assert matcher.held == held


def play(
    rules: TextRules, tokens: list[int], blocks: list[int], traced: bool = False
) -> list[Delta]:
    """Feeds tokens in blocks, as speculation would, and collects what is released."""
    detokenizer = TextCodec(make_tokenizer()).detokenizer(skip_special_tokens=True)
    text = ChoiceText(rules, detokenizer)
    deltas, position = [], 0
    for size in blocks:
        block = tokens[position : position + size]
        position += size
        trace = DraftTrace("lookup", 9, len(block) - 1, (7,)) if traced and block else None
        delta = text.push(block, [logprob_of(token, 1) for token in block], trace)
        if delta is not None:
            deltas.append(delta)
        if text.finished:
            return deltas
    deltas.append(text.finish("length", None))
    return deltas


def joined(deltas: list[Delta]) -> tuple[object, ...]:
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or ()],
        [offset for delta in deltas for offset in delta.offsets],
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_grouping_of_tokens_never_shows(data: st.DataObject) -> None:
    tokens = ids(TEXT)
    stop = data.draw(
        st.lists(
            st.sampled_from(["fox", " the", "🚀", "🦊🚀", "wör", "zzz", "END o", "e"]), max_size=3
        )
    )
    rules = TextRules(
        stop=tuple(stop),
        include_stop=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 30)),
    )
    blocks = data.draw(st.lists(st.integers(1, 7), min_size=len(tokens), max_size=len(tokens)))
    assert joined(play(rules, tokens, blocks)) == joined(play(rules, tokens, [1] * len(tokens)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_are_the_text_token_by_token(data: st.DataObject) -> None:
    """Whatever is held back, and wherever a character or a stop string is cut."""
    tokens = [*ids(TEXT), *ids("🦊")[:1]]  # ends within a character
    stop = data.draw(st.lists(st.sampled_from(["fox", "🦊🚀", "END o", "zzz"]), max_size=2))
    blocks = data.draw(st.lists(st.integers(1, 7), min_size=len(tokens), max_size=len(tokens)))
    deltas = play(TextRules(stop=tuple(stop)), tokens, blocks, traced=True)
    for delta in deltas:
        assert "".join(piece.text for piece in delta.pieces) == delta.text
        assert [p.partial for p in delta.pieces[: len(delta.token_ids)]] == [False] * len(
            delta.token_ids
        )
    whole = [piece for delta in deltas for piece in delta.pieces if not piece.partial]
    lasts = set(itertools.accumulate(blocks))  # numbers of tokens after which a step ended
    lasts.add(len(tokens))
    for number, piece in enumerate(whole, 1):
        by_model = number in lasts
        assert piece.drafter == (None if by_model else "lookup")
        assert (piece.refused, piece.drafted) == (((7,), 9) if by_model else ((), 0))
    assert all(not delta.pieces for delta in play(TextRules(), tokens, blocks))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_stop_string_inside_a_block_ends_everything_at_one_token(size: int) -> None:
    tokens = ids("one two STOP three")
    through = len(ids("one two STOP"))
    deltas = play(TextRules(stop=("STOP",)), tokens, [size] * len(tokens))
    text, released, logprobs, offsets, reason, stop = joined(deltas)
    assert text == "one two "
    assert released == tokens[:through]
    assert len(logprobs) == len(offsets) == through  # type: ignore[arg-type]
    assert max(offsets) <= len(str(text))  # type: ignore[call-overload]
    assert (reason, stop) == ("stop", "STOP")


def test_text_that_may_begin_a_stop_string_waits() -> None:
    tokens = ids("xSTOy")
    deltas = play(TextRules(stop=("STOP",)), tokens, [1] * len(tokens))
    assert [delta.text for delta in deltas if delta.text] == ["x", "STOy"]


def test_held_text_is_released_at_the_end() -> None:
    tokens = ids("xSTO")
    deltas = play(TextRules(stop=("STOP",)), tokens, [1] * len(tokens))
    assert joined(deltas)[0] == "xSTO"
    assert joined(deltas)[1] == tokens


def test_the_first_complete_stop_string_wins() -> None:
    tokens = ids("a b c d")
    deltas = play(TextRules(stop=("b c d", "c")), tokens, [100])
    assert joined(deltas)[0] == "a b "
    assert deltas[-1].stop_reason == "c"


def test_no_stop_string_counts_before_min_tokens() -> None:
    tokens = ids("STOP and STOP")
    deltas = play(TextRules(stop=("STOP",), min_tokens=5), tokens, [100])
    assert joined(deltas)[0] == "STOP and "


def test_a_token_that_ends_a_choice_has_no_text_but_counts() -> None:
    tokens = [*ids("ab"), ids("c")[0]]
    rules = TextRules(terminators=frozenset(ids("c")), stop_token_ids=frozenset(ids("c")))
    detokenizer = TextCodec(make_tokenizer()).detokenizer(skip_special_tokens=True)
    text = ChoiceText(rules, detokenizer)
    first = text.push(tokens, None)
    last = text.finish("stop", tokens[-1])
    assert first is not None
    assert first.text + last.text == "ab"
    assert list(first.token_ids + last.token_ids) == tokens
    assert text.tokens == 3
    assert last.stop_reason == tokens[-1]
