"""Text and token ids: encode, decode, the text and bytes of one token, chat templates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast, runtime_checkable

from engine.errors import ModelNotSupported
from server.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from server.errors import ApiError

#: Texts longer than this are tokenised in a worker thread.
OFFLOAD_CHARACTERS = 16_384

#: Prompt tokens that give the output its context where decoding needs one.
CONTEXT_TOKENS = 8

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the server needs of a transformers tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __len__(self) -> int: ...


def load_tokenizer(model_path: str) -> Tokenizer:
    """Loads the tokenizer that lies beside a model's weights; never runs code from there.

    Args:
        model_path: a local directory, or a ``.gguf`` file.

    Raises:
        ModelNotSupported: there is none that can be read.
    """
    from pathlib import Path

    from transformers import AutoTokenizer

    path = Path(model_path)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            **source, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever libraries make of a damaged file
        words = " ".join(str(error).split())[:300]
        raise ModelNotSupported(
            f"the tokenizer of {path} cannot be read: {type(error).__name__}: {words}"
        ) from error
    return cast(Tokenizer, tokenizer)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_ALPHABET = _byte_alphabet()


class TextCodec:
    """One tokenizer, seen from the server.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._known = len(tokenizer)
        self._byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        # One thread: Hugging Face tokenizers do not promise to be thread-safe.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self._tokenizer.chat_template)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of every text; long texts do not block the event loop."""
        if sum(map(len, texts)) <= OFFLOAD_CHARACTERS:
            return self._encode_all(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._encode_all, texts, add_special_tokens)

    def _encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encode = self._tokenizer.encode
        return [encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all `token_ids` together; ids beyond the tokenizer's have none."""
        return self._tokenizer.decode(
            [token for token in token_ids if token < self._known],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def detokenizer(self, context: Sequence[int] = (), *, skip_special_tokens: bool) -> Detokenizer:
        """Decodes one growing sequence.

        Args:
            context: the tokens before it (the prompt's end). Decoders that join words with
                spaces need it, so that `prompt + output` reads as written.
            skip_special_tokens: whether special tokens have no text.
        """
        if self._byte_level:
            return ByteDetokenizer(self.token_bytes, self._special if skip_special_tokens else ())

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, context[-CONTEXT_TOKENS:])

    def token_text(self, token_id: int) -> str:
        """The text of one token standing alone, with its leading space; cached."""
        text = self._texts.get(token_id)
        if text is None:
            if self._byte_level:
                text = self.token_bytes(token_id).decode("utf-8", "replace")
            else:
                anchor = self.decode(self._anchor, skip_special_tokens=False)
                pair = self.decode([*self._anchor, token_id], skip_special_tokens=False)
                text = pair[len(anchor) :]
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token stands for, which may be part of a character; cached."""
        value = self._bytes.get(token_id)
        if value is None:
            value = self._bytes[token_id] = self._find_bytes(token_id)
        return value

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id >= self._known:
            return b""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # a hole in the vocabulary
            return b""
        if self._byte_level:
            if all(character in _ALPHABET for character in piece):
                return bytes(_ALPHABET[character] for character in piece)
            return piece.encode("utf-8")
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return self.token_text(token_id).encode("utf-8")

    def token_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token."""
        if token_id >= self._known:
            return ""
        return self._tokenizer.convert_ids_to_tokens(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation, by the tokenizer's own template (sandboxed).

        Raises:
            ApiError: 400; there is no template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ApiError(
                400,
                "This model has no chat template (it is probably a base model); "
                "use /v1/completions.",
                param="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = ascii(str(error))[:200]
            raise ApiError(
                400,
                f"The model's chat template refuses these messages: {reason}.",
                param="messages",
            ) from None
        return cast(str, text)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether decoding is nothing but joining bytes."""
    from tokenizers.decoders import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), ByteLevel)
