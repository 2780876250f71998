"""Who gets which tokens into the next step: queues, token budget, pages, preemption.

There are no phases. A sequence has committed tokens the target has not been fed yet; the
scheduler decides how many of them go into the step. One left is a decode, many left is a
prefill (first, chunked, or again after a preemption), and whoever is fed to the end gets a
new token, plus one for every draft token that is accepted.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from engine.budget import Limits, PromptBudget, share_out
from engine.cache.pages import TARGET, PagePool
from engine.config import SchedulerConfig
from engine.pace import Pace, PassCost
from engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part in a step.

    Attributes:
        num_feed: committed tokens to feed, from `num_cached` on.
        samples: whether the feed reaches the end, so that a new token is drawn.
        granted_drafts: draft tokens, on whatever branches, that have pages and budget; the
            planner may use fewer.
    """

    sequence: Sequence
    num_feed: int
    samples: bool
    granted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decided for one step."""

    scheduled: tuple[ScheduledSequence, ...]
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are scheduled."""
        return [scheduled.sequence for scheduled in self.scheduled]

    @property
    def prefill_tokens(self) -> int:
        """Committed tokens fed beyond the one that every decode needs."""
        return sum(s.num_feed - 1 if s.samples else s.num_feed for s in self.scheduled)


class Scheduler:
    """Continuous batching over a page pool.

    Sequences are admitted by priority, then in order of arrival; how those that were share what
    a step reads of prompts says `engine.budget`. When pages run out, draft lengths shrink first;
    then the youngest sequence gives its pages back and is queued again.

    Args:
        config: limits of a step and of the queue.
        pool: the pages.
        cost: of passes, which bounds steps that decode; None = unknown.
    """

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, cost: PassCost | None = None
    ) -> None:
        self.config = config
        self.pool = pool
        self.cost = cost
        self.pace = Pace(cost)
        self._prompts: PromptBudget | None = None  # of the last plan
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._unread: set[Sequence] = set()  # admitted and not fed yet
        self._planned: dict[Sequence, int] = {}  # sequence -> committed tokens it is fed
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out, wherever it is, and frees its pages."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        self._unread.discard(sequence)
        self.pool.free(sequence.table)
        sequence.status = Status.FINISHED

    def observe(self, drafted: int, seconds: float) -> None:
        """Learns from the pass of the last plan.

        Args:
            drafted: draft tokens that were in it.
            seconds: that it took.
        """
        prompts = self._prompts
        if prompts is not None and prompts.decodes and self.config.decode_stretch:
            self.pace.observe(*prompts.loads(drafted), seconds)

    def plan(self) -> StepPlan:
        """Decides the next step and reserves the pages it writes to."""
        self._planned = {}
        self._preemptions = self._prefix_query_tokens = self._prefix_hit_tokens = 0
        self._plan_decodes()
        self._admit()
        budget = self.config.max_batch_tokens - len(self._planned)
        budget, reserved = self._split_budget(budget)
        budget -= self._plan_prompts(budget)
        drafts = self._grant_drafts(budget + reserved)
        return StepPlan(
            scheduled=tuple(
                ScheduledSequence(s, fed, fed == s.num_uncached and s.room > 0, drafts.get(s, 0))
                for s, fed in self._planned.items()
            ),
            preemptions=self._preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    # -- the parts of a plan -------------------------------------------------------------

    def _plan_decodes(self) -> None:
        """Every decoding sequence is fed its one token."""
        for sequence in sorted(self.running, key=lambda s: s.order):
            decodes = sequence.status is Status.RUNNING and sequence.num_uncached == 1
            if decodes and sequence not in self._unread and self._reserve_or_preempt(sequence):
                self._planned[sequence] = 1

    def _admit(self) -> None:
        """Waiting sequences join while there is room for their whole prompt.

        A choice whose sibling is just computing pages of the same prompt is passed over: a
        step or two later it finds them in the prefix index.
        """
        prefilling = {id(s.request) for s in self.running if self._computes_shared_pages(s)}
        for sequence in list(self.waiting):
            if len(self.running) >= self.config.max_sequences:
                break
            if id(sequence.request) in prefilling:
                continue
            if self._preemptions or not self._start(sequence):
                break  # first come, first served: nobody overtakes for being smaller
            if self._computes_shared_pages(sequence):
                prefilling.add(id(sequence.request))

    def _split_budget(self, budget: int) -> tuple[int, int]:
        """Sets aside tokens for drafts, but never more than half while prompts want them."""
        wanted = sum(max(s.draft_limit, s.max_nodes) for s in self._planned if s.draft_limit)
        busy = len(self._planned) < len(self.running)
        reserved = min(wanted, budget // 2 if busy else budget)
        return budget - reserved, reserved

    def _plan_prompts(self, budget: int) -> int:
        """Sequences with more than their last token to feed share the budget; returns what
        they use of it."""
        stretch, rows = self.config.decode_stretch, self.config.max_logprob_rows
        limits = Limits(budget, rows, stretch, self.pace.factor)
        prompts = self._prompts = PromptBudget(limits, list(self._planned), self.cost)
        if self._planned and stretch and self.pace.wants_plain:
            return 0
        reading = [s for s in self.running if s not in self._planned]
        share_out(sorted(reading, key=lambda s: s.order), prompts)
        for sequence, fed in prompts.fed.items():
            if sequence in self._unread:
                self._begin(sequence)
            self._planned[sequence] = min(fed, sequence.num_uncached)
        return sum(prompts.fed.values())

    def _begin(self, sequence: Sequence) -> None:
        """An admitted sequence gets its first tokens: what others have computed since it was
        admitted is found now. That never takes more pages than it has."""
        self._unread.remove(sequence)
        self.pool.free(sequence.table)
        self._match_and_reserve(sequence)
        hit = sequence.table.num_cached[TARGET]
        self._prefix_query_tokens += len(sequence.tokens)
        self._prefix_hit_tokens += hit
        if sequence.first_scheduled is None:
            sequence.cached_prompt_tokens = hit

    def _computes_shared_pages(self, sequence: Sequence) -> bool:
        """Whether full pages of its prompt are still to come, for siblings to find."""
        size = self.pool.page_size
        shareable = (sequence.prompt_length - 1) // size * size
        return self.pool.prefix_reuse and sequence.table.num_cached[TARGET] < shareable

    def _start(self, sequence: Sequence) -> bool:
        """Moves a sequence to `running` with pages for all its tokens, if there are enough
        and every running sequence could still take its next page (else it would be preempted
        right away)."""
        if not self._match_and_reserve(sequence) or self.pool.num_available < len(self.running):
            self.pool.free(sequence.table)
            return False
        self.waiting.remove(sequence)
        self._unread.add(sequence)
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return True

    def _match_and_reserve(self, sequence: Sequence) -> bool:
        """Takes the pages that the prefix index has, and new ones for all other tokens; whether
        there are enough."""
        # A prompt whose log probabilities are wanted must pass through the model whole.
        if not sequence.wants_prompt_logprobs:
            self.pool.match_prefix(sequence.table, sequence.tokens)
        return self.pool.reserve(sequence.table, len(sequence.tokens))

    def _reserve_or_preempt(self, sequence: Sequence) -> bool:
        """Reserves the page of a decode's new token, taking pages from younger sequences.

        Returns:
            False if the sequence itself was the youngest and had to go.
        """
        while not self.pool.reserve(sequence.table, len(sequence.tokens)):
            victim = max((s for s in self.running if s not in self._planned), key=lambda s: s.order)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a sequence's pages and queues it again; it is recomputed when it returns."""
        self.running.remove(sequence)
        self._unread.discard(sequence)
        self.pool.free(sequence.table)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self._preemptions += 1
        self.add(sequence)

    def _grant_drafts(self, budget: int) -> dict[Sequence, int]:
        """Shares budget and free pages among decoding sequences; nobody is preempted for a
        draft. A draft is never longer than the room left, less the token that follows it; one
        that branches may be longer, but no deeper."""
        wants = {
            s: s.most_drafts
            for s, fed in self._planned.items()
            if fed == s.num_uncached and s.num_generated and s.most_drafts
        }
        granted: dict[Sequence, int] = {}
        for left, (sequence, want) in zip(range(len(wants), 0, -1), wants.items(), strict=True):
            length = min(want, -(-budget // left))
            while length and not self.pool.reserve(
                sequence.table, sequence.table.num_cached[TARGET] + self._planned[sequence] + length
            ):
                length -= 1
            granted[sequence] = length
            budget -= length
        return granted
