"""The `lookup` drafter and the portfolio around all drafters."""

from __future__ import annotations

import logging

import pytest

from engine.cache.pages import PageTable
from engine.draft.drafter import Drafter, DraftProposal, Verdict
from engine.draft.lookup import LookupDrafter
from engine.draft.portfolio import DrafterPortfolio
from engine.sequence import Sequence
from engine.types import Request, SpeculationParams
from tests.drafters import ForgetfulDrafter, RaisingDrafter, ScriptedDrafter, seen

VOCAB = 50


def sequence(prompt: list[int], drafter: str = "lookup", prediction: tuple[int, ...] = ()):
    request = Request("r", tuple(prompt), speculation=SpeculationParams(prediction=prediction))
    return Sequence(request, 0, 0, 0, PageTable(""), drafter, 4, 1000)


def test_lookup_repeats_and_follows() -> None:
    drafter = LookupDrafter()
    one, two = sequence([1, 2, 3, 1, 2]), sequence([4, 5, 6])
    assert drafter.propose([one, two], [2, 2]).tokens == [[3, 1], []]
    one.append([9])  # the target disagreed
    two.append([4, 5])
    assert drafter.propose([two, one], [3, 3]).tokens == [[6, 4, 5], []]
    one.append([1, 2])
    assert drafter.propose([one], [1]).tokens == [[9]]  # as recent as 3, and newer


def test_lookup_never_reads_ahead_of_what_is_committed() -> None:
    """A draft that was refused leaves no trace in what is drafted later."""
    drafter, fresh = LookupDrafter(), LookupDrafter()
    text = sequence([1, 2, 3, 1, 2])
    drafter.propose([text], [4])
    text.append([8, 1, 2])
    assert drafter.propose([text], [4]).tokens == fresh.propose([text], [4]).tokens


def test_lookup_forgets() -> None:
    drafter = LookupDrafter()
    many = [sequence([1, 2, 1, 2]) for _ in range(5)]
    drafter.propose(many, [1] * 5)
    for one in many:
        drafter.release(one)
        drafter.release(one)  # also one it does not know
    assert not any(vars(drafter)[name] for name in vars(drafter) if name.startswith("_"))


def test_lookup_needs_a_match_of_two_tokens() -> None:
    assert LookupDrafter().propose([sequence([1, 9, 2, 9])], [2]).tokens == [[]]
    assert LookupDrafter(min_match=1).propose([sequence([1, 9, 2, 9])], [2]).tokens == [[2, 9]]


# -- portfolio -------------------------------------------------------------------------------


def portfolio(**drafters: Drafter) -> DrafterPortfolio:
    return DrafterPortfolio(drafters, VOCAB)


def drafting(*tokens: int) -> ScriptedDrafter:
    return ScriptedDrafter(lambda _s, _n: list(tokens))


def test_each_sequence_asks_its_own_drafter_once_a_step() -> None:
    a, b = drafting(1, 1), drafting(2)
    several = portfolio(a=a, b=b)
    sequences = [sequence([0]) for _ in range(5)]
    proposal = several.propose(sequences, [2, 2, 1, 2, 2], ["a", "b", "a", "none", "c"])
    assert proposal.tokens == [[1, 1], [2], [1], [], []]
    assert (a.proposals, b.proposals) == (1, 1)


def test_length_zero_asks_nobody() -> None:
    a = drafting(1)
    assert portfolio(a=a).propose([sequence([0])], [0], ["a"]).tokens == [[]]
    assert a.proposals == 0


@pytest.mark.parametrize(
    ("drafted", "kept"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, VOCAB, 3], [1]),
        ([1, 2, -1], [1, 2]),
        ([10**9], []),
        ([1] * 9, [1, 1, 1]),
        ([0, VOCAB - 1], [0, VOCAB - 1]),
        ([1, 2, 3, VOCAB], [1, 2, 3]),
    ],
)
def test_drafts_are_cut(drafted: list[int], kept: list[int]) -> None:
    """Before the first unknown id, and at the length that has pages."""
    several = portfolio(a=drafting(*drafted))
    assert several.propose([sequence([0])], [3], ["a"]).tokens == [kept]


@pytest.mark.parametrize("method", ["propose", "observe", "release"])
def test_a_drafter_that_raises_is_switched_off(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = RaisingDrafter(lambda _s, _n: [1], method, after=1)
    good = drafting(2)
    several = portfolio(bad=bad, good=good)
    sequences = [sequence([0], "bad"), sequence([0], "good")]
    verdicts = [Verdict([1], 1, 0), Verdict([2], 1, 0)]
    for one, verdict in zip(sequences, verdicts, strict=True):
        one.append(verdict.emitted)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            drafts = several.propose(sequences, [1, 1], ["bad", "good"])
            several.observe(seen(sequences, verdicts))
            several.release(sequences[1])
    assert several.names == ("good",)
    assert drafts.tokens == [[], [2]]
    assert len(good.released) == 3
    assert [r.message for r in caplog.records] == [
        "drafter bad failed and is switched off; answers are unaffected"
    ]


def test_a_drafter_that_answers_for_too_few_is_switched_off() -> None:
    several = portfolio(bad=ForgetfulDrafter(lambda _s, _n: [1]))
    sequences = [sequence([0], "bad") for _ in range(2)]
    assert len(several.propose(sequences, [1, 1], ["bad", "bad"]).tokens) == 2
    assert several.names == ()


def test_probabilities_are_cut_with_their_tokens() -> None:
    torch = pytest.importorskip("torch")

    class Weighing(ScriptedDrafter):
        def propose(self, sequences, lengths):
            proposal = super().propose(sequences, lengths)
            rows = [torch.eye(VOCAB)[: len(t)] for t in proposal.tokens]
            return DraftProposal(proposal.tokens, rows)

    proposal = portfolio(a=Weighing(lambda _s, _n: [0, 1, VOCAB, 3, 4])).propose(
        [sequence([0]), sequence([0])], [4, 4], ["a", "none"]
    )
    assert proposal.tokens == [[0, 1], []]
    assert [None if p is None else p.shape[0] for p in proposal.probabilities] == [2, None]
