"""Records the page at work, in a real browser, with a real server and model: for README and docs.

    python -m tools.record_page [--url http://127.0.0.1:8000] [--output docs] [--tokens 160]

Writes `page.png`, a chat whose tokens are coloured by source; `state.png`, the state view; and
`page.webp`, a chat and a race as they happened: pictures taken as fast as the browser gives them,
each shown for as long as it took until the next. Without --url a server of the default model is
started for it. Needs playwright, and a chromium on the PATH; the machine should be idle, since a
race is only as quick as the cores that browser and server share.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

WIDTH, HEIGHT = 860, 700
MOST_BYTES = 1_000_000
SECONDS_BETWEEN = 0.1  # of two pictures, at first
MOST_PICTURES = 120  # of a scene; in a longer one every other is left out, and so on
LAST_SECONDS = 3.0  # for which the end of a scene stays
QUALITIES = (70, 55, 40, 25)

CHAT = "Write a short poem about a river, then repeat the poem word by word."
RACE = (
    "Write a Python function that adds two numbers, then one that subtracts them, then one that "
    "multiplies them."
)
WARM_UP = "Write a list of ten animals, then the same list once more."

_URL = re.compile(r"^  URL +(http://\S+)/v1$", re.MULTILINE)


@contextlib.contextmanager
def server(url: str | None, log: Path) -> Iterator[str]:
    """The address of a server: the one that is given, or one of the default model."""
    if url is not None:
        yield url
        return
    with log.open("w") as output:
        command = [sys.executable, "-m", "server.cli", "serve", "--port", "0"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while (found := _URL.search(log.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


class Film:
    """Pictures of a page, and how long each is shown."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._milliseconds: list[int] = []

    def follow(self, ready: str) -> None:
        """Takes pictures until an element is there, and one of the end."""
        taken: list[tuple[float, Image.Image]] = []
        between = SECONDS_BETWEEN
        while self._page.query_selector(ready) is None:
            taken.append((time.monotonic(), self._picture()))
            if len(taken) == MOST_PICTURES:
                taken, between = taken[::2], 2 * between
            left = taken[-1][0] + between - time.monotonic()
            self._page.wait_for_timeout(1000 * max(left, 0.0))
        taken.append((time.monotonic(), self._picture()))
        times = [instant for instant, _ in taken]
        self._milliseconds += [round(1000 * (b - a)) for a, b in itertools.pairwise(times)]
        self._milliseconds.append(round(1000 * LAST_SECONDS))
        self._frames += [picture for _, picture in taken]

    def _picture(self) -> Image.Image:
        return Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")

    def write(self, file: Path) -> None:
        """Writes an animated WebP, as good as it can be within the limit of its size."""
        first, *others = self._frames
        for quality in QUALITIES:
            first.save(
                file, save_all=True, append_images=others, duration=self._milliseconds, loop=0,
                quality=quality, method=4, minimize_size=True,
            )  # fmt: skip
            if file.stat().st_size <= MOST_BYTES:
                break
        seconds = sum(self._milliseconds) / 1000
        print(f"{file}: {len(self._frames)} pictures, {seconds:.1f} s, {file.stat().st_size} bytes")


def record(page: Any, url: str, output: Path, tokens: int) -> None:
    """Plays the scenes, with answers of at most so many tokens."""
    page.goto(url + "/")
    page.wait_for_selector("#model:not(:empty)")
    for _ in range(2):  # until there is something to compare with, and the speed-up is known
        _say(page, WARM_UP, tokens)
        page.wait_for_selector("#send:enabled")
    page.click("#clear")
    film = Film(page)
    _say(page, CHAT, tokens)
    page.evaluate("() => scrollTo(0, 0)")
    film.follow("#send:enabled")
    page.check("#refused")
    _picture(page, output / "page.png")
    page.uncheck("#refused")
    page.click("#tab-race")
    page.fill("#race-prompt", RACE)
    page.click("#race-start")
    film.follow("#race-start:enabled")
    film.write(output / "page.webp")
    page.click("#tab-state")
    page.wait_for_selector("#recent td")
    page.wait_for_timeout(5000)  # a few points of what is going on
    _picture(page, output / "state.png", full_page=True)


def _picture(page: Any, file: Path, *, full_page: bool = False) -> None:
    page.evaluate("() => scrollTo(0, 0)")
    picture = Image.open(io.BytesIO(page.screenshot(full_page=full_page))).convert("RGB")
    picture.quantize(64).save(file, optimize=True)


def _say(page: Any, text: str, tokens: int) -> None:
    page.fill("#max-tokens", str(tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")


def main() -> None:
    """Starts what is needed, and records."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", help="of a running server without keys; else one is started")
    parser.add_argument("--output", type=Path, default=Path("docs"))
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    arguments = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    log = Path(arguments.output) / "record_page.log"
    with server(arguments.url, log) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(600_000)
        record(page, url, arguments.output, arguments.tokens)
        browser.close()
    log.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
