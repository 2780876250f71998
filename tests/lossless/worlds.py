"""Tiny languages: models over a few tokens, drafters over the same, and exact answers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import PreTrainedModel

import engine.core
from engine.build import BuiltEngine
from engine.config import ModelConfig
from engine.control.planner import FixedPlanner
from engine.draft.drafter import DraftProposal, StepView
from engine.judge import Judge
from engine.model.loader import LoadedModel, adopt_model
from engine.model.runner import ATTENTION
from engine.sampling import Purpose, noise_key
from engine.sampling.noise import gumbel_rows
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.fakes import Run, Setup, make_engine
from tests.sampling.support import ODDS, make_row
from tests.sampling.test_transformers import reference
from tests.tiny_models import make_model

V = 4
LENGTH = 4
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.15,  # texts of middling probability, so that many can be told apart
}

Text = tuple[int, ...]


@functools.cache
def loaded(family: str = "llama") -> LoadedModel:
    """A random model over V tokens, none of which ends a text."""
    made = adopt_model(small(family, ATTENTION), ModelConfig("tiny"))
    return dataclasses.replace(made, eos_token_ids=frozenset())


@functools.cache
def small(family: str, attention: str = "eager") -> PreTrainedModel:
    """The same weights for transformers."""
    return make_model(family, torch.float32, attention, **_SIZES)


# -- what the model says, by transformers ----------------------------------------------------


def exact_texts(prompt: Text, length: int = LENGTH, **params: Any) -> dict[Text, float]:
    """Probability of every text after `prompt`: transformers' model and processors, float32."""
    texts: dict[Text, float] = {(): 1.0}
    for depth in range(length):
        prefixes = list(itertools.product(range(V), repeat=depth))
        with torch.inference_mode():
            logits = small("llama")(torch.tensor([[*prompt, *p] for p in prefixes])).logits[:, -1]
        longer = {}
        for prefix, row in zip(prefixes, logits, strict=True):
            if prefix in texts:
                for token, p in enumerate(_conditional(prompt, prefix, row, params)):
                    if p > 0.0:
                        longer[(*prefix, token)] = texts[prefix] * p
        texts = longer
    return texts


def _conditional(prompt: Text, prefix: Text, row: Tensor, params: dict[str, Any]) -> list[float]:
    asked = make_row(prompt=prompt, generated=prefix, **params)
    scores = reference(asked)(torch.tensor([[*prompt, *prefix]]), row[None].float())
    probabilities: list[float] = scores[0].double().softmax(0).tolist()
    return probabilities


def odds(counts: Counter[Text], expected: dict[Text, float]) -> float:
    """How likely such counts, or worse, are by chance; rare texts are counted together."""
    if counts.keys() - expected.keys():
        return 0.0
    total = counts.total()
    cells = [(counts[text], total * p) for text, p in expected.items()]
    kept = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        kept.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    seen, wanted = zip(*kept, strict=True)
    return float(scipy.stats.chisquare(seen, wanted).pvalue)


# -- a drafter that draws from a table -------------------------------------------------------


def random_table(sharpness: float = 1.0) -> Tensor:
    """[V, V] probabilities; the sharper, the more they are for a single token."""
    generator = torch.Generator().manual_seed(11)
    weights = torch.rand(V, V, generator=generator, dtype=torch.float64) + 0.05
    weights = weights**sharpness
    return weights / weights.sum(-1, keepdim=True)


class TableDrafter:
    """Draws each token from a row of a table that the token before it picks.

    Args:
        table: [V, V] probabilities; None = random ones.
        told: what it says it drew from; the truth unless a test wants a lie.
        purpose: whose noise it draws with under rejection rules.
        keyed_by_step: whether a position that is drafted again gets other noise.
    """

    name = "table"

    def __init__(
        self,
        table: Tensor | None = None,
        told: Callable[[Tensor], Tensor] = lambda q: q,
        purpose: Purpose = Purpose.DRAFT,
        keyed_by_step: bool = True,
    ) -> None:
        self._table = random_table() if table is None else table
        self._told = told
        self._purpose = purpose
        self._keyed_by_step = keyed_by_step

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        tokens = [[s.tokens[-1]] for s in sequences]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        for depth in range(max(lengths, default=0)):
            who = [i for i, length in enumerate(lengths) if length > depth]
            q = self._table[[tokens[i][-1] for i in who]]
            keys = [self._key(sequences[i], depth) for i in who]
            drawn = (gumbel_rows(keys, q.shape[1], q.device) + q.log()).argmax(1).tolist()
            for i, token, row in zip(who, drawn, q, strict=True):
                tokens[i].append(token)
                rows[i].append(row)
        told = [self._tell(*one) for one in zip(sequences, rows, strict=True)]
        return DraftProposal([drafted[1:] for drafted in tokens], told)

    def _key(self, sequence: Sequence, depth: int) -> int:
        matched = sequence.verification == "match"
        step = 0 if matched or not self._keyed_by_step else sequence.target_passes
        purpose = Purpose.TOKEN if matched else self._purpose
        position = len(sequence.tokens) + depth
        return noise_key(sequence.seed, sequence.choice, position, purpose, step)

    def _tell(self, sequence: Sequence, rows: list[Tensor]) -> Tensor | None:
        matched = sequence.verification == "match"
        return None if matched or not rows else self._told(torch.stack(rows))

    def observe(self, view: StepView) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass


# -- running ---------------------------------------------------------------------------------


def engine_of(setup: Setup, rule: str, judge: type[Judge] = Judge, **changes: Any) -> BuiltEngine:
    """An engine that always drafts and judges by `rule`."""
    built = make_engine(setup, **changes)
    built.engine.parts = dataclasses.replace(
        built.engine.parts,
        judge=judge(V, frozenset(), rule),
        planner=FixedPlanner(),
    )
    return built


def fix_seeds(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Makes the seeds of unseeded requests the same in every run of a test."""

    class Secrets:
        randbits = staticmethod(random.Random(seed).getrandbits)

    monkeypatch.setattr(engine.core, "secrets", Secrets)


def sample(built: BuiltEngine, asked: Iterable[Request]) -> tuple[Run, dict[str, Counter[Text]]]:
    """Runs requests; texts are counted by what stands before the slash of a request's id."""
    done = Run(built, asked).finish()
    counts: dict[str, Counter[Text]] = {}
    for request_id, answer in done.answers.items():
        assert answer.failed is None
        counter = counts.setdefault(request_id.partition("/")[0], Counter())
        counter.update(tuple(choice.tokens) for choice in answer.choices.values())
    return done, counts


def many(kind: str, prompt: Text, samples: int, **params: Any) -> list[Request]:
    """Requests for so many texts, 64 choices each."""
    sampling = SamplingParams(**({"max_tokens": LENGTH, "n": 64} | params))
    return [Request(f"{kind}/{i}", prompt, sampling) for i in range(-(-samples // 64))]


def is_lossless(counts: Counter[Text], expected: dict[Text, float]) -> bool:
    """The verdict, at the odds of all statistical tests."""
    return odds(counts, expected) > ODDS
