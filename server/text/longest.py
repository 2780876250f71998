"""How many characters one token can stand for, where that is certain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from server.text.tokenizer import Tokenizer, byte_alphabet

#: A composed character (NFC, NFKC) stands for at most so many: a letter and three marks.
_MOST_COMPOSED = 4


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that a single token can stand for.

    Returns:
        A bound that holds for every text; None where there is none, as with tokenizers that
        drop spaces, make one "unknown" of a whole word, or run without a backend that tells.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # takes any number of spaces with it
    normalizer, pre_tokenizer = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    as_bytes = '"ByteLevel"' in json.dumps([normalizer, pre_tokenizer])
    shrinking = _shrinking(normalizer)
    if (
        shrinking is None
        or not _keeps_everything(pre_tokenizer)
        or not _knows_everything(backend.model, as_bytes)
    ):
        return None
    return shrinking * max(map(len, backend.get_vocab(with_added_tokens=True)))


def _settings(part: Any) -> Mapping[str, Any] | None:
    """What one part of the pipeline is, as in tokenizer.json; None = there is no such part."""
    settings: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return settings


def _knows_everything(model: Any, as_bytes: bool) -> bool:
    """Whether no text is unknown: every byte has a token, and every word is made of bytes."""
    if type(model).__name__ != "BPE":
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # a byte has several spellings
    if as_bytes:
        spellings: Iterable[str] = byte_alphabet()
    elif model.byte_fallback:
        spellings = (f"<0x{byte:02X}>" for byte in range(256))
    else:
        return False
    return all(model.token_to_id(spelling) is not None for spelling in spellings)


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
