"""Texts on their way to the tokenizer: what is refused, what passes whom, and what waits."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import Overloaded
from server.api.app import create_app
from server.metrics.registry import Metrics
from server.text import lanes
from server.text.least import TextBound, text_bound
from server.text.tokenizer import byte_alphabet
from tests.server.benches import assert_envelope
from tests.server.support import MODEL, FakeEngine, call, make_info, make_tokenizer, wait_until
from tests.server.test_text import sentencepiece_like

CONTEXT = 512  # of the fake engine


def bytes_like(
    normalizer: Any = None, pre_tokenizer: Any = None, *, missing: str = ""
) -> PreTrainedTokenizerFast:
    """One token a byte, and one for a word."""
    alphabet = {c: i for i, c in enumerate(byte_alphabet()) if c not in missing}
    backend = Tokenizer(models.BPE({**alphabet, "th": 300, "the": 301}, [("t", "h"), ("th", "e")]))
    if normalizer is not None:
        backend.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = (
        level if pre_tokenizer is None else pre_tokenizers.Sequence([pre_tokenizer, level])
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BOUNDED = [
    make_tokenizer(),
    sentencepiece_like(),
    bytes_like(),
    bytes_like(normalizers.NFC()),
    bytes_like(normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "__")])),
    bytes_like(pre_tokenizer=pre_tokenizers.Split(Regex(r"\d|\s+"), "isolated")),
    bytes_like(missing="zĤÎ"),  # a letter, a control character and a byte of Greek
    bytes_like(pre_tokenizer=pre_tokenizers.Digits(individual_digits=True)),
]


@pytest.mark.parametrize("tokenizer", BOUNDED, ids=range(len(BOUNDED)))
def test_no_text_is_longer_than_its_tokens_can_be(tokenizer: PreTrainedTokenizerFast) -> None:
    bound = text_bound(tokenizer)
    assert bound is not None
    texts = st.text(
        st.one_of(st.characters(codec="utf-8"), st.sampled_from(" the\N{COMBINING ACUTE ACCENT}α"))
    )

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert bound.least_tokens(text) <= len(tokens)

    check()


def test_what_is_dropped_makes_no_token_and_the_rest_is_counted_in_bytes() -> None:
    bound = text_bound(bytes_like(missing="z"))
    assert bound == TextBound(3, b"z")
    assert bound.least_tokens("z" * 10**6) == 0
    assert bound.least_tokens("z日zz本") == 2


def test_a_composed_character_stands_for_four() -> None:
    tokenizer = bytes_like(normalizers.NFC())
    text = "\u03b1\u0313\u0300\u0345" * 100  # an alpha and three marks
    per_token = len(text) / len(tokenizer.encode(text, add_special_tokens=False))
    assert text_bound(tokenizer) == TextBound(3 * 4, None)
    assert per_token > 1


def swallowing() -> PreTrainedTokenizerFast:
    tokenizer = bytes_like()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def words_or_unknown() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


UNBOUNDED = {
    "drops spaces": lambda: bytes_like(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "drops what splits": lambda: bytes_like(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "joins spaces": lambda: bytes_like(normalizers.Replace(Regex(" +"), " ")),
    "strips": lambda: bytes_like(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "shortens": lambda: bytes_like(normalizers.Replace("  ", " ")),
    "drops a byte that a normalizer makes": lambda: bytes_like(normalizers.NFC(), missing="z"),
    "a token takes spaces along": swallowing,
    "unknown words": words_or_unknown,
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_drops_text_has_no_bound(kind: str) -> None:
    tokenizer = UNBOUNDED[kind]()
    text = ("<mask>" if kind == "a token takes spaces along" else "a").join(
        ["   zzz", " " * 500 + "z" * 500]
    )
    assert len(tokenizer.encode(text, add_special_tokens=False)) < len(text)
    assert text_bound(tokenizer) is None


# ---------------------------------------------------------------------------------- refusals


class Watched:
    """A tokenizer that tells what it was given, and waits at long texts until it may go on."""

    def __init__(self) -> None:
        self._real = make_tokenizer()
        self.read: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.apply_chat_template: Callable[..., Any] = self._real.apply_chat_template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)

    def encode(self, text: str, **how: Any) -> list[int]:
        self.read.append(len(text))
        if len(text) > lanes.SHORT_CHARACTERS:
            assert self.gate.wait(30)
        tokens: list[int] = self._real.encode(text, **how)
        return tokens


def watched(**info: Any) -> tuple[FastAPI, Watched]:
    tokenizer = Watched()
    engine = FakeEngine(info=make_info(**info))
    app = create_app(engine, tokenizer, MODEL, metrics=Metrics(MODEL))
    tokenizer.read.clear()
    return app, tokenizer


def limit() -> int:
    bound = text_bound(make_tokenizer())
    assert bound is not None
    return bound.per_token * CONTEXT


TOO_LONG = "x" * (limit() + 1)
USER = {"role": "user", "content": TOO_LONG}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG, "b"]}, "prompt"),
        ("/v1/completions", {"prompt": [7] * (CONTEXT + 1)}, "prompt"),
        ("/v1/chat/completions", {"messages": [USER]}, "messages"),
        ("/v1/chat/completions", {"messages": [USER | {"content": "a"}, USER]}, "messages"),
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/tokenize", {"content": TOO_LONG}, "content"),
        ("/tokenize", {"messages": [USER]}, "messages"),
        ("/detokenize", {"tokens": [7] * (CONTEXT + 1)}, "tokens"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["b", "c" * 1025]}, "bad_words"),
        ("/v1/completions", {"prompt": "a" * 5000, "stop": "s" * 1025}, "stop"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_unread(path: str, body: dict[str, Any], param: str) -> None:
    app, tokenizer = watched()
    response = call(app, "POST", path, json=body)
    error = assert_envelope(response, 400)
    assert error["param"] == param
    if TOO_LONG in str(body):
        assert error["code"] == "context_length_exceeded"
        assert f"context length is {CONTEXT} tokens" in error["message"]
    assert tokenizer.read == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_conversation_that_cannot_fit_is_not_even_written(path: str) -> None:
    """Blanks around a text are no reason, which a template may drop, nor is what an assistant said:
    of that some templates drop what it thought."""
    app, tokenizer = watched()
    written: list[int] = []

    def write(conversation: list[dict[str, Any]], **_: Any) -> str:
        written.append(len(conversation))
        return "short"

    tokenizer.apply_chat_template = write
    half = TOO_LONG[: limit() // 2 + 1]

    def status(*said: tuple[str, str]) -> int:
        messages = [{"role": role, "content": content} for role, content in said]
        return call(app, "POST", path, json={"messages": messages}).status_code

    written.clear()
    assert status(("user", TOO_LONG)) == 400
    assert status(("system", half), ("user", half)) == 400
    assert written == []
    assert status(("user", " " * len(TOO_LONG))) == 200
    assert status(("user", "a"), ("assistant", TOO_LONG), ("user", half)) == 200
    assert len(written) >= 2


@pytest.mark.parametrize("extra", [{}, {"chat_template_kwargs": {"a": ["x"] * 2000}}])
def test_what_a_template_is_given_counts_where_it_is_run(extra: dict[str, Any]) -> None:
    app, tokenizer = watched()
    threads: list[str] = []

    def write(*_: Any, **__: Any) -> str:
        threads.append(threading.current_thread().name)
        return "short"

    tokenizer.apply_chat_template = write
    body = {"messages": [{"role": "user", "content": "a"}], **extra}
    assert call(app, "POST", "/tokenize", json=body).status_code == 200
    assert threads[-1].startswith("tokenizer-short") == bool(extra)


def test_what_may_fit_is_read() -> None:
    app, tokenizer = watched()
    text = TOO_LONG[1:]
    assert_envelope(call(app, "POST", "/v1/completions", json={"prompt": text}), 400)
    assert call(app, "POST", "/tokenize", json={"prompt": text}).status_code == 200
    assert tokenizer.read == [len(text)] * 2


def truncated(path: str, text: str) -> dict[str, Any]:
    prompt: Any = {"messages": [USER | {"content": text}]} if "chat" in path else {"prompt": text}
    return {**prompt, "truncate_prompt_tokens": 9, "max_tokens": 1}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_to_be_truncated_is_read_though_it_cannot_fit(path: str) -> None:
    """Whoever asks for that sends long texts on purpose."""
    app, tokenizer = watched()
    response = call(app, "POST", path, json=truncated(path, TOO_LONG))
    assert response.json()["usage"]["prompt_tokens"] == 9
    assert max(tokenizer.read) >= limit() + 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_to_be_truncated_is_read_within_bounds(path: str) -> None:
    app, tokenizer = watched()
    body = truncated(path, "x" * ((1 << 20) + 1))
    error = assert_envelope(call(app, "POST", path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if "chat" in path else "prompt")
    assert "to be truncated at most 1048576 are read" in error["message"]
    assert tokenizer.read == []


def test_where_nobody_knows_how_few_tokens_a_text_makes_its_length_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.text.codec.text_bound", lambda _: None)
    app, tokenizer = watched()
    assert call(app, "POST", "/tokenize", json={"content": "x" * (1 << 20)}).status_code == 200
    assert tokenizer.read == [1 << 20]
    response = call(app, "POST", "/tokenize", json={"content": "x" * ((1 << 20) + 1)})
    error = assert_envelope(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert "may drop text, at most 1048576 are read" in error["message"]
    assert tokenizer.read == [1 << 20]


def test_of_a_prediction_only_what_can_come_true_is_read() -> None:
    app, tokenizer = watched()
    prediction = {"type": "content", "content": TOO_LONG * 5}
    response = call(app, "POST", "/v1/completions", json={"prompt": "a", "prediction": prediction})
    assert response.status_code == 200
    assert sorted(tokenizer.read) == [1, limit()]


# ------------------------------------------------------------------------------- neighbours


def asked_together(app: FastAPI, story: Callable[[Any], Any]) -> Any:
    """Runs `story` with a function that asks /tokenize for a text."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await story(lambda text: client.post("/tokenize", json={"content": text}))

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_short_texts_pass_long_ones_and_what_waits_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "long text " * 8000
    monkeypatch.setattr(lanes, "MOST_CHARACTERS", 2 * len(long))
    app, tokenizer = watched(max_model_len=100_000)
    tokenizer.gate.clear()

    async def story(ask: Callable[[str], Any]) -> None:
        waiting = [asyncio.create_task(ask(long)) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: bool(tokenizer.read))
        honest = await ask("An honest text. " * 1200)  # 19 kB
        assert honest.status_code == 200
        assert not any(task.done() for task in waiting)
        refused = await ask(long)
        assert assert_envelope(refused, 503)["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        tokenizer.gate.set()
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 200
        assert (await ask(long)).status_code == 200

    asked_together(app, story)
    counted = call(app, "GET", "/metrics").text
    assert f'rejected_total{{model_name="{MODEL}",reason="queue_full"}} 1.0' in counted


def in_turn(*characters: int) -> list[int]:
    """The order in which jobs of these lengths run that came while the thread was busy."""
    order: list[int] = []
    gate = threading.Event()

    async def run() -> None:
        lane = lanes._Lane("test", lambda: 0.0)  # all of them come at the same time
        first = asyncio.create_task(lane.run(1, lambda: gate.wait(30)))
        jobs = [
            asyncio.create_task(lane.run(n, functools.partial(order.append, n))) for n in characters
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *jobs)

    asyncio.run(run())
    return order


def test_in_one_lane_shorter_texts_go_first() -> None:
    assert in_turn(3_000_000, 100_000, 1_000_000) == [100_000, 1_000_000, 3_000_000]


def test_shorter_texts_come_between_those_of_a_batch() -> None:
    order: list[str] = []

    async def run() -> None:
        lane = lanes._Lane("test")
        gates = [threading.Event() for _ in range(3)]

        def part(i: int) -> int:
            assert gates[i].wait(30)
            order.append(f"part {i}")
            return i

        batch = asyncio.create_task(
            lane.run_all([(1_000_000, functools.partial(part, i)) for i in range(3)])
        )
        await asyncio.sleep(0)
        honest = asyncio.create_task(lane.run(1000, lambda: order.append("honest")))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3001000 characters"):
            await lane.run(lanes.MOST_CHARACTERS - 3_000_000, lambda: None)
        gates[0].set()
        await honest
        gates[1].set()
        gates[2].set()
        assert await batch == [0, 1, 2]
        await lane.run(lanes.MOST_CHARACTERS, lambda: order.append("whole"))

    asyncio.run(run())
    assert order == ["part 0", "honest", "part 1", "part 2", "whole"]


def test_a_batch_that_nobody_waits_for_any_more_leaves_nothing_behind() -> None:
    ran: list[int] = []

    async def run() -> None:
        lane, gate, begun = lanes._Lane("test"), threading.Event(), threading.Event()

        def part(i: int) -> None:
            begun.set()
            assert gate.wait(30)
            ran.append(i)

        half = lanes.MOST_CHARACTERS // 2
        batch = asyncio.create_task(
            lane.run_all([(half, functools.partial(part, i)) for i in range(2)])
        )
        await asyncio.to_thread(begun.wait, 30)
        batch.cancel()
        gate.set()
        while lane._characters:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert ran == [0]


def test_a_long_text_does_not_wait_for_ever() -> None:
    now = 0.0
    lane = lanes._Lane("test", lambda: now)
    order: list[int] = []

    async def run() -> None:
        nonlocal now
        gate = threading.Event()
        jobs = [asyncio.create_task(lane.run(1, lambda: gate.wait(30)))]
        await asyncio.sleep(0.05)
        # At a million characters a second the first would be done after 3 s, and so on.
        for came, characters in ((1.0, 2_000_000), (1.5, 500_000), (3.0, 100_000), (3.2, 100)):
            now = came
            work = functools.partial(order.append, characters)
            jobs.append(asyncio.create_task(lane.run(characters, work)))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*jobs)

    asyncio.run(run())
    assert order == [500_000, 2_000_000, 100_000, 100]


def test_what_nobody_waits_for_is_not_run_and_errors_arrive() -> None:
    gate = threading.Event()
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("no such text")

    async def run() -> None:
        lane = lanes._Lane("test")
        first = asyncio.create_task(lane.run(100, lambda: gate.wait(30)))
        await asyncio.sleep(0.05)
        left = asyncio.create_task(
            lane.run(lanes.MOST_CHARACTERS - 100, lambda: ran.append("left"))
        )
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="characters to read"):
            await lane.run(1, fail)
        left.cancel()
        await asyncio.sleep(0)
        failing = asyncio.create_task(lane.run(1, fail))
        gate.set()
        with pytest.raises(ValueError, match="no such text"):
            await failing
        await first
        await lane.run(lanes.MOST_CHARACTERS + 1, lambda: ran.append("alone"))

    asyncio.run(run())
    assert ran == ["alone"]
