"""The engine's thread, its inbox, and the way back to the event loop.

::

    event loop                                   engine thread
    submit, abort --(SimpleQueue)-------------->  drained at the top of every step
    per-request queues <--(one hop per step)---   events and statistics

The engine never waits for a client. Back-pressure belongs at admission: `submit` refuses a
request that the queue has no room for before any work is done for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from engine.admission import Admission
from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.core import Engine, StepOutput
from engine.errors import EngineError, EngineUnavailable, InvalidRequest, RequestFailed
from engine.flight import Abort, Add, EventStream, Flight, Look, Message, Stop, settle
from engine.idle import IdleWork
from engine.stats import AuditStats, StepStats
from engine.types import EngineInfo, Failed, Finished, FinishReason, Request, Tokens

logger = logging.getLogger(__name__)

_STOPPED = "The server is shutting down; try another one."


class AsyncEngine:
    """Serves requests from an event loop while one thread of its own runs the engine.

    Args:
        config: its model path is a local directory.
        on_step: called on the event loop after every step that did something.
        on_audit: called on the event loop when an online audit has ended.
        on_progress: called from the engine's thread while it loads, with plain sentences.
        build: makes the engine; tests put another one in.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_step: Callable[[StepStats], None] | None = None,
        on_audit: Callable[[AuditStats], None] | None = None,
        on_progress: Callable[[str], None] | None = None,
        build: Callable[[EngineConfig, Callable[[str], None]], BuiltEngine] = build_engine,
    ) -> None:
        self._config = config
        self._on_step = on_step or (lambda _: None)
        self._on_audit = on_audit or (lambda _: None)
        self._on_progress = on_progress or (lambda _: None)
        self._build = build
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._flights: dict[str, Flight] = {}
        self._looks: set[asyncio.Future[dict[str, Any]]] = set()
        self._admission = Admission(config.scheduler)
        self._state = "new"
        self._round_started: float | None = None
        self._thread: threading.Thread | None = None
        self._built: BuiltEngine | None = None

    # -- life ----------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """new, loading, ready, draining, stopped or dead."""
        return self._state

    @property
    def info(self) -> EngineInfo:
        """What has been loaded; only after `start`."""
        if self._built is None:
            raise EngineUnavailable("The engine has not started yet.")
        return self._built.info

    @property
    def step_age(self) -> float:
        """Seconds that the thread has been at work without coming round: messages, one step and
        handing over its events; 0 while it waits for something to do."""
        started = self._round_started
        return 0.0 if started is None else time.monotonic() - started

    async def start(self) -> None:
        """Loads and warms up in the engine's thread, then serves.

        Raises:
            ConfigurationError: it cannot start as configured.
        """
        self._state = "loading"
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        ready: asyncio.Future[BuiltEngine] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        try:
            self._built = await ready
        except BaseException:
            self._state = "dead"
            raise
        self._state = "ready"

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuses new requests, gives running ones `drain_seconds`, fails the rest, ends."""
        if self._state in ("ready", "draining"):
            self._state = "draining"
            deadline = time.monotonic() + drain_seconds
            while self._flights and time.monotonic() < deadline and not self._ended.is_set():
                await asyncio.sleep(0.02)
        if self._thread is not None:
            self._inbox.put(Stop())
            await self._ended.wait()
            self._thread.join()
        if self._state != "dead":
            self._state = "stopped"

    # -- requests ------------------------------------------------------------------------

    def submit(self, request: Request) -> EventStream:
        """Takes a request in; its events come from the returned stream.

        Raises:
            InvalidRequest: it can never be served.
            Overloaded: the queue is full.
            EngineUnavailable: the engine is not ready.
        """
        if self._state != "ready" or self._built is None:
            raise EngineUnavailable(
                _STOPPED if self._state == "draining" else f"The engine is {self._state}."
            )
        if request.request_id in self._flights:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is already in flight.", "request_id"
            )
        self._built.rules.validate(request)
        self._admission.admit(request)
        flight = Flight(request, choices_left=request.sampling.n)
        self._flights[request.request_id] = flight
        self._inbox.put(Add(request))
        return EventStream(flight, self.abort)

    def abort(
        self,
        request_id: str,
        choice: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a request or one choice at the next step; unknown ids are ignored."""
        if request_id in self._flights:
            self._inbox.put(Abort(request_id, choice, reason))

    async def speculation(self) -> dict[str, Any]:
        """What `engine.status` tells between two steps.

        Raises:
            EngineUnavailable: the engine is not ready, or ends before it can answer.
            RequestFailed: there is a fault in it.
        """
        if self._state not in ("ready", "draining") or self._ended.is_set():
            raise EngineUnavailable(f"The engine is {self._state}.")
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._looks.add(answer)
        answer.add_done_callback(self._looks.discard)
        self._inbox.put(Look(answer))
        return await answer

    # -- the engine's thread -------------------------------------------------------------

    def _run(self, ready: asyncio.Future[BuiltEngine]) -> None:
        try:
            built = self._build(self._config, self._on_progress)
        except BaseException as error:
            self._tell(settle, ready, error)
            self._tell(self._ended.set)
            return
        self._tell(settle, ready, built)
        idle, last_word = IdleWork(built.idle), _STOPPED
        try:
            while self._read_inbox(built.engine, idle):
                if built.engine.has_work:
                    output = built.step()
                    idle.observe(output.events)
                    self._tell(self._deliver, output)
                elif (found := idle.step()) is not None:
                    self._tell(self._on_audit, found)
        except BaseException as failure:
            logger.exception("the engine died")
            last_word = f"The engine failed ({type(failure).__name__})."
            self._tell(self._mark_dead)
        self._round_started = None
        self._tell(self._fail_all, EngineUnavailable(last_word))
        self._tell(self._ended.set)

    def _read_inbox(self, engine: Engine, idle: IdleWork) -> bool:
        """Handles all messages; waits for one if there is nothing else to do. False = stop."""
        block = not engine.has_work
        self._round_started = time.monotonic()
        while True:
            message = self._next_message(block, idle.patience)
            if message is None:
                return True
            if isinstance(message, Look):  # nothing to do because of it
                self._tell(settle, message.answer, _look(engine))
                continue
            block = False
            if isinstance(message, Stop):
                return False
            if isinstance(message, Add):
                idle.watch(message.request)
                engine.add(message.request)
            else:
                engine.abort(message.request_id, message.choice, message.reason)

    def _next_message(self, block: bool, patience: float | None) -> Message | None:
        """The next message; None if none comes. To wait for it is no work."""
        if block:
            self._round_started = None
        try:
            return self._inbox.get(block=block, timeout=patience)
        except Empty:
            return None
        finally:
            if block:
                self._round_started = time.monotonic()

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("the event loop is gone")

    # -- on the event loop ---------------------------------------------------------------

    def _deliver(self, output: StepOutput) -> None:
        for event in output.events:
            flight = self._flights.get(event.request_id)
            if flight is None:
                continue
            if not flight.started and isinstance(event, Tokens):
                flight.started = True
                self._admission.started(flight.request)
            flight.events.put_nowait(event)
            if isinstance(event, Finished):
                flight.choices_left -= 1
            if isinstance(event, Failed) or not flight.choices_left:
                self._land(flight)
        if output.stats is not None:
            self._on_step(output.stats)

    def _land(self, flight: Flight) -> None:
        """A request is over."""
        del self._flights[flight.request.request_id]
        if not flight.started:
            flight.started = True
            self._admission.started(flight.request)
        self._admission.ended(flight.request)
        flight.events.put_nowait(None)

    def _mark_dead(self) -> None:
        self._state = "dead"

    def _fail_all(self, error: EngineError) -> None:
        for flight in list(self._flights.values()):
            flight.events.put_nowait(Failed(flight.request.request_id, error))
            self._land(flight)
        for answer in list(self._looks):
            settle(answer, error)


def _look(engine: Engine) -> dict[str, Any] | RequestFailed:
    try:
        return engine.speculation()
    except Exception as error:  # requests must not suffer for it
        logger.exception("the state of speculation could not be told")
        return RequestFailed(f"The state of speculation is unclear ({type(error).__name__}).")
