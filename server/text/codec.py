"""Text and token ids: encode, decode, the text and bytes of one token, conversations."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.errors import InvalidRequest
from server.text.decode import ByteDetokenizer, Detokenizer, WindowDetokenizer
from server.text.grammar import GrammarCompiler
from server.text.guard import Guard, GuardedText
from server.text.infill import InfillWriter
from server.text.lanes import Lanes
from server.text.least import text_bound
from server.text.tokenizer import Tokenizer, byte_alphabet

#: Prompt tokens that give the output its context where decoding needs one.
CONTEXT_TOKENS = 8

#: Names in a chat template that are not a caller's to set.
RESERVED_VARIABLES = frozenset((
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template",
    "add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens",
    "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens",
))  # fmt: skip

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_ALPHABET = byte_alphabet()


class TextCodec:
    """One tokenizer, seen from the server.

    Args:
        tokenizer: a transformers tokenizer.
        control: whether control tokens that are spelled out in messages act as such.

    Attributes:
        grammars: compiles what answers must match.
        infill: writes prompts around gaps.
    """

    def __init__(self, tokenizer: Tokenizer, *, control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self.grammars = GrammarCompiler(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._known = len(tokenizer)
        self._byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._lanes = Lanes()
        self._bound = text_bound(tokenizer)
        self.infill = InfillWriter(tokenizer, self._lanes)

    @property
    def template(self) -> str:
        """The chat template, as it was written; "" if there is none. Of several that are named
        it is the one for tools, or else the default."""
        given = self._tokenizer.chat_template or ""
        if isinstance(given, Mapping):
            given = given.get("tool_use", given.get("default", ""))
        return str(given)

    @property
    def special_ids(self) -> dict[str, int]:
        """Control tokens by their text."""
        added = self._tokenizer.added_tokens_decoder
        return {str(entry.content): token for token, entry in added.items() if entry.special}

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self._tokenizer.chat_template)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of every text; long texts hold up neither the event loop nor short ones.

        Control tokens that a text spells out act as such, except those of callers in what
        `render_chat` returned.

        Raises:
            Overloaded: too much waits for the tokenizer already.
        """

        def work(text: str) -> list[int]:
            if isinstance(text, GuardedText):
                return self._guard.encode(text, add_special_tokens=add_special_tokens)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._lanes.run_all(
            [(len(text), functools.partial(work, text)) for text in texts]
        )

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that `text` can make, without tokenising it; 0 if that is unknown."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def beginning(self, text: str, tokens: int) -> str:
        """So much of `text` that it makes `tokens` tokens, if the whole does and that is known."""
        return text if self._bound is None else text[: tokens * self._bound.per_token]

    def spell(self, text: bytes) -> tuple[int, ...]:
        """Tokens that stand for just these bytes within a text; none if none were found."""
        word, encode = text.decode("utf-8", "ignore"), self._tokenizer.encode
        for before in ("", "a", "\n"):  # at the beginning, some tokenizers put a space before it
            ahead = encode(before, add_special_tokens=False)
            found = encode(before + word, add_special_tokens=False)
            tokens = found[len(ahead) :]
            if found[: len(ahead)] == ahead and self._spelled(tokens) == text:
                return tuple(tokens)
        pieces = [self.spell(letter.encode()) for letter in word] if len(word) > 1 else []
        tokens = [token for piece in pieces for token in piece]
        return tuple(tokens) if self._spelled(tokens) == text else ()

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

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

    async def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """`render_chat`, where long conversations hold up neither the event loop nor short ones.

        Raises:
            InvalidRequest: as there.
            Overloaded: too much waits already.
        """
        characters = sum(len(str(value)) for message in messages for value in message.values())
        characters += sum(len(str(given)) for given in (tools, variables) if given)

        def work() -> str:
            return self.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
                tools=tools,
            )

        return await self._lanes.run(characters, work)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text of a conversation, by the tokenizer's own template (sandboxed).

        Args:
            tools: that the model may call, in OpenAI's shape.
            variables: more names that the template may read, with JSON values; none of
                `RESERVED_VARIABLES`.

        Returns:
            The text; a `GuardedText` if callers spelled out control tokens that must not act.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template (it is probably a base model); "
                "use /v1/completions.",
                "messages",
            )
        conversation = [dict(message) for message in messages]
        given: dict[str, Any] = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
        # The caller has checked the roles; some templates make control tokens of them.
        written = [{k: v for k, v in m.items() if k != "role"} for m in conversation]
        guarded = not self._control and self._guard.concerns([*written, given])
        if guarded:
            texts = self._guard.disguise(written)
            conversation = [{**m, **t} for m, t in zip(conversation, texts, strict=True)]
            given = self._guard.disguise(given)
        try:
            text = self._render(
                conversation,
                **given,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = ascii(self._guard.reveal(str(error)))[:200]
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}.", "messages"
            ) from None
        return self._guard.guarded(text) if guarded else text

    def _render(self, conversation: Sequence[Mapping[str, Any]], **given: Any) -> str:
        return cast(str, self._tokenizer.apply_chat_template(conversation, tokenize=False, **given))

    @functools.cached_property
    def _guard(self) -> Guard:
        """Knows the control tokens: what the tokenizer calls special, and what the template
        writes around messages."""
        try:
            written = self._render([{"role": r, "content": ""} for r in ("user", "assistant")])
        except Exception:  # it refuses such a conversation, or every one
            written = ""
        return Guard(self._tokenizer, written)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether decoding is nothing but joining bytes."""
    from tokenizers.decoders import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), ByteLevel)
