"""Hidden states that a pass hands over: transformers' own, and every row as if it were alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.model import passes
from engine.model.linear import has_native_bfloat16
from engine.model.loader import LoadedModel, adopt_model
from engine.model.passes import Runner, start_timer
from tests.fakes import FakeRunner, fake_features
from tests.model.paging import Pages
from tests.tiny_models import FAMILIES, VOCAB, eager, make_model

LAYERS = 3
EVERY = tuple(range(LAYERS + 1))
RUNNERS = ["native", "torch", "reference"]
DTYPES = [torch.float32, torch.bfloat16]


def text(length: int, seed: int) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=dice).tolist()


TEXTS = [text(40, 0), text(1, 1), text(9, 2), text(33, 3)]


@functools.cache
def loaded(family: str, runner: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = make_model(family, dtype, num_hidden_layers=LAYERS)
    return adopt_model(model, ModelConfig("tiny", runner=runner))


@functools.cache
def theirs(family: str) -> tuple[list[tuple[torch.Tensor, ...]], torch.nn.Module]:
    """transformers' hidden states of every text, each alone, and the model's final norm."""
    model = make_model(family, attention="eager", num_hidden_layers=LAYERS)
    with torch.inference_mode():
        outputs = [model(torch.tensor([t]), output_hidden_states=True) for t in TEXTS]
    return [tuple(state[0] for state in out.hidden_states) for out in outputs], model.model.norm


def features(
    model: LoadedModel, texts: list[list[int]], sizes: list[list[int]], layers: tuple[int, ...]
) -> list[dict[int, torch.Tensor]]:
    """Hidden states [N, hidden] of every text by layer.

    Args:
        sizes: of each text, how many tokens it is fed in each pass; 0 = it takes no part.
    """
    pages = Pages(sum(-(-len(t) // 4) for t in texts) + 2, 4)
    tables, done = [pages.table(len(t)) for t in texts], [0] * len(texts)
    runner: Runner = model.make_runner(pages.num_pages, 4)
    found: list[dict[int, list[torch.Tensor]]] = [{i: [] for i in layers} for _ in texts]
    for counts in zip(*sizes, strict=True):
        fed = [t[at : at + n] for t, at, n in zip(texts, done, counts, strict=True)]
        alive = [i for i, tokens in enumerate(fed) if tokens]
        parts = [(tables[i], done[i], fed[i]) for i in alive]
        passed = runner.forward(pages.batch(parts, runner.min_rows), layers)
        assert set(passed.features) == set(layers)
        for layer, states in passed.features.items():
            assert states.dtype is torch.float32
            cut = states.clone().split([len(fed[i]) for i in alive])  # no row too many
            for i, rows in zip(alive, cut, strict=True):
                found[i][layer].append(rows)
        done = [at + len(tokens) for at, tokens in zip(done, fed, strict=True)]
    assert done == list(map(len, texts))
    return [{layer: torch.cat(rows) for layer, rows in one.items()} for one in found]


#: A prompt in chunks beside others; then plain decodes beside a verify pass of five rows.
MIXED = [[16, 18, 1, 5], [0, 1, 0, 0], [3, 1, 0, 5], [30, 0, 1, 2]]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_transformers(family: str, runner: str) -> None:
    """Up to the last layer, whose output only transformers' final norm has seen."""
    wanted, norm = theirs(family)
    for mine, states in zip(
        features(loaded(family, runner), TEXTS, MIXED, EVERY), wanted, strict=True
    ):
        mine[LAYERS] = norm(mine[LAYERS])
        for layer, true in enumerate(states):
            scale = float(true.abs().max())
            torch.testing.assert_close(mine[layer], true, rtol=0, atol=3e-5 * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_rows_are_bit_equal_in_any_company(family: str, runner: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not has_native_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16 natively")
    model = loaded(family, runner, dtype)
    together = features(model, TEXTS, MIXED, EVERY)
    for one, tokens in zip(together, TEXTS, strict=True):
        (whole,) = features(model, [tokens], [[len(tokens)]], EVERY)
        (single,) = features(model, [tokens], [[1] * len(tokens)], EVERY)
        for layer in EVERY:
            assert torch.equal(one[layer], whole[layer])
            assert torch.equal(one[layer], single[layer])


@pytest.mark.parametrize("runner", RUNNERS)
def test_only_what_was_asked_for_comes_and_logits_stay(runner: str) -> None:
    """In any order, a name twice, a pass without after a pass with."""
    model = loaded("smollm", runner)
    (every,) = features(model, TEXTS[:1], [[40]], EVERY)
    pages = Pages(12, 4)
    table, target = pages.table(40), model.make_runner(12, 4)
    batch = pages.batch([(table, 0, TEXTS[0])], target.min_rows)
    plain = target.forward(batch).logits.clone()
    passed = target.forward(batch, (3, 1, 3))
    assert set(passed.features) == {1, 3}
    assert all(torch.equal(rows, every[layer]) for layer, rows in passed.features.items())
    assert torch.equal(passed.logits, plain)
    assert not target.forward(batch).features
    assert target.forward(batch).seconds() > 0.0


@pytest.mark.parametrize("runner", [*RUNNERS, "fake"])
@pytest.mark.parametrize("layer", [-1, 4])
def test_unknown_layers_are_refused(runner: str, layer: int) -> None:
    target = FakeRunner(12, 4) if runner == "fake" else loaded("smollm", runner).make_runner(12, 4)
    pages = Pages(12, 4)
    batch = pages.batch([(pages.table(3), 0, [1, 2, 3])], target.min_rows)
    last = target.store.shape.num_layers
    with pytest.raises(ValueError, match=f"layer {layer}, but this model has 0 .* to {last} "):
        target.forward(batch, (0, layer))


def test_the_last_layer_is_that_of_a_plain_model() -> None:
    """Two layers, as all other tests have them: the number of layers is the model's own."""
    model = adopt_model(make_model("llama"), ModelConfig("tiny", runner="native"))
    (mine,) = features(model, [TEXTS[2]], [[9]], (1, 2))
    with torch.inference_mode():
        plain = eager("llama")(torch.tensor([TEXTS[2]]), output_hidden_states=True)
        last = eager("llama").model.norm(mine[2])
    torch.testing.assert_close(mine[1], plain.hidden_states[1][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(last, plain.hidden_states[2][0], rtol=0, atol=1e-4)


def test_the_fake_runners_features_name_their_row() -> None:
    pages, runner = Pages(12, 4), FakeRunner(12, 4)
    first, second = pages.table(5), pages.table(3)
    runner.forward(pages.batch([(first, 0, [7, 8, 9])]))
    kept = runner.forward(pages.batch([(second, 0, [5, 6, 7]), (first, 3, [4, 3])]), (1,)).features
    prefixes = [[5], [5, 6], [5, 6, 7], [7, 8, 9, 4], [7, 8, 9, 4, 3]]
    assert torch.equal(kept[1], torch.stack([fake_features(1, p) for p in prefixes]))


def test_a_devices_pass_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits before it is asked; then it says when the queue got there, in seconds."""
    said: list[str] = []

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device.type == "cuda"
            assert enable_timing
            self.number = len(said)

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("synchronize")

        def elapsed_time(self, other: Any) -> float:
            assert said == ["record", "record", "synchronize"]
            assert other is not self
            return 1500.0

    monkeypatch.setattr(passes, "torch", SimpleNamespace(Event=Event))
    end = start_timer(torch.device("cuda"))
    seconds = end()
    assert said == ["record", "record"]
    assert seconds() == 1.5
