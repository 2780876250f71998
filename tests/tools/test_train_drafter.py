"""`train-drafter`: a head learns a tiny target, is served, and goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from transformers import AutoTokenizer

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.draft.build import load_models
from engine.draft.heads.checkpoint import read_weights
from engine.draft.heads.config import HeadConfig, read_config
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.convert import convert_gguf
from engine.model.loader import load_model
from tests.draft.plain_eagle import PlainHead
from tests.fakes import ask, make_engine, run
from tests.tiny import write_gguf
from tests.tiny_models import make_model
from training import choices, features, lesson
from training.lesson import Acceptance, Lesson
from training.loss import distance
from training.options import HeadOptions
from training.run import make_config, train_head
from training.student import EagleStudent
from training.texts import Author, Text, load_tokenizer, read_prompts, read_texts, save_texts

ROOM = 256  # for one text


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that mostly repeat what they did after the last two tokens, and a tokenizer."""
    place = tmp_path_factory.mktemp("target")
    convert_gguf(write_gguf(place / "tiny.gguf"), place / "model")
    vocabulary = len(AutoTokenizer.from_pretrained(place / "model"))
    model = make_model(
        "smollm",
        num_hidden_layers=2,
        vocab_size=vocabulary,
        max_position_embeddings=ROOM,
        initializer_range=0.15,
    )
    model.save_pretrained(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def options(target: Path, tmp_path_factory: pytest.TempPathFactory) -> HeadOptions:
    """With texts that are written already, by an engine that was not measured first."""
    made = HeadOptions(
        target,
        source=str(target),
        out=tmp_path_factory.mktemp("heads") / "head",
        tokens=3_000,
        draft_vocab=200,
        depth=3,
        epochs=6,
        learning_rate=1e-3,
        threads=1,
    )
    loaded = load_model(target, ModelConfig(str(target), dtype="float32"))
    built = make_engine(loaded=loaded, num_pages=4000, max_sequences=64, max_batch_tokens=256)
    author = Author(built.engine, load_tokenizer(target), ROOM, seed=0)
    texts: list[Text] = []
    for text in author.write(time.monotonic() + 600):
        texts.append(text)
        if sum(len(t.answer) for t in texts) >= made.tokens:
            break
    save_texts(made.work / "text.npz", texts, target)
    return made


@pytest.fixture(scope="module")
def outcome(options: HeadOptions) -> tuple[Acceptance, list[Acceptance]]:
    """What comes out, and what was measured on the way."""
    measured: list[Acceptance] = []
    measure = Lesson.measure

    def remember(self: Lesson, numbers: list[int]) -> Acceptance:
        measured.append(measure(self, numbers))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
        patch.setattr(Lesson, "measure", remember)
        patch.setattr(choices, "HELD_OUT", 0.2)
        return train_head(options, progress), measured


def test_the_head_learns(outcome: tuple[Acceptance, list[Acceptance]]) -> None:
    found, (before, *epochs) = outcome
    assert found.tokens_per_pass(1) == 1 + found.by_depth[0]
    assert len(epochs) == 6
    assert found.by_depth == max((e.by_depth for e in epochs), key=sum)
    assert found.tokens_per_pass(3) > before.tokens_per_pass(3) + 0.2
    assert found.by_depth[0] >= found.by_depth[1] >= found.by_depth[2] > 0.2  # by chance: 0.004


def test_the_engine_keeps_what_was_learnt(options: HeadOptions, outcome: object) -> None:
    """Features, tokens and positions are the drafter's as they were the lesson's."""
    assert outcome
    served = load_model(options.target, ModelConfig(str(options.target), dtype="float32"))
    own = ModelConfig(str(options.out), dtype="float32")
    speculation = SpeculationConfig(mode="fixed", drafter="eagle", draft_head=own)
    told: list[str] = []
    config = EngineConfig(ModelConfig(str(options.target)), speculation=speculation)
    head = load_models(config, told.append)["eagle"]  # after a look whether both fit together
    assert told == ["Loading the model of drafter eagle"]
    built = make_engine(loaded=served, head=head, drafter="eagle", max_draft=3, num_pages=2000)
    texts = read_texts(options.work / "text.npz", options.target)
    greedy = [text for text in texts if text.greedy and len(text.answer) > 20][:8]
    done = run(built, [ask(str(i), t.prompt, len(t.answer)) for i, t in enumerate(greedy)])
    steps = [s for s in done.stats if s.drafted_by_position]
    tried = sum(s.drafted_by_position[0] for s in steps)
    kept = sum(s.accepted_by_position[0] for s in steps if s.accepted_by_position)
    assert tried > 50
    assert kept / tried > 0.3  # by chance: 0.004


def test_what_is_written(options: HeadOptions, outcome: object) -> None:
    assert outcome
    config = read_config(options.out)
    assert config == make_config(options)
    assert config.taps == (1, 2)
    weights = read_weights(options.out, config)
    assert weights["lm_head.weight"].shape == (200, 48)
    card = (options.out / "README.md").read_text()
    assert "--draft-head" in card
    assert "| 3 | " in card
    curve = json.loads((options.out / "curve.json").read_text())
    assert len(curve) == 6
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert (options.out / "curve.png").stat().st_size > 1000


def test_the_student_computes_what_the_drafter_will() -> None:
    """Row by row and round by round, against plain torch."""
    torch.manual_seed(0)
    model = make_model("llama")
    embeddings = model.get_input_embeddings().weight.detach()
    layer = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    config = HeadConfig(layer, 57, (1, 2))
    student = EagleStudent(config, embeddings, torch.arange(3, 60), 64)
    rows, tokens = torch.randn(2, 9, 64), torch.randint(97, (2, 9))
    with torch.no_grad():
        said = [student.logits(normed) for normed in student.rounds(rows, tokens, 3)]
    plain = PlainHead(config, student.state(), embeddings)
    for line in range(2):
        for row in (0, 4, 6):
            text = tokens[line].tolist()
            wanted = plain.rounds(rows[line, : row + 1], text[: row + 1], text[row + 1 : row + 3])
            found = torch.stack([logits[line, row] for logits in said])
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


class Interrupted:
    """A function that can be called so often, and is interrupted then."""

    def __init__(self, inner: Callable[..., float], calls: int) -> None:
        self._inner, self._left = inner, calls

    def __call__(self, *given: object) -> float:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._inner(*given)


def test_an_interrupted_lesson_goes_on(
    options: HeadOptions, outcome: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of an epoch it ends with the very weights of one that was not."""
    assert outcome
    ends = {}
    for name, stop in (("whole", 0), ("stopped", 3)):
        own = dataclasses.replace(options, out=tmp_path / name, epochs=1)
        shutil.copytree(options.work, own.work, ignore=shutil.ignore_patterns("lesson.pt"))
        monkeypatch.setattr(lesson, "_SAVE_SECONDS", -1.0)  # after every step
        if stop:
            interrupted = Interrupted(Lesson._step, stop)
            with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
                patch.setattr(Lesson, "_step", lambda *given: interrupted(*given))  # noqa: B023
                with pytest.raises(KeyboardInterrupt):
                    train_head(own, progress)
        with Progress(disable=True) as progress:
            train_head(own, progress)
        ends[name] = read_weights(own.out, read_config(own.out))
    assert ends["whole"].keys() == ends["stopped"].keys()
    for name, weight in ends["whole"].items():
        torch.testing.assert_close(ends["stopped"][name], weight, atol=0.02, rtol=0.1)


def test_what_cannot_be_done_is_said_early(
    options: HeadOptions, outcome: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome
    with Progress(disable=True) as progress:
        with pytest.raises(ConfigurationError, match="not empty"):
            train_head(options, progress)
        bad = tmp_path / "prompts.jsonl"
        bad.write_text('{"prompt": "a"}\n{"question": "b"}\n')
        own = dataclasses.replace(options, out=tmp_path / "head", prompts=bad)
        with pytest.raises(ConfigurationError, match=r"line 2 of .* is no prompt"):
            train_head(own, progress)
        assert not own.work.exists()
        full = dataclasses.replace(own, prompts=None)
        shutil.copytree(options.work, full.work)
        (full.work / "labels.npz").unlink()
        monkeypatch.setattr(features, "_SPARE_BYTES", 1 << 60)
        with pytest.raises(ConfigurationError, match=r"features need .* made so far is kept"):
            train_head(full, progress)
        assert (full.work / "text.npz").exists()
    for changes, why in (
        ({"kind": "hydra"}, "kind is 'hydra'"),
        ({"depth": 9}, "depth is 9"),
        ({"tokens": 0}, "tokens is 0"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"learning_rate": 1.0}, "learning_rate is 1"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            dataclasses.replace(options, **changes)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelNotSupported, match="gpt2 model"):
        make_config(dataclasses.replace(options, target=tmp_path))


def test_prompts_are_read_from_lines_and_objects(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('first\n\n  {"prompt": "second"}\n')
    assert read_prompts(path) == ["first", "second"]
    path.write_text("\n\n")
    with pytest.raises(ConfigurationError, match="holds no prompts"):
        read_prompts(path)


def test_the_distance_is_nothing_where_both_agree() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    q = logits.softmax(1)
    ids = torch.tensor([[0, 3], [-1, 2]])  # the second row's likeliest cannot be said
    weights = torch.tensor([[float(q[0, 0]), float(q[0, 3])], [0.9, 0.05]])
    assert distance(logits[:1], ids[:1], weights[:1]).item() == pytest.approx(0, abs=1e-6)
    assert distance(logits, ids, weights).item() == pytest.approx(0, abs=1e-6)
    worse = distance(logits[:1], ids[:1], weights[:1].flip(1)).item()
    assert worse > 0.1


def test_labels_stand_where_their_token_is_told() -> None:
    """Row t has the features of token t and the token behind, and tells the one behind that."""
    texts = [Text([1, 2, 3], [4, 5]), Text([7], [8, 9, 10])]
    rows = lesson.Lesson._rows
    own = object.__new__(Lesson)
    own.texts = texts
    own.features = Fake()  # type: ignore[assignment]
    assert rows(own, 0) == 4
    lines = Lesson._lines(own, [0, 1])
    assert lines.tokens.tolist() == [[2, 3, 4, 5], [8, 9, 10, 0]]
    # 4 and 5 are answer tokens 0 and 1; of the second text 8 (number 2) can be told by no row.
    assert lines.labels.tolist() == [[-1, 0, 1, -1], [3, 4, -1, -1]]


class Fake:
    """Features of two texts that are all zero."""

    states = torch.zeros(7, 1)
    answers = (0, 2, 5)

    def of(self, number: int) -> torch.Tensor:
        return torch.zeros((4, 3)[number], 1)
