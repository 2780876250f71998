"""The tables of bad requests."""

from __future__ import annotations

from typing import Any

from tests.server.support import make_info

VOCABULARY = make_info().vocab_size

#: (number in `tests.ledger`, fields of the body, the field to blame)
BAD_FIELDS: list[tuple[int, dict[str, Any], str]] = [
    # prompts
    (1, {"prompt": ""}, "prompt"),
    *((2, {"prompt": prompt}, "prompt") for prompt in ([], [[]], [""], None)),
    *((3, {"prompt": prompt}, "prompt") for prompt in ([-1], [[-1]])),
    *((4, {"prompt": prompt}, "prompt") for prompt in (
        [999_999], [VOCABULARY], [2**63], [2**70], [[1], [2**64]],
    )),
    *((5, {"prompt": prompt}, "prompt") for prompt in (
        {}, 5, True, [None], [1, "a"], ["a", 1], [True], [1, True], [1.5], [[1], "a"],
        [[1], [True]], [[[1]]],
    )),
    *((6, {"prompt": prompt}, "prompt") for prompt in (["a"] * 129, ["a"] * 100_000)),
    *((7, {"prompt": prompt}, "prompt") for prompt in (
        "x" * 3000, [5] * 513, ["ok", "x" * 3000],
    )),
    # lengths
    *((9, {"max_tokens": value}, "max_tokens") for value in (
        -1, 2**31, 2**63, 10**400, 1e308, "16", 1.5, 16.0, True, [16],
    )),
    *((10, {"n": value}, "n") for value in (
        0, -1, 129, 10**6, 10**12, 10**100, "2", True, 1.0,
    )),
    *((11, {"best_of": value}, "best_of") for value in (0, -1, 21, 10**6, "2")),
    (11, {"best_of": 2, "n": 3}, "best_of"),
    (11, {"best_of": 2, "stream": True}, "best_of"),
    (12, {"prompt": ["a"] * 65, "n": 2}, "n"),
    *((21, {"min_tokens": value}, "min_tokens") for value in (-1, 17, 10**30, "1", True)),
    # sampling
    *((13, {"temperature": value}, "temperature") for value in (1e400, "NaN")),
    *((14, {"temperature": value}, "temperature") for value in (
        -0.1, 2.1, 999_999, "0.5", True, [], {},
    )),
    *((15, {"top_p": value}, "top_p") for value in (-1, 1.1, "1")),
    *((15, {"min_p": value}, "min_p") for value in (-1, 2)),
    *((15, {"top_k": value}, "top_k") for value in (-2, 2**40, 1.5, True, "5")),
    *((16, {"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 1e400, 101)),
    *((16, {name: value}, name) for name in ("presence_penalty", "frequency_penalty")
      for value in (3, -3, "0")),
    *((28, {"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 1.5, "x", True)),
    # token lists
    *((18, {"logit_bias": value}, "logit_bias") for value in (
        {str(VOCABULARY): 1}, {"-1": 1}, {"foo": 1}, {"1.0": 1}, {"": 1}, {"9" * 50: 1},
        {"١": 1}, {"5": 1e9}, {"5": -101}, {"5": "1"}, {"5": True}, {"5": None}, {"5": 1e400},
        [1], "5", {str(i): 0 for i in range(2000)}, {str(i): 0 for i in range(100_000)},
    )),
    (19, {"allowed_token_ids": []}, "allowed_token_ids"),
    *((20, {"stop_token_ids": value, "min_tokens": 1}, "stop_token_ids") for value in (
        [VOCABULARY], [-1], [2**70], ["5"], [1.0], [True], 5, "5", [5] * 2000,
    )),
    *((20, {"allowed_token_ids": value}, "allowed_token_ids") for value in (
        [VOCABULARY], [-1], [2**70], ["5"], [1.0], [True], 5, "5",
    )),
    *((20, {"bad_words": value}, "bad_words") for value in (
        [""], [" "], "fox", [1], ["a"] * 2000,
    )),
    # stop strings
    *((22, {"stop": value}, "stop") for value in (
        "", [""], ["a", ""], ["a"] * 17, ["x"] * 10_000, "x" * 2000, "x" * 10**6,
        [["a"]], [1], 5, {}, True,
    )),
    # log probabilities
    *((24, {"logprobs": value}, "logprobs") for value in (-2, -1, 21, 10**9, "5", True, 1.0)),
    *((25, {"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, 10**9, "1", True)),
    (25, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    # the rest
    (27, {"stream_options": {"include_usage": True}}, "stream_options"),
    (27, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    (27, {"stream": "yes"}, "stream"),
    *((29, {"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (
        -2, 0, 2**70, 513, "1", True,
    )),
    (29, {"truncation_side": "middle"}, "truncation_side"),
    *((30, {"cache_salt": value}, "cache_salt") for value in ("", "x" * 5000, 5, [])),
    *((59, {"request_id": value}, "request_id") for value in (
        "", "a\r\nb", "x" * 10**6, 5, "é",
    )),
    *((59, {"priority": value}, "priority") for value in (2**31, -(2**31) - 1, "1", 1.5)),
    *((46, {"prediction": value}, "prediction") for value in (
        {}, {"type": "x", "content": "a"}, {"type": "content"}, {"type": "content", "content": []},
        {"type": "content", "content": 5}, {"type": "content", "content": [{"type": "image"}]},
        "text", [],
    )),
    *((47, {"speculation": value}, "speculation") for value in (
        {"unknown": 1}, {"enabled": "no"}, {"max_draft": "3"}, {"max_draft": True}, "off", [],
    )),
    *((47, {"speculation": {name: value}}, f"speculation.{name}")
      for name in ("num_speculative_tokens", "max_draft") for value in (-1, 65, 10**6)),
    *((47, {"speculation": {"drafter": value}}, "speculation.drafter") for value in (
        "../x", "eagle", "", "x" * 10**5,
    )),
    *((41, {name: value}, name) for name, value in (
        ("chat_template", "{{ x }}"), ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template", "{% for i in range(10**9) %}{% for j in range(10**9) %}"),
    )),
    *((45, {name: value}, name) for name, value in (
        ("tools", [{}]), ("tool_choice", "required"), ("functions", [{}]),
        ("tools", [{"function": {"parameters": {"pattern": "(a+)+$", "type": "x"}}}]),
        ("response_format", {}), ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {}), ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"regex": None}), ("structured_outputs", {"structural_tag": "x"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
        ("response_format", {"type": "json"}), ("response_format", "json_object"),
        ("structured_outputs", {"regex": "[.*"}), ("structured_outputs", {"grammar": ""}),
        ("guided_json", []), ("guided_json", "{"), ("guided_json", "5"), ("guided_regex", "[.*"),
        ("guided_regex", ""), ("guided_grammar", ""), ("guided_grammar", "start: nowhere"),
        ("guided_choice", []), ("guided_choice", [""]), ("guided_choice", [5]),
        ("guided_choice", ["x"] * 1001), ("guided_json", {"$ref": "#/x"}),
        ("guided_json", {"$ref": "http://169.254.169.254/x"}), ("guided_json", {"$ref": "#"}),
        ("guided_json", {"minLength": 5, "maxLength": 3, "type": "string"}),
    )),
    *((48, {name: value}, name) for name, value in (
        ("prompt_embeds", "gASVAAAA"), ("custom_logit_processor", "x"),
        ("logits_processors", ["x"]), ("suffix", "x"), ("use_beam_search", True),
        ("length_penalty", 0.5), ("repetition_detection", {}), ("thinking_token_budget", 5),
        ("logprob_token_ids", [5]), ("audio", {}),
    )),
]  # fmt: skip

#: (number in `tests.ledger`, the body as sent, a word of the message)
BAD_BODIES: list[tuple[int, bytes, str]] = [
    (32, b"", "no body"),
    (32, b"   ", "no body"),
    (2, b"{}", "prompt"),
    (32, b"{", "not valid JSON"),
    (32, b'{"prompt": "x"', "not valid JSON"),
    (32, b'{"prompt": "x"} x', "not valid JSON"),
    (32, b"{'prompt': 'x'}", "not valid JSON"),
    (32, b'{"prompt": "a\nb"}', "not valid JSON"),
    (32, b"[]", "array"),
    (32, b'"x"', "string"),
    (32, b"5", "number"),
    (32, b"true", "boolean"),
    (32, b"null", "null"),
    (32, b'{"prompt": "x", "prompt": "y"}', "twice"),
    (32, b'{"prompt": "x", "speculation": {"enabled": true, "enabled": false}}', "twice"),
    (32, b'{"prompt": "\xff"}', "UTF-8"),
    (32, b"\xef\xbb\xbf{}", "not valid JSON"),
    (32, '{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
    (31, b'{"prompt": "\\ud800"}', "surrogate"),
    (31, b'{"prompt": "x", "stop": "\\udfff"}', "surrogate"),
    (31, b'{"prompt": "x", "\\udc00": 1}', "surrogate"),
    (13, b'{"prompt": "x", "temperature": NaN}', "NaN"),
    (13, b'{"prompt": "x", "temperature": Infinity}', "Infinity"),
    (13, b'{"prompt": "x", "top_p": -Infinity}', "Infinity"),
    (13, b'{"prompt": "x", "logit_bias": {"5": NaN}}', "NaN"),
    (13, b'{"prompt": "x", "colour": NaN}', "NaN"),
    (13, b'{"prompt": "x", "temperature": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    (33, b"[" * 20_000, "deep"),
    (33, b'{"a":' * 20_000, "deep"),
    (33, b'{"prompt": "x", "a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
    (45, b'{"prompt": "x", "response_format": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "deep"),
    (33, b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
]
