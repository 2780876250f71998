"""Does a server stay whole, however it is used for however long?

Starts one, and sends it at random what clients send: whole answers and streams, several choices,
stop strings, predictions, long prompts and known ones; clients that leave, stall, or hang up within
their request; and requests that are wrong. Meanwhile it asks the same question again and again,
whose answer must not change. In the end nothing may be left: no sequence, no page, no thread, no
open file, and no more memory than after the first quarter::

    python tools/soak.py --seconds 600 --rate 5
    python tools/soak.py --seconds 600 --rate 2 -- --model MODEL --drafter lookup

What follows ``--`` are flags of ``specserve serve``. Exits with 1 and says why if anything was
not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 120.0

#: How much more memory than in the third quarter may be in use in the last: allocators need room.
SLACK_BYTES, SLACK_SHARE = 16e6, 0.015

#: Bodies that are refused, whatever the model.
BAD: list[bytes] = [
    b"", b"[]", b"{", b"null", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"prompt": []}',
    b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "\\ud800"}', b"[" * 5000,
    b'{"prompt": [-1]}', b'{"prompt": [99999999]}', b'{"prompt": "x", "n": 1000000000}',
    b'{"prompt": "x", "max_tokens": 1e308}', b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "stop": ""}', b'{"prompt": "x", "logit_bias": {"-1": 5}}',
    b'{"prompt": "x", "stop_token_ids": [-5], "min_tokens": 1}',
    b'{"prompt": "x", "max_tokens": 100000000}', b'{"prompt": "x", "tools": [{}]}',
    b'{"prompt": "x", "logprobs": 1000}', b'{"prompt": "x", "speculation": {"max_draft": -1}}',
]  # fmt: skip


@dataclass
class Findings:
    """What came of a soak.

    Attributes:
        counts: what clients did, and how it ended.
        samples: seconds, resident bytes, threads and open files of the server, as it went on.
        problems: everything that was not as it should be.
    """

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{'second':>8}{'MB':>8}{'threads':>9}{'files':>7}"]
        step = max(1, len(self.samples) // 20)
        for second, resident, threads, files in self.samples[::step]:
            lines.append(f"{second:8.0f}{resident / 1e6:8.1f}{threads:9}{files:7}")
        lines += [f"{count:8} {what}" for what, count in sorted(self.counts.items())]
        return "\n".join(lines + [f"PROBLEM: {problem}" for problem in self.problems])


class Soak:
    """Random clients of one server.

    Args:
        url: of the server, without ``/v1``.
        process: its id here, for memory, threads and files.
        rate: arrivals a second, on average.
        seed: of everything random.
    """

    def __init__(self, url: str, process: int, *, rate: float, seed: int = 0) -> None:
        self.findings = Findings()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=PATIENCE, trust_env=False, limits=limits
        )
        self._url, self._process, self._rate = url, process, rate
        self._dice = random.Random(seed)
        self._clients: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> Findings:
        """Clients come for so long; then the server has to come to rest."""
        async with self._client:
            await self._warm_up()
            self._wanted = await self._ask_the_same()
            watching = asyncio.create_task(self._watch(seconds))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                await asyncio.sleep(self._dice.expovariate(self._rate))
                client = asyncio.create_task(self._guarded(self._dice.choice(self._KINDS)))
                self._clients.add(client)
                client.add_done_callback(self._clients.discard)
            await asyncio.gather(*self._clients, watching)
            await self._come_to_rest()
        return self.findings

    # -- what clients do -----------------------------------------------------------------

    async def _guarded(self, kind: Callable[[Soak], Awaitable[None]]) -> None:
        name = kind.__name__.strip("_")
        try:
            await kind(self)
        except Exception as error:
            self.findings.problems.append(f"{name}: {type(error).__name__}: {error}"[:300])
        self.findings.counts[name] += 1

    def _body(self) -> dict[str, Any]:
        dice = self._dice
        words = " ".join(dice.choice(("the", "fox", "said", "a", "12", "é🦊")) for _ in range(30))
        body: dict[str, Any] = {
            "prompt": dice.choice(("Once upon a time", words, words * 3, ["one", "two"])),
            "max_tokens": dice.choice((1, 5, 20, 60, 150)),
            "temperature": dice.choice((0, 0.7, 1.0)),
        }
        for extra in (
            {"seed": dice.randrange(100)}, {"n": 3}, {"stop": ["the", "\n\n"]}, {"logprobs": 2},
            {"repetition_penalty": 1.2}, {"ignore_eos": True}, {"speculation": {"enabled": False}},
            {"speculation": {"max_draft": 2}}, {"cache_salt": f"{dice.randrange(5)}"},
            {"prediction": {"type": "content", "content": words}}, {"echo": True},
        ):  # fmt: skip
            if dice.random() < 0.15:
                body |= extra
        return body

    async def _post(self, path: str, body: dict[str, Any], *expected: int) -> Any:
        answer = await self._client.post(path, json=body)
        if answer.status_code not in (*(expected or (200,)), 503):
            raise RuntimeError(f"{path} said {answer.status_code}: {answer.text[:150]}")
        self.findings.counts[f"status {answer.status_code}"] += 1
        return answer.json()

    async def _whole(self) -> None:
        await self._post(COMPLETIONS, self._body())

    async def _chat(self) -> None:
        body = self._body()
        for name in ("prompt", "echo", "logprobs"):
            body.pop(name, None)
        messages = [{"role": "user", "content": "Say something."}]
        await self._post(CHAT, {**body, "messages": messages}, 200, 400)  # base models have none

    async def _tokens(self) -> None:
        tokens = (await self._post("/tokenize", {"prompt": "a fox 🦊"}))["tokens"]
        await self._post("/detokenize", {"tokens": tokens})

    async def _wrong(self) -> None:
        body, headers = self._dice.choice(BAD), {"content-type": "application/json"}
        answer = await self._client.post(COMPLETIONS, content=body, headers=headers)
        error = answer.json()["error"]
        if answer.status_code != 400 or not error["message"]:
            raise RuntimeError(f"{body[:60]!r} got {answer.status_code}")

    async def _stream(self) -> None:
        await self._read_stream(None)

    async def _leave(self) -> None:
        await self._read_stream(self._dice.randrange(4))

    async def _read_stream(self, most: int | None) -> None:
        """Reads a stream to its end, or leaves after so many chunks."""
        body = {**self._body(), "stream": True}
        async with self._client.stream("POST", COMPLETIONS, json=body) as answer:
            last, count = "", 0
            async for line in answer.aiter_lines():
                last, count = line or last, count + line.startswith("data: ")
                if most is not None and count >= most:
                    return
            if answer.status_code == 200 and last != "data: [DONE]":
                raise RuntimeError(f"the stream ended with {last[:80]}")

    async def _impatient(self) -> None:
        body = {**self._body(), "max_tokens": 400, "ignore_eos": True}
        with contextlib.suppress(httpx.TimeoutException):
            await self._client.post(COMPLETIONS, json=body, timeout=self._dice.random() / 2)

    async def _hang_up(self) -> None:
        """Within the request, or without reading a word of the answer."""
        payload = json.dumps({**self._body(), "stream": True}).encode()
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sent = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
        writer.write(sent[: self._dice.choice((5, len(sent) - 5, len(sent)))])
        await writer.drain()
        await asyncio.sleep(self._dice.random())
        writer.close()

    async def _same(self) -> None:
        answer = await self._ask_the_same()
        if answer not in (None, self._wanted):
            raise RuntimeError(f"the same question got another answer: {str(answer)[:120]}")

    _KINDS = (
        _whole, _whole, _stream, _stream, _chat, _tokens, _wrong, _wrong, _leave, _leave,
        _impatient, _hang_up, _same,
    )  # fmt: skip

    async def _ask_the_same(self) -> Any:
        body = {"prompt": "In the beginning", "max_tokens": 16, "seed": 5, "temperature": 0.8}
        return (await self._post(COMPLETIONS, body)).get("choices")

    # -- what is left of them ------------------------------------------------------------

    async def _warm_up(self) -> None:
        """One of each kind: what a server makes once, such as a pool of threads, is no leak."""
        for kind in dict.fromkeys(self._KINDS[:-1]):
            await asyncio.gather(*(self._guarded(kind) for _ in range(4)))

    def _sample(self, second: float) -> tuple[float, int, int, int]:
        proc = Path(f"/proc/{self._process}")
        status = (proc / "status").read_text()
        resident, threads = (
            int(found[1])
            for name in ("VmRSS", "Threads")
            if (found := re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE))
        )
        return second, resident * 1024, threads, len(os.listdir(proc / "fd"))

    async def _watch(self, seconds: float) -> None:
        started = time.monotonic()
        while (second := time.monotonic() - started) < seconds:
            self.findings.samples.append(self._sample(second))
            await asyncio.sleep(max(0.25, seconds / 400))

    async def _metrics(self) -> dict[str, float]:
        text = (await self._client.get("/metrics")).text
        found = re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def _come_to_rest(self) -> None:
        problems = self.findings.problems
        deadline = time.monotonic() + PATIENCE
        while True:
            metrics = await self._metrics()
            busy = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        pages = metrics["vllm:kv_cache_usage_perc"]
        if busy or pages:
            problems.append(f"{busy:.0f} sequences and {pages:.1%} of the pages are left")
        if await self._ask_the_same() != self._wanted:
            problems.append("in the end, the same question got another answer")
        await asyncio.sleep(0.5)  # connections close
        self._judge(self._sample(self.findings.samples[-1][0]))

    def _judge(self, last: tuple[float, int, int, int]) -> None:
        samples, problems = self.findings.samples, self.findings.problems
        quarter = max(1, len(samples) // 4)
        # Pages of the KV cache take memory when they are first written: that is over by half time.
        early, late = samples[2 * quarter : 3 * quarter] or samples, samples[-quarter:]
        before, after = (statistics.median(s[1] for s in part) for part in (early, late))
        if after - before > max(SLACK_BYTES, SLACK_SHARE * before):
            problems.append(f"memory grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB")
        if last[2] > max(sample[2] for sample in early):
            problems.append(f"{last[2]} threads are left")
        if last[3] > min(sample[3] for sample in samples) + 1:  # the connection that asked last
            problems.append(f"{last[3]} files are left open")
        samples.append(last)


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: without ``/v1``.
        log: all that it has written so far.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Callable[[], str]


@contextlib.contextmanager
def serving(flags: list[str]) -> Iterator[Served]:
    """A server with these flags of ``specserve serve``, which is killed in the end.

    Raises:
        SystemExit: it does not start; with all that it wrote.
    """
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as file:

        def log() -> str:
            return _so_far(file.fileno())

        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while not (found := re.search(r"URL +(http://\S+)/v1", log())):
                if process.poll() is not None:
                    sys.exit(log())
                time.sleep(0.1)
            yield Served(found[1], process, log)
        finally:
            process.kill()
            process.wait()


def serve_and_soak(seconds: float, rate: float, seed: int, flags: list[str]) -> Findings:
    """Starts a server, soaks it, and stops it."""
    with serving(flags) as server:
        soak = Soak(server.url, server.process.pid, rate=rate, seed=seed)
        findings = asyncio.run(soak.run(seconds))
        server.process.send_signal(signal.SIGTERM)
        if (code := server.process.wait(PATIENCE)) != 0:
            findings.problems.append(f"the server ended with code {code}")
        if "Traceback" in server.log():
            findings.problems.append("there is a traceback in the log")
    return findings


def _so_far(descriptor: int) -> str:
    """All of a file that somebody else writes to the end of."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long clients come")
    parser.add_argument("--rate", type=float, default=5.0, help="how many a second")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("flags", nargs="*", help="of specserve serve, after --")
    given = parser.parse_args()
    findings = serve_and_soak(given.seconds, given.rate, given.seed, given.flags)
    print(findings)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
