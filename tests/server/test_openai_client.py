"""The official client, as people use it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from engine.errors import Overloaded, RequestFailed
from tests.server.support import MODEL, TEXT, FakeEngine, ids, make_app, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(blocks=(3, 1))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(make_app(engine)) as address:
        yield address + "/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def strict(url: str) -> Iterator[openai.OpenAI]:
    """Validates answers against the published schema (which forgets null finish reasons in
    streams of text completions)."""
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_completion(strict: openai.OpenAI) -> None:
    answer = strict.completions.create(model=MODEL, prompt="x", max_tokens=200, logprobs=2)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids(TEXT)) + 1
    assert answer._request_id


def test_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids(TEXT)) + 1


def test_chat_with_a_prediction(strict: openai.OpenAI) -> None:
    answer = strict.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        prediction={"type": "content", "content": "Once upon"},
        logprobs=True,
        top_logprobs=3,
        extra_body={"speculation": {"max_draft": 2}},
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == len(
        ids("Once upon")
    )


def test_streamed_chat(strict: openai.OpenAI) -> None:
    stream = strict.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == TEXT


def test_models(client: openai.OpenAI, strict: openai.OpenAI) -> None:
    assert [model.id for model in strict.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


def test_errors_become_the_clients_exceptions(engine: FakeEngine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    engine.refuse = Overloaded("full")
    with pytest.raises(openai.InternalServerError) as full:
        client.completions.create(model=MODEL, prompt="x")
    assert full.value.status_code == 503


def test_an_error_in_mid_stream_is_raised(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.fail_after, engine.failure = 2, RequestFailed("broken")
    stream = client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=99)
    with pytest.raises(openai.APIError, match="broken"):
        list(stream)


def test_the_client_retries_an_overloaded_server(engine: FakeEngine, url: str) -> None:
    submit, refusals = engine.submit, [Overloaded("full", 0.1)]

    def refuse_once(request):  # type: ignore[no-untyped-def]
        if refusals:
            raise refusals.pop()
        return submit(request)

    engine.submit = refuse_once  # type: ignore[method-assign]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=1) as client:
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text


def test_async_clients_in_parallel(url: str) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=200, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    assert asyncio.run(run()) == [TEXT] * 20
