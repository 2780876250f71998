"""The engine: requests in, steps, events out. Single-threaded; no asyncio, no text."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.batch import build_batch
from engine.cache.pages import TARGET, PagePool
from engine.config import NO_DRAFTER
from engine.control.planner import Planner
from engine.control.report import leave_out_prompt, report, speedup_of
from engine.control.status import describe
from engine.draft.drafter import DraftProposal, Verdict
from engine.draft.portfolio import DrafterPortfolio
from engine.errors import CorruptedLogits, RequestFailed
from engine.judge import NOTHING, Judge, Judgement, lay_out
from engine.model.loader import Runner
from engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from engine.sequence import Sequence, Status
from engine.statistics import completed, step_stats
from engine.step_view import rows_of, view_step
from engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    StepStats,
    Tokens,
)

logger = logging.getLogger(__name__)
_STEP_FAILED = "The step that served this request failed: "


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The collaborators of an engine; injected, so that tests can exchange any of them."""

    target: Runner
    pool: PagePool
    scheduler: Scheduler
    drafters: DrafterPortfolio
    planner: Planner
    judge: Judge


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Events for callers; what the step did, if it did anything."""

    events: list[Event]
    stats: StepStats | None


class Engine:
    """Serves many requests at once by repeating `step`.

    Args:
        parts: the collaborators.
        max_model_len: most tokens of prompt and completion.
        default_drafters: drafters of requests that do not name one, at least one name.
        max_draft: the server's cap: most draft tokens per sequence and step, whatever is wished.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        max_model_len: int,
        default_drafters: tuple[str, ...],
        max_draft: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts = parts
        self.max_model_len = max_model_len
        self.default_drafters = default_drafters
        self.max_draft = max_draft
        self.clock = clock
        self._requests: dict[str, list[Sequence]] = {}  # choices still alive
        self._events: list[Event] = []  # of adds and aborts between steps
        self._tickets = 0
        self._ended: float | None = None  # when the last step did, if it left work to do

    # -- requests ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events)

    def add(self, request: Request) -> None:
        """Queues a request that `RequestRules.validate` has passed."""
        ask = request.speculation
        wanted = self.max_draft if ask.max_draft is None else min(ask.max_draft, self.max_draft)
        seed = request.sampling.seed
        drafters = (ask.drafter,) if ask.drafter else self._default_drafters(request)
        common = {
            "ticket": self._tickets,
            "seed": secrets.randbits(64) if seed is None else seed % 2**64,
            "drafter": drafters[0],
            "drafters": drafters,
            "verification": self.parts.judge.rule_for(request.sampling),
            "max_draft": 0 if ask.enabled is False or drafters == (NO_DRAFTER,) else wanted,
            "limit": min(len(request.prompt) + request.sampling.max_tokens, self.max_model_len),
        }
        self._tickets += 1
        sequences = [
            Sequence(request, i, table=self.parts.pool.new_table(request.cache_salt), **common)  # type: ignore[arg-type]
            for i in range(request.sampling.n)
        ]
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            self.parts.scheduler.add(sequence)

    def _default_drafters(self, request: Request) -> tuple[str, ...]:
        """A predicted answer is the best guess there is: who reads it comes first."""
        names, readers = self.default_drafters, self.parts.drafters.prediction_readers
        if request.speculation.prediction and readers:
            return (*readers, *(n for n in names if n not in (*readers, NO_DRAFTER)))
        return names

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        """Ends a request or one of its choices now; unknown ids are ignored, since the
        request may just have ended by itself."""
        for sequence in list(self._requests.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._finish(sequence, reason)

    def speculation(self) -> dict[str, Any]:
        """What the planner knows, would do and has measured: see `engine.control.status`."""
        return describe(self.parts.planner, self.parts.drafters.names)

    def check(self) -> None:
        """Asserts that pages and queues agree with the live sequences.

        Raises:
            AssertionError: something leaked.
        """
        alive = [s for choices in self._requests.values() for s in choices]
        scheduler = self.parts.scheduler
        assert set(scheduler.waiting) | set(scheduler.running) == set(alive), "stray sequence"
        assert len(scheduler.waiting) + len(scheduler.running) == len(alive), "queued twice"
        assert all(not s.table.pages for s in scheduler.waiting), "a waiting sequence has pages"
        self.parts.pool.check(s.table for s in scheduler.running)

    # -- one step ------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Drafts, verifies and commits once for every scheduled sequence.

        A failure before the commit fails only the requests of this step: nothing of theirs
        has been committed, and everybody else's pages were not touched.
        """
        started, stats = self.clock(), None
        before, self._ended = started if self._ended is None else self._ended, None
        plan = self.parts.scheduler.plan()
        if plan.scheduled:
            try:
                proposal, judgements, marks = self._propose_and_verify(plan)
            except Exception as error:
                logger.exception("a step of %d sequences failed", len(plan.scheduled))
                failure = RequestFailed(_STEP_FAILED + type(error).__name__)
                for scheduled in plan.scheduled:
                    self._fail(scheduled.sequence.request.request_id, failure)
            else:
                verdicts = self._commit(plan, proposal, judgements)
                times = (before, started, *marks, self.clock())
                stats = step_stats(plan, proposal, verdicts, times, self.parts.scheduler)
                self.parts.planner.observe(plan, verdicts, stats)
                self._end_complete(plan)
                found = report(self.parts.planner, self.parts.drafters.names)
                stats = completed(stats, self.parts.scheduler, found)
                self._ended = times[-1] if self._requests else None
        events, self._events = self._events, []
        return StepOutput(events, stats)

    def _propose_and_verify(
        self, plan: StepPlan
    ) -> tuple[DraftProposal, list[Judgement], tuple[float, float, float]]:
        """The step up to the verdict, and when planning, drafting and the target's pass ended."""
        parts = self.parts
        now = self.clock()
        for new in [s.sequence for s in plan.scheduled if s.sequence.first_scheduled is None]:
            new.first_scheduled = now
        lengths = parts.planner.choose(plan)
        planned = self.clock()
        sequences = [s.sequence for s in plan.scheduled]
        proposal = parts.drafters.propose(sequences, lengths, [s.drafter for s in sequences])
        drafted = self.clock()
        logits = self._run_target(plan, proposal)
        verified = self.clock()
        return proposal, parts.judge.judge(plan, proposal, logits), (planned, drafted, verified)

    def _run_target(self, plan: StepPlan, proposal: DraftProposal) -> torch.Tensor:
        """One packed pass over all fed tokens and drafts."""
        target, pool = self.parts.target, self.parts.pool
        spans, size, pages = lay_out(plan, proposal), pool.page_size, pool.num_pages
        return target.forward(build_batch(spans, size, pages, target.device, target.min_rows))

    # -- after the verdict ---------------------------------------------------------------

    def _commit(
        self, plan: StepPlan, proposal: DraftProposal, judgements: Seq[Judgement]
    ) -> list[Verdict]:
        """Appends what was emitted, moves the caches on, frees surplus pages.

        Returns:
            What every scheduled sequence was given: nothing where its request has failed.
        """
        now = self.clock()
        rows = rows_of(plan, proposal)  # before the caches move on
        judged = list(zip(plan.scheduled, judgements, strict=True))
        for scheduled, judgement in judged:  # before all else: other choices fail with it
            if judgement.corrupted:
                sequence = scheduled.sequence
                failure = CorruptedLogits(len(sequence.tokens))
                self._fail(sequence.request.request_id, failure)
        kept = {s.sequence: j for s, j in judged if s.sequence.status is Status.RUNNING}
        for scheduled, judgement in judged:
            if scheduled.sequence in kept:
                self._advance(scheduled, judgement, now)
        verdicts = {sequence: judgement.verdict for sequence, judgement in kept.items()}
        self.parts.drafters.observe(view_step(rows, verdicts, {}))
        return [kept.get(s.sequence, NOTHING).verdict for s in plan.scheduled]

    def _advance(self, scheduled: ScheduledSequence, judgement: Judgement, now: float) -> None:
        """Commits one sequence's verdict."""
        sequence, verdict, pool = scheduled.sequence, judgement.verdict, self.parts.pool
        request_id, table = sequence.request.request_id, sequence.table
        if sequence.wants_prompt_logprobs:
            self._collect_prompt_logprobs(sequence, judgement)
        table.num_cached[TARGET] += scheduled.num_feed
        if scheduled.samples:
            sequence.append(verdict.emitted)
            # Accepted drafts were computed in place; the last emitted token is fed next.
            table.num_cached[TARGET] = len(sequence.tokens) - 1
            sequence.target_passes += 1
            sequence.draft_tokens += verdict.drafted
            sequence.accepted_tokens += verdict.accepted
            if sequence.first_token is None:
                sequence.first_token = now
            tokens = tuple(verdict.emitted)
            self._events.append(Tokens(request_id, sequence.choice, tokens, judgement.logprobs))
        pool.commit(table, sequence.tokens)
        pool.truncate(table, len(sequence.tokens))

    def _collect_prompt_logprobs(self, sequence: Sequence, judgement: Judgement) -> None:
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        # Where they belong, not at the end: after a preemption the prompt is read once more.
        start = sequence.table.num_cached[TARGET] + 1
        sequence.prompt_logprobs[start:] = judgement.prompt_logprobs
        if not sequence.wants_prompt_logprobs:
            entries = tuple(sequence.prompt_logprobs)
            self._events.append(PromptLogprobs(sequence.request.request_id, entries))

    def _end_complete(self, plan: StepPlan) -> None:
        """Ends complete sequences; only now, so that the planner has measured their last tokens."""
        for sequence in [s.sequence for s in plan.scheduled if s.sequence.status is Status.RUNNING]:
            if sequence.target_passes == 1:
                leave_out_prompt(self.parts.planner, sequence)
            reason = sequence.finish_reason(self.parts.judge.eos_token_ids)
            # Without room from the start (max_tokens = 0) it is over once the prompt is read.
            if reason is not None and (sequence.num_generated or not sequence.num_uncached):
                self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request_id = sequence.request.request_id
        stats = replace(sequence.stats(), speedup=speedup_of(self.parts.planner, sequence))
        self._remove(sequence)
        eos = self.parts.judge.eos_token_ids
        by_token = reason is FinishReason.STOP and sequence.finish_reason(eos) is reason
        stop_token = sequence.tokens[-1] if by_token else None
        self._events.append(Finished(request_id, sequence.choice, reason, stop_token, stats))

    def _fail(self, request_id: str, error: RequestFailed) -> None:
        if request_id in self._requests:
            for sequence in list(self._requests[request_id]):
                self._remove(sequence)
            self._events.append(Failed(request_id, error))

    def _remove(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self.parts.scheduler.remove(sequence)
        self.parts.drafters.release(sequence)
        self.parts.planner.release(sequence)
        self._requests[request_id].remove(sequence)
        if not self._requests[request_id]:
            del self._requests[request_id]
