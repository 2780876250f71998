"""What do others feel of a long prompt? Measured on a running server.

Starts one, and asks it in rounds: a stream by itself, the long prompt beside it and, a second
later, a request of one token; then the stream by itself again, and the prompt by itself. Told are
times, and ratios of times that were measured next to each other::

    python tools/long_prompt.py --tokens 6500 --rounds 3
    python tools/long_prompt.py --tokens 6500 --streams 4 -- --decode-stretch 4

What follows ``--`` are flags of ``specserve serve``. Speculation is off for these requests, so
that a token of a stream is a step, unless ``--speculation`` leaves it on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx

from tools.soak import PATIENCE, serving

#: Seconds after the long prompt at which the short request comes.
_LATER = 1.0

#: Longest that a stream runs.
_STREAM_TOKENS = 8000


@dataclass
class Seen:
    """What was measured: seconds, one entry a round or a gap.

    Attributes:
        plain: between tokens of a stream by itself.
        beside: the same while the long prompt is read.
        alone: until the first token of the long prompt by itself.
        shared: the same beside streams.
        short: until the first token of the short request.
        steps: tokens that a stream got meanwhile.
    """

    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def table(self, tokens: int) -> str:
        """What there is to know, in Markdown."""
        plain, usual = statistics.median(self.plain), _at(self.plain, 95)
        p50, p95 = _at(self.beside, 50), _at(self.beside, 95)
        alone, shared = statistics.median(self.alone), statistics.median(self.shared)
        return "\n".join(
            (
                "| what | measured | ratio |",
                "|---|---|---|",
                f"| between a stream's tokens, by itself, median | {1e3 * plain:.0f} ms | 1 |",
                f"| ... p95 | {1e3 * usual:.0f} ms | {usual / plain:.2f} |",
                f"| ... beside the prompt, median | {1e3 * p50:.0f} ms | {p50 / plain:.2f} |",
                f"| ... p95 | {1e3 * p95:.0f} ms | {p95 / plain:.2f} |",
                f"| first token of a short request beside it | {max(self.short):.2f} s at most | "
                f"{max(self.steps)} steps at most |",
                f"| the prompt's {tokens} tokens by themselves | {alone:.1f} s, "
                f"{tokens / alone:.0f} a second | 1 |",
                f"| ... beside streams | {shared:.1f} s | {shared / alone:.2f} |",
            )
        )


class Asker:
    """Asks one server.

    Args:
        client: with the server's address.
        tokens: of the long prompt.
        speculation: whether these requests may draft.
    """

    def __init__(self, client: httpx.AsyncClient, tokens: int, *, speculation: bool) -> None:
        self.seen = Seen()
        self._client, self._tokens, self._speculation = client, tokens, speculation
        self._dice = random.Random(0)
        self._times: list[float] = []  # of the first stream's tokens

    async def round(self, streams: int, plain_tokens: int) -> None:
        """Everything once."""
        seen = self.seen
        going = [asyncio.create_task(self._stream(first=i == 0)) for i in range(streams)]
        self._times.clear()
        while len(self._times) < plain_tokens:
            await self._look(going)
        seen.plain += _gaps(self._times[2:])
        begun = len(self._times)
        long = asyncio.create_task(self._first_token(self._tokens))
        await asyncio.sleep(_LATER)
        before = len(self._times)
        short = asyncio.create_task(self._first_token(1))
        while not short.done() and not long.done():
            await self._look(going)
        seen.steps.append(len(self._times) - before)
        seen.short.append(await short)
        while not long.done():
            await self._look(going)
        seen.beside += _gaps(self._times[begun:])
        seen.shared.append(await long)
        begun = len(self._times)
        while len(self._times) < begun + plain_tokens:  # the machine may be another by now
            await self._look(going)
        seen.plain += _gaps(self._times[begun + 2 :])
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        seen.alone.append(await self._first_token(self._tokens))

    async def _look(self, going: list[asyncio.Task[None]]) -> None:
        await asyncio.sleep(0.005)
        for task in going:
            if task.done():
                task.result()
                raise SystemExit("A stream ended before the long prompt was read: fewer --tokens.")

    async def _stream(self, *, first: bool) -> None:
        async for _ in self._tokens_of(self._prompt(20), _STREAM_TOKENS):
            if first:
                self._times.append(perf_counter())

    async def _first_token(self, tokens: int) -> float:
        started = perf_counter()
        async for _ in self._tokens_of(self._prompt(tokens), 1):
            return perf_counter() - started
        raise SystemExit("An answer had no token.")

    def _prompt(self, tokens: int) -> list[int]:
        return [self._dice.randrange(200, 900) for _ in range(tokens)]

    async def _tokens_of(self, prompt: list[int], most: int) -> AsyncIterator[None]:
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": most}
        body["ignore_eos"] = True
        body |= {"stream": True, "return_token_ids": True}
        body |= {"speculation": {"enabled": self._speculation}}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    yield


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _at(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


async def ask(url: str, given: argparse.Namespace) -> Seen:
    """All rounds, and a short one before them that is not counted."""
    async with httpx.AsyncClient(base_url=url, timeout=10 * PATIENCE, trust_env=False) as client:
        await Asker(client, 64, speculation=given.speculation).round(1, 4)
        asker = Asker(client, given.tokens, speculation=given.speculation)
        for _ in range(given.rounds):
            await asker.round(given.streams, given.plain)
    return asker.seen


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6500, help="of the long prompt")
    parser.add_argument("--streams", type=int, default=1, help="that run beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", type=int, default=60, help="tokens of a stream by itself")
    parser.add_argument("--speculation", action="store_true", help="leave it on")
    parser.add_argument("--url", help="of a server that runs already, without /v1")
    parser.add_argument("flags", nargs="*", help="of specserve serve, after --")
    given = parser.parse_args()
    if given.url:
        print(asyncio.run(ask(given.url, given)).table(given.tokens))
        return 0
    with serving(given.flags) as server:
        print(asyncio.run(ask(server.url, given)).table(given.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
