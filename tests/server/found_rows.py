"""Bad requests of our own: what fuzzing found, and its neighbours.

Each is (path, the fields that are added to a good body, the field to blame).
"""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [5]},
}


def user(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **changes}]}


FOUND: list[tuple[str, dict[str, Any], str]] = [
    # One token under two spellings: which bias counts?
    (COMPLETIONS, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"00": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5_0": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {" 5": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"+5": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 10**400}}, "logit_bias"),
    # true is 1 and false is 0 in Python, but not in a request.
    (COMPLETIONS, {"length_penalty": True}, "length_penalty"),
    (COMPLETIONS, {"use_beam_search": 0}, "use_beam_search"),
    (COMPLETIONS, {"early_stopping": 0}, "early_stopping"),
    (CHAT, {"best_of": True}, "best_of"),
    (CHAT, {"echo": 0}, "echo"),
    (CHAT, {"echo": -0.0}, "echo"),
    (COMPLETIONS, {"modalities": "text"}, "modalities"),
    (COMPLETIONS, {"tools": {}}, "tools"),
    # Answers of tools, which a text template would drop without a word.
    (CHAT, user(tool_calls=[{"id": "1"}]), "messages"),
    (CHAT, user(function_call={"name": "f"}), "messages"),
    (CHAT, user(audio={"id": "1"}), "messages"),
    (CHAT, user(role="tool"), "messages"),
    (CHAT, user(role="function"), "messages"),
    (CHAT, user(role="User"), "messages"),
    (CHAT, user(content=5), "messages"),
    (CHAT, user(content={"type": "text", "text": "x"}), "messages"),
    (CHAT, user(content=["x"]), "messages"),
    (CHAT, user(content=[{"type": "text", "text": None}]), "messages"),
    (CHAT, user(content=[{"text": "x"}]), "messages"),
    (CHAT, user(content=[{"type": "file", "file": {}}]), "messages"),
    (CHAT, user(name=5), "messages"),
    (CHAT, {"messages": {"role": "user", "content": "hi"}}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [None]}, "messages"),
    # A template runs once for every message.
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
    # Two things that exclude each other.
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (COMPLETIONS, {"logprobs": False}, "logprobs"),
    (TOKENIZE, {"content": "y"}, "prompt"),
    (TOKENIZE, GOOD[CHAT], "prompt"),
    (TOKENIZE, {"prompt": ["x"]}, "prompt"),
    (TOKENIZE, {"return_token_strs": 1}, "return_token_strs"),
    (DETOKENIZE, {"tokens": [5.0]}, "tokens"),
    (DETOKENIZE, {"tokens": [[5]]}, "tokens"),
    (DETOKENIZE, {"tokens": None}, "tokens"),
    # Values at the edge of what a number can be.
    (COMPLETIONS, {"max_tokens": -0.0}, "max_tokens"),
    (COMPLETIONS, {"temperature": -1e-300}, "temperature"),
    (COMPLETIONS, {"top_p": 1 + 1e-15}, "top_p"),
    (COMPLETIONS, {"repetition_penalty": -0.0}, "repetition_penalty"),
    (COMPLETIONS, {"seed": 2.0**63}, "seed"),
    (COMPLETIONS, {"min_tokens": 1, "max_tokens": 0}, "min_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 1, "truncation_side": ""}, "truncation_side"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": []}, "stream_options"),
    (COMPLETIONS, {"cache_salt": "x" * 1025}, "cache_salt"),
    (COMPLETIONS, {"request_id": "a b"}, "request_id"),
    (COMPLETIONS, {"request_id": "x\n"}, "request_id"),
    (COMPLETIONS, {"prediction": {"type": "content", "content": [{"type": "text"}]}},
     "prediction"),
]  # fmt: skip
