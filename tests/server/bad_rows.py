"""The tables of bad requests."""

from __future__ import annotations

from typing import Any

from tests.server.support import make_info

VOCABULARY = make_info().vocab_size

#: (fields of the body, the field to blame)
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    # prompts
    *(({"prompt": prompt}, "prompt") for prompt in (
        "", [], [[]], [""], None, {}, 5, True, [None],
        [-1], [[-1]], [999_999], [VOCABULARY], [2**63], [2**70], [[1], [2**64]],
        [1, "a"], ["a", 1], [True], [1, True], [1.5], [[1], "a"], [[1], [True]], [[[1]]],
        ["a"] * 129, ["a"] * 100_000, "x" * 3000, [5] * 513, ["ok", "x" * 3000],
    )),
    # lengths
    *(({"max_tokens": value}, "max_tokens") for value in (
        -1, 2**31, 2**63, 10**400, 1e308, "16", 1.5, 16.0, True, [16],
    )),
    *(({"min_tokens": value}, "min_tokens") for value in (-1, 17, 10**30, "1", True)),
    *(({"n": value}, "n") for value in (0, -1, 129, 10**6, 10**12, 10**100, "2", True, 1.0)),
    *(({"best_of": value}, "best_of") for value in (0, -1, 21, 10**6, "2")),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    # sampling
    *(({"temperature": value}, "temperature") for value in (
        -0.1, 2.1, 999_999, 1e400, "NaN", "0.5", True, [], {},
    )),
    *(({"top_p": value}, "top_p") for value in (-1, 1.1, "1")),
    *(({"min_p": value}, "min_p") for value in (-1, 2)),
    *(({"top_k": value}, "top_k") for value in (-2, 2**40, 1.5, True, "5")),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 1e400, 101)),
    *(({name: value}, name) for name in ("presence_penalty", "frequency_penalty")
      for value in (3, -3, "0")),
    *(({"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 1.5, "x", True)),
    # token lists
    *(({"logit_bias": value}, "logit_bias") for value in (
        {str(VOCABULARY): 1}, {"-1": 1}, {"foo": 1}, {"1.0": 1}, {"": 1}, {"9" * 50: 1},
        {"١": 1}, {"5": 1e9}, {"5": -101}, {"5": "1"}, {"5": True}, {"5": None}, {"5": 1e400},
        [1], "5", {str(i): 0 for i in range(2000)},
    )),
    *(({name: value}, name) for name in ("stop_token_ids", "allowed_token_ids")
      for value in ([VOCABULARY], [-1], [2**70], ["5"], [1.0], [True], 5, "5")),
    ({"stop_token_ids": [5] * 2000}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    *(({"bad_words": value}, "bad_words") for value in ([""], [" "], "fox", [1], ["a"] * 2000)),
    # stop strings
    *(({"stop": value}, "stop") for value in (
        "", [""], ["a", ""], ["a"] * 17, ["x"] * 10_000, "x" * 2000, "x" * 10**6,
        [["a"]], [1], 5, {}, True,
    )),
    # log probabilities
    *(({"logprobs": value}, "logprobs") for value in (-2, -1, 21, 10**9, "5", True, 1.0)),
    *(({"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, 10**9, "1", True)),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    # the rest
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    *(({"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (
        -2, 0, 2**70, 513, "1", True,
    )),
    ({"truncation_side": "middle"}, "truncation_side"),
    *(({"cache_salt": value}, "cache_salt") for value in ("", "x" * 5000, 5, [])),
    *(({"priority": value}, "priority") for value in (2**31, -(2**31) - 1, "1", 1.5)),
    *(({"request_id": value}, "request_id") for value in ("", "a\r\nb", "x" * 10**6, 5, "é")),
    *(({"prediction": value}, "prediction") for value in (
        {}, {"type": "x", "content": "a"}, {"type": "content"}, {"type": "content", "content": []},
        {"type": "content", "content": 5}, {"type": "content", "content": [{"type": "image"}]},
        "text", [],
    )),
    *(({"speculation": value}, "speculation") for value in (
        {"unknown": 1}, {"enabled": "no"}, {"max_draft": "3"}, {"max_draft": True}, "off", [],
    )),
    *(({"speculation": {"max_draft": value}}, "speculation.max_draft") for value in (
        -1, 65, 10**6,
    )),
    *(({"speculation": {"drafter": value}}, "speculation.drafter") for value in (
        "../x", "eagle", "", "x" * 10**5,
    )),
    *(({name: value}, name) for name, value in (
        ("suffix", "x"), ("suffix", ""), ("tools", [{}]), ("tool_choice", "required"),
        ("response_format", {"type": "json_schema"}), ("structured_outputs", {"regex": "(a+)+$"}),
        ("guided_json", {}), ("guided_regex", "[.*"), ("guided_grammar", ""),
        ("use_beam_search", True), ("length_penalty", 0.5), ("prompt_embeds", "gASVAAAA"),
        ("custom_logit_processor", "x"), ("logits_processors", ["x"]),
        ("repetition_detection", {}), ("thinking_token_budget", 5), ("chat_template", "{{ x }}"),
        ("chat_template_kwargs", {"tokenize": True}), ("structured_outputs", {"regex": "[.*"}),
        ("structured_outputs", {"grammar": ""}), ("structured_outputs", {}),
        ("response_format", {}), ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("tools", [{"function": {"parameters": {"pattern": "(a+)+$", "type": "x"}}}]),
        ("guided_choice", []), ("logprob_token_ids", [5]), ("functions", [{}]), ("audio", {}),
    )),
]  # fmt: skip

#: (the body as sent, a word of the message)
BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "no body"),
    (b"   ", "no body"),
    (b"{", "not valid JSON"),
    (b'{"prompt": "x"', "not valid JSON"),
    (b'{"prompt": "x"} x', "not valid JSON"),
    (b"{'prompt': 'x'}", "not valid JSON"),
    (b'{"prompt": "a\nb"}', "not valid JSON"),
    (b"[]", "array"),
    (b'"x"', "string"),
    (b"5", "number"),
    (b"true", "boolean"),
    (b"null", "null"),
    (b'{"prompt": "x", "prompt": "y"}', "twice"),
    (b'{"prompt": "x", "speculation": {"enabled": true, "enabled": false}}', "twice"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    ('{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": "x", "stop": "\\udfff"}', "surrogate"),
    (b'{"prompt": "x", "\\udc00": 1}', "surrogate"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    (b'{"prompt": "x", "temperature": Infinity}', "Infinity"),
    (b'{"prompt": "x", "top_p": -Infinity}', "Infinity"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "NaN"),
    (b'{"prompt": "x", "colour": NaN}', "NaN"),
    (b'{"prompt": "x", "temperature": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    (b"[" * 20_000, "deep"),
    (b'{"a":' * 20_000, "deep"),
    (b'{"prompt": "x", "a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
    (b'{"prompt": "x", "response_format": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "deep"),
    (b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
]
