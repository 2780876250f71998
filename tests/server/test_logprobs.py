"""Log probabilities and echo in /v1/completions."""

from __future__ import annotations

import pytest

from engine.types import TokenLogprobs
from server.api.logprobs import LogprobWriter
from server.text.codec import TextCodec
from tests.server.support import (
    FakeEngine,
    choice,
    complete,
    ids,
    logprob_of,
    make_app,
    make_tokenizer,
)


def test_logprobs_zero_is_not_null() -> None:
    app = make_app(FakeEngine("ab"))
    assert choice(app)["logprobs"] is None
    lists = choice(app, logprobs=0)["logprobs"]
    assert lists["tokens"] == ["a", "b", "<eos>"]
    assert lists["text_offset"] == [0, 1, 2]
    assert lists["token_logprobs"] == [logprob_of(token, 0).logprob for token in [*ids("ab"), 0]]
    assert [len(top) for top in lists["top_logprobs"]] == [1, 1, 1]


@pytest.mark.parametrize("top", [1, 5, 20])
def test_each_top_logprobs_has_k_or_k_plus_one_entries(top: int) -> None:
    lists = choice(make_app(FakeEngine("abc")), logprobs=top)["logprobs"]
    assert all(1 <= len(entry) <= top + 1 for entry in lists["top_logprobs"])
    for name, value, entry in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert entry[name] == value


def test_parts_of_a_character_are_written_as_bytes() -> None:
    """As OpenAI does: tokens that would all read as U+FFFD stay apart."""
    lists = choice(make_app(FakeEngine("é🦊")), logprobs=5)["logprobs"]
    written = "".join(lists["tokens"][:-1])
    assert written == r"bytes:\xc3bytes:\xa9bytes:\xf0bytes:\x9fbytes:\xa6bytes:\x8a"
    assert lists["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    fox = logprob_of(ids("🦊")[0], 5)
    assert len(lists["top_logprobs"][2]) == 5  # none hides another
    assert lists["top_logprobs"][2][r"bytes:\xf0"] == fox.logprob
    echoed = choice(make_app(FakeEngine("a")), prompt="é", echo=True, logprobs=0)["logprobs"]
    assert echoed["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "a", "<eos>"]


def test_tokens_with_the_same_text_keep_the_larger_logprob() -> None:
    entry = TokenLogprobs(5, -3.0, 2, ((5, -1.0), (6, -2.0)))
    writer = LogprobWriter(TextCodec(make_tokenizer()), 2, as_ids=False)
    lists = writer.completion([entry], [5], [0])
    assert lists["top_logprobs"][0][lists["tokens"][0]] == -1.0


def test_tokens_as_token_ids() -> None:
    lists = choice(make_app(FakeEngine("ab")), logprobs=1, return_tokens_as_token_ids=True)[
        "logprobs"
    ]
    assert lists["tokens"][0] == f"token_id:{ids('a')[0]}"
    assert all(key.startswith("token_id:") for key in lists["top_logprobs"][0])


def test_echo_puts_the_prompt_first() -> None:
    app = make_app(FakeEngine("cd"))
    assert choice(app, prompt="ab", echo=True)["text"] == "abcd"
    assert choice(app, prompt=ids("ab"), echo=True)["text"] == "abcd"


def test_echo_with_logprobs_begins_with_null() -> None:
    result = choice(make_app(FakeEngine("🦊d")), prompt="é b", echo=True, logprobs=2)
    lists = result["logprobs"]
    count = len(ids("é b")) + len(ids("🦊d")) + 1
    assert [len(values) for values in lists.values()] == [count] * 4
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert None not in lists["token_logprobs"][1:]
    assert result["text"] == "é b🦊d"
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][-2] == len("é b🦊")


def test_scoring_a_prompt_without_generating() -> None:
    engine = FakeEngine()
    body = complete(make_app(engine), prompt="abc", max_tokens=0, echo=True, logprobs=1).json()
    [result] = body["choices"]
    assert result["text"] == "abc"
    assert result["finish_reason"] == "length"
    assert len(result["logprobs"]["tokens"]) == 3
    assert body["usage"]["completion_tokens"] == 0
    assert body["speculation"]["tokens_per_pass"] is None or engine.requests


def test_prompt_logprobs() -> None:
    entries = choice(make_app(FakeEngine()), prompt="abc", prompt_logprobs=1)["prompt_logprobs"]
    assert entries[0] is None
    second = ids("abc")[1]
    assert entries[1][str(second)] == {
        "logprob": logprob_of(second, 1).logprob,
        "rank": 1,
        "decoded_token": "b",
    }
