"""Every exception the engine raises on purpose.

::

    EngineError
    ├── InvalidRequest          the request can never be served as asked; names the field
    │   └── ContextLengthExceeded
    ├── Overloaded              the request could be served, but not now
    ├── RequestFailed           this request alone failed while it ran
    │   └── CorruptedLogits     ... because the model computed no numbers for it
    ├── EngineUnavailable       the engine is loading, draining, stopped or dead
    └── ConfigurationError      the server cannot start as configured
        └── ModelNotSupported   ... because of the model or the drafter

`server.errors` translates this tree into HTTP in one place.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class: anything the engine refuses or fails on purpose."""


class InvalidRequest(EngineError):
    """The request can never be served as asked.

    Args:
        message: what is wrong, its value, the limit and what to do.
        param: the name of the offending request field, if one is to blame.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested completion do not fit into the context or the KV cache."""


class Overloaded(EngineError):
    """The queue is full; the same request may be served later.

    Args:
        message: what is full and where its limit lies.
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(EngineError):
    """One request failed while it ran; its neighbours did not."""


class CorruptedLogits(RequestFailed):
    """The model's logits for one request are not finite numbers.

    Args:
        position: of the token that was to be drawn.
    """

    def __init__(self, position: int) -> None:
        super().__init__(
            f"The model's logits at position {position} are not finite numbers; the request "
            "cannot be continued. Other requests are unaffected."
        )


class EngineUnavailable(EngineError):
    """The engine takes no requests: it is loading, draining, stopped or dead."""


class ConfigurationError(EngineError):
    """The server cannot start as configured; the message says how to fix it."""


class ModelNotSupported(ConfigurationError):
    """The model or drafter cannot be run here; the message says why."""
