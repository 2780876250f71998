"""The script that makes draft models, on a target of a few thousand random weights."""

from __future__ import annotations

import dataclasses
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress
from transformers import AutoTokenizer

from engine.config import ModelConfig
from engine.errors import ConfigurationError
from engine.model.convert import convert_gguf
from engine.model.loader import load_model
from engine.model.pairing import check_pair
from engine.model.sources import check_directory
from tests.fakes import make_engine
from tests.tiny import write_gguf
from tests.tiny_models import EOS, make_model
from tools import distill_draft
from tools.distill_draft import distill, load_target
from tools.distillation.agreement import Agreement
from tools.distillation.options import Options
from tools.distillation.training import choose, distance, make_student
from training.labels import (
    BATCH_TOKENS,
    HEAD_ROWS,
    TOP,
    Labels,
    last_states,
    make_batches,
    make_labels,
)
from training.texts import ANSWER_TOKENS, Author, Text, load_tokenizer, read_texts

ROOM = 512  # for one text


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, tied embeddings, and a tokenizer with a chat template."""
    place = tmp_path_factory.mktemp("target")
    convert_gguf(write_gguf(place / "tiny.gguf"), place / "model")
    vocabulary = len(AutoTokenizer.from_pretrained(place / "model"))
    model = make_model(
        "smollm",
        num_hidden_layers=4,
        vocab_size=vocabulary,
        max_position_embeddings=ROOM,
        initializer_range=0.15,
    )
    model.save_pretrained(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def options(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    place = tmp_path_factory.mktemp("drafts")
    return Options(
        target,
        source=str(target),
        out=place / "draft",
        text=place / "text",
        layers=2,
        tokens=4_000,
        epochs=8,
        threads=1,
        learning_rate=1e-2,
    )


@pytest.fixture(scope="module")
def outcome(options: Options) -> tuple[Agreement, list[Agreement]]:
    """What the script reports in the end, and what it has measured on the way."""
    measured: list[Agreement] = []
    measure = Agreement.measure

    def remember(*arguments: Any) -> Agreement:
        measured.append(measure(*arguments))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
        patch.setattr(Agreement, "measure", remember)
        patch.setattr(distill_draft, "HELD_OUT", 0.2)
        return distill(options, progress), measured


def test_the_draft_model_learns(
    outcome: tuple[Agreement, list[Agreement]], options: Options
) -> None:
    """Well what it was taught, which is most of the texts; and it helps with what it was not,
    which is too little here to say by how much."""
    trained, (untrained, *epochs, last) = outcome
    assert trained == last
    assert len(epochs) == 8
    assert len(trained.texts) > 1
    assert trained.share > untrained.share
    texts = read_texts(options.text / "text.npz", options.target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_draft, "HELD_OUT", 0.2)
        _, taught = distill_draft.split(texts, options.seed)
    target = load_target(options.target)
    before = Agreement.measure(make_student(target, options.layers), texts, taught)
    after = Agreement.measure(load_target(options.out), texts, taught)
    assert len(after.texts) > 10
    assert after.share > before.share + 0.15
    assert after.tokens_per_pass(4) > before.tokens_per_pass(4)


@pytest.mark.usefixtures("outcome")
def test_the_result_can_be_served(options: Options) -> None:
    check_directory(options.out)
    check_pair(options.target, options.out)
    target = load_model(options.target, ModelConfig(str(options.target), dtype="float32"))
    draft = load_model(options.out, ModelConfig(str(options.out), dtype="float32"))
    assert draft.shape.num_layers == 2
    assert draft.vocab_size == target.vocab_size
    assert draft.max_model_len == target.max_model_len
    assert draft.eos_token_ids == target.eos_token_ids


@pytest.mark.usefixtures("outcome")
def test_what_the_student_keeps(options: Options) -> None:
    ours, theirs = map(load_target, (options.out, options.target))
    ours, theirs = ours.state_dict(), theirs.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(ours[name], theirs[name])
    last = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(ours[last.format(1)], theirs[last.format(1)])


@pytest.mark.usefixtures("outcome")
def test_texts_are_what_the_target_says(options: Options) -> None:
    """Greedy answers, token by token, by a forward pass of transformers."""
    texts = read_texts(options.text / "text.npz", options.target)
    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target).float()
    assert sum(len(text.answer) for text in texts) >= options.tokens
    greedy = [text for text in texts if text.greedy]
    assert len(texts) > len(greedy) > len(texts) / 2
    for text in texts[:40]:
        assert tokenizer.decode(text.prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert text.answer[-1] == EOS or len(text.answer) == min(
            ANSWER_TOKENS, ROOM - len(text.prompt)
        )
    same = total = 0
    for text in greedy[:40]:
        logits = target(torch.tensor([text.prompt + text.answer])).logits[0]
        best = logits[len(text.prompt) - 1 : -1].argmax(1)
        same += int((best == torch.tensor(text.answer)).sum())
        total += len(text.answer)
    assert same > 0.95 * total  # the engine may have run in bfloat16


@pytest.mark.usefixtures("outcome")
def test_texts_are_used_again(options: Options, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in options.text.iterdir()}
    again = dataclasses.replace(options, out=tmp_path / "shallow", layers=1, epochs=0)
    with Progress(disable=True) as progress:
        distill(again, progress)
    assert {path.name: path.stat().st_mtime_ns for path in options.text.iterdir()} == before
    with pytest.raises(ConfigurationError, match="choose another --text"):
        read_texts(options.text / "text.npz", tmp_path)


@pytest.mark.usefixtures("outcome")
def test_labels_are_the_targets_probabilities(options: Options) -> None:
    texts = read_texts(options.text / "text.npz", options.target)[:9]
    target = load_target(options.target).float()
    with Progress(disable=True) as progress:
        labels = make_labels(target, texts, progress)
    for number, text in enumerate(texts):
        alone = target(torch.tensor([text.prompt + text.answer])).logits[0].softmax(1)
        wanted = alone[len(text.prompt) - 1 : -1].topk(TOP)
        [batch] = make_batches(texts, [number])
        ids, weights = labels.of(batch)
        assert batch.tokens.tolist() == text.answer
        torch.testing.assert_close(weights, wanted.values, atol=1e-3, rtol=0)
        assert (ids == wanted.indices).float().mean() > 0.99  # but for ties


def test_the_gradient_of_the_distance() -> None:
    """Against automatic differentiation of the formula, over rows that fill several parts."""
    torch.manual_seed(0)
    rows, hidden, vocabulary, top = HEAD_ROWS + 7, 8, 40, 5
    states = torch.randn(rows, hidden, requires_grad=True)
    head = torch.randn(vocabulary, hidden)
    best = (2 * torch.randn(rows, vocabulary)).softmax(1).topk(top)
    ids, weights = best.indices, best.values

    q = (states @ head.T).softmax(1)
    listed = q.gather(1, ids)
    q = torch.cat([listed, 1 - listed.sum(1, keepdim=True)], 1)
    p = torch.cat([weights, 1 - weights.sum(1, keepdim=True)], 1)
    w = torch.exp(-3 * torch.minimum(p, q).sum(1)).detach()
    divergence = (p * (p / q).log()).sum(1)
    wanted = (w * divergence + (1 - w) * (p - q).abs().sum(1) / 2).mean()
    (slope,) = torch.autograd.grad(wanted, states)

    found = distance(states, choose(head, ids, vocabulary), weights)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, states)[0], slope, atol=1e-6, rtol=1e-4)


def test_a_sample_stands_for_the_vocabulary() -> None:
    """Sums over what was chosen are, on average, sums over all."""
    torch.manual_seed(0)
    head = torch.rand(50, 3)
    ids = torch.tensor([[4, 9], [9, 30]])
    sums = []
    for _ in range(500):
        choice = choose(head, ids, 8)
        assert torch.equal(choice.head[choice.ids], head[ids])
        assert len(choice.head) == 3 + 8
        sums.append(choice.weight.exp() @ choice.head)
    mean = torch.stack(sums).mean(0)
    torch.testing.assert_close(mean, head.sum(0), rtol=0.03, atol=0)  # about four deviations
    assert torch.equal(choose(head, ids, 50).weight, torch.zeros(50))


def test_padding_changes_nothing() -> None:
    model = make_model("smollm", attention="sdpa")
    texts = [Text([5, 6, 7], [8, 9]), Text([11] * 20, [12] * 30), Text([13], [14, 15, 16])]
    [batch] = make_batches(texts, [0, 1, 2])
    assert batch.tokens.tolist() == [t for i in batch.texts for t in texts[i].answer]
    together = last_states(model, batch)
    for i in batch.texts:
        [single] = make_batches(texts, [i])
        alone = last_states(model, single)
        torch.testing.assert_close(together[: len(alone)], alone)
        together = together[len(alone) :]
    assert not len(together)


def test_batches_hold_every_text_once() -> None:
    texts = [Text([1] * (i % 13 + 1), [1] * (37 * i % 500 + 1)) for i in range(100)]
    batches = make_batches(texts, range(0, 100, 3))
    assert sorted(i for batch in batches for i in batch.texts) == list(range(0, 100, 3))
    assert max(batch.input_ids.numel() for batch in batches) <= BATCH_TOKENS
    assert len(batches) < 34


def test_tokens_per_pass() -> None:
    """Drafts of two: [yes yes] +1, [no] +1, [yes no] +1, [yes], the text being over."""
    agreement = Agreement([[bool(int(c)) for c in "1100101"]])
    assert agreement.share == 4 / 7
    assert agreement.tokens_per_pass(0) == 1
    assert agreement.tokens_per_pass(2) == 7 / 4
    assert agreement.at_depth(2) == 1 / 6


def test_a_target_without_a_chat_template_goes_on_from_its_first_token() -> None:
    tokenizer = SimpleNamespace(chat_template=None, bos_token_id=1)
    author = Author(make_engine().engine, tokenizer, context=48, seed=0)
    texts = list(islice(author.write(time.monotonic() + 60), 8))
    assert len(texts) == 8
    assert len({tuple(text.prompt) for text in texts}) > 4
    for text in texts:
        assert text.prompt[0] == 1
        assert 0 < len(text.answer) <= 48 - len(text.prompt)
    assert list(author.write(time.monotonic())) == []


def test_other_families_are_refused(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="qwen3 model"):
        load_target(tmp_path)


def test_nothing_is_overwritten(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["distill_draft", "--out", str(target)])
    with pytest.raises(SystemExit):
        distill_draft.parse()
    assert "is not empty" in capsys.readouterr().err


def test_labels_of_a_batch() -> None:
    labels = Labels(torch.arange(12).view(6, 2), torch.rand(6, 2).half(), [0, 1, 4, 6])
    texts = [Text([1], [1]), Text([1], [1] * 3), Text([1], [1] * 2)]
    [batch] = make_batches(texts, [2, 0])
    assert labels.of(batch)[0].tolist() == [[0, 1], [8, 9], [10, 11]]
