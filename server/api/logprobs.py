"""Log probabilities in the three shapes that clients expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.types import TokenLogprobs
from server.text.choice import Delta
from server.text.codec import TextCodec

#: OpenAI's marker for "very unlikely"; JSON has no minus infinity.
LOWEST = -9999.0


class LogprobWriter:
    """Writes log probabilities of one request.

    Args:
        codec: gives tokens their text.
        top: how many alternates were asked for.
        as_ids: write tokens as "token_id:123" instead of their text, which is not unique.
    """

    def __init__(self, codec: TextCodec, top: int, *, as_ids: bool) -> None:
        self._codec = codec
        self._top = top
        self._as_ids = as_ids

    def completion(
        self, entries: Iterable[TokenLogprobs | None], tokens: Iterable[int], offsets: Iterable[int]
    ) -> dict[str, list[Any]]:
        """The four lists of /v1/completions; an entry of None (the first prompt token) is null.

        A token that is part of a character is written as its bytes, ``bytes:\\xf0\\x9f``. Each
        dictionary holds the alternates and the token itself; of two tokens with the same
        text it keeps the likelier.
        """
        result: dict[str, list[Any]] = {
            "tokens": [self._spelling(token) for token in tokens],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": list(offsets),
        }
        for entry in entries:
            result["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            result["top_logprobs"].append(None if entry is None else self._alternates(entry))
        return result

    def completion_delta(self, delta: Delta, shift: int) -> dict[str, list[Any]]:
        """The four lists of one delta, its offsets moved by `shift` characters."""
        offsets = (offset + shift for offset in delta.offsets)
        return self.completion(delta.logprobs or (), delta.token_ids, offsets)

    def _alternates(self, entry: TokenLogprobs) -> dict[str, float]:
        result: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            name, value = self._spelling(token), _finite(logprob)
            result[name] = max(value, result.get(name, value))
        return result

    def chat(self, delta: Delta) -> dict[str, Any]:
        """The `logprobs` object of /v1/chat/completions."""
        content = [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [
                    self._chat_token(token, logprob) for token, logprob in entry.top[: self._top]
                ],
            }
            for entry in delta.logprobs or ()
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token),
            "logprob": _finite(logprob),
            "bytes": list(self._codec.token_bytes(token)),
        }

    def prompt(
        self, entries: Sequence[TokenLogprobs | None], top: int
    ) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: per position {token id: {logprob, rank, decoded_token}}."""
        return [None if entry is None else self._ranked(entry, top) for entry in entries]

    def _ranked(self, entry: TokenLogprobs, top: int) -> dict[str, Any]:
        ranks = {token: (value, rank) for rank, (token, value) in enumerate(entry.top[:top], 1)}
        ranks[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._codec.token_text(token),
            }
            for token, (logprob, rank) in ranks.items()
        }

    def _spelling(self, token: int) -> str:
        """How a token is written where nothing else says which bytes it stands for."""
        try:
            self._codec.token_bytes(token).decode("utf-8")
        except UnicodeDecodeError as error:
            if not self._as_ids:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in error.object)
        return self.name(token)

    def name(self, token: int) -> str:
        """How a token is written."""
        return f"token_id:{token}" if self._as_ids else self._codec.token_text(token)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
