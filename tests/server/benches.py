"""One application for many bad requests, and the shape its errors must have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from tests.server.support import FakeEngine, call, choice, make_app

NORMAL = {"prompt": "Say it", "max_tokens": 12, "seed": 1, "logprobs": 1}


def strict_json(response: httpx.Response) -> Any:
    """The body, which must be JSON that every parser accepts."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(response.content.decode("utf-8"), parse_constant=refuse)


def assert_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    """Checks an error's shape and returns it."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = strict_json(response)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 600
    assert len(response.content) < 4000
    return error


@contextlib.contextmanager
def unharmed(app: FastAPI, **headers: str) -> Iterator[None]:
    """Whatever happens inside, the same normal request is answered just as before."""

    def normal() -> Any:
        answer = call(app, "POST", "/v1/completions", json=NORMAL, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    before = normal()
    yield
    assert normal() == before


class Bench:
    """One application for all rows, and what it answers to a normal request."""

    def __init__(self) -> None:
        self.engine = FakeEngine(blocks=(2, 3))
        self.app = make_app(self.engine, max_body_bytes=4_000_000)
        self.expected = choice(self.app, **NORMAL)

    def check_health(self) -> None:
        assert choice(self.app, **NORMAL) == self.expected
        assert self.engine.running == set()
