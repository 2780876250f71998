"""Who calls, and how much: tenants and rate limits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.api.errors import ApiError

#: The SDK waits at most so long for a Retry-After; a longer one would make it give up.
_MAX_RETRY_SECONDS = 120

#: Finished requests of one caller that are remembered.
_RECENT = 32


class TokenBucket:
    """Holds at most a minute's worth and refills evenly. It may be overdrawn: what a request
    costs is known only afterwards, and the debt delays the next one.

    Args:
        per_minute: its size and what flows in each minute.
        clock: monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._clock = clock
        self._since = clock()

    def wait(self) -> float:
        """Seconds until at least one unit is there; 0 if it is now."""
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._since) * self._size / 60)
        self._since = now
        return max(0.0, (1 - self._level) * 60 / self._size)

    def take(self, amount: int) -> None:
        """Removes units, there or not."""
        self._level -= amount


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or everybody where there are no keys.

    Args:
        name: for logs; empty = everybody.
        tenant: what separates this caller's cached prefixes; empty = everybody's.
        requests: POST requests left; None = no limit.
        tokens: prompt and generated tokens left; None = no limit.
        rejected: called with a reason for each request that is refused.
        recent: its last finished requests in numbers, the newest last; nobody else is shown them.
    """

    name: str
    tenant: str
    requests: TokenBucket | None
    tokens: TokenBucket | None
    rejected: Callable[[str], None]
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def count_request(self) -> None:
        """Counts one request.

        Raises:
            ApiError: 429; too many requests within a minute.
        """
        if self.requests is not None:
            self._admit(self.requests, "requests")
            self.requests.take(1)

    def check_tokens(self) -> None:
        """Raises a 429 if the tokens of the last minute are used up."""
        if self.tokens is not None:
            self._admit(self.tokens, "tokens")

    def spend(self, tokens: int) -> None:
        """Counts tokens that a request took."""
        if self.tokens is not None:
            self.tokens.take(tokens)

    def salt(self, asked: str | None) -> str:
        """The cache salt of a request: the caller's tenant, and what the request asks for."""
        return f"{self.tenant}/{asked or ''}" if self.tenant else asked or ""

    def _admit(self, bucket: TokenBucket, unit: str) -> None:
        seconds = bucket.wait()
        if seconds > 0:
            self.rejected("rate_limited")
            raise ApiError(
                429,
                f"The limit of {unit} per minute is reached; try again in {math.ceil(seconds)} s.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(min(_MAX_RETRY_SECONDS, math.ceil(seconds)))},
            )
