"""Descriptions that would take minutes or gigabytes to compile: they are stopped, alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.errors import Overloaded
from server.text import probe as probing
from server.text.compile import compiled, native_tokenizer
from server.text.description import GrammarSource, Refused, definition
from server.text.grammar import GrammarCompiler
from server.text.probe import Limits, Probe, Tried, probe_for
from tests.server.support import FakeEngine, ids, make_app, make_tokenizer

END = frozenset({make_tokenizer().eos_token_id})
SERIALIZED = make_tokenizer().backend_tokenizer.to_str()

#: Each takes seconds to minutes, and some of them hundreds of megabytes.
HOSTILE: dict[str, tuple[str, Any]] = {
    "a modulus": ("json", '{"type": "integer", "multipleOf": 1000003}'),
    "optional parts": ("regex", "".join(f"(.*{chr(97 + i % 26)})?" for i in range(2000))),
    "a rule that doubles": (
        "grammar",
        "start: X40\nX0: /a|b*/\n" + "".join(f"X{i + 1}: X{i} X{i}\n" for i in range(40)),
    ),
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Probe]:
    """A probe that gives a description 0.3 s."""
    made = Probe(SERIALIZED, END, Limits(seconds=0.3, patience=60.0))
    yield made
    made.close()


def source(kind: Any, text: str) -> GrammarSource:
    return GrammarSource(kind, text, "guided")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_long_is_stopped(strict: Probe, name: str) -> None:
    """And the next one, which waits for the same process, is answered."""
    with pytest.raises(Refused):
        strict.compile(source(*HOSTILE[name]))
    found = strict.compile(source("regex", "a+b"))
    assert compiled(native_tokenizer(SERIALIZED, END), found.definition)


def test_time_is_what_stops_it(strict: Probe) -> None:
    with pytest.raises(Refused, match=r"takes more than 0.3 s of computing or 256 MiB"):
        strict.compile(source(*HOSTILE["a modulus"]))


def test_what_takes_too_much_memory_is_stopped(strict: Probe) -> None:
    """The same description is fine where there is room for it."""
    words = source("choice", str([f"number {i * 7919}" for i in range(1000)]).replace("'", '"'))
    assert strict.compile(words).bytes > 1 << 20
    narrow = Probe(SERIALIZED, END, Limits(seconds=60.0, bytes=1 << 20, patience=60.0))
    with pytest.raises(Refused, match="takes more than"):
        narrow.compile(words)
    narrow.close()


def test_a_slow_one_holds_up_no_other() -> None:
    """The second is answered while the first is still being tried: with 100 seconds, it would go
    on for longer than this test may take."""
    patient = Probe(SERIALIZED, END, Limits(seconds=100.0, patience=100.0))
    refused = threading.Event()

    def slow() -> None:
        try:
            patient.compile(source(*HOSTILE["a modulus"]))
        except Refused:
            refused.set()
        except Overloaded:  # the probe is closed while it asks
            pass

    asking = threading.Thread(target=slow, daemon=True)
    asking.start()
    assert patient.compile(source("regex", "a+b"))
    assert not refused.is_set()
    patient.close()
    asking.join(60)
    assert not asking.is_alive()


def test_a_helper_that_has_ended_is_replaced() -> None:
    first = probe_for(SERIALIZED, END)
    assert first.compile(source("regex", "a"))
    os.kill(first._process.pid, signal.SIGKILL)
    first._process.wait()
    with pytest.raises(Overloaded, match="ask again"):
        first.compile(source("regex", "ab"))
    second = probe_for(SERIALIZED, END)
    assert second is not first
    assert second.compile(source("regex", "ab"))


def test_a_stream_goes_on_beside_what_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do other grammars: while as many as are tried at once but one are hostile."""
    monkeypatch.setattr(probing, "probe_for", lambda *_: pytest.fail("imported by name"))
    made = Probe(SERIALIZED, END, Limits(seconds=0.3, patience=60.0))
    monkeypatch.setattr("server.text.grammar.probe_for", lambda *_: made)
    app = make_app(FakeEngine(lambda _r, _c: ids("x") * 300, delay=0.001))

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "x", "max_tokens": 300, **fields}
                return await client.post("/v1/completions", json=body, timeout=120)

            hostile = [
                ask(guided_regex=HOSTILE["optional parts"][1] + str(i)) for i in range(2)
            ] + [ask(guided_json=HOSTILE["a modulus"][1])]
            return await asyncio.gather(ask(stream=True), ask(guided_regex="a"), *hostile)

    stream, honest, *stopped = asyncio.run(run())
    made.close()
    assert stream.text.endswith("data: [DONE]\n\n")
    assert honest.status_code == 200
    for answer in stopped:
        assert answer.status_code == 400
        assert "cannot be compiled" in answer.json()["error"]["message"]


def test_what_is_kept_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three grammars are more than the memory for two: the first is compiled anew."""
    monkeypatch.setattr("server.text.grammar._STATES_BYTES", 100)
    monkeypatch.setattr("server.text.grammar._MOST_BYTES", 250)
    monkeypatch.setattr(Probe, "compile", lambda _, s: Tried(definition(s), 0))
    compiler = GrammarCompiler(make_tokenizer())

    async def ask(*texts: str) -> list[Any]:
        return [await compiler.compile(source("regex", text), END) for text in texts]

    first, second, _, *again = asyncio.run(ask("a", "b", "c", "c", "b", "a"))
    assert again[1] is second
    assert again[2] is not first


# -- while an answer runs ----------------------------------------------------------------------


class Clock:
    """Computing time of a thread that spends a second whenever it is looked at."""

    def __init__(self, step: float) -> None:
        self.now, self._step = 0.0, step

    def thread_time(self) -> float:
        """As `time.thread_time`."""
        self.now += self._step
        return self.now


@pytest.mark.parametrize(("step", "fails"), [(0.0001, False), (0.1, True)])
def test_a_matcher_that_takes_too_long_fails(
    monkeypatch: pytest.MonkeyPatch, step: float, fails: bool
) -> None:
    compiler = GrammarCompiler(make_tokenizer())
    grammar = asyncio.run(compiler.compile(source("regex", "a+"), END))
    matcher = grammar.start()
    monkeypatch.setattr("server.text.grammar.time", Clock(step))
    for _ in range(50):
        matcher.allowed()
        assert matcher.advance(ids("a")) == 1
    assert (matcher.failure is not None) == fails
    if fails:
        assert "takes too long to find out" in str(matcher.failure)


def test_a_forced_text_without_measure_fails_alone_and_soon() -> None:
    """It is written anew for every step, and bounded by nothing that the library knows."""
    compiler = GrammarCompiler(make_tokenizer())
    grammar = asyncio.run(compiler.compile(source("regex", "(ab){120000}"), END))
    matcher, began, steps = grammar.start(), time.thread_time(), 0
    while matcher.failure is None:
        matcher.advance(matcher.forced()[:1])
        matcher.allowed()
        steps += 1
    assert steps < 60
    assert time.thread_time() - began < 3.0
