"""The built-in drafters where drafts may branch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.batch import Span, build_batch
from engine.build import BuiltEngine
from engine.cache.pages import TARGET
from engine.draft.tree_model import TreeModelDrafter
from tests.draft.test_portfolio import BOTH, Switching, both, planned_by
from tests.fakes import Run, make_engine, run, tiny
from tests.model.test_runners import logits
from tests.test_core import check_books, check_truth, greedy
from tests.test_core_sampling import baseline, check_same, requests
from tests.tiny_models import load


def ends(done: Run) -> list[tuple[int, int, int]]:
    """(generated, passes, accepted) of every choice."""
    stats = [c.end.stats for a in done.answers.values() for c in a.choices.values() if c.end]
    return [(s.generated_tokens, s.target_passes, s.accepted_tokens) for s in stats]


@pytest.mark.parametrize("drafters", [("lookup",), ("model",), BOTH])
@pytest.mark.parametrize("mode", ["fixed", "auto"])
def test_greedy_is_transformers(drafters: tuple[str, ...], mode: str) -> None:
    setup = both("qwen3", drafters=drafters, mode=mode, max_nodes=9)
    for page_size, num_pages, reuse in ((4, 400, True), (8, 18, True), (1, 120, False)):
        pages = {"page_size": page_size, "num_pages": num_pages, "prefix_reuse": reuse}
        built = make_engine(setup, **pages)
        for _ in range(2):
            done = run(built, greedy(), check=True)
            check_truth(done, "llama")
            check_books(done)
        assert {"lookup", "model"} <= set(built.engine.parts.drafters.names)
        assert done.preemptions or num_pages == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_sampling_to_the_last_bit(dtype: torch.dtype) -> None:
    plain = tiny("llama", dtype)
    setup = dataclasses.replace(
        plain, drafters=BOTH, draft=load("llama", dtype), max_nodes=8, page_size=4, num_pages=70
    )
    built = planned_by(make_engine(setup), Switching(1, pause=3))
    for _ in range(2):
        done = run(built, requests(logprobs=3), check=True)
        check_same(done, baseline(plain, 3, None))
    assert done.accepted


@pytest.mark.parametrize("seed", [None, 5])
def test_a_draft_model_that_is_the_target_is_right_at_each_first_token(seed: int | None) -> None:
    """Its likeliest child is what the target says, after whatever has been kept: so all that it
    reads and keeps of a tree lies where it belongs."""
    setup = both("llama", drafters=("model",), max_nodes=8, max_draft=4, page_size=4)
    built = make_engine(setup)
    asked = greedy(30)
    if seed is not None:
        sampling = dataclasses.replace(asked[0].sampling, temperature=1.0, seed=seed)
        asked = [dataclasses.replace(r, sampling=sampling) for r in asked]
    done = run(built, asked, check=True)
    for step in done.stats:
        if step.drafted_by_position:
            assert step.accepted_by_position[0] == step.drafted_by_position[0]
    assert sum(accepted for _, _, accepted in ends(done)) > sum(p for _, p, _ in ends(done))


def stores_are_right(built: BuiltEngine) -> bool:
    """Whether each store holds, of every running sequence, what reading its text would bring: the
    token after it is given the same logits, to the last bit."""
    parts, right = built.engine.parts, True
    drafter = parts.drafters._drafters["model"]
    assert isinstance(drafter, TreeModelDrafter)
    for store, runner in ((TARGET, parts.target), (drafter.limits.store, drafter.runner)):
        for sequence in parts.scheduler.running:
            cached = sequence.table.num_cached[store]
            if cached >= len(sequence.table.pages) * parts.pool.page_size:
                continue  # its next token has no page yet
            span = Span([7], cached, sequence.table, 1)
            found = runner.forward(build_batch([span], parts.pool.page_size, parts.pool.num_pages))
            (truth,) = logits(load("llama"), [[*sequence.tokens[:cached], 7]], 64)
            right &= torch.equal(found.logits[0].float(), truth[-1])
    return right


@pytest.mark.parametrize("broken", [None, "target", "draft"])
def test_what_is_kept_lies_where_it_belongs(
    broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make_engine(both("llama", drafters=("model",), max_nodes=8, max_draft=4, page_size=4))
    drafter = built.engine.parts.drafters._drafters["model"]
    runners = {"target": built.engine.parts.target, "draft": drafter.runner}  # type: ignore[attr-defined]
    if broken:
        monkeypatch.setattr(runners[broken], "move", lambda *_: None)
    going = Run(built, greedy(30))
    right = []
    while going.engine.has_work:
        going.step()
        right.append(stores_are_right(built))
    assert all(right) is (broken is None)


def test_a_tree_from_the_text_keeps_more_than_a_chain() -> None:
    setup = both("llama", drafters=("lookup",), max_draft=4, store=0)
    chain = run(make_engine(setup), requests())
    tree = run(make_engine(setup, max_nodes=16), requests())
    assert [tree.said(r) for r in tree.requests] == [chain.said(r) for r in chain.requests]
    passes = [sum(p for _, p, _ in ends(done)) for done in (chain, tree)]
    assert passes[1] < passes[0]


def test_requests_may_ask_for_less_depth() -> None:
    """Nodes are the server's, depth is the request's; a chain is never longer than that."""
    setup = both("llama", drafters=("model",), max_nodes=8, max_draft=2)
    done = run(make_engine(setup), greedy(30))
    assert max(len(s.drafted_by_position) for s in done.stats) == 8
    assert not any(sum(s.accepted_by_position[2:]) for s in done.stats)
