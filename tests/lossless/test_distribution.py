"""Sampling through the real engine is distributed as transformers says; and we would notice.

Texts of four tokens over a vocabulary of four, several steps each, in mixed batches, with
preemption and shared prefixes. A sound engine fails a test with odds of one in a million; the
seeds are fixed, so that it either always passes or never does. With so many samples, a bias of
a total variation of 0.14 is noticed (99 % power).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sampling import Chance, Outcome, Purpose, sampler
from engine.sampling.verify import Rows
from engine.types import Request, SamplingParams
from tests.draft.plain_eagle import random_head
from tests.fakes import Setup
from tests.lossless.broken import Generous, Leaky
from tests.lossless.worlds import (
    LENGTH,
    TableDrafter,
    Text,
    V,
    engine_of,
    exact_texts,
    fix_seeds,
    is_lossless,
    loaded,
    many,
    odds,
    sample,
    small,
)
from tests.sampling.support import ODDS, Rule
from tests.sampling.test_verify import (
    BREAKS,
    bonus_from_last_row,
)

PROMPT = (1, 2, 3, 0, 1, 2)
RULES = ("match", "rejection", "block")
SHAPED: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 3,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.3,
}
#: A pool in which thirty-two sequences have no room: preemption, and pages that are shared.
TIGHT = Setup(loaded(), page_size=1, num_pages=40, max_sequences=32, max_batch_tokens=64)
ROOMY = Setup(loaded(), num_pages=600, max_sequences=64, max_batch_tokens=256)


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seeds(monkeypatch)


def neighbours() -> list[Request]:
    """Requests with other wishes, which share the batch and are not counted."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 9},
        {"seed": 4, "max_tokens": 7, "top_p": 0.9, "logprobs": 2},
        {"temperature": 2.0, "n": 5, "logit_bias": {1: 3.0}},
        {"max_tokens": 1},
    ]
    return [
        Request(f"other/{i}", (*PROMPT[i:], 3, 3), SamplingParams(**wish))
        for i, wish in enumerate(wishes * 4)
    ]


# -- what is right passes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "drafter", "kind"),
    [
        ("match", "model", "shaped"),
        ("rejection", "table", "shaped"),
        ("rejection", "model", "plain"),
        ("block", "table", "plain"),
        ("block", "model", "shaped"),
        ("block", "eagle", "plain"),
    ],
)
def test_texts_are_distributed_as_the_models(rule: str, drafter: str, kind: str) -> None:
    """Every two of a rule, a table's drafts or a draft model's, and plain or shaped sampling;
    and a head's drafts. What is matched is the text without drafts to the last bit, which other
    tests say, so that one case of it is enough."""
    setup = dataclasses.replace(
        TIGHT,
        draft=loaded("qwen3") if drafter == "model" else None,
        head=random_head(small("llama"), draft_vocab=3).loaded() if drafter == "eagle" else None,
    )
    who = TableDrafter() if drafter == "table" else drafter
    built = engine_of(setup, rule, drafter=who, max_draft=3)
    prompt, params = (PROMPT, {}) if kind == "plain" else (PROMPT[1:], SHAPED)
    counted = many(kind, prompt, 2048, **params)
    mixed = [r for two in zip(counted, neighbours() * 4, strict=False) for r in two]
    asked = [dataclasses.replace(r, request_id=f"{r.request_id}.{i}") for i, r in enumerate(mixed)]
    done, counts = sample(built, asked)
    assert counts[kind].total() == 2048
    assert is_lossless(counts[kind], exact_texts(prompt, **params))
    assert done.preemptions > 60
    assert sum(s.prefix_hit_tokens for s in done.stats) > 5000
    assert done.accepted > 600


def test_kept_drafts_grow_from_match_to_rejection_to_block() -> None:
    """What the freedom of unseeded sampling buys: tokens per pass."""
    kept = []
    for rule in RULES:
        built = engine_of(ROOMY, rule, drafter="model", draft=loaded("qwen3"), max_draft=3)
        kept.append(sample(built, many("plain", PROMPT, 2048))[0].accepted)
    assert kept[0] < kept[1] < kept[2]


def test_a_seed_means_match_whatever_is_configured() -> None:
    """The promise of a seed is a text, not only a distribution."""
    said = []
    for rule, k in (("match", 0), ("auto", 3), ("rejection", 2), ("block", 3)):
        built = engine_of(ROOMY, rule, drafter=TableDrafter(), max_draft=k)
        done, _ = sample(built, many("seeded", PROMPT, 256, seed=9))
        said.append([done.said(request_id) for request_id in done.answers])
    assert said[0] == said[1] == said[2] == said[3]


def test_a_deterministic_draft_is_matched_whatever_is_configured() -> None:
    """Without probabilities there is nothing to weigh; the text is as without drafts."""

    class Sure(TableDrafter):
        def propose(self, *args: Any) -> Any:
            return dataclasses.replace(super().propose(*args), probabilities=None)

    said = []
    for rule, k in (("match", 0), ("rejection", 3), ("block", 3)):
        with pytest.MonkeyPatch.context() as patch:
            fix_seeds(patch)
            built = engine_of(ROOMY, rule, drafter=Sure(), max_draft=k)
            done, _ = sample(built, many("unseeded", PROMPT, 256))
        said.append([done.said(request_id) for request_id in done.answers])
    assert said[0] == said[1] == said[2]


# -- what is broken fails --------------------------------------------------------------------


def is_sound(built: Any, samples: int, max_tokens: int = LENGTH, **params: Any) -> bool:
    """Whether so many texts look lossless."""
    _, counts = sample(built, many("it", PROMPT, samples, max_tokens=max_tokens, **params))
    return is_lossless(counts["it"], exact_texts(PROMPT, max_tokens, **params))


def is_noticed(built: Any, samples: int, max_tokens: int = LENGTH, **params: Any) -> bool:
    """Whether at most so many texts give a broken engine away. They are looked at whenever they
    have doubled, each time for an equal part of the odds, so that a sound one would be accused no
    more often than by a single look at all of them."""
    expected, counts = exact_texts(PROMPT, max_tokens, **params), Counter[Text]()
    ends = [size for size in (256, 512, 1024, 2048) if size < samples] + [samples]
    for start, end in pairwise([0, *ends]):
        asked = many(f"{start}", PROMPT, end - start, max_tokens=max_tokens, **params)
        counts += sample(built, asked)[1][f"{start}"]
        if odds(counts, expected) <= ODDS / len(ends):
            return True
    return False


def of_rows(broken: Rule) -> Callable[[Rows, Sequence[int], Tensor, Chance], Outcome]:
    """A broken rule that wants all of the target's rows at once."""

    def rule(target: Rows, draft: Sequence[int], proposal: Tensor, chance: Chance) -> Outcome:
        rows = torch.stack([target[depth] for depth in range(len(draft) + 1)])
        return broken(rows, draft, proposal, chance)

    return rule


@pytest.mark.parametrize(
    ("breaks", "rule"), [(b, ("rejection", "block")[i % 2]) for i, b in enumerate(BREAKS)]
)
def test_a_broken_rule_is_noticed(
    rule: str, breaks: Callable[[Rule], Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault in one of the rules; in both, without an engine, in `tests/sampling`."""
    broken = of_rows(breaks(sampler._RULES[rule]))
    monkeypatch.setitem(sampler._RULES, rule, broken)
    built = engine_of(ROOMY, rule, drafter=TableDrafter(), max_draft=3)
    assert is_noticed(built, 4000 if breaks is bonus_from_last_row else 1500)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_missing_bonus_costs_a_pass(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out the bonus biases nothing, but every pass must give one token of its own."""

    def passes() -> int:
        built = engine_of(ROOMY, rule, drafter=TableDrafter(), max_draft=2)
        done, _ = sample(built, many("it", PROMPT, 256, max_tokens=12))
        ends = [c.end for a in done.answers.values() for c in a.choices.values()]
        own = {e.stats.generated_tokens - e.stats.accepted_tokens for e in ends if e}
        assert all(e and e.stats.accepted_tokens + e.stats.target_passes >= 12 for e in ends)
        assert own
        return sum(e.stats.target_passes for e in ends if e)

    sound = passes()

    def bonusless(p: Rows, x: Sequence[int], q: Tensor, chance: Chance) -> Outcome:
        outcome = honest(p, x, q, chance)
        return Outcome(len(x) - 1, x[-1]) if outcome.accepted == len(x) else outcome

    honest = sampler._RULES[rule]
    monkeypatch.setitem(sampler._RULES, rule, bonusless)
    assert passes() > 1.07 * sound


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("block", TableDrafter(told=lambda q: torch.full_like(q, 1 / V))),
        ("rejection", TableDrafter(told=lambda q: q.sqrt() / q.sqrt().sum(-1, keepdim=True))),
    ],
    ids=["says it drew uniformly", "says it drew at another temperature"],
)
def test_a_lying_drafter_is_noticed(rule: str, drafter: TableDrafter) -> None:
    assert is_noticed(engine_of(ROOMY, rule, drafter=drafter, max_draft=3), 3000)


def test_noise_that_drafts_share_with_corrections_is_noticed() -> None:
    """A token that lost the draft's race is the less likely to win the correction's, which is drawn
    alike by all rules."""
    table = torch.tensor([[0.05, 0.3, 0.15, 0.5]] * V, dtype=torch.float64)
    drafter = TableDrafter(table, purpose=Purpose.RESIDUAL)
    built = engine_of(ROOMY, "block", drafter=drafter, max_draft=3)
    assert is_noticed(built, 5000, logit_bias={0: 0.6, 1: -0.2})


def test_a_table_like_that_is_sound_with_noise_of_its_own() -> None:
    table = torch.tensor([[0.05, 0.3, 0.15, 0.5]] * V, dtype=torch.float64)
    built = engine_of(ROOMY, "block", drafter=TableDrafter(table), max_draft=3)
    assert is_sound(built, 1500, logit_bias={0: 0.6, 1: -0.2})


@pytest.mark.parametrize("who", ["nobody", "coins", "drafts"])
def test_block_verification_keyed_by_position_is_noticed(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at noise of positions that it leaves to the next step; theirs must be new."""
    if who == "coins":
        chance = sampler.KeyedChance
        monkeypatch.setattr(
            sampler, "KeyedChance", lambda seed, choice, at, _: chance(seed, choice, at)
        )
    table = torch.tensor([[0.9, 0.1, 0.0, 0.0]] * V, dtype=torch.float64)
    drafter = TableDrafter(table, keyed_by_step=who != "drafts")
    built = engine_of(ROOMY, "block", drafter=drafter, max_draft=3)
    two_tokens = {"allowed_token_ids": frozenset({0, 1}), "temperature": 2.0}
    if who == "coins":
        assert is_noticed(built, 3000, max_tokens=6, **two_tokens)
    else:
        assert is_sound(built, 3000, max_tokens=6, **two_tokens) is (who == "nobody")


@pytest.mark.parametrize("rule", RULES)
def test_penalties_that_see_rejected_tokens_are_noticed(rule: str) -> None:
    params = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    built = engine_of(ROOMY, rule, Leaky, drafter=TableDrafter(), max_draft=3)
    assert is_noticed(built, 2000, **params)
    if rule == "block":
        built = engine_of(ROOMY, rule, drafter=TableDrafter(), max_draft=3)
        assert is_sound(built, 2000, **params)


def test_one_draft_too_many_is_noticed() -> None:
    """Match verification that keeps the first draft token whatever the target says."""
    built = engine_of(ROOMY, "match", Generous, drafter=TableDrafter(), max_draft=3)
    assert is_noticed(built, 2000)
