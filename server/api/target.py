"""What a request asks for, however its target is written."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

_ORIGIN = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


def resolve_target(scope: Scope, root_path: str = "") -> None:
    """Turns a target in absolute form, ``http://host/path``, into its path, as proxies expect
    of a server; where the request goes is decided by that path alone.

    Args:
        root_path: a prefix of paths that is taken off where it is there.
    """
    raw = scope.get("raw_path") or b""
    origin = _ORIGIN.match(raw)
    if origin is not None:
        scope["raw_path"] = raw[origin.end() :] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    if root_path and scope["path"].startswith(root_path + "/"):
        scope["path"] = scope["path"].removeprefix(root_path)
