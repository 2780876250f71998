"""Whole models: transformers' logits, and every row as if it were alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.model.loader import LoadedModel, adopt_model
from engine.model.passes import Runner
from tests.model.paging import Pages, chunks
from tests.tiny_models import FAMILIES, VOCAB, make_model

DTYPES = [torch.float32, torch.bfloat16]
RUNNERS = ["native", "torch", "reference"]


def text(length: int, seed: int = 0) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=dice).tolist()


TEXTS = [text(40), text(1, 1), text(9, 2), text(33, 3)]

#: Shapes that real models have and the tiny ones have not.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "linear rope": ("llama", {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "16 heads, 1 group": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1,
                                    "head_dim": 16}),
    "head 64": ("llama", {"head_dim": 64}),
    "head 80": ("qwen3", {"head_dim": 80}),
    "head 128": ("qwen3", {"head_dim": 128, "num_key_value_heads": 4}),
    "odd widths": ("llama", {"hidden_size": 36, "head_dim": 10, "intermediate_size": 50}),
    "width above a block": ("llama", {"hidden_size": 68, "head_dim": 18, "intermediate_size": 130}),
}  # fmt: skip


@functools.cache
def loaded(family: str, dtype: torch.dtype, runner: str, variant: str | None = None) -> LoadedModel:
    changes = VARIANTS[variant][1] if variant else {}
    return adopt_model(make_model(family, dtype, **changes), ModelConfig("tiny", runner=runner))


@functools.cache
def theirs(family: str, dtype: torch.dtype, variant: str | None = None) -> list[torch.Tensor]:
    """transformers' logits of every text, alone, with its own attention."""
    model = make_model(family, dtype, "eager", **(VARIANTS[variant][1] if variant else {}))
    with torch.inference_mode():
        return [model(torch.tensor([t])).logits[0].float() for t in TEXTS]


def logits(
    model: LoadedModel, texts: list[list[int]], size: int, page_size: int = 16
) -> list[torch.Tensor]:
    """Logits [N, V] of every text, fed side by side, `size` tokens of each at a time."""
    pages = Pages(sum(-(-len(t) // page_size) for t in texts) + 2, page_size)
    tables = [pages.table(len(t)) for t in texts]
    runner: Runner = model.make_runner(pages.num_pages, page_size)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for start, end in chunks(max(map(len, texts)), size):
        alive = [i for i, t in enumerate(texts) if start < len(t)]
        fed = [texts[i][start:end] for i in alive]
        parts = [(tables[i], start, f) for i, f in zip(alive, fed, strict=True)]
        out = runner.forward(pages.batch(parts, runner.min_rows)).logits.float().clone()
        for i, rows in zip(alive, out.split([len(f) for f in fed]), strict=True):
            found[i].append(rows)
    return [torch.cat(rows) for rows in found]


def check_near(mine: list[torch.Tensor], family: str, dtype: torch.dtype, variant=None) -> None:
    exact, rounded = theirs(family, torch.float32, variant), theirs(family, dtype, variant)
    for own, true, other in zip(mine, exact, rounded, strict=True):
        scale = true.abs().max()
        if dtype is torch.float32:
            assert (own - true).abs().max() < 3e-5 * scale
        else:  # as near to the truth as transformers' own bfloat16, give or take
            error, usual = (own - true).abs().mean(), (other - true).abs().mean()
            assert error < 1.3 * usual + 2**-9 * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers(family: str, runner: str, dtype: torch.dtype) -> None:
    model = loaded(family, dtype, runner)
    assert model.runner_name == runner
    check_near(logits(model, TEXTS, size=12), family, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_transformers(variant: str, runner: str, dtype: torch.dtype) -> None:
    family = VARIANTS[variant][0]
    model = loaded(family, dtype, runner, variant)
    check_near(logits(model, TEXTS, size=12), family, dtype, variant)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_bit_equal(family: str, runner: str, dtype: torch.dtype) -> None:
    """In one piece or token by token, alone or in company, whatever the page size."""
    model = loaded(family, dtype, runner)
    (truth,) = logits(model, TEXTS[:1], size=40)
    for size, page_size in ((1, 3), (2, 16), (5, 1), (17, 8)):
        assert torch.equal(logits(model, TEXTS[:1], size, page_size)[0], truth)
        together = logits(model, [*TEXTS[1:], TEXTS[0]], size, page_size)
        assert torch.equal(together[-1], truth), (size, page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_variants_are_bit_equal(variant: str, dtype: torch.dtype) -> None:
    model = loaded(VARIANTS[variant][0], dtype, "native", variant)
    (truth,) = logits(model, TEXTS[:1], size=40)
    for size in (1, 3, 13):
        assert torch.equal(logits(model, [*TEXTS[1:], TEXTS[0]], size)[-1], truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_rows_do_not_depend_on_the_number_of_threads(runner: str, dtype: torch.dtype) -> None:
    """Long enough that every operation is really cut into parts."""
    model = loaded("llama", dtype, runner, None)
    long = [text(250, 7), text(220, 8)]
    truth = logits(model, long, size=250)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert all(map(torch.equal, logits(model, long, size=250), truth)), threads
            assert all(map(torch.equal, logits(model, long, size=9), truth)), threads
        finally:
            torch.set_num_threads(1)


def test_one_model_may_serve_several_stores() -> None:
    """Runners made from one set of weights keep their caches apart."""
    for name in RUNNERS:
        model = loaded("llama", torch.float32, name)
        pages = Pages(4, 16)
        table = pages.table(20)
        one, two = model.make_runner(4, 16), model.make_runner(4, 16)
        first, second = text(20, 5), text(20, 6)
        one.forward(pages.batch([(table, 0, first[:19])], one.min_rows))
        two.forward(pages.batch([(table, 0, second[:19])], two.min_rows))
        got = one.forward(pages.batch([(table, 19, first[19:])], one.min_rows)).logits
        (wanted,) = logits(model, [first], size=20)
        assert torch.equal(got[0].float(), wanted[19])


def test_only_wanted_logits_are_computed() -> None:
    for name in RUNNERS:
        model = loaded("llama", torch.float32, name)
        pages = Pages(8, 16)
        runner = model.make_runner(8, 16)
        (truth,) = logits(model, TEXTS[:1], size=40)
        table = pages.table(40)
        batch = pages.batch([(table, 0, TEXTS[0])], runner.min_rows)
        none = dataclasses.replace(batch, logit_rows=batch.logit_rows[:0], num_logits=0)
        assert runner.forward(none).logits.shape == (0, VOCAB)
        some = dataclasses.replace(batch, logit_rows=torch.tensor([3, 39]), num_logits=2)
        assert torch.equal(runner.forward(some).logits.float(), truth[[3, 39]])
