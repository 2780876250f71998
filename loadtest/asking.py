"""How a turn of a conversation becomes a request body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from loadtest.plan import Lane, Prompt, UsageError

#: A message of a conversation: (role, text).
Message = tuple[str, str]

#: Fields the load test sets itself, and why an arm may not.
_OWN_FIELDS = {
    "model": "it belongs to the target (--model)",
    "prompt": "it comes from the workload",
    "messages": "it comes from the workload",
    "stream": "tokens are timed as they stream",
    "stream_options": "tokens are counted from usage",
    "n": "tokens are timed for one choice a request",
    "best_of": "tokens are timed for one choice a request",
}


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request of a run has in common.

    Args:
        endpoint: "chat" posts messages to /v1/chat/completions, "completions" posts text.
        template: None sends the text as it is; "chatml" wraps it (completions only).
        max_tokens: fewest and most tokens to ask for; drawn for each request from the seed.
        seed: every request gets its own seed made of this one, the same in every lane.
        max_turns: turns of a conversation that are sent; None = all.
        isolate_cache: every block gets its own `cache_salt` (a field of specserve and vLLM), so
            that no lane finds its prompts in the prefix cache because another asked them.
        body: fields merged into every request, before the arm's.
    """

    endpoint: Literal["chat", "completions"] = "chat"
    template: Literal["chatml"] | None = None
    max_tokens: tuple[int, int] = (128, 128)
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    max_turns: int | None = None
    isolate_cache: bool = False
    body: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The route that is posted to."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


def check_overlay(name: str, body: Mapping[str, object]) -> None:
    """Refuses fields that would break the measurement.

    Raises:
        UsageError: `body` sets a field of the load test's own.
    """
    for key in body:
        if reason := _OWN_FIELDS.get(key):
            raise UsageError(f"{name} sets {key!r}, which the load test sets itself: {reason}.")


def build_body(
    asking: Asking, lane: Lane, prompt: Prompt, index: int, messages: Sequence[Message]
) -> dict[str, Any]:
    """The JSON body of one turn: equal in all lanes but for the lane's own fields.

    Args:
        index: the request's number in the run; decides seed and length.
        messages: the conversation so far, ending with the user's turn.
    """
    rng = Random(f"{asking.seed}:{index}:{len(messages)}")
    usage = {"include_usage": True}
    if lane.target.continuous_usage:
        usage["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": lane.target.model,
        "max_tokens": prompt.max_tokens or rng.randint(*asking.max_tokens),
        "temperature": asking.temperature,
        "seed": rng.getrandbits(31),
        "stream": True,
        "stream_options": usage,
    }
    if asking.endpoint == "chat":
        body["messages"] = [{"role": role, "content": text} for role, text in messages]
    else:
        body["prompt"] = format_text(asking, messages)
    if asking.ignore_eos:
        body["ignore_eos"] = True
    if lane.arm.prediction and prompt.prediction:
        body["prediction"] = {"type": "content", "content": prompt.prediction}
    return body | dict(asking.body) | dict(lane.arm.body)


def format_text(asking: Asking, messages: Sequence[Message]) -> str:
    """A conversation as one text for the completions endpoint."""
    if asking.template is None:
        return "\n\n".join(text for _, text in messages)
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
