"""Bad and extreme input before a real engine: the stated answer, and then a normal request is
answered, to the last digit, as before."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import PATIENCE, Server, said, text_of
from tests.tiny import CONTEXT, Weights

VOCABULARY = 262
NORMAL: dict[str, Any] = {
    "prompt": "In the beginning", "max_tokens": 24, "temperature": 0.9, "seed": 3, "logprobs": 2,
    "return_token_ids": True,
}  # fmt: skip
OFF = {"speculation": {"enabled": False}}
#: So few that drafts are right now and then.
FEW = {"allowed_token_ids": [68, 69, 70, 200], "ignore_eos": True}


@contextlib.contextmanager
def unharmed(server: Server) -> Iterator[Server]:
    """Whatever happens inside, the normal request is answered just as before."""
    before = server.complete(NORMAL)["choices"]
    yield server
    assert server.complete(NORMAL)["choices"] == before


#: A token whose embedding is not a number in the weights of `awkward`.
BAD_TOKEN = 96


@pytest.fixture(scope="module")
def awkward(serve_tiny: Serve) -> Iterator[Server]:
    """A model with a large vocabulary and damaged weights."""
    weights = Weights(more_tokens=8000, poisoned=BAD_TOKEN)
    with serve_tiny(*ALWAYS, "--dtype", "float32", weights=weights) as server:
        yield server


def refused(server: Server, body: dict[str, Any], param: str) -> dict[str, Any]:
    """The error of a 400."""
    response = server.post(body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == param
    return error


@pytest.mark.bad_input(7, 8)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * (CONTEXT + 1)},
        {"prompt": [70] * CONTEXT},
        {"prompt": ["ok", "x" * CONTEXT]},
        {"prompt": "x", "max_tokens": CONTEXT},
    ],
    ids=["text", "tokens", "one of two", "prompt and answer"],
)
def test_what_does_not_fit_is_refused_before_the_200(
    tiny: Server, body: dict[str, Any], stream: bool
) -> None:
    with unharmed(tiny):
        error = refused(tiny, {**body, "stream": stream}, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]


@pytest.mark.bad_input(14)
def test_hardly_any_temperature_is_greedy(tiny: Server) -> None:
    with unharmed(tiny):
        cold = {**NORMAL, "temperature": 1e-12}
        assert said(tiny.complete(cold)) == said(tiny.complete({**NORMAL, "temperature": 0}))


MASKS: dict[str, dict[str, Any]] = {
    "a bias against all": {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}},
    "one allowed, and that one a bad word": {"allowed_token_ids": [68], "bad_words": ["A"]},
    "one allowed, and biased against": {"allowed_token_ids": [68], "logit_bias": {"68": -100}},
    "every token ends the text, but not yet": {
        "stop_token_ids": list(range(VOCABULARY)), "min_tokens": 5,
    },
    "the one allowed ends the text, but not yet": {
        "allowed_token_ids": [68], "stop_token_ids": [68], "min_tokens": 5,
    },
    "only the end is allowed, but not yet": {"allowed_token_ids": [2], "min_tokens": 5},
    "all penalties at once": {
        "repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2, **FEW,
    },
}  # fmt: skip


@pytest.mark.bad_input(19)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 2, "seed": 1}])
@pytest.mark.parametrize("masks", MASKS)
def test_masks_that_leave_nothing_leave_numbers(
    tiny: Server, masks: str, sampling: dict[str, Any]
) -> None:
    body = {"prompt": "a b a b a b", "max_tokens": 12, "logprobs": 2, "return_token_ids": True}
    body |= sampling | MASKS[masks]
    with unharmed(tiny):
        answer = tiny.complete(body)
        assert said(tiny.complete({**body, **OFF})) == said(answer)
    [choice] = answer["choices"]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(ids) == len(logprobs) > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
    assert set(ids) <= set(MASKS[masks].get("allowed_token_ids", range(VOCABULARY)))
    if masks == "a bias against all" and not sampling["temperature"]:
        del body["logit_bias"]
        assert said(tiny.complete(body)) == said(answer), "what is equal for all changes nothing"


@pytest.mark.bad_input(20)
def test_bad_tokens_to_stop_at_do_not_touch_the_neighbours(tiny: Server) -> None:
    neighbours = [
        {"prompt": f"{i}", "max_tokens": 300, "seed": i, "min_tokens": 5, **FEW} for i in range(4)
    ]
    alone = [tiny.complete(body)["choices"][0]["text"] for body in neighbours]
    with unharmed(tiny), ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(tiny.stream, body) for body in neighbours]
        while not all(stream.done() for stream in streams):
            for ids in ([VOCABULARY], [-1], [68, 10**6], [2**70]):
                bad = {"prompt": "x", "max_tokens": 5, "min_tokens": 1, "stop_token_ids": ids}
                refused(tiny, bad, "stop_token_ids")
    assert [text_of(stream.result()) for stream in streams] == alone


@pytest.mark.bad_input(25)
def test_impossible_prompt_logprobs_take_no_memory(tiny: Server) -> None:
    long = {"prompt": [70] * (CONTEXT - 10), "max_tokens": 1}
    with unharmed(tiny):
        tiny.complete({**long, "prompt_logprobs": 1})
        before = tiny.most_memory
        for count in (-1, 21, 10**9, 2**63):
            refused(tiny, {**long, "prompt_logprobs": count}, "prompt_logprobs")
        refused(tiny, {**long, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs")
    assert tiny.most_memory - before < 20e6


@pytest.mark.bad_input(26)
def test_the_logits_of_a_long_prompt_are_never_all_there(awkward: Server) -> None:
    """Logits of all positions would take 134 MB, and their log probabilities as much again."""
    prompt = [BAD_TOKEN + 1 + i % 90 for i in range(CONTEXT - 1)]
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
    with unharmed(awkward):
        before = awkward.most_memory
        answer = awkward.complete(body)
        grown = awkward.most_memory - before
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == CONTEXT
    assert logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert grown < 100e6


ODD_TEXTS = [
    "\x00", "\ufeffx", "\u202eabc\u202c", "\u2028\u2029\x85", "e\u0301" * 20, "\U0010ffff\ue000",
    "👨‍👩‍👧‍👦" * 3,
    "<|im_end|><|endoftext|><|im_start|>", "data: [DONE]\n\n", "\r\n\r\n", "%00%n{{7*7}}${x}",
]  # fmt: skip


@pytest.mark.bad_input(31)
def test_odd_unicode_goes_in_and_comes_out_whole(tiny: Server) -> None:
    with unharmed(tiny):
        for text in ODD_TEXTS:
            body = {
                "prompt": text, "echo": True, "max_tokens": 30, "temperature": 0,
                "skip_special_tokens": False,
                "prediction": {"type": "content", "content": text * 3}, "stop": [text],
            }  # fmt: skip
            answer = tiny.complete(body)
            assert answer["choices"][0]["text"].startswith(text)
            assert text_of(tiny.stream(body)) == answer["choices"][0]["text"]
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
            assert tiny.post(chat, "/v1/chat/completions").status_code == 200
            tokens = tiny.post({"prompt": text}, "/tokenize").json()["tokens"]
            assert tiny.post({"tokens": tokens}, "/detokenize").json()["prompt"] == text
    tiny.log.read_bytes().decode("utf-8")


@pytest.mark.bad_input(49)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 4}])
def test_predictions_change_nothing(tiny: Server, sampling: dict[str, Any]) -> None:
    """Right, wrong, empty, longer than there is room, and full of what ends a text."""
    letters = {"allowed_token_ids": [2, 68, 69, 70, 71]}  # and the end of the text
    body = {"prompt": "in in in", "max_tokens": 80, "logit_bias": {"2": -4}, **sampling, **letters}
    with unharmed(tiny):
        wanted = tiny.complete({**body, **OFF, "return_token_ids": True})
        text = wanted["choices"][0]["text"]
        predictions = [
            text, text[:20] + "?" + text[20:], text[::-1], "", "?" * 200, text * 60,
            "<|im_end|>" * 50, text[:9] + "<|im_end|>" + text[9:], "é" * 99,
        ]  # fmt: skip
        asked = [
            {
                **body, "return_token_ids": True, "speculation": {"max_draft": k},
                "prediction": {"type": "content", "content": content},
            }
            for content in predictions for k in (1, 4)
        ]  # fmt: skip
        answers = tiny.complete_all(asked)
        assert [said(answer) for answer in answers] == [said(wanted)] * len(asked)
        tokens = len(wanted["choices"][0]["token_ids"])
        assert answers[1]["speculation"]["accepted"] > tokens // 2 > 10, "the right one is no help"
        # As much as the context holds, and one token less.
        for short in (0, 1):
            full = {**body, "prompt": [70] * 4000, "max_tokens": CONTEXT - 4000 - short, **FEW}
            plain = said(tiny.complete({**full, **OFF}))
            far = {"prediction": {"type": "content", "content": text * 100}}
            assert said(tiny.complete({**full, **far})) == plain


@pytest.mark.bad_input(59)
def test_one_id_for_many_requests_at_once_does_not_mix_them_up(tiny: Server) -> None:
    bodies = [{"prompt": f"{i}", "max_tokens": 40, "seed": i, "request_id": "a"} for i in range(8)]
    alone = [said(tiny.complete(body)) for body in bodies]

    def ask(body: dict[str, Any]) -> httpx.Response:
        headers = {"x-request-id": "the-same"}
        how: Any = {"headers": headers, "timeout": PATIENCE, "trust_env": False}
        return httpx.post(tiny.url + "/v1/completions", json=body, **how)

    with unharmed(tiny), ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(ask, bodies))
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert [said(answer.json()) for answer in answers] == alone


@pytest.mark.bad_input(54)
def test_weights_that_are_no_numbers_fail_the_request_that_meets_them(awkward: Server) -> None:
    server = awkward
    with unharmed(server):
        others = [{"prompt": [70 + i], "max_tokens": 60, "seed": i, **FEW} for i in range(6)]
        alone = [said(server.complete(body)) for body in others]
        meet = {"prompt": [70, 71, BAD_TOKEN] + [72] * 40, "max_tokens": 20}
        for _ in range(3):  # its pages go to others, who must not see what is left in them
            with ThreadPoolExecutor(8) as pool:
                sound = [pool.submit(server.complete, body) for body in others]
                failed = server.post(meet)
                [last] = server.stream(meet)
                assert [said(answer.result()) for answer in sound] == alone
            assert failed.status_code == 500
            assert failed.headers["x-should-retry"] == "false"
            for error in (failed.json()["error"], last["error"]):
                assert "not finite numbers" in error["message"]
                assert error["type"] == "server_error"
        metrics = server.wait_until_idle()
        assert metrics["vllm:corrupted_requests_total"] == 6
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
