from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from loadtest.sse import data_events


def read(*chunks: bytes) -> list[str]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[str]:
        return [data async for data in data_events(source())]

    return asyncio.run(collect())


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_yields_the_data_of_each_event(newline: bytes) -> None:
    stream = b"data: {}\n\ndata:[DONE]\n\n".replace(b"\n", newline)
    assert read(stream) == ["{}", "[DONE]"]


def test_any_cut_of_the_bytes_gives_the_same_events() -> None:
    stream = ": ping\r\n\r\nevent: x\ndata: größe 🎈\n\ndata: a\ndata: b\n\n".encode()
    for cut in range(len(stream)):
        assert read(stream[:cut], stream[cut:]) == ["größe 🎈", "a\nb"]


def test_line_separators_inside_text_do_not_end_a_line() -> None:
    text = json.dumps({"text": "a\u2028b\u0085c\x1cd"}, ensure_ascii=False)
    assert read(f"data: {text}\n\n".encode()) == [text]


def test_comments_and_an_unfinished_event_are_dropped() -> None:
    assert read(b": ping\n\ndata: a\n\n: ping\n\ndata: b\n") == ["a"]
