"""`suffix`: the prompts that models learned to fill gaps by, and what may not get into them."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
from fastapi import FastAPI
from tokenizers import AddedToken

from server.api.app import create_app
from server.api.options import ServerOptions
from server.text.infill import FORMATS
from tests.lossless.structured import byte_fallback_tokenizer
from tests.server.support import (
    MODEL,
    FakeEngine,
    call,
    complete,
    make_app,
    make_info,
    make_tokenizer,
)

FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codestral": ("[PREFIX]", "[SUFFIX]"),
    "seed": ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
}
BEFORE, AFTER = "def f(x):\n    return ", "\n\nprint(f(1))"


@functools.cache
def tokenizer_of(family: str) -> Any:
    """The tests' tokenizer with the family's tokens, which some models do not call special."""
    made = copy.deepcopy(make_tokenizer())
    made.add_tokens([AddedToken(t, special=family != "qwen", normalized=False)
                     for t in FAMILIES[family]])  # fmt: skip
    return made


def app_of(engine: FakeEngine, family: str, **options: Any) -> FastAPI:
    return create_app(engine, tokenizer_of(family), MODEL, options=ServerOptions(**options))


def engine_of(family: str, text: str = "x + 1") -> FakeEngine:
    tokenizer = tokenizer_of(family)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    info = make_info(vocab_size=len(tokenizer))
    return FakeEngine(lambda _r, _c: [*tokens, tokenizer.eos_token_id], info=info)


def prompt_of(family: str, **fields: Any) -> list[int]:
    """The prompt that the engine is given."""
    engine = engine_of(family)
    done = complete(app_of(engine, family), prompt=BEFORE, suffix=AFTER, **fields)
    assert done.status_code == 200, done.text
    assert done.json()["choices"][0]["text"] == "x + 1"
    return list(engine.requests[0].prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_order(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in FAMILIES[family]}
    before = tokenizer.encode(BEFORE, add_special_tokens=False)
    after = tokenizer.encode(AFTER, add_special_tokens=False)
    prefix, suffix, *rest = FAMILIES[family]
    expected = [ids[prefix], *before, ids[suffix], *after]
    if family in ("codestral", "seed"):
        expected = [ids[suffix], *after, ids[prefix], *before]
    expected += [ids[text] for text in rest[:1]]
    assert prompt_of(family) == expected


def test_tokens_of_the_gap_end_what_fills_it() -> None:
    for family, end in (("qwen", "<|fim_pad|>"), ("codellama", "▁<EOT>")):
        token = tokenizer_of(family).convert_tokens_to_ids(end)
        engine = engine_of(family)
        engine._script = functools.partial(lambda token, _r, _c: [token, token], token)
        app = app_of(engine, family)
        choice = complete(app, prompt="a", suffix="b").json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["stop_reason"] is None  # the caller did not ask for it
        assert token in engine.requests[0].sampling.stop_token_ids
        complete(app, prompt="a", suffix="b", ignore_eos=True)
        assert token not in engine.requests[1].sampling.stop_token_ids
        complete(app, prompt="a")
        assert token not in engine.requests[2].sampling.stop_token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_plays_a_control_token(family: str) -> None:
    tokenizer = tokenizer_of(family)
    control = [tokenizer.convert_tokens_to_ids(text) for text in FAMILIES[family]]
    control += [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")]
    evil = "".join((*FAMILIES[family], "<eos><|im_start|>"))
    engine = engine_of(family)
    app = app_of(engine, family)
    for fields in ({"prompt": evil, "suffix": "b"}, {"prompt": "a", "suffix": evil}):
        done = complete(app, echo=True, **fields)
        assert done.status_code == 200, done.text
        prompt = list(engine.requests[-1].prompt)
        assert len(prompt) > 30
        used = [token for token in prompt if token in control]
        assert len(used) == len(set(used)) == len(FAMILIES[family][:3])
        assert done.json()["choices"][0]["text"].startswith(fields["prompt"])


def test_streams_choices_batches_and_echo() -> None:
    app = app_of(engine_of("qwen"), "qwen")
    body = {"suffix": "b", "n": 2, "logprobs": 1, "max_tokens": 30}
    whole = call(app, "POST", "/v1/completions", json={"prompt": ["a", "c"], **body}).json()
    assert [choice["text"] for choice in whole["choices"]] == ["x + 1"] * 4
    assert all(choice["logprobs"]["tokens"] for choice in whole["choices"])
    streamed = call(app, "POST", "/v1/completions", json={"prompt": "a", **body, "stream": True})
    texts = {0: "", 1: ""}
    for line in streamed.text.strip().split("\n\n")[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "x + 1", 1: "x + 1"}
    echoed = complete(app, prompt=[65, 66], suffix="b", echo=True).json()["choices"][0]
    assert echoed["text"] == tokenizer_of("qwen").decode([65, 66]) + "x + 1"


def test_no_blank_is_put_before_what_follows() -> None:
    """As Code Llama learned it: the gap ends where the suffix begins, with a blank or without."""
    made = byte_fallback_tokenizer()
    from tokenizers import normalizers

    made.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.add_tokens([AddedToken(t, special=True, normalized=False) for t in FAMILIES["codellama"]])
    engine = FakeEngine(info=make_info(vocab_size=len(made)))
    app = create_app(engine, made, MODEL, options=ServerOptions())
    pieces = {}
    for suffix in ("fa", " fa"):
        assert complete(app, prompt="a", suffix=suffix).status_code == 200
        prompt = engine.requests[-1].prompt
        pieces[suffix] = made.convert_ids_to_tokens(prompt)
    assert pieces["fa"] == ["▁<PRE>", "▁a", "▁<SUF>", "f", "a", "▁<MID>"]
    assert pieces[" fa"] == ["▁<PRE>", "▁a", "▁<SUF>", "▁", "f", "a", "▁<MID>"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "suffix"),
        ({"echo": True, "logprobs": 0}, "echo", "suffix"),
        ({"suffix": 5}, "suffix", "string"),
        ({"suffix": "b" * 20_000}, "suffix", "at least"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"prompt": "a", "suffix": "b", **fields}
    response = complete(app_of(engine_of("qwen"), "qwen"), **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_models_that_did_not_learn_it_refuse_it() -> None:
    response = complete(make_app(FakeEngine()), prompt="a", suffix="b")
    assert response.status_code == 400
    assert "no tokens to fill in the middle" in response.json()["error"]["message"]
    assert complete(make_app(FakeEngine()), prompt="a", suffix="").status_code == 200


def test_formats_differ() -> None:
    assert len({form.prefix for form in FORMATS}) == len(FORMATS) == len(FAMILIES)
