"""The nouns of the engine: plain data, no tensors, no text.

What a caller asks for (`Request`) is frozen and crosses the thread border, and so is what the
engine answers (`Tokens`, `Finished`, `Failed`). Only `Sequence` changes, on the engine's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import EngineError, InvalidRequest
from engine.grammar import Grammar

GREEDY_TEMPERATURE = 1e-5  # greedy below it: dividing logits by less would overflow float32


def _check(condition: bool, param: str, value: object, rule: str) -> None:
    """Raises InvalidRequest for `param` unless `condition`; NaN fails every comparison."""
    if not condition:
        raise InvalidRequest(f"{param} is {value!r}, but it must be {rule}.", param)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens. Defaults leave the model's distribution untouched.

    Order of application, equal to transformers' logits processors: repetition penalty,
    presence and frequency penalty, logit_bias, grammar and allowed_token_ids and bad_words and
    min_tokens (masks), temperature, top_k, top_p, min_p.

    Where masks leave nothing together, a grammar binds harder than allowed_token_ids, and that
    harder than bad_words and min_tokens. A grammar's end is the text's end, `ignore_eos` or not.

    Raises:
        InvalidRequest: a value is out of its range; the message names field, value and range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # number of top alternates; 0 = only the sampled token's
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # what the whole output must match

    def __post_init__(self) -> None:
        _check(0 <= self.max_tokens < 2**31, "max_tokens", self.max_tokens, "0 to 2147483647")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        least, most = self.min_tokens, self.max_tokens
        _check(least <= most, "min_tokens", least, f"at most max_tokens ({most})")
        _check(0.0 <= self.temperature <= 2.0, "temperature", self.temperature, "from 0 to 2")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or a positive 32-bit integer")
        _check(0.0 <= self.top_p <= 1.0, "top_p", self.top_p, "from 0 to 1")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        _check(
            0.0 < self.repetition_penalty <= 100.0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and at most 100",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2.0 <= value <= 2.0, name, value, "from -2 to 2")
        for bias in self.logit_bias.values():
            _check(-100.0 <= bias <= 100.0, "logit_bias", bias, "from -100 to 100")
        if self.allowed_token_ids is not None:
            _check(bool(self.allowed_token_ids), "allowed_token_ids", [], "a non-empty list")
        _check(all(self.bad_words), "bad_words", "an empty word", "non-empty token sequences")
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a signed 64-bit integer")
        _check(1 <= self.n <= 128, "n", self.n, "from 1 to 128")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (temperature 0, or top_p 0)."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0.0

    @property
    def ends_at_eos(self) -> bool:
        """Whether the model's end tokens end the text."""
        return not self.ignore_eos or (self.grammar is not None and bool(self.grammar.end_tokens))


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What one request asks of speculation. None leaves the choice to the server.

    Args:
        enabled: False switches speculation off for this request alone.
        drafter: name of a drafter the server has loaded, or "none".
        num_speculative_tokens: the request's wish: most draft tokens a step may check for each of
            its sequences; the server's cap holds all the same.
        prediction: token ids the caller expects the answer to contain (Predicted Outputs).
        trace: whether `Tokens` tell where each token came from.
    """

    enabled: bool | None = None
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    prediction: tuple[int, ...] = ()
    trace: bool = False

    def __post_init__(self) -> None:
        wish = self.num_speculative_tokens
        if wish is not None:
            name = "speculation.num_speculative_tokens"
            _check(0 <= wish <= 64, name, wish, "from 0 to 64")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it: token ids and numbers.

    Args:
        request_id: unique among the requests in flight.
        prompt: token ids, at least one.
        priority: lower runs first; equal priorities run first come, first served.
        cache_salt: prefix pages are shared only between requests with the same salt.
        arrival: `time.monotonic()` when the server took the request.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt is empty; send at least one token.", "prompt")


class FinishReason(enum.Enum):
    """Why a choice ended. The values of STOP and LENGTH are OpenAI's."""

    STOP = "stop"  # end-of-sequence, a stop token, or a stop string found by the server
    LENGTH = "length"  # max_tokens or the model's context is used up
    ABORT = "abort"  # the caller went away


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own (unprocessed) distribution; `top` holds
    as many of the most likely tokens as were requested, best first; the token itself is not added.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """What one choice cost and gained. Times are seconds; `None` = never happened."""

    prompt_tokens: int
    cached_prompt_tokens: int  # prompt tokens found in the prefix index
    generated_tokens: int
    draft_tokens: int  # checked by the target
    accepted_tokens: int  # draft tokens kept (a bonus or correction token is not a draft)
    target_passes: int  # steps that emitted at least one token
    preemptions: int
    arrival: float  # time.monotonic() instants
    first_scheduled: float | None
    first_token: float | None
    finished: float
    accepted_prediction_tokens: int = 0  # drafts that came from the request's own `prediction`
    rejected_prediction_tokens: int = 0
    speedup: float | None = None  # against plain decoding, by wall clock; None = unknown
    drafted_by: tuple[tuple[str, int], ...] = ()  # `draft_tokens` by drafter, if there are any


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """What one step's draft had to do with the tokens that the step brought."""

    drafter: str
    drafted: int  # draft tokens that the target checked
    accepted: int  # so many of the tokens, the first ones, were drafted
    refused: tuple[int, ...]  # draft tokens in whose place the target said something else
    speedup: float | None = None  # of the choice up to the step before; None = unknown


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens of one choice, in order; never retracted."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    trace: DraftTrace | None = None  # if the request asked for it


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt; entry 0 is None, since nothing precedes it."""

    request_id: str
    entries: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of one choice. `stop_token_id` is set when a token ended it: that token
    is the last of `Tokens` and counts as generated."""

    request_id: str
    choice: int
    reason: FinishReason
    stop_token_id: int | None
    stats: SequenceStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a whole request: the engine could not finish it."""

    request_id: str
    error: EngineError


#: What a request's stream carries. Every choice ends with exactly one `Finished`, or the
#: request with exactly one `Failed`.
Event = Tokens | PromptLogprobs | Finished | Failed


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What a model's weights are kept in.

    Attributes:
        kinds: of its matrices, those with most bytes first: "bfloat16", or "Q4_1, Q8_0".
        num_bytes: of all weights, those that layers share counted once.
        bits: per weight, scales and all.
    """

    kinds: str = "unknown"
    num_bytes: int = 0
    bits: float = 0.0

    def __str__(self) -> str:
        return f"{self.kinds}: {self.bits:.1f} bits a weight, {self.num_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is: shown in the banner, /v1/models, `doctor` and metrics."""

    model_name: str
    model_path: str  # local directory with weights and tokenizer
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    page_size: int
    num_pages: int
    runner: str  # "native", "torch" or "reference"
    drafters: tuple[str, ...]
    max_draft: int
    row_invariant: bool | None = None  # what the numerics self-test found; None = not run
    numerics: str = "not tested"  # the same in words
    checked: str = "not tested"  # what comparing the model with transformers' own has found
    weights: WeightsInfo = WeightsInfo()
    kv_dtype: str = "unknown"  # what keys and values are kept in
    kv_bytes_per_token: int = 0
