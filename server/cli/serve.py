"""`specserve serve`: one process from the socket to the last answer.

Signals are handled here and not by uvicorn, which would wait for open streams before it lets
the application end them. The first SIGTERM or SIGINT drains the engine, which ends every
stream, and then lets uvicorn go; the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import uvicorn

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable
from engine.stats import StepStats
from server.api.app import create_app
from server.api.connection import ConnectionLimits, connection_class
from server.api.context import ServerContext
from server.api.middleware import MAX_HEADER_BYTES
from server.cli.console import Console
from server.cli.listen import BACKLOG, allow_files, bind
from server.cli.load_log import LoadLog
from server.cli.settings import Settings
from server.cli.values import is_loopback
from server.metrics.registry import Metrics
from server.text.tokenizer import load_tokenizer, read_template
from server.version import version

EXIT_DEAD = 1
EXIT_CONFIGURATION = 2

_POLL_SECONDS = 0.1
#: Longer than the idle time after which proxies and clients drop a connection themselves, so
#: that they never send a request into one that is being closed here.
_KEEP_ALIVE_SECONDS = 75
#: After the drain every stream has ended; this is for clients that do not take what is left.
_FLUSH_SECONDS = 5
#: If even the event loop stands still for so many times `stuck_after_seconds`, a thread of the
#: interpreter's own ends the process.
_DEAD_MAN_FACTOR = 2

logger = logging.getLogger("specserve.server")


def serve(settings: Settings, directory: Path, model_name: str, console: Console) -> int:
    """Serves until a signal comes or the engine dies.

    Args:
        directory: the model, as `sources.resolve` found it.
        model_name: what the API calls it.
        console: is told what happens until the server is ready.

    Returns:
        The process's exit code: 0 after a shutdown that was asked for, 1 if the engine died,
        2 if it could not start.

    Raises:
        ConfigurationError: the port is taken, the chat template cannot be read, or two settings
            do not fit together.
    """
    if settings.chat_template is not None:
        read_template(settings.chat_template)  # to fail before the model is loaded
    allow_files(settings.max_connections)
    with bind(settings.host, settings.port) as listener:
        service = _Service(settings, settings.engine_config(str(directory)), model_name, console)
        return asyncio.run(service.run(listener))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run of the server."""

    def __init__(
        self, settings: Settings, config: EngineConfig, model_name: str, console: Console
    ) -> None:
        self._settings = settings
        self._console = console
        self._load_log = LoadLog()
        self._metrics = metrics = Metrics(model_name)
        self._engine = AsyncEngine(
            config,
            on_step=self._on_step,
            on_audit=metrics.on_audit,
            on_progress=console.say,
        )
        app = create_app(
            self._engine,
            lambda info: load_tokenizer(info.model_path, settings.chat_template),
            model_name,
            options=settings.server_options(),
            metrics=metrics,
            on_failure=self._failed,
        )
        self._context: ServerContext = app.state.context
        limits = ConnectionLimits(
            connections=settings.max_connections,
            request_seconds=settings.header_seconds,
            unread_seconds=settings.send_timeout_seconds,
            metrics=metrics,
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        self._exit_code = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def run(self, listener: socket.socket) -> int:
        """Serves on `listener`; returns the exit code."""
        self._port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        duties = (self._watch(), self._beat(), self._tell_load())
        self._tasks += [asyncio.create_task(duty) for duty in duties]
        try:
            await self._server.serve(sockets=[listener])
        finally:
            faulthandler.cancel_dump_traceback_later()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._exit_code

    def _on_step(self, stats: StepStats) -> None:
        self._metrics.on_step(stats)
        self._load_log.on_step(stats)

    async def _tell_load(self) -> None:
        """Logs a line every few seconds, if anything was done in them."""
        while self._settings.log_load_seconds:
            await asyncio.sleep(self._settings.log_load_seconds)
            self._load_log.tell()

    def _failed(self, error: BaseException) -> None:
        """The engine could not start; the application has logged why."""
        if not isinstance(error, EngineError):
            logger.error("this should not happen", exc_info=error)
        self._exit_code = EXIT_CONFIGURATION
        self._server.should_exit = True

    async def _watch(self) -> None:
        """Says when the server is ready, and ends the process when the engine died or hangs."""
        while (status := self._context.status()) == "loading":
            await asyncio.sleep(_POLL_SECONDS)
        if status == "ready":
            # What has been loaded stays: the collector need not walk through it again and again,
            # with every stream waiting.
            gc.collect()
            gc.freeze()
            self._console.say(banner(self._context, self._url(), self._settings))
        while (status := self._context.status()) not in ("dead", "stuck"):
            await asyncio.sleep(_POLL_SECONDS)
        if status == "stuck":
            await self._abandon()
        logger.error("the engine has died; the server ends, so that it can be started anew")
        self._exit_code = EXIT_DEAD
        self._server.should_exit = True

    async def _abandon(self) -> None:
        """Ends a process whose engine hangs: nothing can stop that thread, but its clients can
        be told."""
        logger.error(
            "a step has been running for %.0f s (stuck_after_seconds is %g); the server ends, so "
            "that it can be started anew",
            self._engine.step_age,
            self._settings.stuck_after_seconds,
        )
        faulthandler.dump_traceback()
        self._context.interrupt(EngineUnavailable("The engine hangs; the server restarts."))
        deadline = asyncio.get_running_loop().time() + _FLUSH_SECONDS
        while self._context.load and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)  # the last bytes leave
        leave_at_once(EXIT_DEAD)

    async def _beat(self) -> None:
        """Tells the interpreter's watchdog that the event loop still runs."""
        while True:
            faulthandler.dump_traceback_later(
                _DEAD_MAN_FACTOR * self._settings.stuck_after_seconds, exit=True
            )
            await asyncio.sleep(min(1.0, self._settings.stuck_after_seconds / 2))

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping:
            logger.warning("second signal: ending at once")
            leave_at_once(128 + number)
        self._stopping = True
        if self._context.status() == "loading":
            logger.info("%s while loading: ending", number.name)
            leave_at_once(0)
        self._tasks.append(asyncio.create_task(self._drain(number)))

    async def _drain(self, number: signal.Signals) -> None:
        seconds = self._settings.drain_seconds
        logger.info(
            "%s: no new requests; %d running ones get up to %g s (a second signal ends at once)",
            number.name,
            self._context.load,
            seconds,
        )
        await self._engine.stop(seconds)
        self._server.should_exit = True

    def _url(self) -> str:
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"


def banner(context: ServerContext, url: str, settings: Settings) -> str:
    """What a person wants to know once the server is ready."""
    info = context.engine.info
    lines = {
        "model": f"{context.model_name} ({info.dtype} on {info.device}, "
        f"{info.runner} runner, {info.max_model_len} tokens of context)",
        "weights": str(info.weights),
        "KV cache": f"{info.num_pages} pages of {info.page_size} = "
        f"{info.num_pages * info.page_size} tokens in {info.kv_dtype}",
        "drafter": f"{', '.join(info.drafters)}, up to {info.max_draft} tokens a step"
        if info.drafters and info.max_draft
        else "none",
        "checked": info.checked,
        "numerics": info.numerics,
        "access": _who_may_call(settings.host, len(context.options.keys)),
        "URL": f"{url}/v1",
    }
    return "\n".join(
        [f"specserve {version()} is ready", *(f"  {k:<10}{v}" for k, v in lines.items())]
    )


def _who_may_call(host: str, keys: int) -> str:
    here = is_loopback(host)
    if not keys:
        return "this machine only; no API key needed" if here else "anybody; no API key needed"
    which = "the API key" if keys == 1 else f"one of {keys} API keys"
    return f"this machine only, with {which}" if here else f"anybody with {which}"


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for the engine's thread, which may be deep in a kernel
    where nothing can interrupt it; a normal exit would tear its libraries down under it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
