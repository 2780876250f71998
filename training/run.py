"""Makes a head for a target, from nothing but the target."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from engine.config import ModelConfig
from engine.draft.heads.checkpoint import write_head
from engine.draft.heads.config import HeadConfig, check_head
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.loader import load_model
from engine.model.weights import read_model
from training.choices import frequent, split
from training.curve import draw_curve
from training.features import Features, read_features
from training.lesson import Acceptance, Lesson
from training.options import HeadOptions
from training.student import EagleStudent
from training.texts import Text, read_prompts, read_texts, save_texts, write_texts

#: Families of targets whose layer a head's is made after, and the family of the head.
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen3"}

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def train_head(options: HeadOptions, progress: Progress) -> Acceptance:
    """Writes the head to `options.out`; goes on where an earlier run with the same options ended.

    Returns:
        How it does on texts held out.

    Raises:
        ConfigurationError: an option, a file or the disk does not allow it.
        ModelNotSupported: there is no way to make a head for this target.
    """
    began = time.monotonic()
    prompts = read_prompts(options.prompts) if options.prompts else []
    config = make_config(options)
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigurationError(
            f"out is {str(options.out)!r}, which is not empty; remove it or choose another."
        )
    options.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    place = options.work / "text.npz"
    if not place.exists():
        save_texts(place, write_texts(options, progress, prompts), options.target)
    texts = [text for text in read_texts(place, options.target) if text.answer]
    held_out, others = split(texts, options.seed)
    ids, coverage = frequent([texts[i] for i in others], config.vocab, config.draft_vocab)
    progress.console.print(
        f"{len(texts)} answers of {sum(len(t.answer) for t in texts)} tokens, "
        f"{coverage:.1%} of which are among {len(ids)} words"
    )
    features = _features(options, config, texts, progress)
    student = _student(options, config, ids, features)
    lesson = Lesson(student, texts, features, options)
    left = 60 * options.minutes - (time.monotonic() - began)
    progress.console.print(f"before training, held out {lesson.measure(held_out)}")
    found = lesson.train(others, held_out, max(1.0, left), progress)
    _write(options, config, lesson, found, coverage)
    return found


def make_config(options: HeadOptions) -> HeadConfig:
    """The head's configuration, after the target's.

    Raises:
        ModelNotSupported: the target is of another family.
    """
    try:
        own = json.loads((options.target / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{options.target} holds no model: {error}") from error
    family = FAMILIES.get(own.get("model_type"))
    if family is None:
        raise ModelNotSupported(
            f"{options.target.name} is a {own.get('model_type')} model; heads are made for "
            f"{', '.join(FAMILIES)}."
        )
    layer: dict[str, Any] = {name: own[name] for name in _SHAPE if own.get(name) is not None}
    heads = own["num_attention_heads"]
    layer["head_dim"] = own.get("head_dim") or own["hidden_size"] // heads
    layer |= {"model_type": family, "num_hidden_layers": 1, "hidden_act": "silu"}
    layer |= {n: own[n] for n in ("rope_theta", "rope_scaling", "rope_parameters") if own.get(n)}
    depth = int(own["num_hidden_layers"])
    taps = tuple(sorted({max(1, depth // 6), max(1, depth // 2), depth}))
    return HeadConfig(layer, min(options.draft_vocab, int(own["vocab_size"])), taps)


def _features(
    options: HeadOptions, config: HeadConfig, texts: list[Text], progress: Progress
) -> Features:
    target = load_model(options.target, ModelConfig(str(options.target)))
    assert config.taps is not None
    return read_features(options.work, texts, target, config.taps, progress)


def _student(
    options: HeadOptions, config: HeadConfig, ids: torch.Tensor, features: Features
) -> EagleStudent:
    target: Any = read_model(options.target, torch.float32).requires_grad_(False)
    embeddings = target.get_input_embeddings().weight.detach()
    student = EagleStudent(config, embeddings, ids, features.states.shape[1])
    student.begin_as(target)
    return student


def _write(
    options: HeadOptions,
    config: HeadConfig,
    lesson: Lesson,
    found: Acceptance,
    coverage: float,
) -> None:
    own = json.loads((options.target / "config.json").read_text("utf-8"))
    verifier = {"name_or_path": options.source, "architectures": own.get("architectures") or []}
    weights = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in lesson.best.items()
    }
    write_head(options.out, config, weights, verifier)
    check_head(options.target, options.out)
    curve = [
        {"steps": steps, "loss": loss, "kept": list(kept)}
        for steps, loss, kept in lesson.state.curve
    ]
    (options.out / "curve.json").write_text(json.dumps(curve, indent=2) + "\n", "utf-8")
    draw_curve(options.out / "curve.png", lesson.state.curve)
    _write_card(options.out / "README.md", options, config, found, coverage)


def _write_card(
    path: Path, options: HeadOptions, config: HeadConfig, found: Acceptance, coverage: float
) -> None:
    depths = "\n".join(f"| {d} | {s:.1%} |" for d, s in enumerate(found.by_depth, start=1))
    path.write_text(
        f"""# A drafter for {options.source}

An EAGLE-3 head: one decoder layer over the hidden states of layers \
{", ".join(map(str, config.taps or ()))} of the target and the embedding of the next token. It
guesses among {config.draft_vocab} of {config.vocab} tokens, {coverage:.1%} of the answers it
was trained on. It can change the time an answer takes, and never the answer.

Made by `specserve train-drafter --target {options.source} --kind {options.kind}` with \
{options.tokens} tokens wanted, {options.minutes:g} minutes, seed {options.seed},
from {"prompts of a file" if options.prompts else "questions that the target thought of itself"} \
and the target's own answers.

On greedy answers held out, a draft is kept to

| depth | share |
|---|---|
{depths}

which makes {found.tokens_per_pass(len(found.by_depth)):.2f} tokens a pass of the target.

```sh
specserve serve --model {options.source} --drafters eagle,lookup --draft-head {options.out}
```
""",
        encoding="utf-8",
    )
