"""What /v1/responses says: output items as they grow, the events that tell of it, the whole."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from server.api.generation import Generation
from server.api.logprobs import LogprobWriter
from server.api.response_input import wants_logprobs
from server.api.response_schemas import ResponseRequest
from server.api.tools import ToolUse
from server.api.usage import speculation, usage
from server.text.call_reader import CallPiece, CallReader
from server.text.choice import Delta
from server.text.codec import TextCodec

Event = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
#: Items of text as they begin, and the part that grows.
_FRESH: dict[str, dict[str, Any]] = {
    "message": {"type": "message", "role": "assistant", "content": []},
    "reasoning": {"type": "reasoning", "summary": [], "content": []},
}
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


class Output:
    """The items of one answer. Deltas go in, events come out; `items` is what there is so far,
    so that a stream and a whole answer cannot differ.

    Args:
        use: how the answer calls tools; None = it calls none.
        writer: writes log probabilities; None = they are not wanted.
        thinks: whether a thought may come first; its tokens have no place among the text's.
    """

    def __init__(
        self, use: ToolUse | None, writer: LogprobWriter | None, *, thinks: bool = False
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._use = use
        self._reader = None if use is None else CallReader(use.form)
        self._writer = writer
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._pending: list[tuple[int, Any]] = []  # where tokens begin whose text is to come
        self._thinks = thinks  # as long as no text came

    def push(self, delta: Delta) -> list[Event]:
        """Events for what a delta brings; its last delta closes the output."""
        events: list[Event] = []
        last = delta.finish_reason is not None
        if self._writer is not None:
            self._note(delta, self._writer.chat(delta)["content"])
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning)
        parts: list[str | CallPiece] = [delta.text] if delta.text else []
        if self._reader is not None:
            parts = self._reader.read(delta.text, final=last)
        for part in parts:
            events += self._text("message", part) if isinstance(part, str) else self._call(part)
        if last:
            if not self.items:
                events += self._begin(_FRESH["message"])
            if self._pending and self.items[-1]["type"] == "message":  # the end has no text
                events += self._text("message", "")
            events += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def _note(self, delta: Delta, entries: list[Any]) -> None:
        """Keeps log probabilities until their text comes; of a thought's tokens only so far."""
        self._pending += zip(delta.offsets, entries, strict=False)
        if not self._thinks or not delta.text:
            return
        self._thinks = False
        ends = [*(start for start, _ in self._pending[1:]), delta.begin + 1]
        self._pending = [
            (start, entry)
            for (start, entry), end in zip(self._pending, ends, strict=True)
            if start >= delta.begin or end > delta.begin
        ]

    def _text(self, kind: str, text: str) -> list[Event]:
        """Adds to the open item, if it is of this kind, or begins one."""
        grows = self._open is not None and self._open["type"] == kind
        events = [] if grows else self._begin(_FRESH[kind])
        part, delta = self.items[-1]["content"][0], {"delta": text, **self._place(content_index=0)}
        part["text"] += text
        if kind == "message":
            delta["logprobs"] = [entry for _, entry in self._pending]
            part["logprobs"] += delta["logprobs"]
            self._pending = []
        return [*events, {"type": f"response.{part['type']}.delta", **delta}]

    def _call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            assert self._use is not None
            call = {
                "type": "function_call",
                "call_id": self._use.call_id(),
                "name": piece.name,
                "arguments": "",
            }
            events += self._begin(call)
        assert self._open is not None
        if piece.arguments:
            self._open["arguments"] += piece.arguments
            place = self._place()
            events.append(
                {
                    "type": "response.function_call_arguments.delta",
                    **place,
                    "delta": piece.arguments,
                }
            )
        return events

    def _begin(self, fresh: dict[str, Any]) -> list[Event]:
        """Closes the item before, and opens one."""
        item = {"id": _new_id(_PREFIXES[fresh["type"]]), "status": "in_progress", **fresh}
        events = self._close("completed")
        self._open = item
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        events.append({**added, "item": {**item}})
        if (fresh_part := _PARTS.get(item["type"])) is not None:
            item["content"] = [copy.deepcopy(fresh_part)]
            place = self._place(content_index=0)
            events.append({"type": "response.content_part.added", **place, "part": fresh_part})
        return events

    def _close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        item, events = self._open, list[Event]()
        if item is None:
            return events
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(
                {"type": "response.function_call_arguments.done", **self._place(), **done}
            )
        else:
            place, part = self._place(content_index=0), item["content"][0]
            done = {key: part[key] for key in ("text", "logprobs") if key in part}
            events.append({"type": f"response.{part['type']}.done", **place, **done})
            events.append({"type": "response.content_part.done", **place, "part": part})
        item["status"] = status
        index = len(self.items) - 1
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        self._open = None
        return events

    def _place(self, **more: int) -> dict[str, Any]:
        """Where the open item stands."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


class ResponseAnswer:
    """Writes one answer of /v1/responses."""

    def __init__(
        self, codec: TextCodec, body: ResponseRequest, generation: Generation, model: str
    ) -> None:
        self._generation = generation
        writer = None
        if wants_logprobs(body):
            writer = LogprobWriter(codec, body.top_logprobs or 0, as_ids=False)
        job = generation.job
        self._output = Output(job.tools, writer, thinks=job.rules.reasoning is not None)
        self._number = 0
        self._reason: str | None = None  # why it ended
        self._head = {
            "id": f"resp_{body.request_id or uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._asked = _echo(body)

    def opening(self) -> list[Event]:
        """The events before the first token."""
        kinds = ("response.created", "response.in_progress")
        return [self._numbered({"type": kind, "response": self._response()}) for kind in kinds]

    def push(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        self._reason = delta.finish_reason
        return [self._numbered(event) for event in self._output.push(delta)]

    def closing(self) -> Event:
        """The last event, once the generation is over."""
        response = self.whole()
        return self._numbered({"type": f"response.{response['status']}", "response": response})

    def failure(self, message: str) -> Event:
        """The last event of a stream that breaks off."""
        error = {"code": "server_error", "message": message}
        response = self._response(status="failed", error=error)
        return self._numbered({"type": "response.failed", "response": response})

    def whole(self) -> dict[str, Any]:
        """The response, once the generation is over."""
        if self._reason == "length":
            end: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}}
            status = "incomplete"
        else:
            status, end = "completed", {"completed_at": int(time.time())}
        totals = {
            "usage": _usage(usage(self._generation)),
            "speculation": speculation(self._generation),
        }
        return self._response(status=status, **end, **totals)

    def _response(self, *, status: str = "in_progress", **changes: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output.items,
            **self._asked,
            "usage": None,
            **changes,
        }

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}


def _echo(body: ResponseRequest) -> dict[str, Any]:
    """What was asked for, defaults filled in."""
    reasoning = body.reasoning
    form = _plain(body.text.format, by_alias=True) if body.text is not None else None
    effort = body.reasoning_effort if reasoning is None else reasoning.effort
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": reasoning.summary if reasoning else None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _plain(value: BaseModel | str | None, *, by_alias: bool = False) -> Any:
    return value.model_dump(by_alias=by_alias) if isinstance(value, BaseModel) else value


def _usage(spent: Mapping[str, Any]) -> dict[str, Any]:
    details = spent["completion_tokens_details"]
    return {
        "input_tokens": spent["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": spent["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": spent["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": details.get("reasoning_tokens", 0),
            **details,
        },
        "total_tokens": spent["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
