"""What a drafter is: anything that guesses the next tokens of many sequences at once.

A drafter may be wrong, slow to warm up, or silent; it can never change an answer, since the
target checks every guess. The protocol has room for

* model-free drafters (no store, no tensors, deterministic proposals), such as n-gram or prompt
  lookup;
* draft models: they keep K/V in a store of their own on the shared pages, their progress per
  sequence is `table.num_cached[store]`; `propose` first feeds what is missing, in one batched
  pass, whatever the reason (first prefill, prefix hit in one cache only, a pause);
* heads on the target (EAGLE, Medusa): they are shown the target's hidden states, the *features*,
  of the layers that their registry entry names;
* probabilistic proposals: `DraftProposal.probabilities`;
* trees: `DraftProposal.parents`;
* being one of several: a sequence may change its drafter in every step, so `propose` is asked
  when it is one's turn, and `observe` tells every drafter of a sequence what became of it.

What a drafter needs of the engine, and how it is built, stands in `engine.draft.registry`.
What it can tell before it drafts is optional, and helps the planner to choose: see `Advisor`.
It may depend on committed tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Draft tokens of one step, one list per scheduled sequence; lives for that step only.

    Attributes:
        tokens: ragged; an empty list is a plain decode.
        probabilities: per sequence the distributions [k, V] its tokens were drawn from, or
            None where the draft is deterministic. Of several children of a node each row is what
            that child was drawn from, given those before it; and the shape of such a tree may not
            depend on the tokens that were drawn.
        seconds: that each drafter took which was asked.
        forwards: passes of draft models.
        drafters: per sequence, who drafted; empty = nobody says.
        parents: per sequence, for each token the index in the draft of the one it follows, which
            is below its own; -1 = the last committed token. None = a chain, where each token
            follows the one before it.
    """

    tokens: list[list[int]]
    probabilities: list[torch.Tensor | None] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    forwards: int = 0
    parents: Seq[list[int] | None] | None = None
    drafters: Seq[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said about one sequence's draft.

    Attributes:
        emitted: accepted draft tokens and one correction or bonus token, cut at the end of
            the sequence.
        drafted: draft tokens that were checked.
        accepted: draft tokens the target agreed with and that were emitted.
    """

    emitted: list[int]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence's part in a step that is over: a decode, or a piece of a prefill.

    Attributes:
        sequence: its `tokens` already end with what was emitted; it may be complete, and is
            released then.
        first_row: of its rows in the target's pass, which are consecutive.
        position: in the sequence, of the token in the first row.
        num_fed: rows of tokens that were committed before.
        num_drafts: rows of draft tokens behind them, whoever drafted. Of a draft that branches,
            those that were accepted have been brought to the front.
        verdict: what was kept; nothing was emitted where it was not fed to its end.
    """

    sequence: Sequence
    first_row: int
    position: int
    num_fed: int
    num_drafts: int
    verdict: Verdict

    @property
    def num_kept(self) -> int:
        """Rows, from `first_row` on, that hold committed tokens now: row `first_row + i` holds
        `sequence.tokens[position + i]`. The last emitted token has no row yet."""
        return self.num_fed + self.verdict.accepted


@dataclass(frozen=True, slots=True)
class StepView:
    """What happened in a step, for one drafter.

    Attributes:
        sequences: that it may draft for and that had a part in the step, except those whose
            request has failed. What a prefix hit spared the target has no row in any step.
        features: [T, hidden size] by layer, for the layers that it needs; valid until the
            target's next pass. Rows of other sequences and of refused drafts are in it, too.
    """

    sequences: tuple[SequenceView, ...]
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What a drafter is shown, and what it is asked for.

    Attributes:
        features: layers of the target whose features it is shown.
        reads_predictions: whether it drafts from a request's `prediction`.
        reads_grammars: whether it drafts from a request's grammar.
        branches: whether its drafts may branch, so that it is asked for so many nodes; all others
            are not asked for more tokens than could be kept.
    """

    features: tuple[int, ...] = ()
    reads_predictions: bool = False
    reads_grammars: bool = False
    branches: bool = False


class Drafter(Protocol):
    """Guesses tokens; see the module's description for what implementations may need."""

    name: str

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """Guesses up to `lengths[i]` tokens after `sequences[i].tokens`; of a tree, as many
        nodes.

        Fewer, or none, is always allowed. Ids outside the target's vocabulary are cut off by
        the engine, with all that follows them.
        """
        ...

    def observe(self, view: StepView) -> None:
        """Learns what became of its sequences, after every step that any of them had a part in.
        The draft that was judged may have been another drafter's."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. (Preemption needs no call: its pages go back, and
        `num_cached` with them; what is fed again is seen again.)"""
        ...


class Advisor(Protocol):
    """What the planner may ask before a step; each answer comes from committed tokens only."""

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """What a drafter knows of its next draft: the bucket of its estimates, from 0, or None
        if it has nothing to offer. A drafter without an opinion always says 0."""
        ...

    def backlog(self, name: str, sequence: Sequence) -> int:
        """Tokens a drafter would have to catch up with before it drafts."""
        ...


class NoAdvice:
    """Nothing is known beforehand: every drafter may have something, and must be tried."""

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """See `Advisor.outlook`."""
        return 0

    def backlog(self, name: str, sequence: Sequence) -> int:
        """See `Advisor.backlog`."""
        return 0
