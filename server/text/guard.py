"""Control tokens that a caller spelled out stay text; those of the chat template stay control.

A control token is written ``<|im_start|>``, and a caller's message may hold the same characters.
Spellings tell the two apart:

==========================  ==================  ====================================
in                          the template's own  the caller's
==========================  ==================  ====================================
the messages                                    ``#`` and digits, a name for each token
the rendered conversation   ``<|im_start|>``    the same name
what is encoded             other digits        ``<|im_start|>``
==========================  ==================  ====================================

The tokenizer that encodes it is a copy that knows every control token by its digits alone. So it
is one text, encoded at once: nothing is cut where pieces would meet, and a text with a million
control tokens takes no longer than any other of its length. The digits are drawn anew in every
process; who guessed a caller's name would get the text that it stands for.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from server.text.tokenizer import Tokenizer

_DIGITS = 24


class GuardedText(str):
    """A rendered conversation in which callers spelled out control tokens.

    As a string it reads as what the callers wrote; only `Guard.encode` tells the control tokens
    in it from text.

    Attributes:
        spelled: the same, with the template's own control tokens in their secret spelling.
    """

    __slots__ = ("spelled",)
    spelled: str

    def __new__(cls, text: str, spelled: str) -> GuardedText:
        self = super().__new__(cls, text)
        self.spelled = spelled
        return self


class Guard:
    """Keeps the control tokens of a chat template apart from those in its callers' texts.

    Args:
        tokenizer: a transformers tokenizer.
        written: what the template makes of a conversation that holds none: added tokens in it
            are control tokens even if the tokenizer does not call them special.
    """

    def __init__(self, tokenizer: Tokenizer, written: str = "") -> None:
        entries = [
            entry
            for entry in tokenizer.added_tokens_decoder.values()
            if entry.special or (entry.content in written and not entry.content.isspace())
        ]
        self._tokenizer = tokenizer
        tokens: list[str] = [entry.content for entry in entries]
        names, secret = _spellings(len(tokens)), _spellings(len(tokens))
        self._names = dict(zip(tokens, names, strict=True))
        self._secrets = dict(zip(tokens, secret, strict=True))
        self._tokens_by_name = {name: token for token, name in self._names.items()}
        self._token, self._name = re.compile(_longest_of(tokens)), re.compile(_longest_of(names))
        self._either = re.compile(_longest_of([*tokens, *names]))
        self._normalize = _normalizer(tokenizer)
        normalized = [self._normalize(entry.content) for entry in entries if entry.normalized]
        self._normalized = re.compile(_longest_of(normalized)) if normalized else None

    def concerns(self, value: Any) -> bool:
        """Whether a string anywhere in a JSON value spells a control token out."""
        if isinstance(value, str):
            if self._token.search(value):
                return True
            # Some are found in text as the tokenizer rewrites it, in lower case for instance.
            normalized = self._normalized
            return normalized is not None and bool(normalized.search(self._normalize(value)))
        if isinstance(value, Mapping):
            return any(map(self.concerns, value.values()))
        return isinstance(value, list) and any(map(self.concerns, value))

    def disguise(self, value: Any) -> Any:
        """A JSON value in whose strings names stand for control tokens."""
        if isinstance(value, str):
            return self._token.sub(lambda match: self._names[match[0]], value)
        if isinstance(value, Mapping):
            return {key: self.disguise(item) for key, item in value.items()}
        return [self.disguise(item) for item in value] if isinstance(value, list) else value

    def reveal(self, text: str) -> str:
        """A text in which names have become what they stand for."""
        return self._name.sub(lambda match: self._tokens_by_name[match[0]], text)

    def guarded(self, rendered: str) -> GuardedText:
        """A conversation that a template wrote from disguised messages."""

        spellings = self._tokens_by_name | self._secrets

        def spell(match: re.Match[str]) -> str:
            return spellings[match[0]]

        return GuardedText(self.reveal(rendered), self._either.sub(spell, rendered))

    def encode(self, text: GuardedText, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a guarded conversation; the first call makes the copy of the tokenizer.

        Raises:
            InvalidRequest: this kind of tokenizer cannot tell control tokens from text.
        """
        if self._copy is None:
            raise InvalidRequest(
                "A message spells out a control token of the model, and this model's tokenizer "
                "cannot read it as text; leave it out of the messages.",
                "messages",
            )
        ids: list[int] = self._copy.encode(text.spelled, add_special_tokens=add_special_tokens).ids
        return ids

    @functools.cached_property
    def _copy(self) -> Any:
        """A `tokenizers.Tokenizer` that knows control tokens by their secret spelling, or None."""
        from tokenizers import Tokenizer as Backend

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        try:
            copy = Backend.from_str(_respelled(json.loads(backend.to_str()), self._secrets))
        except Exception:  # parts of it are written in Python, or refer to a token by its spelling
            return None
        copy.no_truncation()
        copy.no_padding()
        for token_id, entry in self._tokenizer.added_tokens_decoder.items():
            if copy.token_to_id(self._secrets.get(entry.content, entry.content)) != token_id:
                return None
        return copy


def _spellings(count: int) -> list[str]:
    """Texts that nobody can guess, none within another, and the same in upper and lower case."""
    nonce = secrets.randbelow(10**_DIGITS)
    width = len(str(count))
    return [f"#{nonce:0{_DIGITS}}{index:0{width}}" for index in range(count)]


def _longest_of(words: Sequence[str]) -> str:
    """A pattern of the longest of some words that fits. Words that begin alike share what they
    begin with, so that a search takes no longer for hundreds of them than for one."""
    if not words:
        return "(?!)"  # fits nowhere
    rests: dict[str, list[str]] = {}
    for word in filter(None, words):
        rests.setdefault(word[0], []).append(word[1:])
    if not rests:
        return ""
    branches = "|".join(re.escape(first) + _longest_of(rest) for first, rest in rests.items())
    return f"(?:{branches}){'?' if '' in words else ''}"


def _normalizer(tokenizer: Tokenizer) -> Any:
    """How the tokenizer rewrites text before it looks for the tokens that it calls normalized."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    return str if normalizer is None else normalizer.normalize_str


def _respelled(data: dict[str, Any], spellings: Mapping[str, str]) -> str:
    """A tokenizer's file with tokens spelled otherwise, in its vocabulary as well: there they
    keep their ids, and what they were spelled as is put together from other tokens."""

    def spell(token: str) -> str:
        return spellings.get(token, token)

    for entry in data["added_tokens"]:
        if entry["content"] in spellings:
            entry |= {"content": spell(entry["content"]), "single_word": False}
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spell(token): index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[spell(token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = spell(model["unk_token"])
    if "merges" in model:
        model["merges"] = list(_merges(model["merges"], spellings))
    return json.dumps(data)


def _merges(merges: Iterable[Any], spellings: Mapping[str, str]) -> Iterable[Any]:
    """The merges that do not make or use a token that is spelled otherwise."""
    for merge in merges:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        if spellings.keys().isdisjoint((left, right, left + right)):
            yield merge
