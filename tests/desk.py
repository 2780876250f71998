"""A scheduler without a model, for tests of who gets what."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.pages import TARGET, PagePool
from engine.config import SchedulerConfig
from engine.pace import PassCost
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence, Status
from engine.types import Request, SamplingParams


class Desk:
    """A scheduler, and a target that accepts as many drafts as it is told to."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        budget: int = 32,
        most: int = 8,
        reuse: bool = True,
        *,
        stretch: float = 2.0,
        logprob_rows: int = 128,
        cost: PassCost | None = None,
    ) -> None:
        self.pool = PagePool(num_pages, page_size, prefix_reuse=reuse)
        config = SchedulerConfig(
            max_batch_tokens=budget,
            max_sequences=most,
            decode_stretch=stretch,
            max_logprob_rows=logprob_rows,
        )
        self.scheduler = Scheduler(config, self.pool, cost)
        self.budget, self.most = budget, most
        self._tickets = 0

    def add(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        max_draft: int = 0,
        prompt_logprobs: int | None = None,
    ) -> list[Sequence]:
        """A request's choices; a number stands for a prompt of that length like no other."""
        if isinstance(prompt, int):
            prompt = tuple(1000 * self._tickets + i for i in range(prompt))
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs)
        request = Request(f"r{self._tickets}", prompt, params, priority=priority)
        made = [
            Sequence(
                request=request,
                choice=i,
                ticket=self._tickets,
                seed=0,
                table=self.pool.new_table(""),
                drafter="lookup",
                draft_limit=max_draft,
                limit=len(prompt) + max_tokens,
            )
            for i in range(n)
        ]
        self._tickets += 1
        for sequence in made:
            self.scheduler.add(sequence)
        return made

    def step(self, accepted: int = 0) -> StepPlan:
        """Plans, runs and commits one step, holding it to its limits."""
        plan = self.scheduler.plan()
        self.finish(plan, accepted)
        return plan

    def finish(self, plan: StepPlan, accepted: int = 0) -> None:
        """Runs and commits a planned step, holding it to its limits."""
        self.check_plan(plan)
        for part in plan.scheduled:
            sequence, table = part.sequence, part.sequence.table
            table.num_cached[TARGET] += part.num_feed
            if part.samples:
                sequence.append([7] * (1 + min(accepted, part.granted_drafts)))
                sequence.last_draft = part.granted_drafts
                table.num_cached[TARGET] = len(sequence.tokens) - 1
            self.pool.commit(table, sequence.tokens)
            self.pool.truncate(table, len(sequence.tokens))
            if sequence.room <= 0 and (sequence.num_generated or not sequence.num_uncached):
                self.scheduler.remove(sequence)
        self.check_state()

    def check_plan(self, plan: StepPlan) -> None:
        used = sum(p.num_feed + p.granted_drafts for p in plan.scheduled)
        assert used <= self.budget
        assert len(plan.scheduled) <= len(self.scheduler.running) <= self.most
        assert len({id(p.sequence) for p in plan.scheduled}) == len(plan.scheduled)
        for part in plan.scheduled:
            sequence = part.sequence
            assert sequence.status is Status.RUNNING
            assert 1 <= part.num_feed <= sequence.num_uncached
            cached = sequence.table.num_cached[TARGET]
            room = len(sequence.table.pages) * self.pool.page_size
            assert cached + part.num_feed + part.granted_drafts <= room, "no page to write to"
            assert part.samples == (part.num_feed == sequence.num_uncached and sequence.room > 0)
            if part.granted_drafts:
                assert part.samples
                assert part.granted_drafts <= min(sequence.draft_limit, sequence.room - 1)

    def check_state(self) -> None:
        scheduler = self.scheduler
        self.pool.check(s.table for s in scheduler.running)
        assert all(not s.table.pages for s in scheduler.waiting)
        assert all(s.status is Status.WAITING for s in scheduler.waiting)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda s: s.order)

    def drain(self, limit: int = 2000) -> int:
        """Steps to the end; every step must move something."""
        for count in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                assert self.pool.num_used == 0
                return count
            assert self.step().scheduled, "stuck"
        raise AssertionError("never done")


def served(plan: StepPlan) -> list[Sequence]:
    return [part.sequence for part in plan.scheduled]


def start(desk: Desk, sequences: Iterable[Sequence]) -> None:
    """Steps until all of them decode."""
    for _ in range(100):
        if all(s.num_generated for s in sequences):
            return
        desk.step()
    raise AssertionError("not started")
