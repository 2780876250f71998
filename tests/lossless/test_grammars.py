"""A grammar binds every answer, and speculation changes none of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.errors import RequestFailed
from engine.grammar import GrammarCursor
from engine.sequence import Sequence
from engine.types import FinishReason, Request, SpeculationParams
from tests.drafters import ScriptedDrafter, adversaries
from tests.fakes import Run, ask, make_engine, run, tiny
from tests.grammars import Automaton, AutomatonMatcher, random_automaton
from tests.tiny_models import EOS, VOCAB, eager, load

SETUP = dataclasses.replace(tiny("qwen3"), page_size=4, num_pages=200)
PROMPTS = [(5, 9, 5, 9, 5), (7,), (11, 12, 13), tuple(range(20, 40))]


def requests(count: int = 8, **sampling: Any) -> list[Request]:
    """Each with a grammar of its own; every third without one."""
    asked = []
    for i in range(count):
        grammar = None if i % 3 == 2 else random_automaton(i)
        how = {"temperature": (0.0, 0.9)[i % 2], "seed": i, "n": 1 + i % 2, "logprobs": 1}
        named = {"grammar": grammar, **how, **sampling}
        asked.append(ask(f"r{i}", PROMPTS[i % len(PROMPTS)], 24, **named))
    return asked


def check_all_fit(done: Run) -> None:
    for request in done.requests.values():
        grammar = request.sampling.grammar
        if grammar is not None:
            assert isinstance(grammar, Automaton)
            for choice in done.answers[request.request_id].choices.values():
                assert grammar.fits(choice.tokens), request.request_id


def answers_of(done: Run) -> dict[Any, tuple[int, ...]]:
    return {
        (request.prompt, i): tuple(choice.tokens)
        for request in done.requests.values()
        for i, choice in done.answers[request.request_id].choices.items()
    }


def highest_allowed(sequence: Sequence, length: int) -> list[int]:
    """Drafts what the grammar allows, and at last what it does not."""
    grammar, tokens = sequence.request.sampling.grammar, list(sequence.output)
    if not isinstance(grammar, Automaton):
        return []
    for _ in range(length - 1):
        if not (after := grammar.next_tokens(tokens) - {EOS}):
            break
        tokens.append(max(after))
    bad = next(t for t in range(VOCAB) if t not in grammar.next_tokens(tokens))
    return [*tokens[sequence.num_generated :], bad][:length]


def test_answers_fit_and_do_not_depend_on_drafts() -> None:
    asked = requests()
    plain = run(make_engine(SETUP), asked)
    check_all_fit(plain)
    ended = [c.end for a in plain.answers.values() for c in a.choices.values()]
    assert any(end is not None and end.reason is FinishReason.STOP for end in ended)
    ways: list[dict[str, Any]] = [
        {"drafter": drafter} for drafter in adversaries(answers_of(plain)).values()
    ]
    ways += [
        {"drafter": "lookup", "page_size": 1, "num_pages": 60},
        {"drafter": "model", "draft": load("llama"), "max_draft": 3},
        {"drafters": ("lookup", "model"), "draft": load("llama"), "mode": "auto"},
        {"drafter": "lookup", "max_batch_tokens": 17},
        {"drafter": ScriptedDrafter(highest_allowed)},
    ]
    for way in ways:
        done = run(make_engine(SETUP, **way), asked, check=True)
        for request in asked:
            assert done.said(request.request_id) == plain.said(request.request_id), way


def test_greedy_is_transformers() -> None:
    """Its own constraint is a function of the prefix, too."""
    for seed in (0, 1, 4, 6):
        grammar = random_automaton(seed)
        prompt = PROMPTS[seed % len(PROMPTS)]
        done = run(make_engine(SETUP, drafter="lookup"), [ask("r", prompt, 20, grammar=grammar)])

        def allowed(_: int, ids: torch.Tensor, after: int = len(prompt)) -> list[int]:
            return sorted(grammar.next_tokens(ids[after:].tolist()))  # noqa: B023

        ids = torch.tensor([prompt])
        out = eager("qwen3").generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            prefix_allowed_tokens_fn=allowed,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert done.answers["r"].tokens == tuple(out[0, len(prompt) :].tolist())


def test_preemption_changes_nothing() -> None:
    asked = requests()
    plain = run(make_engine(SETUP), asked)
    tight = run(make_engine(SETUP, drafter="lookup", num_pages=24), asked, check=True)
    assert tight.preemptions
    for request in asked:
        assert tight.said(request.request_id) == plain.said(request.request_id)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_answers_fit_under_rules_that_weigh_probabilities(rule: str) -> None:
    asked = requests(seed=None, temperature=1.0, n=3)
    setup = dataclasses.replace(SETUP, drafter="model", draft=load("llama"))
    built = make_engine(setup)
    built.engine.parts.judge._verification = rule
    done = run(built, asked)
    check_all_fit(done)


# -- what is forced ----------------------------------------------------------------------------


def line(*tokens: int) -> Automaton:
    """One text and no other."""
    table = [{token: i + 1} for i, token in enumerate(tokens)]
    return Automaton([*table, {}], frozenset({len(tokens)}))


def test_forced_text_is_drafted_and_always_accepted() -> None:
    text = tuple(range(30, 50))
    for names in (("none",), ("lookup",)):
        default = {} if names == ("none",) else {"drafters": names}
        built = make_engine(SETUP, **default, max_draft=8)
        done = run(built, [ask("r", (5, 9), 40, grammar=line(*text))])
        assert done.answers["r"].tokens == (*text, EOS)
        stats = done.answers["r"].choices[0].end.stats
        if names == ("lookup",):
            assert stats.draft_tokens == stats.accepted_tokens > 15
            assert stats.target_passes < 6


def test_the_grammar_drafter_is_asked_first_and_only_where_there_is_a_grammar() -> None:
    built = make_engine(SETUP, drafter="lookup")
    run_ = Run(built, [ask("with", (5, 9), 4, grammar=line(7, 8)), ask("without", (5, 9), 4)])
    names = {s.request.request_id: s.drafters for s in built.engine.parts.scheduler.waiting}
    assert names == {"with": ("grammar", "lookup"), "without": ("lookup",)}
    run_.finish()


def test_a_request_that_wants_no_speculation_gets_none() -> None:
    asked = ask("r", (5, 9), 40, SpeculationParams(enabled=False), grammar=line(*range(30, 50)))
    done = run(make_engine(SETUP, drafter="lookup"), [asked])
    assert done.answers["r"].choices[0].end.stats.draft_tokens == 0


def test_no_drafter_proposes_what_a_grammar_forbids() -> None:
    grammar = random_automaton(3)
    built = make_engine(SETUP, drafter=ScriptedDrafter(highest_allowed))
    drafted: list[tuple[list[int], list[int]]] = []
    lengths = built.engine._draft

    def noting(plan: Any, chosen: Any) -> Any:
        proposal = lengths(plan, chosen)
        pairs = zip(plan.sequences, proposal.tokens, strict=True)
        drafted.extend((s.output, list(tokens)) for s, tokens in pairs)
        return proposal

    built.engine._draft = noting  # type: ignore[method-assign]
    run(built, [ask("r", (5, 9), 30, grammar=grammar)])
    assert sum(len(tokens) for _, tokens in drafted) > 5
    for output, tokens in drafted:
        assert grammar.fits([*output, *tokens])


# -- ends and failures -------------------------------------------------------------------------


def test_the_end_comes_where_the_grammar_ends_even_before_min_tokens() -> None:
    asked = [
        ask("short", (5, 9), 20, grammar=line(7, 8), min_tokens=10),
        ask("ignoring", (5, 9), 20, grammar=line(7, 8), ignore_eos=True),
    ]
    for drafter in ("none", "lookup"):
        done = run(make_engine(SETUP, drafter=drafter), asked)
        for name in ("short", "ignoring"):
            assert done.answers[name].tokens == (7, 8, EOS)
            assert done.answers[name].choices[0].end.reason is FinishReason.STOP


def test_min_tokens_delays_an_end_that_may_wait() -> None:
    loop = Automaton([{7: 0, 8: 0}], frozenset({0}))
    asked = ask("r", (5, 9), 20, grammar=loop, min_tokens=6, logit_bias={EOS: 100.0})
    tokens = run(make_engine(SETUP), [asked]).answers["r"].tokens
    assert len(tokens) == 7
    assert tokens[-1] == EOS
    assert set(tokens[:-1]) <= {7, 8}


def test_a_grammar_binds_harder_than_allowed_token_ids_and_biases() -> None:
    asked = [
        ask("apart", (5, 9), 9, grammar=line(7, 8), allowed_token_ids=frozenset({50})),
        ask("both", (5, 9), 9, grammar=random_automaton(1), logit_bias={50: 100.0, 51: 100.0}),
        ask("bad", (5, 9), 9, grammar=line(7, 8), bad_words=((7,), (8,))),
    ]
    done = run(make_engine(SETUP, drafter="lookup"), asked)
    assert done.answers["apart"].tokens == (7, 8, EOS)
    assert done.answers["bad"].tokens == (7, 8, EOS)
    check_all_fit(done)


def test_a_matcher_that_fails_ends_its_own_request_alone() -> None:
    good = random_automaton(0)
    bad = Automaton([{7: 0, 8: 0}], frozenset(), breaks_after=5)
    asked = [ask("good", (5, 9), 20, grammar=good), ask("bad", (5, 9), 20, grammar=bad)]
    alone = run(make_engine(SETUP), asked[:1])
    for drafter in ("none", "lookup"):
        done = run(make_engine(SETUP, drafter=drafter), asked, check=True)
        failed = done.answers["bad"].failed
        assert failed is not None
        assert isinstance(failed.error, RequestFailed)
        assert "too hard" in str(failed.error)
        assert done.said("good") == alone.said("good")


# -- the cursor --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_cursor_answers_the_same_wherever_it_comes_from(seed: int) -> None:
    grammar = random_automaton(seed)
    paths: list[list[int]] = [[]]
    while len(paths) < 60:
        base = paths[(len(paths) * 7) % len(paths)]
        after = sorted(grammar.next_tokens(base) - {EOS})
        paths.append([*base, after[len(paths) % len(after)]])
    paths += [[*paths[9], VOCAB - 1, 3], [*paths[5], EOS, 4]]
    wandering = GrammarCursor(grammar)
    for path in [paths[(i * 37) % len(paths)] for i in range(300)]:
        fresh = GrammarCursor(grammar)
        assert wandering.allowed(path) == fresh.allowed(path)
        assert wandering.forced(path) == fresh.forced(path)
        for draft in ([EOS], [EOS, 5], path[:2], [1, 2]):
            assert wandering.fitting(path, draft) == fresh.fitting(path, draft)


def test_a_matcher_that_keeps_refused_drafts_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The classic fault: nothing is rolled back."""
    asked = requests()
    plain = run(make_engine(SETUP), asked)
    setup = dataclasses.replace(SETUP, drafter=ScriptedDrafter(highest_allowed))
    names = [request.request_id for request in asked]
    done = run(make_engine(setup), asked)
    assert all(done.said(name) == plain.said(name) for name in names)
    monkeypatch.setattr(AutomatonMatcher, "rewind", lambda _self, _count: None)
    broken = run(make_engine(setup), asked)
    assert any(broken.answers[name].said != plain.said(name) for name in names)
