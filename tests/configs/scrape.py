"""A scrape of a server that has seen some of everything."""

from __future__ import annotations

import functools

from tests.server.support import MODEL, FakeEngine, call, complete, make_tokenizer
from tests.server.test_metrics import STEP


@functools.cache
def scrape() -> str:
    """The text of /metrics after requests of several kinds and two steps."""
    from server.api.app import create_app
    from server.metrics.registry import Metrics

    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(blocks=(2, 1)), make_tokenizer(), MODEL, metrics=metrics)
    metrics.on_step(STEP)
    metrics.on_step(STEP)
    complete(app, max_tokens=20, prediction={"type": "content", "content": "Once"})
    complete(app, temperature=9)
    call(app, "GET", "/nope")
    return call(app, "GET", "/metrics").text
