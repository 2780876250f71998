"""Speculation changes speed and nothing else, over HTTP, greedy and seeded, in both dtypes: each
two of them with one of two models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import Server, chat_prompts, said

OFF = {"speculation": {"enabled": False}}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}


def check_lossless(server: Server, bodies: list[dict[str, Any]]) -> None:
    """Off, on and shortened, alone and in company: always the same answers."""
    bodies = [{**body, "return_token_ids": True} for body in bodies]
    wanted = [said(server.complete({**body, **OFF})) for body in bodies]
    alone = [server.complete(body) for body in bodies]
    assert [said(answer) for answer in alone] == wanted
    drafted = sum(answer["speculation"]["drafted"] for answer in alone)
    accepted = sum(answer["speculation"]["accepted"] for answer in alone)
    assert 0 < accepted < drafted, "nothing was put to the test"
    for asked in ({}, OFF):
        together = server.complete_all([{**body, **asked} for body in bodies])
        assert [said(answer) for answer in together] == wanted
    mixed = [{**body, "speculation": {"max_draft": i % 5}} for i, body in enumerate(bodies)]
    assert [said(answer) for answer in server.complete_all(mixed)] == wanted


@pytest.mark.bad_input(23)
@pytest.mark.parametrize(("dtype", "sampling"), [("float32", "greedy"), ("bfloat16", "seeded")])
def test_a_tiny_model(request: pytest.FixtureRequest, dtype: str, sampling: str) -> None:
    server: Server = request.getfixturevalue(f"tiny_{dtype}")
    few = {"allowed_token_ids": [68, 69, 70, 200]}  # so that drafts are right now and then
    bodies: list[dict[str, Any]] = [
        {"prompt": "in the beginning " * 3, "max_tokens": 200},
        {"prompt": "a b c a b c a b", "max_tokens": 120, **few},
        {"prompt": "x", "max_tokens": 150, **few, "n": 3},
        {"prompt": ["one", "two"], "max_tokens": 90, **few, "min_p": 0.01},
        {"prompt": "y" * 50, "max_tokens": 120, **few, "repetition_penalty": 1.05},
        {"prompt": "z", "max_tokens": 100, **few, "frequency_penalty": 0.1, "logprobs": 2},
        {"prompt": "w w w w", "max_tokens": 100, **few, "logit_bias": {"68": 2, "69": -2}},
        {"prompt": "v", "max_tokens": 150, "stop": ["AA", "ABBA"], **few},
    ]
    check_lossless(server, [{**SAMPLINGS[sampling], **body} for body in bodies])


@pytest.mark.smollm2
@pytest.mark.parametrize(("dtype", "sampling"), [("float32", "seeded"), ("bfloat16", "greedy")])
def test_the_default_model(request: pytest.FixtureRequest, dtype: str, sampling: str) -> None:
    server: Server = request.getfixturevalue(f"smollm2_{dtype}")
    prompts = chat_prompts()[::10]
    bodies = [{"prompt": prompt, "max_tokens": 32, **SAMPLINGS[sampling]} for prompt in prompts]
    check_lossless(server, bodies)


@pytest.mark.bad_input(53)
def test_a_cache_too_small_for_all(tiny: Server, serve_tiny: Serve) -> None:
    """Sequences lose their pages and start again; nobody can tell from the answers."""
    bodies: list[dict[str, Any]] = [
        {
            **SAMPLINGS["greedy" if i % 2 else "seeded"],
            "prompt": f"{i} {i}" * 8,
            "max_tokens": 150,
            "ignore_eos": True,
            "allowed_token_ids": [68, 69, 70, 200],
            "logprobs": 1,
            **({"n": 2} if i % 3 == 0 else {}),
        }
        for i in range(8)
    ]
    wanted = [tiny.complete(body) for body in bodies]
    with serve_tiny(*ALWAYS, "--dtype", "float32", "--kv-cache-memory", "128KiB") as server:
        answers = server.complete_all(bodies)
        streams = [server.stream(body) for body in bodies[:2]]
        metrics = server.wait_until_idle()
    assert [said(answer) for answer in answers] == [said(answer) for answer in wanted]
    assert [a["choices"][0]["logprobs"] for a in answers] == [
        a["choices"][0]["logprobs"] for a in wanted
    ]
    assert len(streams) == 2
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
