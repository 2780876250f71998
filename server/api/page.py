"""The page at /: static files of this package, which ask nobody but this server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "ui"

#: What is served, by path: a file of the folder, and its type.
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/stream.js": ("stream.js", "text/javascript"),
    "/ui/state.js": ("state.js", "text/javascript"),
    "/ui/colours.js": ("colours.js", "text/javascript"),
    "/ui/plots.js": ("plots.js", "text/javascript"),
    "/ui/text.js": ("text.js", "text/javascript"),
}

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """One route for each file; none of them is part of the API's document."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in PAGE_FILES.items():
        router.add_api_route(path, _file((_FOLDER / name).read_bytes(), kind), methods=["GET"])
    return router


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    return serve
