"""The attacks. Each is bounded in what it sends and in how long it lasts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from time import perf_counter

import httpx

from tools import long_prompt
from tools.attacks.asking import (
    Client,
    Found,
    Stream,
    generation,
    late,
    middle,
    post,
    random_ids,
    told,
    words,
)
from tools.attacks.servers import Server

#: Tokens of a stream by itself, which tell its usual pace.
_PLAIN = 40

#: What is sent of a request's head by a connection that never ends it.
_HALF = b"GET /livez HTT"


async def texts(server: Server, *, prompts: int, characters: int) -> Found:
    """Prompts that are far too long, while others want short texts tokenised and answered."""
    honest, short = words(19_000), generation("Once upon a time", 1)
    tokenised: list[float] = []
    answered: list[float] = []

    async def ask() -> None:
        tokenised.append(await client.seconds("/tokenize", {"prompt": honest}))
        answered.append(await client.seconds("/v1/completions", short))

    async with Client(server) as client:
        for _ in range(4):
            await ask()
        before = server.resident()
        found = {
            "`/tokenize` of 19 kB alone": told(min(tokenised)),
            "a completion of one token alone": told(min(answered)),
        }
        for path, field in (("/v1/completions", "prompts"), ("/v1/chat/completions", "chats")):
            tokenised.clear()
            answered.clear()
            attack = functools.partial(post, server, path, _payload(path, words(characters)))
            statuses, took = await _beside(ask, prompts, attack)
            what = f"{prompts} {field} of {characters / 1e6:.1f}M characters"
            found[what] = f"{statuses}, the last after {told(took)}"
            found[f"`/tokenize` of 19 kB beside {field}, longest"] = told(max(tokenised))
            found[f"a completion of one token beside {field}, longest"] = told(max(answered))
        await asyncio.sleep(1.0)
    if before is not None and (after := server.resident()) is not None:
        found["memory that is left taken"] = f"{(after - before) / 1e6:.0f} MB"
    return found


def _payload(path: str, text: str) -> bytes:
    body = generation(text, 1)
    if "chat" in path:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": text}]
    return json.dumps(body).encode()


async def _beside(
    ask: Callable[[], Awaitable[None]], prompts: int, attack: Callable[[], int]
) -> tuple[str, float]:
    """Asks until all attacks were answered, once at least; returns how they were, and seconds
    until the last of them was."""
    begun = perf_counter()
    attacks = [asyncio.create_task(asyncio.to_thread(attack)) for _ in range(prompts)]
    await asyncio.sleep(0.3)
    while True:
        await ask()
        if all(task.done() for task in attacks):
            break
    took = perf_counter() - begun
    statuses = Counter([await task for task in attacks])
    return ", ".join(f"{n} × {status}" for status, n in sorted(statuses.items())), took


async def prompt(server: Server, *, tokens: int, rounds: int) -> Found:
    """A long prompt beside a stream, and a short request a second later."""
    given = argparse.Namespace(
        tokens=tokens, rounds=rounds, streams=1, plain=_PLAIN, speculation=False
    )
    seen = await long_prompt.ask(server.url, given)
    plain, alone, shared = map(middle, (seen.plain, seen.alone, seen.shared))
    return {
        "between a stream's tokens, alone: median": told(plain),
        f"beside {tokens} tokens: median": _ratio(middle(seen.beside), plain),
        f"beside {tokens} tokens: p95": _ratio(late(seen.beside), plain),
        f"beside {tokens} tokens: longest": _ratio(max(seen.beside), plain),
        "first token of a short request beside them": f"{told(max(seen.short))}, "
        f"{max(seen.steps)} tokens of the stream",
        f"the {tokens} tokens alone": f"{told(alone)}, {tokens / alone:.0f} a second",
        f"the {tokens} tokens beside the stream": told(shared),
    }


def _ratio(value: float, plain: float) -> str:
    return f"{told(value)}, {value / plain:.2f} times plain"


async def connections(server: Server, *, count: int, seconds: float) -> Found:
    """Requests whose heads never end, while an orchestrator probes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 200
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    writers: list[asyncio.StreamWriter] = []
    polls: dict[str, list[bool]] = {"/livez": [], "/health": []}
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*server.address)
                writer.write(_HALF)
                writers.append(writer)
        begun = perf_counter()
        while perf_counter() - begun < seconds:
            for path, seen in polls.items():
                seen.append(await _is_well(server, path))
            await asyncio.sleep(0.2)
        interval = (perf_counter() - begun) / len(polls["/livez"])
    finally:
        for writer in writers:
            writer.close()
    found = {"half-open connections": f"{len(writers)}, watched for {seconds:.0f} s"}
    for path, seen in polls.items():
        failed = seen.count(False)
        longest = max(map(len, "".join("-x"[not ok] for ok in seen).split("-")))
        outage = f", for {told(longest * interval)} in a row" if failed else ""
        found[f"`{path}` failed"] = f"{failed} of {len(seen)} probes{outage}"
    return found


async def _is_well(server: Server, path: str) -> bool:
    """As an orchestrator asks: a new connection, a short time limit."""
    try:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            return (await client.get(server.url + path)).status_code == 200
    except httpx.HTTPError:
        return False


async def logprobs(server: Server, *, lengths: list[int]) -> Found:
    """Log probabilities of whole prompts, beside a stream."""
    found: Found = {}
    async with Client(server) as client:
        stream = Stream(client)
        await stream.reach(_PLAIN)
        usual = middle(stream.gaps(2))
        found["between a stream's tokens, alone: median"] = told(usual)
        found["between a stream's tokens, alone: longest"] = told(late(stream.gaps(2), 100))
        for length in lengths:
            first = len(stream.times) - 1
            took = await client.seconds(
                "/v1/completions", generation(random_ids(length), 1, prompt_logprobs=1)
            )
            await stream.reach(len(stream.times) + 1)
            gaps = stream.gaps(first)
            found[f"beside log probabilities of {length}: p95"] = _ratio(late(gaps), usual)
            found[f"beside log probabilities of {length}: longest"] = _ratio(late(gaps, 100), usual)
            found[f"the log probabilities of {length}"] = told(took)
        await stream.close()
    return found


async def cores(server: Server, *, tokens: int) -> Found:
    """How long an answer takes on a machine that others use; twice, since a server may adapt."""
    async with Client(server) as client:
        body = generation(random_ids(4), tokens)
        first, then = [await client.seconds("/v1/completions", body) for _ in range(2)]
    return {f"{tokens} tokens": told(first), f"{tokens} tokens, asked again": told(then)}
