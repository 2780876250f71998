"""Honest clients of a server, which time what they are given."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
from collections.abc import AsyncIterator
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx

from tools.attacks.servers import Server

#: Seconds after which a client gives up; then it has waited for so long at least.
PATIENCE = 150.0

#: Names of what was measured, and values as they are printed.
Found = dict[str, str]


def words(characters: int, seed: int = 0) -> str:
    """A text of so many characters, of 20,000 words."""
    dice = random.Random(seed)
    known = ["".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(20_000)]
    return " ".join(dice.choices(known, k=characters // 3))[:characters]


def random_ids(tokens: int, seed: int = 0) -> list[int]:
    """A prompt that no prefix is known of."""
    dice = random.Random(f"{seed} {tokens}")
    return [dice.randrange(200, 900) for _ in range(tokens)]


def generation(prompt: str | list[int], most: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion without speculation: a token of it is a step."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "temperature": 0}
    return body | {"ignore_eos": True, "speculation": {"enabled": False}} | more


def post(server: Server, path: str, payload: bytes) -> int:
    """Sends bytes as they are, in a connection of its own; for threads. Returns the status, 0 if
    there is no answer."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        connection.request("POST", path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


class Client:
    """Asks one server.

    Args:
        server: that is asked.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def seconds(self, path: str, body: dict[str, Any]) -> float:
        """Until the answer is there, or the client gives up.

        Raises:
            RuntimeError: it is no success.
        """
        begun = perf_counter()
        try:
            answer = await self._http.post(path, json=body)
        except httpx.ReadTimeout:
            return perf_counter() - begun
        if answer.status_code != 200:
            raise RuntimeError(f"{path} said {answer.status_code}: {answer.text[:200]}")
        return perf_counter() - begun

    async def times(self, body: dict[str, Any]) -> AsyncIterator[float]:
        """When each token of a stream came."""
        stream = body | {"stream": True}
        async with self._http.stream("POST", "/v1/completions", json=stream) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode(errors="replace")[:200])
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    yield perf_counter()


class Stream:
    """A stream that runs until it is closed, and the times of its tokens."""

    def __init__(self, client: Client, most: int = 8000) -> None:
        self.times: list[float] = []
        self._task = asyncio.create_task(self._read(client, most))

    async def _read(self, client: Client, most: int) -> None:
        # With text in every token: what stands for part of a character comes with the next one.
        body = generation(random_ids(20), most, return_token_ids=True)
        async for time in client.times(body):
            self.times.append(time)

    async def reach(self, tokens: int) -> None:
        """Waits until so many tokens have come."""
        while len(self.times) < tokens:
            if self._task.done():
                self._task.result()
                raise RuntimeError(f"a stream ended after {len(self.times)} tokens")
            await asyncio.sleep(0.005)

    def gaps(self, first: int, last: int | None = None) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.times[first:last])]

    async def close(self) -> None:
        """Hangs up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def told(seconds: float) -> str:
    """A time as it is printed."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def middle(values: list[float]) -> float:
    """The median; of nothing, infinity."""
    return statistics.median(values) if values else float("inf")


def late(values: list[float], percent: int = 95) -> float:
    """A percentile; of nothing, infinity."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 9e9
