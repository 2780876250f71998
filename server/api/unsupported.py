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
