"""What every route shares: the engine, the text codec, the limits, the metrics. No globals."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import EngineError, EngineUnavailable
from engine.types import EngineInfo, Event, FinishReason, Request
from server.api.errors import shutting_down
from server.api.options import ServerOptions
from server.metrics.registry import Metrics
from server.text.codec import TextCodec


class EngineClient(Protocol):
    """What the server needs of `engine.async_engine.AsyncEngine`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> str:
        """One of new, loading, ready, draining, stopped, dead."""

    @property
    def step_age(self) -> float:
        """Seconds that the engine has been at work without coming round, 0 when idle."""

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float = 0.0) -> None: ...

    def submit(self, request: Request) -> AsyncIterator[Event]: ...

    def abort(
        self,
        request_id: str,
        choice: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None: ...

    async def speculation(self) -> dict[str, Any]:
        """The state of speculation, in JSON types."""


class Running(Protocol):
    """A generation that is being answered."""

    def interrupt(self, error: EngineError) -> None:
        """Ends it with an error, whether or not the engine still answers."""


@dataclass(slots=True)
class ServerContext:
    """The one mutable object of the HTTP layer.

    Args:
        text: None until the tokenizer is there.
        failure: why the engine could not start, if it could not.
        running: the generations being answered now.
    """

    engine: EngineClient
    model_name: str
    options: ServerOptions
    metrics: Metrics
    text: TextCodec | None = None
    failure: BaseException | None = None
    running: set[Running] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name the model may be asked for by; answers and metrics bear the first."""
        return (self.model_name, *self.options.aliases)

    @property
    def load(self) -> int:
        """How many generation requests are being answered now."""
        return len(self.running)

    def status(self) -> str:
        """ready, loading, draining, stopped, stuck, dead or failed."""
        if self.failure is not None:
            return "failed"
        state = self.engine.state
        hung = self.engine.step_age > self.options.stuck_after_seconds
        if hung and state in ("ready", "draining"):
            return "stuck"
        if state == "new" or (state == "ready" and self.text is None):
            return "loading"
        return state

    def interrupt(self, error: EngineError) -> None:
        """Ends all generations with an error."""
        for generation in list(self.running):
            generation.interrupt(error)

    def explain(self, error: EngineError) -> Exception:
        """The error to show for one of the engine's: what a shutdown cuts off says so."""
        ending = self.engine.state in ("draining", "stopped")
        return shutting_down() if ending and isinstance(error, EngineUnavailable) else error

    def codec(self) -> TextCodec:
        """The text codec of a server that takes requests.

        Raises:
            ApiError, EngineUnavailable: it takes none now; the message says why.
        """
        status = self.status()
        if status in ("draining", "stopped"):
            raise shutting_down()
        if status != "ready" or self.text is None:
            raise EngineUnavailable(_REASONS.get(status, f"The engine is {status}."))
        return self.text


_REASONS = {
    "loading": "The model is still loading; try again soon.",
    "stuck": "The engine hangs and the server must be restarted.",
    "dead": "The engine has died and the server must be restarted.",
    "failed": "The engine could not start; see the server's log.",
}
