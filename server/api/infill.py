"""`suffix`: completions that fill the gap between two texts."""

from __future__ import annotations

from server.api.errors import ApiError
from server.api.schemas import CompletionRequest
from server.text.codec import TextCodec


def check_suffix(codec: TextCodec, body: CompletionRequest) -> bool:
    """Whether a completion is to fill a gap. An empty suffix is none.

    Raises:
        ApiError: the model did not learn it, or another field does not go with it.
    """
    if not body.suffix:
        return False
    if codec.infill.form is None:
        raise ApiError(
            400,
            "suffix is set, but this model's tokenizer has no tokens to fill in the middle; leave "
            "it out, or serve a model that learned it.",
            param="suffix",
        )
    if body.truncate_prompt_tokens is not None:
        raise ApiError(
            400,
            "truncate_prompt_tokens would cut the tokens around the gap that suffix asks for; "
            "shorten prompt and suffix instead.",
            param="truncate_prompt_tokens",
        )
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400,
            "echo with logprobs is not available with suffix: the model reads more than what is "
            "echoed; leave one of them out, or ask for prompt_logprobs.",
            param="echo",
        )
    return True
