"""Drafters that misbehave, each in its own way. None of them may change an answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.draft.drafter import Drafter, DraftProposal, SequenceView, StepView, Verdict
from engine.sequence import Sequence
from tests.tiny_models import EOS, VOCAB

#: (prompt, choice) -> what the target generates after it.
Answers = dict[tuple[tuple[int, ...], int], tuple[int, ...]]


def seen(sequences: Seq[Sequence], verdicts: Seq[Verdict]) -> StepView:
    """A step in which each sequence was fed one token and its draft, after both were judged."""
    views, row = [], 0
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        position = len(sequence.tokens) - len(verdict.emitted) - 1
        views.append(SequenceView(sequence, row, position, 1, verdict.drafted, verdict))
        row += 1 + verdict.drafted
    return StepView(tuple(views))


class ScriptedDrafter:
    """Drafts what a function of (sequence, length) says, and keeps the protocol's books."""

    name = "scripted"

    def __init__(self, draft: Callable[[Sequence, int], list[int]]) -> None:
        self._draft = draft
        self.proposals = 0
        self.committed: list[tuple[Sequence, Verdict]] = []
        self.released: list[Sequence] = []

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        self.proposals += 1
        assert all(lengths), "a sequence without a draft should not be asked"
        return DraftProposal(
            [self._draft(s, length) for s, length in zip(sequences, lengths, strict=True)]
        )

    def observe(self, view: StepView) -> None:
        assert not view.features
        for part in view.sequences:
            count, tokens = len(part.verdict.emitted), part.sequence.tokens
            assert tokens[len(tokens) - count :] == part.verdict.emitted
            self.committed.append((part.sequence, part.verdict))

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence)


class RaisingDrafter(ScriptedDrafter):
    """Works for a while, then raises in one of its methods."""

    def __init__(self, draft: Callable[[Sequence, int], list[int]], method: str, after: int):
        super().__init__(draft)
        self._method = method
        self._left = after

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        self._count("propose")
        return super().propose(sequences, lengths)

    def observe(self, view: StepView) -> None:
        self._count("observe")
        super().observe(view)

    def release(self, sequence: Sequence) -> None:
        self._count("release")
        super().release(sequence)

    def _count(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"injected into {method}")


class ForgetfulDrafter(ScriptedDrafter):
    """Answers for one sequence less than it was asked for."""

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        return DraftProposal(super().propose(sequences, lengths).tokens[:-1])


def follow(answers: Answers) -> Callable[[Sequence, int], list[int]]:
    """Drafts the target's own continuation."""

    def draft(sequence: Sequence, length: int) -> list[int]:
        answer = answers.get((sequence.request.prompt, sequence.choice), ())
        return list(answer[sequence.num_generated :][:length])

    return draft


def miss(answers: Answers) -> Callable[[Sequence, int], list[int]]:
    """Drafts, at every position, a token that the target does not choose."""
    right = follow(answers)
    return lambda sequence, length: [(t + 1) % VOCAB for t in right(sequence, length)]


def hit_then_miss(answers: Answers, hits: int) -> Callable[[Sequence, int], list[int]]:
    """Right for `hits` tokens, wrong after that."""
    right, wrong = follow(answers), miss(answers)

    def draft(sequence: Sequence, length: int) -> list[int]:
        return right(sequence, length)[:hits] + wrong(sequence, length)[hits:]

    return draft


def guess(seed: int = 0, vocabulary: int = VOCAB) -> Callable[[Sequence, int], list[int]]:
    """Drafts random tokens, of random length."""
    dice = random.Random(seed)
    return lambda _, length: [dice.randrange(vocabulary) for _ in range(dice.randint(0, length))]


def adversaries(answers: Answers) -> dict[str, Drafter]:
    """Every kind of drafter, by what it does."""
    right = follow(answers)
    return {
        "right": ScriptedDrafter(right),
        "wrong": ScriptedDrafter(miss(answers)),
        "right at first": ScriptedDrafter(hit_then_miss(answers, 1)),
        "random": ScriptedDrafter(guess()),
        "empty": ScriptedDrafter(lambda _s, _n: []),
        "end of text": ScriptedDrafter(lambda _s, n: [EOS] * n),
        "end of text second": ScriptedDrafter(lambda s, n: (right(s, 1) + [EOS] * n)[:n]),
        "out of vocabulary": ScriptedDrafter(lambda s, n: [*right(s, 1), VOCAB, 10**9][:n]),
        "negative": ScriptedDrafter(lambda _s, n: [-1] * n),
        "too long": ScriptedDrafter(lambda s, n: right(s, n + 7)),
        "too long and wrong": ScriptedDrafter(lambda _s, n: [5] * (n + 7)),
        "raises": RaisingDrafter(right, "propose", after=3),
        "raises in observe": RaisingDrafter(right, "observe", after=3),
        "raises in release": RaisingDrafter(right, "release", after=1),
        "forgetful": ForgetfulDrafter(right),
    }
