"""Audits a serving engine while nobody wants anything of it.

A share of the finished greedy requests is run again without speculation. Callers come first:
an audit begins only after a while without any request, feeds few tokens a step, and is dropped
the moment a request arrives, to begin anew later. Its pages are its own and are freed at once.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from engine.audit.compare import Mismatch, first_mismatch
from engine.audit.recompute import NEAR_TIE
from engine.cache.pages import PRIVATE
from engine.config import SchedulerConfig
from engine.control.planner import FixedPlanner, Planner
from engine.control.status import describe
from engine.core import Engine, EngineParts, StepOutput
from engine.types import (
    AuditStats,
    Failed,
    Finished,
    FinishReason,
    Request,
    SpeculationParams,
    Tokens,
)

logger = logging.getLogger(__name__)

#: Requests of audits carry this id, which no caller's can have.
_ID = "\0audit"

#: Seconds without any request before an audit begins.
PATIENCE = 1.0

#: Answers that wait to be audited; the oldest give way.
_MOST_WAITING = 64

#: One sequence, few tokens: a request that arrives waits for a short step at most.
_QUIET = SchedulerConfig(max_batch_tokens=16, max_sequences=1)


@dataclass(slots=True)
class _Answer:
    """A caller's request and what its first choice has said."""

    request: Request
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Audit:
    """An answer that is being said again."""

    answer: _Answer
    request: Request
    planner: Planner  # the engine's own, and its limits, until the audit ends
    limits: SchedulerConfig
    tokens: list[int] = field(default_factory=list)


class AuditingEngine(Engine):
    """An `Engine` that audits itself in idle moments.

    Args:
        parts: see `Engine`, also for the others.
        rate: share of greedy requests to audit, 0 to 1.
        dtype: of the model; decides what is a near-tie.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        max_model_len: int,
        default_drafters: tuple[str, ...],
        max_draft: int,
        rate: float,
        dtype: str,
    ) -> None:
        super().__init__(
            parts,
            max_model_len=max_model_len,
            default_drafters=default_drafters,
            max_draft=max_draft,
        )
        self._rate = rate
        self._near_tie = NEAR_TIE[dtype]
        self._due = 0.0  # audits owed to the requests seen so far
        self._watched: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque(maxlen=_MOST_WAITING)
        self._audit: _Audit | None = None
        self._idle = False  # nobody has come since the last audit

    @property
    def patience(self) -> float | None:
        """See `Engine.patience`."""
        if not self._waiting:
            return None
        return 0.0 if self._idle else PATIENCE

    def add(self, request: Request) -> None:
        """Queues a caller's request; an audit that runs makes way."""
        self._idle = False
        if self._audit is not None:
            self._waiting.appendleft(self._audit.answer)
            self._end_audit()
        super().add(request)
        if request.sampling.greedy:
            self._due += self._rate
            if self._due >= 1.0:
                self._due -= 1.0
                self._watched[request.request_id] = _Answer(request)

    def step(self) -> StepOutput:
        """One step for the callers; if there are none, one of an audit."""
        if not self.has_work and self._waiting:
            self._begin_audit(self._waiting.popleft())
        output = super().step()
        if self._audit is not None:
            return StepOutput([], None, self._follow(self._audit, output))
        self._watch(output)
        return output

    def speculation(self) -> dict[str, Any]:
        """See `Engine.speculation`; an audit that runs has no part in it."""
        planner = self.parts.planner if self._audit is None else self._audit.planner
        return describe(planner, self.parts.drafters.names)

    # -- callers -------------------------------------------------------------------------

    def _watch(self, output: StepOutput) -> None:
        """Notes what watched requests say; an answer that drafts helped with is audited."""
        for event in output.events:
            answer = self._watched.get(event.request_id)
            if answer is None:
                continue
            if isinstance(event, Failed):
                del self._watched[event.request_id]
            elif isinstance(event, Tokens) and event.choice == 0:
                answer.tokens += event.token_ids
            elif isinstance(event, Finished) and event.choice == 0:
                del self._watched[event.request_id]
                if answer.tokens and event.stats.draft_tokens:
                    self._waiting.append(answer)

    # -- audits --------------------------------------------------------------------------

    def _begin_audit(self, answer: _Answer) -> None:
        asked, count = answer.request, len(answer.tokens)
        request = replace(
            asked,
            request_id=_ID,
            sampling=replace(
                asked.sampling,
                max_tokens=count,
                min_tokens=min(count, asked.sampling.min_tokens),
                n=1,
                logprobs=None,
                prompt_logprobs=None,
            ),
            speculation=SpeculationParams(enabled=False),
            cache_salt=PRIVATE,
        )
        scheduler = self.parts.scheduler
        self._audit = _Audit(answer, request, self.parts.planner, scheduler.config)
        self._idle = True
        # The planner must not learn from this, and no metric may count it.
        self.parts = replace(self.parts, planner=FixedPlanner())
        scheduler.config = _QUIET
        super().add(request)

    def _follow(self, audit: _Audit, output: StepOutput) -> AuditStats | None:
        """Reads the events of an audit's step; returns the result once there is one."""
        ended = False
        for event in output.events:
            if isinstance(event, Tokens):
                audit.tokens += event.token_ids
            ended |= isinstance(event, Finished | Failed)
        said = audit.answer.tokens if ended else audit.answer.tokens[: len(audit.tokens)]
        if not ended and audit.tokens == said:
            return None
        self._end_audit()
        if any(isinstance(event, Failed) for event in output.events):
            return None  # the engine has logged why
        found = first_mismatch(self.parts, audit.request, said, audit.tokens, self._near_tie)
        return _sum_up(found, len(said))

    def _end_audit(self) -> None:
        """Forgets the audit that runs, and gives the engine back as it was."""
        audit = self._audit
        assert audit is not None
        self.abort(_ID, None, FinishReason.ABORT)
        self._events = [event for event in self._events if event.request_id != _ID]
        self.parts = replace(self.parts, planner=audit.planner)
        self.parts.scheduler.config = audit.limits
        self._audit = None


def _sum_up(found: Mismatch | None, tokens: int) -> AuditStats:
    if found is None:
        return AuditStats(tokens, 0, 0)
    level = logging.INFO if found.near_tie else logging.ERROR
    logger.log(
        level,
        "audit: speculation changed token %d of an answer; the two scores are %.3g apart (%s)",
        found.position,
        found.gap,
        "a near-tie" if found.near_tie else "a fault",
    )
    return AuditStats(found.position + 1, int(found.near_tie), int(not found.near_tie))
