"""Sampling stays distributed as transformers says while drafters take turns at random."""

from __future__ import annotations

import dataclasses

import pytest

from engine.types import SamplingParams
from tests.draft.test_portfolio import Switching, planned_by
from tests.fakes import Setup
from tests.lossless.test_distribution import PROMPT, RULES, SHAPED, TIGHT
from tests.lossless.worlds import (
    TableDrafter,
    engine_of,
    exact_texts,
    fix_seeds,
    is_lossless,
    loaded,
    many,
    random_table,
    sample,
)


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seeds(monkeypatch)


def setups() -> dict[str, Setup]:
    flat, sharp = TableDrafter(), TableDrafter(random_table(3.0))
    flat.name, sharp.name = "flat", "sharp"
    model = dataclasses.replace(TIGHT, draft=loaded("qwen3"), max_draft=3)
    return {
        "lookup and model": dataclasses.replace(model, drafters=("lookup", "model"), store=1 << 20),
        "two tables": dataclasses.replace(TIGHT, drafters=(flat, sharp), max_draft=3),
    }


@pytest.mark.parametrize(
    ("rule", "name", "kind"),
    [
        ("rejection", "lookup and model", "plain"),
        ("rejection", "two tables", "shaped"),
        ("block", "lookup and model", "shaped"),
        ("block", "two tables", "plain"),
    ],
)
def test_texts_are_distributed_as_the_models_while_drafters_switch(
    rule: str, name: str, kind: str
) -> None:
    """Deterministic drafts, drafts of two distributions and none at all, in one text; drafts
    also from what the model said to others. Every two of a rule, the drafters, and plain or
    shaped sampling; what is matched is compared to the last bit (`test_portfolio`)."""
    built = planned_by(engine_of(setups()[name], rule), Switching(5))
    prompt, params = (PROMPT, {}) if kind == "plain" else (PROMPT[1:], SHAPED)
    done, counts = sample(built, many(kind, prompt, 2048, **params))
    assert is_lossless(counts[kind], exact_texts(prompt, **params))
    assert done.preemptions > 60
    assert done.accepted > 200


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_means_one_text_while_drafters_switch(rule: str) -> None:
    texts = set()
    for seed in range(6):
        setup = setups()["lookup and model"]
        built = planned_by(engine_of(setup, rule), Switching(seed))
        request = many("seeded", PROMPT, 1, n=1, seed=9, max_tokens=30)[0]
        assert request.sampling == SamplingParams(max_tokens=30, seed=9)
        _, counts = sample(built, [request])
        texts.update(counts["seeded"])
    assert len(texts) == 1
