"""The page in a real browser, where there is one."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import PATIENCE, Server

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")

KEY = "a-key-of-twenty-four-chars"
GONE = "The server cannot be reached."

#: What the page's requests also ask for: of a model with random weights, which might end a text
#: at once, and say nothing twice.
LOOPS = {"ignore_eos": True, "allowed_token_ids": [68, 69, 70]}
LONG = {"ignore_eos": True, "max_tokens": 3000}

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages on which nothing may go wrong, and that may ask nobody but their server."""
    trouble: list[str] = []
    with ExitStack() as stack:

        def open_page(
            server: Server, more: dict[str, Any] = LOOPS, path: str = "/", **context: Any
        ) -> Any:
            def add(route: Any) -> None:
                route.continue_(post_data=json.dumps({**route.request.post_data_json, **more}))

            own = browser.new_context(**context)
            stack.callback(own.close)
            page = own.new_page()
            page.on("pageerror", lambda error: trouble.append(str(error)))
            page.on("console", lambda line: line.type == "error" and trouble.append(line.text))
            allowed = (server.url + path, "data:")
            page.on("request", lambda r: r.url.startswith(allowed) or trouble.append(r.url))
            page.set_default_timeout(1000 * PATIENCE)
            page.route("**/v1/chat/completions", add)
            page.goto(server.url + path)
            return page

        yield open_page
    # What the browser itself logs of a refusal is no fault of the page's.
    assert [line for line in trouble if "Failed to load resource" not in line] == []


def send(page: Any, text: str, tokens: int = 60) -> None:
    page.fill("#max-tokens", str(tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")


def ask(page: Any, text: str, tokens: int = 60) -> str:
    """Sends a message, and returns all that the answer shows, without refused guesses."""
    send(page, text, tokens)
    page.wait_for_selector("#send:enabled")
    return said(page, ".turn:last-child .text")


def said(page: Any, place: str) -> str:
    whole: str = page.locator(place).evaluate(
        "e => { const c = e.cloneNode(true); c.querySelectorAll('s').forEach(s => s.remove());"
        " return c.textContent; }"
    )
    return whole


def race(page: Any, tokens: int) -> str:
    page.click("#tab-race")
    page.fill("#max-tokens", str(tokens))
    page.click("#race-start")
    page.wait_for_selector("#race-start:enabled")
    return str(page.inner_text("#race-result"))


def last_error(page: Any) -> str:
    page.wait_for_selector("#send:enabled")
    return str(page.inner_text(".turn:last-child .error"))


# -- what it shows -------------------------------------------------------------------------


def test_chat_race_and_state(tiny: Server, open_page: Open) -> None:
    page = open_page(tiny)
    text = ask(page, "x x x x")
    asked = {"messages": [{"role": "user", "content": "x x x x"}], "max_tokens": 60, **LOOPS}
    whole = tiny.post({**asked, "temperature": 0}, "/v1/chat/completions").json()
    assert text == whole["choices"][0]["message"]["content"]
    numbers = page.inner_text("#chat-numbers")
    spent = whole["speculation"]
    assert f"{spent['tokens_per_pass']:.2f} tokens a pass" in numbers
    assert f"{spent['accepted']} of {spent['drafted']} guesses kept" in numbers
    assert "speed-up" in numbers
    assert page.locator(".turn .d0").count() > 0, "some of the guesses are right"
    assert "Cut off after 60 tokens" in page.inner_text(".turn .note")

    # A reload keeps the conversation; another tab has its own.
    page.reload()
    assert said(page, ".turn:last-child .text") == text
    assert open_page(tiny).locator(".turn").count() == 0
    page.click("#clear")
    page.reload()
    assert page.locator(".turn").count() == 0

    assert "the same text, letter by letter" in race(page, 40)
    assert said(page, "#race-on") == said(page, "#race-off") != ""
    check_state(page, tiny)


def short(value: float) -> str:
    """Three digits, as plots write them."""
    return f"{float(f'{value:.3g}'):g}"


def check_state(page: Any, server: Server) -> None:
    """The state view says what the API says."""
    page.click("#tab-state")
    page.wait_for_selector("#recent td")
    status = page.evaluate("() => fetch('v1/speculation/status').then(r => r.json())")
    metrics = server.wait_until_idle()
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert f"{accepted:.0f} of {drafted:.0f} draft tokens kept" in page.inner_text("#state-numbers")
    rows = page.locator("#choices tr").all_inner_texts()[1:]
    assert len(rows) == sum(len(entries) for entries in status["choices"].values())
    for row, choice in zip(rows, status["choices"]["lookup"], strict=False):
        cells = row.split("\t")
        assert [cells[1], float(cells[2])] == [str(choice["batch"]), choice["draft_tokens"]]
    newest = page.locator("#recent tr").nth(1).inner_text().split("\t")
    assert newest[1] == "chat/completions, stream"
    assert newest[4] == str(status["recent"][0]["generated_tokens"]) == "40"
    spoken = page.locator("#state svg").evaluate_all("all => all.map(e => e.ariaLabel)")
    shown = {caption.split(".")[0]: caption for caption in spoken}
    for name in ("Draft tokens of each sequence", "K/V pages in use", "Sequences"):
        assert name in shown
    by_depth = status["acceptance"]["lookup"]["by_depth"]
    depths = next(words for caption, words in shown.items() if "by place in the draft" in caption)
    assert f"1: {short(by_depth[0])}" in depths
    passes = next(words for caption, words in shown.items() if caption.startswith("A pass of"))
    assert f"1: {short(status['cost_model']['pass_ms_by_tokens']['1'])}" in passes


def test_a_text_is_shown_to_the_letter_whatever_its_tokens_are(
    tiny: Server, open_page: Open
) -> None:
    page = open_page(tiny)
    text = (
        "# A *title* with `code`\n\n**Bold** and *slanted*, 2*3*4, ** not.\n"
        "```python\ndef f(x):\n    return x  # **no**\n\n```\nafter\n| a | b |\n|---|---|\n"
        "👍🏽 مرحبا بالعالم " + "long" * 2000 + "\n~~~\nnever closed\n"
    )
    draw = random.Random(7)
    for _ in range(4):
        cuts = sorted({0, len(text), *draw.sample(range(len(text)), 60)})
        tokens = [
            {"text": text[a:b], "drafter": draw.choice([None, "lookup", "model"]), "refused": ["?"]}
            for a, b in itertools.pairwise(cuts)
        ]
        shown, copied, marked = page.evaluate(
            """async (tokens) => {
                const { Text } = await import("./ui/text.js");
                const place = document.createElement("div");
                place.className = "text";
                document.getElementById("log").replaceChildren(place);
                const text = new Text(place);
                for (const [at, token] of tokens.entries()) {
                    text.add(token);
                    if (at % 3 === 0) text.write();
                }
                text.write();
                const copied = place.innerText;
                place.querySelectorAll("s").forEach((s) => s.remove());
                const all = (kind) => [...place.querySelectorAll(kind)];
                const of = (kind) => all(kind).map((e) => e.textContent).join("");
                return [place.textContent, copied, [of(".d0"), of(".d1")]];
            }""",
            tokens,
        )
        assert shown == text
        assert copied.rstrip("\n") == text.rstrip("\n")
        own = [[t["text"] for t in tokens if t["drafter"] == by] for by in ("lookup", "model")]
        # An end of line that closes a block of code belongs to nobody.
        assert [part.replace("\n", "") for part in marked] == [
            "".join(parts).replace("\n", "") for parts in own
        ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_use_it(tiny: Server, open_page: Open, theme: str) -> None:
    page = open_page(tiny, color_scheme=theme)
    ask(page, "x x x x", 20)
    page.check("#refused")
    page.click("summary")
    race(page, 20)
    for width in (1200, 360):
        page.set_viewport_size({"width": width, "height": 800})
        for view in ("chat", "race", "state"):
            page.click(f"#tab-{view}")
            if view == "state":
                page.wait_for_selector("#recent td")
            found = axe.Axe().run(page)
            assert found.violations_count == 0, (width, view, found.generate_report())
            wide = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, (width, view)


def test_a_keyboard_will_do(tiny: Server, open_page: Open) -> None:
    page = open_page(tiny)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "tab-race"
    assert page.is_visible("#race-prompt")
    page.keyboard.press("ArrowLeft")
    page.focus("#message")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#message") == "a\nb"
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:enabled")
    assert said(page, ".turn:first-child .text") == "a\nb"


# -- what goes wrong -----------------------------------------------------------------------


def test_a_key_is_asked_for_and_stop_frees_everything(serve_tiny: Serve, open_page: Open) -> None:
    flags = (*ALWAYS, "--api-keys", KEY, "--no-allow-trace", "--root-path", "/a/b")
    with serve_tiny(*flags, paced=True) as server:
        page = open_page(server, LONG, path="/a/b/")
        for key in ("a-key-that-nobody-has", KEY):
            page.wait_for_selector("#key", state="visible")
            page.fill("#key", key)
            page.press("#key", "Enter")
        page.wait_for_selector("#model:not(:empty)")
        page.wait_for_selector("#key", state="hidden")
        assert "the same text" in race(page, 20)  # although nobody tells whose guesses they were
        assert "does not tell" in page.inner_text("#legend")
        page.click("#tab-chat")
        mine = server.called_with(KEY)
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            with server.slow():
                send(page, "x")
                page.wait_for_selector("#chat-numbers:not(:empty)")
                stop()
                page.wait_for_selector("#send:enabled")
                assert mine.wait_until_idle()["vllm:kv_cache_usage_perc"] == 0
        assert page.locator("#log .note").last.inner_text() == "Stopped."
        assert page.locator("#log .error").count() == 0


def test_an_overloaded_a_draining_and_a_dead_server_are_told_of(
    serve_tiny: Serve, open_page: Open
) -> None:
    limits = ("--max-sequences", "2", "--max-waiting-sequences", "0")
    with serve_tiny(*ALWAYS, *limits, paced=True) as server:
        page, other = open_page(server, LONG), open_page(server, LONG)
        with server.slow():
            body = {"prompt": "x", "temperature": 0, **LONG}
            with server.open_stream({**body, "n": 2}) as running:
                next(running)
                send(page, "x")
                assert "try again later" in last_error(page)
            assert page.input_value("#message") == "x"  # to be sent again
            server.wait_until_idle()
            send(other, "x")
            other.wait_for_selector("#chat-numbers:not(:empty)")
            server.signal()
            send(page, "x")
            assert "shutting down" in last_error(page)
            server.process.kill()
            server.wait()
            assert "broke off" in last_error(other)
            send(other, "x")
            assert last_error(other) == GONE
        other.wait_for_function(
            "text => document.getElementById('health').textContent === text", arg=GONE
        )
        assert race(page, 20) == GONE
