"""The page in a real browser, where there is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import Server

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")

KEY = "a-key-of-twenty-four-chars"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong, and that may ask nobody but its server."""
    page, trouble = browser.new_page(), []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda line: line.type == "error" and trouble.append(line.text))
    page.on(
        "request",
        lambda r: "//127.0.0.1:" in r.url or r.url[:5] == "data:" or trouble.append(r.url),
    )
    yield page
    page.close()
    # What the browser itself logs of a refusal is no fault of the page's.
    assert [line for line in trouble if "Failed to load resource" not in line] == []


#: What the page's requests also ask for: of a model with random weights, which might end a text
#: at once, and say nothing twice.
LOOPS = {"ignore_eos": True, "allowed_token_ids": [68, 69, 70]}
LONG = {"ignore_eos": True, "max_tokens": 3000}


def open_at(page: Any, server: Server, more: dict[str, Any]) -> None:
    def add(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **more}))

    page.set_default_timeout(60_000)
    page.route("**/v1/chat/completions", add)
    page.goto(server.url + "/")


def race(page: Any, tokens: int) -> str:
    page.click("#tab-race")
    page.fill("#max-tokens", str(tokens))
    page.click("#race-start")
    page.wait_for_selector("#race-start:enabled")
    return str(page.inner_text("#race-result"))


def test_chat_and_race(tiny: Server, page: Any) -> None:
    open_at(page, tiny, LOOPS)
    page.fill("#max-tokens", "60")
    page.fill("#message", "x x x x")
    page.press("#message", "Enter")
    page.wait_for_selector("#send:enabled")
    answer = page.locator(".turn div").nth(1)
    asked = {
        "messages": [{"role": "user", "content": "x x x x"}],
        "max_tokens": 60,
        **LOOPS,
        "temperature": 0,
    }
    [choice] = tiny.post(asked, "/v1/chat/completions").json()["choices"]
    marked = answer.locator("span").count()
    said = answer.evaluate(
        "e => [...e.childNodes].filter(n => n.nodeName != 'S').map(n => n.textContent).join('')"
    )
    assert said == choice["message"]["content"]
    assert marked > 0, "drafts are made at every step, and some of them are right"
    assert "the same text, letter by letter" in race(page, 40)
    page.click("#tab-state")
    page.wait_for_selector("#choices td")
    assert "draft tokens kept" in page.inner_text("#state-numbers")
    assert page.locator("#plots svg").count() >= 2


def test_stop_frees_everything(serve_tiny: Serve, page: Any) -> None:
    with serve_tiny(*ALWAYS, paced=True) as server, server.slow():
        open_at(page, server, LONG)
        page.fill("#message", "x")
        page.click("#send")
        page.wait_for_selector("#chat-numbers:not(:empty)")
        page.click("#stop")
        page.wait_for_selector("#send:enabled")
        assert server.wait_until_idle()["vllm:kv_cache_usage_perc"] == 0
    assert page.locator(".error").count() == 0


def test_a_key_is_asked_for(serve_tiny: Serve, page: Any) -> None:
    with serve_tiny(*ALWAYS, "--api-keys", KEY) as server:
        open_at(page, server, LOOPS)
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector("#model:not(:empty)")
        assert "the same text" in race(page, 20)
        server.signal()
        server.wait()
        page.click("#race-start")
        page.wait_for_selector("#race-start:enabled")
        assert page.inner_text("#race-result") == "The server cannot be reached."
