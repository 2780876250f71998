"""`specserve chat` against a server on a real port: what is shown, stopped, raced and counted."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import time
import unicodedata
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.style import Style

from engine.errors import Overloaded
from engine.types import Request
from server.api.errors import shutting_down
from server.api.keys import read_keys
from server.terminal import loop, palette
from server.terminal.answer import Answer, Piece
from server.terminal.chat import Chat
from server.terminal.history import history_file, make_private
from server.terminal.link import Link, Trouble
from server.terminal.palette import Palette, has_light_background
from server.terminal.plain import answer_plainly
from server.terminal.race import Race
from server.terminal.safe import safe
from server.terminal.view import Guarded, Look, Scroll, coloured, finished, markdown
from server.terminal.wishes import Wishes, with_set
from tests.server.support import FakeEngine, ids, make_app, make_info, serving

#: What a terminal would obey, in some of its forms; and text that reads in another order.
HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\r\u202e &#8238;&#27;[2J z"

_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z])")


class Lines:
    """A reader of what a test has typed."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)

    async def read(self) -> str:
        line = self._lines.pop(0) if self._lines else EOFError
        if not isinstance(line, str):
            raise line
        return line


class Talk:
    """A chat, its screen, and what it says there."""

    def __init__(self, link: Link, *lines: str | type[BaseException], width: int = 140) -> None:
        self.screen = io.StringIO()
        console = Console(
            file=self.screen, width=width, height=40, force_terminal=True, color_system="truecolor"
        )
        self.chat = Chat(link, console, Lines(*lines), Look(Palette()), Wishes(max_tokens=60))

    @property
    def said(self) -> str:
        """Without styles and movements of the cursor."""
        return _SEQUENCE.sub("", self.screen.getvalue())


def talk(engine: FakeEngine, *lines: str | type[BaseException], **options: Any) -> Talk:
    """A whole conversation."""
    with serving(make_app(engine, **options)) as url:
        return asyncio.run(_talk(url, *lines))


async def _talk(url: str, *lines: str | type[BaseException]) -> Talk:
    async with Link(url) as link:
        await link.learn()
        made = Talk(link, *lines)
        await loop.talk(made.chat)
        return made


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


# -- a model controls no terminal ----------------------------------------------------------


def test_no_character_is_left_that_a_terminal_obeys() -> None:
    every = "".join(map(chr, range(0x3000)))
    left = {c for c in safe(every) if unicodedata.category(c) in ("Cc", "Zl", "Zp")}
    assert left == {"\n", "\t"}
    assert not set(safe(every)) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert safe("a\r\nb\tç 日本") == "a\nb\tç 日本"
    assert safe("\x1b[2J") == "␛[2J"


@pytest.mark.parametrize("mode", ["markdown", "colours", "code", "link"])
def test_nothing_that_a_model_says_reaches_the_terminal_as_an_order(mode: str) -> None:
    text = {"code": f"```\n{HOSTILE}\n```", "link": f"[{HOSTILE}](http://x.y/{HOSTILE})"}.get(
        mode, HOSTILE
    )
    shown = Guarded(coloured([Piece(text)], Palette(), refused=False))
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    console.print(shown if mode == "colours" else markdown(text))
    rest = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # styles are ours
    assert not any(unicodedata.category(c) == "Cc" for c in rest if c != "\n")
    assert "\u202e" not in rest
    assert "␛[31mred" in rest


# -- how answers look ----------------------------------------------------------------------

DOCUMENT = (
    "# Title\n\nA **bold** <b>word</b>.\n\n1. one\n2. two\n\n```py\nx = 1\n\ny = 2\n```\n\nEnd.\n"
)


def test_markdown_that_grows_ends_up_as_if_it_had_come_at_once() -> None:
    whole, growing = io.StringIO(), io.StringIO()
    Console(file=whole, width=60).print(markdown(DOCUMENT))
    pieces: list[Piece] = []
    scroll = Scroll(Console(file=growing, width=60), Look(Palette()), pieces)
    lengths = []
    for character in DOCUMENT:
        pieces.append(Piece(character))
        scroll.advance()
        lengths.append(len(growing.getvalue()))
    scroll.end()

    def lines(out: io.StringIO) -> list[str]:
        return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]

    assert lines(growing) == lines(whole)
    assert "<b>word</b>" in whole.getvalue()  # HTML is text
    assert len(set(lengths)) >= 4  # it scrolls away block by block


def test_an_unfinished_block_is_not_printed() -> None:
    assert finished("1. one\n2. two\n") == 0
    assert finished("para\n\n```\ncode\n\n") == len("para\n\n")
    assert finished("para\n\nnext") == 0  # a line that may become anything
    assert finished("") == 0


def test_colours_are_those_of_the_page() -> None:
    css = (files("server.ui") / "page.css").read_text("utf-8")
    light, dark = css.split("prefers-color-scheme: dark", 1)
    for page, ours in ((light, palette.LIGHT), (dark, palette.DARK)):
        assert tuple(re.findall(r"--d\d: (#\w+);", page)) == ours
    script = (files("server.ui") / "colours.js").read_text("utf-8")
    assert re.findall(r"(\w+): \"d(\d)\"", script) == [
        (name, str(place)) for place, name in enumerate(palette.KNOWN)
    ]
    assert Palette().of("grammar") == Style(color=palette.DARK_TEXT, bgcolor=palette.DARK[3])
    assert has_light_background({"COLORFGBG": "0;15"})
    assert not has_light_background({})


def test_each_drafter_has_its_style_and_none_without_colours() -> None:
    made = Palette()
    pieces = [Piece("a", "lookup"), Piece("b", "model", ("x\n",)), Piece("c")]
    text = coloured(pieces, made, refused=True)
    assert text.plain == "ax↵bc"
    assert next(str(span.style) for span in text.spans) == f"#e6edf3 on {palette.DARK[0]}"
    assert made.of("model").bgcolor != made.of("lookup").bgcolor
    assert "lookup" in made.legend().plain
    plain = Palette(colourless=True)
    assert plain.of("lookup").bgcolor is None
    assert plain.of("lookup").underline


# -- a conversation ------------------------------------------------------------------------


def test_a_conversation_goes_on_and_is_counted() -> None:
    engine = FakeEngine("one two", blocks=(4, 1))
    engine.speedups = {0: 1.5}
    seen = talk(engine, "hello", "again", "/stats", "/system be brief", "third")
    assert len(engine.requests) == 3
    assert [m["role"] for m in seen.chat.messages] == ["user", "assistant"] * 3
    assert seen.chat.messages[1]["content"] == "one two"
    prompts = [r.prompt for r in engine.requests]
    assert len(prompts[1]) > len(prompts[0])  # the answer is a part of it
    said = seen.said
    tokens = len(ids("one two")) + 1
    assert f"{tokens} tokens · " in said
    assert "tokens a pass · speed-up 1.50×" in said
    assert re.search(rf"^tokens +{tokens} +{2 * tokens} *$", said, re.MULTILINE)
    assert re.search(r"^speed-up +1\.50× +1\.50× *$", said, re.MULTILINE)


def test_what_is_not_known_is_unknown() -> None:
    seen = talk(FakeEngine("x", blocks=(4,)), "hello", "/stats")
    assert "speed-up unknown" in seen.said
    assert re.search(r"^speed-up +unknown +unknown", seen.said, re.MULTILINE)
    assert re.search(r"^tokens/s +unknown +unknown", seen.said, re.MULTILINE)


def test_commands_change_what_is_asked() -> None:
    engine = FakeEngine("x")
    seen = talk(
        engine, "/set temperature 0.5", "/set seed 7", "/set speculation off", "/set drafter -",
        "a", "/clear", "//b", "/set temprature 1", "/set seed x", "/hlep", "/help", "/exit", "no",
    )  # fmt: skip
    first, second = engine.requests
    assert (first.sampling.temperature, first.sampling.seed) == (0.5, 7)
    assert first.speculation.enabled is False
    assert len(second.prompt) == len(first.prompt) + 1  # "/b" begins a new conversation
    assert "There is no 'temprature' to set" in seen.said
    assert "seed cannot be 'x'; it takes a whole number" in seen.said
    assert "did you mean /help?" in seen.said
    assert "/race [QUESTION]" in seen.said
    with pytest.raises(ValueError, match="on or off"):
        with_set(Wishes(), "speculation", "perhaps")


def test_colours_and_refused_guesses_on_demand() -> None:
    seen = talk(FakeEngine("one two three", blocks=(4, 1)), "a", "/colours", "/refused", "/colours")
    screen = seen.screen.getvalue()
    drafted = "38;2;230;237;243;48;2;20;83;45m"
    assert screen.index("colours on") < screen.index(drafted)
    assert "lookup  guessed it" in seen.said
    assert screen.index("refused guesses shown") < screen.index("\x1b[2;9m")
    assert not seen.chat.look.colours
    assert not seen.chat.look.refused


def test_a_server_that_does_not_trace_answers_all_the_same() -> None:
    engine = FakeEngine("one two")
    seen = talk(engine, "a", "/colours", allow_trace=False)
    assert len(engine.requests) == 1
    assert seen.chat.answers[0].tokens == len(ids("one two")) + 1
    assert "does not tell who guessed a token" in seen.said


# -- stopping ------------------------------------------------------------------------------


def _endless(_: Request, __: int) -> list[int]:
    return ids("on and on ") * 200


def test_ctrl_c_stops_the_answer_and_frees_its_request() -> None:
    engine = FakeEngine(_endless, delay=0.02, info=make_info(max_model_len=9000))

    async def stop(url: str) -> None:
        async with Link(url) as link:
            await link.learn()
            made = Talk(link, "go", KeyboardInterrupt, "more?")
            made.chat.wishes = Wishes(max_tokens=2000)
            task = asyncio.create_task(loop.talk(made.chat))
            for times in (1, 2):
                await until(lambda n=times: len(engine.requests) == n)
                shown = len(made.said)
                await until(lambda n=shown: "on and" in made.said[n:])
                os.kill(os.getpid(), signal.SIGINT)
                await until(lambda: not engine.running)
            await task
            assert len(engine.aborts) == 2
            assert made.said.count("· stopped") == 2
            assert made.chat.messages[1]["content"].startswith("on and")
            assert "/exit or ctrl-d leaves." in made.said

    with serving(make_app(engine)) as url:
        asyncio.run(stop(url))


# -- what goes wrong -----------------------------------------------------------------------


def test_troubles_are_sentences_and_the_chat_goes_on() -> None:
    engine = FakeEngine("x", info=make_info(max_model_len=100))
    engine.refuse = Overloaded("The queue is full.", retry_after=7)

    class Mended(Lines):
        async def read(self) -> str:
            line = await super().read()
            engine.refuse = None if line == "b" else engine.refuse
            return line

    async def run(url: str) -> Talk:
        async with Link(url) as link:
            await link.learn()
            made = Talk(link)
            made.chat.reader = Mended("a", "b", "c" * 300)
            await loop.talk(made.chat)
            return made

    with serving(make_app(engine)) as url:
        seen = asyncio.run(run(url))
    assert "The queue is full. Ask again in 7 s." in seen.said
    assert "/clear begins a new conversation." in seen.said
    assert [m["content"] for m in seen.chat.messages] == ["b", "x"]


def test_a_missing_key_and_a_missing_server() -> None:
    async def learn(url: str, key: str = "") -> str:
        async with Link(url, key) as link:
            try:
                await link.learn()
            except Trouble as trouble:
                return str(trouble)
            return link.model

    with serving(make_app(FakeEngine(), keys=read_keys(["k" * 20]))) as url:
        assert "--api-key-env VAR" in asyncio.run(learn(url))
        assert asyncio.run(learn(url, "k" * 20)) == "tests/fake-model"
    assert "Does it run?" in asyncio.run(learn(url))


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("data: {}\n\n", "ended the answer in its middle"),
        ("data: no\n\n", "no chunk of an answer"),
        ('data: {"error": {"message": "it broke \\u001b[2J"}}\n\n', "it broke ␛[2J"),
        (f"data: {__import__('json').dumps(shutting_down().envelope())}\n\n", "shutting down"),
    ],
)
def test_a_stream_that_breaks_off(payload: str, words: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=payload)

    async def ask() -> None:
        async with Link("http://test", transport=httpx.MockTransport(handler)) as link:
            async for _ in link.ask({"messages": []}, Answer(0.0)):
                pass

    with pytest.raises(Trouble, match=re.escape(words)):
        asyncio.run(ask())


# -- race ----------------------------------------------------------------------------------


def race(url: str, width: int = 100) -> tuple[Race, str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=40, force_terminal=True)

    async def run() -> Race:
        async with Link(url) as link:
            await link.learn()
            body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
            made = Race(link, body | {"max_tokens": 40}, {}, Palette())
            await made.run(console)
            return made

    return asyncio.run(run()), " ".join(_SEQUENCE.sub("", out.getvalue()).split())


@pytest.mark.parametrize("width", [100, 50])
def test_a_race_is_run_at_the_same_time_and_ends_with_the_same_text(width: int) -> None:
    both = asyncio.Event()

    class Together(FakeEngine):
        """Says nothing before both requests are there."""

        async def _run(self, request: Request) -> Any:
            if len(self.requests) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 60)
            async for event in super()._run(request):
                yield event

    engine = Together("one two three four five six seven eight nine", blocks=(4, 1))
    with serving(make_app(engine)) as url:
        made, said = race(url, width)
    assert {r.speculation.enabled for r in engine.requests} == {True, False}
    assert made.same
    assert made.factor is not None
    assert f"{made.factor:.2f} times as fast" in said
    assert "The same text, letter by letter" in said
    assert "speculation off" in said


def test_a_race_without_a_result_says_so() -> None:
    def differs(request: Request, _: int) -> list[int]:
        return ids("yes yes" if request.speculation.enabled else "no no")

    with serving(make_app(FakeEngine(differs))) as url:
        made, said = race(url)
    assert made.factor is None
    assert "The texts differ, so there is no factor." in said
    with serving(make_app(FakeEngine("short"))) as url:
        made, said = race(url)
    assert made.factor is None
    assert "Factor unknown: fewer than 16 tokens" in said
    engine = FakeEngine("x")
    engine.refuse = Overloaded("The queue is full.")
    with serving(make_app(engine)) as url:
        made, said = race(url)
    assert made.factor is None
    assert "No result, since speculation on failed: The queue is full." in said


# -- pipes ---------------------------------------------------------------------------------


def plainly(url: str, questions: list[str]) -> str:
    out = io.StringIO()

    async def run() -> None:
        async with Link(url) as link:
            await link.learn()
            await answer_plainly(link, Wishes(max_tokens=100), "be good", questions, out)

    asyncio.run(run())
    return out.getvalue()


def test_a_pipe_gets_text_without_control_characters() -> None:
    engine = FakeEngine("a\x1b[31mred\x07\nb")
    with serving(make_app(engine)) as url:
        assert plainly(url, ["one\n", "\n", "two\n"]) == "a␛[31mred␇\nb\n" * 2
    assert len(engine.requests) == 2


# -- history -------------------------------------------------------------------------------


def test_history_is_private(tmp_path: Path) -> None:
    file = history_file({"XDG_STATE_HOME": str(tmp_path / "state")})
    make_private(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    make_private(file)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.fixture(autouse=True)
def _no_signal_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
