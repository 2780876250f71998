"""A chat template of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigurationError
from server.text.calls import format_of
from server.text.codec import TextCodec
from server.text.tokenizer import load_tokenizer
from tests.server.support import make_tokenizer

HERMES = Path(__file__).parents[2] / "tools" / "clients" / "hermes_tools.jinja"


@pytest.fixture
def model(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_it_stands_in_for_the_models_own(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    hello = [{"role": "user", "content": "hi"}]
    assert TextCodec(load_tokenizer(model, str(file))).render_chat(hello) == "[hi]"
    assert "<|im_start|>" in TextCodec(load_tokenizer(model)).render_chat(hello)


def test_one_that_cannot_be_read_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, words in (("none", "No such file"), ("empty", "empty"), ("latin", "not UTF-8")):
        with pytest.raises(ConfigurationError, match=words):
            load_tokenizer(model, str(tmp_path / name))


def test_the_one_that_comes_with_the_tools_teaches_calls(model: str) -> None:
    codec = TextCodec(load_tokenizer(model, str(HERMES)))
    assert format_of(codec.template) == "hermes"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]
    text = codec.render_chat(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert text == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions to help the user:\n<tools>\n"
        '{"type": "function", "function": {"name": "f"}}\n</tools>\n'
        "For each call write one line of JSON within tags:\n<tool_call>\n"
        '{"name": <the function\'s name>, "arguments": <its arguments>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert codec.render_chat(messages[:2]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
