"""Server-sent events: bytes in, the `data` of each event out."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def data_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yields the data of each event as soon as its closing blank line arrives.

    Lines end with LF or CRLF. Splitting happens on bytes: text lines may hold characters
    such as U+2028, at which `str.splitlines` (and so httpx's `aiter_lines`) would cut an
    event in two. Comments (`: ping`) and fields other than `data` are skipped; an unfinished
    event at the end of the stream is dropped, as the HTML standard says.
    """
    pending = b""
    data: list[str] = []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []
