"""The fewest tokens a text can make, known without tokenising it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.text.tokenizer import Tokenizer, byte_alphabet

#: A composed character (NFC, NFKC) stands for at most so many: a letter and three marks.
_MOST_COMPOSED = 4
#: What does not occur in UTF-8.
_IMPOSSIBLE = {0xC0, 0xC1, *range(0xF5, 0x100)}


@dataclass(frozen=True, slots=True)
class TextBound:
    """How much text one token can stand for.

    Args:
        per_token: at most so many bytes, or characters.
        unknown: bytes without a token, which a tokenizer drops; None = characters count.
    """

    per_token: int
    unknown: bytes | None

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that `text` can make."""
        size = len(text)
        if self.unknown is not None:
            size = len(text.encode("utf-8").translate(None, self.unknown))
        return -(-size // self.per_token)


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """The bound that holds for every text.

    Returns:
        None where there is none, as with tokenizers that drop spaces, make one "unknown" of a
        whole word, or run without a backend that tells.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = list(tokenizer.added_tokens_decoder.values())
    if any(token.lstrip or token.rstrip for token in added):
        return None  # takes any number of spaces with it
    normalizer, pre_tokenizer = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    as_bytes = '"ByteLevel"' in json.dumps([normalizer, pre_tokenizer])
    shrinking = _shrinking(normalizer)
    unknown = _unknown_bytes(backend.model, as_bytes)
    if shrinking is None or unknown is None or not _keeps_everything(pre_tokenizer):
        return None
    per_token = max(map(len, backend.get_vocab(with_added_tokens=False)))
    if as_bytes and normalizer is None:
        of_added = (len(token.content.encode("utf-8")) for token in added)
        return TextBound(max(per_token, *of_added, 1), unknown)
    if unknown:
        return None  # a normalizer may make what is dropped
    return TextBound(shrinking * max(per_token, *(len(token.content) for token in added), 1), None)


def _settings(part: Any) -> Mapping[str, Any] | None:
    """What one part of the pipeline is, as in tokenizer.json; None = there is no such part."""
    settings: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return settings


def _unknown_bytes(model: Any, as_bytes: bool) -> bytes | None:
    """Bytes that have no token and are dropped; None = a whole text may be unknown."""
    if type(model).__name__ != "BPE":
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None  # a byte has several spellings
    if as_bytes:
        spellings: Iterable[tuple[str, int]] = byte_alphabet().items()
    elif model.byte_fallback:
        spellings = ((f"<0x{byte:02X}>", byte) for byte in range(256))
    else:
        return None
    missing = {byte for spelling, byte in spellings if model.token_to_id(spelling) is None}
    return bytes(missing - _IMPOSSIBLE)


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many characters the normalizer makes one of, at most; None = without bound."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            factor = 1
            for part in normalizer["normalizers"]:
                inner = _shrinking(part)
                if inner is None:
                    return None
                factor *= inner
            return factor
        case "NFC" | "NFKC":
            return _MOST_COMPOSED
        case "NFD" | "NFKD" | "Prepend" | "Lowercase" | "ByteLevel":
            return 1
        case "Replace":
            pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
            return 1 if pattern is not None and len(content) >= len(pattern) else None
    return None


def _keeps_everything(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether no character is lost between two words."""
    if pre_tokenizer is None:
        return True
    match pre_tokenizer["type"]:
        case "Sequence":
            return all(map(_keeps_everything, pre_tokenizer["pretokenizers"]))
        case "Split" | "Punctuation":
            return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
