"""An engine that is never done, for clients that leave, stall or are cut off."""

from __future__ import annotations

from tests.server.support import FakeEngine, ids, make_info


def slow_engine() -> FakeEngine:
    fox = ids("fox ")
    return FakeEngine(
        lambda _request, _choice: fox * 100_000, delay=0.01, info=make_info(max_model_len=10**6)
    )


ENDLESS = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True}
