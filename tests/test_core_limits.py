"""Where a text ends: token limits, end-of-text tokens and the context, inside a draft or not."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ContextLengthExceeded
from engine.types import FinishReason
from tests.drafters import ScriptedDrafter, adversaries, follow
from tests.fakes import Run, ask, fake_logits, make_engine, run

PROMPT = (5, 6, 7, 8, 9)


def greedy_text(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the fake model says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return tuple(tokens[len(prompt) :])


TEXT = greedy_text(PROMPT, 60)
ANSWERS = {(PROMPT, 0): TEXT}


def one(done: Run) -> tuple[tuple[int, ...], FinishReason, int | None]:
    """Tokens, reason and stop token of the only request."""
    (answer,) = done.answers.values()
    end = answer.choices[0].end
    assert end is not None
    return answer.tokens, end.reason, end.stop_token_id


@pytest.mark.parametrize("drafter", ["none", "right", "too long", "wrong"])
@pytest.mark.parametrize("max_draft", [1, 2, 4, 8])
def test_every_max_tokens(drafter: str, max_draft: int) -> None:
    """0, 1, ... k + 2: fewer slots than a draft has tokens, exactly as many, more."""
    for max_tokens in range(max_draft + 3):
        made = drafter if drafter == "none" else adversaries(ANSWERS)[drafter]
        engine = make_engine(drafter=made, max_draft=max_draft)
        done = run(engine, [ask("r", PROMPT, max_tokens, ignore_eos=True)], check=True)
        assert one(done) == (TEXT[:max_tokens], FinishReason.LENGTH, None)


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_no_tokens_wanted(prompt_logprobs: int | None) -> None:
    """max_tokens 0 reads the prompt, in chunks, for every choice, and says nothing."""
    engine = make_engine(max_batch_tokens=2, max_sequences=2, drafter="lookup")
    done = run(engine, [ask("r", PROMPT * 3, 0, n=3, prompt_logprobs=prompt_logprobs)])
    answer = done.answers["r"]
    assert [c.end.reason for c in answer.choices.values() if c.end] == [FinishReason.LENGTH] * 3
    assert all(not c.tokens for c in answer.choices.values())
    assert (answer.prompt_logprobs is not None) == (prompt_logprobs is not None)
    assert not done.stats[-1].emitted_tokens


@pytest.mark.parametrize("position", range(12))
def test_end_of_text_at_every_draft_position(position: int) -> None:
    """The first occurrence ends the text, whether it is an accepted draft token, a correction
    or a bonus; what was drafted behind it never appears."""
    eos = TEXT[position]
    first = TEXT.index(eos)
    for max_draft in (1, 3, 4, 8):
        for drafter in (*adversaries(ANSWERS).values(), "none", "lookup"):
            engine = make_engine(drafter=drafter, max_draft=max_draft, eos=frozenset({eos}))
            done = run(engine, [ask("r", PROMPT, 40, logprobs=0)], check=True)
            assert one(done) == (TEXT[: first + 1], FinishReason.STOP, eos)


@pytest.mark.parametrize("position", range(6))
def test_stop_token_at_every_draft_position(position: int) -> None:
    stop = TEXT[position]
    drafter = ScriptedDrafter(follow(ANSWERS))
    engine = make_engine(drafter=drafter, eos=frozenset())
    done = run(engine, [ask("r", PROMPT, 40, stop_token_ids=frozenset({stop, 96}))])
    assert one(done) == (TEXT[: TEXT.index(stop) + 1], FinishReason.STOP, stop)


def test_accepted_counts_stop_at_the_end_of_the_text() -> None:
    """Draft tokens that match beyond the end were checked, but are not accepted."""
    position = next(i for i in range(2, 9) if TEXT.index(TEXT[i]) == i and i % 5 not in (0, 4))
    drafter = ScriptedDrafter(follow(ANSWERS))
    engine = make_engine(drafter=drafter, eos=frozenset({TEXT[position]}))
    done = run(engine, [ask("r", PROMPT, 40)])
    stats = done.answers["r"].choices[0].end.stats
    assert stats.generated_tokens == position + 1
    assert stats.accepted_tokens == sum(sum(s.accepted_by_position) for s in done.stats)
    assert stats.accepted_tokens < stats.draft_tokens
    assert stats.accepted_tokens <= stats.generated_tokens


def test_a_sequence_knows_how_much_was_drafted_in_its_last_step() -> None:
    """The next step counts it to what the sequence takes without anybody's prompt."""
    built = make_engine(drafter=ScriptedDrafter(follow(ANSWERS)), max_draft=4)
    going, seen = Run(built, [ask("r", PROMPT, 12, ignore_eos=True)]), []
    while built.engine.has_work:
        running = list(built.engine.parts.scheduler.running)
        going.step()
        seen += [s.last_draft for s in running]
        assert all(s.last_draft == sum(going.stats[-1].drafted_by_position) for s in running)
    assert len(set(seen)) >= 2


def test_end_of_text_on_the_last_token_is_a_stop() -> None:
    """End of text and max_tokens at once: the token decides."""
    drafter = ScriptedDrafter(follow(ANSWERS))
    for position in (0, 3, 4):
        count = TEXT.index(TEXT[position]) + 1
        engine = make_engine(drafter=drafter, eos=frozenset({TEXT[position]}))
        done = run(engine, [ask("r", PROMPT, count)])
        assert one(done) == (TEXT[:count], FinishReason.STOP, TEXT[position])


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 6, 12])
def test_min_tokens_inside_a_draft(min_tokens: int) -> None:
    """End of text is impossible before, possible right after; drafts that propose it early are
    refused at that place."""
    eos = TEXT[2]
    plain = make_engine(eos=frozenset({eos}))
    expected = one(run(plain, [ask("r", PROMPT, 12, min_tokens=min_tokens)]))
    assert len(expected[0]) >= max(min_tokens, 1)
    assert eos not in expected[0][: max(0, min_tokens - 1)]
    for drafter in adversaries(ANSWERS).values():
        engine = make_engine(drafter=drafter, eos=frozenset({eos}))
        assert one(run(engine, [ask("r", PROMPT, 12, min_tokens=min_tokens)])) == expected


@pytest.mark.parametrize("drafter", ["none", "lookup", "right", "too long", "random"])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_context_exactly_full(drafter: str, page_size: int) -> None:
    """The last token fills the model's context, and the cache too; nothing lies beyond."""
    made = drafter if drafter in ("none", "lookup") else adversaries(ANSWERS)[drafter]
    for room in (0, 1, 2, 5, 9):
        limit = len(PROMPT) + room
        settings: dict[str, Any] = {"page_size": page_size, "num_pages": -(-limit // page_size)}
        engine = make_engine(drafter=made, max_model_len=limit, max_draft=8, **settings)
        done = run(engine, [ask("r", PROMPT, room, ignore_eos=True)], check=True)
        assert one(done) == (TEXT[:room], FinishReason.LENGTH, None)
        with pytest.raises(ContextLengthExceeded, match=str(limit + 1)):
            Run(engine, [ask("r", PROMPT, room + 1)])


def test_shortest_prompt() -> None:
    for drafter in ("none", "lookup"):
        engine = make_engine(drafter=drafter, page_size=1)
        done = run(engine, [ask("r", (5,), 6, ignore_eos=True)])
        assert one(done)[0] == greedy_text((5,), 6)


def test_stop_from_outside_names_no_token() -> None:
    """The server found a stop string and ends the choice itself."""
    done = Run(make_engine(), [ask("r", PROMPT, 40, ignore_eos=True)])
    for _ in range(3):
        done.step()
    done.engine.abort("r", 0, FinishReason.STOP)
    done.finish()
    assert one(done) == (TEXT[:3], FinishReason.STOP, None)
