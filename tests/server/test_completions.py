"""/v1/completions, whole answers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.types import FinishReason, Request
from tests.server.support import (
    MODEL,
    TEXT,
    FakeEngine,
    call,
    choice,
    complete,
    ids,
    logprob_of,
    make_app,
    make_info,
    make_tokenizer,
)


def test_the_answer_has_openais_shape() -> None:
    body = complete(make_app(FakeEngine()), max_tokens=200, model=MODEL).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt, generated = len(ids("Say it")), len(ids(TEXT)) + 1  # the end token counts
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
    }
    assert body["speculation"]["target_passes"] == generated
    assert body["speculation"]["tokens_per_pass"] == 1.0


def test_null_means_default_for_every_optional_field() -> None:
    app = make_app(FakeEngine())
    document = call(app, "GET", "/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    nulls: dict[str, Any] = {name: None for name in fields if name != "prompt"}
    assert len(nulls) > 30
    assert {"suffix", "tools", "response_format"} <= nulls.keys()
    response = complete(app, **nulls)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 16
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_four_shapes_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    response = complete(make_app(engine), prompt=prompt)
    assert response.status_code == 200, response.text
    assert [list(request.prompt) for request in engine.requests] == expected
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def numbered(request: Request, sample: int) -> list[int]:
    return ids(f"p{len(request.prompt)}s{sample}")


def test_index_is_prompt_times_n_plus_sample() -> None:
    app = make_app(FakeEngine(numbered))
    body = complete(app, prompt=[[1], [1, 2], [1, 2, 3]], n=2, max_tokens=9).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "p1s0"), (1, "p1s1"), (2, "p2s0"), (3, "p2s1"), (4, "p3s0"), (5, "p3s1"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == sum(len(ids(f"p1s{i}")) for i in (0, 1)) * 3


def test_best_of_ranks_by_mean_logprob() -> None:
    by_logprob = sorted(ids("abcdefgh"), key=lambda token: logprob_of(token, 0).logprob)

    def script(_: Request, sample: int) -> list[int]:
        return [by_logprob[sample]] * 3

    engine = FakeEngine(script)
    body = complete(make_app(engine), n=2, best_of=4, max_tokens=3).json()
    tokenizer = make_tokenizer()
    means = [logprob_of(token, 0).logprob for token in by_logprob[:4]]
    best = sorted(range(4), key=lambda sample: -means[sample])[:2]
    assert [c["text"] for c in body["choices"]] == [
        tokenizer.decode([by_logprob[sample]] * 3) for sample in best
    ]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12  # every candidate was generated
    assert engine.requests[0].sampling.logprobs == 0


def test_token_ids_are_returned_on_request() -> None:
    result = choice(make_app(FakeEngine("ab")), prompt="c", return_token_ids=True)
    assert result["token_ids"] == [*ids("ab"), make_tokenizer().eos_token_id]
    assert result["prompt_token_ids"] == ids("c")


@pytest.mark.bad_input(23)
@pytest.mark.parametrize("blocks", [(1,), (4,), (2, 5, 1), (100,)])
def test_a_stop_string_cuts_everything_at_the_same_token(blocks: tuple[int, ...]) -> None:
    engine = FakeEngine(blocks=blocks)
    body = complete(
        make_app(engine),
        stop=["said", "nowhere"],
        max_tokens=200,
        logprobs=1,
        return_token_ids=True,
    ).json()
    [result] = body["choices"]
    through = len(ids(TEXT[: TEXT.index("said") + 4]))
    assert result["text"] == TEXT[: TEXT.index("said")]
    assert result["finish_reason"] == "stop"
    assert result["stop_reason"] == "said"
    assert result["token_ids"] == ids(TEXT)[:through]
    assert [len(values) for values in result["logprobs"].values()] == [through] * 4
    assert body["usage"]["completion_tokens"] == through
    assert (engine.requests[0].request_id, 0, FinishReason.STOP) in engine.aborts


def test_the_stop_string_stays_on_request() -> None:
    result = choice(
        make_app(FakeEngine(blocks=(3,))),
        stop="fox",
        include_stop_str_in_output=True,
        max_tokens=99,
    )
    assert result["text"] == TEXT[: TEXT.index("fox") + 3]


def test_stop_tokens_end_without_their_text() -> None:
    colon = ids(":")[0]
    app = make_app(FakeEngine())
    result = choice(app, stop_token_ids=[colon], max_tokens=99)
    assert result["text"] == TEXT[: TEXT.index(":")]
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", colon)
    kept = choice(app, stop_token_ids=[colon], max_tokens=99, include_stop_str_in_output=True)
    assert kept["text"] == TEXT[: TEXT.index(":") + 1]


def test_a_stop_string_before_the_end_token_in_one_block_wins() -> None:
    result = choice(make_app(FakeEngine("one two", blocks=(100,))), stop="two", max_tokens=99)
    assert (result["text"], result["stop_reason"]) == ("one ", "two")


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    eos = make_tokenizer().eos_token_id

    def script(_: Request, __: int) -> list[int]:
        return [*ids("ab"), eos, *ids("cd"), eos, *ids("e")]

    app = make_app(FakeEngine(script))
    result = choice(app, ignore_eos=True, max_tokens=7)
    assert (result["text"], result["finish_reason"]) == ("abcde", "length")
    shown = choice(app, ignore_eos=True, max_tokens=7, skip_special_tokens=False)
    assert shown["text"] == "ab<eos>cd<eos>e"


def test_every_sampling_field_reaches_the_engine() -> None:
    engine = FakeEngine()
    response = complete(
        make_app(engine),
        prompt="a b c d",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"5": 1.5, "6": -100},
        allowed_token_ids=[5, 6, 7],
        bad_words=["fox"],
        ignore_eos=True,
        stop_token_ids=[8],
        seed=-(2**63),
        n=2,
        logprobs=3,
        cache_salt="pepper",
        priority=-4,
        speculation={"enabled": True, "drafter": "lookup", "max_draft": 3},
        prediction={"type": "content", "content": [{"type": "text", "text": "the fox"}]},
        truncate_prompt_tokens=3,
        user="somebody",
        stream=False,
    )
    assert response.status_code == 200, response.text
    [request] = engine.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (7, 2, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert sampling.logit_bias == {5: 1.5, 6: -100}
    assert sampling.allowed_token_ids == {5, 6, 7}
    assert sampling.bad_words == (tuple(ids("fox")), tuple(ids(" fox")))
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == {8}
    assert (sampling.seed, sampling.logprobs) == (-(2**63), 3)
    assert (request.cache_salt, request.priority) == ("pepper", -4)
    assert request.speculation.num_speculative_tokens == 3
    assert request.speculation.drafter == "lookup"
    assert request.speculation.prediction == tuple(ids("the fox"))
    assert list(request.prompt) == ids("a b c d")[-3:]


def test_top_k_minus_one_is_off_and_text_may_be_a_bare_stop() -> None:
    engine = FakeEngine()
    assert complete(make_app(engine), top_k=-1, stop="zzz", stream_options=None).status_code == 200
    assert engine.requests[0].sampling.top_k == 0


@pytest.mark.parametrize(("side", "kept"), [(None, "ef"), ("left", "ef"), ("right", "ab")])
def test_truncation_sides(side: str | None, kept: str) -> None:
    engine = FakeEngine()
    complete(make_app(engine), prompt="abcdef", truncate_prompt_tokens=2, truncation_side=side)
    assert list(engine.requests[0].prompt) == ids(kept)


def test_truncation_to_what_the_context_has_room_for() -> None:
    engine = FakeEngine(info=make_info(max_model_len=20))
    response = complete(make_app(engine), prompt=[7] * 50, truncate_prompt_tokens=-1, max_tokens=5)
    assert response.status_code == 200
    assert len(engine.requests[0].prompt) == 15


def test_the_default_of_max_tokens_gives_way_to_the_context() -> None:
    engine = FakeEngine(info=make_info(max_model_len=20))
    assert complete(make_app(engine), prompt=[7] * 19).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 1


def test_predicted_tokens_are_in_the_usage() -> None:
    body = complete(
        make_app(FakeEngine("ab")), prediction={"type": "content", "content": "ab"}
    ).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 2
    assert details["rejected_prediction_tokens"] == 0


def test_unknown_fields_are_ignored_and_named() -> None:
    response = complete(make_app(FakeEngine()), **{"colour": 1, "x\r\ny: z": 2, "é": 3})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "colour, xyz"
    assert "x-ignored-params" not in complete(make_app(FakeEngine())).headers


def test_request_ids() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    bodies = [complete(app, request_id="mine-1").json() for _ in range(2)]
    assert [body["id"] for body in bodies] == ["cmpl-mine-1"] * 2
    assert engine.requests[0].request_id != engine.requests[1].request_id


def test_long_prompts_are_tokenised_in_a_worker_thread() -> None:
    engine = FakeEngine(info=make_info(max_model_len=200_000, num_pages=20_000))
    text = "the fox " * 20_000
    response = complete(make_app(engine), prompt=text)
    assert response.status_code == 200
    assert list(engine.requests[0].prompt) == ids(text)
