"""Fields of other servers' requests that this one does not have."""

from __future__ import annotations

from typing import Any

#: Fields that would change the output and that this server does not have: refused unless null
#: or one of the values listed here, which ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "max_reasoning_tokens": (),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    # Of the other endpoint's fields, those that would change this one's output:
    "echo": (False,),
    "best_of": (1,),
}


def describe_unsupported(schema: dict[str, Any]) -> None:
    """Writes into a request's JSON schema what of these fields is accepted."""
    for name, neutral in UNSUPPORTED.items():
        schema["properties"].setdefault(name, {"enum": [None, *neutral]})


_OF_OTHERS = (
    "add_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)

#: The same for /v1/responses: the values that ask for nothing, and why others are refused.
UNSUPPORTED_RESPONSES: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": (
        (),
        "no response is stored here; send the whole conversation in input",
    ),
    "conversation": ((), "no conversation is stored here; send all of it in input"),
    "store": ((False,), "this server stores no responses; leave it out, or send false"),
    "background": ((False,), "a response is given as it is made; use stream"),
    "prompt": ((), "no prompts are stored here; send input and instructions"),
    "truncation": (("disabled",), "an input that is too long is refused, never cut"),
    "messages": ((), "this endpoint calls it input"),
    "max_tokens": ((), "this endpoint calls it max_output_tokens"),
    "max_completion_tokens": ((), "this endpoint calls it max_output_tokens"),
    "response_format": ((), "this endpoint calls it text.format"),
    "logprobs": ((False,), "ask for them with include or top_logprobs"),
    "n": ((1,), "this endpoint gives one answer"),
    **dict.fromkeys(_OF_OTHERS, ((), "it is a field of the other endpoints")),
    **{
        name: (neutral, "this server does not have it")
        for name, neutral in UNSUPPORTED.items()
        if name not in ("tools", "tool_choice", "chat_template_kwargs")
    },
}


def describe_unsupported_responses(schema: dict[str, Any]) -> None:
    """The same for a request of /v1/responses."""
    for name, (neutral, _) in UNSUPPORTED_RESPONSES.items():
        schema["properties"].setdefault(name, {"enum": [None, *neutral]})
