"""What a drafter is: anything that guesses the next tokens of many sequences at once.

A drafter may be wrong, slow to warm up, or silent; it can never change an answer, since the
target checks every guess. The protocol leaves room for

* model-free drafters (no store, no tensors, deterministic proposals);
* draft models: `store` is their own K/V store on the shared pages, whose progress per
  sequence is `table.num_cached[store index]`; `propose` first feeds what is missing, in one
  batched pass, whatever the reason (first prefill, prefix hit in one cache only, a pause);
* heads on the target: `hidden_layers` names the layers whose hidden states of the last
  verify pass `commit` must receive;
* probabilistic proposals: `DraftProposal.probabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
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
    """

    tokens: list[list[int]]
    probabilities: list[torch.Tensor | None] | None = None


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
        """Learns what was kept; `sequences[i].tokens` already ends with `emitted`.

        Args:
            hidden_states: [layers, T, hidden size] for `hidden_layers`, else None.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. (Preemption needs no call: its pages go back, and
        `num_cached` with them.)"""
        ...
