"""What a page costs that is open while a server works.

    python -m benchmarks.page --url http://127.0.0.1:8000 [--streams 4] [--rounds 8] [--chromium]

Drives a running server with the load test's prompts, in rounds: once as it is, and once as with a
page open. Then every request of the load asks for its trace, as the page's do, and the state view
polls as it does in a browser; with --chromium a real one is open at the state view, which takes
its own share of the machine. Printed is the ratio of tokens per second, with a 95 % interval over
rounds; the answers must be the same. The server should have no other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from urllib.parse import urlencode

import httpx
from rich.console import Console

import server.ui
from loadtest import workloads
from loadtest.asking import Asking
from loadtest.client import Client
from loadtest.compare import check_equal, ratios
from loadtest.plan import Arm, Level, Target, lay_out, make_lanes
from loadtest.progress import LiveProgress
from loadtest.runner import BlockResult, Runner
from loadtest.workloads import WorkloadSize

PLAIN = Arm("no page")
OPEN = Arm("page open", {"speculation": {"trace": True}})


def polled() -> list[str]:
    """What the state view asks for."""
    text = (Path(server.ui.__file__).parent / "state.js").read_text("utf-8")
    found = re.search(r"METRICS = (\[[^]]*\])", text)
    assert found is not None
    names = urlencode([("name[]", name) for name in json.loads(found[1])])
    return ["/v1/speculation/status", f"/metrics?{names}"]


#: How often.
POLL_SECONDS = 2.0


@asynccontextmanager
async def polling(url: str) -> AsyncIterator[None]:
    """Asks as the state view does, as long as the context is open."""

    paths = polled()

    async def poll() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            while True:
                answers = await asyncio.gather(*(client.get(url + path) for path in paths))
                for answer in answers:
                    answer.raise_for_status()
                await asyncio.sleep(POLL_SECONDS)

    task = asyncio.create_task(poll())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def chromium(url: str) -> AsyncIterator[None]:
    """The state view in a real browser, as long as the context is open."""
    from playwright.async_api import async_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(url + "/")
        await page.click("#tab-state")
        await page.wait_for_selector("#choices td")
        try:
            yield
        finally:
            await browser.close()


async def measure(arguments: argparse.Namespace) -> list[BlockResult]:
    """Runs the rounds; the blocks of the two lanes alternate."""
    page = chromium if arguments.chromium else polling
    asking = Asking(
        max_tokens=(arguments.tokens, arguments.tokens), ignore_eos=True, isolate_cache=True
    )
    prompts = workloads.load("builtin", WorkloadSize())
    async with Client(timeout=300) as client:
        first = {"max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        target = await client.prepare(Target("server", arguments.url), asking.path, first)
        lanes = make_lanes([target], [PLAIN, OPEN])
        level = Level("concurrency", arguments.streams)
        requests = arguments.rounds * arguments.requests
        blocks = lay_out(level, lanes, arguments.rounds, requests)
        results: list[BlockResult] = []
        with LiveProgress(Console(stderr=True), len(blocks)) as progress:
            runner = Runner(client, asking, prompts, progress)
            for lane in lanes:
                await runner.warm_up(lane, arguments.streams, arguments.streams)
            for block in blocks:
                async with page(target.url) if block.lane.arm is OPEN else nullcontext():
                    results += await runner.run([block])
    return results


def report(results: list[BlockResult], level: Level) -> int:
    """Prints the ratio. Returns the exit status: 3 if an answer is not the same."""
    lanes = sorted({result.block.lane.name: result.block.lane for result in results}.items())
    (_, plain), (_, opened) = lanes  # "no page" comes before "page open"
    equal = check_equal(results, [plain, opened])
    for found in ratios(results, level, plain, opened, seed=0):
        interval = "unknown" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"
        print(
            f"{found.statistic}: {found.baseline_value:.4g} without a page, {found.value:.4g} with "
            f"one open; ratio {found.ratio:.3f}, 95 % interval {interval}, {found.rounds} rounds"
        )
    print(f"{equal.compared} pairs of answers compared, {len(equal.mismatches)} differ")
    return 3 if equal.mismatches or not equal.compared else 0


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=4, help="requests in flight")
    parser.add_argument("--requests", type=int, default=8, help="requests of a block")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chromium", action="store_true", help="open a real browser")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    return report(results, Level("concurrency", arguments.streams))


if __name__ == "__main__":
    raise SystemExit(main())
