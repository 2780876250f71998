"""The runner for GPUs, all of it: where there is none, its kernels are interpreted."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("engine.model.cuda.kernels")

from engine.config import ModelConfig
from engine.errors import ConfigurationError
from engine.model.cuda.graphs import padded_rows
from engine.model.loader import LoadedModel, adopt_model
from engine.model.passes import Runner
from tests.model.paging import Pages, chunks
from tests.tiny_models import FAMILIES, VOCAB, make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 2


def text(length: int, seed: int = 0) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=dice).tolist()


TEXTS = [text(13), text(1, 1), text(6, 2)]


@functools.cache
def loaded(
    family: str = "llama", dtype: torch.dtype = torch.float32, numerics: str = "exact"
) -> LoadedModel:
    config = ModelConfig("tiny", runner="cuda", numerics=numerics)
    return adopt_model(make_model(family, dtype).to(DEVICE), config)


def logits(
    model: LoadedModel,
    texts: list[list[int]],
    size: int,
    page_size: int = 8,
    layers: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], list[dict[int, torch.Tensor]]]:
    """Logits [N, V] and features by layer of every text, fed side by side in pieces of `size`."""
    pages = Pages(sum(-(-len(t) // page_size) for t in texts) + 2, page_size)
    tables = [pages.table(len(t)) for t in texts]
    runner: Runner = model.make_runner(pages.num_pages, page_size)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    states: list[list[dict[int, torch.Tensor]]] = [[] for _ in texts]
    for start, end in chunks(max(map(len, texts)), size):
        alive = [i for i, t in enumerate(texts) if start < len(t)]
        fed = [texts[i][start:end] for i in alive]
        parts = [(tables[i], start, f) for i, f in zip(alive, fed, strict=True)]
        passed = runner.forward(pages.batch(parts, runner.min_rows), layers)
        assert passed.seconds() > 0
        counts = [len(f) for f in fed]
        cut = {i: s.float().cpu().clone().split(counts) for i, s in passed.features.items()}
        for n, (i, rows) in enumerate(
            zip(alive, passed.logits.float().cpu().clone().split(counts), strict=True)
        ):
            found[i].append(rows)
            states[i].append({layer: parts[n] for layer, parts in cut.items()})
    joined = [{i: torch.cat([s[i] for s in one]) for i in layers} for one in states]
    return [torch.cat(rows) for rows in found], joined


@functools.cache
def theirs(family: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """transformers' logits and hidden states of every text, alone, with its own attention."""
    model = make_model(family, dtype, "eager")
    with torch.inference_mode():
        out = [model(torch.tensor([t]), output_hidden_states=True) for t in TEXTS]
    return [(o.logits[0].float(), [s[0].float() for s in o.hidden_states]) for o in out]


@pytest.mark.parametrize(
    ("family", "numerics"),
    [*((family, "exact") for family in FAMILIES), ("llama", "fast"), ("qwen3", "fast")],
)
def test_logits_and_features_are_transformers(family: str, numerics: str) -> None:
    """In pieces that are run as graphs; the last layer's features come before the final norm."""
    layers = (0, 1, LAYERS)
    found, states = logits(loaded(family, numerics=numerics), TEXTS, 8, layers=layers)
    norm = make_model(family).model.norm
    for own, kept, (true, hidden) in zip(found, states, theirs(family, torch.float32), strict=True):
        assert (own - true).abs().max() < 3e-5 * true.abs().max()
        for layer in (0, 1):
            assert (kept[layer] - hidden[layer]).abs().max() < 3e-5 * hidden[layer].abs().max()
        last = norm(kept[LAYERS]).detach()
        assert (last - hidden[LAYERS]).abs().max() < 3e-5 * hidden[LAYERS].abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["smollm", "qwen3"])
def test_narrow_types_are_as_near_as_transformers(family: str, dtype: torch.dtype) -> None:
    found, _ = logits(loaded(family, dtype), TEXTS, 8)
    exact, rounded = theirs(family, torch.float32), theirs(family, dtype)
    for own, (true, _), (other, _) in zip(found, exact, rounded, strict=True):
        error, usual = (own - true).abs().mean(), (other - true).abs().mean()
        assert error < 1.3 * usual + 2**-9 * true.abs().max()


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama-biased", torch.float32), ("mistral", torch.bfloat16)]
)
def test_rows_are_bit_equal(family: str, dtype: torch.dtype) -> None:
    """Read as a prompt or run as a graph, in one piece or in several, alone or in company,
    whatever the page size."""
    model = loaded(family, dtype)
    (truth,), _ = logits(model, TEXTS[:1], 7)
    for size, page_size in ((1, 3), (4, 16), (13, 1)):
        together, _ = logits(model, [*TEXTS[1:], TEXTS[0]], size, page_size)
        assert torch.equal(together[-1], truth), (size, page_size)
    pages = Pages(8, 16)
    runner, table = model.make_runner(8, 16), pages.table(13)
    batch = pages.batch([(table, 0, TEXTS[0])])
    few = dataclasses.replace(batch, logit_rows=torch.tensor([3, 12]), num_logits=2)
    passed = runner.forward(few, (LAYERS,))  # most rows need no logits: read as a prompt
    assert torch.equal(passed.logits.float().cpu(), truth[[3, 12]])
    assert passed.features[LAYERS].shape[0] == 13
    none = dataclasses.replace(batch, logit_rows=batch.logit_rows[:0], num_logits=0)
    assert runner.forward(none).logits.shape == (0, VOCAB)


def test_other_families_attend_with_the_same_kernel() -> None:
    """transformers' own layers, our attention: what no decoder of ours runs."""
    from engine.cache.store import CacheShape
    from engine.model.attention.cuda import CudaAttention
    from engine.model.runner import ModelRunner

    model = make_model("mistral").to(DEVICE)
    shape = CacheShape(LAYERS, 2, 64, torch.float32)
    backend = CudaAttention(4, 256)
    made = functools.partial(ModelRunner, model, backend, shape)
    found, _ = logits(dataclasses.replace(loaded(), make_runner=made), TEXTS, 8)
    for own, (true, _) in zip(found, theirs("mistral", torch.float32), strict=True):
        assert (own - true).abs().max() < 3e-5 * true.abs().max()


def test_one_model_may_serve_several_stores() -> None:
    model, pages = loaded(), Pages(4, 16)
    table = pages.table(20)
    one, two = model.make_runner(4, 16), model.make_runner(4, 16)
    first, second = text(20, 5), text(20, 6)
    one.forward(pages.batch([(table, 0, first[:19])]))
    two.forward(pages.batch([(table, 0, second[:19])]))
    got = one.forward(pages.batch([(table, 19, first[19:])])).logits
    (wanted,), _ = logits(model, [first], 20)
    assert torch.equal(got[0].float().cpu(), wanted[19])


def test_heads_may_borrow_embeddings() -> None:
    table = make_model().get_input_embeddings().weight
    ids = torch.tensor([[3, 96], [0, 3]], device=DEVICE)
    embed = loaded().embed
    assert embed is not None
    assert torch.equal(embed(ids).cpu(), table[ids.cpu()].detach())


def test_graphs_are_few_and_little_is_padded() -> None:
    sizes = {padded_rows(n, 256) for n in range(1, 257)}
    assert len(sizes) < 32
    for n in range(1, 257):
        assert n <= padded_rows(n, 256) <= max(n, 5 * n / 4)


def test_memory_is_planned() -> None:
    """What is said to be taken is what the buffers of both ways take, and no less."""
    model = loaded()
    runner = model.make_runner(4, 16)
    pages = Pages(4, 16)
    runner.forward(pages.batch([(pages.table(20), 0, text(20))]))
    taken = runner._buffers.num_bytes + runner._inputs.num_bytes
    assert taken < model.reserve(16, 64)
    assert model.reserve(16, 4096) > model.reserve(16, 64) > model.reserve(64, 64)


def test_what_it_cannot_run_is_refused_by_name() -> None:
    model = make_model("llama")
    model.config.hidden_act = "gelu"
    with pytest.raises(ConfigurationError, match="runner is cuda, but its activation is gelu"):
        adopt_model(model, ModelConfig("tiny", runner="cuda"))
    with pytest.raises(ConfigurationError, match="numerics is 'sloppy'; choose one of exact, fast"):
        ModelConfig("tiny", numerics="sloppy")
