"""Decoding piece by piece equals decoding at once, for every kind of tokenizer."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest
from server.text.codec import TextCodec
from tests.server.support import TEXT, ids, make_tokenizer


@functools.cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with a leading-space mark and bytes as a fallback, like Llama 2's tokenizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "world", "a", "▁a", "!", "🦊"]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def incremental(codec: TextCodec, tokens: list[int], *, skip: bool, context: list[int]) -> str:
    detokenizer = codec.detokenizer(context, skip_special_tokens=skip)
    parts = [detokenizer.push(token) for token in tokens]
    assert all(part.encode("utf-8") is not None for part in parts)
    return "".join(parts) + detokenizer.finish()


def decode(tokenizer: PreTrainedTokenizerFast, tokens: list[int], skip: bool) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_byte_level_pieces_join_to_the_decoded_whole(data: st.DataObject, skip: bool) -> None:
    tokenizer = make_tokenizer()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    codec = TextCodec(tokenizer)
    assert incremental(codec, tokens, skip=skip, context=[]) == decode(tokenizer, tokens, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_encoding_and_piecewise_decoding(text: str) -> None:
    codec = TextCodec(make_tokenizer())
    assert incremental(codec, ids(text), skip=False, context=[]) == text


CHARACTERS = st.sampled_from("aé日🦊\n\u2028").map(
    lambda character: [3 + byte for byte in character.encode()]  # three special tokens precede
)
WORDS = st.integers(0, 8).map(lambda index: [259 + index])
SPECIAL = st.sampled_from([[1], [2]])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(CHARACTERS, WORDS, SPECIAL), max_size=14), st.booleans())
def test_other_tokenizers_join_to_the_decoded_whole(parts: list[list[int]], skip: bool) -> None:
    """For bytes that are UTF-8: of a run with one bad byte this decoder makes nothing but
    U+FFFD, which nobody can know before the run's end."""
    tokenizer = sentencepiece_like()
    tokens = [token for part in parts for token in part]
    codec = TextCodec(tokenizer)
    assert incremental(codec, tokens, skip=skip, context=[]) == decode(tokenizer, tokens, skip)


def test_bytes_that_are_no_text_do_not_hold_the_stream_back_forever() -> None:
    detokenizer = TextCodec(sentencepiece_like()).detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.push(3 + 0xFF) for _ in range(200)]
    assert len("".join(pieces)) >= 128


def test_no_piece_ends_within_a_character() -> None:
    codec = TextCodec(make_tokenizer())
    detokenizer = codec.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.push(token) for token in ids("🦊é日")]
    assert "".join(pieces) == "🦊é日"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "" in pieces  # the characters really are split


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    codec = TextCodec(make_tokenizer())
    fox = ids("🦊")
    assert len(fox) > 1
    assert incremental(codec, fox[:-1], skip=True, context=[]) == "\N{REPLACEMENT CHARACTER}"


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece_like()
    hello, world = (tokenizer.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁world"))
    codec = TextCodec(tokenizer)
    assert incremental(codec, [world, hello], skip=True, context=[hello]) == " world Hello"
    assert codec.token_text(world) == " world"


def test_a_special_token_between_words_does_not_eat_the_space() -> None:
    tokenizer = sentencepiece_like()
    hello, world, end = (
        tokenizer.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁world", "</s>")
    )
    codec = TextCodec(tokenizer)
    assert incremental(codec, [hello, end, world], skip=True, context=[]) == "Hello world"


def test_bytes_of_tokens() -> None:
    codec = TextCodec(make_tokenizer())
    tokens = ids(TEXT)
    assert b"".join(codec.token_bytes(token) for token in tokens).decode() == TEXT
    other = TextCodec(sentencepiece_like())
    assert other.token_bytes(sentencepiece_like().convert_tokens_to_ids("<0xF0>")) == b"\xf0"


def test_ids_that_only_the_padded_embedding_knows_have_no_text() -> None:
    codec = TextCodec(make_tokenizer())
    beyond = len(make_tokenizer()) + 3
    assert codec.decode([beyond, *ids("ok")], skip_special_tokens=True) == "ok"
    assert incremental(codec, [beyond, *ids("ok")], skip=True, context=[]) == "ok"
    assert codec.token_text(beyond) == ""


@pytest.mark.bad_input(42)
def test_templates_are_sandboxed() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}",
    )
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        TextCodec(tokenizer).render_chat([{"role": "user", "content": "x"}])
