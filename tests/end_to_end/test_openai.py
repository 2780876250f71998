"""The official client against the real server: synchronous, asynchronous, streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.end_to_end.serving import PATIENCE, Server

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
SEEDED = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
#: So many tokens, wherever another processor's rounding would end the text.
FORTY = {**SEEDED, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=tiny.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    [only] = client.models.list()
    assert client.models.retrieve(only.id) == only
    return only.id


def test_completions(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="In", n=2, logprobs=2, **FORTY)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 80
    assert whole.choices[0].text != whole.choices[1].text
    stream = client.completions.create(
        model=model,
        prompt="In",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **FORTY,
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage


def test_chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **FORTY
    )
    [choice] = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 40
    stream = client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **FORTY)
    parts = [chunk.choices[0] for chunk in stream]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].finish_reason == choice.finish_reason == "length"


def test_the_stream_helper(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": MESSAGES, "temperature": 1, "seed": 2, "stop": "N"}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_control_of_speculation(client: openai.OpenAI, model: str) -> None:
    """The extension goes through `extra_body`, and its numbers come back beside the answer."""
    texts = set()
    for control in (None, {"enabled": False}, {"max_draft": 1}, {"drafter": "none"}):
        answer = client.completions.create(
            model=model,
            prompt="a b a b a b",
            extra_body={"speculation": control, "allowed_token_ids": [68, 69]},
            **SEEDED,
        )
        texts.add(answer.choices[0].text)
        assert answer.model_extra is not None
        told = answer.model_extra["speculation"]
        off = control in ({"enabled": False}, {"drafter": "none"})
        assert (told["drafted"] == 0) == off
        assert told["target_passes"] + told["accepted"] == 40
    assert len(texts) == 1


def test_predicted_outputs(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    plain = client.chat.completions.create(**ask)
    content = plain.choices[0].message.content
    assert content
    predicted = client.chat.completions.create(
        prediction={"type": "content", "content": "ab" * 40}, **ask
    )
    assert predicted.choices[0].message.content == content


def test_mistakes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt="x", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="x" * 4096, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="drafter"):
        client.completions.create(
            model=model, prompt="x", extra_body={"speculation": {"drafter": "magic"}}
        )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt="x")


def test_many_asynchronous_clients(tiny: Server, client: openai.OpenAI, model: str) -> None:
    async def one(many: openai.AsyncOpenAI, number: int) -> str:
        stream = await many.completions.create(
            model=model, prompt=f"{number}", stream=True, **SEEDED
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=tiny.url + "/v1", api_key="none", timeout=PATIENCE
        ) as many:
            return await asyncio.gather(*(one(many, number) for number in range(16)))

    alone = [
        client.completions.create(model=model, prompt=f"{number}", **SEEDED).choices[0].text
        for number in range(16)
    ]
    assert asyncio.run(everyone()) == alone


def test_closing_a_stream_aborts_it(tiny: Server, client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="x", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    metrics = tiny.wait_until_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
