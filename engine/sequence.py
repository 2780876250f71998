"""`Sequence`: one choice of one request while it is being served. The engine's thread only."""

from __future__ import annotations

import enum
import time
from dataclasses import InitVar, dataclass, field

from engine.cache.pages import TARGET, PageTable
from engine.grammar import GrammarCursor
from engine.types import FinishReason, Request, SequenceStats, TokenLogprobs


class Status(enum.Enum):
    """Where a sequence is: queued (again), holding pages, or done."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    `tokens` holds the prompt and committed tokens only; draft tokens never enter it, so what
    the target rejects cannot leak into penalties, prefix hashes, usage or the stream.

    Attributes:
        ticket: order of arrival; with `choice` it decides who is served first.
        seed: 64 bits that key every random draw of the request.
        drafter: the only name in `drafters` where that is left empty.
        draft_limit: most draft tokens a step may check for it: the request's wish within the
            server's cap; of a draft that branches, how deep it may go.
        max_nodes: most draft tokens of a draft that branches; 0 = none does.
        verification: the rule that judges its drafts: "match", "rejection" or "block".
        limit: most tokens it may ever hold (prompt, `max_tokens` and the model's context).
        drafters: names of those that may draft for it, in the order of preference where nothing
            else decides; the planner says who does in a step.
        drafted_by: `draft_tokens` by drafter.
        last_draft: draft tokens that were checked for it in its last step.
        prompt_logprobs: entries of the prompt computed so far; entry 0 is None.
        grammar: answers what the request's grammar allows, if it has one.
    """

    request: Request
    choice: int
    ticket: int
    seed: int
    table: PageTable
    drafter: InitVar[str]
    draft_limit: int
    limit: int
    verification: str = "match"
    drafters: tuple[str, ...] = ()
    max_nodes: int = 0
    tokens: list[int] = field(init=False)
    grammar: GrammarCursor | None = field(init=False, default=None)
    status: Status = Status.WAITING
    cached_prompt_tokens: int = 0
    draft_tokens: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_tokens: int = 0
    last_draft: int = 0
    target_passes: int = 0
    preemptions: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    first_scheduled: float | None = None
    first_token: float | None = None

    def __post_init__(self, drafter: str) -> None:
        self.tokens = list(self.request.prompt)
        self.drafters = self.drafters or (drafter,)
        if (grammar := self.request.sampling.grammar) is not None:
            self.grammar = GrammarCursor(grammar)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key: priority, then arrival. A further choice of the same request counts as
        having arrived that many requests later, so that n = 64 does not block the door."""
        return (self.request.priority, self.ticket + self.choice, self.ticket, self.choice)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Number of committed tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_uncached(self) -> int:
        """Committed tokens the target has yet to be fed; 1 while decoding."""
        return len(self.tokens) - self.table.num_cached[TARGET]

    @property
    def room(self) -> int:
        """How many more tokens it may emit."""
        return self.limit - len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Draft tokens that a step may keep: the token that follows them needs room, too."""
        return min(self.draft_limit, self.room - 1)

    @property
    def most_drafts(self) -> int:
        """Draft tokens that a step may check, on whatever branches."""
        return max(self.max_depth, self.max_nodes) if self.max_depth > 0 else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed; the first choice
        does that for all."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.choice == 0
        return wanted and len(self.prompt_logprobs) < self.prompt_length

    def append(self, tokens: list[int]) -> None:
        """Commits tokens; the only way a sequence grows."""
        self.tokens.extend(tokens)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence is over after its last committed token, or None."""
        params = self.request.sampling
        if self.num_generated:
            last = self.tokens[-1]
            is_eos = last in eos_token_ids and params.ends_at_eos
            if is_eos or last in params.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.room <= 0 else None

    def stats(self) -> SequenceStats:
        """What it has cost and gained so far."""
        return SequenceStats(
            prompt_tokens=self.prompt_length,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=self.num_generated,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            target_passes=self.target_passes,
            preemptions=self.preemptions,
            arrival=self.request.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            finished=time.monotonic(),
            accepted_prediction_tokens=self.accepted_prediction_tokens,
            rejected_prediction_tokens=self.rejected_prediction_tokens,
            drafted_by=tuple(self.drafted_by.items()),
        )
