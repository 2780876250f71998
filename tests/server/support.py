"""A scripted engine, a small byte-level tokenizer, and ways to call the application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.errors import ContextLengthExceeded, EngineError, EngineUnavailable
from engine.types import (
    DraftTrace,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    SequenceStats,
    TokenLogprobs,
    Tokens,
    WeightsInfo,
)
from server.api.app import create_app
from server.api.options import ServerOptions
from server.metrics.registry import Metrics

# Five seconds, after which httpx gives up by itself, say more of a busy machine than of a server.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(dict.fromkeys(("connect", "read", "write"), 60.0))

MODEL = "tests/fake-model"
TEXT = "Once upon a time 🦊🚀 the fox said: héllo wörld, 日本語! END of story."
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: What an engine tells whose planner measures nothing.
UNMEASURED: dict[str, Any] = {
    "mode": "unmeasured",
    "drafters": ["lookup"],
    "steps": 0,
    "speedup": None,
    "off_reasons": {},
    "wasted_draft_tokens": 0,
    "choices": {},
    "acceptance": {},
    "guard": [],
    "exploration": None,
    "calibrated": False,
    "cost_model": None,
}


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that emoji and CJK are spread over several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the time upon a fox said story of the fox"] * 4, trainer)
    special = [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def ids(text: str) -> list[int]:
    """Token ids of a text."""
    encoded: list[int] = make_tokenizer().encode(text, add_special_tokens=False)
    return encoded


def make_info(**changes: Any) -> EngineInfo:
    """What the fake engine says it is."""
    tokenizer = make_tokenizer()
    values: dict[str, Any] = {
        "model_name": MODEL,
        "model_path": "nowhere",
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": len(tokenizer),
        "max_model_len": 512,
        "eos_token_ids": frozenset({tokenizer.eos_token_id}),
        "page_size": 16,
        "num_pages": 64,
        "runner": "reference",
        "drafters": ("lookup",),
        "max_draft": 4,
        "weights": WeightsInfo("Q4_1, Q8_0", 96 * 2**20, 5.7),
        "kv_dtype": "bfloat16",
        "kv_bytes_per_token": 23040,
    }
    return EngineInfo(**{**values, **changes})


def logprob_of(token: int, top: int) -> TokenLogprobs:
    """A log probability that is a function of the token alone."""
    size = len(make_tokenizer())
    others = tuple(((token + i) % size, -0.1 * (token % 7 + 1) - i) for i in range(top))
    return TokenLogprobs(token, -0.1 * (token % 7 + 1), 1, others)


class FakeEngine:
    """An engine that says what its script says.

    Args:
        script: tokens of a choice, before limits; a function of the request and the choice.
        blocks: how many tokens arrive together, repeated in turn.
        delay: seconds between blocks.
    """

    def __init__(
        self,
        script: str | Callable[[Request, int], list[int]] = TEXT,
        *,
        blocks: tuple[int, ...] = (1,),
        delay: float = 0.0,
        info: EngineInfo | None = None,
    ) -> None:
        self.info = info or make_info()
        self.state = "ready"
        self.step_age = 0.0
        self.blocks = blocks
        self.delay = delay
        self.fail_after: int | None = None
        self.failure: EngineError = EngineUnavailable("The engine has died.")
        self.refuse: Exception | None = None
        self.start_failure: Exception | None = None
        self.state_of_speculation: dict[str, Any] | Exception = UNMEASURED
        self.speedups: dict[int, float] = {}  # by choice; None = unknown
        self.drained: float | None = None
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborts: list[tuple[str, int | None, FinishReason]] = []
        self._script = script

    async def start(self) -> None:
        self.state = "loading"
        await asyncio.sleep(self.delay)
        if self.start_failure is not None:
            raise self.start_failure
        self.state = "ready"

    async def stop(self, drain_seconds: float = 0.0) -> None:
        self.drained = drain_seconds
        self.state = "stopped"

    def submit(self, request: Request) -> AsyncIterator[Event]:
        if self.refuse is not None:
            raise self.refuse
        if self.state != "ready":
            raise EngineUnavailable(f"The engine is {self.state}.")
        if len(request.prompt) + request.sampling.max_tokens > self.info.max_model_len:
            raise ContextLengthExceeded("The context is too small.", "prompt")
        self.requests.append(request)
        self.running.add(request.request_id)
        return self._run(request)

    def abort(
        self,
        request_id: str,
        choice: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        self.aborts.append((request_id, choice, reason))
        if choice is None:
            self.running.discard(request_id)

    def tokens_of(
        self, request: Request, choice: int
    ) -> tuple[list[int], FinishReason, int | None]:
        """The tokens of one choice, limits applied."""
        sampling = request.sampling
        source = self._script
        planned = (
            [*ids(source), make_tokenizer().eos_token_id]
            if isinstance(source, str)
            else (source(request, choice))
        )
        enders = sampling.stop_token_ids
        if not sampling.ignore_eos:
            enders = enders | self.info.eos_token_ids
        out: list[int] = []
        for token in planned[: sampling.max_tokens]:
            if token in enders and len(out) < sampling.min_tokens:
                continue
            out.append(token)
            if token in enders:
                return out, FinishReason.STOP, token
        return out, FinishReason.LENGTH, None

    async def speculation(self) -> dict[str, Any]:
        await asyncio.sleep(self.delay)
        if isinstance(self.state_of_speculation, Exception):
            raise self.state_of_speculation
        return self.state_of_speculation

    async def _run(self, request: Request) -> AsyncIterator[Event]:
        sampling, rid = request.sampling, request.request_id
        if sampling.prompt_logprobs is not None:
            rest = [logprob_of(token, sampling.prompt_logprobs) for token in request.prompt[1:]]
            yield PromptLogprobs(rid, (None, *rest))
        plans = {choice: self.tokens_of(request, choice) for choice in range(sampling.n)}
        position = dict.fromkeys(plans, 0)
        passes = 0
        try:
            while plans:
                await asyncio.sleep(self.delay)
                if rid not in self.running:
                    break
                if self.fail_after is not None and passes >= self.fail_after:
                    yield Failed(rid, self.failure)
                    return
                size = self.blocks[passes % len(self.blocks)]
                passes += 1
                for choice in list(plans):
                    # Like the real one, it hears of an abort only after one more block.
                    stopped = (rid, choice, FinishReason.STOP) in self.aborts
                    tokens, reason, ender = plans[choice]
                    start = position[choice]
                    block = tokens[start : start + size]
                    position[choice] += len(block)
                    if block:
                        logprobs = None
                        if sampling.logprobs is not None:
                            logprobs = tuple(logprob_of(t, sampling.logprobs) for t in block)
                        trace = trace_of(request, block, self.speedups.get(choice))
                        yield Tokens(rid, choice, tuple(block), logprobs, trace)
                    if stopped or position[choice] >= len(tokens):
                        reason = FinishReason.STOP if stopped else reason
                        stats = self._stats(request, choice, position[choice], passes)
                        yield Finished(rid, choice, reason, None if stopped else ender, stats)
                        del plans[choice]
        finally:
            self.running.discard(rid)

    def _stats(self, request: Request, choice: int, tokens: int, passes: int) -> SequenceStats:
        now = time.monotonic()
        return SequenceStats(
            prompt_tokens=len(request.prompt),
            cached_prompt_tokens=len(request.prompt) // 16 * 16,
            generated_tokens=tokens,
            draft_tokens=2 * passes,
            accepted_tokens=max(0, tokens - passes),
            target_passes=passes,
            preemptions=0,
            arrival=request.arrival,
            first_scheduled=request.arrival,
            first_token=now if tokens else None,
            finished=now,
            accepted_prediction_tokens=min(tokens, len(request.speculation.prediction)),
            rejected_prediction_tokens=0,
            speedup=self.speedups.get(choice),
            drafted_by=(("lookup", 2 * passes),) if passes else (),
        )


def trace_of(request: Request, block: Sequence[int], speedup: float | None) -> DraftTrace | None:
    """All of a block but its last token was drafted, and one guess more was refused."""
    if not request.speculation.trace:
        return None
    return DraftTrace("lookup", len(block), len(block) - 1, (block[0],), speedup)


def make_app(engine: FakeEngine, **options: Any) -> FastAPI:
    """The application around a fake engine."""
    return create_app(
        engine,
        make_tokenizer(),
        MODEL,
        options=ServerOptions(**options),
        metrics=Metrics(MODEL),
    )


def call(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """One request through the application, without a socket."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, timeout=30, **kwargs)

    return asyncio.run(run())


def complete(app: FastAPI, **body: Any) -> httpx.Response:
    """POST /v1/completions."""
    return call(app, "POST", "/v1/completions", json={"prompt": "Say it", **body})


def choice(app: FastAPI, **body: Any) -> dict[str, Any]:
    """The first choice of a completion that succeeds."""
    response = complete(app, **body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["choices"][0]
    return result


@contextlib.contextmanager
def serving(app: FastAPI, **config_changes: Any) -> Iterator[str]:
    """A real server on a free port; yields its base URL."""
    quiet = {"host": "127.0.0.1", "port": 0, "log_level": "critical", "ws": "none"}
    config = uvicorn.Config(app, **{**quiet, **config_changes})
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve()
        for _ in range(5):  # connections that were just closed are let go of one turn later
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()
        with warnings.catch_warnings():
            # What the loop had accepted but not yet looked at when it ended goes here, and not
            # with a warning in the middle of another test.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns as soon as `condition` holds; fails if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)
