"""The verdict of a step: from the target's logits to the tokens every sequence emits.

Words: a *draft* token was guessed; an *accepted* one is what the target would have said; the
token after the accepted ones is the target's own, a *correction* where a draft token was
refused, a *bonus* where none was.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from engine.draft.drafter import DraftProposal, Verdict
from engine.layout import SequenceRows, StepLayout
from engine.sampling import Draw, RowSampler, Sampler, SamplingRow, token_logprobs
from engine.sequence import Sequence
from engine.tree import follow, way_to
from engine.types import SamplingParams, TokenLogprobs
from engine.verification import choose_rule


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the target said about one scheduled sequence.

    Attributes:
        verdict: emitted tokens; none if the sequence was not fed to its end.
        logprobs: of the emitted tokens, if the request wants them.
        prompt_logprobs: of the prompt tokens that this step's rows predict, if wanted.
        corrupted: the logits are not numbers; the request must fail.
        failure: why the request must fail otherwise; None = it need not.
        way: of a draft that branches, its nodes that were accepted, one for each accepted token.
    """

    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    corrupted: bool = False
    failure: str | None = None
    way: tuple[int, ...] | None = None


NOTHING = Judgement(Verdict([], 0, 0))


class Judge:
    """Has the target's tokens drawn and makes verdicts of them.

    In *match* verification the target's own token is drawn at every row with noise that only
    seed, choice, position and token id decide (or is the argmax, for greedy requests), and a
    draft token is accepted while it is equal. So the emitted text does not depend on drafts.
    Drafts with probabilities may be judged by them instead: see `engine.verification`.

    Args:
        vocab_size: ids from here on are padding of the model's output layer.
        eos_token_ids: tokens that end a sequence.
        verification: which rule judges drafts with probabilities: see `choose_rule`.
        sampler: draws tokens from logits; None = row by row, wherever the logits are.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        verification: str = "auto",
        sampler: Sampler | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.sampler: Sampler = sampler or RowSampler(vocab_size)
        self._verification = verification

    def rule_for(self, params: SamplingParams) -> str:
        """The rule for drafts of a new request: its sequences' `verification`."""
        return choose_rule(self._verification, params)

    def judge(
        self, layout: StepLayout, proposal: DraftProposal, logits: torch.Tensor
    ) -> list[Judgement]:
        """One judgement per scheduled sequence.

        Args:
            layout: the step's rows.
            proposal: the drafts in it.
            logits: [R, V] of the rows that `layout` counts off.
        """
        weights = proposal.probabilities or [None] * len(layout.sequences)
        draws = list(map(self._draw, layout.sequences, weights))
        return [
            self._judge_one(rows, drawn.tokens, logits)
            if drawn.sound
            else Judgement(NOTHING.verdict, corrupted=True)
            for rows, drawn in zip(layout.sequences, self.sampler.draw(logits, draws), strict=True)
        ]

    def _draw(self, rows: SequenceRows, weights: torch.Tensor | None) -> Draw:
        """What is to be drawn for one sequence.

        Args:
            weights: probabilities that its draft was drawn from, if it has any.
        """
        sequence = rows.sequence
        rule = "match" if weights is None else sequence.verification
        # What rejection rules draw must not come again when a position is judged anew.
        step = 0 if rule == "match" else sequence.target_passes
        context = partial(self._row, sequence, rows.draft, step=step)
        if rows.parents is not None:
            context = partial(self._row_of_tree, rows, step=step)
        draft = rows.draft if rows.scheduled.samples else None
        return Draw(rows.logit_rows, draft, context, rule, weights, rows.parents)

    def _row_of_tree(self, rows: SequenceRows, number: int, step: int = 0) -> SamplingRow:
        """What the row after the last fed token (0) or after a node (its index + 1) sees."""
        assert rows.parents is not None
        before = [rows.draft[node] for node in way_to(number - 1, rows.parents)]
        return self._row(rows.sequence, before, len(before), step)

    def _row(self, sequence: Sequence, draft: Seq[int], depth: int, step: int = 0) -> SamplingRow:
        """What the row at `depth` sees: committed tokens and the draft tokens before it."""
        generated = [*sequence.output, *draft[:depth]]
        grammar = sequence.grammar
        return SamplingRow(
            params=sequence.request.sampling,
            prompt=sequence.request.prompt,
            generated=generated,
            position=len(sequence.tokens) + depth,
            seed=sequence.seed,
            choice=sequence.choice,
            eos_token_ids=self.eos_token_ids,
            step=step,
            allowed=None if grammar is None else grammar.allowed(generated),
        )

    def _judge_one(
        self, rows: SequenceRows, target_tokens: list[int], logits: torch.Tensor
    ) -> Judgement:
        """One sequence's judgement from what was drawn for it and the step's logits."""
        sequence, params = rows.sequence, rows.sequence.request.sampling
        if sequence.grammar is not None and sequence.grammar.failure is not None:
            return Judgement(NOTHING.verdict, failure=sequence.grammar.failure)
        verdict, logprobs, way = NOTHING.verdict, None, None
        if rows.scheduled.samples:
            accepted = len(target_tokens) - 1
            emitted = self._cut(sequence, target_tokens)
            verdict = Verdict(emitted, rows.num_drafts, min(accepted, len(emitted)))
            if rows.parents is not None:
                way = tuple(follow(emitted[: verdict.accepted], rows.draft, rows.parents))
            if params.logprobs is not None:
                own = logits[rows.judging_rows(way, len(emitted))]
                logprobs = tuple(token_logprobs(own, emitted, params.logprobs, self.vocab_size))
        return Judgement(verdict, logprobs, self._prompt_logprobs(rows, logits), way=way)

    def _prompt_logprobs(
        self, rows: SequenceRows, logits: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        count, first, start = rows.num_prompt_logprobs, rows.first_logit, rows.position + 1
        if not count:
            return ()
        request = rows.sequence.request
        top = request.sampling.prompt_logprobs
        assert top is not None
        tokens = request.prompt[start : start + count]
        return tuple(token_logprobs(logits[first : first + count], tokens, top, self.vocab_size))

    def _cut(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Emitted tokens up to the first that ends the sequence."""
        params = sequence.request.sampling
        for i, token in enumerate(tokens[: sequence.room]):
            is_eos = token in self.eos_token_ids and params.ends_at_eos
            if is_eos or token in params.stop_token_ids:
                return tokens[: i + 1]
        return tokens[: sequence.room]
