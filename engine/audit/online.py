"""Audits a serving engine while nobody wants anything of it.

A share of the finished greedy requests is run again without speculation. Callers come first:
an audit begins only after a while without any request, feeds few tokens a step, and is dropped
the moment a request arrives, to begin anew later. It runs in an engine of its own, on the same
model and the same pages, of which it takes free ones only and gives them back at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.audit.compare import Mismatch, first_mismatch
from engine.audit.recompute import NEAR_TIE
from engine.cache.pages import PRIVATE
from engine.config import NO_DRAFTER, SchedulerConfig
from engine.control.costs import CostModel
from engine.control.planner import FixedPlanner
from engine.core import Engine
from engine.draft.portfolio import DrafterPortfolio
from engine.meter.meter import Meter
from engine.scheduler import Scheduler
from engine.stats import AuditStats
from engine.types import Event, Failed, Finished, FinishReason, Request, SpeculationParams, Tokens

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
    """An answer that is being said again, in an engine of its own."""

    answer: _Answer
    request: Request
    engine: Engine
    tokens: list[int] = field(default_factory=list)


class OnlineAudit:
    """An `IdleTask` that audits an engine's answers.

    Args:
        engine: that serves; its model, judge and pages are used, nothing else of it.
        rate: share of greedy requests to audit, 0 to 1.
        dtype: of the model; decides what is a near-tie.
    """

    def __init__(self, engine: Engine, rate: float, dtype: str) -> None:
        self._serving = engine
        self._rate = rate
        self._near_tie = NEAR_TIE[dtype]
        self._due = 0.0  # audits owed to the requests seen so far
        self._watched: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque(maxlen=_MOST_WAITING)
        self._audit: _Audit | None = None
        self._idle = False  # nobody has come since the last audit

    @property
    def patience(self) -> float | None:
        """See `IdleTask.patience`."""
        if self._audit is not None:
            return 0.0
        if not self._waiting:
            return None
        return 0.0 if self._idle else PATIENCE

    # -- callers -------------------------------------------------------------------------

    def watch(self, request: Request) -> None:
        """Makes way for a caller's request, and picks it for an audit if its turn has come."""
        self._idle = False
        if self._audit is not None:
            self._waiting.appendleft(self._audit.answer)
            self.close()
        if request.sampling.greedy:
            self._due += self._rate
            if self._due >= 1.0:
                self._due -= 1.0
                self._watched[request.request_id] = _Answer(request)

    def observe(self, events: Seq[Event]) -> None:
        """Notes what watched requests say; an answer that drafts helped with is audited."""
        for event in events:
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

    def step(self) -> AuditStats | None:
        """One step of the audit that runs, or of the next one."""
        if self._audit is None:
            if not self._waiting:
                return None
            self._audit = self._begin(self._waiting.popleft())
            self._idle = True
        return self._follow(self._audit, self._audit.engine.step().events)

    def close(self) -> None:
        """Forgets the audit that runs; its pages are free again."""
        if self._audit is not None:
            self._audit.engine.abort(_ID, None, FinishReason.ABORT)
            self._audit = None

    def _begin(self, answer: _Answer) -> _Audit:
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
        served = self._serving.parts
        # No planner may learn from this, no drafter hear of it, and no metric count it.
        parts = replace(
            served,
            scheduler=Scheduler(_QUIET, served.pool),
            drafters=DrafterPortfolio({}, served.judge.vocab_size),
            planner=FixedPlanner(),
            meter=Meter(CostModel()),
        )
        engine = Engine(
            parts,
            max_model_len=self._serving.max_model_len,
            default_drafters=(NO_DRAFTER,),
            max_draft=0,
        )
        engine.add(request)
        return _Audit(answer, request, engine)

    def _follow(self, audit: _Audit, events: Seq[Event]) -> AuditStats | None:
        """Reads the events of an audit's step; returns the result once there is one."""
        ended = failed = False
        for event in events:
            if isinstance(event, Tokens):
                audit.tokens += event.token_ids
            ended |= isinstance(event, Finished | Failed)
            failed |= isinstance(event, Failed)
        said = audit.answer.tokens if ended else audit.answer.tokens[: len(audit.tokens)]
        if not ended and audit.tokens == said:
            return None
        self.close()
        if failed:
            return None  # the engine has logged why
        parts = audit.engine.parts
        found = first_mismatch(parts, audit.request, said, audit.tokens, self._near_tie)
        return _sum_up(found, len(said))


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
