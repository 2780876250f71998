"""The engine: requests in, steps, events out. Single-threaded; no asyncio, no text."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from engine.batch import build_batch
from engine.cache.pages import PagePool
from engine.commit import commit
from engine.config import NO_DRAFTER
from engine.control.planner import Assignment, Planner
from engine.draft.drafter import DraftProposal, Verdict
from engine.draft.grammar import within_grammars
from engine.draft.portfolio import DrafterPortfolio
from engine.errors import CorruptedLogits, RequestFailed
from engine.judge import NOTHING, Judge, Judgement
from engine.laps import Laps
from engine.layout import StepLayout, lay_out
from engine.meter.meter import Meter
from engine.model.passes import Pass, Runner
from engine.move import move_accepted
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence, Status
from engine.statistics import completed, step_stats
from engine.stats import StepStats
from engine.status import describe, report
from engine.step_view import view_step
from engine.types import Event, Failed, Finished, FinishReason, Request

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
    meter: Meter
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
        max_nodes: the same of drafts that branch, which `max_draft` keeps from going deeper.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        max_model_len: int,
        default_drafters: tuple[str, ...],
        max_draft: int,
        max_nodes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts = parts
        self.max_model_len = max_model_len
        self.default_drafters = default_drafters
        self.max_draft = max_draft
        self.max_nodes = max_nodes
        self.clock = clock
        self._requests: dict[str, list[Sequence]] = {}  # choices still alive
        self._events: list[Event] = []  # of adds and aborts between steps
        self._tickets = 0
        self._laps: Laps | None = None  # of the last step

    # -- requests ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events)

    def add(self, request: Request) -> None:
        """Queues a request that `RequestRules.validate` has passed."""
        if not self._requests and self._laps is not None:
            self._laps.rest()
        ask = request.speculation
        wish, cap = ask.num_speculative_tokens, self.max_draft
        seed = request.sampling.seed
        drafters = (ask.drafter,) if ask.drafter else self._default_drafters(request)
        never = ask.enabled is False or drafters == (NO_DRAFTER,)
        common = {
            "ticket": self._tickets,
            "seed": secrets.randbits(64) if seed is None else seed % 2**64,
            "drafter": drafters[0],
            "drafters": drafters,
            "verification": self.parts.judge.rule_for(request.sampling),
            "draft_limit": 0 if never else cap if wish is None else min(wish, cap),
            "max_nodes": self.max_nodes,
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
        """What a grammar forces is certain, and a predicted answer the best guess there is: who
        reads them comes first."""
        names, drafters = self.default_drafters, self.parts.drafters
        first = drafters.grammar_readers if request.sampling.grammar is not None else ()
        if request.speculation.prediction:
            first = (*first, *drafters.prediction_readers)
        return (*first, *(n for n in names if n not in (*first, NO_DRAFTER))) if first else names

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        """Ends a request or one of its choices now; unknown ids are ignored, since the
        request may just have ended by itself."""
        for sequence in list(self._requests.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._finish(sequence, reason)

    def speculation(self) -> dict[str, Any]:
        """What planner and meter know: see `engine.status`."""
        return describe(self.parts.planner, self.parts.meter, self.parts.drafters.names)

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
        parts, stats = self.parts, None
        laps = self._laps = Laps(self.clock, self._laps)
        plan = laps.time("schedule", parts.scheduler.plan)
        if plan.scheduled:
            try:
                chosen = laps.time("choose", parts.planner.choose, plan)
                proposal = laps.time("draft", self._draft, plan, chosen)
                layout = lay_out(plan, proposal.tokens, chosen.drafters, proposal.parents)
                passed = laps.time("verify", self._run_target, layout)
                judgements = laps.time("judge", parts.judge.judge, layout, proposal, passed.logits)
                verify_seconds = laps.time("wait", passed.seconds)
            except Exception as error:
                self._fail_step(plan, error)
            else:
                verdicts = laps.time("commit", self._commit, layout, judgements, passed, laps)
                stats = step_stats(plan, proposal, verdicts, laps, verify_seconds, parts.scheduler)
                laps.time("learn", self._learn, plan, verdicts, stats)
                stats = self._end_complete(plan, stats)
        return StepOutput(self._take_events(), stats)

    def _draft(self, plan: StepPlan, chosen: Assignment) -> DraftProposal:
        drafters = self.parts.drafters
        proposal = drafters.propose(plan.sequences, chosen.lengths, chosen.drafters)
        return within_grammars(proposal, plan.sequences)

    def _run_target(self, layout: StepLayout) -> Pass:
        """One packed pass over all fed tokens and drafts, with the features that drafters need. A
        device has then been told what to do, and is waited for when tokens are drawn."""
        target, pool = self.parts.target, self.parts.pool
        spans, size, pages = layout.spans(), pool.page_size, pool.num_pages
        batch = build_batch(spans, size, pages, target.device, target.min_rows)
        features = self.parts.drafters.features([rows.sequence for rows in layout.sequences])
        return target.forward(batch, features)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """Fails the requests of a step that raised; called while its exception is handled."""
        logger.exception("a step of %d sequences failed", len(plan.scheduled))
        failure = RequestFailed(_STEP_FAILED + type(error).__name__)
        for sequence in plan.sequences:
            self._fail(sequence.request.request_id, failure)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # -- after the verdict ---------------------------------------------------------------

    def _commit(
        self, layout: StepLayout, judgements: Seq[Judgement], passed: Pass, laps: Laps
    ) -> list[Verdict]:
        """Commits every verdict and tells the drafters.

        Returns:
            What every scheduled sequence was given: nothing where its request has failed.
        """
        judged = list(zip(layout.sequences, judgements, strict=True))
        for rows, judgement in judged:  # before all else: other choices fail with it
            if judgement.corrupted:
                sequence = rows.sequence
                failure = CorruptedLogits(len(sequence.tokens))
                self._fail(sequence.request.request_id, failure)
            elif judgement.failure is not None:
                failed = RequestFailed(judgement.failure)
                self._fail(rows.sequence.request.request_id, failed)
        kept = {r.sequence: j for r, j in judged if r.sequence.status is Status.RUNNING}
        ways = [(r, j.way) for r, j in judged if j.way and r.sequence in kept]
        move_accepted(ways, self.parts.target, passed.features)
        for rows, judgement in judged:
            if rows.sequence in kept:
                self._events += commit(
                    rows, judgement, self.parts.pool, laps, self.parts.meter.of_request
                )
        verdicts = {sequence: judgement.verdict for sequence, judgement in kept.items()}
        self.parts.drafters.observe(view_step(layout.sequences, verdicts, passed.features))
        return [kept.get(r.sequence, NOTHING).verdict for r in layout.sequences]

    def _learn(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> None:
        """What was won is measured before anybody learns from it."""
        drafted = sum(verdict.drafted for verdict in verdicts)
        self.parts.scheduler.observe(drafted, stats.verify_seconds)
        gain = self.parts.meter.observe(plan, verdicts, stats)
        self.parts.planner.observe(plan, verdicts, stats, gain)

    def _end_complete(self, plan: StepPlan, stats: StepStats) -> StepStats:
        """Ends complete sequences; only now, so that the planner has measured their last tokens.

        Returns:
            The step's numbers, with what is known only now.
        """
        for sequence in [s for s in plan.sequences if s.status is Status.RUNNING]:
            if sequence.target_passes == 1:
                self.parts.meter.leave_out_prompt(sequence)
            reason = sequence.finish_reason(self.parts.judge.eos_token_ids)
            # Without room from the start (max_tokens = 0) it is over once the prompt is read.
            if reason is not None and (sequence.num_generated or not sequence.num_uncached):
                self._finish(sequence, reason)
        found = report(self.parts.planner, self.parts.meter, self.parts.drafters.names)
        return completed(stats, self.parts.scheduler, found)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request_id = sequence.request.request_id
        stats = replace(sequence.stats(), speedup=self.parts.meter.of_request(sequence))
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
        self.parts.meter.release(sequence)
        self._requests[request_id].remove(sequence)
        if not self._requests[request_id]:
            del self._requests[request_id]
