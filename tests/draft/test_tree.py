"""Drafts that branch: what is kept of them, and that answers stay."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from engine.cache.pages import PageTable
from engine.draft.drafter import DrafterTraits, DraftProposal
from engine.draft.portfolio import DrafterPortfolio
from engine.draft.tree import check_parents, prune, renumber
from engine.errors import ConfigurationError
from engine.sequence import Sequence
from engine.tree import branches, depths, follow, is_chain, way_to
from engine.types import Request
from tests.drafters import ScriptedDrafter
from tests.fakes import FakeRunner, Run, ask, make_engine, run
from tests.tiny_models import VOCAB


@pytest.mark.parametrize(
    ("tokens", "parents", "budget", "kept"),
    [
        ([1, 2, 3], [-1, 0, 1], 2, [0, 1]),
        ([1, 99, 3], [-1, 0, 1], 9, [0]),  # what follows an unknown id goes with it
        ([1, 99, 3, 4], [-1, 0, 0, 2], 9, [0, 2, 3]),  # its sister stays
        ([99, 2, 3, 4], [-1, -1, 0, 1], 9, [1, 3]),
        ([-1, 2], [-1, -1], 9, [1]),
        ([1, 2, 3, 4], [-1, -1, 0, 1], 3, [0, 1, 2]),  # a budget of nodes, not of depth
        ([1, 2], [-1, 0], 0, []),
    ],
)
def test_pruning_respects_parents(
    tokens: list[int], parents: list[int], budget: int, kept: list[int]
) -> None:
    assert prune(tokens, parents, budget, depth=9, vocab_size=50) == kept


def test_whatever_is_pruned_a_kept_node_has_its_parent() -> None:
    dice = random.Random(5)
    for _ in range(300):
        parents = [dice.randint(-1, node - 1) for node in range(dice.randint(0, 12))]
        tokens = [dice.randint(-2, 12) for _ in parents]
        depth = dice.randint(0, 5)
        kept = prune(tokens, parents, dice.randint(0, 12), depth, vocab_size=10)
        assert all(0 <= tokens[n] < 10 for n in kept)
        assert all(parents[n] == -1 or parents[n] in kept for n in kept)
        assert all(deep < depth for deep in map(depths(parents).__getitem__, kept))
        again = renumber(kept, parents)
        for new, old in enumerate(kept):
            above = [tokens[n] for n in way_to(old, parents)]
            assert [tokens[kept[n]] for n in way_to(new, again)] == above


def test_branches_take_in_every_node_once() -> None:
    dice = random.Random(6)
    for _ in range(300):
        parents = [dice.randint(-1, node - 1) for node in range(dice.randint(0, 12))]
        own: list[int] = []
        for branch in branches(parents):
            assert branch.way == way_to(branch.way[-1] if branch.way else -1, parents)
            own += branch.way[branch.begin :]
        assert sorted(own) == list(range(len(parents)))
        assert is_chain(parents) == (len(branches(parents)) == 1)


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ([], []),
        ([9], []),
        ([5, 6, 7], [0, 2]),
        ([5, 8, 7], [1, 3]),  # of twins the one that leads on
        ([5, 8, 6, 6], [1, 3, 4]),
    ],
)
def test_a_text_finds_its_way(text: list[int], way: list[int]) -> None:
    assert follow(text, [5, 5, 6, 8, 6], [-1, -1, 0, 1, 3]) == way


@pytest.mark.parametrize(
    ("parents", "problem"),
    [
        ([-1], "2 draft tokens have 1 parents; give each one"),
        ([-1, 1], r"the parent of draft token 1 is 1; it must lie from -1 .* to 0"),
        ([0, 0], "the parent of draft token 0 is 0"),
        ([-1, -2], "the parent of draft token 1 is -2"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_parents([1, 2], parents)


# -- in the portfolio ------------------------------------------------------------------------


class TreeDrafter(ScriptedDrafter):
    """Branches: `grow` makes tokens and parents."""

    name = "tree"

    def __init__(self, grow, rows: bool = False) -> None:
        super().__init__(lambda _s, _n: [])
        self._grow, self._rows = grow, rows
        self.nodes = 0

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        trees = [self._grow(s, n) for s, n in zip(sequences, lengths, strict=True)]
        self.nodes += sum(len(tokens) for tokens, _ in trees)
        drawn = [torch.eye(VOCAB + 1)[tokens] for tokens, _ in trees] if self._rows else None
        return DraftProposal(
            [tokens for tokens, _ in trees], drawn, parents=[parents for _, parents in trees]
        )


def propose(
    tokens: list[int], parents: list[int], length: int = 9, trees: bool = True
) -> DraftProposal:
    sequence = Sequence(Request("r", (1,)), 0, 0, 0, PageTable(""), "tree", 4, 1000)
    portfolio = DrafterPortfolio(
        {"tree": TreeDrafter(lambda _s, _n: (tokens, parents), rows=True)},
        VOCAB,
        {"tree": DrafterTraits(branches=True)},
        trees=trees,
    )
    made = portfolio.propose([sequence], [length], ["tree"])
    assert portfolio.names == ("tree",)
    return made


def test_what_is_kept_of_a_tree_keeps_its_parents_and_probabilities() -> None:
    made = propose([5, VOCAB, 6, 7, 8], [-1, -1, -1, 1, 2])
    assert made.tokens == [[5, 6, 8]]
    assert made.parents == [[-1, -1, 1]]
    assert made.probabilities is not None
    [rows] = made.probabilities
    assert rows is not None
    assert rows.argmax(-1).tolist() == [5, 6, 8]


def test_a_budget_of_nodes_and_a_cap_on_depth() -> None:
    """The sequence may draft four deep."""
    made = propose([5, 6, 7, 8, 9, 10, 11], [-1, -1, 0, 2, 3, 4, 1], length=9)
    assert made.tokens == [[5, 6, 7, 8, 9, 11]]
    assert made.parents == [[-1, -1, 0, 2, 3, 1]]
    made = propose([5, 6, 7, 8], [-1, -1, 0, 2], length=3)
    assert (made.tokens, made.parents) == ([[5, 6, 7]], [[-1, -1, 0]])


def test_a_target_that_checks_chains_is_given_the_first_way() -> None:
    made = propose([5, 6, 7, 8], [-1, -1, 0, 2], trees=False)
    assert (made.tokens, made.parents) == ([[5, 7, 8]], [None])
    assert made.probabilities is not None
    [rows] = made.probabilities
    assert rows is not None
    assert rows.argmax(-1).tolist() == [5, 7, 8]


def test_trees_are_refused_where_the_target_checks_chains(monkeypatch) -> None:
    monkeypatch.setattr(FakeRunner, "branches", False)
    with pytest.raises(ConfigurationError, match="max_nodes is 4, but the fake runner checks"):
        make_engine(max_nodes=4)


def test_chains_with_parents_are_chains() -> None:
    made = propose([5, 6, 7], [-1, 0, 1])
    assert (made.tokens, made.parents) == ([[5, 6, 7]], [None])
    made = propose([VOCAB - 1, 6, 7], [-1, 0, 0], 2)
    assert (made.tokens, made.parents) == ([[VOCAB - 1, 6]], [None])


def test_a_drafter_whose_trees_are_none_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    bad = TreeDrafter(lambda _s, _n: ([1, 2], [-1, 1]))
    plain = run(make_engine(), wanted())
    built = make_engine(drafter=bad)
    done = run(built, wanted())
    assert built.engine.parts.drafters.names == ()
    assert "the parent of draft token 1 is 1" in caplog.text
    assert texts(done) == texts(plain)


def wanted():
    kinds = ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_k": 5})
    return [ask(f"r{i}", (3, 4, 5, i), 25, ignore_eos=True, **k) for i, k in enumerate(kinds)]


def texts(done: Run) -> list[object]:
    return [done.said(request_id) for request_id in done.requests]


def test_answers_do_not_depend_on_trees() -> None:
    """Each first child is right, or wrong while its sister is; both, and random trees."""
    plain = run(make_engine(), wanted())
    answers = {r.prompt: plain.answers[r.request_id].tokens for r in plain.requests.values()}

    def branching(right_first: bool):
        def grow(sequence: Sequence, length: int) -> tuple[list[int], list[int]]:
            tokens: list[int] = []
            parents: list[int] = []
            last = -1
            for token in answers[sequence.request.prompt][sequence.num_generated :][:length]:
                pair = [token, (token + 1) % VOCAB]
                tokens += pair if right_first else pair[::-1]
                parents += [last, last]
                last = len(tokens) - (2 if right_first else 1)
            return tokens, parents

        return grow

    dice = random.Random(1)

    def random_tree(_sequence: Sequence, length: int) -> tuple[list[int], list[int]]:
        count = dice.randint(0, 2 * length)
        parents = [dice.randint(-1, node - 1) for node in range(count)]
        return [dice.randrange(VOCAB + 3) for _ in parents], parents

    kept = []
    for grow in (branching(right_first=True), branching(right_first=False), random_tree):
        drafter = TreeDrafter(grow)
        done = run(make_engine(drafter=drafter, max_draft=6), wanted(), check=True)
        assert texts(done) == texts(plain)
        assert drafter.nodes
        kept.append(done.accepted)
    assert min(kept[:2]) > 40, "right children are kept, three deep, whichever they are"
