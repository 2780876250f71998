"""The suffix automaton against a search that tries everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft.automaton import _MAX_LINKS, SuffixAutomaton
from engine.tree import depths


def ends(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `text`, every time."""
    size = len(part)
    return [e for e in range(size, len(text) + 1) if text[e - size : e] == part]


def longest_repeated_suffix(text: list[int]) -> list[int]:
    for size in range(len(text) - 1, 0, -1):
        if len(ends(text, text[-size:])) > 1:
            return text[-size:]
    return []


def brute_force(text: list[int], count: int, min_match: int) -> list[int]:
    """What followed the longest suffix that occurred before: at every depth the continuation
    that is most frequent, on a tie the most recent."""
    context = longest_repeated_suffix(text)
    if len(context) < max(1, min_match):
        return []
    draft: list[int] = []
    while len(draft) < count:
        found = {t: ends(text, [*context, t]) for t in set(text)}
        found = {t: places for t, places in found.items() if places}
        if not found:
            break
        best = max(found, key=lambda t: (len(found[t]), found[t][-1]))
        draft.append(best)
        context = [*context, best]
    return draft


def read(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


@settings(max_examples=400, deadline=None)
@given(
    text=st.integers(1, 4).flatmap(
        lambda size: st.lists(st.integers(0, size - 1), max_size=_MAX_LINKS)
    ),
    count=st.integers(1, 9),
    min_match=st.integers(0, 4),
)
def test_drafts_what_a_search_finds(text: list[int], count: int, min_match: int) -> None:
    automaton = read(text)
    assert automaton.match_length == len(longest_repeated_suffix(text))
    assert automaton.draft(count, min_match) == brute_force(text, count, min_match)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 24))
def test_reading_in_parts_is_reading_at_once(text: list[int], cut: int) -> None:
    parts = SuffixAutomaton()
    for i, token in enumerate(text):
        parts.extend([token])
        if i == cut:
            parts.draft(5, 1)  # asking changes nothing
    assert parts.num_tokens == len(text)
    assert parts.match_length == read(text).match_length
    assert parts.draft(8, 1) == read(text).draft(8, 1)


def test_prompt_lookup() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert read(text).draft(3, 2) == [4, 5, 6]
    assert read(text).draft(99, 2) == [4, 5, 6, 1, 2, 3]  # as far as the text goes
    assert read(text).draft(3, 4) == []  # the match has 3 tokens
    assert read(text).draft(0, 1) == []


def test_frequent_beats_recent_beats_old() -> None:
    assert read([1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]).draft(1, 2) == [7]
    assert read([1, 2, 7, 1, 2, 8, 1, 2]).draft(1, 2) == [8]


def test_longest_beats_frequent() -> None:
    """`5 1 2` occurred once, `1 2` often: the longer context knows better."""
    assert read([5, 1, 2, 9, 1, 2, 8, 1, 2, 8, 5, 1, 2]).draft(1, 1) == [9]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [0] * 0])
def test_nothing_repeated_nothing_drafted(text: list[int]) -> None:
    assert read(text).match_length == 0
    assert read(text).draft(4, 0) == []


def test_a_run_of_one_token_is_continued() -> None:
    """Also where counts are no longer kept in full."""
    for length in (2, 3, 50, 2000):
        automaton = read([7] * length)
        assert automaton.match_length == length - 1
        assert automaton.draft(3, 1) == [7]


@pytest.mark.parametrize("alphabet", [1, 2, 3, 50])
def test_size_is_linear(alphabet: int) -> None:
    """At most two states a token and three transitions, also for texts made to be awkward."""
    dice = random.Random(alphabet)
    count = 3000
    texts = [
        [dice.randrange(alphabet) for _ in range(count)],
        [0] * (count // 2) + [1] * (count // 2),
        [i % 2 for i in range(count)],
        [0] + [1] * (count - 2) + [0],
    ]
    for text in texts:
        automaton = read(text)
        assert len(automaton._length) <= 2 * len(text)
        assert sum(map(len, automaton._next)) <= 3 * len(text)


@settings(max_examples=200, deadline=None)
@given(
    text=st.integers(1, 4).flatmap(
        lambda size: st.lists(st.integers(0, size - 1), max_size=_MAX_LINKS)
    ),
    nodes=st.integers(1, 9),
    depth=st.integers(1, 4),
)
def test_trees_are_of_what_occurred(text: list[int], nodes: int, depth: int) -> None:
    """Every token has followed the one before it, siblings differ, the likeliest single token
    is the chain's, and a larger budget adds to the same tree."""
    automaton = read(text)
    tokens, parents = automaton.tree(nodes, depth, 1)
    assert tokens[:1] == automaton.draft(1, 1)
    assert len(tokens) <= nodes
    assert all(deep < depth for deep in depths(parents))
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens)
    for node in range(len(tokens)):
        before = tokens[parents[node]] if parents[node] >= 0 else text[-1]
        assert ends(text, [before, tokens[node]])
    assert automaton.tree(nodes + 3, depth, 1)[0][: len(tokens)] == tokens


def test_a_tree_branches_where_the_text_did() -> None:
    again = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 6, 1, 2, 3]
    tokens, parents = read(again).tree(4, 3, 2)
    root = [t for t, parent in zip(tokens, parents, strict=True) if parent == -1]
    assert root == [5, 4]
    assert read(again).tree(4, 3, 4) == ([], [])
