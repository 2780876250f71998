"""Limits and habits of the HTTP layer; plain data, quick to import."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.keys import ApiKey


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and habits of the HTTP layer.

    Args:
        max_body_bytes: largest request body; more is answered with 413.
        aliases: further names of the model.
        default_max_tokens: `max_tokens` of a completion that names none (OpenAI: 16).
        default_chat_max_tokens: the same of a chat; None = all the room the context has (OpenAI).
        max_stop_strings: stop strings one request may name.
        max_stop_length: characters one stop string or bad word may have.
        max_logprobs: most alternates per position, for output and prompt.
        max_prompts: prompts in one completion request.
        max_choices: prompts times samples (`n` or `best_of`) in one request.
        max_token_list: entries of logit_bias, stop_token_ids and bad_words.
        ping_seconds: longest silence of a stream before it sends an SSE comment; 0 = never.
        send_timeout_seconds: a client that accepts nothing for so long is cut off.
        stuck_after_seconds: age of an engine step beyond which the engine counts as hung.
        drain_seconds: how long running requests may go on at shutdown.
        body_seconds: a request whose body takes longer to arrive is answered with 408.
        queue_seconds: longest wait for the first token; 0 = without end.
        generation_seconds: longest time from the first token to the last; 0 = without end.
        keys: who may call; empty = anybody.
        open_metrics: whether /metrics needs no key.
        requests_per_minute: POST requests of one key; None = no limit.
        tokens_per_minute: prompt and generated tokens of one key; None = no limit.
        cors_origins: web origins whose pages may call; empty = none.
        allow_trace: whether a request may ask where its tokens came from.
        ui: whether there is a page at /.
        root_path: path under which a proxy shows the server; requests may come with it or without.
        allow_control_tokens: whether control tokens that are spelled out in the messages of a
            chat act as such; else they are text.
        tool_format: how the model writes tool calls, a name in `server.text.calls.FORMATS`; None =
            as its chat template tells.
        reasoning_parser: how the model writes thoughts, a name in `server.text.reasoning.FORMATS`;
            "auto" = as its chat template tells, "none" = nobody looks for any.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    aliases: tuple[str, ...] = ()
    default_max_tokens: int = 16
    default_chat_max_tokens: int | None = None
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_logprobs: int = 20
    max_prompts: int = 128
    max_choices: int = 128
    max_token_list: int = 1024
    ping_seconds: float = 15.0
    send_timeout_seconds: float = 60.0
    stuck_after_seconds: float = 120.0
    drain_seconds: float = 30.0
    body_seconds: float = 60.0
    queue_seconds: float = 300.0
    generation_seconds: float = 3600.0
    keys: tuple[ApiKey, ...] = ()
    open_metrics: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    cors_origins: tuple[str, ...] = ()
    allow_trace: bool = True
    ui: bool = True
    root_path: str = ""
    allow_control_tokens: bool = False
    tool_format: str | None = None
    reasoning_parser: str = "auto"
