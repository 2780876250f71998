"""Drafts that branch change no answer: trees in every mode, beside chains, whatever happens.

The first half compares tokens and log probabilities with those of plain decoding, to the last
bit; the second, for unseeded sampling, distributions with transformers' (see `test_distribution`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine
from engine.draft.drafter import DrafterTraits, DraftProposal, StepView
from engine.judge import Judge
from engine.sampling import Purpose, noise_key
from engine.sampling.noise import gumbel
from engine.sequence import Sequence
from engine.types import SamplingParams
from tests.draft.test_portfolio import Switching, planned_by
from tests.drafters import Answers, ScriptedDrafter, follow
from tests.fakes import Run, ask, fake_features, make_engine, run, tiny
from tests.lossless.test_distribution import (
    PROMPT,
    ROOMY,
    SHAPED,
    TIGHT,
    is_noticed,
    neighbours,
)
from tests.lossless.worlds import (
    V,
    engine_of,
    exact_texts,
    fix_seeds,
    is_lossless,
    many,
    random_table,
    sample,
)
from tests.test_core import check_books, check_truth, greedy, truth
from tests.test_core_sampling import answers, baseline, check_same, requests
from tests.tiny_models import VOCAB


class Grove(ScriptedDrafter):
    """Trees of random shape, with the right text on one of their ways; now and then a chain, or
    no more than a few nodes of it. Siblings may be twins."""

    name = "grove"

    def __init__(self, known: Answers, seed: int = 0) -> None:
        super().__init__(follow(known))
        self._dice = random.Random(seed)
        self.branching = 0

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        trees = [self._grow(s, n) for s, n in zip(sequences, lengths, strict=True)]
        self.branching += sum(parents is not None for _, parents in trees)
        return DraftProposal([t for t, _ in trees], parents=[p for _, p in trees])

    def _grow(self, sequence: Sequence, length: int) -> tuple[list[int], list[int] | None]:
        dice, right = self._dice, self._draft(sequence, length)
        if dice.random() < 0.2:
            return right, None
        tokens: list[int] = []
        parents: list[int] = []
        last, depth = -1, 0
        for node in range(length):
            if depth < len(right) and dice.random() < 0.5:
                tokens.append(right[depth])
                parents.append(last)
                last, depth = node, depth + 1
            else:
                tokens.append(dice.choice([*right, dice.randrange(VOCAB)]))
                parents.append(dice.randint(-1, node - 1))
        return tokens, parents


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window"])
def test_greedy_is_transformers(family: str) -> None:
    """With plenty of pages or too few, in pages of any size, twice, prefixes reused or not."""
    for page_size, num_pages, reuse in ((4, 500, True), (8, 16, True), (1, 120, False)):
        grove = Grove(truth(family))
        pages = {"page_size": page_size, "num_pages": num_pages, "prefix_reuse": reuse}
        built = make_engine(tiny(family), drafter=grove, max_draft=8, **pages)
        for _ in range(2):
            done = run(built, greedy(), check=True)
            check_truth(done, family)
            check_books(done)
        assert done.accepted
        assert grove.branching
        assert done.preemptions or num_pages == 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_every_kind_of_sampling_to_the_last_bit(runner: str, dtype: torch.dtype) -> None:
    """Penalties, biases, stops, least lengths, several choices: one batch, and its logprobs."""
    setup = tiny("llama", dtype, runner)
    expected = baseline(setup, 3, None)
    for page_size, num_pages, most in ((3, 400, 64), (8, 40, 64), (4, 200, 24)):
        grove = Grove(answers(setup), seed=page_size)
        built = make_engine(
            setup, drafter=grove, max_draft=7, page_size=page_size, num_pages=num_pages,
            max_batch_tokens=most,
        )  # fmt: skip
        for _ in range(2):
            done = run(built, requests(logprobs=3), check=True)
            check_same(done, expected)
        assert done.accepted
        assert grove.branching


def test_drafters_of_trees_and_of_chains_take_turns() -> None:
    """A draft model and lookup beside trees: their own books stay right, too."""
    setup = dataclasses.replace(tiny("llama"), drafters=("lookup", "model"), draft=loaded_draft())
    built = planned_by(make_engine(setup), Switching(4, pause=3))
    grove = Grove(truth("llama"))
    portfolio = built.engine.parts.drafters
    portfolio._drafters["grove"] = grove
    portfolio._traits["grove"] = DrafterTraits()
    built.engine.default_drafters = ("lookup", "model", "grove")
    for _ in range(2):
        done = run(built, greedy(), check=True)
        check_truth(done, "llama")
        check_books(done)
    assert grove.branching
    assert {"lookup", "model", "grove"} <= set(portfolio.names), "none has raised"


def loaded_draft() -> Any:
    return tiny("qwen3").loaded


def test_aborts_and_ends_within_a_tree() -> None:
    """A stop token on an accepted way, a last token, and requests that go in mid-stream."""
    known = {(p, c): t for (p, c), t in truth("llama").items()}
    built = make_engine(tiny("llama"), drafter=Grove(known), max_draft=8, page_size=4)
    asked = greedy()
    plain = {r.request_id: known[r.prompt, 0] for r in asked}
    stops = [
        dataclasses.replace(
            r,
            sampling=SamplingParams(
                max_tokens=20,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=frozenset({plain[r.request_id][7]}),
            ),
        )
        for r in asked[:6]
    ]
    short = [ask(f"s{i}", r.prompt, 1 + i, ignore_eos=True) for i, r in enumerate(asked[6:10])]
    gone = [dataclasses.replace(r, request_id=f"g{i}") for i, r in enumerate(asked[10:])]
    going = Run(built, [*stops, *short, *gone])
    for step in range(4):
        going.step(check=True)
        going.abort(f"g{step}")
    done = going.finish(check=True)
    for request in (*stops, *short):
        said = done.answers[request.request_id].tokens
        expected = known[request.prompt, 0]
        end = request.sampling.max_tokens
        if request.sampling.stop_token_ids:
            end = min(end, expected.index(expected[7]) + 1)
        assert said == expected[:end]


class Watching(Grove):
    """Is shown features, and compares them with those of the text that was kept."""

    rows = 0

    def observe(self, view: StepView) -> None:
        for part in view.sequences:
            for i in range(part.num_kept):
                text = part.sequence.tokens[: part.position + i + 1]
                row = view.features[1][part.first_row + i]
                assert row.tolist() == fake_features(1, text).tolist()
                self.rows += part.verdict.accepted > 0


def test_features_lie_as_those_of_a_chain() -> None:
    plain = run(make_engine(), wishes())
    known = {(r.prompt, 0): plain.answers[r.request_id].tokens for r in plain.requests.values()}
    watching = Watching(known)
    built = make_engine(drafter=watching, max_draft=8)
    built.engine.parts.drafters._traits["grove"] = DrafterTraits(features=(1,))
    done = run(built, wishes(), check=True)
    assert [done.said(r) for r in done.requests] == [plain.said(r) for r in plain.requests]
    assert built.engine.parts.drafters.names == ("grove",), "it has not raised"
    assert watching.branching
    assert watching.rows > 40


def wishes() -> list[Any]:
    return [ask(f"r{i}", (3, 4, 5, i), 25, ignore_eos=True) for i in range(4)]


def test_cached_values_that_stay_where_they_were_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = make_engine(tiny("llama"), drafter=Grove(truth("llama")), max_draft=8)
    monkeypatch.setattr(built.engine.parts.target, "move", lambda *_: None)
    done = run(built, greedy())
    with pytest.raises(AssertionError):
        check_truth(done, "llama")


class Deaf(Judge):
    """Penalties see all draft tokens in the order of their rows, not those on the way."""

    def _row_of_tree(self, rows: Any, number: int, step: int = 0) -> Any:
        return self._row(rows.sequence, rows.draft, number, step)


def test_penalties_that_see_other_branches_are_noticed() -> None:
    setup = tiny("llama")
    built = make_engine(setup, drafter=Grove(answers(setup)), max_draft=7)
    own = built.engine.parts.judge
    deaf = Deaf(own.vocab_size, own.eos_token_ids)
    built.engine.parts = dataclasses.replace(built.engine.parts, judge=deaf)
    done = run(built, requests(logprobs=3))
    with pytest.raises(AssertionError):
        check_same(done, baseline(setup, 3, None))


# -- unseeded sampling -----------------------------------------------------------------------


class Bush:
    """Draws two children of the root and of its first child, three deep, from a table of next
    tokens: siblings one after the other and without replacement.

    Args:
        told: what it says it drew from, if not the truth.
        coupled: draws with the target's noise, and says nothing of probabilities.
    """

    name = "bush"
    parents = (-1, -1, 0, 0, 2, 1)

    def __init__(
        self,
        told: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
        coupled: bool = False,
    ) -> None:
        self._table = random_table()
        self._told = told
        self._coupled = coupled

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        drawn = [self._draw(s, n) for s, n in zip(sequences, lengths, strict=True)]
        return DraftProposal(
            [tokens for tokens, _ in drawn],
            [rows for _, rows in drawn],
            parents=[list(self.parents[: len(tokens)]) for tokens, _ in drawn],
        )

    def _draw(self, sequence: Sequence, length: int) -> tuple[list[int], torch.Tensor | None]:
        matched = self._coupled or sequence.verification == "match"
        purpose = Purpose.TOKEN if matched else Purpose.DRAFT
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        depth = {-1: 0}
        for node, parent in enumerate(self.parents[:length]):
            q = self._table[tokens[parent] if parent >= 0 else sequence.tokens[-1]].clone()
            for elder in range(node):
                if self.parents[elder] == parent:
                    q[tokens[elder]] = 0.0
            q /= q.sum()
            depth[node] = depth[parent] + 1
            position = len(sequence.tokens) + depth[node] - 1
            step = 0 if matched else sequence.target_passes
            # With the target's noise the best, then the second best; else noise of its own.
            index = 0 if matched else node
            key = noise_key(sequence.seed, sequence.choice, position, purpose, step, index)
            score = gumbel(key, torch.arange(V)) + q.log()
            tokens.append(int(score.argmax()))
            rows.append(q)
        return tokens, None if matched or not rows else self._told(torch.stack(rows))

    def observe(self, view: StepView) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seeds(monkeypatch)


def counted(built: BuiltEngine, samples: int, **params: Any) -> tuple[Run, bool]:
    done, counts = sample(built, many("it", PROMPT, samples, **params))
    return done, is_lossless(counts["it"], exact_texts(PROMPT, **params))


def test_texts_are_distributed_as_the_models() -> None:
    """By recursive rejection, with shaped sampling; plain sampling is looked at below, and what
    is matched has been compared to the last bit."""
    built = engine_of(TIGHT, "rejection", drafter=Bush(), max_draft=6)
    counted = many("shaped", PROMPT[1:], 2048, **SHAPED)
    mixed = [r for two in zip(counted, neighbours() * 4, strict=False) for r in two]
    asked = [dataclasses.replace(r, request_id=f"{r.request_id}.{i}") for i, r in enumerate(mixed)]
    done, counts = sample(built, asked)
    assert counts["shaped"].total() == 2048
    assert is_lossless(counts["shaped"], exact_texts(PROMPT[1:], **SHAPED))
    assert done.preemptions > 60
    assert done.accepted > 600


def test_seeded_texts_do_not_depend_on_trees() -> None:
    said = []
    for rule, drafter, k in (("match", Bush(), 0), ("auto", Bush(), 6), ("block", Bush(), 4)):
        built = engine_of(ROOMY, rule, drafter=drafter, max_draft=k)
        done, _ = sample(built, many("seeded", PROMPT, 256, seed=9))
        said.append([done.said(request_id) for request_id in done.answers])
    assert said[0] == said[1] == said[2]


def test_kept_tokens_by_kind_of_tree() -> None:
    """With the target's own noise siblings are worth more than with noise of their own."""
    kept = {}
    for name, drafter in (("coupled", Bush(coupled=True)), ("independent", Bush())):
        done, lossless = counted(engine_of(ROOMY, "block", drafter=drafter, max_draft=6), 1024)
        assert lossless
        kept[name] = done.accepted
    assert kept["coupled"] > 0.95 * kept["independent"] > 500


def test_a_lying_drafter_is_noticed() -> None:
    drafter = Bush(told=lambda q: torch.full_like(q, 1 / V))
    assert is_noticed(engine_of(ROOMY, "rejection", drafter=drafter, max_draft=6), 2000)
