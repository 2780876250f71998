"""What drafters see of a step: every computed row of a committed token, once, in its place."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine
from engine.cache.pages import PageTable
from engine.draft import registry
from engine.draft.drafter import DrafterTraits, DraftProposal, SequenceView, StepView, Verdict
from engine.draft.entry import DrafterContext, DrafterEntry
from engine.draft.portfolio import DrafterPortfolio
from engine.model.passes import Pass
from engine.sequence import Sequence
from engine.types import Request, SpeculationParams
from tests.draft.test_portfolio import Switching, planned_by
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, Setup, ask, make_engine, run

SHARED = tuple(range(3, 27))
SETUP = Setup(num_pages=36, page_size=4, max_batch_tokens=24, max_sequences=6)


class Telling:
    """A target whose features of a row are [layer, position, token, number of the row ever]."""

    def __init__(self, runner: Any) -> None:
        self.store, self.device, self.min_rows = runner.store, runner.device, runner.min_rows
        self.branches = True
        self._runner = runner
        self._rows = 0
        self.spoil = -1  # passes until one row is no number

    def forward(self, batch: Any, features: tuple[int, ...] = ()) -> Pass:
        count = batch.input_ids.numel()
        numbers = torch.arange(self._rows, self._rows + count)
        self._rows += count
        facts = torch.stack([batch.positions, batch.input_ids, numbers], dim=1)
        told = {
            layer: torch.cat([torch.full((count, 1), layer), facts], dim=1).float()
            for layer in features
        }
        passed = self._runner.forward(batch)
        self.spoil -= 1
        logits = passed.logits * float("nan") if self.spoil == 0 else passed.logits
        return Pass(logits, passed.seconds, told)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._runner.move(sources, targets)


class Head:
    """Knows a text only from features, and goes on as it went on after the same token."""

    name = "head"

    def __init__(self, context: DrafterContext) -> None:
        assert context.features == (0, 1)
        self.seen: Counter[int] = Counter()  # numbers of rows
        self.positions: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
        self.known: dict[Sequence, dict[int, int]] = defaultdict(dict)  # position -> token
        self.asked = self.told = 0

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        self.asked += 1
        return DraftProposal([self._draft(s, n) for s, n in zip(sequences, lengths, strict=True)])

    def _draft(self, sequence: Sequence, length: int) -> list[int]:
        known = self.known.get(sequence, {})
        after = {known[p]: known[p + 1] for p in sorted(known) if p + 1 in known}
        draft = [sequence.tokens[-1]]
        while len(draft) <= length and draft[-1] in after:
            draft.append(after[draft[-1]])
        return draft[1:]

    def observe(self, view: StepView) -> None:
        self.told += 1
        assert set(view.features) == {0, 1}
        for part in view.sequences:
            sequence = part.sequence
            for i in range(part.num_kept):
                position = part.position + i
                rows = [view.features[layer][part.first_row + i].tolist() for layer in (0, 1)]
                assert [row[0] for row in rows] == [0, 1]
                assert rows[0][1:] == rows[1][1:]
                assert rows[0][1:3] == [position, sequence.tokens[position]]
                self.seen[int(rows[0][3])] += 1
                self.known[sequence][position] = int(rows[0][2])
                self.positions[sequence.request.request_id, sequence.choice][position] += 1

    def release(self, sequence: Sequence) -> None:
        self.known.pop(sequence, None)


MADE: list[Head] = []


def make_head(context: DrafterContext) -> Head:
    MADE.append(Head(context))
    return MADE[-1]


@pytest.fixture(autouse=True)
def head() -> Iterator[None]:
    """A head that needs the features of the embeddings and of the last layer."""
    registry.register(
        DrafterEntry("head", "guesses from features", make_head, features=lambda last: (0, last))
    )
    yield
    registry.unregister("head")


def telling(setup: Setup, **changes: Any) -> tuple[BuiltEngine, Head, Telling]:
    """An engine with the head, whose target tells features."""
    built = make_engine(setup, **({"drafter": "head"} | changes))
    target = Telling(built.engine.parts.target)
    built.engine.parts = dataclasses.replace(built.engine.parts, target=target)
    return built, MADE[-1], target


def wanted(tokens: int = 24) -> list[Request]:
    """Prompts with a common beginning, of which some are longer than a step."""
    return [
        ask(
            f"r{i}",
            (*SHARED, 30 + i, *range(i)),
            tokens,
            ignore_eos=True,
            n=1 + i % 2,
            temperature=0.7 * (i % 3 > 0),
            seed=i,
        )
        for i in range(8)
    ]


def texts(done: Run) -> list[object]:
    return [done.said(request_id) for request_id in done.requests]


def computed(done: Run) -> int:
    """Rows of committed tokens in all passes, as the engine counts them itself."""
    return sum(
        s.prefill_tokens + s.decode_sequences + sum(s.accepted_by_position) for s in done.stats
    )


# -- the head ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafters", [("head",), ("head", "lookup")])
def test_a_head_sees_every_computed_row_of_committed_tokens_once(
    drafters: tuple[str, ...],
) -> None:
    """Over prefix hits, prefills in pieces, preemptions, pauses, and steps in which another
    drafter drafts or nobody; and what it drafts from them changes no answer."""
    plain = run(make_engine(SETUP, drafter="none"), wanted())
    built, head, _ = telling(SETUP, drafters=drafters)
    planned_by(built, Switching(1, pause=6))
    hits = 0
    for _ in range(2):
        before = sum(head.seen.values())
        done = run(built, wanted(), check=True)
        assert texts(done) == texts(plain)
        assert sum(head.seen.values()) - before == computed(done)
        assert done.preemptions
        hits += sum(s.prefix_hit_tokens for s in done.stats)
    assert set(head.seen.values()) == {1}, "a row was seen twice"
    assert hits
    assert 0 < head.asked < head.told, "there were pauses"
    assert not head.known, "it remembers sequences that have ended"
    assert {"lookup", "head"} <= set(built.engine.parts.drafters.names)


def test_every_position_but_those_of_the_hit_is_seen_and_drafts_are_kept() -> None:
    """Without preemption each position is computed once; the last token never is."""
    roomy = dataclasses.replace(SETUP, num_pages=400, max_sequences=2)
    plain = run(make_engine(roomy, drafter="none"), wanted(60))
    built, head, _ = telling(roomy)
    done = run(built, wanted(60))
    assert texts(done) == texts(plain)
    assert done.accepted > 10
    for (request_id, choice), positions in head.positions.items():
        end = done.answers[request_id].choices[choice].end
        assert end is not None
        hit = end.stats.cached_prompt_tokens
        last = end.stats.prompt_tokens + end.stats.generated_tokens - 1
        assert max(positions) in (last, last - 1)  # the last is computed if a draft was it
        assert sorted(positions) == list(range(hit, max(positions) + 1))
        assert set(positions.values()) == {1}
    assert sum(len(p) for p in head.positions.values()) == computed(done)


def test_what_a_prefix_hit_spares_is_lost_to_acceptance_only() -> None:
    """The second time the prompt comes from the cache: the head has less to go on."""
    roomy = dataclasses.replace(SETUP, num_pages=400)
    prompt = (*range(3, 40),) * 2
    asked = [ask("r", prompt, 40, ignore_eos=True)]
    built, head, _ = telling(roomy)
    first, again = run(built, asked), run(built, asked)
    assert sum(s.prefix_hit_tokens for s in again.stats) > 60
    assert texts(again) == texts(first)
    assert head.positions["r", 0][0] == 1, "the hit was not computed again"


def test_a_request_that_fails_is_no_part_of_the_view() -> None:
    built, head, target = telling(dataclasses.replace(SETUP, num_pages=400))
    done = Run(built, wanted())
    target.spoil = 4
    for _ in range(4):
        done.step()
    rows = sum(head.seen.values())
    assert any(answer.failed for answer in done.answers.values())
    assert rows < target._rows
    while built.engine.has_work:
        done.step(check=True)
    assert not head.known
    assert built.engine.parts.drafters.names[-1] == "head"


# -- the portfolio -----------------------------------------------------------------------------


class Watching(ScriptedDrafter):
    """Keeps the views it is shown."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda _s, _n: [])
        self.name = name
        self.views: list[StepView] = []

    def observe(self, view: StepView) -> None:
        self.views.append(view)


def make_sequence(*drafters: str, most: int = 4) -> Sequence:
    request = Request("r", (1, 2, 3), speculation=SpeculationParams())
    return Sequence(request, 0, 0, 0, PageTable(""), drafters[0], most, 100, drafters=drafters)


def test_each_drafter_is_shown_its_own_sequences_and_layers() -> None:
    a, b, c = Watching("a"), Watching("b"), Watching("c")
    portfolio = DrafterPortfolio(
        {"a": a, "b": b, "c": c}, 50, {"a": DrafterTraits((2, 0)), "b": DrafterTraits((5,))}
    )
    both, one, off, none = (
        make_sequence("a", "b"),
        make_sequence("b", "c"),
        make_sequence("a", most=0),
        make_sequence("none"),
    )
    assert portfolio.features([both, one, off, none]) == (0, 2, 5)
    assert portfolio.features([one, none]) == (5,)
    assert portfolio.features([off, none]) == ()
    views = [
        SequenceView(s, 2 * i, 1, 1, 1, Verdict([9], 1, 0))
        for i, s in enumerate((both, one, off, none))
    ]
    features = {i: torch.full((8, 1), float(i)) for i in (0, 2, 5)}
    portfolio.observe(StepView(tuple(views), features))
    assert [view.sequences for view in a.views] == [(views[0],)]
    assert [view.sequences for view in b.views] == [(views[0], views[1])]
    assert [view.sequences for view in c.views] == [(views[1],)]
    assert [sorted(d.views[0].features) for d in (a, b, c)] == [[0, 2], [5], []]


def test_a_drafter_whose_features_are_missing_is_switched_off() -> None:
    a, c = Watching("a"), Watching("c")
    portfolio = DrafterPortfolio({"a": a, "c": c}, 50, {"a": DrafterTraits((1,))})
    view = SequenceView(make_sequence("a", "c"), 0, 1, 1, 0, Verdict([9], 0, 0))
    portfolio.observe(StepView((view,)))
    assert portfolio.names == ("c",)
    assert len(c.views) == 1
