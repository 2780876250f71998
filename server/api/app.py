"""The FastAPI application. It holds no globals: everything hangs on one `ServerContext`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from engine.types import EngineInfo
from server.api.access import Gatekeeper, describe_access
from server.api.answers import ErrorResponse
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.context import EngineClient, ServerContext
from server.api.errors import install_error_handlers
from server.api.middleware import RequestGuard
from server.api.ops import ops_router
from server.api.options import ServerOptions
from server.api.page import page_router
from server.api.responses import responses_router
from server.api.shapes import tell_vocabulary
from server.api.speculation import speculation_router
from server.metrics.registry import Metrics
from server.text.codec import TextCodec
from server.text.tokenizer import Tokenizer
from server.version import version

_POLL_SECONDS = 0.05

logger = logging.getLogger("specserve.server")


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer | Callable[[EngineInfo], Tokenizer],
    model_name: str,
    *,
    options: ServerOptions | None = None,
    metrics: Metrics | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """Makes the application.

    Its lifespan starts an engine that is new, in the background: the socket is open and
    /health answers 503 while the model loads. Who starts the engine also stops it: at
    shutdown the lifespan drains it. An engine that was started before is left alone.

    Args:
        engine: an `AsyncEngine`.
        tokenizer: the model's tokenizer, or a function that loads it once the engine is
            ready (called in a worker thread with the engine's `info`).
        model_name: the name under which the model is served.
        options: limits; None = defaults.
        metrics: where to count; its `on_step` should be the engine's. None = a fresh one.
        on_failure: called on the event loop if the engine or the tokenizer cannot start.
    """
    options = options or ServerOptions()
    metrics = metrics or Metrics(model_name)
    context = ServerContext(engine, model_name, options, metrics)
    load = None if isinstance(tokenizer, Tokenizer) else tokenizer
    if isinstance(tokenizer, Tokenizer):
        context.text = TextCodec(tokenizer, control=options.allow_control_tokens)

    app = _Application(
        context,
        title="specserve",
        version=version(),
        description="OpenAI-compatible inference with lossless speculative decoding.",
        lifespan=_lifespan(context, load, on_failure),
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    app.include_router(completions_router(context))
    app.include_router(chat_router(context))
    app.include_router(responses_router(context))
    app.include_router(speculation_router(context))
    app.include_router(ops_router(context))
    if options.ui:
        app.include_router(page_router())
    install_error_handlers(app, metrics.rejected)
    _add_layers(app, options, metrics)
    return app


class _Application(FastAPI):
    """FastAPI, whose OpenAPI document also says who may call, and which token ids there are.

    Args:
        context: its options have the keys, and what needs none.
    """

    def __init__(self, context: ServerContext, **how: Any) -> None:
        super().__init__(**how)
        self._context = context
        self._complete = False

    def openapi(self) -> dict[str, Any]:
        """The document; made once, and completed when the model is known."""
        fresh = self.openapi_schema is None
        document = super().openapi()
        if fresh:
            describe_access(document, self._context.options)
            if self._context.options.root_path:
                document["servers"] = [{"url": self._context.options.root_path}]
        if not self._complete and self._context.status() == "ready":
            tell_vocabulary(document, self._context.engine.info.vocab_size)
            self._complete = True
        return document


def _add_layers(app: FastAPI, options: ServerOptions, metrics: Metrics) -> None:
    """What surrounds the routes; the last one added is the outermost."""
    app.add_middleware(Gatekeeper, options=options, metrics=metrics)
    if options.cors_origins:  # outside the gate: a browser's preflight request carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-ignored-params"],
        )
    app.add_middleware(RequestGuard, options=options, metrics=metrics)


def _lifespan(
    context: ServerContext,
    load: Callable[[EngineInfo], Tokenizer] | None,
    on_failure: Callable[[BaseException], None] | None,
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    engine = context.engine

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        owned = engine.state == "new"
        task = asyncio.create_task(_start(context, load, on_failure, start_engine=owned))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if owned:
                await engine.stop(context.options.drain_seconds)

    return lifespan


async def _start(
    context: ServerContext,
    load: Callable[[EngineInfo], Tokenizer] | None,
    on_failure: Callable[[BaseException], None] | None,
    *,
    start_engine: bool,
) -> None:
    """Brings the engine and the tokenizer up, or records why they are not."""
    try:
        if start_engine:
            await context.engine.start()
        while context.engine.state in ("new", "loading"):
            await asyncio.sleep(_POLL_SECONDS)  # somebody else starts it
        if load is not None:
            tokenizer = await asyncio.to_thread(load, context.engine.info)
            context.text = TextCodec(tokenizer, control=context.options.allow_control_tokens)
    except Exception as error:
        context.failure = error
        logger.error("the engine could not start: %s", error)
        if on_failure is not None:
            on_failure(error)
