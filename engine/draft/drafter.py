"""What a drafter is: anything that guesses the next tokens of many sequences at once.

A drafter may be wrong, slow to warm up, or silent; it can never change an answer, since the
target checks every guess. The protocol leaves room for

* model-free drafters (no store, no tensors, deterministic proposals);
* draft models: `store` is their own K/V store on the shared pages, whose progress per
  sequence is `table.num_cached[store index]`; `propose` first feeds what is missing, in one
  batched pass, whatever the reason (first prefill, prefix hit in one cache only, a pause);
* heads on the target: `hidden_layers` names the layers whose hidden states of the last
  verify pass `commit` must receive;
* probabilistic proposals: `DraftProposal.probabilities`;
* being one of several: a sequence may change its drafter in every step, so `propose` is asked
  when it is one's turn, and `commit` tells every drafter of a sequence what was said.

What a drafter can tell before it drafts is optional, and helps the planner to choose: see
`Advisor`. It may depend on committed tokens only.
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
            None where the draft is deterministic.
        seconds: that each drafter took which was asked.
        forwards: passes of draft models.
    """

    tokens: list[list[int]]
    probabilities: list[torch.Tensor | None] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    forwards: int = 0


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


class Drafter(Protocol):
    """Guesses tokens; see the module's description for what implementations may need."""

    name: str
    #: Layers of the target whose hidden states `commit` needs.
    hidden_layers: tuple[int, ...]

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """Guesses up to `lengths[i]` tokens after `sequences[i].tokens`.

        Fewer, or none, is always allowed. Ids outside the target's vocabulary are cut off by
        the engine, with all that follows them.
        """
        ...

    def commit(
        self,
        sequences: Seq[Sequence],
        verdicts: Seq[Verdict],
        hidden_states: torch.Tensor | None,
    ) -> None:
        """Learns what was kept; `sequences[i].tokens` already ends with `emitted`. The draft
        that was judged may have been another drafter's.

        Args:
            hidden_states: [layers, T, hidden size] for `hidden_layers`, else None.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. (Preemption needs no call: its pages go back, and
        `num_cached` with them.)"""
        ...


class Advisor(Protocol):
    """What the planner may ask before a step; each answer comes from committed tokens only."""

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """What a drafter knows of its next draft: the bucket of its estimates, from 0, or None
        if it has nothing to offer. A drafter without an opinion always says 0."""
        ...

    def preview(self, name: str, sequence: Sequence, length: int) -> list[int] | None:
        """What a drafter would draft, to be scored after the fact. None: it costs too much to
        say, and must be tried."""
        ...

    def backlog(self, name: str, sequence: Sequence) -> int:
        """Tokens a drafter would have to catch up with before it drafts."""
        ...


class NoAdvice:
    """Nothing is known beforehand: every drafter may have something, and must be tried."""

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """See `Advisor.outlook`."""
        return 0

    def preview(self, name: str, sequence: Sequence, length: int) -> list[int] | None:
        """See `Advisor.preview`."""
        return None

    def backlog(self, name: str, sequence: Sequence) -> int:
        """See `Advisor.backlog`."""
        return 0
