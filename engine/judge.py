"""The verdict of a step: from the target's logits to the tokens every sequence emits.

Words: a *draft* token was guessed; an *accepted* one is what the target would have said; the
token after the accepted ones is the target's own, a *correction* where a draft token was
refused, a *bonus* where none was.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from engine.batch import Span
from engine.cache.pages import TARGET
from engine.draft.drafter import DraftProposal, Verdict
from engine.sampling.logprobs import token_logprobs
from engine.sampling.processors import SamplingRow, Selector
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence
from engine.types import SamplingParams, TokenLogprobs
from engine.verification import choose_rule, weigh_draft


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the target said about one scheduled sequence.

    Attributes:
        verdict: emitted tokens; none if the sequence was not fed to its end.
        logprobs: of the emitted tokens, if the request wants them.
        prompt_logprobs: of the prompt tokens that this step's rows predict, if wanted.
        corrupted: the logits are not numbers; the request must fail.
    """

    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    corrupted: bool = False


NOTHING = Judgement(Verdict([], 0, 0))


class Judge:
    """Samples the target's tokens and compares them with the drafts.

    In *match* verification the target's own token is drawn at every row with noise that only
    seed, choice, position and token id decide (or is the argmax, for greedy requests), and a
    draft token is accepted while it is equal. So the emitted text does not depend on drafts.
    Rows are drawn depth by depth, since what follows a refused draft token is never needed.
    Drafts with probabilities may be judged by them instead: see `engine.verification`.

    Args:
        vocab_size: ids from here on are padding of the model's output layer.
        eos_token_ids: tokens that end a sequence.
        verification: which rule judges drafts with probabilities: see `choose_rule`.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], verification: str = "auto"
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._verification = verification

    def rule_for(self, params: SamplingParams) -> str:
        """The rule for drafts of a new request: its sequences' `verification`."""
        return choose_rule(self._verification, params)

    def judge(
        self, plan: StepPlan, proposal: DraftProposal, logits: torch.Tensor
    ) -> list[Judgement]:
        """One judgement per scheduled sequence.

        Args:
            logits: [R, V], the rows of all sequences in order, `num_logit_rows` of each.
        """
        counts = list(map(num_logit_rows, plan.scheduled, proposal.tokens))
        ends = list(accumulate(counts))
        chosen: list[list[int]] = [[] for _ in counts]
        drafts: list[list[int] | None] = [None for _ in counts]  # to be matched
        for i, scheduled in enumerate(plan.scheduled):
            if scheduled.samples:
                weights = proposal.probabilities[i] if proposal.probabilities else None
                if weights is None or scheduled.sequence.verification == "match":
                    drafts[i] = proposal.tokens[i]
                else:
                    draft, rows = proposal.tokens[i], logits[ends[i] - counts[i] : ends[i]]
                    chosen[i] = self._weigh(scheduled.sequence, draft, weights, rows)
        selector = Selector(logits, self.vocab_size)
        self._match(plan, drafts, selector, ends, chosen)
        sound = selector.sound()
        judgements = []
        for i, scheduled in enumerate(plan.scheduled):
            # Rows behind a refused draft token would not be there without drafts: they decide
            # nothing.
            unused = 1 + len(proposal.tokens[i]) - len(chosen[i]) if scheduled.samples else 0
            first = ends[i] - counts[i]
            if all(sound[first : ends[i] - unused]):
                draft = proposal.tokens[i]
                judgements.append(self._judge_one(scheduled, draft, chosen[i], logits, first))
            else:
                judgements.append(Judgement(NOTHING.verdict, corrupted=True))
        return judgements

    def _weigh(
        self, sequence: Sequence, draft: list[int], weights: torch.Tensor, rows: torch.Tensor
    ) -> list[int]:
        """What one sequence says next, its draft having been drawn from `weights`."""
        logits = rows[-1 - len(draft) :, : self.vocab_size]
        contexts = partial(self._row, sequence, draft, step=sequence.target_passes)
        return weigh_draft(sequence.verification, logits, contexts, draft, weights)

    def _match(
        self,
        plan: StepPlan,
        drafts: list[list[int] | None],
        selector: Selector,
        ends: list[int],
        chosen: list[list[int]],
    ) -> None:
        """Appends to `chosen` the target's own tokens of every sequence, up to the first that
        differs from its draft: rows beyond that one are never looked at. None = not matched.

        Args:
            selector: of the step's logits.
            ends: where each sequence's rows end.
        """
        alive = [i for i, draft in enumerate(drafts) if draft is not None]
        depth = 0
        while alive:
            picks = [ends[i] - 1 - len(drafts[i] or []) + depth for i in alive]
            contexts = [self._row(plan.scheduled[i].sequence, drafts[i], depth) for i in alive]
            tokens = selector.select(picks, contexts)
            for i, token in zip(alive, tokens, strict=True):
                chosen[i].append(token)
            alive = [i for i in alive if (drafts[i] or [])[depth : depth + 1] == chosen[i][-1:]]
            depth += 1

    def _row(
        self, sequence: Sequence, draft: list[int] | None, depth: int, step: int = 0
    ) -> SamplingRow:
        """What the row at `depth` sees: committed tokens and the draft tokens before it."""
        return SamplingRow(
            params=sequence.request.sampling,
            prompt=sequence.request.prompt,
            generated=sequence.tokens[sequence.prompt_length :] + (draft or [])[:depth],
            position=len(sequence.tokens) + depth,
            seed=sequence.seed,
            choice=sequence.choice,
            eos_token_ids=self.eos_token_ids,
            step=step,
        )

    def _judge_one(
        self,
        scheduled: ScheduledSequence,
        draft: list[int],
        target_tokens: list[int],
        logits: torch.Tensor,
        first: int,
    ) -> Judgement:
        """One sequence's judgement; its rows of the step's logits begin at `first`."""
        sequence, params = scheduled.sequence, scheduled.sequence.request.sampling
        verdict, logprobs = NOTHING.verdict, None
        if scheduled.samples:
            accepted = len(target_tokens) - 1
            emitted = self._cut(sequence, target_tokens)
            verdict = Verdict(emitted, len(draft), min(accepted, len(emitted)))
            if params.logprobs is not None:
                last = first + num_logit_rows(scheduled, draft)
                own = logits[last - 1 - len(draft) : last][: len(emitted)]
                logprobs = tuple(token_logprobs(own, emitted, params.logprobs, self.vocab_size))
        return Judgement(verdict, logprobs, self._prompt_logprobs(scheduled, logits, first))

    def _prompt_logprobs(
        self, scheduled: ScheduledSequence, logits: torch.Tensor, first: int
    ) -> tuple[TokenLogprobs, ...]:
        predicted = predicted_prompt_tokens(scheduled)
        if not predicted:
            return ()
        sequence = scheduled.sequence
        top = sequence.request.sampling.prompt_logprobs
        assert top is not None
        start = sequence.table.num_cached[0] + 1
        tokens = sequence.request.prompt[start : start + predicted]
        return tuple(
            token_logprobs(logits[first : first + predicted], tokens, top, self.vocab_size)
        )

    def _cut(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Emitted tokens up to the first that ends the sequence."""
        params = sequence.request.sampling
        for i, token in enumerate(tokens[: sequence.room]):
            is_eos = token in self.eos_token_ids and not params.ignore_eos
            if is_eos or token in params.stop_token_ids:
                return tokens[: i + 1]
        return tokens[: sequence.room]


def predicted_prompt_tokens(scheduled: ScheduledSequence) -> int:
    """How many rows of the step predict prompt tokens whose log probabilities are wanted."""
    sequence = scheduled.sequence
    if not sequence.wants_prompt_logprobs:
        return 0
    start = sequence.table.num_cached[0]
    return max(0, min(start + scheduled.num_feed, sequence.prompt_length - 1) - start)


def num_logit_rows(scheduled: ScheduledSequence, draft: Seq[int]) -> int:
    """Rows at the end of the sequence's query tokens that need logits."""
    if predicted_prompt_tokens(scheduled):
        return scheduled.num_feed + len(draft)
    return 1 + len(draft) if scheduled.samples else 0


def lay_out(plan: StepPlan, proposal: DraftProposal) -> list[Span]:
    """The query tokens of every scheduled sequence: what it is fed, its draft behind."""
    return [_span(*one) for one in zip(plan.scheduled, proposal.tokens, strict=True)]


def _span(scheduled: ScheduledSequence, draft: list[int]) -> Span:
    table = scheduled.sequence.table
    start = table.num_cached[TARGET]
    fed = scheduled.sequence.tokens[start : start + scheduled.num_feed]
    return Span(fed + draft, start, table, num_logit_rows(scheduled, draft))
