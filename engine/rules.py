"""Which requests this engine can serve at all: checked before any work, on any thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.config import NO_DRAFTER
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.types import Request


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits that model and cache set for every request.

    Args:
        vocab_size: token ids are 0 to vocab_size - 1.
        max_model_len: most tokens of prompt and completion.
        max_cached_tokens: tokens that all pages together hold.
        drafters: names a request may ask for, besides `NO_DRAFTER`.
    """

    vocab_size: int
    max_model_len: int
    max_cached_tokens: int
    drafters: tuple[str, ...]

    def validate(self, request: Request) -> None:
        """Refuses what could never be served.

        Raises:
            InvalidRequest: a token id is unknown, or the drafter is not loaded.
            ContextLengthExceeded: prompt and completion do not fit.
        """
        params = request.sampling
        self._check_ids("prompt", request.prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        for word in params.bad_words:
            self._check_ids("bad_words", word)
        self._check_ids("prediction", request.speculation.prediction)
        drafter = request.speculation.drafter
        loaded = (*self.drafters, NO_DRAFTER)
        if drafter is not None and drafter not in loaded:
            raise InvalidRequest(
                f"speculation.drafter is {drafter!r}, but this server has: {', '.join(loaded)}.",
                "speculation",
            )
        self._check_length(len(request.prompt), params.max_tokens)

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"{param} holds token id {token}, out of vocabulary: ids go from 0 to "
                    f"{self.vocab_size - 1}.",
                    param,
                )

    def _check_length(self, prompt: int, completion: int) -> None:
        limit = min(self.max_model_len, self.max_cached_tokens)
        if prompt + completion <= limit:
            return
        what = (
            f"This model's maximum context length is {limit} tokens"
            if limit == self.max_model_len
            else f"The KV cache of this server holds {limit} tokens"
        )
        raise ContextLengthExceeded(
            f"{what}. However, you requested {prompt + completion} tokens ({prompt} in the "
            f"prompt; {completion} for the completion). Shorten the prompt or max_tokens.",
            "max_tokens" if prompt < limit else "prompt",
        )
