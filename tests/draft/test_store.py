"""Past answers: what is found, whose it is, and what it may cost."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from engine.cache.pages import PRIVATE, PageTable
from engine.draft.drafter import Verdict
from engine.draft.lookup import PREDICTED, STORED, LookupDrafter
from engine.draft.store import AnswerStore, StoreCursor
from engine.sequence import Sequence
from engine.types import Request, SpeculationParams
from tests.drafters import seen

ROOMY = 1 << 20
QUESTION = (90, 91, 92, 93, 1, 2, 3)
ANSWER = (10, 11, 12, 13, 14, 15, 16, 17)


def sequence(prompt: tuple[int, ...], salt: str = "", prediction: tuple[int, ...] = ()) -> Sequence:
    speculation = SpeculationParams(prediction=prediction)
    request = Request("r", prompt, speculation=speculation, cache_salt=salt)
    return Sequence(request, 0, 0, 0, PageTable(salt), "lookup", 8, 1000)


def after(store: AnswerStore, tokens: tuple[int, ...], tenant: str = "") -> tuple[list[int], int]:
    """What a fresh cursor says comes next, and how much agrees."""
    cursor = StoreCursor()
    store.follow(cursor, tenant, tokens, 0)
    return cursor.draft(4), cursor.length


def answered(drafter: LookupDrafter, prompt: tuple[int, ...], answer: list[int], salt: str = ""):
    """A request that ran to its end."""
    done = sequence(prompt, salt)
    drafter.propose([done], [4])
    done.append(answer)
    drafter.observe(seen([done], [Verdict(answer, 0, 0)]))
    drafter.release(done)


def test_a_question_asked_again_is_answered_from_its_first_token_on() -> None:
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    assert after(store, QUESTION) == ([10, 11, 12, 13], len(QUESTION))
    assert after(store, (*QUESTION, 10, 11)) == ([12, 13, 14, 15], len(QUESTION) + 2)


def test_four_tokens_must_agree() -> None:
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    assert after(store, (5, 5, 12, 13, 14)) == ([], 0)
    assert after(store, (5, 5, 11, 12, 13, 14)) == ([15, 16, 17], 4)


def test_nothing_follows_the_end_of_an_answer() -> None:
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    assert after(store, ANSWER) == ([], 0)


def test_the_prompt_itself_is_not_drafted() -> None:
    """Only what the model has said is worth repeating; the context before it just helps to
    find it."""
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    assert after(store, QUESTION[:5]) == ([], 0)


def test_the_longest_agreement_wins_and_of_equals_the_latest() -> None:
    store = AnswerStore(ROOMY)
    store.add("", (7, 1, 2, 3, 4), (50, 51))
    store.add("", (8, 1, 2, 3, 4), (60, 61))
    store.add("", (9, 1, 2, 3, 4), (70, 71))
    assert after(store, (8, 1, 2, 3, 4)) == ([60, 61], 5)
    assert after(store, (5, 1, 2, 3, 4)) == ([70, 71], 4)


def test_a_question_is_found_among_many_that_end_alike() -> None:
    """Every prompt ends with the chat template's last tokens; the words before tell."""
    store = AnswerStore(ROOMY)
    ending = (1, 2, 3, 4, 5, 6)
    prompts = [(*range(100 + i, 140 + i), *ending) for i in range(300)]
    for i, prompt in enumerate(prompts):
        store.add("", prompt, (1000 + i, 1, 2))
    for i in (0, 17, 299):
        assert after(store, prompts[i])[0] == [1000 + i, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_following_token_by_token_finds_the_longest_agreement(seed: int) -> None:
    """As brute force over all that is stored finds it, wherever the index looks at every
    occurrence (the latest sixteen)."""
    dice = random.Random(seed)
    store, cursor = AnswerStore(ROOMY), StoreCursor()
    answers = [[dice.randrange(7) for _ in range(dice.randint(5, 60))] for _ in range(40)]
    for answer in answers:
        store.add("", (), answer)
    text: list[int] = []
    compared = 0
    for _ in range(400):
        copied = dice.choice(answers)
        start = dice.randrange(len(copied))
        known, text = len(text), [*text, *copied[start : start + dice.randint(1, 9)]]
        store.follow(cursor, "", text, known)
        found = [agreement(one, end, text) for one in answers for end in range(4, len(one))]
        long = [length for length in found if length >= 4]
        assert bool(cursor.length) == bool(long)
        if not long:
            continue
        tail = text[-min(cursor.length, 64) :]
        said = tail + cursor.draft(4)
        assert any(one[i : i + len(said)] == said for one in answers for i in range(len(one)))
        if len(long) <= 16:
            compared += 1
            assert min(cursor.length, 64) == min(max(long), 64)
    assert compared > 100


def agreement(stored: list[int], end: int, text: list[int]) -> int:
    """Tokens before a place in stored text that are those at the end of `text`."""
    length = 0
    while length < min(end, len(text)) and stored[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


# -- tenants ---------------------------------------------------------------------------------


def test_tenants_never_see_each_others_answers() -> None:
    drafter = LookupDrafter(store=AnswerStore(ROOMY))
    answered(drafter, QUESTION, list(ANSWER), salt="a/")
    same, other, nobody = (sequence(QUESTION, salt) for salt in ("a/", "b/", ""))
    assert drafter.propose([same, other, nobody], [4] * 3).tokens == [[10, 11, 12, 13], [], []]
    assert [drafter.outlook(s) is None for s in (same, other, nobody)] == [False, True, True]
    answered(drafter, QUESTION, [20, 21, 22], salt="b/")
    fresh = [sequence(QUESTION, salt) for salt in ("a/", "b/")]
    assert drafter.propose(fresh, [2, 2]).tokens == [[10, 11], [20, 21]]


def test_what_is_private_is_not_kept() -> None:
    store = AnswerStore(ROOMY)
    answered(LookupDrafter(store=store), QUESTION, list(ANSWER), salt=PRIVATE)
    assert len(store) == store.num_bytes == 0


# -- memory ----------------------------------------------------------------------------------


def test_the_answers_used_least_recently_go_first() -> None:
    store = AnswerStore(ROOMY)
    questions = [(i, i + 1, i + 2, i + 3, i + 4) for i in range(100, 1000, 100)]
    store.add("", questions[0], ANSWER)
    store.limit = 4 * store.num_bytes
    for question in questions[1:4]:
        store.add("", question, ANSWER)
    assert len(store) == 4
    assert after(store, questions[0])[0]  # used once more
    store.add("", questions[4], ANSWER)
    assert len(store) == 4
    found = [bool(after(store, question)[0]) for question in questions[:5]]
    assert found == [True, False, True, True, True]


def test_a_cursor_in_an_answer_that_is_dropped_lets_go() -> None:
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    cursor = StoreCursor()
    store.follow(cursor, "", QUESTION, 0)
    store.limit = store.num_bytes
    store.add("", (30, 31, 32, 33, 34, 35, 36), range(40, 48))
    store.follow(cursor, "", (*QUESTION, 10), len(QUESTION))
    assert (cursor.length, cursor.draft(4)) == (0, [])


def test_the_same_answer_is_kept_once() -> None:
    store = AnswerStore(ROOMY)
    store.add("", QUESTION, ANSWER)
    size = store.num_bytes
    for _ in range(50):
        store.add("", QUESTION, ANSWER)
    assert (len(store), store.num_bytes) == (1, size)


def test_an_answer_larger_than_the_memory_is_left_out() -> None:
    store = AnswerStore(20_000)
    store.add("", QUESTION, ANSWER)
    store.add("", QUESTION, range(1000))
    store.add("", QUESTION, ())
    assert len(store) == 1


def test_an_empty_store_holds_nothing() -> None:
    store = AnswerStore(ROOMY)
    for i in range(40):
        store.add(f"tenant{i % 3}", (i, *QUESTION), (i, *ANSWER))
    store.limit = 0
    store.add("x", QUESTION, ANSWER)  # does not fit
    while store._answers:
        store._drop(next(iter(store._answers)))
    assert store.num_bytes == 0
    assert not store._tenants


@pytest.mark.parametrize("length", [10, 300, 3000])
def test_the_account_is_honest(length: int) -> None:
    """What Python takes is no more than what is charged, and not far below."""
    dice = random.Random(1)
    prompts = [tuple(dice.randrange(50_000) for _ in range(40)) for _ in range(60_000 // length)]
    answers = [[dice.randrange(50_000) for _ in range(length)] for _ in prompts]
    tracemalloc.start()
    store = AnswerStore(1 << 30)
    for prompt, answer in zip(prompts, answers, strict=True):
        store.add("", prompt, answer)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * store.num_bytes < taken <= store.num_bytes


# -- in the drafter --------------------------------------------------------------------------


def test_the_own_text_wins_unless_stored_text_agrees_for_longer() -> None:
    drafter = LookupDrafter(store=AnswerStore(ROOMY))
    answered(drafter, (5, 5, 5, 5), [6, 1, 2, 3, 4, 70, 71])
    own_longer = sequence((7, 1, 2, 3, 4, 80, 81, 7, 1, 2, 3, 4))
    equal = sequence((7, 1, 2, 3, 4, 80, 81, 9, 1, 2, 3, 4))
    stored_longer = sequence((7, 1, 2, 3, 4, 80, 81, 6, 1, 2, 3, 4))
    drafts = drafter.propose([own_longer, equal, stored_longer], [2] * 3).tokens
    assert drafts == [[80, 81], [80, 81], [70, 71]]


def test_the_outlook_tells_source_and_length() -> None:
    drafter = LookupDrafter(store=AnswerStore(ROOMY))
    answered(drafter, tuple(range(200, 240)), list(range(300, 400)))
    told = [drafter.outlook(sequence(tuple(range(300, 300 + n)))) for n in (3, 4, 8, 16, 32, 64)]
    assert told == [None, STORED, STORED + 1, STORED + 2, STORED + 3, STORED + 4]
    own = [sequence((*range(n), 77, *range(n))) for n in (1, 2, 3, 4, 6, 10, 50)]
    assert [drafter.outlook(s) for s in own] == [None, 0, 1, 2, 3, 4, 4]
    predicted = sequence((1, 2, 1, 2), prediction=(8, 9))
    assert drafter.outlook(predicted) == PREDICTED


def test_without_a_store_nothing_is_kept() -> None:
    drafter = LookupDrafter()
    answered(drafter, QUESTION, list(ANSWER))
    assert drafter.propose([sequence(QUESTION)], [4]).tokens == [[]]
