"""Keys and values in eight bits: models and engines. Attention itself: `test_attention.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine, assemble
from engine.cache.store import CacheShape
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.errors import ConfigurationError
from engine.model.checked import load_checked
from engine.model.loader import LoadedModel, adopt_model
from tests.draft.plain_eagle import random_head
from tests.draft.test_portfolio import Switching, planned_by
from tests.fakes import Run, ask, run
from tests.model.test_runners import DTYPES, RUNNERS, TEXTS, logits, theirs
from tests.model.test_trees import TREES, check
from tests.tiny_models import VOCAB, load, make_model

#: With pairs of elements rotated at once, and with norms of heads.
FAMILIES = ["llama", "qwen3"]


def eight(family: str, dtype: torch.dtype = torch.float32, runner: str = "auto") -> LoadedModel:
    return load(family, dtype, runner, "int8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_but_for_the_rounding(
    family: str, runner: str, dtype: torch.dtype
) -> None:
    model = eight(family, dtype, runner)
    assert model.runner_name == runner
    assert model.shape.dtype is torch.int8
    assert model.dtype is dtype
    plain = logits(load(family, dtype, runner), TEXTS, size=12)
    for own, true, other in zip(
        logits(model, TEXTS, size=12), theirs(family, torch.float32), plain, strict=True
    ):
        scale = true.abs().max()
        assert (own - true).abs().mean() < 2**-6 * scale
        if len(own) > 1:
            assert not torch.equal(own, other)  # it is in eight bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_bit_equal(family: str, runner: str, dtype: torch.dtype) -> None:
    """In one piece or token by token, alone or in company, whatever the page size."""
    model = eight(family, dtype, runner)
    (truth,) = logits(model, TEXTS[:1], size=40)
    for size, page_size in ((1, 3), (2, 16), (17, 8)):
        together = logits(model, [*TEXTS[1:], TEXTS[0]], size, page_size)
        assert torch.equal(together[-1], truth), (size, page_size)


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_of_a_tree_are_those_of_its_ways(runner: str) -> None:
    for parents, length, page_size in ((TREES[0], 15, 16), (TREES[2], 30, 3)):
        check(eight("llama", torch.float32, runner), parents, length, 1, page_size)


# -- engines -------------------------------------------------------------------------------------


PROMPTS = [tuple((7 * i + j * j) % VOCAB for j in range(3 + 5 * i)) for i in range(8)]


def engine(target: LoadedModel, drafts: dict[str, LoadedModel], pages: int = 400) -> BuiltEngine:
    names = ("lookup", *drafts) if drafts else ("none",)
    config = EngineConfig(
        model=ModelConfig("tiny"),
        cache=CacheConfig(page_size=4, num_pages=pages),
        scheduler=SchedulerConfig(max_batch_tokens=24, max_sequences=6),
        speculation=SpeculationConfig(mode="fixed", drafters=names, max_draft=4),
    )
    return assemble(config, target, drafts)


def said(done: Run) -> list[object]:
    return [done.said(f"r{i}") for i in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}], ids=["greedy", "seeded"]
)
def test_answers_do_not_depend_on_drafters(dtype: torch.dtype, sampling: dict[str, Any]) -> None:
    """Draft models and heads keep their own keys and values in eight bits, too; with pauses,
    preemptions, and prefixes that are shared."""
    asked = [ask(f"r{i}", p, 28, ignore_eos=True, **sampling) for i, p in enumerate(PROMPTS)]
    target, name = eight("llama", dtype), str(dtype).removeprefix("torch.")
    plain = run(engine(target, {}), asked)
    drafts = {"model": eight("qwen3", dtype), "eagle": random_head().loaded(name, "int8")}
    built = planned_by(engine(target, drafts, pages=48), Switching(1, 7))
    done = run(built, asked, check=True)
    assert said(done) == said(plain)
    assert done.preemptions
    assert sum(sum(s.drafted_by_position) for s in done.stats) > 20
    wide = engine(target, drafts)
    for _ in range(2):
        done = run(wide, asked)
        assert said(done) == said(plain)
    last = done.answers[f"r{len(PROMPTS) - 1}"].choices[0].end
    assert last is not None
    assert last.stats.cached_prompt_tokens


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_a_draft_model_equal_to_the_target_is_always_right(runner: str) -> None:
    """Its store forgets nothing: rounding is done once, and alike."""
    target = eight("llama", torch.float32, runner)
    asked = [ask(f"r{i}", p, 31, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    config = SpeculationConfig(mode="fixed", drafter="model", max_draft=4)
    built = assemble(
        EngineConfig(
            ModelConfig("tiny"), CacheConfig(page_size=4, num_pages=400), speculation=config
        ),
        target,
        {"model": target},
    )
    for answer in run(built, asked).answers.values():
        stats = answer.choices[0].end.stats  # type: ignore[union-attr]
        assert stats.accepted_tokens == stats.draft_tokens > 0


# -- what it takes, and where there is none ------------------------------------------------------


def test_a_token_takes_half_of_bfloat16() -> None:
    """But for one scale of two bytes to a head."""
    eight_bits, sixteen = (CacheShape(30, 3, 64, d) for d in (torch.int8, torch.bfloat16))
    assert eight_bits.bytes_per_token == 2 * 30 * 3 * (64 + 2)
    assert sixteen.bytes_per_token / eight_bits.bytes_per_token > 1.9


def test_a_model_is_checked_as_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "cache"))
    make_model("llama").save_pretrained(tmp_path / "model")
    found = load_checked(tmp_path / "model", ModelConfig("tiny", dtype="float32", kv_dtype="int8"))
    assert found.shape.dtype is torch.int8
    assert found.dtype_name == "float32"
    distance = float(found.checked.split("but for ")[1].split(" ")[0])
    assert 1e-3 < distance < 0.4


def test_where_there_is_none_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_dtype is 'int4'; choose one of auto, int8"):
        ModelConfig("tiny", kv_dtype="int4")
    model = make_model("llama")
    with pytest.raises(ConfigurationError, match="runner is cuda, but its kernels have no keys"):
        adopt_model(model, ModelConfig("tiny", runner="cuda", kv_dtype="int8"))
