from __future__ import annotations

from typing import Any

import pytest

from loadtest.measure import Answer, Meter, StreamError


def chunk(text: str, tokens: int | None = None, finish: str | None = None) -> dict[str, Any]:
    usage = None if tokens is None else {"prompt_tokens": 7, "completion_tokens": tokens}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


def total(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}


def measured(*events: tuple[float, dict[str, Any]], done: bool = True) -> Answer:
    """An answer of a request that started at 100 s; events carry seconds after that."""
    meter = Meter(100.0)
    for at, event in events:
        meter.feed(100.0 + at, event)
    return meter.answer(100.0 + events[-1][0], done=done)


def test_tokens_are_counted_from_running_usage() -> None:
    answer = measured(
        (1.0, chunk("a", 1)),
        (1.5, chunk("bcde", 5)),
        (2.1, chunk("fg", 7)),
        (2.1, chunk("", 7, "stop")),
        (2.1, total(7)),
    )
    assert answer.error is None
    assert answer.ttft == pytest.approx(1.0)
    assert [c.tokens for c in answer.chunks] == [1, 4, 2]
    assert answer.output_tokens == 7
    assert answer.prompt_tokens == 7
    assert answer.tpot == pytest.approx(1.1 / 6)
    gaps = answer.token_gaps()
    assert [count for _, count in gaps] == [4, 2]
    assert [gap for gap, _ in gaps] == pytest.approx([0.5 / 4, 0.6 / 2])
    assert answer.chunk_gaps() == pytest.approx([0.5, 0.6])
    assert answer.text == "abcdefg"


def test_a_first_chunk_of_several_tokens_does_not_flatter_tpot() -> None:
    answer = measured((1.0, chunk("abc", 3)), (2.0, chunk("d", 4, "stop")), (2.0, total(4)))
    assert answer.tpot == pytest.approx(1.0)  # one token came after the first chunk, not three


def test_chunks_are_never_taken_for_tokens() -> None:
    answer = measured(
        (1.0, chunk("abc")), (2.0, chunk("def")), (2.0, chunk("", None, "stop")), (2.0, total(9))
    )
    assert answer.output_tokens == 9
    assert not answer.counted
    assert answer.token_gaps() == []
    assert answer.tpot == pytest.approx(1.0 / 8)  # by convention the first chunk is one token
    assert answer.chunk_gaps() == [pytest.approx(1.0)]


def test_usage_on_the_last_chunk_alone_is_a_total_and_no_chunk_size() -> None:
    answer = measured((1.0, chunk("abc")), (2.0, chunk("def", 9, "stop")))
    assert answer.output_tokens == 9
    assert [c.tokens for c in answer.chunks] == [None, None]


def test_without_usage_tokens_are_unknown() -> None:
    answer = measured((1.0, chunk("a")), (2.0, chunk("b", None, "stop")))
    assert answer.error is None
    assert answer.output_tokens is None
    assert answer.tpot is None


def test_the_role_chunk_of_a_chat_is_not_the_first_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}
    text = {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": None}
    answer = measured((0.1, role), (1.0, text))
    assert answer.ttft == pytest.approx(1.0)
    assert answer.text == "hi"


def test_reasoning_counts_as_output() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    text = {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}
    assert measured((0.5, thought), (1.0, text)).ttft == pytest.approx(0.5)


def test_a_token_held_back_as_text_counts_when_usage_tells_of_it() -> None:
    answer = measured(
        (1.0, chunk("", 1)), (2.0, chunk("é", 2)), (3.0, chunk("!", 2, "stop")), (3.0, total(2))
    )
    assert answer.ttft == pytest.approx(1.0)
    assert [c.tokens for c in answer.chunks] == [1, 1, 0]
    assert [count for _, count in answer.token_gaps()] == [1]  # flushed text is no token


def test_a_chunk_without_tokens_adds_its_gap_to_the_next() -> None:
    answer = measured(
        (1.0, chunk("a", 1)), (2.0, chunk("b", 1)), (4.0, chunk("c", 3, "stop")), (4.0, total(3))
    )
    assert answer.token_gaps() == [(pytest.approx(1.5), 2)]


def test_one_chunk_has_no_tpot() -> None:
    answer = measured((1.0, chunk("abc", 3, "stop")), (1.0, total(3)))
    assert answer.tpot is None
    assert answer.token_gaps() == []


def test_an_answer_without_tokens_has_no_ttft() -> None:
    answer = measured((1.0, chunk("", 0, "stop")), (1.0, total(0)))
    assert answer.error is None
    assert answer.ttft is None


@pytest.mark.parametrize(
    ("finish", "done"), [("stop", False), (None, True), ("abort", True), ("error", True)]
)
def test_a_stream_without_a_proper_end_is_incomplete(finish: str | None, done: bool) -> None:
    assert measured((1.0, chunk("a", 1, finish)), done=done).error == "incomplete"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "out of pages"}}, "stream"),
        ({"error": "plain"}, "stream"),
        ([], "malformed"),
        ({"choices": None}, "malformed"),
        ({"choices": [3]}, "malformed"),
        ({"choices": [], "usage": 3}, "malformed"),
    ],
)
def test_errors_and_nonsense_in_mid_stream_are_refused(event: object, kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        Meter(0.0).feed(1.0, event)
    assert caught.value.kind == kind
