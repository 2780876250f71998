"""Logs: one line a record, whatever is in it; as text for people or as JSON for machines.

Nothing that a client sends can start a new line, colour a terminal or imitate a field: text
escapes every control character, JSON escapes everything beyond ASCII. Prompts, answers and
keys are never passed to a logger.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

#: Line breaks and other control characters, invisible ones, and those that turn text around.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]"
)
_BARE = re.compile(r"[A-Za-z0-9._:/{}+-]+")

#: Where a record keeps its fields.
FIELDS = "fields"

Format = Literal["text", "json"]

logger = logging.getLogger("specserve.requests")


def set_up(level: int, style: Format) -> None:
    """Sends everything of at least `level` to stderr, unless logging is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    if level > logging.DEBUG:  # others say at length what is of no use to an operator
        for name in ("uvicorn", "httpx", "filelock", "asyncio", "huggingface_hub"):
            logging.getLogger(name).setLevel(max(level, logging.WARNING))


def one_line(text: str) -> str:
    """`text` with its control characters written out."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: MESSAGE name=value ...``; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [record.getMessage()]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = one_line(" ".join(parts))
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n    | ".join([line, *map(one_line, trace)])
        return f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {line}"


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_request(fields: Mapping[str, Any], *, quiet: bool) -> None:
    """The line of one request.

    Args:
        fields: what is known of it.
        quiet: whether it is of no interest unless something is being debugged.
    """
    level = logging.DEBUG if quiet else logging.INFO
    logger.log(level, "request", extra={FIELDS: fields})


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if _BARE.fullmatch(text) else json.dumps(text)
