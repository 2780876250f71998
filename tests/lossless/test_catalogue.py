"""Two hundred descriptions: every answer that ends is of its own, and speculation and company
change none. `python -m tools.schemas` tries all of them in all ways; here each meets a few, so
that every kind of drafter sees all families under both tokenizers, greedy and sampled."""

from __future__ import annotations

import pytest

from engine.grammar import GrammarCursor
from tests.fakes import Run, make_engine, run
from tests.lossless.catalogue import DESCRIPTIONS
from tests.lossless.structured import (
    WAYS,
    Case,
    case,
    drafts,
    ended,
    neighbours,
    way,
    world,
)

TOKENIZERS = ("bytes", "byte fallback")


def picked(name: str, start: int = 0, step: int = 1) -> list[Case]:
    """Half of all, or some of those, each once: greedy and sampled take turns, the other way round
    under the other tokenizer."""
    made, first = world(name), TOKENIZERS.index(name)
    numbers = range(first, len(DESCRIPTIONS), 2)[start::step]
    return [case(made, n, sampled=(n // 2) % 2 == first) for n in numbers]


def test_there_are_two_hundred() -> None:
    assert len({d.name for d in DESCRIPTIONS}) == len(DESCRIPTIONS) >= 200


def test_who_judges_the_answers_has_teeth() -> None:
    by_name = {d.name: d for d in DESCRIPTIONS}
    for name, right, wrong in (
        ("flat", '{"name": "", "age": 1, "ok": true}', '{"name": "", "age": 1}'),
        ("multiple of 0.01", "0.07", "0.075"),
        ("format date", '"2024-02-29"', '"2023-02-29"'),
        ("format date-time", '"2024-02-29t10:00:60.1234567z"', '"2024-02-29T25:00:00Z"'),
        ("one of tagged", '{"t": "a", "x": 1}', '{"t": "b", "x": 1}'),
        ("regex a+b", "aab", "aabb"),
        ("choice a", "ab", "abcd"),
        ("grammar of brackets (", "((x))", "((x)"),
    ):
        assert by_name[name].fits(right), name
        assert not by_name[name].fits(wrong), name


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_answer_that_ends_is_valid_and_the_same_however_it_is_drafted(name: str) -> None:
    made, cases = world(name), picked(name)
    everybody = [*cases, *neighbours(made, 6)]
    plain = run(make_engine(made.setup), [c.request for c in everybody])
    assert ended(made, plain, cases) > 0.9 * len(cases)
    accepted = {}
    for i, how in enumerate(WAYS):
        own = [*cases[i :: len(WAYS)], *neighbours(made, 2)]
        done = run(make_engine(made.setup, **way(made, how)), [c.request for c in own])
        for one in own:
            name = one.request.request_id
            assert done.said(name) == plain.said(name), f"{how}: {one.description}"
        accepted[how] = done.accepted
    assert all(accepted[how] for how in WAYS if how != "random tokens"), accepted


def test_an_answer_is_the_same_alone() -> None:
    made, cases = world(), picked("bytes", step=9)
    together = run(make_engine(made.setup), [c.request for c in cases])
    for one in cases:
        alone = run(make_engine(made.setup), [one.request])
        assert alone.said(one.request.request_id) == together.said(one.request.request_id)


@pytest.mark.parametrize("how", WAYS)
def test_no_drafter_proposes_what_a_grammar_forbids(how: str) -> None:
    made = world("byte fallback")
    cases = picked("byte fallback", 5, 14)
    grammars = {c.request.request_id: c.request.sampling.grammar for c in cases}
    built = make_engine(made.setup, **way(made, how))
    count = 0
    for sequence, output, proposal, i in drafts(Run(built, [c.request for c in cases])):
        grammar = grammars[sequence.request.request_id]
        assert grammar is not None
        parents = proposal.parents[i] if proposal.parents else None
        draft = proposal.tokens[i]
        for node in range(len(draft)):
            path = [node]
            while path[0] > 0 or parents is not None:
                before = path[0] - 1 if parents is None else parents[path[0]]
                if before < 0:
                    break
                path.insert(0, before)
            tokens = [*output, *(draft[n] for n in path)]
            matcher = grammar.start()
            inner = tokens[:-1] if tokens[-1] in made.end else tokens
            assert matcher.advance(inner) == len(inner), how
            assert len(inner) == len(tokens) or matcher.may_end, how
            count += 1
    assert count > 20 or how == "random tokens"


@pytest.mark.parametrize("name", [*TOKENIZERS, "characters"])
def test_forced_text_is_always_accepted(name: str) -> None:
    """However the model would spell it: where a text is forced, the mask allows one spelling."""
    made = world(name)
    cases = [case(made, n, sampled=n % 2 == 1) for n in range(0, len(DESCRIPTIONS), 9)]
    built = make_engine(made.setup, **way(made, "grammar"))
    done = run(built, [c.request for c in cases])
    ends = [c.end for a in done.answers.values() for c in a.choices.values()]
    stats = [end.stats for end in ends if end is not None]
    drafted = sum(s.draft_tokens for s in stats)
    assert drafted > 100
    assert sum(s.accepted_tokens for s in stats) == drafted
    assert ended(made, done, cases) > len(cases) // 2


def test_a_mask_of_the_row_before_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault: rows behind draft tokens get the mask of an earlier row."""
    made, cases = world(), picked("bytes", step=20)
    right = GrammarCursor.allowed
    early = {"seen": 0}

    def late(self: GrammarCursor, path: list[int]) -> bytes | None:
        early["seen"] += 1
        return right(self, path[:-1] if early["seen"] % 3 == 0 else path)

    monkeypatch.setattr(GrammarCursor, "allowed", late)
    done = run(make_engine(made.setup), [c.request for c in cases])
    with pytest.raises(AssertionError, match="is not of"):
        ended(made, done, cases)
