"""Makes a draft model for a target: the target's first layers, taught to say what it says.

Everything is local, and no text is needed, for the target writes it::

    python tools/distill_draft.py --target pypi:NAME==VERSION --out drafts/mine
    specserve serve --drafter model --draft-model drafts/mine

1. *Text.* The target is given its chat template up to the user's turn and writes a question, then
   answers it: greedily for the most part, some at temperature 0.8. A target without a template
   starts from its first token and goes on from there.
2. *Labels.* One pass of the target over the text notes its most likely tokens at every position,
   and their probabilities.
3. *Training.* The draft model keeps the target's embeddings, output layer and final norm, which
   stay as they are. Its layers begin as the target's first and learn to give the target's
   probabilities: by Kullback-Leibler divergence where they are far off, by total variation, which
   is what decides how many drafts are accepted, where they are near.
4. *Test.* On texts held out, the share of greedy tokens that both agree on, and the tokens per pass
   that this makes at each draft length: what the server will see on text of this kind. The best
   epoch by this measure is kept.

Text and labels are kept beside the result and used again, so that another `--layers` costs the
training alone. On two idle cores the defaults take about three quarters of an hour; on a machine
that has other work, `--threads 1` gets more done.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from transformers.utils import logging as transformers_logging

from engine.errors import EngineError
from engine.model.pairing import check_pair
from engine.model.sources import DEFAULT_SOURCE, resolve
from engine.model.weights import read_model
from tools.distillation.agreement import Agreement
from tools.distillation.options import Options
from tools.distillation.training import Lesson, make_student
from training.labels import Labels, make_labels
from training.texts import Text, read_texts, save_texts, write_texts

HELD_OUT = 0.05  # of the texts
TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "spiece",
    "chat_template",
    "generation_config",
)


def distill(options: Options, progress: Progress) -> Agreement:
    """Writes the draft model to `options.out`.

    Returns:
        How it does on texts held out.
    """
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    deadline = time.monotonic() + 60 * options.minutes
    place = options.text / "text.npz"
    if not place.exists():
        save_texts(place, write_texts(options, progress), options.target)
    texts = read_texts(place, options.target)
    tokens = sum(len(text.answer) for text in texts)
    progress.console.print(f"{len(texts)} answers of {tokens} tokens in {place}")
    target = load_target(options.target)
    labels = read_labels(options, target, texts, progress)
    held_out, others = split(texts, options.seed)
    student = make_student(target, options.layers)
    del target
    untrained = Agreement.measure(student, texts, held_out)
    progress.console.print(f"before training, held out: {untrained}")
    lesson = Lesson(student, texts, labels, options, deadline)
    lesson.train(others, held_out, progress)
    save(student, options)
    return Agreement.measure(student, texts, held_out)


def split(texts: list[Text], seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts held out, which are greedy, and of those to train on."""
    numbers = random.Random(seed).sample(range(len(texts)), len(texts))
    greedy = [i for i in numbers if texts[i].greedy]
    if len(greedy) < 2:
        sys.exit(f"{len(greedy)} greedy answers are too few; allow more --tokens or --minutes.")
    held_out = greedy[: max(1, int(len(greedy) * HELD_OUT))]
    return held_out, sorted(set(numbers) - set(held_out))


def load_target(directory: Path) -> Any:
    """The target, in bfloat16 and unable to learn."""
    target = read_model(directory, torch.bfloat16)
    target.set_attn_implementation("sdpa")
    if target.config.model_type != "llama":
        sys.exit(
            f"{directory} is a {target.config.model_type} model; only llama is distilled here."
        )
    return target.requires_grad_(False).eval()


def read_labels(options: Options, target: Any, texts: list[Text], progress: Progress) -> Labels:
    """The labels of the texts, made unless they lie beside them."""
    path = options.text / "labels.npz"
    if not path.exists():
        labels = make_labels(target, texts, progress)
        ids, weights = labels.ids.numpy(), labels.weights.numpy()
        np.savez(path, starts=np.array(labels.starts), ids=ids, weights=weights)
        return labels
    stored = np.load(path, allow_pickle=False)
    starts = stored["starts"].tolist()
    if starts[-1] != sum(len(text.answer) for text in texts):
        sys.exit(f"{path} belongs to other texts; delete it.")
    return Labels(torch.from_numpy(stored["ids"]), torch.from_numpy(stored["weights"]), starts)


def save(student: Any, options: Options) -> None:
    """Weights, configuration and the target's tokenizer; refuses to be another's."""
    options.out.mkdir(parents=True, exist_ok=True)
    student.save_pretrained(options.out)
    for path in options.target.iterdir():
        if path.name.startswith(TOKENIZER_FILES):
            shutil.copyfile(path, options.out / path.name)
    check_pair(options.target, options.out)


def main() -> int:
    """Reads the flags, makes the model, says how to serve it."""
    options = parse()
    transformers_logging.disable_progress_bar()
    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn()) as progress:
        try:
            agreement = distill(options, progress)
        except EngineError as error:
            sys.exit(str(error))
    depths = ", ".join(f"{agreement.at_depth(d):.1%}" for d in range(1, 9))
    passes = ", ".join(f"{k}: {agreement.tokens_per_pass(k):.2f}" for k in (1, 2, 3, 4, 6, 8))
    print(f"held-out greedy text: {agreement}")
    print(f"accepted to depth 1 to 8: {depths}")
    print(f"tokens per pass by draft length: {passes}")
    print("serve it with:\n")
    print(
        f"    specserve serve --model {options.source} --drafter model --draft-model {options.out}"
    )
    return 0


def parse() -> Options:
    """The options from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_SOURCE, help="directory, hub id or package")
    parser.add_argument("--out", type=Path, required=True, help="directory of the draft model")
    parser.add_argument("--text", type=Path, help="where text and labels are kept (OUT-text)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300_000, help="of answers to generate")
    parser.add_argument("--minutes", type=float, default=45.0, help="for everything together")
    parser.add_argument("--epochs", type=int, default=8, help="at most, within the time")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = vars(parser.parse_args())
    source, out = given["target"], given["out"]
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty; remove it or choose another directory.")
    given["text"] = given["text"] or out.with_name(f"{out.name}-text")
    return Options(**{**given, "target": resolve(source), "source": source})


if __name__ == "__main__":
    sys.exit(main())
